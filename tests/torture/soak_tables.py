"""What a soak passes and what has to come back, made once: a call then takes rows of a table, and its result is compared
bit by bit with rows of another one. No row of a result depends on the other rows, nor on how many there are.

The merged rows are computed a second time by `pack` and `merge` of the collective backend, for all ranks in one place and
with no workspace at all, and every table of them is held against the reference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dcpkernels import WorkspaceConfig, _backend, _check, reference
from dcpkernels.collective import CollectiveBackend
from dcpkernels.testing import assert_merge_close, merge_inputs
from dcpkernels.testing.inputs import KINDS
from tests.gather_calls import Context, any_bits

NUM_TABLES = 17  # odd: a row that is one, two or many calls old has other values, whatever the parity of the call
LSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERY_SCALE, KV_SCALE = 0.04, 0.7


@dataclass
class MergeTable:
    """All rows of one table. `outs`, `lses`: [W, rows, H, D] and [W, rows, H]; `out`, `lse`: what one rank gets."""

    outs: torch.Tensor
    lses: torch.Tensor
    lse_base: str
    seq_lens: torch.Tensor | None  # [W, S]
    query_start_loc: torch.Tensor | None  # [S + 1]
    out: torch.Tensor
    lse: torch.Tensor

    def masks(self, rank: int, first: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """Those of the rows first .. first + num_tokens - 1."""
        if self.seq_lens is None or self.query_start_loc is None:
            return {}
        starts = (self.query_start_loc - first).clamp_(0, num_tokens)
        return {"seq_lens": self.seq_lens[rank], "query_start_loc": starts}


def merge_tables(config: WorkspaceConfig, num_ranks: int, rank: int, num_rows: int, seed: int) -> list[MergeTable]:
    return [_merge_table(config, num_ranks, rank, num_rows, seed, i) for i in range(NUM_TABLES)]


def _merge_table(config: WorkspaceConfig, num_ranks: int, rank: int, num_rows: int, seed: int, i: int) -> MergeTable:
    outs, lses = merge_inputs(
        *(num_ranks, num_rows, config.num_heads, config.head_dim, config.dtype),
        kind=KINDS[i % len(KINDS)],
        seed=1000 * seed + i,
    )
    lses = lses.to(LSE_DTYPES[i % 3])
    seq_lens = query_start_loc = None
    if i % 2:
        # Four sequences of which one or another has no token on a rank, and padding behind them in some tables.
        generator = torch.Generator().manual_seed(seed + i)
        seq_lens = torch.randint(-1, 3, (num_ranks, 4), generator=generator, dtype=torch.int32)
        ends = torch.randint(0, num_rows + 1, (3,), generator=generator).sort().values.tolist()
        query_start_loc = torch.tensor([0, *ends, num_rows - i % 3], dtype=torch.int32).cummax(0).values.int()
    masks = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    base = "e2"[i // 2 % 2]
    merged = merge_again(config, outs, lses, lse_base=base, **masks)
    if rank == 0:  # every rank has computed the same ones
        whole = torch.cat([out for out, _ in merged], 1), torch.cat([lse for _, lse in merged], 1)
        assert_merge_close(*whole, outs, lses, lse_base=base, **masks)
    return MergeTable(outs, lses, base, seq_lens, query_start_loc, *merged[rank])


def merge_again(
    config: WorkspaceConfig,
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(out [T, H/W, D], lse [T, H/W]) of every rank, by `pack` and `merge` of rows that are handed over here."""
    num_ranks, num_tokens, num_heads, head_dim = outs.shape
    local_heads, module = num_heads // num_ranks, _backend.load("cpu")
    config = dataclasses.replace(config, max_num_tokens=num_tokens, zero_copy=False, wire="bulk", num_channels=1)
    layout = config.region_layout(num_ranks)
    geometry = CollectiveBackend._make_geometry(SimpleNamespace(_layout=layout, _config=config, _module=module))
    chunk = num_tokens * layout.plain_row_bytes
    results, exchanges, sent = [], [], []
    for rank in range(num_ranks):
        out = torch.empty(num_tokens, local_heads, head_dim, dtype=outs.dtype)
        lse = torch.empty(num_tokens, local_heads)
        exchange = module.A2aLseReduceExchange(
            isa=module.runnable_variants[0],
            rank=rank,
            geometry=geometry,
            lse_dtype=_check.DTYPE_CODES[lses.dtype],
            lse_base=_check.LSE_BASE_CODES[lse_base],
            num_tokens=num_tokens,
            num_seqs=-1 if seq_lens is None else seq_lens.shape[1],
            strides=(*outs[rank].stride()[:2], *lses[rank].stride(), *out.stride()[:2], *lse.stride()),
        )
        lengths = (0, 0) if seq_lens is None else (seq_lens[rank].data_ptr(), query_start_loc.data_ptr())
        inputs = outs[rank].data_ptr(), lses[rank].data_ptr()
        assert exchange.begin(*inputs, out.data_ptr(), lse.data_ptr(), *lengths) == 0
        send = torch.empty((num_ranks - 1) * chunk, dtype=torch.uint8)
        exchange.pack(send.data_ptr(), 0, num_tokens)
        results.append((out, lse)), exchanges.append(exchange), sent.append(send)
    for rank, exchange in enumerate(exchanges):
        peers = [peer for peer in range(num_ranks) if peer != rank]
        places = [(rank - (rank > peer)) * chunk for peer in peers]  # of this rank's rows among those of the peer
        rows = [sent[peer][place : place + chunk] for peer, place in zip(peers, places, strict=True)]
        receive = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
        exchange.merge(receive.data_ptr(), 0, num_tokens)
    return results


