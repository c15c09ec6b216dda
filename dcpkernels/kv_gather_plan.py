"""KVGatherPlan: which cache rows a rank publishes for each chunk of context, and where they go. Pure integers."""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from dcpkernels.errors import DcpInvalidArgument

# Counts fit int32, which is what attention takes in cu_seqlens; products of two of them fit int64.
MAX_COUNT = 2**31 - 1
MAX_ROWS = 2**63 - 1

Int64s = npt.NDArray[np.int64]


class KVSegment(NamedTuple):
    """Consecutive positions of one request, which lie in consecutive rows of one chunk."""

    request_idx: int
    first_position: int  # in the request
    first_row: int  # in the chunk
    num_rows: int


class _Chunk(NamedTuple):
    cu_rows: npt.NDArray[np.int32]
    segments: tuple[KVSegment, ...]
    rank_rows: tuple[int, ...]
    source_rows: Int64s
    final_rows: Int64s


class KVGatherPlan:
    """What one rank needs to know to gather context from a KV cache that is sharded by token. Built once per step on
    each rank, used by every layer. Immutable; no communication; may be read by several threads.

    The rows are the tokens of all requests, one after the other in sequence order: positions 0 .. n0 - 1 of request 0,
    then those of request 1, and so on. There are no padding rows. Chunk i is rows i * chunk_size .. of that list, at
    most chunk_size of them; a chunk may hold several requests, and a request may go over several chunks.

    With W = num_ranks, I = interleave and B = block_size, position p of request s belongs to rank (p // I) % W. There
    it has the local slot j = p // (W * I) * I + p % I (`dcpkernels.layout`), and that is in the cache of its owner

        physical row = block_tables[s][j // B] * B + j % B

    This is how vLLM numbers the slots of a sharded cache (`BlockTable` and `get_dcp_local_seq_lens` in v1/worker),
    where I must divide B. Here it need not, nor W * I the lengths.

    Args:
        context_lens: [S] integers, *global* context lengths in tokens; 0 is a request without context.
        block_tables: [S, max_blocks] integers, this rank's table, or a sequence of S rows of any length. Entry k of
            row s is the physical block with the local slots k * B .. k * B + B - 1 of request s. Entries past those
            that the rank's local length needs are never looked at.
        block_size: tokens of this rank in one physical block, B.
        num_ranks, rank: W, and which of them this is.
        chunk_size: rows of a chunk, at most.
        interleave: I.

    Arrays are what numpy.asarray takes: lists, numpy arrays, tensors on the CPU. They are copied. context_lens,
    num_ranks, interleave and chunk_size must be equal on all ranks; `digest` tells whether they are.

    Attributes:
        num_ranks, rank, chunk_size, interleave, block_size: as given.
        num_requests: S.
        total_rows: the sum of context_lens.
        num_chunks: ceil(total_rows / chunk_size); 0 when all contexts are empty.
        max_source_row: the largest physical row that this rank reads, -1 if it reads none. An op must find it below
            the number of rows of the cache.
        digest: 32 bits of everything that must be equal on all ranks; the same in every process.

    Raises:
        DcpInvalidArgument: counts outside of 1 .. 2**31 - 1; a rank that is none; negative lengths, or more than
            2**63 - 1 rows in all; a block table without a row for each request, with a row too short for the request's
            local length, or with a needed entry outside of 0 .. 2**31 - 1; something that is no integer (bools and
            floats are none). Methods raise it for a chunk_idx or a rank that is none.
    """

    num_ranks: int
    rank: int
    chunk_size: int
    interleave: int
    block_size: int
    num_requests: int
    total_rows: int
    num_chunks: int
    max_source_row: int
    digest: int

    def __init__(
        self,
        context_lens: npt.ArrayLike,
        block_tables: npt.ArrayLike | Sequence[npt.ArrayLike],
        *,
        block_size: int,
        num_ranks: int,
        rank: int,
        chunk_size: int,
        interleave: int = 1,
    ) -> None:
        self.block_size = _integer("block_size", block_size, 1, MAX_COUNT)
        self.num_ranks = _integer("num_ranks", num_ranks, 1, MAX_COUNT)
        self.rank = _integer("rank", rank, 0, self.num_ranks - 1)
        self.chunk_size = _integer("chunk_size", chunk_size, 1, MAX_COUNT)
        self.interleave = _integer("interleave", interleave, 1, MAX_COUNT)

        lens = _integers("context_lens", context_lens, "[S]")
        _check_range("context_lens", lens, MAX_ROWS)
        lens = lens.astype(np.int64)
        self.num_requests = len(lens)
        self.total_rows = sum(lens.tolist())  # Python integers do not wrap
        if self.total_rows > MAX_ROWS:
            _fail(f"context_lens must sum to at most {MAX_ROWS}", self.total_rows)
        self.num_chunks = -(-self.total_rows // self.chunk_size)
        # Request s is rows _starts[s] .. _starts[s + 1] - 1.
        self._starts = np.concatenate([[0], np.cumsum(lens)])

        local_lens = self._local_length(lens, self.rank)
        num_blocks = -(-local_lens // self.block_size)
        self._blocks = _needed_blocks(block_tables, num_blocks, local_lens)
        # Entry k of request s is _blocks[_table_starts[s] + k].
        self._table_starts = np.cumsum(num_blocks) - num_blocks
        self.max_source_row = self._max_source_row(local_lens, num_blocks)

        shared = np.array([self.num_ranks, self.interleave, self.chunk_size, self.num_requests, *lens], dtype="<i8")
        self.digest = int.from_bytes(hashlib.sha256(b"kv_gather_plan" + shared.tobytes()).digest()[:4], "little")
        self._chunks: dict[int, _Chunk] = {}
        self._built = True

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_built"):
            raise AttributeError(f"a KVGatherPlan does not change: {name} cannot be set")
        super().__setattr__(name, value)

    def num_rows(self, chunk_idx: int) -> int:
        """How many rows the chunk has: chunk_size, or fewer in the last one."""
        chunk_idx = self._chunk_idx(chunk_idx)
        return min(self.chunk_size, self.total_rows - chunk_idx * self.chunk_size)

    def rank_rows(self, chunk_idx: int) -> tuple[int, ...]:
        """How many of the chunk's rows each rank publishes, [W]. Their sum is num_rows."""
        return self._chunk(chunk_idx).rank_rows

    def source_rows(self, chunk_idx: int) -> Int64s:
        """The rows of the chunk that this rank publishes, as physical rows of its cache: block * block_size + offset,
        [rank_rows[rank]]. Contiguous, read-only, and at the same address as long as the plan lives."""
        return self._chunk(chunk_idx).source_rows

    def final_rows(self, chunk_idx: int, rank: int | None = None) -> Int64s:
        """Where in the chunk the rows that `rank` publishes go, ascending, [rank_rows[rank]]. Contiguous, read-only.

        None is this rank: element i is the place of source_rows[i], and the array stays at the same address as long as
        the plan lives. For another rank it is computed at every call.
        """
        chunk = self._chunk(chunk_idx)
        if rank is not None and (rank := _integer("rank", rank, 0, self.num_ranks - 1)) != self.rank:
            return _read_only(self._rows_of(chunk.segments, rank)[2])
        return chunk.final_rows

    def segments(self, chunk_idx: int) -> tuple[KVSegment, ...]:
        """Which positions of which request lie where in the chunk, in the order of rows. A request without rows there
        is left out."""
        return self._chunk(chunk_idx).segments

    def cu_rows(self, chunk_idx: int) -> npt.NDArray[np.int32]:
        """Cumulative rows per request in the chunk, int32 [S + 1], read-only: request s is rows cu_rows[s] ..
        cu_rows[s + 1] - 1 of it. What attention over sequences of different lengths takes as cu_seqlens_k."""
        return self._chunk(chunk_idx).cu_rows

    def _chunk_idx(self, chunk_idx: int) -> int:
        idx = _integer("chunk_idx", chunk_idx)
        if not 0 <= idx < self.num_chunks:
            _fail(f"chunk_idx must be at least 0 and below num_chunks={self.num_chunks}", idx)
        return idx

    def _chunk(self, chunk_idx: int) -> _Chunk:
        idx = self._chunk_idx(chunk_idx)
        chunk = self._chunks.get(idx)
        # setdefault: should two threads make one chunk at a time, both get the same arrays.
        return chunk if chunk is not None else self._chunks.setdefault(idx, self._make_chunk(idx))

    def _make_chunk(self, idx: int) -> _Chunk:
        first = idx * self.chunk_size
        rows_before = np.clip(self._starts, first, first + self.num_rows(idx)) - first
        num_rows = np.diff(rows_before)
        request = np.flatnonzero(num_rows)
        first_row, num_rows = rows_before[request], num_rows[request]
        first_position = first + first_row - self._starts[request]
        columns = (request.tolist(), first_position.tolist(), first_row.tolist(), num_rows.tolist())
        segments = tuple(map(KVSegment, *columns))

        ranks = np.arange(self.num_ranks)[:, None]
        end = first_position + num_rows
        per_rank = (self._local_length(end, ranks) - self._local_length(first_position, ranks)).sum(1)
        requests, slots, final_rows = self._rows_of(segments, self.rank)
        blocks = self._blocks[self._table_starts[requests] + slots // self.block_size]
        source_rows = blocks * self.block_size + slots % self.block_size
        return _Chunk(
            _read_only(rows_before.astype(np.int32)),
            segments,
            tuple(per_rank.tolist()),
            _read_only(source_rows),
            _read_only(final_rows),
        )

    def _rows_of(self, segments: tuple[KVSegment, ...], rank: int) -> tuple[Int64s, Int64s, Int64s]:
        """Of each row that `rank` publishes, in the order of rows: request, local slot, row in the chunk."""
        request, first_position, first_row, num_rows = np.array(segments, dtype=np.int64).T
        # The tokens of a rank in consecutive positions have consecutive slots.
        first_slot = self._local_length(first_position, rank)
        counts = self._local_length(first_position + num_rows, rank) - first_slot
        segment = np.repeat(np.arange(len(segments)), counts)
        before = np.cumsum(counts) - counts
        slots = np.arange(len(segment)) + (first_slot - before)[segment]
        turn, place = np.divmod(slots, self.interleave)
        positions = (turn * self.num_ranks + rank) * self.interleave + place
        return request[segment], slots, positions + (first_row - first_position)[segment]

    def _local_length(self, positions: Int64s, rank: int | Int64s) -> Int64s:
        """`layout.local_length`, of arrays."""
        turns, rest = np.divmod(positions, self.num_ranks * self.interleave)
        return turns * self.interleave + np.clip(rest - rank * self.interleave, 0, self.interleave)

    def _max_source_row(self, local_lens: Int64s, num_blocks: Int64s) -> int:
        if not len(self._blocks):
            return -1
        last_rows = self._blocks * self.block_size + (self.block_size - 1)
        has_rows = num_blocks > 0
        last_of_request = (self._table_starts + num_blocks - 1)[has_rows]
        # The last block of a request is full up to the local length only.
        last_rows[last_of_request] -= (num_blocks * self.block_size - local_lens)[has_rows]
        return int(last_rows.max())


def _needed_blocks(block_tables: Any, num_blocks: Int64s, local_lens: Int64s) -> Int64s:
    """The entries of each request's row that its local length needs, one request after the other."""
    if not isinstance(block_tables, (list, tuple)):
        block_tables = _integers("block_tables", block_tables, "[S, max_blocks]")
    if len(block_tables) != len(num_blocks):
        _fail(f"block_tables must have a row for each of the {len(num_blocks)} requests", len(block_tables))
    parts = [np.empty(0, np.int64)]
    for s, needed in enumerate(num_blocks.tolist()):
        row = block_tables[s]
        _require_memory(f"block_tables[{s}]", row)
        try:
            available, part = len(row), row[:needed]
        except Exception:  # of a set, a dict, a number; what is no number may have no repr either
            given = repr(row) if row is None or isinstance(row, (int, float, str)) else type(row).__name__
            _fail(f"block_tables[{s}] must be a row of integers", given)
        if available < needed:
            _fail(f"block_tables[{s}] must have at least {needed} entries for {local_lens[s]} local tokens", available)
        if not isinstance(block_tables, np.ndarray):
            part = _integers(f"block_tables[{s}]", part, "[max_blocks]")
        _check_range(f"block_tables[{s}]", part, MAX_COUNT)
        parts.append(part.astype(np.int64))
    return np.concatenate(parts)


def _integers(name: str, values: Any, dims: str) -> npt.NDArray[Any]:
    """An array of some integer dtype, with as many dims as `dims` names. It may be the caller's own memory."""
    _require_memory(name, values)
    try:
        array = np.asarray(values)
    except Exception as error:  # of whatever class: numpy's, torch's, that of any object's own method
        _fail(f"{name} must be {dims} integers in host memory", error)
    if array.ndim != dims.count(",") + 1:
        _fail(f"{name} must be {dims}", f"shape {list(array.shape)}")
    if not array.size:
        return array.astype(np.int64)
    # numpy takes a bool among integers for 0 or 1.
    mixed = isinstance(values, (list, tuple)) and any(isinstance(value, (bool, np.bool_)) for value in values)
    if array.dtype.kind not in "iu" or mixed:
        _fail(f"{name} must be integers", "bools among them" if mixed else f"dtype {array.dtype}")
    return array


def _require_memory(name: str, values: Any) -> None:
    """numpy reads a tensor whose storage was freed under it, and the process ends there."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if type(value) is int or not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            continue
        try:
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            end = (value.storage_offset() + last + 1) * value.element_size() if value.numel() > 0 else 0
            has_memory = end <= value.untyped_storage().nbytes()
        except Exception as error:  # of whatever class: sparse and nested tensors have no strides
            _fail(f"{name} must be a strided tensor", error)
        if not has_memory:
            _fail(f"{name} must have memory of its own", "its storage was freed or made smaller")


def _check_range(name: str, array: npt.NDArray[Any], high: int) -> None:
    outside = np.flatnonzero((array < 0) | (array > high))
    if len(outside):
        _fail(f"{name}[{outside[0]}] must be in 0 .. {high}", array[outside[0]])


def _integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        _fail(f"{name} must be an integer", repr(value))
    if low is not None and high is not None and not low <= number <= high:
        _fail(f"{name} must be in {low} .. {high}", number)
    return number


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def _fail(rule: str, given: Any) -> NoReturn:
    raise DcpInvalidArgument(f"kv_gather_plan: {rule} (got {given})")
