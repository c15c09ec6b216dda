"""How many tokens and requests fit: what vLLM prints as "GPU KV cache size", and what it is made of. All counts are
whole numbers, computed exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from dcpkernels.planner.cache_layout import CacheLayout, cache_layout
from dcpkernels.planner.checks import fail, whole
from dcpkernels.planner.models import ModelSpec


@dataclass(frozen=True)
class Capacity:
    """What fits into `available_bytes` of each rank's memory.

    Args:
        layout: the blocks.
        max_model_len: tokens of the longest request, L. It is what the numbers of vLLM are about: it prints how many
            requests of this length fit, times this length.
        available_bytes: for the KV cache, on each rank.

    Raises:
        DcpInvalidArgument: max_model_len or available_bytes is below 1. Too little memory for one request is none: then
            `concurrency` is below 1.

    `block_tokens`, `num_blocks`, `state_blocks` and `dcp` are what a simulation of requests needs.
    """

    layout: CacheLayout
    max_model_len: int
    available_bytes: int

    def __post_init__(self) -> None:
        for name in ("max_model_len", "available_bytes"):  # as Python's int: numpy's would overflow
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))

    @property
    def dcp(self) -> int:
        return self.layout.dcp

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    @property
    def state_blocks(self) -> int:
        return self.layout.state_blocks

    @property
    def num_blocks(self) -> int:
        """N. vLLM never gives out one of them (its null block), and counts it all the same."""
        return self.available_bytes // self.layout.block_bytes

    @property
    def blocks_per_request(self) -> int:
        """Of a request of max_model_len tokens."""
        return self.layout.request_blocks(self.max_model_len)

    @property
    def exact_concurrency(self) -> Fraction:
        return Fraction(self.num_blocks, self.blocks_per_request)

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len tokens that fit."""
        return float(self.exact_concurrency)

    @property
    def tokens(self) -> int:
        """Of requests of max_model_len tokens: floor(N / blocks_per_request * L). (vLLM divides in floating point, which
        may be one less when the quotient is whole.)"""
        return self.num_blocks * self.max_model_len // self.blocks_per_request

    @property
    def state_token_equivalents(self) -> int:
        """Tokens of a request that would take as many blocks as its state."""
        return self.state_blocks * self.layout.span_tokens // self.layout.attention_groups

    @property
    def short_request_limit(self) -> int:
        """Requests that fit at a time, however short they are: each takes a block of each attention group and its state
        blocks. Holds for requests of up to `short_request_tokens` tokens; the longer ones are fewer."""
        return self.num_blocks // self.layout.request_blocks(1)

    @property
    def short_request_tokens(self) -> int:
        return self.layout.span_tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes, tokens and counts; shares as fractions of 1."""
        layout = self.layout
        return {
            "dcp": self.dcp,
            "tokens": self.tokens,
            "blocks": self.num_blocks,
            "block_tokens": self.block_tokens,
            "block_bytes": layout.block_bytes,
            "page_bytes": layout.page_bytes,
            "pages_per_block": layout.pages_per_block,
            "blocks_per_request": self.blocks_per_request,
            "concurrency": self.concurrency,
            "max_model_len": self.max_model_len,
            "available_bytes": self.available_bytes,
            "state_blocks": self.state_blocks,
            "state_groups": layout.state_groups,
            "state_bytes_per_request": layout.state_bytes_per_request,
            "state_token_equivalents": self.state_token_equivalents,
            "state_page_padding": layout.state_page_padding,
            "padding_layers": layout.padding_layers,
            "padding_layer_share": layout.padding_layer_share,
            "short_request_limit": self.short_request_limit,
            "short_request_tokens": self.short_request_tokens,
        }


def plan_capacity(
    model: ModelSpec,
    *,
    tp: int,
    max_model_len: int,
    dcp: int = 1,
    available_bytes: int | None = None,
    num_blocks: int | None = None,
    **options: Any,
) -> Capacity:
    """What fits of `model` into `available_bytes` of each of `tp` ranks, or into `num_blocks` blocks there (vLLM's
    num_gpu_blocks_override). `options` as in cache_layout.

        plan_capacity(find_model("kimi-k3"), tp=8, dcp=8, max_model_len=2**20, available_bytes=gib("34.28")).tokens

    Raises DcpInvalidArgument with the rule that is broken.
    """
    layout = cache_layout(model, tp=tp, dcp=dcp, **options)
    if (available_bytes is None) == (num_blocks is None):
        fail("one of available_bytes and num_blocks must be given", f"{available_bytes} and {num_blocks}")
    if available_bytes is None:
        available_bytes = whole("num_blocks", num_blocks, 1) * layout.block_bytes
    return Capacity(layout, max_model_len, available_bytes)


@dataclass(frozen=True)
class Decomposition:
    """Why `plan` holds more tokens than `baseline`: ratio = memory_factor * dcp_factor, exactly."""

    baseline: Capacity
    plan: Capacity

    @property
    def memory_factor(self) -> Fraction:
        """Blocks against blocks: not DCP's doing."""
        return Fraction(self.plan.num_blocks, self.baseline.num_blocks)

    @property
    def dcp_factor(self) -> Fraction:
        """Blocks per request against blocks per request: what the same memory gives. Below the ratio of the DCP sizes,
        since state blocks are not sharded and the last block is not full."""
        return Fraction(self.baseline.blocks_per_request, self.plan.blocks_per_request)

    @property
    def ratio(self) -> Fraction:
        return self.memory_factor * self.dcp_factor

    def to_dict(self) -> dict[str, Any]:
        return {
            "ratio": float(self.ratio),
            "memory_factor": float(self.memory_factor),
            "dcp_factor": float(self.dcp_factor),
            "baseline": self.baseline.to_dict(),
        }


def decompose(baseline: Capacity, plan: Capacity) -> Decomposition:
    """The ratio of two capacities as a factor of memory and a factor of DCP.

    Raises DcpInvalidArgument when they differ in more than memory and DCP (then there are more than two causes), or when
    the baseline holds nothing.
    """
    first, second = (replace(capacity.layout, dcp=1, interleave=1) for capacity in (baseline, plan))
    if first != second:
        fail("decompose must be given capacities whose blocks are alike", f"{first} and {second}")
    if baseline.max_model_len != plan.max_model_len:
        given = f"{baseline.max_model_len} and {plan.max_model_len}"
        fail("decompose must be given capacities with the same max_model_len", given)
    if not baseline.num_blocks:
        fail("the baseline must have memory for at least one block", baseline.available_bytes)
    return Decomposition(baseline, plan)
