"""The gathers over symmetric memory: their buffers, as tensors, and what runs their calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check
from dcpkernels.config import WorkspaceConfig
from dcpkernels.region_layout import RegionLayout

if TYPE_CHECKING:
    from dcpkernels.kv_gather_plan import KVGatherPlan

Memory = Callable[[int, int], Any]  # (offset, bytes) -> a buffer that keeps its memory mapped
ParallelFor = Callable[[int], Any]  # stream index -> parallel_for of calls on it, or None


class QueryPlan:
    """Runs calls of one shape. `view` is what they return, None where they have an `out`."""

    def __init__(self, run: Callable[..., int], view: torch.Tensor | None) -> None:
        self._run, self.view = run, view

    def __call__(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None, scale: Any) -> int:
        addresses = [part.data_ptr() for part in parts]
        addresses += [0] * (_MAX_PARTS - len(parts))
        out_address = 0 if out is None else out.data_ptr()
        if isinstance(scale, torch.Tensor):
            return self._run(addresses, out_address, scale.data_ptr(), 1.0)
        return self._run(addresses, out_address, 0, 1.0 if scale is None else scale)


_MAX_PARTS = _check.MAX_QUERY_PARTS


class DirectGathers:
    """Of one rank. `memory` is of the region that the buffers lie in."""

    def __init__(
        self,
        module: Any,
        endpoint: Any,
        config: WorkspaceConfig,
        layout: RegionLayout,
        memory: Memory,
        parallel_for: ParallelFor,
    ) -> None:
        self._module, self._endpoint, self._config, self._layout = module, endpoint, config, layout
        self._parallel_for = parallel_for
        lanes = range(config.num_lanes)
        self._query: list[torch.Tensor] = []
        self._kv: list[list[torch.Tensor]] = []
        if "query_gather" in layout.ops:
            self._query = [_bytes_of(memory, self._query_offset(lane), layout.query_buffer_bytes) for lane in lanes]
        if "kv_gather" in layout.ops:
            self._kv = [
                [_bytes_of(memory, self._kv_offset(lane, index), layout.kv_buffer_bytes) for index in (0, 1)]
                for lane in lanes
            ]
            self._kv_lanes = [self._kv_lane(lane) for lane in lanes]

    def close(self) -> None:
        """The memory goes when nobody refers to a view any more."""
        self._query, self._kv = [], []

    # -- query_gather

    def _query_offset(self, lane: int) -> int:
        return self._layout.gather_parts["query_gather.buffer"].offset + lane * self._layout.query_buffer_bytes

    def query_plan(
        self,
        lane: int,
        *,
        num_tokens: int,
        dtype: torch.dtype,
        source_dtype: torch.dtype | None,
        parts: list[tuple[int, int, int, int]],
        out_strides: tuple[int, int] | None,
    ) -> QueryPlan:
        config = self._config
        head_bytes = config.query_head_dim * dtype.itemsize
        run = self._query_calls(
            lane,
            dtype=_check.GATHER_DTYPE_CODES[dtype],
            source_dtype=-1 if source_dtype is None else _check.DTYPE_CODES[source_dtype],
            num_tokens=num_tokens,
            head_bytes=head_bytes,
            parts=parts,
            out=out_strides,
            releases=False,
        )
        if out_strides is not None:
            return QueryPlan(run, None)
        shape = (num_tokens, config.num_heads, config.query_head_dim)
        return QueryPlan(run, _view(self._query[lane], shape, dtype))

    def release_plan(self, lane: int) -> Callable[[], int]:
        run = self._query_calls(
            lane,
            dtype=0,
            source_dtype=-1,
            num_tokens=0,
            head_bytes=self._layout.query_head_bytes,
            parts=[],
            out=None,
            releases=True,
        )
        return lambda: run([0] * _MAX_PARTS, 0, 0, 1.0)

    def _query_calls(self, lane: int, **call: Any) -> Callable[..., int]:
        layout = self._layout
        stream_idx = layout.stream_idx("query_gather", lane)
        plan = self._module.QueryGatherPlan(
            endpoint=self._endpoint,
            lane=lane,
            stream_idx=stream_idx,
            num_local_heads=layout.num_local_heads,
            max_round_rows=layout.max_num_tokens,
            buffer_offset=self._query_offset(lane),
            buffer_bytes=layout.query_buffer_bytes,
            **call,
        )
        return self._in_threads(plan, plan.run_in_threads, stream_idx)

    # -- kv_gather

    def _kv_offset(self, lane: int, index: int) -> int:
        return self._layout.gather_parts["kv_gather.buffers"].offset + (2 * lane + index) * self._layout.kv_buffer_bytes

    def _kv_lane(self, lane: int) -> _KvLane:
        stream_idx = self._layout.stream_idx("kv_gather", lane)
        calls = self._module.KvGatherLane(
            endpoint=self._endpoint,
            lane=lane,
            stream_idx=stream_idx,
            buffer_offset=self._kv_offset(lane, 0),
            buffer_bytes=self._layout.kv_buffer_bytes,
        )
        start = self._in_threads(calls.start, calls.start_in_threads, stream_idx)
        wait = self._in_threads(calls.wait, calls.wait_in_threads, stream_idx)
        return _KvLane(calls, start, wait)

    def kv_start(self, lane: int, kv_cache: torch.Tensor, plan: KVGatherPlan, chunk_idx: int, digest: int) -> int:
        sources, finals = plan.source_rows(chunk_idx), plan.final_rows(chunk_idx)
        size = kv_cache.element_size()
        source = self._module.KvGatherSource(
            cache=kv_cache.data_ptr(),
            block_size=kv_cache.shape[1],
            block_stride=kv_cache.stride(0) * size,
            row_stride=kv_cache.stride(1) * size,
            row_bytes=kv_cache.shape[2] * size,
            source_rows=sources.ctypes.data,
            final_rows=finals.ctypes.data,
            num_source_rows=len(sources),
        )
        return self._kv_lanes[lane].start(source, chunk_idx, digest)

    def kv_wait(
        self,
        lane: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        chunk_idx: int,
        digest: int,
        out: torch.Tensor | None,
        scale: Any,
    ) -> tuple[int, torch.Tensor | None]:
        """(status, the chunk [rows, dim] where there is no `out`)."""
        kv_lane = self._kv_lanes[lane]
        address, stride = (
            (0, 0) if out is None or out.numel() == 0 else (out.data_ptr(), out.stride(0) * out.element_size())
        )
        is_tensor = isinstance(scale, torch.Tensor)
        status = kv_lane.wait(
            chunk_idx,
            digest,
            shape[0],
            address,
            stride,
            scale.data_ptr() if is_tensor else 0,
            1.0 if is_tensor or scale is None else scale,
        )
        if status != 0 or out is not None:
            return status, None
        return status, _view(self._kv[lane][kv_lane.calls.buffer_idx], shape, dtype)

    def _in_threads(
        self, run: Callable[..., int], run_in_threads: Callable[..., int], stream_idx: int
    ) -> Callable[..., int]:
        parallel_for = self._parallel_for(stream_idx)
        return run if parallel_for is None else functools.partial(run_in_threads, parallel_for)


class _KvLane:
    def __init__(self, calls: Any, start: Callable[..., int], wait: Callable[..., int]) -> None:
        self.calls, self.start, self.wait = calls, start, wait


def _bytes_of(memory: Memory, offset: int, num_bytes: int) -> torch.Tensor:
    with torch.inference_mode(False):  # else its views would be inference tensors for ever
        return torch.frombuffer(memory(offset, num_bytes), dtype=torch.uint8)


def _view(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
