"""The gathers over torch.distributed: the same calls, buffers and errors as over symmetric memory (dcpkernels/_gathers.py).

A round: each rank packs its rows into its chunk of `staging`, the chunks go to all ranks, and the rows go from there to
their places. What a caller sees lies in buffers that are made once: addresses stay, and a view means what it means over
the other backend. (A view stays whole for longer than promised, because no peer writes into it.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dcpkernels import _check
from dcpkernels._check import Chunk
from dcpkernels._faults import QUERY_OPEN, QUERY_ROWS
from dcpkernels._gathers import span_bytes, view_of
from dcpkernels._streams import Refused, Stream, Streams
from dcpkernels.config import WorkspaceConfig
from dcpkernels.region_layout import RegionLayout

# Bytes are moved as integers of the same size: every torch function takes those, and none looks at their values.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Elements that are converted at a time: their fp32 values stay in a cache, and are never a copy of the whole.
_CONVERTED_ELEMENTS = 1 << 16
_BF16_NAN = 0x7FC0  # every NaN becomes this one in csrc; torch makes 0xffff


class CollectiveGathers:
    """Of one rank. `streams` has one for each lane of each gather that the configuration has."""

    gathers_at_once = False

    def __init__(self, streams: Streams, module: Any, config: WorkspaceConfig, layout: RegionLayout) -> None:
        self._streams, self._module, self._config, self._layout = streams, module, config, layout
        lanes = range(config.num_lanes)
        self._query: list[_QueryLane] = []
        self._kv: list[_KvLane] = []
        if "query_gather" in layout.ops:
            self._query = [_QueryLane(streams["query_gather", lane], layout.query_buffer_bytes) for lane in lanes]
        if "kv_gather" in layout.ops:
            self._kv = [_KvLane(streams["kv_gather", lane], layout.kv_buffer_bytes) for lane in lanes]

    @property
    def num_bytes(self) -> int:
        """Of the buffers, and of the staging of all calls so far."""
        return sum(lane.num_bytes for lane in itertools.chain(self._query, self._kv))

    # -- query_gather

    def query_plan(
        self,
        lane: int,
        *,
        num_tokens: int,
        dtype: torch.dtype,
        source_dtype: torch.dtype | None,
        parts: list[tuple[int, int, int, int]],
        out_strides: tuple[int, int] | None,
    ) -> _QueryPlan:
        """As of DirectGathers. Tensors bring their own strides: `parts` and `source_dtype` are not needed here."""
        has_out = out_strides is not None
        code = _check.GATHER_DTYPE_CODES[dtype]
        call = self._module.query_descriptor(lane=lane, dtype=code, has_out=has_out, num_tokens=num_tokens)
        shape = (num_tokens, self._config.num_heads, self._config.query_head_dim)
        view = None if has_out else view_of(self._query[lane].buffer, shape, dtype)
        return _QueryPlan(self, self._query[lane], call, shape, dtype, view)

    def release_plan(self, lane: int) -> Callable[[], int]:
        call = self._module.release_descriptor(lane=lane)
        query = self._query[lane]
        return lambda: self._streams.run(query.stream, call, prepare=lambda: 0, move=query.close)

    def run_query(self, plan: _QueryPlan, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None, scale: Any) -> int:
        def move() -> None:
            if plan.lane.open_call:
                raise Refused(QUERY_OPEN, plan.call)
            self._gather_query(plan, parts, out, scale)
            if out is None:
                plan.lane.open_call, plan.lane.open_rows = plan.call, plan.shape[0]

        return self._streams.run(plan.lane.stream, plan.call, prepare=lambda: self._memory(plan, parts, out), move=move)

    def _memory(self, plan: _QueryPlan, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> int:
        """The status of a call whose tensors have no memory or share some."""
        output = range(0) if out is None else _span(out)
        if _is_missing(output):
            return self._module.STATUS_NO_MEMORY
        if self.reserves(output):
            return self._module.STATUS_OVERLAP
        for part in map(_span, parts):
            if _is_missing(part):
                return self._module.STATUS_NO_MEMORY
            if _overlap(part, output) or self.reserves(part):
                return self._module.STATUS_OVERLAP
        return 0

    @torch.inference_mode()  # no history, whatever the caller's tensors are
    def _gather_query(
        self, plan: _QueryPlan, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None, scale: Any
    ) -> None:
        lane, group = plan.lane, plan.lane.stream.group
        num_tokens, _, head_dim = plan.shape
        num_local_heads, integer = self._layout.num_local_heads, _INTEGERS[plan.dtype.itemsize]
        target = view_of(lane.buffer, plan.shape, integer) if out is None else out.view(integer)
        target = target.unflatten(1, (group.num_ranks, num_local_heads))
        for first_row in range(0, num_tokens, self._layout.max_num_tokens):
            num_rows = min(self._layout.max_num_tokens, num_tokens - first_row)
            rows = slice(first_row, first_row + num_rows)
            shape = (group.num_ranks, num_rows, num_local_heads, head_dim)
            staging = view_of(lane.staging_of(math.prod(shape) * plan.dtype.itemsize), shape, plan.dtype)
            _pack_query(staging[group.rank], [part[rows] for part in parts], scale)
            chunks = [staging[0].nbytes] * group.num_ranks
            timeout_s = self._streams.deadline_s(lane.stream)
            group.all_gather(staging.view(-1).view(torch.uint8), chunks, timeout_s=timeout_s)
            target[rows].copy_(staging.view(integer).transpose(0, 1))

    def is_reserved(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that the gathers hand out."""
        return self.reserves(_span(tensor))

    def reserves(self, span: range) -> bool:
        lanes = itertools.chain(self._query, self._kv)
        return any(_overlap(span, _span(buffer)) for lane in lanes for buffer in lane.buffers)

    def close(self) -> None:
        """The memory goes when nobody refers to a view any more."""
        self._query, self._kv = [], []

    # -- for a2a_lse_reduce on the same lane

    def require_query_rows(self, lane: int, num_tokens: int) -> None:
        """A reduce after a gather merges the rows that were gathered. Raises Refused."""
        if self._query and self._query[lane].open_call and self._query[lane].open_rows != num_tokens:
            raise Refused(QUERY_ROWS, self._query[lane].open_call)

    def close_query(self, lane: int) -> None:
        if self._query:
            self._query[lane].close()

    # -- kv_gather

    def kv_start(self, lane: int, kv_cache: torch.Tensor, chunk: Chunk) -> int:
        """Packs this rank's rows. All that travels does so in `kv_wait`: a rank that has started a chunk owes the
        others nothing before that, and they do not wait for it here."""
        kv, module = self._kv[lane], self._module

        def start() -> int:
            if kv.started is not None:
                return module.STATUS_NOT_WAITED
            staged = _StagedChunk(chunk)
            rank = chunk.plan.rank
            if staged.rank_rows[rank] > 0 and kv_cache.data_ptr() == 0:
                return module.STATUS_NO_MEMORY
            if self.is_reserved(kv_cache):
                return module.STATUS_OVERLAP
            if self._streams.fault is not None:
                return module.STATUS_FAULTED
            first_byte = sum(staged.rank_bytes[:rank])
            mine = kv.staging_of(staged.num_bytes)[first_byte : first_byte + staged.rank_bytes[rank]]
            _pack_cache(mine, kv_cache, chunk.plan.source_rows(chunk.index))
            staged.call = self._chunk_call(lane, kv.num_started % 2, chunk)
            kv.started = staged
            kv.num_started += 1
            return 0

        return self._streams.run_local(kv.stream, start)

    def kv_wait(self, lane: int, chunk: Chunk, out: torch.Tensor | None, scale: Any) -> tuple[int, torch.Tensor | None]:
        """(status, the chunk [rows, dim] where there is no `out`)."""
        kv, module = self._kv[lane], self._module
        buffer_idx = (kv.num_started - 1) % 2  # of the chunk that was started last
        buffer = kv.buffers[buffer_idx]
        call = self._chunk_call(lane, buffer_idx, chunk)

        def prepare() -> int:
            if kv.started is None or kv.started.call != call:
                return module.STATUS_NOT_STARTED
            if out is not None and any(_overlap(_span(out), _span(other)) for other in kv.buffers):
                return module.STATUS_OVERLAP
            return 0

        def move() -> None:
            assert kv.started is not None
            self._exchange_chunk(kv, kv.started, buffer)
            if out is not None:
                _dequantise(out, view_of(buffer, chunk.shape, chunk.dtype), scale)
            kv.started = None

        def discard() -> None:
            kv.started = None

        status = self._streams.run(kv.stream, call, prepare=prepare, move=move, discard=discard)
        return status, view_of(buffer, chunk.shape, chunk.dtype) if status == 0 and out is None else None

    def _chunk_call(self, lane: int, buffer_idx: int, chunk: Chunk) -> int:
        return self._module.chunk_descriptor(
            lane=lane,
            dtype=_check.GATHER_DTYPE_CODES[chunk.dtype],
            buffer_idx=buffer_idx,
            chunk_idx=chunk.index,
            plan_digest=chunk.digest,
        )

    @torch.inference_mode()
    def _exchange_chunk(self, kv: _KvLane, chunk: _StagedChunk, buffer: torch.Tensor) -> None:
        group, staging = kv.stream.group, kv.staging_of(chunk.num_bytes)
        group.all_gather(staging, list(chunk.rank_bytes), timeout_s=self._streams.deadline_s(kv.stream))
        shape = (sum(chunk.rank_rows), chunk.row_bytes)
        # Read row by row of the chunk: several times as fast as written rank by rank.
        torch.index_select(
            view_of(staging, shape, torch.uint8), 0, chunk.staging_rows(), out=view_of(buffer, shape, torch.uint8)
        )


