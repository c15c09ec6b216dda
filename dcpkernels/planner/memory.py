"""Memory for the KV cache: what a GPU has, less weights, less our workspace, less what else the engine takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from dcpkernels.planner.cache_layout import CacheLayout
from dcpkernels.planner.checks import GIB, Number, decimal, fail, gib, whole
from dcpkernels.planner.models import MODELS, ModelSpec
from dcpkernels.region_layout import RegionLayout, align_up, engine_rows

# GiB of weights on each rank, by model and TP. Kimi-K3: experts in MXFP4 and all else in bf16, sharded as vLLM does it:
# routed experts 168.4 (an eighth), KDA 7.1, MLA 2.0, shared experts 2.8, latent projections 8.8 and router 1.1 (on every
# rank in full), the rest 1.5. A test adds it up from the parameters.
KNOWN_WEIGHTS_GIB = {("kimi-k3", 8): Decimal("191.7")}

DEFAULT_MAX_NUM_SEQS = 128
CHUNK_TOKENS = 64 * 1024  # of a chunk of prefill context, before it is rounded up (vLLM)
_OUT_BYTES = 2  # attention's partial output is bf16


def known_weights_gib(model: ModelSpec, tp: int, draft_layers: int = 0) -> Decimal:
    """Of all of a built-in model: a stage of it, with other numbers of layers, has others, and a draft model adds its own. Raises DcpInvalidArgument when
    they are not known."""
    known = KNOWN_WEIGHTS_GIB.get((model.name, tp))
    if known is None or draft_layers or model != MODELS.get(model.name):
        drafts = f" and {draft_layers} draft layers" if draft_layers else ""
        layers = f"{model.num_attention_layers} + {model.num_state_layers} layers of {model.name}{drafts}"
        fail("the weights of a rank must be given (--weights-gib)", f"{layers} at tp={tp}, whose are not known")
    return known


def workspace_region(
    model: ModelSpec,
    layout: CacheLayout,
    *,
    tp: int,
    kv_dtype: str,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    draft_tokens: int = 0,
    num_lanes: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> RegionLayout | None:
    """Where the three ops' memory lies in a GPU's symmetric region, for the decode batches of an engine. None with
    dcp = 1: nothing is exchanged.

    The same as `Workspace.size(WorkspaceConfig.for_engine(...), dcp, "cuda")` with the query in fp8 when the cache is
    "fp8" (bf16 otherwise) and rows of KV as they are in the cache.

    Args:
        max_num_seqs, draft_tokens: rows of a decode batch are max_num_seqs * (1 + draft_tokens).
        num_lanes: micro-batches that run at the same time.
        chunk_tokens: tokens of a gathered chunk of prefill context, rounded up to whole blocks and whole turns of the
            interleave, as in vLLM (65,536 become 66,048 with blocks of 1,536); 0 = the engine does not gather KV.

    Raises:
        DcpInvalidArgument: a count is out of range, or the model's number of heads is not known.
    """
    rows = engine_rows(max_num_seqs, draft_tokens)
    whole("num_lanes", num_lanes, 1)
    chunk_tokens = whole("chunk_tokens", chunk_tokens, 0)
    if layout.dcp == 1:
        return None
    if model.num_heads is None:
        fail("num_heads must be given for the size of the workspace (--num-heads)", model.num_heads)
    query_dim = model.kv_lora_rank + model.qk_rope_head_dim if model.is_mla else model.head_dim
    return RegionLayout.for_device(
        "cuda",
        num_ranks=layout.dcp,
        num_heads=model.num_heads // tp * layout.dcp,
        head_dim=model.kv_lora_rank if model.is_mla else model.head_dim,
        max_num_tokens=rows,
        item_bytes=_OUT_BYTES,
        num_lanes=num_lanes,
        num_channels=None,
        query_head_bytes=query_dim * (1 if kv_dtype == "fp8" else 2),
        kv_chunk_rows=align_up(chunk_tokens, math.lcm(layout.block_tokens, layout.dcp * layout.interleave)),
        kv_row_bytes=model.kv_row_bytes(tp, kv_dtype) if chunk_tokens else 0,
        multicast=True,
    )


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one GPU. `available_bytes` is what is left for the KV cache.

    Args:
        hbm_bytes: of the GPU.
        utilisation: the share of it that the engine may take (vLLM's gpu_memory_utilization), in 0 .. 1.
        weights_bytes, workspace_bytes: of this rank.
        other_bytes: what else the engine takes before it sizes the cache: activations of its profile run, graphs,
            communication buffers. It has to be measured: engines log it.

    Raises:
        DcpInvalidArgument: utilisation is out of range, or nothing is left.
    """

    hbm_bytes: int
    utilisation: Fraction
    weights_bytes: int
    workspace_bytes: int
    other_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            fail("utilisation must be above 0 and at most 1", float(self.utilisation))
        if self.available_bytes < 1:
            taken = self.weights_bytes + self.workspace_bytes + self.other_bytes
            fail(
                "weights, workspace and other memory must leave something of the GPU's memory * utilisation = "
                f"{self.usable_bytes / GIB:.2f} GiB",
                f"{taken / GIB:.2f} GiB: {self.weights_bytes / GIB:.2f} + {self.workspace_bytes / GIB:.2f} + "
                f"{self.other_bytes / GIB:.2f}",
            )

    @property
    def usable_bytes(self) -> int:
        return int(self.hbm_bytes * self.utilisation)

    @property
    def available_bytes(self) -> int:
        return self.usable_bytes - self.weights_bytes - self.workspace_bytes - self.other_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "hbm_bytes": self.hbm_bytes,
            "utilisation": float(self.utilisation),
            "weights_bytes": self.weights_bytes,
            "workspace_bytes": self.workspace_bytes,
            "other_bytes": self.other_bytes,
            "available_bytes": self.available_bytes,
        }


def memory_budget(
    model: ModelSpec,
    layout: CacheLayout,
    *,
    tp: int,
    kv_dtype: str,
    hbm_gib: Number,
    utilisation: Number = "0.9",
    weights_gib: Number | None = None,
    other_gib: Number = 0,
    **workspace: Any,
) -> MemoryBudget:
    """What a GPU of `hbm_gib` GiB has for the KV cache. `weights_gib` are those of a rank, None = the known ones;
    `workspace` as in workspace_region; utilisation 0.9 is vLLM's default.

    Raises DcpInvalidArgument for a number that cannot be, weights that are not known, or when nothing is left."""
    if weights_gib is None:
        weights_gib = known_weights_gib(model, tp, layout.attention_layers - model.num_attention_layers)
    region = workspace_region(model, layout, tp=tp, kv_dtype=kv_dtype, **workspace)
    return MemoryBudget(
        hbm_bytes=gib(hbm_gib, "the GPU's memory", above_zero=True),
        utilisation=decimal("utilisation", utilisation),
        weights_bytes=gib(weights_gib, "weights"),
        workspace_bytes=0 if region is None else region.num_bytes,
        other_bytes=gib(other_gib, "other memory"),
    )
