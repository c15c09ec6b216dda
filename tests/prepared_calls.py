"""Calls as a captured graph makes them, where there is no graph: the addresses stay, the contents change, and the host
passes nothing else."""

from __future__ import annotations

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, make_call
from tests.a2a_ways import WAYS

REPEATABLE = [name for name, way in WAYS.items() if not way.hands_out]
every_repeatable_way = pytest.mark.parametrize("way", REPEATABLE)
PATIENT = {"timeout_s": 20.0, "first_call_timeout_s": 20.0}


class Prepared:
    """One rank's part of a call as a graph captures it: inputs and outputs at addresses that stay. `repeat` changes what
    is in them and makes the call again."""

    def __init__(self, call, rank: int) -> None:
        self.lane, self.lse_base = call.lane, call.lse_base
        self.tensors = {name: value.clone() for name, value in self.inputs(call, rank).items()}
        num_tokens, num_heads, head_dim = call.outs.shape[1:]
        self.out = torch.empty(num_tokens, num_heads // call.num_ranks, head_dim, dtype=call.outs.dtype)
        self.lse_out = torch.empty(self.out.shape[:2])

    @staticmethod
    def inputs(call, rank: int):
        return {name: value for name, value in call.arguments(rank).items() if isinstance(value, torch.Tensor)}

    def repeat(self, workspace: Workspace, call, after=lambda: None):
        for name, value in self.inputs(call, workspace.rank).items():
            self.tensors[name].copy_(value)
        self.out.fill_(float("nan")), self.lse_out.fill_(float("nan"))
        after()
        outputs = {"out": self.out, "lse_out": self.lse_out}
        a2a_lse_reduce(**self.tensors, **outputs, workspace=workspace, lse_base=self.lse_base, lane=self.lane)
        return self.out.clone(), self.lse_out.clone()


def calls_of(num_calls: int, *shape, lengths: bool = False, seed: int = 0, kind: str = "empty"):
    """Calls of one shape with other contents each time; with `lengths`, those and what rows they are of change too."""
    calls = [make_call(*shape, torch.bfloat16, kind=kind, seed=seed + i) for i in range(num_calls)]
    for i, call in enumerate(calls if lengths else []):
        num_ranks, num_tokens = call.outs.shape[:2]
        choose = torch.Generator().manual_seed(i)
        call.seq_lens = torch.randint(0, 3, (num_ranks, 3), generator=choose).int()
        cuts = torch.randint(0, num_tokens + 1, (3,), generator=choose).sort().values
        call.query_start_loc = torch.tensor([0, *cuts.tolist()]).int()  # the last one leaves padding at times
    return calls


def run_each(way: str, num_ranks: int, like, body, *, max_num_tokens: int, **fields):
    """[(out, lse)] of the calls that `body(workspace, group)` makes on each rank."""
    config = WAYS[way].config(like, max_num_tokens=max_num_tokens, **PATIENT, **fields)

    def rank(group):
        with WAYS[way].open(group, config) as workspace:
            return body(workspace, group)

    return assemble(run_ranks(rank, num_ranks))
