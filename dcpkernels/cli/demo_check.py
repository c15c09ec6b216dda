"""The demo's verdict: the merged output of all ranks against attention that was never sharded.

The tolerance of an element is made of the roundings that lie between the two, with u = 2^-8, the rounding of bf16:

    u * |truth|  +  u * sum_i w_i |o_i|  +  2^-16 * sum_j p_j |v_j|

the merged output is rounded once; every shard's partial output o_i is, and comes in with its weight w_i; and two fp32
attentions differ by what fp32 does to scores of ten or twenty and to their exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dcpkernels import reference
from dcpkernels.cli import context
from dcpkernels.cli.attention import attend_to_all
from dcpkernels.cli.demo_rank import GLOO, OURS, RankResult
from dcpkernels.testing import error_bound, max_err_over_bound

_UNIT = 2.0**-8
_ARITHMETIC = 2.0**-16


@dataclass(frozen=True)
class Verdict:
    """Errors of the merged output; `*_over_tolerance` and `*_over_bound` pass when at most 1."""

    max_abs_error: list[float]  # by rank: of its heads, all rows
    error_over_tolerance: list[float]  # by rank
    merge_err_over_bound: list[float]  # by rank: of the merge alone, given the partial outputs (docs/protocol.md)
    row_error_over_tolerance: list[float]  # by row, all heads
    gloo_error_over_tolerance: float

    @property
    def passed(self) -> bool:
        errors = (*self.error_over_tolerance, *self.merge_err_over_bound, self.gloo_error_over_tolerance)
        return all(error <= 1 for error in errors)


def check(
    ranks: Sequence[RankResult], lengths: Sequence[int], seed: int, advance: Callable[[int], None] = lambda row: None
) -> Verdict:
    """Compares all rows. `advance` is told of the number of rows that have been done."""
    num_ranks, num_heads = len(ranks), context.NUM_HEADS
    partial_outs = torch.stack([rank.partial_out for rank in ranks])
    partial_lses = torch.stack([rank.partial_lse for rank in ranks])
    lens = {
        "seq_lens": torch.tensor([rank.local_lengths for rank in ranks]),
        "query_start_loc": torch.arange(len(lengths) + 1),
    }
    ours, gloo = (torch.cat([rank.outs[name] for rank in ranks], 1) for name in (OURS, GLOO))

    truth, size = torch.empty(2, *ours.shape)
    query = context.queries(len(lengths), seed)
    for row, length in enumerate(lengths):
        truth[row], size[row] = attend_to_all(query[row], context.latent_rows(torch.arange(length), row, seed))
        advance(row + 1)

    weights = reference.merge_weights(partial_lses, lse_base="e", **lens)
    shares = torch.where(weights.live[..., None], partial_outs.double().abs(), 0.0) * weights.weight[..., None]
    tolerance = _UNIT * (truth.abs() + shares.sum(0)) + _ARITHMETIC * size
    merged, _ = reference.a2a_lse_reduce(partial_outs, partial_lses, lse_base="e", **lens)
    bound = error_bound(partial_outs, partial_lses, lse_base="e", out_dtype=context.DTYPE, **lens)

    num_local_heads = num_heads // num_ranks
    slices = [slice(rank * num_local_heads, (rank + 1) * num_local_heads) for rank in range(num_ranks)]
    return Verdict(
        max_abs_error=[float((ours[:, s].float() - truth[:, s]).abs().max()) for s in slices],
        error_over_tolerance=[max_err_over_bound(ours[:, s], truth[:, s], tolerance[:, s]) for s in slices],
        merge_err_over_bound=[max_err_over_bound(ours[:, s], merged[:, s], bound[:, s]) for s in slices],
        row_error_over_tolerance=[max_err_over_bound(ours[i], truth[i], tolerance[i]) for i in range(len(lengths))],
        gloo_error_over_tolerance=max_err_over_bound(gloo, truth, tolerance),
    )
