"""Attention of all heads over this rank's shard of a paged latent cache, with its log-sum-exp: split KV, two kernels.

`split` is one program for a row, a tile of heads and a part of the row's keys: an online softmax (Milakov and Gimelshein,
2018) whose result is normalised within the part. `combine` merges the parts by their LSEs (FlashDecoding, Dao et al.,
2023). All heads share the keys, and values are the first columns of keys (multi-query attention on the latent), so that a
tile of keys is read once and used by both products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dcpkernels.errors import DcpInvalidArgument

OP = "mla_decode"
BLOCK_H = 16  # heads of a program: the fewest rows that matrix units take
BLOCK_N = 32  # keys at a time: with their 576 columns what fits 64 KiB of LDS on gfx942
_PROGRAMS = 264  # to fill a GPU: two for each of 132 multiprocessors
_MAX_SPLITS = 64
_KEYS_PER_SPLIT = 4 * BLOCK_N  # at least, where there are as many: less is not worth the merge
_LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """a @ b, fp32. WIDE: of operands widened to fp32, which is the same sum: Triton 3.9's interpreter holds bfloat16 as
    integers, and would multiply those."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def split_kernel(
    query,  # [T, H, VALUE + REST]
    cache,  # [num_blocks, CACHE_BLOCK, VALUE + REST]
    tables,  # int32 [S, max_blocks]
    starts,  # int32 [S + 1]
    lens,  # int32 [T]
    partial,  # fp32 [T, H, NUM_SPLITS, VALUE]
    partial_lse,  # fp32 [T, H, NUM_SPLITS], base 2
    scale_log2,  # of the scores, times log2(e)
    num_seqs,
    num_heads,
    query_stride_t,
    query_stride_h,
    cache_stride_block,
    cache_stride_row,
    table_stride,
    VALUE: tl.constexpr,
    REST: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SEQS: tl.constexpr,  # a power of 2, at least num_seqs
    TILE_V: tl.constexpr,  # powers of 2, at least VALUE and REST
    TILE_R: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    is_head = heads < num_heads

    # 1. Whose row this is: as many requests end at or before it. Rows behind the last request see nothing.
    index = tl.arange(0, SEQS)
    ends = tl.load(starts + 1 + index, mask=index < num_seqs, other=2147483647)
    seq = tl.sum((ends <= row).to(tl.int32), 0)
    num_keys = tl.load(lens + row)
    num_keys = tl.where(seq < num_seqs, num_keys, 0)
    per_split = tl.cdiv(tl.cdiv(num_keys, TILE_N), NUM_SPLITS) * TILE_N
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)

    # 2. The query, in the two parts that have a power of two of columns.
    column, rest = tl.arange(0, TILE_V), tl.arange(0, TILE_R)
    at = query + row * query_stride_t + heads[:, None] * query_stride_h
    q = tl.load(at + column[None, :], mask=is_head[:, None] & (column < VALUE)[None, :], other=0.0)
    q_rest = tl.load(at + VALUE + rest[None, :], mask=is_head[:, None] & (rest < REST)[None, :], other=0.0)

    # 3. Its keys, tile by tile. A masked row is not loaded: nobody may have written it, and it may hold NaN.
    top = tl.full([TILE_H], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H], tl.float32)
    acc = tl.zeros([TILE_H, TILE_V], tl.float32)
    for start in range(first, last, TILE_N):
        place = start + tl.arange(0, TILE_N)
        is_key = place < last
        block = tl.load(tables + seq.to(tl.int64) * table_stride + place // CACHE_BLOCK, mask=is_key, other=0)
        key_at = cache + block.to(tl.int64) * cache_stride_block + (place % CACHE_BLOCK) * cache_stride_row
        keys = tl.load(key_at[:, None] + column[None, :], mask=is_key[:, None] & (column < VALUE)[None, :], other=0.0)
        keys_rest = tl.load(
            key_at[:, None] + VALUE + rest[None, :], mask=is_key[:, None] & (rest < REST)[None, :], other=0.0
        )
        scores = _dot(q, tl.trans(keys), WIDE) + _dot(q_rest, tl.trans(keys_rest), WIDE)
        scores = tl.where(is_key[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: the tile has a key
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + _dot(weights.to(keys.dtype), keys, WIDE)
        top = new_top

    # 4. The part's own result; without keys it has LSE -inf, and its zeros are not looked at.
    at = (row * num_heads + heads) * NUM_SPLITS + split
    total = tl.where(first < last, total, 1.0)
    tl.store(partial_lse + at, top + tl.log2(total), mask=is_head)
    out_at = partial + at[:, None] * VALUE + column[None, :]
    tl.store(out_at, acc / total[:, None], mask=is_head[:, None] & (column < VALUE)[None, :])


@triton.jit
def combine_kernel(
    partial,  # fp32 [T, H, NUM_SPLITS, VALUE]
    partial_lse,  # fp32 [T, H, NUM_SPLITS], base 2
    out,  # [T, H, VALUE]
    lse,  # fp32 [T, H], natural
    num_heads,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    VALUE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE_V: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, TILE_V)
    is_column = column < VALUE
    at = (row * num_heads + head) * NUM_SPLITS
    top = tl.max(tl.load(partial_lse + at + tl.arange(0, NUM_SPLITS)), 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    total = 0.0
    acc = tl.zeros([TILE_V], tl.float32)
    for split in range(NUM_SPLITS):
        weight = tl.exp2(tl.load(partial_lse + at + split) - base)
        total += weight
        acc += weight * tl.load(partial + (at + split) * VALUE + column, mask=is_column, other=0.0)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * out_stride_t + head * out_stride_h + column, acc.to(out.dtype.element_ty), mask=is_column)
    tl.store(lse + row * lse_stride_t + head * lse_stride_h, (top + tl.log2(total)) * _LN2)  # log2(0) is -inf


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    local_lens: torch.Tensor,
    *,
    scale: float,
    value_dim: int = 512,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ keys^T) @ values over the tokens of this rank that each row may see.

    Reads no tensor on the host: it can be captured in a graph. Two launches.

    Args:
        query: [T, H, Dq] bf16, fp16 or fp32; unit stride in the last dim, any token and head strides.
        cache: [num_blocks, block_size, Dq], the same dtype, unit last stride. Keys are whole rows, values the first
            value_dim columns of them. Rows that no table and length point to are not read.
        block_tables: int32 [S, max_blocks], unit last stride; entries past a request's last block are not used.
        query_start_loc: int32 [S + 1], contiguous; rows query_start_loc[s] .. query_start_loc[s + 1] - 1 are request s's. Rows
            from query_start_loc[S] on are padding.
        local_lens: int32 [T], contiguous; row t sees the first local_lens[t] tokens of its request here. At most
            max_blocks * block_size, which is not checked.
        num_splits: parts that a row's keys are divided into, a power of 2; None: as many as fill a GPU.
        out: [T, H, value_dim], unit last stride, any floating dtype; lse: fp32 [T, H], any strides. Allocated when None.

    Returns:
        (out in query's dtype, lse in natural logarithm). A row that sees nothing has out 0 and lse -inf.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was written.
    """
    num_rows, num_heads, dim = _check(query, cache, block_tables, query_start_loc, local_lens, value_dim, out, lse)
    if num_splits is None:
        num_splits = choose_num_splits(num_rows, num_heads, block_tables.shape[1] * cache.shape[1])
    if num_splits < 1 or num_splits & (num_splits - 1):
        raise DcpInvalidArgument(f"{OP}: num_splits must be a power of 2 (got {num_splits})")
    if out is None:
        out = query.new_empty(num_rows, num_heads, value_dim)
    if lse is None:
        lse = query.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows == 0:
        return out, lse
    partial = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    num_seqs = len(query_start_loc) - 1
    tile_v = max(16, triton.next_power_of_2(value_dim))
    split_kernel[(num_rows, triton.cdiv(num_heads, BLOCK_H), num_splits)](
        query, cache, block_tables, query_start_loc, local_lens, partial, partial_lse, scale * _LOG2E, num_seqs, num_heads,
        query.stride(0), query.stride(1), cache.stride(0), cache.stride(1), block_tables.stride(0),
        VALUE=value_dim, REST=dim - value_dim, CACHE_BLOCK=cache.shape[1], NUM_SPLITS=num_splits,
        SEQS=triton.next_power_of_2(max(num_seqs, 1)), TILE_V=tile_v,
        TILE_R=max(16, triton.next_power_of_2(dim - value_dim)), TILE_H=BLOCK_H, TILE_N=BLOCK_N,
        WIDE=triton.knobs.runtime.interpret, num_warps=4, num_stages=1,
    )  # fmt: skip
    combine_kernel[(num_rows, num_heads)](
        partial, partial_lse, out, lse, num_heads, *out.stride()[:2], *lse.stride(),
        VALUE=value_dim, NUM_SPLITS=num_splits, TILE_V=tile_v, num_warps=4,
    )  # fmt: skip
    return out, lse


def choose_num_splits(num_rows: int, num_heads: int, max_keys: int) -> int:
    """A power of 2: enough programs to fill a GPU, as far as the longest possible row has keys for them."""
    programs = max(num_rows, 1) * triton.cdiv(num_heads, BLOCK_H)
    wanted = min(triton.cdiv(_PROGRAMS, programs), triton.cdiv(max_keys, _KEYS_PER_SPLIT), _MAX_SPLITS)
    return triton.next_power_of_2(max(wanted, 1))


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    local_lens: torch.Tensor,
    value_dim: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[int, int, int]:
    def require(holds: bool, what: str, given: object) -> None:
        if not holds:
            raise DcpInvalidArgument(f"{OP}: {what} (got {given})")

    require(query.dim() == 3, "query must have shape [T, H, Dq]", list(query.shape))
    num_rows, num_heads, dim = query.shape
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    require(query.dtype in dtypes, "query must be bfloat16, float16 or float32", query.dtype)
    require(1 <= value_dim < dim, f"value_dim must be in 1 .. Dq-1={dim - 1}", value_dim)
    require(cache.dim() == 3 and cache.shape[2] == dim, f"cache must have shape [num_blocks, block_size, {dim}]", list(cache.shape))
    require(cache.dtype == query.dtype, f"cache must be {query.dtype} as query is", cache.dtype)
    for name, tensor in (("query", query), ("cache", cache)):
        require(tensor.stride(-1) == 1, f"{name} must have unit stride in its last dim", tensor.stride())
    for name, tensor, dims in (("block_tables", block_tables, 2), ("query_start_loc", query_start_loc, 1), ("local_lens", local_lens, 1)):
        require(tensor.dtype == torch.int32, f"{name} must be int32", tensor.dtype)
        require(tensor.dim() == dims and tensor.stride(-1) in (0, 1), f"{name} must have {dims} dims and unit last stride", list(tensor.shape))
    require(len(query_start_loc) == len(block_tables) + 1, f"query_start_loc must have S+1={len(block_tables) + 1} entries", len(query_start_loc))
    require(len(local_lens) == num_rows, f"local_lens must have an entry for each of the {num_rows} rows", len(local_lens))
    if out is not None:
        require(tuple(out.shape) == (num_rows, num_heads, value_dim), f"out must have shape {[num_rows, num_heads, value_dim]}", list(out.shape))
        require(out.stride(-1) == 1 and out.is_floating_point(), "out must be floating, with unit last stride", (out.dtype, out.stride()))
    if lse is not None:
        require(tuple(lse.shape) == (num_rows, num_heads), f"lse must have shape {[num_rows, num_heads]}", list(lse.shape))
        require(lse.dtype == torch.float32, "lse must be float32", lse.dtype)
    return num_rows, num_heads, dim
