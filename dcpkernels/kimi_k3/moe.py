"""The feed-forward part of Kimi-K3: one dense MLP in the first layer, in all others experts on a latent of half the
width, beside shared experts on the full one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3 import mxfp4
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mxfp4 import MXFP4Tensor
from dcpkernels.kimi_k3.norms import rms_norm
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw, draw_each, draw_norm

# Intermediate channels are drawn in pieces of as many, so that a rank draws its own only.
_PIECE = 32


def situ(gate: torch.Tensor, up: torch.Tensor, config: KimiK3Config) -> torch.Tensor:
    """beta tanh(gate / beta) sigmoid(gate) * lb tanh(up / lb), in fp32, rounded once: SwiGLU with both factors
    bounded."""
    beta, lb, g, u = config.situ_beta, config.situ_linear_beta, gate.float(), up.float()
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * lb * torch.tanh(u / lb)).to(gate.dtype)


# -- one MLP


@dataclass(frozen=True)
class MLPWeights:
    """One rank's part of an MLP: Ir of its intermediate channels."""

    gate_proj: torch.Tensor  # [Ir, hidden]
    up_proj: torch.Tensor  # [Ir, hidden]
    down_proj: torch.Tensor  # [hidden, Ir]

    @classmethod
    def random(
        cls, hidden: int, intermediate: int, tp: TensorParallel, *, key: tuple[object, ...], dtype: torch.dtype
    ) -> MLPWeights:
        """This rank's part of random weights that `key` names."""
        return cls(*_draw_mlp(hidden, intermediate, tp, key=key, dtype=dtype))


def mlp_partial(x: torch.Tensor, weights: MLPWeights, config: KimiK3Config) -> torch.Tensor:
    """This rank's part of the MLP's output: [T, hidden] -> [T, hidden], to be summed over the ranks."""
    return linear(situ(linear(x, weights.gate_proj), linear(x, weights.up_proj), config), weights.down_proj)


def dense_mlp(x: torch.Tensor, weights: MLPWeights, config: KimiK3Config, tp: TensorParallel) -> torch.Tensor:
    """[T, hidden] -> [T, hidden], the same on all ranks. Collective over the ranks."""
    return tp.all_reduce(mlp_partial(x, weights, config))


# -- experts


@dataclass(frozen=True)
class MoEWeights:
    """One rank's part of a layer of E experts, which are sharded by intermediate channel: Ir of each. Expert weights
    are tensors, or MXFP4 as published."""

    router: torch.Tensor  # [E, hidden]
    router_bias: torch.Tensor  # fp32 [E]
    down_proj: torch.Tensor  # [latent, hidden]
    w1: torch.Tensor | MXFP4Tensor  # [E, Ir, latent]: the gate
    w3: torch.Tensor | MXFP4Tensor  # [E, Ir, latent]: what is gated
    w2: torch.Tensor | MXFP4Tensor  # [E, latent, Ir]
    latent_norm: torch.Tensor  # [latent]
    up_proj: torch.Tensor  # [hidden, latent]
    shared: MLPWeights

    @classmethod
    def random(
        cls,
        config: KimiK3Config,
        tp: TensorParallel,
        *,
        key: tuple[object, ...],
        dtype: torch.dtype,
        num_experts: int | None = None,
        quantised: bool = False,
    ) -> MoEWeights:
        """This rank's part of random weights that `key` names.

        num_experts: fewer than config.num_experts, but as many as a token needs at least. quantised: experts in MXFP4.
        Raises DcpInvalidArgument when blocks of 32 would be divided between ranks.
        """
        num_experts = config.num_experts if num_experts is None else num_experts
        if not config.num_experts_per_token <= num_experts <= config.num_experts:
            raise DcpInvalidArgument(
                f"moe: num_experts must be in {config.num_experts_per_token} .. {config.num_experts} "
                f"(got {num_experts})"
            )
        hidden, latent, intermediate = config.hidden_size, config.moe_latent_size, config.moe_intermediate_size
        experts = [
            _draw_mlp(latent, intermediate, tp, key=(*key, "expert", expert), dtype=dtype)
            for expert in range(num_experts)
        ]
        w1, w3, w2 = (torch.stack(each) for each in zip(*experts, strict=True))
        if quantised:
            w1, w3, w2 = (mxfp4.quantise(each) for each in (w1, w3, w2))
        return cls(
            router=draw(num_experts, hidden, key=(*key, "router"), dtype=dtype),
            router_bias=draw(num_experts, key=(*key, "router_bias"), dtype=torch.float32, std=0.1),
            down_proj=draw(latent, hidden, key=(*key, "down_proj"), dtype=dtype),
            w1=w1,
            w3=w3,
            w2=w2,
            latent_norm=draw_norm(latent, key=(*key, "latent_norm"), dtype=dtype),
            up_proj=draw(hidden, latent, key=(*key, "up_proj"), dtype=dtype),
            shared=MLPWeights.random(hidden, config.shared_intermediate_size, tp, key=(*key, "shared"), dtype=dtype),
        )


