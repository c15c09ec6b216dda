"""The demo's verdict, on each rank: its heads' attention against attention that was never sharded, and the layer's
output with the cache sharded against the one without.

The tolerance of an element of the attention is made of the roundings that lie between the two, with u = 2^-8, the
rounding of bf16:

    u * |truth|  +  u * sum_i w_i |o_i|  +  2^-16 * sum_j p_j |v_j|

the output is rounded once; with a sharded cache every shard's partial output o_i is too, and comes in with its weight
w_i; and two fp32 attentions differ by what fp32 does to scores of ten or twenty and to their exponentials. The bound
of the layer's output is kimi_k3/mla_error.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from dcpkernels.cli.attention import attend_to_all
from dcpkernels.kimi_k3.mla_error import output_bound
from dcpkernels.testing import max_err_over_bound

if TYPE_CHECKING:
    from dcpkernels.cli.demo_rank import Arm

_UNIT = 2.0**-8
_ARITHMETIC = 2.0**-16


class Errors(NamedTuple):
    """Pass when at most 1; NaN counts as infinite. By row, each the largest of its elements on this rank."""

    attention: dict[str, list[float]]  # by arm, against the truth, over the tolerance
    output: list[float]  # of one arm's output against the other's, over the bound
    max_abs: float  # of the outputs

    @property
    def passed(self) -> bool:
        return all(error <= 1 for errors in (*self.attention.values(), self.output) for error in errors)


def check(tp: Arm, dcp: Arm, x: torch.Tensor) -> Errors:
    """Runs a step of each and compares. Collective; every rank comes to the same verdict on the output."""
    query, _ = tp.layer.project(x)
    outs = {"tp": tp.layer(x, tp.batch), "dcp": dcp.layer(x, dcp.batch)}
    latents = {"tp": tp.layer.attend(query, tp.batch), "dcp": None}
    partial_out, partial_lse = dcp.layer.attend_to_shard(dcp.layer.gather_query(query), dcp.batch)
    shares, squares = _shares(dcp, partial_out, partial_lse)
    latents["dcp"] = dcp.layer.merge(partial_out, partial_lse, dcp.batch)

    truth, size = _truth(tp, query)
    once = _UNIT * truth.abs() + _ARITHMETIC * size
    tolerance = {"tp": once, "dcp": once + _UNIT * shares}
    bound = output_bound(dcp.layer, x, list(latents.values()), shares=squares, size=size)
    gap = (outs["dcp"].float() - outs["tp"].float()).abs()
    rows = range(len(x))
    return Errors(
        attention={
            name: [max_err_over_bound(latent[t].float(), truth[t], tolerance[name][t]) for t in rows]
            for name, latent in latents.items()
        },
        output=[max_err_over_bound(outs["dcp"][t], outs["tp"][t], bound[t]) for t in rows],
        max_abs=float(gap.max()),
    )


def _shares(dcp: Arm, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the shards, [T, Hr, D] of this rank's heads: of w_i |o_i|, and of its square."""
    group, size, rank = dcp.layer.tp.group, dcp.layer.tp.size, dcp.layer.tp.rank
    lses = [torch.empty_like(partial_lse) for _ in range(size)]
    dist.all_gather(lses, partial_lse.contiguous(), group=group)
    weight = torch.softmax(torch.stack(lses), 0)[rank, ..., None]
    share = torch.where(weight > 0, partial_out.float().abs(), 0.0) * weight
    sums = torch.stack([share, share.square()])
    dist.all_reduce(sums, group=group)
    num_heads = share.shape[1] // size
    return tuple(sums[:, :, rank * num_heads : (rank + 1) * num_heads])


def _truth(tp: Arm, query: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention of this rank's heads, its size), fp32 [T, Hr, D]: over the cache that is not sharded."""
    layer, batch = tp.layer, tp.batch
    whole = torch.cat(query, 2)
    results = []
    for t, (table, length) in enumerate(zip(batch.block_tables, batch.local_lens.tolist(), strict=True)):
        num_blocks = -(-length // layer.cache.blocks.shape[1])
        rows = layer.cache.blocks[table[:num_blocks].long()].flatten(0, 1)[:length]
        scale, value_dim = layer.config.softmax_scale, layer.config.kv_lora_rank
        results.append(attend_to_all(whole[t], rows, scale=scale, value_dim=value_dim))
    outs, sizes = zip(*results, strict=True)
    return torch.stack(outs), torch.stack(sizes)
