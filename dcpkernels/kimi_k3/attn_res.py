"""Attention residuals (AttnRes, arXiv 2603.15031): what a sublayer reads is a learned mix over depth, in place of one
residual stream.

Layers come in blocks (of 12). A token carries the embedding, the sum of all sublayer outputs of each finished block,
and the running sum of this block; each attention and each MLP reads its own mix of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.weights import draw, draw_norm


@dataclass(frozen=True)
class AttnResWeights:
    """Of one place that mixes. The same on all ranks."""

    norm: torch.Tensor  # [D]
    proj: torch.Tensor  # [D]

    @classmethod
    def random(cls, config: KimiK3Config, *, key: tuple[object, ...], dtype: torch.dtype) -> AttnResWeights:
        size = config.hidden_size
        return cls(draw_norm(size, key=(*key, "norm"), dtype=dtype), draw(size, key=(*key, "proj"), dtype=dtype))


def attn_res(sources: Sequence[torch.Tensor], weights: AttnResWeights, eps: float) -> torch.Tensor:
    """The mix of n sources [T, D]: fp32 [T, D], for the norm behind it to round.

        score_i = < V_i / sqrt(mean(V_i^2) + eps), norm * proj >        h = sum_i softmax(score)_i V_i

    Scores are not divided by sqrt(D), and the sources come in as they are, not normalised. One source is its own mix.
    """
    values = torch.stack(list(sources)).float()  # [n, T, D]
    scale = torch.rsqrt(values.square().mean(-1) + eps)
    scores = values @ (weights.norm.float() * weights.proj.float()) * scale
    return (torch.softmax(scores, 0)[..., None] * values).sum(0)


class AttnResState:
    """What each token of a step carries through the depth of the model: `blocks`, the embedding and the sums of
    finished blocks; `running`, the sum so far of the block that the layers are in.

    Calls come in the order before_attention, after_attention, before_mlp, after_mlp, for layers 0, 1, ...; then at_end.

    Args:
        embedding: [T, D] of the step's tokens.
    """

    def __init__(self, config: KimiK3Config, embedding: torch.Tensor) -> None:
        self.block_size, self.dtype = config.attn_res_block_size, embedding.dtype
        self.blocks: list[torch.Tensor] = []
        self.running = embedding

    def before_attention(self, layer: int) -> list[torch.Tensor]:
        """The sources of layer `layer`'s attention, [T, D] each: ceil(layer / block size) of them and the running
        sum. At the first layer of a block that sum is the whole block before."""
        return [*self.blocks, self.running]

    def after_attention(self, layer: int, out: torch.Tensor) -> None:
        """Takes in the attention's output [T, D]. The first layer of a block starts a new sum with it, and what was the
        running sum joins the blocks; before the very first that is the embedding."""
        if layer % self.block_size == 0:
            self.blocks.append(self.running)
            self.running = out
        else:
            self.running = self.running + out

    def before_mlp(self, layer: int) -> list[torch.Tensor]:
        """The sources of its feed-forward part."""
        return [*self.blocks, self.running]

    def after_mlp(self, layer: int, out: torch.Tensor) -> None:
        """Takes in the output [T, D] of the feed-forward part."""
        self.running = self.running + out

    def at_end(self) -> list[torch.Tensor]:
        """The sources of the mix behind the last layer."""
        return [*self.blocks, self.running]