def route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor, config: KimiK3Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32 [T, k], experts int64 [T, k]) of x [T, hidden]: the k with the largest sigmoid score + bias
    (DeepSeek-V3's routing without auxiliary loss), weighted by their scores alone, which are made to sum to
    routed_scaling_factor."""
    scores = torch.sigmoid(linear(x.float(), router.float()))
    experts = (scores + bias).topk(config.num_experts_per_token, 1).indices
    chosen = scores.gather(1, experts)
    return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * config.routed_scaling_factor, experts


def moe(x: torch.Tensor, weights: MoEWeights, config: KimiK3Config, tp: TensorParallel) -> torch.Tensor:
    """[T, hidden] -> [T, hidden], the same on all ranks. Collective over the ranks."""
    # 1. The routed experts, on the latent: this rank's part of their weighted sum.
    shares, experts = route(x, weights.router, weights.router_bias, config)
    latent = linear(x, weights.down_proj)
    routed = torch.zeros(latent.shape)
    for expert in experts.unique().tolist():
        rows, place = (experts == expert).nonzero(as_tuple=True)
        w1, w3, w2 = (_dense(each[expert], x.dtype) for each in (weights.w1, weights.w3, weights.w2))
        out = mlp_partial(latent[rows], MLPWeights(w1, w3, w2), config)
        routed.index_add_(0, rows, out.float() * shares[rows, place, None])
    # 2. One sum over the ranks, of that and of the shared experts' part: the norm needs whole latents.
    partial = torch.cat([routed.to(x.dtype), mlp_partial(x, weights.shared, config)], 1)
    routed, shared = tp.all_reduce(partial).split([config.moe_latent_size, config.hidden_size], 1)
    # 3. Back to full width.
    return linear(rms_norm(routed, weights.latent_norm, config.rms_norm_eps), weights.up_proj) + shared


def _dense(weight: torch.Tensor | MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.dequantise(dtype) if isinstance(weight, MXFP4Tensor) else weight


def _draw_mlp(
    hidden: int, intermediate: int, tp: TensorParallel, *, key: tuple[object, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate [Ir, hidden], up [Ir, hidden], down [hidden, Ir]; pieces of intermediate channels have keys of their own,
    and no
    rank has part of one: 32 are also a block of MXFP4 along down's last dim."""
    size = tp.share("intermediate size", intermediate)
    piece = _PIECE if size % _PIECE == 0 else size
    if intermediate % piece or (size % _PIECE and tp.size > 1):
        raise DcpInvalidArgument(f"moe: each rank must have a multiple of {_PIECE} intermediate channels (got {size})")
    pieces = range(tp.rank * size // piece, (tp.rank + 1) * size // piece)
    gate, up, down = (
        draw_each(pieces, piece, hidden, key=(*key, name), dtype=dtype, std=std)
        for name, std in (("gate", None), ("up", None), ("down", intermediate**-0.5))
    )
    return gate.flatten(0, 1), up.flatten(0, 1), down.flatten(0, 1).T.contiguous()
