"""What the tests of the ops under torch.compile share: a rank's workspace and inputs, and what runs their cases."""

from __future__ import annotations

import os
import traceback

import pytest
import torch

import dcpkernels
from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.integrations.torch_ops import TraceableWorkspace
from dcpkernels.testing import merge_inputs
from tests.a2a_calls import same_bits
from tests.gather_calls import Context

HEADS, DIM, TOKENS, QUERY_DIM, CHUNK_ROWS, KV_DIM = 12, 16, 8, 40, 12, 16
CONFIG = WorkspaceConfig(
    HEADS, DIM, TOKENS, torch.float32, num_lanes=2, query_head_dim=QUERY_DIM, query_dtype=torch.float32,
    # A rank may still be compiling.
    timeout_s=150.0, first_call_timeout_s=150.0, kv_chunk_rows=CHUNK_ROWS, kv_dim=KV_DIM, kv_dtype=torch.float32,
)  # fmt: skip


# Else Inductor compiles a program for each instruction set, to see whether it runs: three quarters of the time.
INDUCTOR = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}


class Rank:
    """What a case works on: one rank's workspace, and inputs of any number of tokens."""

    def __init__(self, workspace):
        self.workspace, self.traceable = workspace, TraceableWorkspace(workspace)
        self.num_ranks, self.rank = workspace.num_ranks, workspace.rank

    def partials(self, num_tokens=4, kind="empty", seed=0):
        outs, lses = merge_inputs(self.num_ranks, num_tokens, HEADS, DIM, torch.float32, kind=kind, seed=seed)
        return outs[self.rank], lses[self.rank]

    def query(self, num_tokens=4, head_dim=QUERY_DIM, seed=0):
        generator = torch.Generator().manual_seed(100 * seed + self.rank)
        return torch.randn(num_tokens, HEADS // self.num_ranks, head_dim, generator=generator)

    def lengths(self, num_tokens):
        """One sequence for each token but the last, which is padding; the first one has nothing on this rank."""
        seq_lens = torch.ones(max(num_tokens - 1, 0), dtype=torch.int32)
        seq_lens[:1] = 0
        return {"seq_lens": seq_lens, "query_start_loc": torch.arange(len(seq_lens) + 1, dtype=torch.int32)}

    def context(self, lens=(9, 0, 14), dtype=torch.float32):
        """(cache, plan) of this rank, and all rows in sequence order. Small numbers, to calculate with."""
        context = Context(lens, self.num_ranks, KV_DIM, dtype, block_size=4)
        cache, rows = (
            part.float().nan_to_num(1).clamp(-9, 9).to(dtype) for part in (context.caches[self.rank], context.rows)
        )
        return cache, context.plan(self.rank, CHUNK_ROWS), rows

    def merged(self, *partials, **arguments):
        return dcpkernels.a2a_lse_reduce(*partials, workspace=self.workspace, **{"lse_base": "e", **arguments})

    def gathered(self, query, **arguments):
        """In a tensor of its own, by the way without `out`."""
        view = dcpkernels.query_gather(query, workspace=self.workspace, **arguments)
        result = view.clone()
        dcpkernels.release_query(workspace=self.workspace, lane=arguments.get("lane", 0))
        return result

    def counted(self, function, *arguments):
        """Its result, and the calls that the rank made in it: those of the workspace, and those that `state` counts."""
        counts = [self.workspace.stats()["num_calls"], *self.traceable.state.tolist()]
        result = function(*arguments)
        after = [self.workspace.stats()["num_calls"], *self.traceable.state.tolist()]
        return result, [b - a for a, b in zip(counts, after, strict=True)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for i, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(left, right), i


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="inductor")


def run_cases(group, cases, cache, config=CONFIG):
    """What went wrong, by case."""
    os.environ.update(INDUCTOR, TORCHINDUCTOR_CACHE_DIR=cache)
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes besides the ranks
    rank, wrong = Rank(Workspace(group, config=config)), {}
    for case in cases:
        try:
            case(rank)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  the other cases are to run
            wrong[case.__name__] = traceback.format_exc()
    return wrong
