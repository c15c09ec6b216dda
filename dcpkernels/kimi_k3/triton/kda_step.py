"""The recurrent part of a KDA layer for one decode step: normalise, decay, correct, read out. One kernel.

A program has a request, a head and a part of the value channels, and walks through the request's tokens with its part of
the state in registers. Formulas as in kimi_k3/kda.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcpkernels.errors import DcpInvalidArgument

OP = "kda_step"
BLOCK_V = 32  # value channels of a program: [32, 128] of fp32 state are 32 registers of each of 128 threads


@triton.jit
def kda_kernel(
    q,  # [T, H, K]
    k,  # [T, H, K]
    v,  # [T, H, V]
    f,  # [T, H, K]
    b,  # [T, H]
    A_log,  # fp32 [H]
    dt_bias,  # fp32 [H, K]
    states,  # fp32 [N, H, V, K]
    state_in,  # int64 [S]
    state_out,  # int64 [T]
    starts,  # int32 [S + 1]
    out,  # [T, H, V]
    num_rows,
    num_seqs,
    num_heads,
    stride_q,  # of the first dim; heads follow each other
    stride_k,
    stride_v,
    stride_f,
    stride_b,
    lower_bound,
    l2_eps,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE_K: tl.constexpr,  # powers of 2; TILE_K at least K
    TILE_V: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    channel, value = tl.arange(0, TILE_K), tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    is_channel, is_value = channel < K, value < V

    # The last program has the padding rows: their output is 0, and there is nothing else to do.
    if seq == num_seqs:
        for row in range(tl.load(starts + num_seqs).to(tl.int64), num_rows):
            at = out + (row * num_heads + head) * V + value
            tl.store(at, tl.zeros([TILE_V], out.dtype.element_ty), mask=is_value)
        return

    in_state = value[:, None] * K + channel[None, :]
    is_state = is_value[:, None] & is_channel[None, :]
    source = tl.load(state_in + seq)
    at = states + (tl.maximum(source, 0) * num_heads + head) * (V * K) + in_state
    state = tl.where(source >= 0, tl.load(at, mask=is_state, other=0.0), 0.0)
    rate = tl.exp(tl.load(A_log + head))
    bias = tl.load(dt_bias + head * K + channel, mask=is_channel, other=0.0)
    for row in range(tl.load(starts + seq).to(tl.int64), tl.load(starts + seq + 1).to(tl.int64)):
        key = tl.load(k + row * stride_k + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
        query = tl.load(q + row * stride_q + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
        gate = tl.load(f + row * stride_f + head * K + channel, mask=is_channel, other=0.0).to(tl.float32)
        target = tl.load(v + row * stride_v + head * V + value, mask=is_value, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(b + row * stride_b + head).to(tl.float32))
        key = key / tl.sqrt(tl.sum(key * key, 0) + l2_eps)
        query = query / tl.sqrt(tl.sum(query * query, 0) + l2_eps) * scale
        decay = tl.exp(lower_bound * tl.sigmoid(rate * (gate + bias)))

        state = state * decay[None, :]
        error = beta * (target - tl.sum(state * key[None, :], 1))
        state = state + error[:, None] * key[None, :]
        result = tl.sum(state * query[None, :], 1)

        tl.store(out + (row * num_heads + head) * V + value, result.to(out.dtype.element_ty), mask=is_value)
        # The state behind each token: a draft that is rejected later must not have changed the one before it.
        place = tl.load(state_out + row)
        if place >= 0:
            tl.store(states + (place * num_heads + head) * (V * K) + in_state, state, mask=is_state)


def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    lower_bound: float = -5.0,
    l2_eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token, or several, of each of S requests. Reads no tensor on the host: it can be captured in a graph.

    Args:
        q, k: [T, H, K] behind the convolution; normalised here, and q scaled by K^-0.5. Any floating dtype; the last two
            dims contiguous.
        v: [T, H, V], the same.
        f: [T, H, K] before the gate; b: [T, H] before the sigmoid. The same.
        A_log: fp32 [H]; dt_bias: fp32 [H, K].
        states: fp32 [N, H, V, K], contiguous, read and written.
        state_in: int64 [S], the state that each request starts from; -1: from zeros.
        state_out: int64 [T], where the state behind each row's token goes; -1: nowhere. Places of one request must not be
            read by another.
        query_start_loc: int32 [S + 1]; rows from query_start_loc[S] on are padding.
        out: [T, H, V], contiguous.

    Returns:
        out in v's dtype, before the gated norm; 0 in padding rows.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was written.
    """

    def require(holds: bool, what: str, given: object) -> None:
        if not holds:
            raise DcpInvalidArgument(f"{OP}: {what} (got {given})")

    require(q.dim() == 3 and v.dim() == 3, "q and v must have shapes [T, H, K] and [T, H, V]", (list(q.shape), list(v.shape)))
    num_rows, num_heads, key_dim = q.shape
    value_dim, num_seqs = v.shape[2], len(query_start_loc) - 1
    out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    for name, tensor, shape in (
        ("k", k, (num_rows, num_heads, key_dim)), ("v", v, (num_rows, num_heads, value_dim)),
        ("f", f, (num_rows, num_heads, key_dim)), ("b", b, (num_rows, num_heads)), ("A_log", A_log, (num_heads,)),
        ("dt_bias", dt_bias, (num_heads, key_dim)), ("states", states, (len(states), num_heads, value_dim, key_dim)),
        ("state_in", state_in, (num_seqs,)), ("state_out", state_out, (num_rows,)), ("out", out, (num_rows, num_heads, value_dim)),
    ):  # fmt: skip
        require(tuple(tensor.shape) == shape, f"{name} must have shape {list(shape)}", list(tensor.shape))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("f", f)):
        inner = tuple(tensor.stride()[1:])
        require(inner == (tensor.shape[2], 1), f"{name} must be contiguous in its last two dims", tensor.stride())
    require(b.stride(1) == 1 or num_heads == 1, "b must have unit stride in its last dim", b.stride())
    for name, tensor in (("states", states), ("out", out), ("A_log", A_log), ("dt_bias", dt_bias)):
        require(tensor.is_contiguous(), f"{name} must be contiguous", tensor.stride())
    for name, tensor, dtype in (
        ("A_log", A_log, torch.float32), ("dt_bias", dt_bias, torch.float32), ("states", states, torch.float32),
        ("state_in", state_in, torch.int64), ("state_out", state_out, torch.int64),
        ("query_start_loc", query_start_loc, torch.int32),
    ):  # fmt: skip
        require(tensor.dtype == dtype, f"{name} must be {dtype}", tensor.dtype)

    kda_kernel[(num_seqs + 1, num_heads, triton.cdiv(value_dim, BLOCK_V))](
        q, k, v, f, b, A_log, dt_bias, states, state_in, state_out, query_start_loc, out, num_rows, num_seqs, num_heads,
        q.stride(0), k.stride(0), v.stride(0), f.stride(0), b.stride(0), lower_bound, l2_eps, key_dim**-0.5,
        K=key_dim, V=value_dim, TILE_K=triton.next_power_of_2(key_dim), TILE_V=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return out