@dataclass
class QueryTable:
    """`queries` [W, rows, H/W, Dq]; `out` and `scaled` [rows, H, Dq], those of a gather without and with scale."""

    queries: torch.Tensor
    out: torch.Tensor
    scaled: torch.Tensor


def query_tables(config: WorkspaceConfig, num_ranks: int, num_rows: int, seed: int) -> list[QueryTable]:
    """Bits of all kinds in every other table, NaN and infinities among them; numbers in the others."""
    shape = (num_ranks, num_rows, config.num_heads // num_ranks, config.query_head_dim)
    tables = []
    for i in range(NUM_TABLES):
        if i % 2:
            queries = any_bits(shape, config.query_dtype, seed + i)
        else:
            generator = torch.Generator().manual_seed(seed + i)
            queries = (torch.randn(shape, generator=generator) * 8).to(config.query_dtype)
        ranks = list(queries)
        scaled = reference.query_gather(ranks, scale=QUERY_SCALE, scaled_dtype=config.quantised_dtype)
        tables.append(QueryTable(queries, reference.query_gather(ranks), scaled))
    return tables


@dataclass
class KvTable:
    """A context, its plan on this rank, and each chunk as it has to come: as it is, and dequantised where that is done."""

    context: Context
    plan: Any
    chunks: list[torch.Tensor]
    scaled: list[torch.Tensor]


def kv_tables(config: WorkspaceConfig, num_ranks: int, rank: int, seed: int) -> list[KvTable]:
    tables = []
    for i, lens in enumerate([(37, 0, 21), (5, 5, 5, 5), (1,), (16, 48), (0, 30)]):
        context = Context(
            *(lens, num_ranks, config.kv_dim, config.kv_dtype),
            interleave=1 + i % 3,
            block_size=(4, 16)[i % 2],
            cache=("contiguous", "layers inside of blocks", "rows an odd pitch apart")[i % 3],
            seed=seed + i,
        )
        plan = context.plan(rank, config.kv_chunk_rows - i % 2)
        indices = range(plan.num_chunks)
        scaled = []
        if config.kv_dtype in _check.SCALED_DTYPES:
            scaled = [context.reference_chunk(plan.chunk_size, j, KV_SCALE) for j in indices]
        tables.append(KvTable(context, plan, [context.chunk(plan.chunk_size, j) for j in indices], scaled))
    return tables