class _QueryPlan:
    """Runs calls of one shape. `view` is what they return, None where they have an `out`."""

    def __init__(
        self,
        gathers: CollectiveGathers,
        lane: _QueryLane,
        call: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        view: torch.Tensor | None,
    ) -> None:
        self._gathers, self.lane, self.call, self.shape, self.dtype, self.view = gathers, lane, call, shape, dtype, view

    def __call__(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor | None, scale: Any) -> int:
        return self._gathers.run_query(self, parts, out, scale)


class _StagedChunk:
    """One that was started: where its rows lie in `staging`, that of each rank one after the other."""

    def __init__(self, chunk: Chunk) -> None:
        self._plan, self._chunk_idx = chunk.plan, chunk.index
        self.row_bytes = row_bytes = chunk.shape[1] * chunk.dtype.itemsize
        self.rank_rows = chunk.plan.rank_rows(chunk.index)
        self.rank_bytes = tuple(rows * row_bytes for rows in self.rank_rows)
        self.num_bytes = sum(self.rank_bytes)
        self.call = 0

    def staging_rows(self) -> torch.Tensor:
        """Of each row of the chunk, the row of `staging`."""
        final_rows = [self._plan.final_rows(self._chunk_idx, rank) for rank in range(len(self.rank_rows))]
        rows = np.empty(sum(self.rank_rows), np.int64)
        rows[np.concatenate(final_rows)] = np.arange(len(rows))
        return torch.from_numpy(rows)


