"""What the tests of a2a_lse_reduce share: one call as all ranks make it, and its result checked against the truth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError
from dcpkernels.heap.group import as_group
from dcpkernels.testing import assert_merge_close, merge_inputs, run_ranks


@dataclass
class Call:
    """The arguments of one call on all ranks: [W, T, H, D] and [W, T, H], lengths [W, S] and starts [S + 1]."""

    outs: torch.Tensor
    lses: torch.Tensor
    lse_base: str = "e"
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    lane: int = 0

    @property
    def num_ranks(self) -> int:
        return self.outs.shape[0]

    def arguments(self, rank: int) -> dict[str, Any]:
        """What `rank` passes, but for workspace, out and lse_out."""
        return {
            "partial_out": self.outs[rank],
            "partial_lse": self.lses[rank],
            "lse_base": self.lse_base,
            "seq_lens": None if self.seq_lens is None else self.seq_lens[rank],
            "query_start_loc": self.query_start_loc,
            "lane": self.lane,
        }

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Asserts that out [T, H, D] and lse [T, H], put together from all ranks, are the truth within its bound."""
        lengths = {"seq_lens": self.seq_lens, "query_start_loc": self.query_start_loc}
        assert_merge_close(out, lse, self.outs, self.lses, lse_base=self.lse_base, **lengths)


def make_call(num_ranks, num_tokens, num_heads, head_dim, dtype, *, kind="spread", seed=0, **fields) -> Call:
    outs, lses = merge_inputs(num_ranks, num_tokens, num_heads, head_dim, dtype, kind=kind, seed=seed)
    return Call(outs, lses, **fields)


def config_for(call: Call, **fields) -> WorkspaceConfig:
    _, num_tokens, num_heads, head_dim = call.outs.shape
    fields = {"max_num_tokens": max(1, num_tokens), "dtype": call.outs.dtype} | fields
    return WorkspaceConfig(num_heads, head_dim, **fields)


def run_calls(calls: list[Call], **fields) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes the calls one after the other on thread ranks, in one workspace that is as large as the largest needs.

    Returns, for each call, (out [T, H, D], lse [T, H]): the heads of all ranks put together. `fields` are those of
    WorkspaceConfig.
    """
    config = config_for(max(calls, key=lambda call: call.outs.shape[1]), **fields)

    def body(group):
        with Workspace(group, config=config) as workspace:
            return [merge(workspace, call) for call in calls]

    return assemble(run_ranks(body, calls[0].num_ranks))


def assemble(by_rank: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[rank][call](out [T, H/W, D], lse [T, H/W]) -> [call](out [T, H, D], lse [T, H])."""
    return [
        (torch.cat([out for out, _ in ranks], dim=1), torch.cat([lse for _, lse in ranks], dim=1))
        for ranks in zip(*by_rank, strict=True)
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that two NaN and the two zeros compare as what they are."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@dataclass
class Raised:
    """What a call came to, in a form that travels between processes: `error` is None when it returned."""

    error: BaseException | None
    seconds: float
    value: Any = None


def attempt(fn, *args, **kwargs) -> Raised:
    start = time.monotonic()
    error = value = None
    try:
        value = fn(*args, **kwargs)
    except (DcpError, KeyboardInterrupt) as caught:
        error = caught
    return Raised(error, time.monotonic() - start, value)


def meet(group: Any, timeout_s: float = 20.0) -> None:
    """A barrier of the group, by no means of the workspace."""
    as_group(group).all_gather_object(None, timeout_s=timeout_s)


def merge(workspace: Workspace, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the call: (out, lse)."""
    return a2a_lse_reduce(workspace=workspace, return_lse=True, **call.arguments(workspace.rank))


def check_with_peers(group: Any, workspace: Workspace, call: Call) -> None:
    """The op works in this workspace; every rank has to come."""
    results = as_group(group).all_gather_object(merge(workspace, call), timeout_s=20)
    call.check(torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 1))


def own_mappings() -> list[str]:
    """This process's mappings of regions, one line of /proc/self/maps each."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "memfd:dcpkernels" in line]
