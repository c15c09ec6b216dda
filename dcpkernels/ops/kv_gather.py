"""kv_gather: a chunk of the context from all ranks' paged caches, in sequence order, in every rank's buffer."""

from __future__ import annotations

import operator
import zlib
from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check
from dcpkernels._check import Chunk
from dcpkernels.kv_gather_plan import KVGatherPlan

if TYPE_CHECKING:
    from dcpkernels.workspace import Workspace

OP, START_OP, WAIT_OP = "kv_gather", "kv_gather_start", "kv_gather_wait"


def kv_gather(
    kv_cache: torch.Tensor,
    plan: KVGatherPlan,
    chunk_idx: int,
    *,
    workspace: Workspace,
    scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """Gathers one chunk of the context: every rank publishes the rows that it owns, each to its final place on all ranks.

    `kv_gather_start` and `kv_gather_wait` in one; those let the next chunk travel while this one is used.
    Collective: all ranks of the workspace call it, with equal plans (`KVGatherPlan.digest`), chunks, row widths and
    lanes; ranks that own no row of the chunk too.

    The result is a view of one of the lane's two buffers, to be read and not written. It is valid until the chunk after
    it has been waited for: that call tells the peers that they may write there again.

    Args:
        kv_cache: [num_blocks, block_size, Dkv], this rank's paged cache: fp32, fp16, bf16, fp8 e4m3fn, e5m2, e4m3fnuz or
            e5m2fnuz, the same on all ranks; unit stride in the last dim, any other strides; Dkv elements are a multiple
            of 16 bytes, and no more than config.kv_dim elements of config.kv_dtype. Bytes are moved as they are.
        plan: of this step and this rank. plan.chunk_size is at most config.kv_chunk_rows.
        chunk_idx: 0 .. plan.num_chunks - 1.
        scale: dequantises at the reader: `(row.float() * scale).to(torch.bfloat16)`, for a cache in fp8 e4m3fn or
            e4m3fnuz. A positive number, or one fp32 element that is read during the call. The chunk travels in fp8 all
            the same.
        out: with scale: bf16 [rows, Dkv], unit last stride, to put the result in; allocated when None.
        lane: which of the workspace's independent streams.

    Returns:
        [rows, Dkv] with rows = plan.num_rows(chunk_idx), in sequence order, without padding: `plan.segments(chunk_idx)`
        says what lies where. In the cache's dtype; with scale bf16, a tensor of its own.

    Raises:
        DcpInvalidArgument: an argument is wrong, or does not fit the workspace; nothing was sent.
        DcpUnsupported: the workspace was made without kv_chunk_rows.
        DcpMismatch: ranks gathered different chunks, or of different plans. On every rank.
        DcpTimeout, DcpPeerLost: as a2a_lse_reduce; a peer that does not wait for its next chunk holds all up.
        DcpError: a second call on the lane while one is in flight, or the workspace is closed.
        After a fault no chunk is returned, and none that was returned before is valid.
    """
    chunk = _checked(OP, kv_cache, plan, chunk_idx, workspace, lane)
    _check_output(OP, chunk, workspace, scale, out)  # before anything is sent
    gathers = workspace._open_impl(OP).gathers
    # A kernel that dequantises reads what all channels of this rank have stored, so it has to be another one.
    if scale is not None or not gathers.gathers_at_once:
        _start(OP, chunk, kv_cache, workspace, lane)
        return _wait(OP, chunk, workspace, scale, out, lane)
    status, view = gathers.kv_whole(lane, kv_cache, chunk)
    if status != 0:
        workspace._raise_status(OP, status, lane)
    return view


def kv_gather_start(
    kv_cache: torch.Tensor, plan: KVGatherPlan, chunk_idx: int, *, workspace: Workspace, lane: int = 0
) -> None:
    """Publishes this rank's rows of a chunk. Arguments as in `kv_gather`; `kv_gather_wait` gives the result.

    One chunk at a time is started: wait for it, start the next one, then use it:

        if plan.num_chunks > 0:
            kv_gather_start(kv_cache, plan, 0, workspace=workspace)
        for i in range(plan.num_chunks):
            chunk = kv_gather_wait(plan, i, workspace=workspace)
            if i + 1 < plan.num_chunks:
                kv_gather_start(kv_cache, plan, i + 1, workspace=workspace)
            use(chunk)

    It waits until every peer has used the chunk before last, whose buffer it writes into. (The collective backend sends
    everything in `kv_gather_wait`.) The cache may change as soon as it returns. Raises as `kv_gather`, and DcpInvalidArgument when the chunk started before has not been waited for.
    """
    _start(START_OP, _checked(START_OP, kv_cache, plan, chunk_idx, workspace, lane), kv_cache, workspace, lane)


def kv_gather_wait(
    plan: KVGatherPlan,
    chunk_idx: int,
    *,
    workspace: Workspace,
    scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """The chunk that was started, when it is whole; ends the use of the chunk before it. As `kv_gather`.

    Raises DcpInvalidArgument when another chunk, or none, has been started.
    """
    _check.open_impl(WAIT_OP, workspace)
    _check.has_part(WAIT_OP, workspace.config.kv_chunk_rows > 0, "kv_chunk_rows")
    _check.lane(WAIT_OP, lane, workspace.config.num_lanes)
    chunk = workspace._started_chunks.get(lane)
    if chunk is None or chunk.plan is not plan or _index(plan, chunk_idx) != chunk.index:
        workspace._open_impl(WAIT_OP).check_fault(WAIT_OP)  # a fault ended what was started
        given = "none was started"
        if chunk is not None:
            asked = f"{chunk_idx!r}" if chunk.plan is plan else f"{chunk_idx!r} of another plan"
            given = f"chunk {chunk.index} was started; asked for {asked}"
        _check.fail(WAIT_OP, "plan and chunk_idx must be those of the chunk started last on the lane", given)
    _check_output(WAIT_OP, chunk, workspace, scale, out)
    return _wait(WAIT_OP, chunk, workspace, scale, out, lane)


def _start(op: str, chunk: Chunk, kv_cache: torch.Tensor, workspace: Any, lane: int) -> None:
    # Before the call: an interrupt may come between its end and the next line.
    before, workspace._started_chunks[lane] = workspace._started_chunks.get(lane), chunk
    status = workspace._open_impl(op).gathers.kv_start(lane, kv_cache, chunk)
    if status != 0:
        workspace._started_chunks[lane] = before
        workspace._raise_status(op, status, lane)


def _wait(op: str, chunk: Chunk, workspace: Any, scale: Any, out: Any, lane: int) -> torch.Tensor:
    out = _output(chunk, workspace, scale, out)
    status, view = workspace._open_impl(op).gathers.kv_wait(lane, chunk, out, scale)
    if status in (0, workspace._module.STATUS_FAULTED):  # after anything else it can still be waited for
        workspace._started_chunks.pop(lane, None)
    if status != 0:
        workspace._raise_status(op, status, lane)
    return view if out is None else out


def _output(chunk: Chunk, workspace: Any, scale: Any, out: torch.Tensor | None) -> torch.Tensor | None:
    if scale is None or out is not None:
        return out
    return torch.empty(chunk.shape, dtype=torch.bfloat16, device=workspace.device)


def _checked(op: str, kv_cache: Any, plan: Any, chunk_idx: Any, workspace: Any, lane: Any) -> Chunk:
    """The chunk, checked. Those of the plan that a lane used last are remembered: a step gathers the same ones from the
    cache of every layer."""
    try:
        key = (chunk_idx, type(chunk_idx), type(lane), _check.signature(kv_cache)) if type(chunk_idx) is int else None
        known_plan, known = workspace._chunks.get(lane, (None, {}))
        chunk = known.get(key) if known_plan is plan and key is not None else None
    except Exception:  # whatever comes of what is no such tensor: the checks find words for it
        key = chunk = None
    if chunk is None:
        chunk = _check_chunk(op, kv_cache, plan, chunk_idx, workspace, lane)
        if known_plan is not plan:
            known = {}
            workspace._chunks[lane] = (plan, known)
        if key is not None:
            known[key] = chunk
    return chunk


def _check_chunk(op: str, kv_cache: Any, plan: Any, chunk_idx: Any, workspace: Any, lane: Any) -> Chunk:
    _check.open_impl(op, workspace)
    config = workspace.config
    _check.has_part(op, config.kv_chunk_rows > 0, "kv_chunk_rows")
    _check.lane(op, lane, config.num_lanes)
    if not isinstance(plan, KVGatherPlan):
        _check.fail(op, "plan must be a dcpkernels.KVGatherPlan", type(plan).__name__)
    if (plan.rank, plan.num_ranks) != (workspace.rank, workspace.num_ranks):
        rule = f"plan must be for rank {workspace.rank} of {workspace.num_ranks}"
        _check.fail(op, rule, f"{plan.rank} of {plan.num_ranks}")
    if plan.chunk_size > config.kv_chunk_rows:
        _check.fail(op, f"plan.chunk_size must be at most kv_chunk_rows={config.kv_chunk_rows}", plan.chunk_size)
    _check.tensor(op, "kv_cache", kv_cache, device=workspace.device)
    if kv_cache.dim() != 3 or kv_cache.shape[1] != plan.block_size:
        dims = f"[num_blocks, block_size={plan.block_size}, dim]"
        _check.fail(op, f"kv_cache must have shape {dims}", list(kv_cache.shape))
    _check.dtype(op, "kv_cache", kv_cache, tuple(_check.GATHER_DTYPE_CODES))
    _check.last_stride(op, "kv_cache", kv_cache)
    row_bytes, room = kv_cache.shape[2] * kv_cache.element_size(), config.kv_dim * config.kv_dtype.itemsize
    if row_bytes == 0 or row_bytes % _check.KV_ROW_ALIGNMENT or row_bytes > room:
        multiple = f"a multiple of {_check.KV_ROW_ALIGNMENT} bytes, at most {room} (kv_dim, kv_dtype)"
        _check.fail(op, f"a row of kv_cache must have {multiple}", row_bytes)
    if plan.max_source_row >= kv_cache.shape[0] * plan.block_size:
        rule = f"block_tables of the plan must stay below num_blocks={kv_cache.shape[0]}"
        _check.fail(op, rule, plan.max_source_row // plan.block_size)
    index = _index(plan, chunk_idx)
    what_rows = f"{index} {row_bytes} {_check.GATHER_DTYPE_CODES[kv_cache.dtype]}"
    digest = zlib.crc32(what_rows.encode(), plan.digest)
    return Chunk(plan, index, (plan.num_rows(index), kv_cache.shape[2]), kv_cache.dtype, digest)


def _index(plan: KVGatherPlan, chunk_idx: Any) -> int:
    """As a plain int. Raises what the plan raises for one that is none, or out of range."""
    plan.num_rows(chunk_idx)
    return operator.index(chunk_idx)


def _check_output(op: str, chunk: Chunk, workspace: Any, scale: Any, out: Any) -> None:
    if scale is None:
        if out is not None:
            _check.fail(op, "out must come with scale (without it the chunk is a view of the workspace)", "out alone")
        return
    if chunk.dtype not in _check.SCALED_DTYPES:
        names = " or ".join(map(_check.name_of, _check.SCALED_DTYPES))
        _check.fail(op, f"kv_cache must be {names} where scale is given", _check.name_of(chunk.dtype))
    _check.scale(op, scale, workspace.device)
    if isinstance(scale, torch.Tensor):
        _check.has_memory(op, "scale", scale)
        if workspace._open_impl(op).gathers.is_reserved(scale):
            workspace._raise_status(op, workspace._module.STATUS_OVERLAP, 0)
    if out is not None:
        _check.tensor(op, "out", out, device=workspace.device)
        _check.shape(op, "out", out, "[rows, dim]", chunk.shape)
        _check.dtype(op, "out", out, (torch.bfloat16,))
        _check.last_stride(op, "out", out)
        _check.writable(op, "out", out)
        _check.has_memory(op, "out", out)
        if isinstance(scale, torch.Tensor):
            _check.apart(op, scale, out)
        if workspace._open_impl(op).gathers.is_reserved(out):
            workspace._raise_status(op, workspace._module.STATUS_OVERLAP, 0)
