"""The recurrent part of a KDA layer in one decode step: l2 norms, gates, delta rule, read-out (Kimi Linear, 2025).

A program has a request, a head and a tile of value channels. It walks through the request's tokens with its tile of the
state in registers, and writes the state after each of them, so that a rejected draft leaves nothing behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcpkernels.kimi_k3.triton.launch import Launch, require, require_tensors, require_unit_stride, require_writable

OP = "kda_step"
TILE_V = 32  # value channels of a program: 32 x 128 of fp32 state are 32 registers in each of 128 threads


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def kda_kernel(
    q,  # [T, H, K]
    k,  # [T, H, K]
    v,  # [T, H, V]
    f,  # [T, H, K]
    b,  # [T, H]
    A_log,  # fp32 [H]
    dt_bias,  # fp32 [H, K]
    states,  # fp32 [num_states, H, V, K]
    state_in,  # int64 [S]
    state_out,  # int64 [T]
    query_start_loc,  # int32 [S + 1]
    out,  # [T, H, V]
    lower_bound,
    l2_eps,
    scale,
    num_rows,
    num_seqs,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    f_stride_t,
    f_stride_h,
    b_stride_t,
    b_stride_h,
    state_stride,
    out_stride_t,
    out_stride_h,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,  # powers of 2; TILE_K at least KEY_DIM
    TILE_V: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, TILE_K), tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    out_at = out + head * out_stride_h + value
    zeros = tl.zeros([TILE_V], out.dtype.element_ty)

    if seq == num_seqs:  # the last program has the padding rows
        for row in range(tl.load(query_start_loc + num_seqs).to(tl.int64), num_rows):
            tl.store(out_at + row * out_stride_t, zeros, mask=is_value)
    else:
        source = tl.load(state_in + seq)
        is_state = is_value[:, None] & is_key[None, :]
        state_at = states + (head * VALUE_DIM + value[:, None]) * KEY_DIM + key[None, :]
        # No `& (source >= 0)`: the interpreter makes integers of it.
        from_state = (value < tl.where(source >= 0, VALUE_DIM, 0))[:, None] & is_key[None, :]
        state = tl.load(state_at + source * state_stride, mask=from_state, other=0.0)
        rate = tl.exp(tl.load(A_log + head))
        bias = tl.load(dt_bias + head * KEY_DIM + key, mask=is_key, other=0.0)
        start, end = tl.load(query_start_loc + seq).to(tl.int64), tl.load(query_start_loc + seq + 1).to(tl.int64)
        for row in range(start, end):  # int64, for offsets
            target = tl.load(state_out + row)
            if target >= 0:
                q_row = tl.load(q + row * q_stride_t + head * q_stride_h + key, mask=is_key, other=0.0).to(tl.float32)
                k_row = tl.load(k + row * k_stride_t + head * k_stride_h + key, mask=is_key, other=0.0).to(tl.float32)
                f_row = tl.load(f + row * f_stride_t + head * f_stride_h + key, mask=is_key, other=0.0).to(tl.float32)
                v_row = tl.load(v + row * v_stride_t + head * v_stride_h + value, mask=is_value, other=0.0)
                beta = tl.sigmoid(tl.load(b + row * b_stride_t + head * b_stride_h).to(tl.float32))
                q_row *= scale / tl.sqrt(tl.sum(q_row * q_row, 0) + l2_eps)
                k_row *= 1.0 / tl.sqrt(tl.sum(k_row * k_row, 0) + l2_eps)
                decay = tl.exp(lower_bound * tl.sigmoid(rate * (f_row + bias)))

                state *= decay[None, :]
                error = beta * (v_row.to(tl.float32) - tl.sum(state * k_row[None, :], 1))
                state += error[:, None] * k_row[None, :]
                o_row = tl.sum(state * q_row[None, :], 1)
                tl.store(out_at + row * out_stride_t, o_row.to(out.dtype.element_ty), mask=is_value)
                tl.store(state_at + target * state_stride, state, mask=is_state)
            else:
                tl.store(out_at + row * out_stride_t, zeros, mask=is_value)


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
    """One or several tokens of each of S requests, for H heads of this rank. For each token and head, in fp32,

        q^ = q / sqrt(|q|^2 + l2_eps) * K^-0.5,  k^ = k / sqrt(|k|^2 + l2_eps),  beta = sigmoid(b),
        g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)),
        S <- diag(exp g) S,  S <- S + k^ (beta * (v - S^T k^))^T,  o = S^T q^.

    Reads no tensor on the host, so it can be captured in a graph.

    Args:
        q, k: [T, H, K], behind the convolution, not normalised. Here and below, bf16, fp16 or fp32; unit stride in the
            last dim (b: any), any token and head strides.
        v: [T, H, V]; f: [T, H, K], before the gate; b: [T, H], before the sigmoid.
        A_log: fp32 [H]; dt_bias: fp32 [H, K]; contiguous.
        states: fp32 [num_states, H, V, K], S^T of each head; contiguous but for the first dim. Read and written.
        state_in: int64 [S], contiguous: the state that each request starts from; negative: zeros.
        state_out: int64 [T], contiguous: where the state behind each row goes. Negative: the row is padding; it leaves
            the state as it is, and has output 0. A place that one request writes, no other may read or write.
        query_start_loc: int32 [S + 1], contiguous. Rows query_start_loc[s] .. query_start_loc[s + 1] - 1 are request
            s's; rows from query_start_loc[S] on are padding and have output 0.
        out: [T, H, V] in v's dtype or fp32, unit stride in the last dim; allocated in v's dtype when None.

    Returns:
        out, before the gated norm.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was written.
    """
    _check(q, k, v, f, b, A_log, dt_bias, states, state_in, state_out, query_start_loc, out)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        gates, places = (f, b, A_log, dt_bias), (states, state_in, state_out, query_start_loc)
        launch(q, k, v, *gates, *places, out, lower_bound, l2_eps).run()
    return out


def launch(
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
    out: torch.Tensor,
    lower_bound: float,
    l2_eps: float,
) -> Launch:
    """What `kda_step` runs, from checked arguments."""
    num_rows, num_heads, key_dim = q.shape
    value_dim, num_seqs = v.shape[2], len(state_in)
    return Launch(
        kda_kernel,
        (num_seqs + 1, num_heads, triton.cdiv(value_dim, TILE_V)),
        (q, k, v, f, b, A_log, dt_bias, states, state_in, state_out, query_start_loc, out, lower_bound, l2_eps,
         key_dim**-0.5, num_rows, num_seqs, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *f.stride()[:2],
         *b.stride(), states.stride(0), *out.stride()[:2]),
        {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "TILE_K": triton.next_power_of_2(key_dim), "TILE_V": TILE_V},
        {"num_warps": 4, "num_stages": 1},
    )  # fmt: skip


def _check(
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
    out: torch.Tensor | None,
) -> None:
    floats, fp32, int64 = (torch.bfloat16, torch.float16, torch.float32), (torch.float32,), (torch.int64,)
    require_tensors(OP, [("q", q, 3, floats), ("v", v, 3, floats), ("states", states, 4, fp32),
                         ("state_in", state_in, 1, int64)])  # fmt: skip
    num_rows, num_heads, key_dim = q.shape
    value_dim = v.shape[2]
    keys, values = (num_rows, num_heads, key_dim), (num_rows, num_heads, value_dim)
    require_tensors(OP, [
        ("q", q, keys, floats), ("k", k, keys, floats), ("v", v, values, floats), ("f", f, keys, floats),
        ("b", b, (num_rows, num_heads), floats), ("A_log", A_log, (num_heads,), fp32),
        ("dt_bias", dt_bias, (num_heads, key_dim), fp32),
        ("states", states, (len(states), num_heads, value_dim, key_dim), fp32),
        ("state_out", state_out, (num_rows,), int64),
        ("query_start_loc", query_start_loc, (len(state_in) + 1,), (torch.int32,)),
        *([] if out is None else [("out", out, values, (v.dtype, torch.float32))]),
    ])  # fmt: skip
    require_unit_stride(OP, q=q, k=k, v=v, f=f, state_in=state_in, state_out=state_out, query_start_loc=query_start_loc)
    contiguous = {"A_log": A_log, "dt_bias": dt_bias, "states[i]": states[0] if len(states) else states}
    for name, value in contiguous.items():
        require(OP, value.is_contiguous(), f"{name} must be contiguous", f"strides {value.stride()}")
    require_writable(OP, states=states)
    if out is not None:
        require_unit_stride(OP, out=out)
        require_writable(OP, out=out)
