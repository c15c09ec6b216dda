"""The context of a prefill in sequence order: what a vLLM backend of one's own can gather in place of vLLM's slab, padding
and sort (MLACommonBaseImpl._context_parallel_compute_prefill_context).

    gather, plan = context_gather(manager), chunk_plan(chunk, block_table, ...)
    gather.gather_in_order(workspace[: chunk.num_context_tokens], kv_cache, plan)

`chunk` is one of vLLM's MLACommonPrefillMetadata.ContextChunk under DCP. Its requests are cut where a turn over all ranks
ends, so that what is left of a request is sharded as a request of its own would be.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dcpkernels import KVGatherPlan
from dcpkernels.integrations.vllm_workspaces import KVGather

_PLAN = "_dcpkernels_plan"


def context_gather(manager: Any) -> KVGather | None:
    """Ours, if the manager (vLLM's MLADCPManager) has it; else vLLM gathers."""
    owner = getattr(getattr(manager, "_kv_gather", None), "__self__", None)
    return owner if isinstance(owner, KVGather) else None


def chunk_plan(
    chunk: Any, block_table: torch.Tensor, *, block_size: int, interleave: int, gather: KVGather
) -> KVGatherPlan:
    """The plan of a chunk: all its requests, sequence order. Made once a step, kept on the chunk, used by every layer.

    block_table: int32 [num_requests of the chunk, max_blocks], this rank's, on the CPU. `plan.block_size` divides block_size:
    the cache has to be looked at in blocks of so many rows, as `KVGather.gather_in_order` does.
    """
    # Layers of a model ask alike; a draft model with a gather of its own may not.
    asked = (gather, block_size, interleave)
    kept_for, plan = getattr(chunk, _PLAN, (None, None))
    if kept_for == asked:
        return plan
    starts = chunk.local_starts  # of each request, in local slots
    # Blocks so small that each request begins with a whole one.
    size = math.gcd(block_size, *starts)
    tables = []
    for row, start, length in zip(block_table.numpy(), starts, chunk.padded_local_seq_lens, strict=True):
        slots = start + np.arange(0, length, size)
        columns = np.minimum(slots // block_size, len(row) - 1)  # past the end: padding, of which nothing is read
        tables.append(row[columns].astype(np.int64) * (block_size // size) + slots % block_size // size)
    workspace = gather.workspace
    plan = KVGatherPlan(
        chunk.seq_lens.tolist(),
        tables,
        block_size=size,
        num_ranks=workspace.num_ranks,
        rank=workspace.rank,
        chunk_size=workspace.config.kv_chunk_rows,
        interleave=interleave,
    )
    setattr(chunk, _PLAN, (asked, plan))
    return plan
