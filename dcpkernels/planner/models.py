"""Models as a KV cache sees them: how many layers of which kind, and what a token and a request keep in one layer."""

from __future__ import annotations

from dataclasses import dataclass

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.checks import ceil_div, divides, fail, one_of, whole

# Bytes of an element; fp8_ds_mla is counted in kv_row_bytes.
KV_DTYPES = {"fp8": 1, "bf16": 2, "fp8_ds_mla": 1}
STATE_DTYPES = {"fp32": 4, "bf16": 2}

_DS_MLA = (512, 64)  # the latent and rope elements that vLLM's fp8_ds_mla is laid out for
_DS_MLA_SCALE_TOKENS = 128  # elements of the latent that share one fp32 scale
MAX_TP = 2**16  # all sizes of groups are tried; no machine comes near
_CONV_BYTES = 2  # of an input that the convolution keeps: the model's bf16, whatever the recurrent state is in


@dataclass(frozen=True)
class ModelSpec:
    """What of a model decides the size of its KV cache.

    Args:
        name: for messages and reports.
        num_attention_layers: layers that keep every token of a request.
        num_heads: query heads; None = not known (then it is not checked, and there is no workspace to size).
        kv_lora_rank, qk_rope_head_dim: of MLA, which keeps one row of their sum a token, for all heads. 0 = GQA.
        num_kv_heads, head_dim: of GQA, which keeps a key and a value of `head_dim` a head. 0 = MLA.
        num_state_layers: layers that keep a state of fixed size per request instead of tokens (KDA). They have
            `state_heads` heads with a matrix [state_head_dim, state_head_dim] each, and a causal convolution of width
            `conv_width` over q, k and v.
        max_position: the model's own longest context; None = not known.

    A part of a model is a model too: for one stage of pipeline parallelism replace the numbers of layers.

    Raises:
        DcpInvalidArgument: a number is out of range, or it is neither MLA nor GQA, or both.
    """

    name: str
    num_attention_layers: int
    num_heads: int | None = None
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    num_state_layers: int = 0
    state_heads: int = 0
    state_head_dim: int = 0
    conv_width: int = 0
    max_position: int | None = None

    def __post_init__(self) -> None:
        self._keep("num_attention_layers", 1)
        for name in ("kv_lora_rank", "qk_rope_head_dim", "num_kv_heads", "head_dim", "num_state_layers"):
            self._keep(name, 0)
        for name in ("num_heads", "max_position"):
            if getattr(self, name) is not None:
                self._keep(name, 1)
        if self.is_mla == (self.num_kv_heads > 0):
            fail(
                "a model must have either kv_lora_rank (MLA) or num_kv_heads (GQA)",
                f"{self.kv_lora_rank} and {self.num_kv_heads}",
            )
        if not self.is_mla:
            self._keep("head_dim", 1)
            if self.num_heads is not None:
                divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        for name in ("state_heads", "state_head_dim", "conv_width"):
            self._keep(name, 1 if self.num_state_layers else 0)

    def _keep(self, name: str, least: int) -> None:
        # As Python's int: products of numpy's would be of 32 or 64 bits.
        object.__setattr__(self, name, whole(name, getattr(self, name), least))

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    # -- ranks

    def check_ranks(self, tp: int, dcp: int) -> None:
        """Whether `tp` ranks can share the model and groups of `dcp` of them the tokens.

        MLA has one KV head, so that every rank of TP would hold a copy of every token: DCP may use them all. In GQA,
        TP shards the KV heads first, and only the ranks that would hold copies of the same head can share its tokens:
        tp / num_kv_heads of them (vLLM, vllm/config/model.py, verify_with_parallel_config). dcp has to divide that, or
        a group of consecutive ranks would reach into another head's. (It then also divides the query heads of a KV head.)

        Raises DcpInvalidArgument with the rule that is broken.
        """
        tp, dcp = whole("tp", tp, 1), whole("dcp", dcp, 1)
        if tp > MAX_TP:
            fail(f"tp must be at most {MAX_TP}", tp)
        divides("dcp", dcp, "tp", tp)
        if self.num_heads is not None:
            divides("tp", tp, "num_heads", self.num_heads)
        if self.num_state_layers:
            divides("tp", tp, "state_heads", self.state_heads)
        if self.is_mla:
            return
        if tp % self.num_kv_heads and self.num_kv_heads % tp:
            fail(f"tp must divide num_kv_heads={self.num_kv_heads} or be a multiple of it", tp)
        if dcp == 1:
            return
        copies = tp // self.num_kv_heads
        if copies < 2 or copies % dcp:
            fail(
                f"dcp must divide tp / num_kv_heads={tp}/{self.num_kv_heads}, the ranks that hold the same KV head", dcp
            )
        if self.num_heads is not None:
            divides("dcp", dcp, "num_heads / num_kv_heads", self.num_heads // self.num_kv_heads)

    def dcp_sizes(self, tp: int) -> list[int]:
        """All sizes of DCP groups that `check_ranks` allows, ascending; the first is 1."""
        self.check_ranks(tp, 1)
        return [dcp for dcp in range(1, tp + 1) if tp % dcp == 0 and self._allows(tp, dcp)]

    def _allows(self, tp: int, dcp: int) -> bool:
        try:
            self.check_ranks(tp, dcp)
        except DcpInvalidArgument:
            return False
        return True

    # -- bytes

    def kv_row_bytes(self, tp: int, kv_dtype: str) -> int:
        """Of one token in one attention layer, on a rank that holds it.

        fp8 and bf16: a byte or two an element; scales are one per tensor. fp8_ds_mla (vLLM's layout for FlashMLA; MLA of
        512 + 64 only): the latent in fp8, an fp32 scale for 128 elements each, the rope part in bf16: 656 bytes.
        """
        item_bytes = KV_DTYPES[one_of("kv_dtype", kv_dtype, KV_DTYPES)]
        if kv_dtype == "fp8_ds_mla":
            if (self.kv_lora_rank, self.qk_rope_head_dim) != _DS_MLA:
                dims = f"{self.kv_lora_rank} + {self.qk_rope_head_dim}" if self.is_mla else "GQA"
                fail("kv_dtype fp8_ds_mla must be of MLA with 512 + 64 elements a token", dims)
            scales = 4 * self.kv_lora_rank // _DS_MLA_SCALE_TOKENS
            return self.kv_lora_rank + scales + 2 * self.qk_rope_head_dim
        if self.is_mla:
            return (self.kv_lora_rank + self.qk_rope_head_dim) * item_bytes
        return 2 * self.head_dim * ceil_div(self.num_kv_heads, tp) * item_bytes

    def state_bytes(self, tp: int, state_dtype: str, num_speculative_tokens: int = 0) -> int:
        """Of one request in one state layer, on each rank: the last inputs of the convolution, in bf16 (one more for
        each speculative token, which may be taken back), and a matrix a head. TP shards the heads; DCP nothing. 0 for a
        model without state layers."""
        item_bytes = STATE_DTYPES[one_of("state_dtype", state_dtype, STATE_DTYPES)]
        if not self.num_state_layers:
            return 0
        dim = self.state_heads // tp * self.state_head_dim
        conv = 3 * dim * (self.conv_width - 1 + num_speculative_tokens) * _CONV_BYTES
        return conv + dim * self.state_head_dim * item_bytes


MODELS = {
    spec.name: spec
    for spec in (
        # The numbers of dcpkernels.kimi_k3.config; a test holds them against it.
        ModelSpec("kimi-k3", 24, 96, kv_lora_rank=512, qk_rope_head_dim=64, num_state_layers=69, state_heads=96,
                  state_head_dim=128, conv_width=4, max_position=1_048_576),
        # config.json of deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct; without the layer of V3's MTP.
        ModelSpec("deepseek-v3", 61, 128, kv_lora_rank=512, qk_rope_head_dim=64, max_position=163_840),
        ModelSpec("kimi-k2", 61, 64, kv_lora_rank=512, qk_rope_head_dim=64, max_position=131_072),
        # config.json of Qwen/Qwen3-235B-A22B.
        ModelSpec("qwen3-235b", 94, 64, num_kv_heads=4, head_dim=128, max_position=40_960),
    )
}  # fmt: skip


def find_model(name: str) -> ModelSpec:
    """The built-in model of that name. Raises DcpInvalidArgument when there is none."""
    return MODELS[one_of("model", name, MODELS)]
