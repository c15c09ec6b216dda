"""The two kernels of `mla_decode`: an online softmax over a part of a row's keys for a tile of heads (Milakov and
Gimelshein, 2018), and the merge of the parts by their log-sum-exp (FlashDecoding, Dao et al., 2023)."""

from __future__ import annotations

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """a @ b in fp32. WIDE: of operands widened to fp32, which is the same sum. Triton 3.9's interpreter keeps bfloat16
    as 16-bit integers, and would multiply those."""
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


# Counts that change from batch to batch are not specialized on: no compilation in the middle of serving.
@triton.jit(do_not_specialize=["num_seqs", "num_splits"])
def split_kernel(
    query,  # [T, H, VALUE_DIM + REST_DIM]
    cache,  # [num_blocks, BLOCK_SIZE, VALUE_DIM + REST_DIM]
    block_tables,  # int32 [S, max_blocks]
    query_start_loc,  # int32 [S + 1]
    local_lens,  # int32 [T]
    partial,  # fp32 [T, H, num_splits, VALUE_DIM]
    partial_lse,  # fp32 [T, H, num_splits], base 2
    scale_log2,  # scale * log2(e), so that exp2 takes the scores
    num_seqs,
    num_heads,
    num_splits,
    query_stride_t,
    query_stride_h,
    cache_stride_block,
    cache_stride_row,
    table_stride,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_V: tl.constexpr,  # powers of 2, at least VALUE_DIM and REST_DIM, and the 16 that a matrix unit takes
    TILE_R: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_S: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    heads = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    is_head = heads < num_heads

    # 1. Whose row: as many requests end at or before it. All of them do for padding, which sees nothing.
    seq = 0
    for first_seq in range(0, num_seqs, TILE_S):
        index = first_seq + tl.arange(0, TILE_S)
        ends = tl.load(query_start_loc + 1 + index, mask=index < num_seqs, other=2147483647)
        seq += tl.sum((ends <= row).to(tl.int32), 0)
    num_keys = tl.load(local_lens + row, mask=seq < num_seqs, other=0)
    # This split's share of the tiles.
    num_tiles = tl.cdiv(num_keys, TILE_N)
    first = num_tiles * split // num_splits * TILE_N
    last = tl.minimum(num_tiles * (split + 1) // num_splits * TILE_N, num_keys)
    has_keys = first < last

    # 2. The query in two parts, as 576 columns are no power of two.
    column, rest_column = tl.arange(0, TILE_V), tl.arange(0, TILE_R)
    is_column, is_rest = column < VALUE_DIM, rest_column < REST_DIM
    query_at = query + row * query_stride_t + heads * query_stride_h
    read = heads < tl.where(has_keys, num_heads, 0)  # no `& has_keys`: the interpreter makes integers of it
    q = tl.load(query_at[:, None] + column[None, :], mask=read[:, None] & is_column[None, :], other=0.0)
    q_rest = tl.load(
        query_at[:, None] + (VALUE_DIM + rest_column)[None, :], mask=read[:, None] & is_rest[None, :], other=0.0
    )

    # 3. Online softmax. Whatever lies past the last key, in the table or in the cache, is not read: 0 * NaN is NaN.
    top = tl.full([TILE_H], float("-inf"), tl.float32)
    total = tl.zeros([TILE_H], tl.float32)
    acc = tl.zeros([TILE_H, TILE_V], tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    for start in range(first, last, TILE_N):
        key = start + tl.arange(0, TILE_N)
        is_key = key < last
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        key_at = cache + block * cache_stride_block + (key % BLOCK_SIZE) * cache_stride_row
        keys = tl.load(key_at[:, None] + column[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0)
        keys_rest = tl.load(
            key_at[:, None] + (VALUE_DIM + rest_column)[None, :], mask=is_key[:, None] & is_rest[None, :], other=0.0
        )
        scores = _dot(q, tl.trans(keys), WIDE) + _dot(q_rest, tl.trans(keys_rest), WIDE)
        scores = tl.where(is_key[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite, as every tile has a key
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + _dot(weights.to(keys.dtype), keys, WIDE)
        top = new_top

    # 4. The part's own result. A part without keys says so by its LSE, and combine_kernel does not read the rest.
    total = tl.where(has_keys, total, 1.0)
    at = (row * num_heads + heads) * num_splits + split
    tl.store(partial_lse + at, tl.where(has_keys, top + tl.log2(total), float("-inf")), mask=is_head)
    out_at = partial + at[:, None] * VALUE_DIM + column[None, :]
    tl.store(out_at, acc / total[:, None], mask=read[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial,  # fp32 [T, H, num_splits, VALUE_DIM]
    partial_lse,  # fp32 [T, H, num_splits], base 2
    out,  # [T, H, VALUE_DIM]
    lse,  # fp32 [T, H], natural
    num_heads,
    num_splits,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    VALUE_DIM: tl.constexpr,
    TILE_V: tl.constexpr,
    SPLITS: tl.constexpr,  # powers of 2: at least num_splits; how many are read at once
    TILE_SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, TILE_V)
    is_column = column < VALUE_DIM
    at = (row * num_heads + head) * num_splits

    split = tl.arange(0, SPLITS)
    part_lse = tl.load(partial_lse + at + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(part_lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    total = tl.sum(tl.exp2(part_lse - base), 0)  # 0 only when no part has keys: else one part adds 1
    acc = tl.zeros([TILE_V], tl.float32)
    for first_split in range(0, num_splits, TILE_SPLITS):
        some = first_split + tl.arange(0, TILE_SPLITS)
        some_lse = tl.load(partial_lse + at + some, mask=some < num_splits, other=float("-inf"))
        has_keys = some_lse != float("-inf")
        part_at = partial + (at + some)[:, None] * VALUE_DIM + column[None, :]
        part = tl.load(part_at, mask=has_keys[:, None] & is_column[None, :], other=0.0)
        acc += tl.sum(tl.exp2(some_lse - base)[:, None] * part, 0)
    acc = tl.where(total == 0.0, 0.0, acc / total)
    tl.store(out + row * out_stride_t + head * out_stride_h + column, acc.to(out.dtype.element_ty), mask=is_column)
    tl.store(lse + row * lse_stride_t + head * lse_stride_h, (top + tl.log2(total)) * _LN2)  # log2(0) is -inf
