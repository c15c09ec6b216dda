"""The gathers over symmetric memory: their buffers, as tensors, and what runs their calls."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check
from dcpkernels._check import Chunk
from dcpkernels.config import WorkspaceConfig
from dcpkernels.region_layout import RegionLayout

if TYPE_CHECKING:
    from dcpkernels._cpu_device import CpuDevice
    from dcpkernels._gpu_device import GpuDevice


class QueryPlan:
    """Runs calls of one shape. `view` is what they return, None where they have an `out`."""

    def __init__(self, run: Callable[..., int], view: torch.Tensor | None) -> None:
        self._run, self.view = run, view

    def __call__(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None, scale: Any) -> int:
        addresses = [part.data_ptr() for part in parts]
        addresses += [0] * (_check.MAX_QUERY_PARTS - len(parts))
        out_address = 0 if out is None else out.data_ptr()
        if isinstance(scale, torch.Tensor):
            return self._run(addresses, out_address, scale.data_ptr(), 1.0)
        return self._run(addresses, out_address, 0, 1.0 if scale is None else scale)


class DirectGathers:
    """Of one rank."""

    def __init__(
        self,
        module: Any,
        endpoint: Any,
        config: WorkspaceConfig,
        layout: RegionLayout,
        device: CpuDevice | GpuDevice,
    ) -> None:
        self._module, self._endpoint, self._config, self._layout, self._device = module, endpoint, config, layout, device
        self.gathers_at_once = device.gathers_at_once  # whether `kv_whole` is there
        lanes = range(config.num_lanes)
        self._query: list[torch.Tensor] = []
        self._kv: list[list[torch.Tensor]] = []
        self._kv_lanes: list[_KvLane] = []
        if "query_gather" in layout.ops:
            self._query = [device.buffer_tensor(self._query_offset(lane), layout.query_buffer_bytes) for lane in lanes]
        if "kv_gather" in layout.ops:
            self._kv = [
                [device.buffer_tensor(self._kv_offset(lane, index), layout.kv_buffer_bytes) for index in (0, 1)]
                for lane in lanes
            ]
            self._kv_lanes = [self._kv_lane(lane) for lane in lanes]

    def close(self) -> None:
        """The memory goes when nobody refers to a view any more."""
        self._query, self._kv, self._kv_lanes = [], [], []

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
        return QueryPlan(run, view_of(self._query[lane], shape, dtype))

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
        return lambda: run([0] * _check.MAX_QUERY_PARTS, 0, 0, 1.0)

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
        return self._device.calls(plan, plan.run_in_threads, stream_idx)

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
        start = self._device.calls(calls.start, calls.start_in_threads, stream_idx)
        wait = self._device.calls(calls.wait, calls.wait_in_threads, stream_idx)
        whole = self._device.calls(calls.whole, calls.whole, stream_idx) if self._device.gathers_at_once else None
        return _KvLane(self._module, self._device, calls, start, wait, whole)

    def kv_start(self, lane: int, kv_cache: torch.Tensor, chunk: Chunk) -> int:
        kv_lane = self._kv_lanes[lane]
        return kv_lane.start(kv_cache.data_ptr(), kv_lane.source(kv_cache, chunk), chunk.index, chunk.digest)

    def is_reserved(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that the gathers hand out."""
        return self._endpoint.is_reserved(tensor.data_ptr(), span_bytes(tensor))

    def kv_wait(self, lane: int, chunk: Chunk, out: torch.Tensor | None, scale: Any) -> tuple[int, torch.Tensor | None]:
        """(status, the chunk [rows, dim] where there is no `out`)."""
        status = self._kv_lanes[lane].wait(chunk.index, chunk.digest, *_result(chunk, out, scale))
        return self._chunk(status, lane, chunk, out)

    def kv_whole(self, lane: int, kv_cache: torch.Tensor, chunk: Chunk) -> tuple[int, torch.Tensor | None]:
        """`kv_start` and `kv_wait` in one kernel, of a chunk that stays as it is."""
        kv_lane = self._kv_lanes[lane]
        rows = (kv_cache.data_ptr(), kv_lane.source(kv_cache, chunk), chunk.index, chunk.digest)
        return self._chunk(kv_lane.whole(*rows, chunk.shape[0]), lane, chunk, None)

    def _chunk(self, status: int, lane: int, chunk: Chunk, out: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
        if status != 0 or out is not None:
            return status, None
        return status, self._kv_lanes[lane].view(self._kv[lane], chunk)


class _KvLane:
    """What runs the calls of one lane. It remembers what the chunks of the plan that was used last come to: after a chunk
    has gone through the caches, all that Python does again costs ten times what it costs in a loop."""

    def __init__(
        self,
        module: Any,
        device: CpuDevice | GpuDevice,
        calls: Any,
        start: Callable[..., int],
        wait: Callable[..., int],
        whole: Callable[..., int] | None,
    ) -> None:
        self._module, self._device, self._calls = module, device, calls
        self.start, self.wait, self.whole = start, wait, whole
        self._plan: Any = None  # keeps the rows that the sources point to
        self._sources: dict[Any, tuple[Any, Any]] = {}  # and copies of them
        self._copies: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        self._views: dict[Any, torch.Tensor] = {}

    def source(self, kv_cache: torch.Tensor, chunk: Chunk) -> Any:
        if chunk.plan is not self._plan:
            self._plan, self._sources, self._views = chunk.plan, {}, {}
        block_stride, row_stride, _ = _check.byte_strides(kv_cache)
        key = (chunk.index, chunk.dtype, chunk.shape, kv_cache.shape[0], block_stride, row_stride)
        source, copies = self._sources.get(key, (None, ()))
        if source is None:
            size = kv_cache.element_size()
            rows, finals, copies = self._rows(chunk)
            source = self._module.KvGatherSource(
                dtype=_check.GATHER_DTYPE_CODES[chunk.dtype],
                block_size=chunk.plan.block_size,
                block_stride=block_stride,
                row_stride=row_stride,
                row_bytes=chunk.shape[1] * size,
                source_rows=rows,
                final_rows=finals,
                num_source_rows=len(chunk.plan.source_rows(chunk.index)),
                cache_bytes=span_bytes(kv_cache),
            )
            self._sources[key] = source, copies
        if copies:
            self._device.uses(copies)
        return source

    def _rows(self, chunk: Chunk) -> tuple[int, int, tuple[Any, ...]]:
        """Where kernels find the rows of the chunk, and copies that were made for that. Those live as long as the plan, for
        a captured graph may come back to them."""
        known = self._copies.setdefault(chunk.plan, {})
        if chunk.index not in known:
            rows, keep_rows = self._device.rows(chunk.plan.source_rows(chunk.index))
            finals, keep_finals = self._device.rows(chunk.plan.final_rows(chunk.index))
            known[chunk.index] = rows, finals, tuple(keep for keep in (keep_rows, keep_finals) if keep is not None)
        return known[chunk.index]

    def view(self, buffers: list[torch.Tensor], chunk: Chunk) -> torch.Tensor:
        """Of the chunk that was waited for last."""
        key = (self._calls.buffer_idx, chunk.shape, chunk.dtype)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = view_of(buffers[key[0]], chunk.shape, chunk.dtype)
        return view.detach()


def _result(chunk: Chunk, out: torch.Tensor | None, scale: Any) -> tuple[int, int, int, int, float]:
    """What a wait is told of the chunk that is wanted: rows; address and row stride of `out`; the scale's, or itself."""
    has_rows = out is not None and out.numel() > 0
    address, stride = (out.data_ptr(), _check.byte_strides(out)[0]) if has_rows else (0, 0)
    if isinstance(scale, torch.Tensor):
        return chunk.shape[0], address, stride, scale.data_ptr(), 1.0
    return chunk.shape[0], address, stride, 0, 1.0 if scale is None else scale


def span_bytes(tensor: torch.Tensor) -> int:
    """From its first to its last byte."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def view_of(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of a buffer, as a tensor."""
    with torch.inference_mode(False):
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
