"""Every op against the reference, and bit for bit against itself: over wires, in repeats, with ranks on streams or in
one grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from dcpkernels import KVGatherPlan, reference
from dcpkernels.testing import assert_merge_close, merge_inputs

from .cases import Card, Cases
from .virtual import Merge, MergeCall, Ranks, bits, same_bits

KINDS = ("spread", "dominant", "empty", "all_empty")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERIES = ((torch.bfloat16, None), (torch.bfloat16, 0.37), (torch.float32, 0.37), (torch.float16, 2.0))


# -- a2a_lse_reduce


def merge_cases(card: Card) -> Iterator[tuple[str, int, dict[str, Any], Merge]]:
    """(name, W, geometry, call). 3 heads a rank and an odd head_dim now and then; T up to over the capacity of 64."""
    token_counts = (0, 1, 3, 64, 128) if not card.quick else (0, 1, 3, 20)
    capacity = 64 if not card.quick else 8
    kinds = itertools.cycle(KINDS)
    dtypes = DTYPES if not card.one_grid else (torch.bfloat16,)
    for num_ranks in (2, 4, 8) if not card.quick else (2, 3):
        for dtype, num_tokens in itertools.product(dtypes, token_counts):
            kind, local_heads = next(kinds), 3 if num_tokens != 3 else 12
            head_dim = 64 if num_tokens % 2 == 0 else 72
            outs, lses = merge_inputs(
                num_ranks, num_tokens, local_heads * num_ranks, head_dim, dtype, kind=kind, seed=num_tokens
            )
            base = "e" if num_tokens % 2 else "2"
            name = f"W={num_ranks} {str(dtype)[6:]} T={num_tokens} D={head_dim} {kind}"
            yield name, num_ranks, {"max_num_tokens": capacity}, Merge(outs, lses, base)
        yield f"W={num_ranks} lengths", num_ranks, {"max_num_tokens": capacity}, with_lengths(num_ranks)
    if not card.quick:
        outs, lses = merge_inputs(8, 5, 96, 512, torch.bfloat16, kind="empty", seed=1)
        yield "W=8 Kimi-K3 T=5", 8, {"max_num_tokens": 64}, Merge(outs, lses)


def with_lengths(num_ranks: int) -> Merge:
    """Sequences without tokens on some ranks, and padding behind the last one: their payload and LSE are NaN."""
    outs, lses = merge_inputs(num_ranks, 12, 2 * num_ranks, 64, torch.bfloat16, kind="spread", seed=7)
    starts = torch.tensor([0, 1, 5, 5, 9])
    seq_lens = torch.arange(4 * num_ranks).view(num_ranks, 4) % 3
    for rank in range(num_ranks):
        for seq in range(4):
            if seq_lens[rank, seq] == 0:
                outs[rank, starts[seq] : starts[seq + 1]] = float("nan")
                lses[rank, starts[seq] : starts[seq + 1]] = float("nan")
    outs[:, 9:], lses[:, 9:] = float("nan"), float("nan")
    return Merge(outs, lses, "e", seq_lens, starts)


def merge_by_every_wire(card: Card, num_ranks: int, geometry: dict[str, Any], merge: Merge) -> None:
    _, _, num_heads, head_dim = merge.outs.shape
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    channels = 4 if not card.one_grid else 2
    for wire in card.wires:
        ranks = card.ranks(
            num_ranks, num_heads=num_heads, head_dim=head_dim, dtype=merge.outs.dtype, wire=wire,
            num_channels=channels, **geometry,
        )  # fmt: skip
        for repeat in range(3):
            call = MergeCall(ranks, merge, turn=repeat)
            ranks.run(call.step, one_grid=card.one_grid)
            out, lse = call.result()
            if first is None:
                assert_merge_close(
                    out.cpu(), lse.cpu(), merge.outs, merge.lses, lse_base=merge.lse_base, **merge.lengths()
                )
                first = out, lse
            assert same_bits(out, first[0]), f"{wire}, repeat {repeat}: other bits than push, the first time"
            assert same_bits(lse, first[1]), f"{wire}, repeat {repeat}: LSEs of other bits"
        if merge.query_start_loc is not None:
            assert [ranks.nonfinite(rank) for rank in range(num_ranks)] == [0] * num_ranks


def merges(card: Card) -> dict[str, Any]:
    cases = Cases()
    for name, num_ranks, geometry, merge in merge_cases(card):
        with cases.case(name):
            merge_by_every_wire(card, num_ranks, geometry, merge)
    with cases.case("epochs wrap at 2**32"):
        outs, lses = merge_inputs(2, 4, 4, 64, torch.bfloat16, kind="spread", seed=3)
        for wire in card.wires:
            ranks = card.ranks(2, num_heads=4, head_dim=64, max_num_tokens=4, wire=wire, start_epoch=2**32 - 4)
            call = MergeCall(ranks, Merge(outs, lses))
            for _ in range(8):
                ranks.run(call.step, one_grid=card.one_grid)
            out, lse = call.result()
            assert_merge_close(out.cpu(), lse.cpu(), outs, lses, lse_base="e")
    if card.device == "cuda" and not card.one_grid:
        with cases.case("pull is refused"):  # csrc/arch/cuda.h: kHasPull
            ranks = card.ranks(2, num_heads=4, head_dim=64, max_num_tokens=4, wire="pull")
            call = MergeCall(ranks, Merge(*merge_inputs(2, 4, 4, 64, torch.bfloat16, kind="spread", seed=3)))
            refused = ranks.ext.STATUS_LAUNCH_FAILED
            assert ranks.ext.repeat([call.step], ranks.streams, 1) == [refused] * 2
    return cases.result(wires=list(card.wires))


# -- query_gather


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def query_case(card: Card, num_ranks: int, num_tokens: int, dtype: torch.dtype, scale: float | None, dim: int) -> None:
    """In two parts, gathered into the buffer and, in rounds, to `out`; twice, so that buffers are dirty. With a scale, to one
    format of fp8 where heads are whole units, to the other where they are not."""
    local_heads, widths = 3, (dim - 64, 64)
    to = torch.float8_e4m3fn if dim % 16 == 0 else torch.float8_e4m3fnuz
    ranks = card.ranks(
        num_ranks, num_heads=local_heads * num_ranks, head_dim=64, max_num_tokens=max(num_tokens, 1), num_channels=2,
        query_head_bytes=dim * dtype.itemsize,
    )  # fmt: skip
    on_device = None if scale is None else ranks.keep(torch.tensor([scale]))
    release = card.ext.query_step([ranks.query_params(rank, ()) for rank in range(num_ranks)])
    for repeat in range(2):
        queries = []
        for rank in range(num_ranks):
            shape = (num_tokens, local_heads, dim)
            whole = any_bits(shape, dtype, seed=10 * repeat + rank)
            if scale is not None:
                generator = torch.Generator().manual_seed(10 * repeat + rank)
                whole = (torch.randn(shape, generator=generator) * 30).to(dtype)
            queries.append(tuple(whole.split(widths, dim=2)))
        parts = [[ranks.keep(part) for part in query] for query in queries]
        expected = reference.query_gather(queries, scale=scale, scaled_dtype=to)
        gather = card.ext.query_step(
            [ranks.query_params(r, parts[r], scale=on_device, to=to) for r in range(num_ranks)]
        )
        ranks.run(gather, one_grid=card.one_grid)
        for rank in range(num_ranks):
            got = ranks.gathered_query(rank, num_tokens, dim, expected.dtype)
            assert torch.equal(bits(got).cpu(), bits(expected)), f"rank {rank}, repeat {repeat}: wrong bytes"
        ranks.run(release, one_grid=card.one_grid)
        outs = [ranks.keep(torch.full(expected.shape, 0xA5, dtype=torch.uint8).repeat_interleave(
            expected.element_size(), 2).view(expected.dtype)) for _ in range(num_ranks)]  # fmt: skip
        params = [ranks.query_params(r, parts[r], scale=on_device, out=outs[r], to=to) for r in range(num_ranks)]
        for p in params:
            p.max_round_rows = max(1, num_tokens // 3)
        ranks.run(card.ext.query_step(params), one_grid=card.one_grid)
        for rank in range(num_ranks):
            assert torch.equal(bits(outs[rank]).cpu(), bits(expected)), f"rank {rank}, repeat {repeat}: wrong `out`"


def queries(card: Card) -> dict[str, Any]:
    cases = Cases()
    for num_ranks in (2, 4, 8) if not card.quick else (2,):
        for num_tokens in (0, 1, 3, 64) if not card.quick else (0, 3):
            for dtype, scale in QUERIES if not card.one_grid else QUERIES[:2]:  # the others are not compiled there
                for dim in (576, 70 + 64):  # whole units of 16 bytes, and not
                    with cases.case(f"W={num_ranks} T={num_tokens} {dtype} scale {scale} D={dim}"):
                        query_case(card, num_ranks, num_tokens, dtype, scale, dim)
    return cases.result()


# -- kv_gather


def paged_context(
    num_ranks: int, lens: list[int], dim: int, dtype: torch.dtype, block_size: int, interleave: int
) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
    """Caches of all ranks full of any bits, and block tables that hand out their blocks in a random order."""
    caches, tables = [], []
    for rank in range(num_ranks):
        counts = [-(-(-(-n // (num_ranks * interleave)) * interleave) // block_size) for n in lens]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(rank)).tolist()
        table, used = [], 0
        for count in counts:
            table.append(order[used : used + count])
            used += count
        cache = any_bits((len(order), block_size, dim), dtype, seed=100 + rank)
        if dtype.itemsize == 1:  # NaN has many codes, and no order to hold bf16 to
            plain = cache.view(torch.uint8)
            plain[plain & 0x7F == 0x7F if dtype == torch.float8_e4m3fn else plain == 0x80] = 0x3C
        caches.append(cache)
        tables.append(table)
    return caches, tables


def kv_case(card: Card, num_ranks: int, lens: list[int], chunk_size: int, interleave: int, scale: float | None) -> None:
    """All chunks, twice: two buffers by turns, guarded by credits. fp8 is of one format or the other."""
    dtype, dim, block_size = torch.bfloat16, 576, 16
    if scale is not None:
        dtype = torch.float8_e4m3fn if interleave == 1 else torch.float8_e4m3fnuz
    caches, tables = paged_context(num_ranks, lens, dim, dtype, block_size, interleave)
    plans = [
        KVGatherPlan(lens, tables[rank], block_size=block_size, num_ranks=num_ranks, rank=rank, chunk_size=chunk_size,
                     interleave=interleave)
        for rank in range(num_ranks)
    ]  # fmt: skip
    ranks = card.ranks(
        num_ranks, num_heads=num_ranks, head_dim=64, max_num_tokens=1, num_channels=3,
        kv_chunk_rows=chunk_size, kv_row_bytes=dim * dtype.itemsize,
    )  # fmt: skip
    on_device = [ranks.keep(cache) for cache in caches]
    scale_at = None if scale is None else ranks.keep(torch.tensor([scale]))
    for turn, chunk_idx in enumerate([*range(plans[0].num_chunks)] * 2):
        kv_chunk(card, ranks, plans, chunk_idx, turn, on_device, caches, tables, lens, interleave, scale, scale_at)


def kv_chunk(
    card: Card, ranks: Ranks, plans: list[Any], chunk_idx: int, turn: int, on_device: list[torch.Tensor],
    caches: list[torch.Tensor], tables: list[Any], lens: list[int], interleave: int, scale: float | None,
    scale_at: torch.Tensor | None,
) -> None:  # fmt: skip
    plan = plans[0]
    expected = reference.kv_gather(
        caches, lens, tables, chunk_size=plan.chunk_size, chunk_idx=chunk_idx, interleave=interleave, scale=scale
    )
    num_rows, dim = expected.shape
    outs: list[torch.Tensor | None] = [None] * ranks.num_ranks
    if scale is not None:
        outs = [ranks.keep(torch.full((num_rows, dim), float("nan"), dtype=torch.bfloat16)) for _ in outs]
    params = [
        ranks.kv_params(rank, plans[rank], chunk_idx, turn, on_device[rank], out=outs[rank], scale=scale_at)
        for rank in range(ranks.num_ranks)
    ]
    start, wait = card.ext.kv_start_step(params), card.ext.kv_wait_step(params)
    ranks.run(start, wait, one_grid=card.one_grid)
    for rank in range(ranks.num_ranks):
        got = outs[rank] if scale is not None else ranks.chunk(rank, turn, num_rows, dim, expected.dtype)
        assert torch.equal(bits(got).cpu(), bits(expected)), f"rank {rank}, chunk {chunk_idx}, turn {turn}: wrong bytes"


def kv_gathers(card: Card) -> dict[str, Any]:
    cases = Cases()
    for num_ranks in (2, 4, 8) if not card.quick else (2,):
        for lens, chunk_size, interleave in (([70, 0, 33], 40, 1), ([5], 64, 1), ([100, 7], 31, 4)):
            for scale in (None, 0.5):
                with cases.case(
                    f"W={num_ranks} {lens} in chunks of {chunk_size}, interleave {interleave}, scale {scale}"
                ):
                    kv_case(card, num_ranks, lens, chunk_size, interleave, scale)
    return cases.result()


def everything(card: Card) -> dict[str, Any]:
    parts = {"a2a_lse_reduce": merges(card), "query_gather": queries(card), "kv_gather": kv_gathers(card)}
    return {"passed": all(part["passed"] for part in parts.values()), **parts}
