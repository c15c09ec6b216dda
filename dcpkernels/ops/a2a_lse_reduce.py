"""a2a_lse_reduce: all-to-all of partial attention over the ranks, merged by log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check

if TYPE_CHECKING:
    from dcpkernels.workspace import Workspace

OP = "a2a_lse_reduce"


def a2a_lse_reduce(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    workspace: Workspace,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    return_lse: bool = False,
    lane: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merges the partial attention that every rank computed over its own shard of the KV cache.

    Collective: all ranks of the workspace call it, with the same T, lse_base and lane. With W ranks and H heads, rank r
    owns heads r * H/W .. (r + 1) * H/W - 1 and gets, for each of them,

        out[t, h] = sum_i w_i * partial_out_i[t, h],   w_i = exp(lse_i - lse),   lse = log(sum_i exp(lse_i))

    over the ranks i in rank order, in fp32 (powers of 2 in place of e for lse_base "2"). This is the split-KV merge of
    FlashDecoding (Dao et al., 2023); the error bound is in docs/protocol.md, "Exactness".

    A shard is empty for a row when its LSE is -inf, +inf or NaN, when `seq_lens` says that the row's sequence has no
    token on this rank, or when the row lies at or past query_start_loc[-1] (graph padding). An empty shard has weight 0
    and its payload is never read into the sum. A row that is empty on all ranks gives exactly 0, and LSE -inf.

    Not differentiable: the result is detached from the inputs.

    Args:
        partial_out: [T, H, D] in the workspace's dtype; unit stride in the last dim, any token and head strides. With
            config.zero_copy a tensor of `Workspace.partial_out` (or a view of it) is read by the peers where it is, once;
            any other one is copied.
        partial_lse: [T, H] fp32, fp16 or bf16, any strides; the log-sum-exp of the scaled scores, in base `lse_base`.
        workspace: made with num_heads = H, head_dim = D. T above its max_num_tokens is done in several rounds.
        lse_base: "e" or "2", the base that the attention kernel used. Required: a wrong base is silent.
        seq_lens: int32 [S], contiguous: *local* KV lengths, those of this rank's shard. With query_start_loc.
        query_start_loc: int32 [S + 1], contiguous: rows query_start_loc[s] .. query_start_loc[s + 1] - 1 belong to
            sequence s. Both are read at every call, at the address given.
        out: [T, H/W, D] in the workspace's dtype, unit last stride; allocated when None. The bytes from its first to
            its last element must not overlap those of the inputs or of lse_out, nor memory of `Workspace.partial_out`.
        lse_out: fp32 [T, H/W], any strides; implies return_lse.
        return_lse: also return the merged LSE, fp32 [T, H/W], in base `lse_base`.
        lane: which of the workspace's independent streams. Calls on one lane come one after the other.

    Returns:
        out, or (out, lse).

    Raises:
        DcpInvalidArgument: an argument is wrong, or partial_out is a tensor of `Workspace.partial_out` that was used or is
            not the last one; nothing was sent, the workspace is as before. Ranks that did make the call wait for this
            one: call again, put right. Calls are matched by their order and shape, so a rank that leaves one out would
            have its next call merged with the others' earlier one.
        DcpMismatch: the ranks made different calls. On every rank.
        DcpTimeout, DcpPeerLost: ranks did not come in time, or are gone; `.ranks` names them. On every rank.
        DcpError: a second call on the lane while one is in flight, or the workspace is closed.
        After a mismatch, a timeout or a lost rank the output is NaN, and the workspace of no more use: close it and make
        another. The collective backend does not always know `.ranks` (docs/errors.md).
    """
    # Everything that a check looks at is in the key, so that a call whose like has been checked goes straight to C++.
    try:
        key = (
            lse_base,
            lane,
            type(lane),
            _check.signature(partial_out),
            _check.signature(partial_lse),
            None if seq_lens is None else _check.signature(seq_lens),
            None if query_start_loc is None else _check.signature(query_start_loc),
            None if out is None else _check.signature(out),
            None if lse_out is None else _check.signature(lse_out),
        )
        plan = workspace._plans.get(key)
    except Exception:  # whatever comes of what is no such tensor: the checks find words for it
        key = plan = None
    if plan is None:
        plan = _make_plan(workspace, partial_out, partial_lse, lse_base, seq_lens, query_start_loc, out, lse_out, lane)
        workspace._keep_plan(key, plan)
    if out is None:
        shape = (partial_out.shape[0], workspace.num_local_heads, partial_out.shape[2])
        out = _check.new_empty(OP, "partial_out", partial_out, shape, partial_out.dtype)
    if lse_out is None and _check.flag(OP, "return_lse", return_lse):
        lse_shape = (partial_out.shape[0], workspace.num_local_heads)
        lse_out = _check.new_empty(OP, "partial_out", partial_out, lse_shape, torch.float32)
    status = plan(
        partial_out.data_ptr(),
        partial_lse.data_ptr(),
        out.data_ptr(),
        0 if lse_out is None else lse_out.data_ptr() or workspace._module.NO_ADDRESS,
        0 if seq_lens is None else seq_lens.data_ptr(),
        0 if query_start_loc is None else query_start_loc.data_ptr(),
    )
    if status != 0:
        workspace._raise_status(OP, status, lane)
    return out if lse_out is None else (out, lse_out)


