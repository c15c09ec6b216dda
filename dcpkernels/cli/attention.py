"""MLA decode attention in plain torch, twice: over a shard as an engine would, over everything as the truth.

One query token, all heads share the latent cache (multi-query). The two share no code: one runs an online softmax over
chunks and keeps the log-sum-exp, the other one softmax over all positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcpkernels.cli.context import LATENT_DIM, SOFTMAX_SCALE

_CHUNK = 4096


def attend_to_shard(
    query: torch.Tensor,
    cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    advance: Callable[[int], None] = lambda num_tokens: None,
) -> None:
    """Partial attention of one row over this rank's rows of its sequence, in fp32 inside.

    Args:
        query: [H, 576] bf16.
        cache: [n, 576] bf16. With n = 0 nothing is written, as by a kernel that skips sequences without tokens.
        out: [H, 512] bf16, written: the shard's attention, normalised within the shard.
        lse: fp32 [H], written: natural log of the sum of exp(scaled score).
        advance: told of every chunk's tokens.
    """
    if len(cache) == 0:
        return
    query = query.float() * SOFTMAX_SCALE
    top = torch.full((len(query), 1), float("-inf"))
    total = torch.zeros_like(top)
    acc = torch.zeros(len(query), LATENT_DIM)
    for chunk in cache.split(_CHUNK):
        chunk = chunk.float()
        scores = query @ chunk.T
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        rescale = (top - new_top).exp_()
        weights = scores.sub_(new_top).exp_()
        total.mul_(rescale).add_(weights.sum(1, keepdim=True))
        acc.mul_(rescale).addmm_(weights, chunk[:, :LATENT_DIM])
        top = new_top
        advance(len(chunk))
    out.copy_(acc / total)
    lse.copy_((top + total.log()).squeeze(1))


def attend_to_all(query: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsharded attention of one row: (out, size), both fp32 [H, 512].

    `size` is the same weighted mean of the values' magnitudes, the scale of what fp32 arithmetic may get wrong.
    """
    query = query.float()
    chunks = cache.split(_CHUNK)  # for the memory of the fp32 copies only
    probs = torch.softmax(SOFTMAX_SCALE * torch.cat([query @ chunk.float().T for chunk in chunks], 1), 1)
    out = torch.zeros(len(query), LATENT_DIM)
    size = torch.zeros_like(out)
    for chunk, share in zip(chunks, probs.split(_CHUNK, 1), strict=True):
        values = chunk[:, :LATENT_DIM].float()
        out += share @ values
        size += share @ values.abs()
    return out, size
