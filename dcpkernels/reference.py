"""The truth for every op, for all ranks at once, in plain torch: merges in fp64, gathers byte by byte. Shares no code
with any kernel, nor with KVGatherPlan.

Tests, demos and `self_check` compare against these functions. They are meant to be read, not to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dcpkernels.errors import DcpInvalidArgument

# What query_gather takes to fp8, and which fp8; kv_gather takes it from there.
SCALABLE = (torch.float32, torch.float16, torch.bfloat16)
SCALED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class MergeWeights(NamedTuple):
    """How the shards of each row are weighted. W ranks, T tokens, H heads; all fp64 but `live`."""

    live: torch.Tensor  # [W, T, H] bool: the shard is not empty
    gap: torch.Tensor  # [W, T, H] how far the LSE is below the largest live one, natural-log units; 0 if empty
    weight: torch.Tensor  # [W, T, H] normalised: sums to 1 over W; 0 if empty
    lse: torch.Tensor  # [T, H] merged LSE in the given base; -inf when all are empty


def a2a_lse_reduce(
    partial_outs: torch.Tensor,
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges partial attention over W shards of the KV cache, for all ranks at once.

    With b the base of the LSE, over the shards i that are not empty:

        lse = log_b sum_i b^lse_i        w_i = b^(lse_i - lse)        out = sum_i w_i * out_i

    This is the exact recombination of a softmax that was computed in pieces, each with its own maximum and
    normaliser: the online softmax of Milakov and Gimelshein (2018), used per tile in FlashAttention (Dao et
    al., 2022) and across independent splits of the KV cache in Flash-Decoding (Dao et al., 2023).

    Args:
        partial_outs: [W, T, H, D], any floating dtype. Rank r's partial output of all H heads is
            partial_outs[r].
        partial_lses: [W, T, H], any floating dtype.
        lse_base: "e" or "2", the base of the logarithm in partial_lses and in the returned LSE.
        seq_lens: [W, S] integers, local KV length of each sequence on each rank. A shard of length 0 is empty
            whatever its LSE says. Without query_start_loc sequence s is token s, so S must be T.
        query_start_loc: [S+1] integers; tokens query_start_loc[s] .. query_start_loc[s+1]-1 belong to
            sequence s. A token that belongs to no sequence is padding and empty on every rank.

    Returns:
        (out [T, H, D], lse [T, H]), both fp64. Rank r's share of out is heads r*H/W .. (r+1)*H/W - 1. A shard
        whose LSE is -inf, +inf or NaN is empty. Payload of an empty shard is not used. All empty: out is 0
        and lse is -inf.

    Raises:
        DcpInvalidArgument: shapes that do not fit together, or an unknown base.
    """
    _require(partial_outs.dim() == 4, "partial_outs must be [W, T, H, D]", tuple(partial_outs.shape))
    _require(
        partial_lses.shape == partial_outs.shape[:3],
        f"partial_lses must be [W, T, H] = {list(partial_outs.shape[:3])}",
        tuple(partial_lses.shape),
    )
    w = merge_weights(partial_lses, lse_base=lse_base, seq_lens=seq_lens, query_start_loc=query_start_loc)
    # Select, do not multiply: 0 * NaN is NaN.
    payload = torch.where(w.live[..., None], partial_outs.double(), 0.0)
    return (w.weight[..., None] * payload).sum(0), w.lse


