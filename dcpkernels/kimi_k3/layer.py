"""A whole decoder layer of Kimi-K3."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcpkernels.kimi_k3.attn_res import AttnResState, AttnResWeights, attn_res
from dcpkernels.kimi_k3.cache import DecodeBatch
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.kda import KDALayer
from dcpkernels.kimi_k3.mla import MLALayer
from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights, dense_mlp, moe
from dcpkernels.kimi_k3.norms import rms_norm
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw_norm


@dataclass(frozen=True)
class LayerWeights:
    """What a layer has besides its attention and its experts; the same on all ranks."""

    attention_res: AttnResWeights
    attention_norm: torch.Tensor  # [hidden]
    mlp_res: AttnResWeights
    mlp_norm: torch.Tensor  # [hidden]

    @classmethod
    def random(cls, config: KimiK3Config, *, key: tuple[object, ...], dtype: torch.dtype) -> LayerWeights:
        size = config.hidden_size
        return cls(
            attention_res=AttnResWeights.random(config, key=(*key, "attention_res"), dtype=dtype),
            attention_norm=draw_norm(size, key=(*key, "attention_norm"), dtype=dtype),
            mlp_res=AttnResWeights.random(config, key=(*key, "mlp_res"), dtype=dtype),
            mlp_norm=draw_norm(size, key=(*key, "mlp_norm"), dtype=dtype),
        )


class DecoderLayer:
    """Layer `index`: a mix of what came before, attention, another mix, feed-forward.

    Args:
        attention: an MLALayer or a KDALayer of this rank.
        mlp: MLPWeights where config.is_dense(index), else MoEWeights.
    """

    def __init__(
        self,
        config: KimiK3Config,
        index: int,
        weights: LayerWeights,
        attention: MLALayer | KDALayer,
        mlp: MLPWeights | MoEWeights,
        tp: TensorParallel,
    ) -> None:
        self.config, self.index, self.weights, self.tp = config, index, weights, tp
        self.attention, self.mlp = attention, mlp

    def __call__(self, state: AttnResState, batch: DecodeBatch) -> None:
        """Adds this layer's two outputs to `state`. Collective over the ranks."""
        w, config = self.weights, self.config
        x = self._read(state.before_attention(self.index), w.attention_res, w.attention_norm, state.dtype)
        state.after_attention(self.index, self.attention(x, batch))
        x = self._read(state.before_mlp(self.index), w.mlp_res, w.mlp_norm, state.dtype)
        feed_forward = dense_mlp if config.is_dense(self.index) else moe
        state.after_mlp(self.index, feed_forward(x, self.mlp, config, self.tp))

    def _read(
        self, sources: list[torch.Tensor], res: AttnResWeights, norm: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        return rms_norm(attn_res(sources, res, eps), norm, eps).to(dtype)  # rounded here, and only here
