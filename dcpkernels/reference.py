"""The truth for every op, for all ranks at once, in plain torch and fp64. Shares no code with any kernel.

Tests, demos and `self_check` compare against these functions. They are meant to be read, not to be fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dcpkernels.errors import DcpInvalidArgument


class MergeWeights(NamedTuple):
    """How the shards of each row are weighted. W ranks, T tokens, H heads; all fp64 but `live`."""

    live: torch.Tensor  # [W, T, H] bool: the shard is not empty
    gap: torch.Tensor  # [W, T, H] how far the LSE is below the largest live one, natural-log units; 0 if empty
    weight: torch.Tensor  # [W, T, H] normalised: sums to 1 over W; 0 if empty
    lse: torch.Tensor  # [T, H] merged LSE in the given base; -inf when all are empty


def a2a_lse_reduce(
    partial_outs: torch.Tensor,
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges partial attention over W shards of the KV cache, for all ranks at once.

    With b the base of the LSE, over the shards i that are not empty:

        lse = log_b sum_i b^lse_i        w_i = b^(lse_i - lse)        out = sum_i w_i * out_i

    This is the exact recombination of a softmax that was computed in pieces, each with its own maximum and
    normaliser: the online softmax of Milakov and Gimelshein (2018), used per tile in FlashAttention (Dao et
    al., 2022) and across independent splits of the KV cache in Flash-Decoding (Dao et al., 2023).

    Args:
        partial_outs: [W, T, H, D], any floating dtype. Rank r's partial output of all H heads is
            partial_outs[r].
        partial_lses: [W, T, H], any floating dtype.
        lse_base: "e" or "2", the base of the logarithm in partial_lses and in the returned LSE.
        seq_lens: [W, S] integers, local KV length of each sequence on each rank. A shard of length 0 is empty
            whatever its LSE says. Without query_start_loc sequence s is token s, so S must be T.
        query_start_loc: [S+1] integers; tokens query_start_loc[s] .. query_start_loc[s+1]-1 belong to
            sequence s. A token that belongs to no sequence is padding and empty on every rank.

    Returns:
        (out [T, H, D], lse [T, H]), both fp64. Rank r's share of out is heads r*H/W .. (r+1)*H/W - 1. A shard
        whose LSE is -inf, +inf or NaN is empty. Payload of an empty shard is not used. All empty: out is 0
        and lse is -inf.

    Raises:
        DcpInvalidArgument: shapes that do not fit together, or an unknown base.
    """
    _require(partial_outs.dim() == 4, "partial_outs must be [W, T, H, D]", tuple(partial_outs.shape))
    _require(
        partial_lses.shape == partial_outs.shape[:3],
        f"partial_lses must be [W, T, H] = {list(partial_outs.shape[:3])}",
        tuple(partial_lses.shape),
    )
    w = merge_weights(partial_lses, lse_base=lse_base, seq_lens=seq_lens, query_start_loc=query_start_loc)
    # Select, do not multiply: 0 * NaN is NaN.
    payload = torch.where(w.live[..., None], partial_outs.double(), 0.0)
    return (w.weight[..., None] * payload).sum(0), w.lse


def merge_weights(
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> MergeWeights:
    """The weights of `a2a_lse_reduce`, which describes the arguments. Raises DcpInvalidArgument."""
    _require(lse_base in ("e", "2"), 'lse_base must be "e" or "2"', lse_base)
    _require(partial_lses.dim() == 3, "partial_lses must be [W, T, H]", tuple(partial_lses.shape))
    num_ranks, num_tokens, _ = partial_lses.shape
    _require(num_ranks >= 1, "there must be at least one rank", num_ranks)
    ln_base = 1.0 if lse_base == "e" else math.log(2.0)

    lses = partial_lses.double()
    has_tokens = _rows_with_tokens(num_ranks, num_tokens, seq_lens, query_start_loc).to(lses.device)
    live = torch.isfinite(lses) & has_tokens[..., None]
    top = torch.where(live, lses, -math.inf).amax(0)
    any_live = live.any(0)
    # Scale the difference, not the two logarithms: with |lse| in the thousands the other order loses digits.
    gap = torch.where(live, (top - lses) * ln_base, 0.0)
    unscaled = torch.where(live, torch.exp(-gap), 0.0)
    total = torch.where(any_live, unscaled.sum(0), 1.0)
    lse = torch.where(any_live, top + torch.log(total) / ln_base, -math.inf)
    return MergeWeights(live=live, gap=gap, weight=unscaled / total, lse=lse)


def _rows_with_tokens(
    num_ranks: int, num_tokens: int, seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None
) -> torch.Tensor:
    """[W, T] bool: what the lengths say about each row; all true when there are none."""
    if query_start_loc is None:
        if seq_lens is None:
            return torch.ones(num_ranks, num_tokens, dtype=torch.bool)
        _require(
            tuple(seq_lens.shape) == (num_ranks, num_tokens),
            f"seq_lens without query_start_loc must be [W, T] = [{num_ranks}, {num_tokens}]",
            tuple(seq_lens.shape),
        )
        return seq_lens.cpu() > 0
    _require(
        query_start_loc.dim() == 1 and len(query_start_loc) >= 1,
        "query_start_loc must be [S+1]",
        tuple(query_start_loc.shape),
    )
    starts = query_start_loc.tolist()
    num_seqs = len(starts) - 1
    _require(starts == sorted(starts), "query_start_loc must not decrease", starts)
    if seq_lens is not None:
        _require(
            tuple(seq_lens.shape) == (num_ranks, num_seqs),
            f"seq_lens must be [W, S] = [{num_ranks}, {num_seqs}]",
            tuple(seq_lens.shape),
        )
    rows = torch.zeros(num_ranks, num_tokens, dtype=torch.bool)
    for s in range(num_seqs):
        rows[:, starts[s] : starts[s + 1]] = True if seq_lens is None else (seq_lens[:, s] > 0).cpu()[:, None]
    return rows


def _require(holds: bool, what: str, given: object) -> None:
    if not holds:
        raise DcpInvalidArgument(f"reference.a2a_lse_reduce: {what} (got {given!r})")
