"""Context of a prefill on CPUs under DCP: vLLM's own path *without* DCP, whose gather of a chunk from the paged cache brings
the rows of all ranks in sequence order. Its path with DCP copies each row three times more: into a slab, out of the gathered
rows, and into order.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from dcpkernels.integrations.vllm_context import chunk_plan
from dcpkernels.integrations.vllm_workspaces import KVGather


class _Now(threading.local):
    gather_next: Any = None  # what takes the place of vLLM's gather in this thread


_now = _Now()


@contextmanager
def across_ranks(chunked_context: Any, block_table: torch.Tensor, gather: KVGather, interleave: int) -> Iterator[None]:
    """While it lasts, `ops.gather_mla_context_cache_cpu` is called once for each of vLLM's chunks, in their order, on all
    ranks, and gathers that chunk across them. block_table: int32 [prefills, max_blocks] of this rank."""
    chunks = iter(chunked_context.chunks)

    def gather_next(cache: torch.Tensor, out: torch.Tensor) -> None:
        chunk = next(chunks)
        tables = block_table[chunk.request_slice]
        plan = chunk_plan(chunk, tables, block_size=cache.shape[1], interleave=interleave, gather=gather)
        gather.gather_in_order(out, cache, plan)

    _now.gather_next = gather_next
    try:
        yield
    finally:
        _now.gather_next = None


def replace_gather(custom_ops: ModuleType) -> None:
    """`custom_ops` is vllm._custom_ops."""
    vllms = custom_ops.gather_mla_context_cache_cpu

    @functools.wraps(vllms)
    def gather_mla_context_cache_cpu(
        *,
        src_cache: torch.Tensor,
        dst: torch.Tensor,
        block_table: torch.Tensor,
        starts: torch.Tensor,
        cu_seq_lens: torch.Tensor,
    ) -> None:
        if _now.gather_next is not None:
            return _now.gather_next(src_cache, dst)
        return vllms(src_cache=src_cache, dst=dst, block_table=block_table, starts=starts, cu_seq_lens=cu_seq_lens)

    custom_ops.gather_mla_context_cache_cpu = gather_mla_context_cache_cpu
