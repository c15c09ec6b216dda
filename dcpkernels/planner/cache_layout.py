"""How vLLM cuts a KV cache into blocks: their tokens and bytes, and how many of them a request takes.

Every layer has pages of one size, and a block is one page of each layer of a group. All groups draw their blocks from
one pool. Attention layers make one group; state layers (KDA) are split into groups of at most as many layers. A page has
to hold a state, which sets the tokens of a block; a state page is padded to it.

Read in vLLM: vllm/platforms/interface.py (`_align_hybrid_block_size`), vllm/v1/core/kv_cache_utils.py
(`_get_kv_cache_groups_uniform_page_size`, `get_kv_cache_capacity`; from 0.33 on kv_cache_planning.py),
vllm/v1/kv_cache_interface.py (`FullAttentionSpec` and `MambaSpec.max_memory_usage_bytes`). docs/planner.md has the
formula on one page.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcpkernels.planner.checks import ceil_div, divides, fail, whole
from dcpkernels.planner.models import ModelSpec

BLOCK_ALIGNMENT = 128  # tokens; of a model with state layers
MLA_BLOCK_SIZE = 64  # what FlashMLA needs, and vLLM then sets
BLOCK_SIZE = 16  # vLLM's own default


@dataclass(frozen=True)
class CacheLayout:
    """Blocks of one rank's KV cache. All ranks of a TP group have the same.

    Attributes:
        dcp, interleave: ranks that share the tokens of a request; consecutive tokens that one of them holds.
        block_tokens: tokens of a block on one rank. A block of all `dcp` ranks together holds dcp times as many.
        page_bytes: of one layer in a block.
        pages_per_block: layers of the largest group.
        attention_groups, attention_layers: 1 group, unless a model has more than 1.5 attention layers to a state layer.
        state_groups, state_layers: 0 in a model without state.
        state_bytes: what a state page holds, less than page_bytes.
        state_blocks_per_group: blocks that one request holds in each state group, whatever its length.
    """

    dcp: int
    interleave: int
    block_tokens: int
    page_bytes: int
    pages_per_block: int
    attention_groups: int
    attention_layers: int
    state_groups: int
    state_layers: int
    state_bytes: int
    state_blocks_per_group: int

    @property
    def block_bytes(self) -> int:
        return self.pages_per_block * self.page_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks of a request that do not depend on its length: what DCP does not shard."""
        return self.state_groups * self.state_blocks_per_group

    @property
    def span_tokens(self) -> int:
        """Tokens of a request that one more block (on each of the `dcp` ranks) holds."""
        return self.block_tokens * self.dcp

    def request_blocks(self, num_tokens: int) -> int:
        """Blocks on each rank of a request of `num_tokens` >= 1 tokens: ceil(ceil(n / dcp) / B) + state_blocks.

        The interleave is not in it. Position p is in block p // (B * dcp) of its owner, for every interleave that
        divides B: a block of all ranks together is a whole number of turns, and each rank gets B tokens of it. Within the
        last block ranks differ by up to one interleave, but a block is taken whole.
        """
        tokens = ceil_div(whole("num_tokens", num_tokens, 1), self.dcp)
        return self.attention_groups * ceil_div(tokens, self.block_tokens) + self.state_blocks

    @property
    def state_bytes_per_request(self) -> int:
        """Of one state of a request in all layers, on each rank, without padding."""
        return self.state_layers * self.state_bytes

    @property
    def state_page_padding(self) -> float:
        """What a state page is longer than a state, as a share of the state: vLLM's "Padding mamba page size by"."""
        return (self.page_bytes - self.state_bytes) / self.state_bytes if self.state_layers else 0.0

    @property
    def padding_layers(self) -> int:
        """Pages of the state groups' blocks that no layer uses."""
        return self.state_groups * self.pages_per_block - self.state_layers

    @property
    def padding_layer_share(self) -> float:
        """Of the state layers: vLLM's "Add 3 padding layers, may waste at most"."""
        return self.padding_layers / self.state_layers if self.state_layers else 0.0


