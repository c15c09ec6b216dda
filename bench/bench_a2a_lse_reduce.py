"""a2a_lse_reduce and its baseline under pytest-benchmark, for its saved runs and comparisons:

    pytest bench/bench_a2a_lse_reduce.py --benchmark-autosave
    pytest bench/bench_a2a_lse_reduce.py --benchmark-compare

The times are those of `dcpkernels bench`, taken inside the rank processes, the slowest rank's of each call. Ours and
the baseline's come from one run, in which they took turns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from dcpkernels.cli.bench import BenchOptions, check, measure_row

ROUNDS = 100
RANKS = (2, 8)
TOKENS = (1, 8, 64)


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
def measured(num_ranks: int, num_tokens: int) -> tuple[dict, dict[str, list[float]]]:
    options = BenchOptions(num_ranks=num_ranks, tokens=(num_tokens,), iters=ROUNDS)
    return measure_row(options, num_tokens, check(options))


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", ["dcpkernels", "gloo"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a2a_lse_reduce(benchmark: pytest.FixtureRequest, num_ranks: int, num_tokens: int, candidate: str) -> None:
    row, times_us = measured(num_ranks, num_tokens)
    benchmark.group = f"{num_ranks} ranks, {num_tokens} tokens"
    benchmark.extra_info.update(row)
    CLOCK.replay(benchmark, times_us[candidate])
