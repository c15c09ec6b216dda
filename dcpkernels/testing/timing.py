"""Numbers for a benchmark: median and p99, the slowest rank, candidates in turn. Needs the stdlib only."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Sample = TypeVar("Sample")


class Summary(NamedTuple):
    median_us: float
    p99_us: float
    num_samples: int
    iqr_us: float


def summarize(samples_us: Sequence[float]) -> Summary:
    """Median, 99th percentile (nearest rank: a value that was measured, the maximum below 100 samples), and interquartile
    range, which is 0 of a single sample."""
    if not samples_us:
        raise ValueError("summarize: samples_us must not be empty (got 0 samples)")
    ordered = sorted(samples_us)
    low, _, high = statistics.quantiles(ordered, method="inclusive") if len(ordered) > 1 else 3 * ordered
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Summary(statistics.median(ordered), p99, len(ordered), high - low)


def max_over_ranks(samples_us: Sequence[Sequence[float]]) -> list[float]:
    """The time of the slowest rank in each iteration, of samples_us[rank][iteration].

    A collective is over when its last rank is; the median of each rank on its own hides that.
    """
    lengths = {len(per_rank) for per_rank in samples_us}
    if len(lengths) != 1:
        raise ValueError(f"max_over_ranks: every rank must have as many samples (got {sorted(lengths)})")
    return [max(iteration) for iteration in zip(*samples_us, strict=True)]


def time_us(fn: Callable[[], object], num_calls: int = 1) -> float:
    """Microseconds per call of `fn`, averaged over `num_calls` calls back to back."""
    start, end = span_ns(fn, num_calls)
    return (end - start) / 1e3 / num_calls


def span_ns(fn: Callable[[], object], num_calls: int = 1) -> tuple[int, int]:
    """When `num_calls` calls of `fn` back to back began and when they were over, by `time.perf_counter_ns`.

    On Linux that is CLOCK_MONOTONIC (`time.get_clock_info("perf_counter")` says so), which all processes of a host read
    alike: spans of several ranks can be held against each other.
    """
    start = time.perf_counter_ns()
    for _ in range(num_calls):
        fn()
    return start, time.perf_counter_ns()


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    num_calls: int = 1,
    turn: int = 1,
    before: Callable[[str], object] | None = None,
    sample: Callable[[Callable[[], object], int], Sample] = time_us,
) -> dict[str, list[Sample]]:
    """Times candidates in turn, `rounds` turns each: by candidate, what `sample(candidate, num_calls)` returns, by
    default the microseconds of a call.

    A turn is `turn` samples one after the other, of which the first half is dropped: by then the caches are as
    the candidate itself leaves them, and not as the one before it did. A sample is the mean of `num_calls`
    calls back to back.

    Alternation exposes all of them to the same clock changes and neighbours, and the order is reversed every
    other round, so that none always runs in the cache that another one left. The order depends on the round
    alone: ranks that call this together always run the same candidate. `before(name)` runs untimed ahead of
    every sample of a candidate (a barrier).
    """
    names = list(candidates)
    times: dict[str, list[Sample]] = {name: [] for name in names}
    for round_idx in range(-warmup, rounds):
        for name in names if round_idx % 2 == 0 else reversed(names):
            for place in range(turn):
                if before is not None:
                    before(name)
                taken = sample(candidates[name], num_calls)
                if round_idx >= 0 and place >= turn // 2:
                    times[name].append(taken)
    return times
