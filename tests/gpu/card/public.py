"""The public API with the ranks of one device as threads of this process: what tests/gpu/test_one_gpu.py and
one_card.py both hold it to. Nothing of CUDA is touched when this is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import dcpkernels
from dcpkernels import Workspace, WorkspaceConfig, reference
from dcpkernels.errors import DcpTimeout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import Call, assemble, attempt, config_for, make_call, meet, merge, same_bits
from tests.gather_calls import Context, any_bits

DEVICE = "cuda:0"
# Of every workspace here: all ranks share one device, and what waits must leave room for what it waits for.
NUM_CHANNELS = 4


def missing() -> str:
    """Why the public API cannot run here, or ""."""
    if not torch.cuda.is_available():
        return "no device: torch.cuda.is_available() is False"
    target, bindings, wheel = "cuda", "cuda.bindings.driver", "cuda-python"
    if torch.version.hip is not None:
        target, bindings, wheel = "hip", "hip.hip", "hip-python"
    for module, remedy in {
        f"dcpkernels._C_{target}": f"DCPKERNELS_TARGETS=cpu,{target} python setup.py build_ext --inplace",
        bindings: f"pip install {wheel}",
    }.items():
        try:
            __import__(module)
        except ImportError as error:
            return f"{module} cannot be imported ({error}); {remedy}"
    return ""


def on_stream(body: Callable[..., Any]) -> Callable[..., Any]:
    """A rank's thread on a stream of its own, and what it enqueued done at the end."""

    @functools.wraps(body)
    def run(group: Any, *args: Any) -> Any:
        torch.cuda.set_device(DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = body(group, *args)
            torch.cuda.current_stream().synchronize()
        return result

    return run


def on_device(call: Call) -> Call:
    return on_device_of(call, DEVICE)


def on_device_of(call: Call, device: str) -> Call:
    lengths = (None if t is None else t.to(device) for t in (call.seq_lens, call.query_start_loc))
    return Call(call.outs.to(device), call.lses.to(device), call.lse_base, *lengths, lane=call.lane)


def ranks_on_card(body: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    torch.cuda.synchronize()  # what was made on another stream is there
    return run_ranks(on_stream(body), num_ranks, *args, timeout_s=120)


def check_merges(num_ranks: int, **fields: Any) -> None:
    """Calls of all sizes, in one workspace; the same bits when they are made again."""
    calls = [
        make_call(num_ranks, num_tokens, 3 * num_ranks, 64, torch.bfloat16, kind=kind, seed=num_tokens)
        for num_tokens, kind in ((1, "spread"), (0, "spread"), (8, "empty"), (3, "all_empty"), (20, "dominant"))
    ]
    config = config_for(calls[2], num_channels=NUM_CHANNELS, **fields)
    there = [on_device(call) for call in calls]

    def body(group: Any) -> list[Any]:
        with Workspace(group, DEVICE, config) as workspace:
            results = [merge(workspace, call) for call in [*there, *there]]
            torch.cuda.current_stream().synchronize()
            workspace.check()
            return results

    results = assemble(ranks_on_card(body, num_ranks))
    for call, (out, lse), (again, lse_again) in zip(calls, results, results[len(calls) :], strict=False):
        call.check(out.cpu(), lse.cpu())
        assert same_bits(out, again) and same_bits(lse, lse_again), "a second call gives other bits"


def check_gathers(num_ranks: int) -> None:
    """A query in two parts and its release, and all chunks of a context; bytes as they are, and fp8."""
    dim, heads = 576, 2 * num_ranks
    queries = [any_bits((5, 2, dim), torch.bfloat16, seed=rank) for rank in range(num_ranks)]
    numbers = [torch.randn(5, 2, dim, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(num_ranks)]
    context = Context((37, 0, 20), num_ranks, 64, torch.bfloat16)
    config = WorkspaceConfig(heads, 64, 5, query_head_dim=dim, kv_chunk_rows=16, kv_dim=64, num_channels=NUM_CHANNELS)

    def body(group: Any) -> Any:
        with Workspace(group, DEVICE, config) as workspace:
            rank = workspace.rank
            parts = queries[rank].to(DEVICE).split((512, 64), dim=2)
            whole = dcpkernels.query_gather(parts, workspace=workspace).clone()
            dcpkernels.release_query(workspace=workspace)
            scaled = dcpkernels.query_gather(numbers[rank].to(DEVICE), workspace=workspace, scale=0.25).clone()
            dcpkernels.release_query(workspace=workspace)
            plan, cache, chunks = context.plan(rank, 16), context.caches[rank].to(DEVICE), []
            for chunk_idx in range(plan.num_chunks):
                chunks.append(dcpkernels.kv_gather(cache, plan, chunk_idx, workspace=workspace).clone())
            torch.cuda.current_stream().synchronize()
            workspace.check()
            return whole.cpu(), scaled.cpu(), [chunk.cpu() for chunk in chunks]

    for whole, scaled, chunks in ranks_on_card(body, num_ranks):
        assert same_bits(whole, reference.query_gather(queries))
        assert same_bits(scaled, reference.query_gather(numbers, scale=0.25))
        for chunk_idx, chunk in enumerate(chunks):
            assert same_bits(chunk, context.chunk(16, chunk_idx)), f"chunk {chunk_idx}"


def check_graphs(num_ranks: int, num_replays: int = 50) -> None:
    """A captured call, replayed over new inputs, between calls that are not captured."""
    calls = [make_call(num_ranks, 4, 2 * num_ranks, 64, torch.bfloat16, kind="spread", seed=seed) for seed in range(4)]
    there = [on_device(call) for call in calls]
    config = config_for(calls[0], num_channels=NUM_CHANNELS)

    def body(group: Any) -> list[Any]:
        with Workspace(group, DEVICE, config) as workspace:
            rank = workspace.rank
            inputs, lses = there[0].outs[rank].clone(), there[0].lses[rank].clone()
            graph = torch.cuda.CUDAGraph()

            def call() -> Any:
                return dcpkernels.a2a_lse_reduce(inputs, lses, workspace=workspace, lse_base="e", return_lse=True)

            call()
            torch.cuda.current_stream().synchronize()
            for turn in range(num_ranks):  # capture synchronises the device, on which peers must not wait then
                meet(group)
                if turn == rank:
                    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                        out, lse = call()
            meet(group)
            results = []
            for i in range(num_replays):
                inputs.copy_(there[i % 4].outs[rank])
                lses.copy_(there[i % 4].lses[rank])
                if i % 5 == 4:
                    results.append(call())
                else:
                    graph.replay()
                    results.append((out.clone(), lse.clone()))
            torch.cuda.current_stream().synchronize()
            workspace.check()
            meet(group)
            return results

    for i, (out, lse) in enumerate(assemble(ranks_on_card(body, num_ranks))):
        calls[i % 4].check(out.cpu(), lse.cpu())


def check_lanes(num_ranks: int) -> None:
    """Two lanes on two streams at a time."""
    calls = [make_call(num_ranks, 4, 2 * num_ranks, 64, torch.bfloat16, kind="spread", seed=i, lane=i) for i in (0, 1)]
    there = [on_device(call) for call in calls]

    def body(group: Any) -> list[Any]:
        with Workspace(group, DEVICE, config_for(calls[0], num_lanes=2, num_channels=NUM_CHANNELS)) as workspace:
            streams, results = [torch.cuda.Stream() for _ in calls], []
            for i in range(20):
                with torch.cuda.stream(streams[i % 2]):
                    results.append(merge(workspace, there[i % 2]))
            for stream in streams:
                stream.synchronize()
            workspace.check()
            return results

    for i, (out, lse) in enumerate(assemble(ranks_on_card(body, num_ranks))):
        calls[i % 2].check(out.cpu(), lse.cpu())


def check_timeout(num_ranks: int, timeout_s: float = 2.0) -> None:
    """A rank that does not come: the others name it, within the deadline, and nothing hangs."""
    call = make_call(num_ranks, 4, 2 * num_ranks, 64, torch.bfloat16, kind="spread", seed=0)
    there, late = on_device(call), num_ranks - 1
    config = config_for(call, timeout_s=timeout_s, num_channels=NUM_CHANNELS)

    def body(group: Any) -> Any:
        with Workspace(group, DEVICE, config) as workspace:
            merge(workspace, there)
            torch.cuda.current_stream().synchronize()
            meet(group)

            def finish() -> None:  # the call only enqueues: `check` tells what became of it
                if workspace.rank != late:
                    merge(workspace, there)
                torch.cuda.current_stream().synchronize()
                workspace.check()

            outcome = attempt(finish)
            meet(group, timeout_s + 20)
            return outcome

    for rank, outcome in enumerate(ranks_on_card(body, num_ranks)):
        if rank == late:
            continue  # it may have looked before the others gave up
        assert isinstance(outcome.error, DcpTimeout), f"rank {rank}: {outcome}"
        assert outcome.error.ranks == (late,), f"rank {rank}: {outcome.error}"
        assert outcome.seconds < timeout_s + 5, f"rank {rank}: {outcome.seconds} s"


CHECKS: dict[str, Callable[[int], None]] = {
    "merges": check_merges,
    "merges by packets": functools.partial(check_merges, wire="packet", packet_bytes=16),
    "gathers": check_gathers,
    "graphs": check_graphs,
    "lanes": check_lanes,
    "a rank that does not come": check_timeout,
}


def run(card: Any) -> dict[str, Any]:
    from .cases import Cases

    reason = missing()
    if reason:
        return {"passed": True, "skipped": reason}
    cases = Cases()
    for num_ranks in (2, 4):
        for name, check in CHECKS.items():
            with cases.case(f"W={num_ranks} {name}"):
                check(num_ranks)
    return cases.result()
