"""What a rank process does to time collectives: enter together, take turns, note each call's time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping

import torch

import dcpkernels
from dcpkernels import _backend
from dcpkernels.testing.timing import interleave

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
        dcpkernels.a2a_lse_reduce(
            *self._args, workspace=self._workspace, lse_base="e", out=self._out, lane=self._lane
        )


def take_turns(
    candidates: Mapping[str, Callable[[], object]],
    barrier: Callable[[], None],
    *,
    iters: int,
    warmup: int,
    num_calls: int = 1,
    turn: int = 1,
    produce: Callable[[str], object] = lambda name: None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds of `iters` samples of each candidate on this rank. All ranks call this with the same arguments.

    Candidates take turns of `turn` samples; the first half of a turn, and `warmup` turns at the start, are not counted
    (`timing.interleave` says why).

    Before each sample, untimed, all ranks meet, so that all are done with the last one; then `produce(name)` writes the inputs of that candidate anew, as attention does before a merge:
    every candidate finds them where a decode step leaves them, and not where the candidate before it has pushed them.
    Then all ranks meet. A sample is the mean of `num_calls` calls back to back. A call runs from this rank's entry to
    its own return. Who wants the time of the collective takes, call by call, the slowest rank
    (`timing.max_over_ranks`).
    """

    def before(name: str) -> None:
        progress()
        # First nobody is in the last call any more: a rank that is done would write its next input on a CPU on which
        # another one has yet to return, and the call would be charged for that.
        barrier()
        produce(name)
        barrier()

    gc.collect()
    gc.disable()  # a collection in one rank would be charged to whatever it interrupts
    try:
        rounds = -(-iters // (turn - turn // 2))
        times = interleave(candidates, rounds=rounds, warmup=warmup, num_calls=num_calls, turn=turn, before=before)
        return {name: samples[:iters] for name, samples in times.items()}
    finally:
        gc.enable()
