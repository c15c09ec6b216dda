"""Times on one card. W virtual ranks share its memory and its multiprocessors, and no link is in the way: what shows is
what a call costs beside the transport, and how it compares with the steps that it replaces in the same place."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dcpkernels import KVGatherPlan
from dcpkernels.testing import assert_merge_close

from .cases import Card
from .virtual import Merge, MergeCall, Ranks

HEADS, DIM = 96, 512  # Kimi-K3
CALLS_A_GRAPH = 100


def summary(samples: list[float], calls: int) -> dict[str, float]:
    """Microseconds a call: a sample is the mean of so many."""
    each = sorted(sample / calls for sample in samples)
    return {
        "median": round(statistics.median(each), 3),
        "p99": round(each[min(len(each) - 1, int(0.99 * len(each)))], 3),
    }


def time_steps(card: Card, steps: list[Any], streams: list[int], calls: int = CALLS_A_GRAPH) -> dict[str, Any]:
    """Of the steps, which are one call: in a graph of many, one at a time, and launched by the host one by one."""
    ext, gate = card.ext, card.streams(len(streams) + 1)[-1]
    if card.device == "cpu":  # a dry run: that the calls are good ones
        assert not any(ext.repeat(steps, streams, 3))
        return {"launches": len(steps)}
    one = [ext.capture(steps, rank, stream, 1) for rank, stream in enumerate(streams)]
    many = [ext.capture(steps, rank, stream, calls) for rank, stream in enumerate(streams)]
    ext.time_graphs(many, streams, gate, 3)
    return {
        "launches": one[0].num_nodes,
        "graph_us": summary(ext.time_graphs(many, streams, gate, 20), calls),
        "single_us": summary(ext.time_graphs(one, streams, gate, 60), 1),
        "eager_us": summary(ext.time_eager(steps, streams, 20, 10), 20),
    }


# -- latency


def merge_rows(card: Card, deadline: float) -> tuple[list[dict[str, Any]], int]:
    rows, skipped = [], 0
    for num_ranks in (8, 4, 2) if not card.quick else (2,):
        for wire in card.wires:
            for channels in (8, 4, 16, 32, 1):
                if channels * num_ranks > card.num_sms:
                    continue
                if time.monotonic() > deadline:
                    skipped += 1
                    continue
                rows += merge_geometry(card, num_ranks, wire, channels)
    return rows, skipped


def merge_geometry(card: Card, num_ranks: int, wire: str, channels: int) -> list[dict[str, Any]]:
    ranks = card.ranks(num_ranks, num_heads=HEADS, head_dim=DIM, max_num_tokens=128, wire=wire, num_channels=channels)
    rows = []
    for num_tokens in (1, 8, 64, 128):
        if wire.startswith("packet") and num_tokens > 64:
            continue  # nobody would: rows are better moved whole
        call = MergeCall(ranks, random_merge(num_ranks, num_tokens, card.device))
        ranks.run(call.step)
        calls = CALLS_A_GRAPH if num_tokens < 64 else 20
        times = time_steps(card, [call.step], ranks.streams, calls)
        ranks.require_no_fault([0] * num_ranks)
        shape = {"op": "a2a_lse_reduce", "wire": wire, "W": num_ranks, "channels": channels, "T": num_tokens}
        rows.append({**shape, **times})
    return rows


def random_merge(num_ranks: int, num_tokens: int, device: str) -> Merge:
    outs = torch.randn(num_ranks, num_tokens, HEADS, DIM, device=device, dtype=torch.bfloat16)
    return Merge(outs, torch.randn(num_ranks, num_tokens, HEADS, device=device))


def gather_rows(card: Card) -> list[dict[str, Any]]:
    rows = []
    for num_ranks in (2, 4, 8) if not card.quick else (2,):
        for channels in (4, 16):
            if channels * num_ranks > card.num_sms:
                continue
            rows += query_rows(card, num_ranks, channels)
            rows.append(kv_row(card, num_ranks, channels, 8192))
    return rows


def query_rows(card: Card, num_ranks: int, channels: int) -> list[dict[str, Any]]:
    """A gather and the release that a merge would be: the query that is open must be closed before the next one."""
    dim, rows = 576, []
    ranks = card.ranks(num_ranks, num_heads=HEADS, head_dim=DIM, max_num_tokens=64, num_channels=channels,
                       query_head_bytes=2 * dim)  # fmt: skip
    release = card.ext.query_step([ranks.query_params(rank, ()) for rank in range(num_ranks)])
    ranks.run(release)
    alone = time_steps(card, [release], ranks.streams)
    for num_tokens in (1, 8, 64):
        shape = (num_ranks, num_tokens, HEADS // num_ranks, dim)
        queries = ranks.keep(torch.randn(shape, device=card.device, dtype=torch.bfloat16))
        gather = card.ext.query_step([ranks.query_params(rank, (queries[rank],)) for rank in range(num_ranks)])
        times = time_steps(card, [gather, release], ranks.streams)
        ranks.require_no_fault([0] * num_ranks)
        rows.append(
            {"op": "query_gather + release_query", "W": num_ranks, "channels": channels, "T": num_tokens, **times}
        )
    return [*rows, {"op": "release_query", "W": num_ranks, "channels": channels, "T": 0, **alone}]


def kv_row(card: Card, num_ranks: int, channels: int, num_rows: int) -> dict[str, Any]:
    """start and wait of two chunks, one in each buffer."""
    dim, block = 576, 64
    ranks = card.ranks(num_ranks, num_heads=HEADS, head_dim=DIM, max_num_tokens=1, num_channels=channels,
                       kv_chunk_rows=num_rows, kv_row_bytes=2 * dim)  # fmt: skip
    num_blocks = -(-2 * num_rows // num_ranks // block) + 1
    table = [list(range(num_blocks))]
    plans = [
        KVGatherPlan([2 * num_rows], table, block_size=block, num_ranks=num_ranks, rank=rank, chunk_size=num_rows)
        for rank in range(num_ranks)
    ]
    cache = ranks.keep(torch.randn(num_blocks, block, dim, device=card.device, dtype=torch.bfloat16))
    steps = []
    for turn in (0, 1):
        params = [ranks.kv_params(rank, plans[rank], turn, turn, cache) for rank in range(num_ranks)]
        steps += [card.ext.kv_start_step(params), card.ext.kv_wait_step(params)]
    ranks.run(*steps)
    times = time_steps(card, steps, ranks.streams, calls=10)
    ranks.require_no_fault([0] * num_ranks)
    return {"op": "2 x kv_gather (start + wait)", "W": num_ranks, "channels": channels, "rows": num_rows, **times}


def unfused(outs: torch.Tensor, lses: torch.Tensor, receive: torch.Tensor, receive_lse: torch.Tensor) -> torch.Tensor:
    """One rank's part of what the op replaces: pack, an all-to-all as one copy of the packed rows, unpack and merge.
    The rows of the peers are this rank's own: as many bytes, and nothing to wait for."""
    num_ranks, num_tokens, local_heads, dim = receive.shape
    packed = outs.view(num_tokens, num_ranks, local_heads, dim).transpose(0, 1).contiguous()
    packed_lse = lses.view(num_tokens, num_ranks, local_heads).transpose(0, 1).contiguous()
    receive.copy_(packed)
    receive_lse.copy_(packed_lse)
    weights = torch.softmax(receive_lse, dim=0)
    return (receive.float() * weights[..., None]).sum(0).to(outs.dtype)


