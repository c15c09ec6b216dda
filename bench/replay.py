"""Rows of `dcpkernels bench` under pytest-benchmark, for its saved runs and comparisons:

    pytest bench/bench_a2a_lse_reduce.py --benchmark-autosave
    pytest bench/bench_a2a_lse_reduce.py --benchmark-compare

The times are those of `dcpkernels bench`, taken inside the rank processes, the slowest rank's of each call. Ours and
the baselines' come from one run, in which they took turns. The cases are those of the command, too: an op's class in
`dcpkernels.cli` says by its defaults of which sizes; here each of them with 2 and with 8 ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from dcpkernels.cli import baselines
from dcpkernels.cli.bench import check, measure_row
from dcpkernels.cli.bench_op import OURS, BenchOp
from dcpkernels.errors import DcpUnsupported

RANKS = (2, 8)
_MAX_ITERS = 100  # all suites together are to take minutes


def peers() -> tuple[str, ...]:
    """Baselines that this machine has."""
    try:
        baselines.require(["openmpi"])
    except DcpUnsupported:
        return ("gloo",)
    return ("gloo", "openmpi")


CANDIDATES = (OURS, *peers())


def op_of(kind: type[BenchOp], num_ranks: int, size: int) -> BenchOp:
    """A case of the suites, with all that is not said here as `dcpkernels bench` has it."""
    options = {kind.SIZES: (size,), "iters": min(kind.iters, _MAX_ITERS)}
    return kind(ranks=(num_ranks,), baselines=CANDIDATES[1:], **options)


class ReplayClock:
    """A clock that only measured samples move: pytest-benchmark, which times in its own process, reads them off it."""

    __name__ = "replayed samples"

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def advance(self, duration_us: float) -> None:
        self._now_s += duration_us / 1e6

    def replay(self, benchmark: pytest.FixtureRequest, samples_us: Sequence[float]) -> None:
        pending = iter(samples_us)
        benchmark.pedantic(lambda: self.advance(next(pending)), rounds=len(samples_us), iterations=1)


CLOCK = ReplayClock()


@functools.cache
def measured(op: BenchOp) -> tuple[dict, dict[str, list[float]]]:
    """Of an op with one number of ranks and one size."""
    return measure_row(op, op.ranks[0], op.sizes[0], check(op))


def replay(benchmark: pytest.FixtureRequest, op: BenchOp, candidate: str) -> None:
    row, times_us = measured(op)
    benchmark.group = f"{op.NAME}: {op.ranks[0]} ranks, {op.sizes[0]} {op.SIZES}"
    benchmark.extra_info.update(row)
    CLOCK.replay(benchmark, times_us[candidate])
