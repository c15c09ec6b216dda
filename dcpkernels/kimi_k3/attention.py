"""Attention of all heads over this rank's shard of the cache, with its log-sum-exp: plain torch, for CPUs.

Multi-query attention on the latent (the key projection is absorbed into the query, the value projection follows the
merge): keys are whole rows of the cache, values their first columns. `triton/mla_decode.py` is the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.cache import DecodeBatch

# Keys that are worked on at once: few at first, for short requests, then what fits a core's cache in fp32.
_FIRST_CHUNK, _CHUNK = 64, 512

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # as local_attention


def attention_for(device: torch.device) -> Attention:
    """`local_attention`, or the Triton kernel on a GPU (which needs the extra dcpkernels[triton])."""
    return local_attention if device.type == "cpu" else _triton_attention


def _triton_attention(
    query: torch.Tensor, blocks: torch.Tensor, batch: DecodeBatch, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    from dcpkernels.kimi_k3.triton.mla_decode import mla_decode

    return mla_decode(query, blocks, batch.block_tables, batch.query_start_loc, batch.local_lens, **options)


def local_attention(
    query: torch.Tensor,
    blocks: torch.Tensor,
    batch: DecodeBatch,
    *,
    scale: float,
    value_dim: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ keys^T) @ values over the tokens that are on this rank and that the row may see, in fp32
    by the online softmax of Milakov and Gimelshein (2018).

    Args:
        query: [T, H, Dq], any floating dtype; heads of all ranks.
        blocks: [num_blocks, block_size, Dq], a LatentCache's.
        batch: whose rows these are; row t sees the first local_lens[t] tokens of its request.
        value_dim: values are the first so many columns of a row.
        out, lse: written instead of new tensors; out in any floating dtype.

    Returns:
        (out [T, H, value_dim] in query's dtype, lse fp32 [T, H], natural logarithm). A row that sees nothing, as in a
        padding row or when its tokens are all on other ranks, has lse -inf, and *undefined* out.

    Raises:
        DcpInvalidArgument: query, blocks and batch do not fit together.
    """
    num_rows, num_heads, dim = query.shape
    if num_rows != batch.num_rows or blocks.shape[2] != dim:
        raise DcpInvalidArgument(
            f"kimi_k3: query must have {batch.num_rows} rows of {blocks.shape[2]} columns, as batch and blocks "
            f"(got {num_rows} of {dim})"
        )
    if out is None:
        out = query.new_empty(num_rows, num_heads, value_dim)
    if lse is None:
        lse = query.new_empty(num_rows, num_heads, dtype=torch.float32)
    lse.fill_(-torch.inf)
    # A step of the loop works on requests with as many query tokens each: no row is padded.
    starts = batch.query_start_loc.tolist()
    by_num_tokens: dict[int, list[int]] = {}
    for s, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        by_num_tokens.setdefault(end - start, []).append(s)
    by_num_tokens.pop(0, None)
    for num_tokens, requests in by_num_tokens.items():
        rows = torch.tensor([range(starts[s], starts[s] + num_tokens) for s in requests])
        _attend(query, blocks, rows, batch.local_lens[rows], batch.block_tables[requests], scale, out, lse)
    return out, lse


def _attend(
    query: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """For R requests of Q query tokens: rows and lens [R, Q], tables [R, max_blocks]."""
    value_dim, num_heads = out.shape[2], out.shape[1]
    # The longest first, so that those which still have keys are always the first ones. The last token sees most.
    order = lens[:, -1].argsort(descending=True)
    order = order[lens[order, -1] > 0]
    rows, lens, tables = rows[order], lens[order], tables[order]
    num_keys = lens[:, -1].tolist()
    # One row of M = Q * H queries a request: [R, M, Dq].
    q = (query[rows].float() * scale).flatten(1, 2)
    limit = lens.repeat_interleave(num_heads, 1)[..., None]  # [R, M, 1]
    top = torch.full((*q.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(top)
    acc = torch.zeros(*q.shape[:2], value_dim)
    wide = torch.empty(0)  # where chunks become fp32, again and again: new memory would be a page fault for every page

    first, live = 0, len(num_keys)
    while live:
        last = min(first + min(max(first, _FIRST_CHUNK), _CHUNK), num_keys[0])
        keys = _rows_of(blocks, tables[:live], first, last)
        if keys.dtype != torch.float32:
            wide = wide if wide.numel() >= keys.numel() else torch.empty(keys.numel())
            keys = wide[: keys.numel()].view(keys.shape).copy_(keys)
        scores = torch.bmm(q[:live], keys.transpose(1, 2))
        hidden = torch.arange(first, last) >= limit[:live]
        values = keys[..., :value_dim]
        if hidden.any():
            scores.masked_fill_(hidden, -torch.inf)
            # A key that a query must not see may hold NaN, and 0 * NaN is NaN. Who sees it has a NaN for its weight.
            values = values.nan_to_num(0.0, 0.0, 0.0)
        new_top = torch.maximum(top[:live], scores.amax(2, keepdim=True))
        base = new_top.clamp_min(torch.finfo(torch.float32).min)  # nothing seen yet: -inf - -inf is NaN
        rescale = (top[:live] - base).exp_()
        weights = scores.sub_(base).exp_()
        total[:live].mul_(rescale).add_(weights.sum(2, keepdim=True))
        # Not baddbmm: it adds product after product to acc, which is off by 5e-5 after 100,000 keys.
        acc[:live].mul_(rescale).add_(torch.bmm(weights, values))
        top[:live] = new_top
        first = last
        while live and num_keys[live - 1] <= first:
            live -= 1
    shape = (*rows.shape, num_heads)
    out[rows] = (acc / total).view(*shape, value_dim).to(out.dtype)
    lse[rows] = (top + total.log()).view(shape)


def _rows_of(blocks: torch.Tensor, tables: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Tokens first .. last - 1 of each request: [R, last - first, Dq]; past its end whatever its blocks hold."""
    block_size = blocks.shape[1]
    first_block, last_block = first // block_size, -(-last // block_size)
    numbers = tables[:, first_block:last_block]
    offset = first - first_block * block_size
    if len(numbers) == 1 and bool((numbers[0].diff() == 1).all()):
        # Blocks that follow each other need no copy.
        start = int(numbers[0, 0]) * block_size + offset
        return blocks.view(-1, blocks.shape[2])[None, start : start + last - first]
    return blocks[numbers.clamp_min(0)].flatten(1, 2)[:, offset : offset + last - first]
