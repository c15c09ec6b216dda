"""What vLLM has on GPUs only and decode context parallelism (DCP) needs, for CPUs, in plain torch: the slots of new tokens,
the gather of context, and decode attention that returns the log-sum-exp (LSE).

A cache is [num_blocks, block_size, dim]; block tables are int32 [S, max_blocks]. Position p of a request is on DCP rank
(p // I) % W, in that rank's local slot p // (W * I) * I + p % I (I is the interleave, and divides block_size).
"""

from __future__ import annotations

import torch

# Keys that are worked on at once: in fp32 they fit a core's second-level cache, between the product that reads them as keys
# and the one that reads them as values.
CHUNK = 512

PAD_SLOT = -1  # vLLM's PAD_SLOT_ID: a token that is not stored here


def slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    num_ranks: int,
    rank: int,
    interleave: int,
) -> None:
    """Writes to `out` [>= T] the cache row of each of T new tokens, -1 where another rank holds it, and past them.

    query_start_loc: int32 [S + 1]; positions: int64 [T]; block_tables: [>= S, max_blocks].
    """
    lengths = query_start_loc.diff()
    requests = torch.repeat_interleave(lengths)
    positions = positions[: requests.shape[0]]
    local = positions // (num_ranks * interleave) * interleave + positions % interleave
    blocks = block_tables[requests, local // block_size]
    slots = blocks.long() * block_size + local % block_size
    elsewhere = positions // interleave % num_ranks != rank
    out[: slots.shape[0]] = slots.masked_fill_(elsewhere, PAD_SLOT)
    out[slots.shape[0] :] = PAD_SLOT


def gather_context(
    cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Writes to `out` [>= rows, dim] the rows seq_starts[s] .. (0 if None) of each of S requests' local slots, one request
    after the other; cu_seq_lens, int32 [S + 1], says how many of each.

    vLLM asks every rank for as many rows as the fullest rank has. Those past a rank's own are read from whatever block
    the table names there, and thrown away after the gather.
    """
    lengths = cu_seq_lens.diff()
    requests = torch.repeat_interleave(lengths)
    first = -cu_seq_lens[:-1] if seq_starts is None else seq_starts - cu_seq_lens[:-1]
    local = torch.arange(requests.shape[0]) + first[requests]
    block_size = cache.shape[1]
    column = (local // block_size).clamp_max_(block_tables.shape[1] - 1)
    rows = block_tables[requests, column].long() * block_size + local % block_size
    torch.index_select(cache.view(-1, cache.shape[2]), 0, rows, out=out[: rows.shape[0]])


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query @ keys^T) @ values, where row t sees the first seq_lens[t] local slots of request t; keys are
    whole rows of the cache, values their first value_dim columns. In fp32, by the online softmax of Milakov and Gimelshein
    (2018).

    query: [T, H, dim], fp32, bf16 or fp16, as is the cache; block_tables: [T, max_blocks]; seq_lens: [T].

    Returns (out [T, H, value_dim] in query's dtype, LSE fp32 [T, H], natural logarithm). A row that sees nothing has the
    LSE -inf, and *undefined* out.

    Request after request, for the lengths differ. Padded to one product of all they are slower wherever that was
    measured, and a long request among short ones makes the padding as large as itself for each.
    """
    num_rows, num_heads, dim = query.shape
    block_size = cache.shape[1]
    out = query.new_empty(num_rows, num_heads, value_dim)
    lse = torch.full((num_rows, num_heads), -torch.inf)
    scaled = query.float() * scale  # never in place: the query may be a view of what other ranks read
    blocks_at_once = max(1, CHUNK // block_size)
    # Where keys are gathered, and become fp32, again and again: new memory would be a page fault for every page.
    raw = cache.new_empty(blocks_at_once, block_size, dim)
    wide = raw if cache.dtype == torch.float32 else torch.empty(raw.shape)
    for t, num_keys in enumerate(seq_lens.tolist()):
        num_blocks = -(-num_keys // block_size)
        top = total = acc = None
        for first in range(0, num_blocks, blocks_at_once):
            blocks = block_tables[t, first : min(first + blocks_at_once, num_blocks)]
            keys = torch.index_select(cache, 0, blocks, out=raw[: len(blocks)])
            if wide is not raw:
                keys = wide[: len(blocks)].copy_(keys)
            # Past the request's end a block holds whatever was there before it.
            keys = keys.view(-1, dim)[: num_keys - first * block_size]
            scores = torch.mm(scaled[t], keys.t())
            new_top = scores.amax(1, keepdim=True)
            if acc is not None:
                new_top = torch.maximum(top, new_top)
            weights = scores.sub_(new_top).exp_()
            new_total, new_acc = weights.sum(1, keepdim=True), torch.mm(weights, keys[:, :value_dim])
            if acc is not None:
                rescale = (top - new_top).exp_()
                # Not addmm: it adds product after product to acc, and loses more digits over a long context.
                new_total, new_acc = total.mul_(rescale).add_(new_total), acc.mul_(rescale).add_(new_acc)
            top, total, acc = new_top, new_total, new_acc
        if acc is not None:
            out[t] = acc.div_(total)
            lse[t] = (top + total.log()).squeeze(1)
    return out, lse