def merge_weights(
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> MergeWeights:
    """The weights of `a2a_lse_reduce`, which describes the arguments. Raises DcpInvalidArgument."""
    _require(lse_base in ("e", "2"), 'lse_base must be "e" or "2"', lse_base)
    _require(partial_lses.dim() == 3, "partial_lses must be [W, T, H]", tuple(partial_lses.shape))
    num_ranks, num_tokens, _ = partial_lses.shape
    _require(num_ranks >= 1, "there must be at least one rank", num_ranks)
    ln_base = 1.0 if lse_base == "e" else math.log(2.0)

    lses = partial_lses.double()
    has_tokens = _rows_with_tokens(num_ranks, num_tokens, seq_lens, query_start_loc).to(lses.device)
    live = torch.isfinite(lses) & has_tokens[..., None]
    top = torch.where(live, lses, -math.inf).amax(0)
    any_live = live.any(0)
    # Scale the difference, not the two logarithms: with |lse| in the thousands the other order loses digits.
    gap = torch.where(live, (top - lses) * ln_base, 0.0)
    unscaled = torch.where(live, torch.exp(-gap), 0.0)
    total = torch.where(any_live, unscaled.sum(0), 1.0)
    lse = torch.where(any_live, top + torch.log(total) / ln_base, -math.inf)
    return MergeWeights(live=live, gap=gap, weight=unscaled / total, lse=lse)


def _rows_with_tokens(
    num_ranks: int, num_tokens: int, seq_lens: torch.Tensor | None, query_start_loc: torch.Tensor | None
) -> torch.Tensor:
    """[W, T] bool: what the lengths say about each row; all true when there are none."""
    if query_start_loc is None:
        if seq_lens is None:
            return torch.ones(num_ranks, num_tokens, dtype=torch.bool)
        _require(
            tuple(seq_lens.shape) == (num_ranks, num_tokens),
            f"seq_lens without query_start_loc must be [W, T] = [{num_ranks}, {num_tokens}]",
            tuple(seq_lens.shape),
        )
        return seq_lens.cpu() > 0
    _require(
        query_start_loc.dim() == 1 and len(query_start_loc) >= 1,
        "query_start_loc must be [S+1]",
        tuple(query_start_loc.shape),
    )
    starts = query_start_loc.tolist()
    num_seqs = len(starts) - 1
    _require(starts == sorted(starts), "query_start_loc must not decrease", starts)
    if seq_lens is not None:
        _require(
            tuple(seq_lens.shape) == (num_ranks, num_seqs),
            f"seq_lens must be [W, S] = [{num_ranks}, {num_seqs}]",
            tuple(seq_lens.shape),
        )
    rows = torch.zeros(num_ranks, num_tokens, dtype=torch.bool)
    for s in range(num_seqs):
        rows[:, starts[s] : starts[s + 1]] = True if seq_lens is None else (seq_lens[:, s] > 0).cpu()[:, None]
    return rows


def query_gather(
    queries: Sequence[torch.Tensor | Sequence[torch.Tensor]],
    *,
    scale: float | None = None,
    scaled_dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """Puts the heads of all ranks side by side.

    Args:
        queries: one entry a rank, W in all: [T, H/W, Dq], or a tuple of parts [T, H/W, d_j] that are concatenated in
            the last dim, sum d_j = Dq. The same shapes and dtype on all ranks; any dtype, float8 too.
        scale: None, or a number above 0: then queries are fp32, fp16 or bf16, and the result is scaled_dtype,

                e4m3(clamp(q / scale, -largest, largest))

            of q and scale as fp32, rounded to nearest even as torch does it. NaN stays NaN.
        scaled_dtype: float8_e4m3fn, whose largest number is 448, or float8_e4m3fnuz, 240.

    Returns:
        [T, H, Dq], rank r's heads at r * H/W. Without scale every byte is that of the input.

    Raises:
        DcpInvalidArgument: shapes or dtypes that do not fit together, or a scale that is not above 0 and finite.
    """
    op = "query_gather"
    ranks = [(query,) if isinstance(query, torch.Tensor) else tuple(query) for query in queries]
    _require(len(ranks) >= 1, "there must be at least one rank", len(ranks), op)
    _require(len(ranks[0]) >= 1, "there must be at least one part", len(ranks[0]), op)
    dtype = ranks[0][0].dtype
    for r, parts in enumerate(ranks):
        shapes = [tuple(part.shape) for part in parts]
        expected = [tuple(part.shape) for part in ranks[0]]
        _require(
            all(len(shape) == 3 and shape[:2] == shapes[0][:2] for shape in shapes),
            f"queries[{r}] must be [T, H/W, Dq], or parts of it that differ in the last dim only",
            shapes,
            op,
        )
        _require(shapes == expected, f"queries[{r}] must have the shapes of rank 0, {expected}", shapes, op)
        dtypes = [part.dtype for part in parts]
        _require(set(dtypes) == {dtype}, f"queries[{r}] must be {dtype} as on rank 0", dtypes, op)

    out = torch.cat([torch.cat([_as_bytes(part) for part in parts], dim=2) for parts in ranks], dim=1).view(dtype)
    if scale is None:
        return out
    _require(dtype in SCALABLE, f"queries with a scale must be one of {SCALABLE}", dtype, op)
    _require(scaled_dtype in SCALED, f"scaled_dtype must be one of {SCALED}", scaled_dtype, op)
    largest = torch.finfo(scaled_dtype).max
    return (out.float() / _scale(scale, out, op)).clamp(-largest, largest).to(scaled_dtype)


def kv_gather(
    kv_caches: Sequence[torch.Tensor],
    context_lens: torch.Tensor | Sequence[int],
    block_tables: Sequence[torch.Tensor | Sequence[Sequence[int]]],
    *,
    chunk_size: int,
    chunk_idx: int,
    interleave: int = 1,
    scale: float | None = None,
) -> torch.Tensor:
    """One chunk of context, in sequence order, out of caches that are sharded by token.

    The tokens of all requests follow each other, request after request, position after position, without padding;
    chunk i is rows i * chunk_size .. of that, at most chunk_size of them. Runs of I = interleave positions are dealt
    out to the W ranks in turn; a rank's tokens of a request fill its blocks in order.

    Args:
        kv_caches: [num_blocks, block_size, Dkv] of each rank, W in all; any dtype, float8 too. num_blocks may differ.
        context_lens: [S] tokens of each request, on all ranks together.
        block_tables: [S, max_blocks] of each rank: entry k is the block with local tokens k * block_size .. of the
            request. Entries past the rank's last token are not looked at.
        scale: None, or a number above 0: then the caches are float8_e4m3fn or e4m3fnuz, and the result is bfloat16,

                bf16(kv * scale)

            of kv and scale as fp32.

    Returns:
        [rows, Dkv]. Without scale every byte is that of the cache.

    Raises:
        DcpInvalidArgument: shapes or dtypes that do not fit together, a chunk_idx that is none, a negative block, or a
            scale that is not above 0 and finite. A block table that is too short is an IndexError.
    """
    op = "kv_gather"
    num_ranks = len(kv_caches)
    _require(num_ranks >= 1, "there must be at least one rank", num_ranks, op)
    dtype = kv_caches[0].dtype
    for r, cache in enumerate(kv_caches):
        _require(cache.dim() == 3, f"kv_caches[{r}] must be [num_blocks, block_size, Dkv]", tuple(cache.shape), op)
        rule = f"kv_caches[{r}] must have rank 0's block_size and Dkv, {list(kv_caches[0].shape[1:])}"
        _require(cache.shape[1:] == kv_caches[0].shape[1:], rule, list(cache.shape[1:]), op)
        _require(cache.dtype == dtype, f"kv_caches[{r}] must be {dtype} as on rank 0", cache.dtype, op)
    _require(len(block_tables) == num_ranks, f"block_tables must be those of {num_ranks} ranks", len(block_tables), op)
    lens = [int(n) for n in context_lens]
    _require(min(lens, default=0) >= 0, "context_lens must be at least 0", lens, op)
    for r, table in enumerate(block_tables):
        _require(len(table) == len(lens), f"block_tables[{r}] must have {len(lens)} rows", len(table), op)
    _require(chunk_size >= 1, "chunk_size must be at least 1", chunk_size, op)
    _require(interleave >= 1, "interleave must be at least 1", interleave, op)
    first, end = chunk_idx * chunk_size, min((chunk_idx + 1) * chunk_size, sum(lens))
    _require(0 <= first < end, f"chunk_idx must be that of a chunk of {sum(lens)} rows", chunk_idx, op)

    caches = [_as_bytes(cache) for cache in kv_caches]
    block_size = caches[0].shape[1]
    rows = []
    before = 0  # rows of the requests so far
    for s, n in enumerate(lens):
        for p in range(max(first - before, 0), min(end - before, n)):
            run, place = divmod(p, interleave)  # the run of positions that p is in
            turn, owner = divmod(run, num_ranks)
            block, offset = divmod(turn * interleave + place, block_size)
            number = int(block_tables[owner][s][block])
            _require(number >= 0, f"block_tables[{owner}][{s}][{block}] must be a block", number, op)
            rows.append(caches[owner][number, offset])
        before += n
    out = torch.stack(rows).view(dtype)
    if scale is None:
        return out
    _require(dtype in SCALED, f"kv_caches with a scale must be one of {SCALED}", dtype, op)
    return (out.float() * _scale(scale, out, op)).to(torch.bfloat16)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each row, in the last dim: torch moves float8 with few of its functions, bytes with all."""
    return tensor.contiguous().view(torch.uint8)


def _scale(scale: float, like: torch.Tensor, op: str) -> torch.Tensor:
    """As a tensor: torch on a GPU divides by a Python number as it multiplies by the reciprocal, which rounds twice."""
    tensor = torch.tensor(float(scale), dtype=torch.float32, device=like.device)
    _require(0 < tensor.item() < math.inf, "scale must be above 0 and finite in fp32", scale, op)
    return tensor


def _require(holds: bool, what: str, given: object, op: str = "a2a_lse_reduce") -> None:
    if not holds:
        raise DcpInvalidArgument(f"reference.{op}: {what} (got {given!r})")
