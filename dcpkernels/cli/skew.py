"""Ranks that come late, on purpose: who, by how much, and the wait."""

from __future__ import annotations

import os
import random
import time

from dcpkernels import _backend


class Skew:
    """In each sample the ranks enter in an order drawn anew, at even steps from 0 to `skew_us`: one is in time, one is
    late by all of it. The order depends on the sample's number alone, so that all ranks know it and all candidates meet
    the same ones.
    """

    def __init__(self, rank: int, num_ranks: int, skew_us: float) -> None:
        self._rank, self._num_ranks, self._skew_us = rank, num_ranks, skew_us
        # A rank that spins keeps the CPU from one that shares it and is to enter first.
        self._yields = num_ranks > _backend.num_usable_cpus()

    def delay_us(self, sample_idx: int) -> float:
        """How late this rank is in that sample of a candidate."""
        if not self._skew_us or self._num_ranks == 1:
            return 0.0
        order = random.Random(sample_idx).sample(range(self._num_ranks), self._num_ranks)
        return self._skew_us * order.index(self._rank) / (self._num_ranks - 1)

    def wait(self, delay_us: float) -> None:
        """Spins so long; gives the CPU to others in between where there are more ranks than CPUs."""
        until = time.perf_counter_ns() + int(delay_us * 1e3)
        while time.perf_counter_ns() < until:
            if self._yields:
                os.sched_yield()
