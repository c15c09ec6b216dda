"""`dcpkernels bench --device cuda` (torch's name for the GPUs of both vendors): a GPU for each rank, times by its events.

Nobody has run this on a GPU yet. What is tested is the order of operations, with stand-ins for torch.cuda
(tests/test_bench_gpu.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import dcpkernels
from dcpkernels.cli import floor_gpu
from dcpkernels.cli.bench_device import BenchDevice, Times
from dcpkernels.cli.measure import num_rounds
from dcpkernels.cli.skew import Skew
from dcpkernels.errors import DcpUnsupported
from dcpkernels.testing import ThreadGroup
from dcpkernels.testing.timing import interleave, max_over_ranks

CALLS_PER_GRAPH = 50  # one launch for all of them, so that none shows in the time of a call
_WARMUP_CALLS = 3  # before a capture
_HEAD_START_US = 200.0  # of all hosts before their devices, with skew: enough to enqueue a sample


class Sample(NamedTuple):
    """Microseconds of one call, the mean of those of the sample: by the device's events, and of the host alone."""

    device_us: float
    host_us: float


class Stopwatch:
    """Times what is enqueued on the current stream, from the end of what is there already to the end of its own."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Callable[[], object], num_calls: int = 1) -> Sample:
        self._start.record()
        begun = time.perf_counter_ns()
        for _ in range(num_calls):
            call()
        host_ns = time.perf_counter_ns() - begun
        self._end.record()
        self._end.synchronize()
        elapsed_ms = self._start.elapsed_time(self._end)
        return Sample(elapsed_ms * 1e3 / num_calls, host_ns / 1e3 / num_calls)


class Delay:
    """Keeps the current stream busy for a while. torch's kernel for that counts cycles of some clock of the device: how
    many are a microsecond is measured, by two lengths, since a launch takes time as well."""

    _CYCLES = 1_000_000

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._sleep = getattr(torch.cuda, "_sleep", None)  # private to torch, and the only one it has
        if self._sleep is None:
            raise DcpUnsupported(
                f"bench: skew_us must be 0 with a torch that has no cuda._sleep (got {torch.__version__})"
            )
        once, twice = (
            min(stopwatch(lambda cycles=cycles: self._sleep(cycles)).device_us for _ in range(5))
            for cycles in (self._CYCLES, 2 * self._CYCLES)
        )
        self._cycles_per_us = self._CYCLES / (twice - once)

    def __call__(self, delay_us: float) -> None:
        self._sleep(round(delay_us * self._cycles_per_us))


def captured(call: Callable[[], object], num_calls: int) -> Callable[[], None]:
    """So many calls as a graph: what replays it. Collective. The current stream must not be the device's default one.

    All that a first call makes, such as a communicator or a library's handle for the stream, is there before: the calls
    that warm up are on the very stream.
    """
    stream = torch.cuda.current_stream()
    for _ in range(_WARMUP_CALLS):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of a communication library look at their events meanwhile, which would break a capture of another mode.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()
    return graph.replay


class GpuBench(BenchDevice):
    """Rank r has the GPU with index r. All that it enqueues is on one stream of its own.

    Modes. eager: calls are enqueued one by one, and the device waits for the host where that is slower (`host_us` says
    what a call costs there). graph: the calls of a sample are one graph, captured before and replayed.

    A sample is timed from an event behind a barrier on the device to an event behind its last call. Before it, as on a
    CPU, all ranks meet and the inputs are written anew, which leaves them in the L2 as attention would; nothing is
    flushed. The GPUs have no clock in common: without skew, a call's time is the longest of all ranks' own. With skew
    each rank's stream is held up behind the barrier for as long as it is to be late, and a call's time is that of the
    rank which enters last, from its own entry: the time of the others has the waiting in it, and when the last one is
    done, so are they, but for what its last flag takes to arrive. All streams are held up ahead of that barrier, too,
    until all is enqueued: what a host takes for that is more than the skew.
    """

    name = "cuda"
    modes = ("eager", "graph")

    def require(self, isa: str | None, num_ranks: Sequence[int]) -> str:
        if isa is not None:
            raise DcpUnsupported(f"bench: isa must come with device cpu (got {isa!r} with device {self.name})")
        found, needed = torch.cuda.device_count(), max(num_ranks)
        if found < needed:
            raise DcpUnsupported(f"bench: there must be a GPU for each of the {needed} ranks (found {found})")
        config = dcpkernels.WorkspaceConfig(num_heads=1, head_dim=1, max_num_tokens=1)
        with dcpkernels.Workspace(ThreadGroup.create(1)[0], f"{self.name}:0", config) as workspace:
            return workspace.isa

    def calls_per_sample(self, skew_us: float) -> int:
        return CALLS_PER_GRAPH if self.mode == "graph" and not skew_us else 1

    def require_samples(self, num_calls: int, skew_us: float) -> None:
        if skew_us and num_calls > 1:  # only the first call would be entered late
            raise DcpUnsupported(f"bench: calls of a sample must be 1 with skew_us={skew_us:g} (got {num_calls})")

    def describe(self) -> dict[str, Any]:
        names = sorted({torch.cuda.get_device_name(idx) for idx in range(torch.cuda.device_count())})
        return {"gpu": ", ".join(names), "gpus": torch.cuda.device_count()}

    def open_rank(self, rank: int, num_ranks: int) -> None:
        super().open_rank(rank, num_ranks)
        torch.cuda.set_device(rank)
        torch.cuda.set_stream(torch.cuda.Stream())  # on the default one nothing can be captured

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.name, self.rank)

    def take_turns(
        self,
        candidates: Mapping[str, Callable[[], object]],
        barrier: Callable[[], None],
        *,
        iters: int,
        warmup: int,
        num_calls: int,
        turn: int,
        produce: Callable[[str], object],
        skew_us: float,
        progress: Callable[[], object] = lambda: None,
    ) -> dict[str, Times]:
        stopwatch, skew = Stopwatch(), Skew(self.rank, self.num_ranks, skew_us)
        delay = Delay(stopwatch) if skew_us else None
        taken, is_last = dict.fromkeys(candidates, 0), True
        is_graph = self.mode == "graph"
        calls_per_launch, num_calls = (num_calls, 1) if is_graph else (1, num_calls)

        def before(name: str) -> None:
            nonlocal is_last
            progress()
            own_delay_us = skew.delay_us(taken[name])
            taken[name] += 1
            barrier()
            produce(name)
            if delay:
                delay(_HEAD_START_US)
            barrier()
            if own_delay_us:
                delay(own_delay_us)
            is_last = self.num_ranks == 1 or own_delay_us >= skew_us * (1 - 1e-9)

        def sample(call: Callable[[], object], num_calls: int) -> Sample:
            device_us, host_us = stopwatch(call, num_calls)
            # Waiting for the last rank is most of what the others take.
            return Sample(device_us / calls_per_launch if is_last else 0.0, host_us / calls_per_launch)

        gc.collect()
        gc.disable()  # what a collection frees is also nothing for a capture
        try:
            if is_graph:
                candidates = {name: captured(call, calls_per_launch) for name, call in candidates.items()}
            samples = interleave(
                candidates,
                rounds=num_rounds(iters, turn),
                warmup=warmup,
                num_calls=num_calls,
                turn=turn,
                before=before,
                sample=sample,
            )
        finally:
            gc.enable()
        torch.cuda.synchronize()
        return {name: _times(own[:iters]) for name, own in samples.items()}

    def floor_samples_us(self, num_bytes: int, barrier: Callable[[], None]) -> list[float]:
        stopwatch = Stopwatch()
        return floor_gpu.samples_us(
            num_bytes, self.rank, self.num_ranks, barrier, lambda copies: stopwatch(copies).device_us
        )

    def floor_us(self, samples_us: Sequence[Sequence[float]]) -> float:
        return floor_gpu.of_all_ranks_us(samples_us)

    def collective_us(self, per_rank: Sequence[Times], *, num_calls: int, skew_us: float) -> list[float]:
        """With skew too: `own_us` is 0 then on all ranks but the last one to enter."""
        return max_over_ranks([times.own_us for times in per_rank])


def _times(samples: Sequence[Sample]) -> Times:
    return Times([sample.device_us for sample in samples], host_us=[sample.host_us for sample in samples])