class _Staged:
    """Memory of a lane. Staging grows with the largest call."""

    def __init__(self, stream: Stream, buffers: list[torch.Tensor]) -> None:
        self.stream, self.buffers = stream, buffers
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._staging.nbytes + sum(buffer.nbytes for buffer in self.buffers)

    def staging_of(self, num_bytes: int) -> torch.Tensor:
        if self._staging.nbytes < num_bytes:
            self._staging = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            with torch.inference_mode(False):
                self._staging = torch.empty(num_bytes, dtype=torch.uint8)
        return self._staging[:num_bytes]


class _QueryLane(_Staged):
    def __init__(self, stream: Stream, buffer_bytes: int) -> None:
        super().__init__(stream, [_zeros(buffer_bytes)])
        self.open_call = self.open_rows = 0  # the call whose view callers may still read; 0: none

    @property
    def buffer(self) -> torch.Tensor:
        return self.buffers[0]

    def close(self) -> None:
        self.open_call = self.open_rows = 0


class _KvLane(_Staged):
    def __init__(self, stream: Stream, buffer_bytes: int) -> None:
        super().__init__(stream, [_zeros(buffer_bytes), _zeros(buffer_bytes)])
        self.started: _StagedChunk | None = None
        self.num_started = 0


# -- rows


def _pack_query(mine: torch.Tensor, parts: list[torch.Tensor], scale: Any) -> None:
    """Parts [rows, heads, d_i] side by side into [rows, heads, sum d_i]; with a scale as fp8 e4m3, of either format."""
    first, largest = 0, torch.finfo(mine.dtype).max
    for part in parts:
        to = mine[..., first : first + part.shape[2]]
        first += part.shape[2]
        if scale is None:
            integer = _INTEGERS[part.dtype.itemsize]
            to.view(integer).copy_(part.view(integer))
            continue
        divisor = _as_fp32(scale)
        for rows in _pieces(*part.shape):
            to[rows].copy_((part[rows].float() / divisor).clamp_(-largest, largest))


