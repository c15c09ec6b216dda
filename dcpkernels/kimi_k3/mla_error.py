"""How far apart two 16-bit runs of one MLA layer may be that differ only in how the cache is sharded.

Everything up to the attention is the same in every bit, and so are the weights. What differs is what attention rounds:

    the run with one shard rounds its output L once; the other one rounds the partial output o_i of every shard, which
    comes in with its weight w_i, and then the merged L

From there on both do the same to inputs that differ a little, and each rounds again at every step: values, gated
values, this rank's part of the output, and the sum over ranks. A rounding of x is taken as an error of its own,
uniform within +-u |x|, so with variance at most (u x)^2 / 3, u = 2^-8 for bfloat16; variances add, and go through a
product with a matrix by the squares of its elements. That is the probabilistic analysis of rounding errors of Higham
and Mary (2019).
Summing absolute errors instead would allow an output that is wrong by its own size: a row of o_proj adds 12,288 of
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from dcpkernels.kimi_k3.mla import MLALayer, per_head

NUM_SIGMAS = 6.0  # were the errors normally distributed, one element in 5e8 would be beyond
# Of what fp32 attention adds up, sum_j p_j |v_j|: the exponentials of scores of ten or twenty, and long sums.
_ARITHMETIC = 2.0**-18


def output_bound(
    layer: MLALayer,
    x: torch.Tensor,
    latents: Sequence[torch.Tensor],
    *,
    shares: torch.Tensor,
    size: torch.Tensor,
) -> torch.Tensor:
    """fp32 [T, hidden], the same on all ranks: how far apart the outputs for x [T, hidden] may be. Collective over
    layer.tp.

    Args:
        latents: what attention gave this rank's heads in each of the runs, [T, Hr, kv_lora_rank].
        shares: fp32 [T, Hr, kv_lora_rank], the sum over the shards of (w_i o_i)^2.
        size: fp32 [T, Hr, kv_lora_rank], the sum over the tokens of p_j |v_j|.
    """
    w, unit = layer.weights, torch.finfo(x.dtype).eps / 2

    def rounding(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(value.float().square() for value in values) * (unit**2 / 3)

    variance = rounding(latents) + shares * (unit**2 / 3) + (_ARITHMETIC * size).square()
    values = [layer.values_of(latent) for latent in latents]
    variance = per_head(variance, w.w_uv.float().square().transpose(1, 2)).flatten(1) + rounding(values)
    gate = layer.gate(x)
    gated = [value * gate for value in values]
    variance = variance * gate.float().square() + rounding(gated)
    partials = [linear(value, w.o_proj) for value in gated]
    # Each rank's part is rounded, and so is the sum behind each of the size - 1 additions. On its way that sum is
    # about as large as independent parts make it.
    variance = linear(variance, w.o_proj.float().square()) + layer.tp.size * rounding(partials)
    return NUM_SIGMAS * layer.tp.all_reduce(variance).sqrt()
