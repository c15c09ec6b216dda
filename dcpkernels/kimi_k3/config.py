"""Kimi-K3's text model in numbers, and what follows from them: layer kinds, parameters, bytes. Imports no torch.

The numbers are those of the published checkpoint (moonshotai/Kimi-K3); the counts below reproduce its published size,
2.78e12 parameters of which 104e9 work on a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dcpkernels.errors import DcpInvalidArgument

_MXFP4_BITS = 4 + 8 / 32  # an element, and its share of the scale of 32


@dataclass(frozen=True)
class KimiK3Config:
    """The defaults are Kimi-K3; `tiny()` has the same layer kinds in small.

    Two epsilons stand in for 1e-5 somewhere: the norms of the query and KV latents are built without one in the
    publisher's own code, whose default is 1e-6 (vLLM uses 1e-5 there), and the l2 norm of KDA adds 1e-6 to the sum of
    squares.

    Raises DcpInvalidArgument for numbers that do not fit together.
    """

    hidden_size: int = 7168
    num_layers: int = 93
    vocab_size: int = 163_840
    max_position: int = 1_048_576
    rms_norm_eps: float = 1e-5
    attn_res_block_size: int = 12  # layers whose outputs add up to one source of AttnRes

    # MLA: every `full_attention_interval`-th layer, and the last one
    full_attention_interval: int = 4
    num_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # cached and multiplied, never rotated
    v_head_dim: int = 128
    latent_norm_eps: float = 1e-6

    # KDA: all others
    kda_num_heads: int = 96
    kda_head_dim: int = 128  # of keys and values
    kda_conv_width: int = 4
    kda_gate_lower_bound: float = -5.0
    kda_l2_eps: float = 1e-6

    # feed-forward: dense in the first layers, experts in all others
    num_dense_layers: int = 1
    dense_intermediate_size: int = 33_792
    num_experts: int = 896
    num_experts_per_token: int = 16
    moe_latent_size: int = 3584
    moe_intermediate_size: int = 3072
    num_shared_experts: int = 2
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < (0 if name == "num_dense_layers" else 1):
                raise DcpInvalidArgument(f"kimi_k3: {name} must be at least 1 (got {value})")
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise DcpInvalidArgument(
                f"kimi_k3: num_experts_per_token must be in 1 .. num_experts={self.num_experts} "
                f"(got {self.num_experts_per_token})"
            )

    @classmethod
    def tiny(cls, **fields: Any) -> KimiK3Config:
        """A model that a test can run: 8 layers (3 and 7 are MLA), 8 heads, 16 experts. `fields` replace any of it."""
        small = {
            "hidden_size": 64, "num_layers": 8, "vocab_size": 128, "max_position": 4096, "attn_res_block_size": 2,
            "num_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "kda_num_heads": 8, "kda_head_dim": 16, "dense_intermediate_size": 256,
            "num_experts": 16, "num_experts_per_token": 4, "moe_latent_size": 32, "moe_intermediate_size": 256,
        }  # fmt: skip
        return replace(cls(), **{**small, **fields})

    # -- layer kinds

    def is_mla(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, is MLA: 3, 7, ..., 91 and 92 of 93. The others are KDA."""
        return (layer + 1) % self.full_attention_interval == 0 or layer == self.num_layers - 1

    def is_dense(self, layer: int) -> bool:
        """Whether the feed-forward part of layer `layer` is one dense MLP instead of experts."""
        return layer < self.num_dense_layers

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_mla(layer))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if not self.is_mla(layer))

    # -- dims

    @property
    def qk_head_dim(self) -> int:
        """Of a query head before the key projection is absorbed: 192."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements of a row of the KV cache, and of an absorbed query head: 576."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def kda_dim(self) -> int:
        """Of all heads together: 12,288."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def num_attn_res_blocks(self) -> int:
        """Sources that a token carries besides the running sum, at the end of the model: 8."""
        return -(-self.num_layers // self.attn_res_block_size)

    # -- parameters

    def mla_parameters(self) -> dict[str, int]:
        """Of one MLA layer, by weight."""
        heads, hidden = self.num_heads, self.hidden_size
        return {
            "q_a_proj": hidden * self.q_lora_rank,
            "q_a_norm": self.q_lora_rank,
            "q_b_proj": self.q_lora_rank * heads * self.qk_head_dim,
            "kv_a_proj": hidden * self.latent_dim,
            "kv_a_norm": self.kv_lora_rank,
            "kv_b_proj": self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim),
            "g_proj": hidden * heads * self.v_head_dim,
            "o_proj": heads * self.v_head_dim * hidden,
        }

    def kda_parameters(self) -> dict[str, int]:
        """Of one KDA layer, by weight."""
        hidden, dim = self.hidden_size, self.kda_dim
        return {
            "qkv_proj": 3 * hidden * dim,
            "conv": 3 * dim * self.kda_conv_width,
            "f_a_proj": hidden * self.kda_head_dim,
            "f_b_proj": self.kda_head_dim * dim,
            "dt_bias": dim,
            "A_log": self.kda_num_heads,
            "b_proj": hidden * self.kda_num_heads,
            "g_proj": hidden * dim,
            "o_norm": self.kda_head_dim,
            "o_proj": dim * hidden,
        }

    def dense_parameters(self) -> dict[str, int]:
        """Of one dense MLP."""
        return {"mlp": 3 * self.hidden_size * self.dense_intermediate_size}

    def moe_parameters(self, num_experts: int | None = None) -> dict[str, int]:
        """Of one layer of experts, by weight; `num_experts` routed ones, all when None."""
        num_experts = self.num_experts if num_experts is None else num_experts
        return {
            "router": self.hidden_size * self.num_experts,
            "router_bias": self.num_experts,
            "down_proj": self.hidden_size * self.moe_latent_size,
            "experts": num_experts * 3 * self.moe_latent_size * self.moe_intermediate_size,
            "latent_norm": self.moe_latent_size,
            "up_proj": self.moe_latent_size * self.hidden_size,
            "shared": 3 * self.hidden_size * self.shared_intermediate_size,
        }

    def stored_expert_shapes(self) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """Of one routed expert as published, in bytes: w1 and w3 (gate, and what is gated), w2; each two elements a
        byte, and a scale for 32 of them along a row."""
        inner, latent = self.moe_intermediate_size, self.moe_latent_size
        return {
            name: ((rows, columns // 2), (rows, columns // 32))
            for name, rows, columns in (("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner))
        }

    def layer_parameters(self, layer: int, num_experts: int | None = None) -> dict[str, int]:
        """Of layer `layer`, by weight: attention, feed-forward part, two norms, two AttnRes."""
        attention = self.mla_parameters() if self.is_mla(layer) else self.kda_parameters()
        mlp = self.dense_parameters() if self.is_dense(layer) else self.moe_parameters(num_experts)
        return {
            **{f"attention.{name}": count for name, count in attention.items()},
            **{f"mlp.{name}": count for name, count in mlp.items()},
            "norms": 2 * self.hidden_size,
            "attn_res": 4 * self.hidden_size,
        }

    def num_parameters(self, *, active: bool = False) -> int:
        """Of the text model. `active`: those that a token is multiplied with, so 16 of the experts of a layer, and
        not the embedding, of which it looks up one row."""
        num_experts = self.num_experts_per_token if active else None
        layers = sum(sum(self.layer_parameters(layer, num_experts).values()) for layer in range(self.num_layers))
        vocab = self.vocab_size * self.hidden_size
        # Embedding and head; the AttnRes at the end of the model and the last norm.
        return layers + (1 if active else 2) * vocab + 3 * self.hidden_size

    def num_bytes(self) -> int:
        """Of the text model as published: routed experts in MXFP4 (4 bits, and 8 for the scale of 32), the rest in
        bfloat16, but for what decides: router bias, A_log and dt_bias in float32."""
        num_moe_layers = sum(not self.is_dense(layer) for layer in range(self.num_layers))
        experts = num_moe_layers * self.moe_parameters()["experts"]
        kda = self.kda_parameters()
        wide = num_moe_layers * self.num_experts + len(self.kda_layers) * (kda["A_log"] + kda["dt_bias"])
        return int(experts * _MXFP4_BITS / 8) + 2 * (self.num_parameters() - experts) + 2 * wide

    # -- what a token and a request keep

    def kv_bytes_per_token(self, item_bytes: int = 1) -> int:
        """Of all MLA layers, on all ranks together; 13,824 in fp8."""
        return len(self.mla_layers) * self.latent_dim * item_bytes

    def state_bytes_per_request(self, tp_size: int, *, num_draft_tokens: int = 0, state_bytes: int = 4) -> int:
        """KDA's state of one request on one rank, all layers: convolution inputs in 16 bits, and a matrix a head. Does
        not depend on the DCP size; 56,171,520 at TP8. Raises DcpInvalidArgument when tp_size does not divide the
        heads."""
        if tp_size < 1 or self.kda_num_heads % tp_size:
            raise DcpInvalidArgument(f"kimi_k3: tp_size must divide kda_num_heads={self.kda_num_heads} (got {tp_size})")
        heads = self.kda_num_heads // tp_size
        conv = 3 * heads * self.kda_head_dim * (self.kda_conv_width - 1 + num_draft_tokens) * 2
        return len(self.kda_layers) * (conv + heads * self.kda_head_dim**2 * state_bytes)