def _pack_cache(mine: torch.Tensor, kv_cache: torch.Tensor, source_rows: Any) -> None:
    """Rows of [blocks, block_size, dim] one after the other into bytes."""
    if len(source_rows) == 0:
        return
    num_blocks, block_size, dim = kv_cache.shape
    integer = _INTEGERS[kv_cache.element_size()]
    block_stride, row_stride = kv_cache.stride()[:2]
    # Rows at any strides are some of the rows that begin at every multiple of what divides both.
    step = math.gcd(block_stride, row_stride) or 1
    num_steps = ((num_blocks - 1) * block_stride + (block_size - 1) * row_stride) // step + 1
    with torch.inference_mode():
        all_rows = kv_cache.view(integer).as_strided((num_steps, dim), (step, 1))
        block, row = np.divmod(source_rows, block_size)
        indices = torch.from_numpy((block * block_stride + row * row_stride) // step)
        torch.index_select(all_rows, 0, indices, out=view_of(mine, (len(source_rows), dim), integer))


@torch.inference_mode()
def _dequantise(out: torch.Tensor, chunk: torch.Tensor, scale: Any) -> None:
    factor = _as_fp32(scale)
    for rows in _pieces(*chunk.shape):
        values = chunk[rows].float().mul_(factor)
        out[rows].copy_(values)
        out[rows].view(torch.int16).masked_fill_(values.isnan(), _BF16_NAN)


def _as_fp32(scale: Any) -> torch.Tensor:
    return scale.reshape(()) if isinstance(scale, torch.Tensor) else torch.tensor(scale, dtype=torch.float32)


def _pieces(num_rows: int, *row_shape: int) -> Iterator[slice]:
    rows = max(1, _CONVERTED_ELEMENTS // max(1, math.prod(row_shape)))
    return (slice(first, first + rows) for first in range(0, num_rows, rows))


# -- memory


def _zeros(num_bytes: int) -> torch.Tensor:
    """Zeros, because some consumers read past the last row; the system gives the pages when they are used."""
    with torch.inference_mode(False):  # else its views would be inference tensors for ever
        return torch.zeros(num_bytes, dtype=torch.uint8)


def _span(tensor: torch.Tensor) -> range:
    """The addresses from its first to its last byte."""
    return range(tensor.data_ptr(), tensor.data_ptr() + span_bytes(tensor))


def _is_missing(span: range) -> bool:
    return len(span) > 0 and span.start == 0


def _overlap(a: range, b: range) -> bool:
    return len(a) > 0 and len(b) > 0 and a.start < b.stop and b.start < a.stop
