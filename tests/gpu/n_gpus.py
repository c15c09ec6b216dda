"""The ops between several GPUs of one machine, a process for each, and what they take:

    python3 -m torch.distributed.run --standalone --nproc-per-node=4 tests/gpu/n_gpus.py --json n_gpus.json

Sections: the ops with and without multicast, the links, times beside NCCL. Rank 0 writes the JSON. Exit code 1 on every
rank when a section failed on any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_card import import_card

import_card()
import dcpkernels
from dcpkernels import Workspace, WorkspaceConfig, reference
from tests.a2a_calls import bits, config_for, make_call, merge, same_bits
from tests.gather_calls import Context, any_bits
from tests.gpu.card.public import missing, on_device_of

HEADS, DIM, QUERY_DIM = 96, 512, 576  # Kimi-K3


class Place:
    def __init__(self) -> None:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(self.device)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values


# -- the ops


def ops(place: Place, multicast: bool) -> dict[str, Any]:
    config = WorkspaceConfig(2 * place.num_ranks, 64, 8, query_head_dim=QUERY_DIM, kv_chunk_rows=16, kv_dim=64,
                             multicast=multicast, timeout_s=10.0)  # fmt: skip
    with Workspace(device=place.device, config=config) as workspace:
        how = workspace._impl.multicast
        for num_tokens, kind in ((1, "spread"), (0, "spread"), (8, "empty"), (20, "all_empty")):
            check_merge(place, workspace, num_tokens, kind)
        check_query(place, workspace)
        check_chunks(place, workspace)
        workspace.check()
    return {"multicast": how}


def check_merge(place: Place, workspace: Workspace, num_tokens: int, kind: str) -> None:
    call = make_call(place.num_ranks, num_tokens, 2 * place.num_ranks, 64, torch.bfloat16, kind=kind, seed=num_tokens)
    there = on_device_of(call, place.device)
    results = [tuple(t.cpu() for t in merge(workspace, there)) for _ in range(3)]
    assert all(same_bits(a, b) for result in results for a, b in zip(result, results[0], strict=True))
    by_rank = place.gather(results[0])
    call.check(torch.cat([out for out, _ in by_rank], 1), torch.cat([lse for _, lse in by_rank], 1))


def check_query(place: Place, workspace: Workspace) -> None:
    queries = [any_bits((5, 2, QUERY_DIM), torch.bfloat16, seed=rank) for rank in range(place.num_ranks)]
    parts = queries[place.rank].to(place.device).split((512, 64), dim=2)
    for _ in range(3):
        query = dcpkernels.query_gather(parts, workspace=workspace).clone()
        dcpkernels.release_query(workspace=workspace)
        assert torch.equal(bits(query.cpu()), bits(reference.query_gather(queries)))


def check_chunks(place: Place, workspace: Workspace) -> None:
    context = Context((37, 0, 20), place.num_ranks, 64, torch.bfloat16)
    plan, cache = context.plan(place.rank, 16), context.caches[place.rank].to(place.device)
    for chunk_idx in [*range(plan.num_chunks)] * 2:
        chunk = dcpkernels.kv_gather(cache, plan, chunk_idx, workspace=workspace).clone()
        assert same_bits(chunk.cpu(), context.chunk(16, chunk_idx)), f"chunk {chunk_idx}"


# -- links


def links(place: Place) -> dict[str, Any]:
    """GB/s of a copy from the first GPU to each other one, one at a time, and whether they reach each other at all."""
    rows = {}
    if place.rank == 0:
        source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda:0").random_()
        for other in range(1, place.num_ranks):
            to = torch.empty_like(source, device=f"cuda:{other}")
            to.copy_(source)
            torch.cuda.synchronize(0)
            start = time.perf_counter()
            for _ in range(8):
                to.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(other)
            rate = 8 * source.numel() / (time.perf_counter() - start) / 1e9
            assert torch.equal(to.cpu(), source.cpu()), f"a copy to GPU {other} is wrong"
            reaches = torch.cuda.can_device_access_peer(0, other)
            rows[f"0 -> {other}"] = {"GBps": round(rate, 1), "peer_access": reaches}
    return {"rows": place.gather(rows)[0]}


# -- times


def slowest_us(place: Place, work: Callable[[], Any], calls: int, samples: int = 30) -> dict[str, float]:
    """Of a call, of the slowest rank: `work` makes so many."""
    times = []
    for _ in range(samples + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    slowest = sorted(max(each) for each in zip(*place.gather(times[3:]), strict=True))
    return {"median": round(statistics.median(slowest), 2), "p99": round(slowest[int(0.99 * len(slowest))], 2)}


def in_graph_and_eager(place: Place, call: Callable[[], Any]) -> dict[str, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(50):
                call()
        dist.barrier()
        return {
            "graph_us": slowest_us(place, graph.replay, 50),
            "eager_us": slowest_us(place, lambda: [call() for _ in range(20)], 20),
        }


def times(place: Place) -> dict[str, Any]:
    rows = []
    local = HEADS // place.num_ranks
    for num_tokens in (1, 8, 64, 128):
        outs = torch.randn(num_tokens, HEADS, DIM, device=place.device, dtype=torch.bfloat16)
        lses = torch.randn(num_tokens, HEADS, device=place.device)
        row: dict[str, Any] = {"T": num_tokens, "W": place.num_ranks}
        for wire in ({"wire": "bulk"}, *({"wire": "packet", "packet_bytes": size} for size in (16, 128))):
            call = make_call(place.num_ranks, num_tokens, HEADS, DIM, torch.bfloat16, kind="spread", seed=0)
            with Workspace(device=place.device, config=config_for(call, timeout_s=10.0, **wire)) as workspace:
                check_large = [tuple(t.cpu() for t in merge(workspace, on_device_of(call, place.device)))]
                by_rank = place.gather(check_large[0])
                call.check(torch.cat([o for o, _ in by_rank], 1), torch.cat([s for _, s in by_rank], 1))
                out = torch.empty(num_tokens, local, DIM, device=place.device, dtype=torch.bfloat16)
                row[wire["wire"]] = in_graph_and_eager(
                    place,
                    lambda workspace=workspace, out=out, outs=outs, lses=lses: dcpkernels.a2a_lse_reduce(
                        outs, lses, workspace=workspace, lse_base="e", out=out
                    ),
                )
                workspace.check()
        row["nccl"] = in_graph_and_eager(place, lambda outs=outs, lses=lses: by_nccl(outs, lses, place.num_ranks))
        rows.append(row)
    return {"rows": rows}


def by_nccl(outs: torch.Tensor, lses: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Pack, all-to-all, unpack, merge."""
    num_tokens, local = len(outs), HEADS // num_ranks
    packed = outs.view(num_tokens, num_ranks, local, DIM).transpose(0, 1).contiguous()
    packed_lse = lses.view(num_tokens, num_ranks, local).transpose(0, 1).contiguous()
    received, received_lse = torch.empty_like(packed), torch.empty_like(packed_lse)
    dist.all_to_all_single(received, packed)
    dist.all_to_all_single(received_lse, packed_lse)
    weights = torch.softmax(received_lse, dim=0)
    return (received.float() * weights[..., None]).sum(0).to(outs.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", "."), "n_gpus.json"))
    args = parser.parse_args()
    place = Place()
    report: dict[str, Any] = {"ranks": place.num_ranks, "device": torch.cuda.get_device_name(), "sections": {}}
    if missing():
        raise SystemExit(f"n_gpus: {missing()}")
    bodies = {
        "ops, one store a byte": lambda: ops(place, True),
        "ops, a store for each rank": lambda: ops(place, False),
        "links": lambda: links(place),
        "times": lambda: times(place),
    }
    for name, body in bodies.items():
        try:
            result, error = body(), ""
        except Exception:  # noqa: BLE001  all ranks have to learn of it
            result, error = {}, traceback.format_exc()[-3000:]
        errors = {rank: text for rank, text in enumerate(place.gather(error)) if text}
        report["sections"][name] = {"passed": not errors, **result, **({"errors": errors} if errors else {})}
        report["passed"] = all(section["passed"] for section in report["sections"].values())
        if place.rank == 0:
            args.json.write_text(json.dumps(report, indent=1))
            print(name, json.dumps(report["sections"][name])[:2000], flush=True)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
