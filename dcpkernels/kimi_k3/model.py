"""A stack of decoder layers with embedding and head, on random weights: what generates tokens in tests."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attn_res import AttnResState, AttnResWeights, attn_res
from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.kda import KDALayer, KDAState, KDAWeights
from dcpkernels.kimi_k3.layer import DecoderLayer, LayerWeights
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights
from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights
from dcpkernels.kimi_k3.norms import rms_norm
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw, draw_norm


class KimiK3Model:
    """The text model on one rank.

    Args:
        num_blocks, block_size: of the latent cache of each MLA layer, as the RequestTable that makes the batches has
        them.
        max_requests: as there.
        max_query_len: tokens of one request in one step, at most.
        workspace: of the DCP group, or None where each rank has the whole cache. One serves all layers.
        num_experts: routed experts, fewer than config.num_experts for a model that fits.
        quantised: routed experts in MXFP4, as published.

    Raises DcpInvalidArgument for heads or widths that the ranks do not divide.
    """

    def __init__(
        self,
        config: KimiK3Config,
        tp: TensorParallel,
        *,
        seed: int,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        max_requests: int,
        max_query_len: int = 1,
        workspace: dcpkernels.Workspace | None = None,
        num_experts: int | None = None,
        quantised: bool = False,
    ) -> None:
        self.config, self.tp, self.dtype = config, tp, dtype
        self.states: list[KDAState] = []
        self.layers = []
        for index in range(config.num_layers):
            key = (seed, index)
            if config.is_mla(index):
                cache = LatentCache(num_blocks, block_size, config.latent_dim, dtype)
                attention = MLALayer(config, MLAWeights.random(config, tp, key=key, dtype=dtype), cache, tp, workspace)
            else:
                state = KDAState(config, tp, max_requests, max_query_len, dtype)
                self.states.append(state)
                attention = KDALayer(config, KDAWeights.random(config, tp, key=key, dtype=dtype), state, tp)
            if config.is_dense(index):
                mlp = MLPWeights.random(
                    config.hidden_size, config.dense_intermediate_size, tp, key=(*key, "mlp"), dtype=dtype
                )
            else:
                mlp = MoEWeights.random(
                    config, tp, key=(*key, "moe"), dtype=dtype, num_experts=num_experts, quantised=quantised
                )
            weights = LayerWeights.random(config, key=key, dtype=dtype)
            self.layers.append(DecoderLayer(config, index, weights, attention, mlp, tp))
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = draw(vocab, hidden, key=(seed, "embedding"), dtype=dtype, std=1.0)
        self.output_res = AttnResWeights.random(config, key=(seed, "output_res"), dtype=dtype)
        self.norm = draw_norm(hidden, key=(seed, "norm"), dtype=dtype)
        self.head = draw(vocab, hidden, key=(seed, "head"), dtype=dtype)

    def __call__(self, tokens: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """tokens int64 [T] (any token for padding rows) -> logits [T, vocab], the same on all ranks: of the token
        behind each. Collective over the ranks.

        Raises DcpInvalidArgument for a batch that a layer cannot run, before anything is written. Any other exception
        leaves some layers a step ahead of the others: the batch's requests have to start anew, with `reset` and
        another slot."""
        for layer in self.layers:
            layer.attention.check(batch)
        if tokens.shape != batch.positions.shape:
            raise DcpInvalidArgument(
                f"kimi_k3: tokens must be one for each of the {batch.num_rows} rows (got {list(tokens.shape)})"
            )
        state = AttnResState(self.config, self.embedding[tokens])
        for layer in self.layers:
            layer(state, batch)
        eps = self.config.rms_norm_eps
        mixed = attn_res(state.at_end(), self.output_res, eps)
        return linear(rms_norm(mixed, self.norm, eps).to(self.dtype), self.head)

    def reset(self, slot: int) -> None:
        """Forgets what is kept of the request that had this slot before."""
        for state in self.states:
            state.reset(slot)

    def keep(self, slot: int, num_tokens: int) -> None:
        """Of the tokens that the last step added to a request the first `num_tokens` stay; the RequestTable is told by
        `rewind`."""
        for state in self.states:
            state.keep(slot, num_tokens)
