"""The stated lower bound of a collective: moving its bytes once, with nothing to wait for."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch

from dcpkernels import _backend

ROUNDS = 20
_WARMUP = 2


def memcpy_samples_us(num_bytes: int, barrier: Callable[[], None]) -> list[float]:
    """Times of `memcpy` of that many bytes on this rank, while every other rank does the same.

    The source is written anew before, as the inputs of what is timed are. A time is this rank's own: where ranks share
    a CPU, what the others do in the middle of the copy does not count (`of_all_ranks_us` adds all of them up).
    """
    source = torch.ones(max(num_bytes, 1), dtype=torch.uint8)
    target = torch.zeros_like(source)
    to, frm = target.data_ptr(), source.data_ptr()
    times = []
    for round_idx in range(-_WARMUP, ROUNDS):
        source.add_(0)
        barrier()
        busy, start = time.thread_time_ns(), time.perf_counter_ns()
        ctypes.memmove(to, frm, num_bytes)
        elapsed = time.perf_counter_ns() - start
        # The clock of the thread is the dearer one, which shows in a short copy; that is seldom interrupted.
        busy = time.thread_time_ns() - busy
        if round_idx >= 0:
            times.append(min(elapsed, busy) / 1e3)
    return times


def of_all_ranks_us(samples_us: Sequence[Sequence[float]]) -> float:
    """Of samples_us[rank][round]: how long the CPUs need for the copies of all ranks, in the best round."""
    num_at_once = min(len(samples_us), _backend.num_usable_cpus())
    return min(sum(times) for times in zip(*samples_us, strict=True)) / num_at_once
