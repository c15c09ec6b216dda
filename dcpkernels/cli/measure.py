"""What a rank process does to time collectives on a CPU: enter together, take turns, note each call's time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence

import torch

import dcpkernels
from dcpkernels import _backend
from dcpkernels.cli import floor, machine
from dcpkernels.cli.bench_device import BenchDevice, Times
from dcpkernels.cli.skew import Skew
from dcpkernels.testing.timing import interleave, span_ns

NUM_LANES = 2  # of a workspace whose merges are timed: lane 0 for them, the last one for the barrier


def use_spare_cpus(num_ranks: int) -> None:
    """torch's threads of this rank: its share of the CPUs. The op runs on one; the merge of a baseline may use them."""
    torch.set_num_threads(max(1, _backend.num_usable_cpus() // num_ranks))


def bind_to_own_cpus(rank: int, num_ranks: int) -> None:
    """Keeps the ranks off each other's CPUs, where there are enough: two that share one while another is free measure
    the scheduler (4 times the latency, on a machine with other work). To be called when the workspace is there, which
    goes by the CPUs that it finds. Threads that run already, such as gloo's, stay free.
    """
    if num_ranks <= _backend.num_usable_cpus():
        cpus = sorted(os.sched_getaffinity(0))
        share = len(cpus) // num_ranks
        os.sched_setaffinity(0, cpus[rank * share : (rank + 1) * share])


class Barrier:
    """All ranks of a workspace meet: a merge without tokens, on the last lane, where nothing else may merge.

    A barrier over sockets leaves the ranks milliseconds apart when there are more of them than CPUs, and the first call
    after it would be charged for that. This one waits in memory and lets go of a CPU that a peer may need.
    """

    def __init__(self, workspace: dcpkernels.Workspace) -> None:
        config = workspace.config
        self._args = (
            torch.empty(0, config.num_heads, config.head_dim, dtype=config.dtype, device=workspace.device),
            torch.empty(0, config.num_heads, device=workspace.device),
        )
        self._out = torch.empty(
            0, workspace.num_local_heads, config.head_dim, dtype=config.dtype, device=workspace.device
        )
        self._workspace, self._lane = workspace, config.num_lanes - 1

    def __call__(self) -> None:
        dcpkernels.a2a_lse_reduce(*self._args, workspace=self._workspace, lse_base="e", out=self._out, lane=self._lane)


def num_rounds(iters: int, turn: int) -> int:
    """Turns of a candidate until `iters` of its samples have counted: the second half of each turn does."""
    return -(-iters // (turn - turn // 2))


def num_samples(iters: int, warmup: int, turn: int) -> int:
    """Of one candidate in all, counted or not."""
    return (warmup + num_rounds(iters, turn)) * turn


def take_turns(
    candidates: Mapping[str, Callable[[], object]],
    barrier: Callable[[], None],
    *,
    iters: int,
    warmup: int,
    num_calls: int = 1,
    turn: int = 1,
    produce: Callable[[str], object] = lambda name: None,
    skew: Skew | None = None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """`iters` samples of each candidate on this rank. All ranks call this with the same arguments.

    Candidates take turns of `turn` samples; the first half of a turn, and `warmup` turns at the start, are not counted
    (`timing.interleave` says why).

    Before each sample, untimed, all ranks meet, so that all are done with the last one; then `produce(name)` writes the
    inputs of that candidate anew, as attention does before a merge:
    every candidate finds them where a decode step leaves them, and not where the candidate before it has pushed them.
    Then all ranks meet, and with `skew` each waits for as long as it is to be late. A sample is the mean of `num_calls`
    calls back to back. A call runs from this rank's entry to its own return. Who wants the time of the collective
    takes, sample by sample, that of all ranks (`BenchDevice.collective_us`).
    """
    taken = dict.fromkeys(candidates, 0)

    def before(name: str) -> None:
        progress()
        delay_us = skew.delay_us(taken[name]) if skew else 0.0
        taken[name] += 1
        # First nobody is in the last call any more: a rank that is done would write its next input on a CPU on which
        # another one has yet to return, and the call would be charged for that.
        barrier()
        produce(name)
        barrier()
        if delay_us:
            skew.wait(delay_us)

    gc.collect()
    gc.disable()  # a collection in one rank would be charged to whatever it interrupts
    try:
        spans = interleave(
            candidates,
            rounds=num_rounds(iters, turn),
            warmup=warmup,
            num_calls=num_calls,
            turn=turn,
            before=before,
            sample=span_ns,
        )
    finally:
        gc.enable()
    return {name: _times(samples[:iters], num_calls) for name, samples in spans.items()}


def _times(spans: Sequence[tuple[int, int]], num_calls: int) -> Times:
    own_us = [(end - start) / 1e3 / num_calls for start, end in spans]
    return Times(own_us, [start for start, _ in spans], [end for _, end in spans])


class CpuBench(BenchDevice):
    """Ranks are processes of this host; perf_counter_ns is the clock that they have in common."""

    name = "cpu"
    modes = ("eager",)

    def require(self, isa: str | None, num_ranks: Sequence[int]) -> str:
        return machine.chosen_isa(isa)

    def open_rank(self, rank: int, num_ranks: int) -> None:
        super().open_rank(rank, num_ranks)
        use_spare_cpus(num_ranks)

    def bind_rank(self) -> None:
        bind_to_own_cpus(self.rank, self.num_ranks)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

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
        return take_turns(
            candidates,
            barrier,
            iters=iters,
            warmup=warmup,
            num_calls=num_calls,
            turn=turn,
            produce=produce,
            skew=Skew(self.rank, self.num_ranks, skew_us) if skew_us else None,
            progress=progress,
        )

    def floor_samples_us(self, num_bytes: int, barrier: Callable[[], None]) -> list[float]:
        return floor.memcpy_samples_us(num_bytes, barrier)

    def floor_us(self, samples_us: Sequence[Sequence[float]]) -> float:
        return floor.of_all_ranks_us(samples_us)
