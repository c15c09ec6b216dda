"""Attention of all heads over this rank's shard of the paged latent cache, with its log-sum-exp: split KV, two kernels.

All heads share the keys, and values are the first columns of keys (multi-query attention on the latent), so a tile of
keys is read once for both products. The kernels are in mla_kernels.py; here is who calls them, and with which tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from dcpkernels.kimi_k3.triton.launch import Launch, require, require_tensors, require_unit_stride, require_writable
from dcpkernels.kimi_k3.triton.mla_kernels import combine_kernel, split_kernel

OP = "mla_decode"
MAX_SPLITS = 64
_PROGRAMS = 264  # for a GPU of 132 to 304 multiprocessors: about one each. Not measured on a device
_MIN_KEYS_PER_SPLIT = 128  # fewer are not worth their merge
_SEQS_AT_ONCE = 128
_SPLITS_AT_ONCE = 16
_LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """What a program of `split_kernel` works on at once."""

    heads: int
    keys: int
    num_warps: int
    num_stages: int


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
             len(block_tables), num_heads, num_splits, *query.stride()[:2], *cache.stride()[:2],
             block_tables.stride(0)),
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
    is_count = num_splits is None or 1 <= num_splits <= MAX_SPLITS
    require(OP, is_count, f"num_splits must be in 1 .. {MAX_SPLITS}", num_splits)
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
