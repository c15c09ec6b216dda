"""Attention of all heads over this rank's shard of the paged latent cache, with its log-sum-exp: split KV, two kernels.

All heads share the keys, and values are the first columns of keys (multi-query attention on the latent), so a tile of
keys is read once for both products. `split_kernel` does an online softmax (Milakov and Gimelshein, 2018) over a part of a
row's keys for a tile of heads; `combine_kernel` merges the parts by their log-sum-exp (FlashDecoding, Dao et al., 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dcpkernels.kimi_k3.triton.launch import Launch, require, require_tensors, require_unit_stride, require_writable

OP = "mla_decode"
MAX_SPLITS = 64
_PROGRAMS = 264  # for a GPU of 132 to 304 multiprocessors: about one each. Not measured on a device
_MIN_KEYS_PER_SPLIT = 128  # fewer are not worth their merge
_SEQS_AT_ONCE = 128
_SPLITS_AT_ONCE = 16
_LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """What a program of `split_kernel` works on at once."""

    heads: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    """a @ b in fp32. WIDE: of operands widened to fp32, which is the same sum. Triton 3.9's interpreter keeps bfloat16 as
    16-bit integers, and would multiply those."""
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
        has_keys = some_lse != float("-inf")  # NaN has: what is wrong stays wrong
        part_at = partial + (at + some)[:, None] * VALUE_DIM + column[None, :]
        part = tl.load(part_at, mask=has_keys[:, None] & is_column[None, :], other=0.0)
        acc += tl.sum(tl.exp2(some_lse - base)[:, None] * part, 0)
    acc = tl.where(total == 0.0, 0.0, acc / total)
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
    """softmax(scale * query @ keys^T) @ values over the tokens on this rank that each row may see.

    Reads no tensor on the host, so it can be captured in a graph. Scratch: T * H * num_splits * (value_dim + 1) fp32.

    Args:
        query: [T, H, Dq] bf16, fp16 or fp32; unit stride in the last dim, any token and head strides.
        cache: [num_blocks, block_size, Dq] in query's dtype, unit stride in the last dim. Keys are whole rows, values
            their first value_dim columns. Rows that no row of the batch may see are not read.
        block_tables: int32 [S, max_blocks], unit stride in the last dim; entries past a request's last block are not
            used.
        query_start_loc: int32 [S + 1], contiguous. Rows query_start_loc[s] .. query_start_loc[s + 1] - 1 are request
            s's; rows from query_start_loc[S] on are padding and see nothing.
        local_lens: int32 [T], contiguous. Row t sees the first local_lens[t] tokens of its request here: at most
            max_blocks * block_size, which is not checked.
        num_splits: parts that each row's keys are divided into, 1 .. 64. None: from T, H and max_blocks * block_size.
        out: [T, H, value_dim] in query's dtype or fp32, unit stride in the last dim; lse: fp32 [T, H], any strides.
            Allocated when None.

    Returns:
        (out, lse in natural logarithm). A row that sees nothing has out 0 and lse -inf.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was written.
    """
    _check(query, cache, block_tables, query_start_loc, local_lens, value_dim, num_splits, out, lse)
    num_rows, num_heads, _ = query.shape
    if out is None:
        out = query.new_empty(num_rows, num_heads, value_dim)
    if lse is None:
        lse = query.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows > 0 and num_heads > 0:
        batch = (block_tables, query_start_loc, local_lens)
        tile = choose_tile(num_heads, query.element_size(), "cuda" if torch.version.hip is None else "hip")
        for launch in launches(query, cache, *batch, scale, value_dim, num_splits, out, lse, tile):
            launch.run()
    return out, lse


def choose_tile(num_heads: int, item_bytes: int, backend: str) -> Tile:
    """Chosen so that no register is spilled, by `compile`; not measured on a device. backend: "cuda" or "hip"."""
    if item_bytes == 4:  # for checks, not for speed: twice the registers
        return Tile(16, 16, num_warps=8 if backend == "cuda" else 4, num_stages=1)
    if backend == "hip":  # two waves on a SIMD, which has 512 registers. num_stages=2 spills on gfx942
        return Tile(16, 16, 4, 1) if num_heads <= 16 else Tile(32, 16, 8, 1)
    return Tile(16, 32, 4, 2) if num_heads <= 16 else Tile(32, 32, 8, 2)


def choose_num_splits(num_rows: int, num_heads: int, max_keys: int, tile_heads: int) -> int:
    """As many as fill a GPU, or as the longest possible row has keys for."""
    programs = max(num_rows * triton.cdiv(num_heads, tile_heads), 1)
    return max(1, min(triton.cdiv(_PROGRAMS, programs), max_keys // _MIN_KEYS_PER_SPLIT, MAX_SPLITS))


def launches(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    local_lens: torch.Tensor,
    scale: float,
    value_dim: int,
    num_splits: int | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    tile: Tile,
) -> list[Launch]:
    """What `mla_decode` runs, from checked arguments."""
    num_rows, num_heads, dim = query.shape
    if num_splits is None:
        num_splits = choose_num_splits(num_rows, num_heads, block_tables.shape[1] * cache.shape[1], tile.heads)
    partial = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
    columns = {"VALUE_DIM": value_dim, "TILE_V": max(16, triton.next_power_of_2(value_dim))}
    rest = {"REST_DIM": dim - value_dim, "TILE_R": max(16, triton.next_power_of_2(dim - value_dim))}
    return [
        Launch(
            split_kernel,
            (num_rows, triton.cdiv(num_heads, tile.heads), num_splits),
            (query, cache, block_tables, query_start_loc, local_lens, partial, partial_lse, scale * _LOG2E,
             len(block_tables), num_heads, num_splits, *query.stride()[:2], *cache.stride()[:2], block_tables.stride(0)),
            {**columns, **rest, "BLOCK_SIZE": cache.shape[1], "TILE_H": tile.heads, "TILE_N": tile.keys,
             "TILE_S": _SEQS_AT_ONCE, "WIDE": triton.knobs.runtime.interpret},
            {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        ),
        Launch(
            combine_kernel,
            (num_rows, num_heads),
            (partial, partial_lse, out, lse, num_heads, num_splits, *out.stride()[:2], *lse.stride()),
            {**columns, "SPLITS": MAX_SPLITS, "TILE_SPLITS": _SPLITS_AT_ONCE},
            {"num_warps": 4, "num_stages": 1},
        ),
    ]  # fmt: skip


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    local_lens: torch.Tensor,
    value_dim: int,
    num_splits: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    floats, int32 = (torch.bfloat16, torch.float16, torch.float32), (torch.int32,)
    require_tensors(OP, [("query", query, 3, floats)])
    num_rows, num_heads, dim = query.shape
    require_tensors(OP, [("query", query, 3, floats), ("cache", cache, 3, (query.dtype,)),
                         ("block_tables", block_tables, 2, int32),
                         ("query_start_loc", query_start_loc, (len(block_tables) + 1,), int32),
                         ("local_lens", local_lens, (num_rows,), int32)])  # fmt: skip
    require(OP, cache.shape[2] == dim, f"cache.shape[2] must be query.shape[2]={dim}", cache.shape[2])
    require(OP, cache.shape[1] >= 1, "cache.shape[1] must be at least 1", cache.shape[1])
    require(OP, 1 <= value_dim < dim, f"value_dim must be in 1 .. query.shape[2]-1={dim - 1}", value_dim)
    require(OP, num_splits is None or 1 <= num_splits <= MAX_SPLITS, f"num_splits must be in 1 .. {MAX_SPLITS}", num_splits)
    require_unit_stride(OP, query=query, cache=cache, block_tables=block_tables, query_start_loc=query_start_loc,
                        local_lens=local_lens)  # fmt: skip
    if out is not None:
        shape = (num_rows, num_heads, value_dim)
        require_tensors(OP, [("query", query, 3, floats), ("out", out, shape, (query.dtype, torch.float32))])
        require_unit_stride(OP, out=out)
        require_writable(OP, out=out)
    if lse is not None:
        require_tensors(OP, [("query", query, 3, floats), ("lse", lse, (num_rows, num_heads), (torch.float32,))])
        require_writable(OP, lse=lse)