def cache_layout(
    model: ModelSpec,
    *,
    tp: int,
    dcp: int = 1,
    kv_dtype: str = "fp8",
    state_dtype: str = "fp32",
    prefix_caching: bool = True,
    num_speculative_tokens: int = 0,
    draft_layers: int = 0,
    state_blocks: int | None = None,
    block_size: int | None = None,
    block_alignment: int = BLOCK_ALIGNMENT,
    interleave: int = 1,
) -> CacheLayout:
    """The blocks of `model` on `tp` ranks, in DCP groups of `dcp`.

    Args:
        model: what the ranks hold of a model.
        tp, dcp: see ModelSpec.check_ranks.
        kv_dtype: "fp8", "bf16" or "fp8_ds_mla". state_dtype: "fp32" or "bf16".
        prefix_caching: a request then keeps one more state in each group, the last one at the end of a block.
        num_speculative_tokens: drafts that are verified in a step: the convolution keeps as many inputs more, and a
            request as many states more in each group.
        draft_layers: layers of a draft model whose rows are like the model's: they join its attention layers.
        state_blocks: states of a request in each group, in place of the rule, which is 1 + num_speculative_tokens, or
            2 + num_speculative_tokens with prefix caching. vLLM 0.33 has 3 + num_speculative_tokens where its prefill
            kernel exports checkpoints.
        block_size: tokens of a block on a rank. None: 64 for MLA, 16 for GQA (vLLM's, which some attention backends
            raise); with state layers, the smallest multiple of block_alignment whose page holds a state.
        block_alignment: tokens; with state layers alone.
        interleave: consecutive tokens that one rank holds, a divisor of the block. It changes nothing else here: see
            CacheLayout.request_blocks.

    Raises:
        DcpInvalidArgument: with the rule that is broken.
    """
    if not isinstance(model, ModelSpec):
        fail("model must be a ModelSpec", type(model).__name__)
    model.check_ranks(tp, dcp)
    tp, dcp, interleave = int(tp), int(dcp), whole("interleave", interleave, 1)
    num_speculative_tokens = whole("num_speculative_tokens", num_speculative_tokens, 0)
    row_bytes = model.kv_row_bytes(tp, kv_dtype)
    state_bytes = model.state_bytes(tp, state_dtype, num_speculative_tokens)
    attention_layers = model.num_attention_layers + whole("draft_layers", draft_layers, 0)
    block_tokens = _block_tokens(
        model, row_bytes, state_bytes, block_size, whole("block_alignment", block_alignment, 1)
    )
    divides("interleave", interleave, "the tokens of a block", block_tokens)
    attention_groups, state_groups = _groups(attention_layers, model.num_state_layers)
    if state_blocks is not None and not state_groups:
        fail("state_blocks must not be given for a model without state layers", state_blocks)
    per_group = (2 if prefix_caching else 1) + num_speculative_tokens if state_blocks is None else state_blocks
    return CacheLayout(
        dcp=dcp,
        interleave=interleave,
        block_tokens=block_tokens,
        page_bytes=block_tokens * row_bytes,
        pages_per_block=max(
            ceil_div(attention_layers, attention_groups),
            ceil_div(model.num_state_layers, state_groups) if state_groups else 0,
        ),
        attention_groups=attention_groups,
        attention_layers=attention_layers,
        state_groups=state_groups,
        state_layers=model.num_state_layers,
        state_bytes=state_bytes,
        state_blocks_per_group=whole("state_blocks", per_group, 1) if state_groups else 0,
    )


def _block_tokens(model: ModelSpec, row_bytes: int, state_bytes: int, asked: int | None, alignment: int) -> int:
    if asked is not None:
        asked = whole("block_size", asked, 1)
    if not state_bytes:
        return asked or (MLA_BLOCK_SIZE if model.is_mla else BLOCK_SIZE)
    least = alignment * ceil_div(state_bytes, alignment * row_bytes)
    if asked is not None and (asked < least or asked % alignment):
        fail(f"block_size must be a multiple of {alignment} and at least {least}: its page holds a state", asked)
    return asked or least


def _groups(attention_layers: int, state_layers: int) -> tuple[int, int]:
    """Of how many groups each kind of layer is: of the size of the smaller kind, or of the larger one when that has
    less than half as many layers again."""
    if not state_layers:
        return 1, 0
    least, most = sorted((attention_layers, state_layers))
    size = most if 2 * most < 3 * least else least
    return ceil_div(attention_layers, size), ceil_div(state_layers, size)