def unfused_row(card: Card, num_ranks: int, num_tokens: int) -> dict[str, Any]:
    merge = random_merge(num_ranks, num_tokens, card.device)
    streams, graphs = [torch.cuda.Stream() for _ in range(num_ranks)], []
    shape = (num_ranks, num_tokens, HEADS // num_ranks)
    calls, eager = 10, []
    for rank, stream in enumerate(streams):
        receive = torch.empty(*shape, DIM, device="cuda", dtype=torch.bfloat16)
        receive_lse = torch.empty(shape, device="cuda")
        chain = functools.partial(unfused, merge.outs[rank], merge.lses[rank], receive, receive_lse)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                chain()
        graphs.append(graph)
        eager.append(chain)
    return {
        "op": "unfused, by torch", "W": num_ranks, "T": num_tokens,
        "graph_us": summary(time_on_streams(streams, [graph.replay for graph in graphs], 1, 20), calls),
        "eager_us": summary(time_on_streams(streams, eager, 10, 10), 10),
    }  # fmt: skip


def time_on_streams(
    streams: list[torch.cuda.Stream], work: list[Callable[[], Any]], num_rounds: int, num_samples: int
) -> list[float]:
    samples = []
    for _ in range(num_samples + 2):
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in streams]
        for stream, (start, _) in zip(streams, events, strict=True):
            start.record(stream)
        for _ in range(num_rounds):
            for stream, call in zip(streams, work, strict=True):
                with torch.cuda.stream(stream):
                    call()
        for stream, (_, end) in zip(streams, events, strict=True):
            end.record(stream)
        torch.cuda.synchronize()
        samples.append(1000 * max(start.elapsed_time(end) for start, end in events))
    return samples[2:]