def _make_plan(
    workspace: Any,
    partial_out: Any,
    partial_lse: Any,
    lse_base: Any,
    seq_lens: Any,
    query_start_loc: Any,
    out: Any,
    lse_out: Any,
    lane: Any,
) -> Any:
    """Checks a call of a shape that was not seen before, and returns what runs it."""
    impl = _check.open_impl(OP, workspace)
    device, config = workspace.device, workspace.config
    num_heads, head_dim, num_local_heads = config.num_heads, config.head_dim, workspace.num_local_heads
    if not isinstance(lse_base, str) or lse_base not in _check.LSE_BASE_CODES:
        _check.fail(OP, 'lse_base must be "e" or "2"', repr(lse_base))
    _check.lane(OP, lane, config.num_lanes)

    _check.tensor(OP, "partial_out", partial_out, device=device)
    if partial_out.dim() != 3:
        _check.fail(OP, "partial_out must have shape [num_tokens, num_heads, head_dim]", list(partial_out.shape))
    num_tokens = partial_out.shape[0]
    if num_tokens >= 2**32:
        _check.fail(OP, "partial_out.shape[0] must be below 2**32", num_tokens)
    _check.shape(OP, "partial_out", partial_out, "[T, num_heads, head_dim]", (num_tokens, num_heads, head_dim))
    _check.dtype(OP, "partial_out", partial_out, (config.dtype,))
    _check.last_stride(OP, "partial_out", partial_out)
    _check.tensor(OP, "partial_lse", partial_lse, device=device)
    _check.shape(OP, "partial_lse", partial_lse, "[T, num_heads]", (num_tokens, num_heads))
    _check.dtype(OP, "partial_lse", partial_lse, (torch.float32, torch.float16, torch.bfloat16))

    num_seqs = -1
    if (seq_lens is None) != (query_start_loc is None):
        given = "query_start_loc" if seq_lens is None else "seq_lens"
        _check.fail(OP, "seq_lens and query_start_loc must be given together", f"only {given}")
    if seq_lens is not None:
        for name, value in (("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
            _check.tensor(OP, name, value, device=device)
            _check.dtype(OP, name, value, (torch.int32,))
            if value.dim() != 1 or not value.is_contiguous():
                dims = "[S]" if name == "seq_lens" else "[S + 1]"
                _check.fail(OP, f"{name} must be contiguous with shape {dims}", list(value.shape))
        num_seqs = seq_lens.shape[0]
        _check.shape(OP, "query_start_loc", query_start_loc, "[S + 1]", (num_seqs + 1,))

    out_strides, lse_strides = (num_local_heads * head_dim, head_dim), (num_local_heads, 1)
    if out is not None:
        _check.tensor(OP, "out", out, device=device)
        _check.shape(OP, "out", out, "[T, num_heads / num_ranks, head_dim]", (num_tokens, num_local_heads, head_dim))
        _check.dtype(OP, "out", out, (config.dtype,))
        _check.last_stride(OP, "out", out)
        _check.writable(OP, "out", out)
        out_strides = out.stride()[:2]
    if lse_out is not None:
        _check.tensor(OP, "lse_out", lse_out, device=device)
        _check.shape(OP, "lse_out", lse_out, "[T, num_heads / num_ranks]", (num_tokens, num_local_heads))
        _check.dtype(OP, "lse_out", lse_out, (torch.float32,))
        _check.writable(OP, "lse_out", lse_out)
        lse_strides = lse_out.stride()
    return impl.a2a_lse_reduce_plan(
        lane,
        num_tokens=num_tokens,
        lse_dtype=_check.DTYPE_CODES[partial_lse.dtype],
        lse_base=_check.LSE_BASE_CODES[lse_base],
        num_seqs=num_seqs,
        strides=(*partial_out.stride()[:2], *partial_lse.stride(), *out_strides, *lse_strides),
    )
