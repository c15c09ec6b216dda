"""What a bench rank checks before and after it has timed, against the fp64 reference and the bound of docs/protocol.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

import dcpkernels
from dcpkernels import reference
from dcpkernels.cli import stamps
from dcpkernels.testing import error_bound, max_err_over_bound, merge_inputs

_HARD_KINDS = ("dominant", "empty", "all_empty")
_HARD_ROWS = 4  # enough to have every kind of emptiness; the reference is slow

_LSE_SPREAD = 12.0
_SEEDS_PER_RUN = 4096  # more than there are ranks


def rank_inputs(
    rank: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """partial_out [T, H, D] and natural-log partial_lse [T, H] fp32 of one rank, which any other can make as well.

    No shard is empty, which is the dear case: every payload is moved and merged. The LSEs of a row are within 12, and can
    be shifted (`stamps.shift_lse`).
    """
    shared = torch.Generator().manual_seed(seed * _SEEDS_PER_RUN + _SEEDS_PER_RUN - 1)
    own = torch.Generator().manual_seed(seed * _SEEDS_PER_RUN + rank)
    height = torch.randn(num_tokens, num_heads, generator=shared) * 20
    lse = height + torch.rand(num_tokens, num_heads, generator=own) * _LSE_SPREAD
    return torch.randn(num_tokens, num_heads, head_dim, generator=own).to(dtype), stamps.for_shifts(lse)


class Truth(NamedTuple):
    """Of one rank's output [T, Hr, D], fp64."""

    exact: torch.Tensor
    bound: torch.Tensor

    def max_err_over_bound(self, out: torch.Tensor) -> float:
        return max_err_over_bound(out.cpu(), self.exact, self.bound)


def truth_of_timed_inputs(
    rank: int, num_ranks: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, *, seed: int
) -> Truth:
    """For `rank_inputs`. One rank's input at a time."""
    heads = _heads_of(rank, num_ranks, num_heads)
    shards = []
    for peer in range(num_ranks):
        partial_out, partial_lse = rank_inputs(peer, num_tokens, num_heads, head_dim, dtype, seed=seed)
        shards.append((partial_out[:, heads].clone(), partial_lse[:, heads].clone()))
    partial_outs, partial_lses = (torch.stack(parts) for parts in zip(*shards, strict=True))
    exact, _ = reference.a2a_lse_reduce(partial_outs, partial_lses, lse_base="e")
    return Truth(exact, error_bound(partial_outs, partial_lses, lse_base="e", out_dtype=dtype))


def verify_hard_inputs(workspace: dcpkernels.Workspace, num_tokens: int, *, lse_base: str, seed: int) -> float:
    """Largest error / bound of the op for dominant, empty and all-empty shards. Collective."""
    config, num_ranks = workspace.config, workspace.num_ranks
    heads = _heads_of(workspace.rank, num_ranks, config.num_heads)
    worst = 0.0
    for kind in _HARD_KINDS:
        partial_outs, partial_lses = merge_inputs(
            num_ranks,
            min(num_tokens, _HARD_ROWS),
            config.num_heads,
            config.head_dim,
            config.dtype,
            kind=kind,
            seed=seed,
        )
        own = (parts[workspace.rank].to(workspace.device) for parts in (partial_outs, partial_lses))
        out = dcpkernels.a2a_lse_reduce(*own, workspace=workspace, lse_base=lse_base).cpu()
        partial_outs, partial_lses = partial_outs[:, :, heads], partial_lses[:, :, heads]
        exact, _ = reference.a2a_lse_reduce(partial_outs, partial_lses, lse_base="e")
        bound = error_bound(partial_outs, partial_lses, lse_base="e", out_dtype=config.dtype)
        worst = max(worst, max_err_over_bound(out, exact, bound))
    return worst


def _heads_of(rank: int, num_ranks: int, num_heads: int) -> slice:
    num_local_heads = num_heads // num_ranks
    return slice(rank * num_local_heads, (rank + 1) * num_local_heads)
