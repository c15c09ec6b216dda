"""MLA attention in plain torch, unsharded: the truth for the demo. One softmax over all positions, at once, where
what it checks runs an online softmax over chunks of shards. They share no code."""

from __future__ import annotations

import torch

_CHUNK = 4096  # for the memory of the fp32 copies only


def attend_to_all(
    query: torch.Tensor, rows: torch.Tensor, *, scale: float, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [H, Dq] and rows [n, Dq], all of a sequence -> (out, size), both fp32 [H, value_dim].

    `size` is the same weighted mean of the values' magnitudes, the scale of what fp32 arithmetic may get wrong.
    """
    query = query.float()
    chunks = rows.split(_CHUNK)
    probs = torch.softmax(scale * torch.cat([query @ chunk.float().T for chunk in chunks], 1), 1)
    out = query.new_zeros(len(query), value_dim)
    size = torch.zeros_like(out)
    for chunk, share in zip(chunks, probs.split(_CHUNK, 1), strict=True):
        values = chunk[:, :value_dim].float()
        out += share @ values
        size += share @ values.abs()
    return out, size
