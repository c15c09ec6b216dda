"""Inputs for a merge that are hard on purpose: wide LSE ranges, dominant shards, empty shards full of NaN."""

from __future__ import annotations

import torch

KINDS = ("spread", "dominant", "empty", "all_empty")

_EMPTY_LSES = (float("-inf"), float("inf"), float("nan"))


def merge_inputs(
    num_ranks: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kind: str,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs [W, T, H, D] in `dtype`, LSEs [W, T, H] in fp32: the same for the same arguments.

    kind:
        "spread"     normal payload; the LSEs of a row lie within 12 of each other, far from 0 in some rows.
        "dominant"   one shard of each row outweighs the others by e^4 to e^12 (a third less range in base 2)
                     and its payload is 0: the result is what the small weights contribute, so their error is
                     all that shows.
        "empty"      about half of the shards are empty, at least one of each row is not. An empty shard's LSE
                     is -inf, +inf or NaN in turn, its payload NaN.
        "all_empty"  like "empty", but every other row (token and head), the first included, is empty on all.
    """
    if kind not in KINDS:
        raise ValueError(f"merge_inputs: kind must be one of {KINDS} (got {kind!r})")
    gen = torch.Generator().manual_seed(seed)
    rows = (num_ranks, num_tokens, num_heads)
    outs = torch.randn(*rows, head_dim, generator=gen)
    # Rows sit at different heights, as the LSEs of short and of long sequences do.
    height = torch.randn(1, num_tokens, num_heads, generator=gen) * 20
    lses = height + torch.rand(rows, generator=gen) * 12

    chosen = torch.randint(num_ranks, (1, num_tokens, num_heads), generator=gen)
    is_chosen = torch.arange(num_ranks).view(-1, 1, 1) == chosen
    if kind == "dominant":
        gap = 4 + 8 * torch.rand(rows, generator=gen)
        lses = torch.where(is_chosen, height, height - gap)
        outs = torch.where(is_chosen[..., None], 0.0, outs)
    elif kind in ("empty", "all_empty"):
        empty = (torch.rand(rows, generator=gen) < 0.5) & ~is_chosen
        if kind == "all_empty":
            row_idx = torch.arange(num_tokens * num_heads).view(1, num_tokens, num_heads)
            empty |= row_idx % 2 == 0
        marker = torch.tensor(_EMPTY_LSES)[torch.arange(lses.numel()).view(rows) % len(_EMPTY_LSES)]
        lses = torch.where(empty, marker, lses)
        outs = torch.where(empty[..., None], float("nan"), outs)
    return outs.to(dtype), lses.float()