def latency(card: Card) -> dict[str, Any]:
    deadline = time.monotonic() + card.seconds
    empty = {}
    for num_ranks in (1, 2, 4, 8):
        empty[f"{num_ranks} streams"] = time_steps(card, [card.ext.empty_step(num_ranks)], card.streams(num_ranks))
    gathers = gather_rows(card)
    emulated = []
    if card.device == "cuda":
        emulated = [
            unfused_row(card, num_ranks, num_tokens) for num_ranks in (2, 4, 8) for num_tokens in (1, 8, 64, 128)
        ]
    rows, skipped = merge_rows(card, deadline)
    launches = {row["launches"] for row in rows}
    return {
        "passed": launches == {1} and bool(rows), "launches_per_merge": sorted(launches), "empty_kernel": empty,
        "merges": rows, "gathers": gathers, "unfused": emulated, "geometries_left_out_for_time": skipped,
    }  # fmt: skip


# -- bandwidth of the merge


def merge_bandwidth(card: Card) -> dict[str, Any]:
    """Bytes read and written over time, of the merge alone, against a copy of as many bytes in the same run. Cold: each
    call has rows of its own, of more bytes in all than the L2 holds."""
    num_ranks, total_rows = 8, 2048 if not card.quick else 256
    token_counts, channel_counts = (
        ((64, 128, 1024), (1, 4, 8, 16, 32, 64, card.num_sms)) if not card.quick else ((64,), (1, 3))
    )
    streams = card.streams(1)
    ranks = Ranks(card.ext, card.device, num_ranks, num_heads=HEADS, head_dim=DIM, max_num_tokens=total_rows,
                  num_channels=1, streams=streams * num_ranks, num_regions=1)  # fmt: skip
    outs = torch.randn(total_rows, HEADS, DIM, device=card.device, dtype=torch.bfloat16)
    lses = torch.randn(total_rows, HEADS, device=card.device)
    out = torch.empty(total_rows, HEADS // num_ranks, DIM, device=card.device, dtype=torch.bfloat16)
    payload, staged_lse = fill_staging(ranks)
    ranks.synchronize()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "copy_GBps": {"1 GiB": copy_bandwidth(card, 1 << (30 if not card.quick else 20), 1)},
        "rows": rows,
    }
    for num_tokens in token_counts:
        num_sets = min(32, total_rows // num_tokens)
        local = num_tokens * (HEADS // num_ranks)
        num_bytes = local * DIM * 2 * (num_ranks + 1) + local * 4 * num_ranks
        result["copy_GBps"][f"as much as T={num_tokens}"] = copy_bandwidth(card, num_bytes // 2, num_sets)
        for channels in channel_counts:
            steps = [
                merge_set(ranks, outs, lses, out, index * num_tokens, num_tokens, channels) for index in range(num_sets)
            ]
            row = {"T": num_tokens, "channels": channels, "MB": round(num_bytes / 1e6, 1)}
            for name, which in (("cold", steps), ("warm", steps[:1] * 8)):
                us = summary(time_one_stream(card, which), len(which))["median"]
                row[f"{name}_us"], row[f"{name}_GBps"] = us, round(num_bytes / us / 1e3, 1)
            rows.append(row)
    heads = slice(0, HEADS // num_ranks)  # the last set, held to the truth
    first = (num_sets - 1) * num_tokens
    shards = torch.cat([outs[None, first:, heads], payload[:, first:]])[:, -64:]
    weights = torch.cat([lses[None, first:, heads], staged_lse[:, first:]])[:, -64:]
    assert_merge_close(out[-64:].cpu(), None, shards.cpu(), weights.cpu(), lse_base="e")
    best = max(rows, key=lambda row: row["cold_GBps"])
    return {
        "passed": True,
        "best": best,
        "of_copy": round(best["cold_GBps"] / result["copy_GBps"]["1 GiB"], 3),
        **result,
    }


def fill_staging(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all peers in rank 0's region: [W - 1, rows, H / W, D] and [W - 1, rows, H / W], views of parity 0."""
    layout, part = ranks.layout, ranks.parts["a2a_lse_reduce.staging"]
    peers, num_rows, heads = ranks.num_ranks - 1, layout.max_round_rows, layout.num_local_heads
    staging = ranks.regions[0][part.offset : part.offset + part.num_bytes]
    rows = staging.view(2, peers, num_rows, layout.staging_row_bytes)[0]
    payload = rows[..., : layout.payload_row_bytes].view(torch.bfloat16)
    lse = rows[..., layout.lse_in_row : layout.lse_in_row + 4 * heads].view(torch.float32)
    payload.copy_(torch.randn(payload.shape, device=payload.device))
    lse.copy_(torch.randn(lse.shape, device=lse.device))
    return payload.unflatten(-1, (heads, ranks.head_dim)), lse


def merge_set(
    ranks: Ranks, outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, first: int, num_tokens: int, channels: int
) -> Any:
    rows = slice(first, first + num_tokens)
    p = ranks.a2a_params(0, outs[rows], lses[rows], out[rows], None)
    staging, control = p.staging.copy(), p.control.copy()
    staging.offset += first * staging.row_bytes
    control.num_channels = channels
    p.staging = p.unpacked = staging
    p.control, p.first_row, p.num_rows = control, 0, num_tokens
    return ranks.ext.merge_step([p])


def time_one_stream(card: Card, steps: list[Any]) -> list[float]:
    stream, gate = card.streams(2)
    if card.device == "cpu":
        assert card.ext.repeat(steps, [stream], 1) == [0]
        return [1.0]
    graph = card.ext.capture(steps, 0, stream, 1)
    card.ext.time_graphs([graph], [stream], gate, 3)
    return card.ext.time_graphs([graph], [stream], gate, 20)


def copy_bandwidth(card: Card, num_bytes: int, num_sets: int) -> float:
    """GB/s of copies within the device, reads and writes."""
    num_bytes -= num_bytes % 256
    source = torch.randint(0, 255, (num_sets, num_bytes), dtype=torch.uint8, device=card.device)
    to = torch.empty_like(source)
    steps = [card.ext.copy_step([(to[i].data_ptr(), source[i].data_ptr(), num_bytes)]) for i in range(num_sets)]
    if card.device == "cuda":
        torch.cuda.synchronize()
    return round(2 * num_bytes / summary(time_one_stream(card, steps), num_sets)["median"] / 1e3, 1)
