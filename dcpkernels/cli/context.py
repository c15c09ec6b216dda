"""The demo's input: sequences of falling length, and the rows of their latent KV cache.

A latent row is a function of seed, sequence and position alone, so that every rank makes exactly the rows of its shard,
whatever the sharding.
"""

from __future__ import annotations

import torch

_BLOCK = 256  # positions made at once: fits a CPU's cache


def sequence_lengths(context: int, batch: int, num_ranks: int) -> list[int]:
    """Tokens of each sequence, falling geometrically from `context` to below `num_ranks` (some shards are empty)."""
    shortest = max(1, min(num_ranks // 2 + 1, num_ranks - 1, context))
    if batch == 1:
        return [context]
    return [round(context * (shortest / context) ** (i / (batch - 1))) for i in range(batch)]


def latent_rows(positions: torch.Tensor, seq: int, seed: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, dim]: the cache rows of int64 `positions` [n] of sequence `seq`. Mean 0, variance 1, range +-2.45."""
    rows = torch.empty(len(positions), dim, dtype=dtype)
    column = torch.arange(dim, dtype=torch.int32) * 0x27D4EB2F
    offset = _mix(
        torch.tensor([seed, seq]).to(torch.int32) * 0x3C6EF372 + torch.tensor([1, 2], dtype=torch.int32)
    ).sum()
    for some, out in zip(positions.split(_BLOCK), rows.split(_BLOCK), strict=True):
        word = some.to(torch.int32)[:, None] * -0x61C88647 + (column + offset.to(torch.int32))
        # The sum of the two signed halves of a random word: a triangular distribution, variance 2 * 65536^2 / 12.
        _mix(word)
        total = word.bitwise_right_shift(16).add_(word.bitwise_left_shift_(16).bitwise_right_shift_(16))
        out.copy_((total + 1) * (6**0.5 / 65536))
    return rows


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Each int32 to one that looks random (shifts and odd multipliers, wrapping). Changes `word`."""
    for shift, multiplier in ((16, 0x7FEB352D), (15, -0x7B935975)):
        word.bitwise_xor_(_shifted(word, shift)).mul_(multiplier)
    return word.bitwise_xor_(_shifted(word, 16))


def _shifted(word: torch.Tensor, shift: int) -> torch.Tensor:
    # torch shifts in copies of the sign, and a sign that is xored with its copy is gone.
    return word.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
