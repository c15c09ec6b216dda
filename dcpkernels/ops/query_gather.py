"""query_gather: every rank's heads of the query, straight into the buffer that attention reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check

if TYPE_CHECKING:
    from dcpkernels.workspace import Workspace

OP = "query_gather"
RELEASE_OP = "release_query"


def query_gather(
    query: torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor],
    *,
    workspace: Workspace,
    scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """Gathers the heads of all ranks: with W ranks and H heads each rank passes its H/W heads and gets all H.

    Collective: all ranks of the workspace call it, with the same T, dtype and lane, all with `out` or all without. Rank
    r's heads are heads r * H/W .. (r + 1) * H/W - 1 of the result. Every rank stores its bytes straight into the final
    buffers: nothing is staged, concatenated or copied on the way.

    The result is a view of the lane's one buffer, at the same address in every call, to be read and not written. It is
    valid until the next `a2a_lse_reduce` on the lane, which must have the same T; or, for engines that merge by other
    means, until `release_query`. Another `query_gather` on the lane before that is an error on all ranks, because peers
    may still read. With `out` the result is copied there and nothing stays open.

    Args:
        query: [T, H/W, Dq], or parts [T, H/W, d_0], [T, H/W, d_1], ... (at most 4) with sum(d_i) = Dq =
            config.query_head_dim, which are laid side by side in the last dim, such as MLA's latent (512) and rope (64)
            part. fp32, fp16, bf16, fp8 e4m3fn, e5m2, e4m3fnuz or e5m2fnuz, no wider than config.query_dtype, the same for
            all parts; unit stride in the last dim, any token and head strides. Bytes are moved as they are.
        scale: quantises: q / scale is computed in fp32, clamped to +-448 (NaN stays NaN) and rounded to nearest even to
            fp8 e4m3fn, as `(q.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)` does. To fp8 e4m3fnuz, and
            clamped to +-240, where `out` has that dtype; without `out`, where config.query_dtype is it. Parts are then
            fp32, fp16 or bf16. A positive number, or one fp32 element that is read during the call. Must be the same on
            all ranks, which is not checked.
        out: [T, H, Dq] in the result's dtype, unit last stride. Required for T above config.max_num_tokens, which is then
            done in several rounds.
        lane: which of the workspace's independent streams.

    Returns:
        [T, H, Dq], contiguous (padded heads of config.padded_num_heads lie behind the last row), or `out`.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was sent.
        DcpUnsupported: the workspace was made without query_head_dim.
        DcpError: the query gathered before on the lane is still open (on every rank); a second call on the lane while one
            is in flight; the workspace is closed.
        DcpMismatch, DcpTimeout, DcpPeerLost: as a2a_lse_reduce. No view is returned, and `out` holds undefined values.
    """
    parts = tuple(query) if isinstance(query, (tuple, list)) else (query,)
    try:
        key = (
            OP,
            lane,
            type(lane),
            _check.signature(scale) if isinstance(scale, torch.Tensor) else type(scale),
            None if out is None else _check.signature(out),
            *map(_check.signature, parts),
        )
        plan = workspace._plans.get(key)
    except Exception:  # whatever comes of what is no such tensor: the checks find words for it
        key = plan = None
    if plan is None:
        plan = _make_plan(workspace, parts, scale, out, lane)
        workspace._keep_plan(key, plan)
    if scale is not None and not isinstance(scale, torch.Tensor):
        _check.scale(OP, scale, workspace.device)
    elif scale is not None:
        _check.has_memory(OP, "scale", scale)
        _check.apart(OP, scale, out)
        if workspace._open_impl(OP).gathers.is_reserved(scale):
            workspace._raise_status(OP, workspace._module.STATUS_OVERLAP, lane)
    status = plan(parts, out, scale)
    if status != 0:
        workspace._raise_status(OP, status, lane)
    return plan.view.detach() if out is None else out


def release_query(*, workspace: Workspace, lane: int = 0) -> None:
    """Ends the use of the query gathered last on the lane, without a merge: a round in which no data moves.

    Collective, instead of `a2a_lse_reduce`, after attention. The view must not be read any more. Where nothing is open it
    does no harm. Raises what `query_gather` raises.
    """
    key = (RELEASE_OP, lane, type(lane))
    try:
        release = workspace._plans.get(key)
    except Exception:  # as above
        release = None
    if release is None:
        impl = _check.open_impl(RELEASE_OP, workspace)
        _check.has_part(RELEASE_OP, workspace.config.query_head_dim > 0, "query_head_dim")
        _check.lane(RELEASE_OP, lane, workspace.config.num_lanes)
        release = workspace._keep_plan(key, impl.gathers.release_plan(lane))
    status = release()
    if status != 0:
        workspace._raise_status(RELEASE_OP, status, lane)


def _make_plan(workspace: Any, parts: tuple[Any, ...], scale: Any, out: Any, lane: Any) -> Any:
    """Checks a call of a shape that was not seen before, and returns what runs it."""
    impl = _check.open_impl(OP, workspace)
    device, config, num_local_heads = workspace.device, workspace.config, workspace.num_local_heads
    _check.has_part(OP, config.query_head_dim > 0, "query_head_dim")
    _check.lane(OP, lane, config.num_lanes)
    if not 1 <= len(parts) <= _check.MAX_QUERY_PARTS:
        _check.fail(OP, f"query must have 1 .. {_check.MAX_QUERY_PARTS} parts", len(parts))
    names = ["query"] if len(parts) == 1 else [f"query[{i}]" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _check.tensor(OP, name, part, device=device)
        if part.dim() != 3:
            _check.fail(OP, f"{name} must have shape [num_tokens, num_heads / num_ranks, head_dim]", list(part.shape))
        rows = (parts[0].shape[0], num_local_heads, part.shape[2])
        _check.shape(OP, name, part, "[T, num_heads / num_ranks, head_dim]", rows)
        _check.dtype(OP, name, part, (parts[0].dtype,) if part is not parts[0] else tuple(_check.GATHER_DTYPE_CODES))
        _check.last_stride(OP, name, part)
    num_tokens, source = parts[0].shape[0], parts[0].dtype
    head_dim = sum(part.shape[2] for part in parts)
    if head_dim != config.query_head_dim:
        _check.fail(OP, f"query must have query_head_dim={config.query_head_dim} elements in its last dim", head_dim)
    if scale is not None:
        _check.dtype(OP, names[0], parts[0], tuple(_check.DTYPE_CODES))
        _check.scale(OP, scale, device)
    dtype = source
    if scale is not None:
        asked = getattr(out, "dtype", None)
        dtype = asked if asked in _check.SCALED_DTYPES else config.quantised_dtype
    if dtype.itemsize > config.query_dtype.itemsize:
        _check.fail(
            OP, f"query must be no wider than query_dtype={_check.name_of(config.query_dtype)}", _check.name_of(dtype)
        )
    if num_tokens >= 2**32:
        _check.fail(OP, "query.shape[0] must be below 2**32", num_tokens)
    if out is None and num_tokens > config.max_num_tokens:
        _check.fail(
            OP, f"out must be given where T is above max_num_tokens={config.max_num_tokens}", f"T = {num_tokens}"
        )
    if out is not None:
        _check.tensor(OP, "out", out, device=device)
        shape = (num_tokens, config.num_heads, head_dim)
        _check.shape(OP, "out", out, "[T, num_heads, query_head_dim]", shape)
        _check.dtype(OP, "out", out, (dtype,) if scale is None else _check.SCALED_DTYPES)
        _check.last_stride(OP, "out", out)
        _check.writable(OP, "out", out)

    shapes, offset = [], 0
    for part in parts:
        token_stride, head_stride, _ = _check.byte_strides(part)
        shapes.append((token_stride, head_stride, part.shape[2] * source.itemsize, offset))
        offset += part.shape[2] * dtype.itemsize
    return impl.gathers.query_plan(
        lane,
        num_tokens=num_tokens,
        dtype=dtype,
        source_dtype=None if scale is None else source,
        parts=shapes,
        out_strides=None if out is None else _check.byte_strides(out)[:2],
    )
