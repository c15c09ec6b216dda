"""Plays a trace of requests against a pool of KV blocks: does this mix fit, and how much of it at a time?

A request holds ceil(ceil(tokens / dcp) / block_tokens) * attention_groups + state_blocks blocks of every rank's pool: state
blocks are those of layers with a state of fixed size, which DCP does not divide. From its start it holds its prompt; after the
prefill it gets a token each `tpot_s`, and a block ahead of the token that needs it; `tpot_s` after the last one it
leaves.

Admission is in order of arrival, and a request starts when the pool can hold the whole of it: of all that run, the
blocks of their last tokens are set aside. So nothing that runs is ever thrown out again, and "nobody waited" means
that the mix fits whatever an engine does. An engine that admits by prompt starts requests earlier, and pays with
preemptions when it was wrong; the trace knows how long answers become, so this need not guess. Those behind a request
that waits wait too.

Not modelled: shared prefixes (each request has its whole prompt to itself), and how requests slow each other down. The
prefill rate and the time per token are the caller's, the same for every request.

Time is counted in whole nanoseconds, so that a replay is exact: what happens at the same time is one event, departures
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.ranges import check_count, is_number
from dcpkernels.planner.residency import Series, Stay, residency
from dcpkernels.planner.trace import Request

Progress = Callable[[int, int], None]
_NS = 10**9
_PROGRESS_EVERY = 1000
_MIN_LOAD, _MAX_LOAD = 2.0**-20, 2.0**40
MAX_SAMPLES = 100_000


@dataclass(frozen=True)
class Pool:
    """What requests are held against.

    Args:
        num_blocks: KV blocks of each rank.
        block_tokens: tokens of a block, on one rank.
        state_blocks: blocks of a request besides, whatever its length.
        dcp: ranks that a request's tokens are divided over.
        max_num_seqs: requests that may run at the same time; None: any number.
        attention_groups: blocks that hold the same tokens, each of other layers (CacheLayout.attention_groups).

    Raises DcpInvalidArgument for what is no whole number in its range.
    """

    num_blocks: int
    block_tokens: int
    state_blocks: int
    dcp: int
    max_num_seqs: int | None = None
    attention_groups: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("num_blocks", 1),
            ("block_tokens", 1),
            ("state_blocks", 0),
            ("dcp", 1),
            ("attention_groups", 1),
        ):
            check_count("replay", name, getattr(self, name), least)
        if self.max_num_seqs is not None:
            check_count("replay", "max_num_seqs", self.max_num_seqs, 1)

    def blocks(self, num_tokens: int) -> int:
        """Blocks of each rank that a request of so many tokens holds."""
        return -(-num_tokens // (self.dcp * self.block_tokens)) * self.attention_groups + self.state_blocks

    def fits(self, request: Request) -> bool:
        """Whether the request fits into the pool when it has it to itself."""
        return self.blocks(request.input_tokens + request.output_tokens) <= self.num_blocks


@dataclass(frozen=True)
class Replay:
    """What became of a trace. Peaks are of blocks that hold tokens or state; peak_reserved_blocks has those set aside,
    too.

    never_fit: places of requests in the given sequence, which are longer than the pool; they were left out. num_waited,
    longest_wait_s, p99_wait_s: of the others, between arrival and start. end_s: when the last one left.
    """

    pool: Pool
    load: float
    num_requests: int
    never_fit: tuple[int, ...]
    num_waited: int
    longest_wait_s: float
    p99_wait_s: float
    peak_tokens: int
    peak_blocks: int
    peak_reserved_blocks: int
    peak_requests: int
    end_s: float
    series: Series

    @property
    def peak_share(self) -> float:
        """Of the pool's blocks."""
        return self.peak_blocks / self.pool.num_blocks

    @property
    def is_fitting(self) -> bool:
        """Every request ran, and none had to wait."""
        return not self.never_fit and not self.num_waited

    def to_dict(self, *, with_series: bool = False) -> dict[str, Any]:
        """For JSON; the series only where it is asked for."""
        names = ("load", "num_requests", "num_waited", "longest_wait_s", "p99_wait_s", "peak_tokens", "peak_blocks")
        more = ("peak_reserved_blocks", "peak_requests", "end_s")
        return {
            **self.pool.__dict__,
            **{name: getattr(self, name) for name in names + more},
            "peak_share": self.peak_share,
            "num_never_fit": len(self.never_fit),
            "is_fitting": self.is_fitting,
            **(
                {"series": {name: list(values) for name, values in self.series.__dict__.items()}} if with_series else {}
            ),
        }


class _Admission(NamedTuple):
    starts_ns: list[int]
    peak_reserved_blocks: int
    peak_requests: int


class _Timeline:
    """Requests that fit, in order of arrival, in nanoseconds: what does not depend on the load, worked out once."""

    def __init__(self, requests: Sequence[Request], pool: Pool, prefill_tokens_per_s: float, tpot_s: float) -> None:
        for name, value in (("prefill_tokens_per_s", prefill_tokens_per_s), ("tpot_s", tpot_s)):
            if not is_number(value) or not 1e-9 <= value <= 1e9:
                raise DcpInvalidArgument(f"replay: {name} must be a number in 1e-9 .. 1e9 (got {value!r})")
        if not requests:
            raise DcpInvalidArgument("replay: requests must not be empty (got none)")
        self.pool = pool
        self.tpot_ns = round(tpot_s * _NS)
        self.never_fit = tuple(place for place, request in enumerate(requests) if not pool.fits(request))
        fitting = sorted((request for request in requests if pool.fits(request)), key=lambda request: request.arrival_s)
        self.requests = fitting
        self.arrivals_ns = [request.arrival_s * _NS for request in fitting]
        self.prefills_ns = [round(request.input_tokens / prefill_tokens_per_s * _NS) for request in fitting]
        self.stays_ns = [
            prefill + request.output_tokens * self.tpot_ns
            for prefill, request in zip(self.prefills_ns, fitting, strict=True)
        ]
        self.blocks = [pool.blocks(request.input_tokens + request.output_tokens) for request in fitting]

    def arrivals_at(self, load: float) -> list[int]:
        return [round(arrival / load) for arrival in self.arrivals_ns]

    def admit(
        self,
        arrivals: Sequence[int],
        progress: Progress | None = None,
        most_waits: int | None = None,
        limit_ns: int = 0,
    ) -> _Admission | None:
        """When each request starts: not before its arrival, not before the one ahead of it, and not before its blocks
        are free. None as soon as more than `most_waits` have waited longer than limit_ns."""
        free, places = self.pool.num_blocks, self.pool.max_num_seqs or len(arrivals)
        leaving: list[tuple[int, int]] = []  # (when, blocks), a heap
        starts, now, num_waits, least_free, most_running = [], 0, 0, free, 0
        for i, (arrival, need, stay) in enumerate(zip(arrivals, self.blocks, self.stays_ns, strict=True)):
            now = max(now, arrival)
            while leaving and (leaving[0][0] <= now or free < need or len(leaving) >= places):
                when, blocks = heappop(leaving)
                now, free = max(now, when), free + blocks
            free -= need
            heappush(leaving, (now + stay, need))
            starts.append(now)
            least_free, most_running = min(least_free, free), max(most_running, len(leaving))
            if most_waits is not None and now - arrival > limit_ns:
                num_waits += 1
                if num_waits > most_waits:
                    return None
            if progress is not None and i % _PROGRESS_EVERY == 0:
                progress(i, len(arrivals))
        return _Admission(starts, self.pool.num_blocks - least_free, most_running)


def replay(
    requests: Sequence[Request],
    *,
    num_blocks: int,
    block_tokens: int,
    state_blocks: int,
    dcp: int,
    prefill_tokens_per_s: float,
    tpot_s: float,
    load: float = 1.0,
    max_num_seqs: int | None = None,
    attention_groups: int = 1,
    num_samples: int = 400,
    progress: Progress | None = None,
) -> Replay:
    """Plays `requests` once; the head of this file has the rules.

    Args:
        num_blocks, block_tokens, state_blocks, dcp, max_num_seqs, attention_groups: as of `Pool`.
        prefill_tokens_per_s: rate at which a request's prompt is read.
        tpot_s: seconds per output token.
        load: how many times as fast requests arrive as in the trace; how long they stay does not change.
        num_samples: length of the series, at most.
        progress: called now and then with (requests done, requests).

    Raises DcpInvalidArgument for numbers out of range, or an empty trace.
    """
    pool = Pool(num_blocks, block_tokens, state_blocks, dcp, max_num_seqs, attention_groups)
    _check_load(load)
    check_count("replay", "num_samples", num_samples, 1, MAX_SAMPLES)
    timeline = _Timeline(requests, pool, prefill_tokens_per_s, tpot_s)
    arrivals = timeline.arrivals_at(load)
    admission = timeline.admit(arrivals, progress)
    assert admission is not None  # no limit was given
    starts = admission.starts_ns
    waits = sorted(start - arrival for start, arrival in zip(starts, arrivals, strict=True))
    stays = [
        Stay(start, start + prefill, request.input_tokens, request.output_tokens)
        for request, start, prefill in zip(timeline.requests, starts, timeline.prefills_ns, strict=True)
    ]
    held = residency(stays, timeline.tpot_ns, dcp * block_tokens, state_blocks, num_samples, attention_groups)
    if progress is not None:
        progress(len(arrivals), len(arrivals))
    return Replay(
        pool=pool,
        load=load,
        num_requests=len(requests),
        never_fit=timeline.never_fit,
        num_waited=sum(wait > 0 for wait in waits),
        longest_wait_s=waits[-1] / _NS if waits else 0.0,
        p99_wait_s=waits[_rank(len(waits), 99) - 1] / _NS if waits else 0.0,
        peak_tokens=held.peak_tokens,
        peak_blocks=held.peak_blocks,
        peak_reserved_blocks=admission.peak_reserved_blocks,
        peak_requests=admission.peak_requests,
        end_s=held.end_ns / _NS,
        series=held.series,
    )


def max_load(
    requests: Sequence[Request],
    *,
    num_blocks: int,
    block_tokens: int,
    state_blocks: int,
    dcp: int,
    prefill_tokens_per_s: float,
    tpot_s: float,
    max_num_seqs: int | None = None,
    attention_groups: int = 1,
    p99_wait_s: float | None = None,
    tolerance: float = 0.01,
    progress: Progress | None = None,
) -> float:
    """The highest load at which no request waits, or with p99_wait_s at which 99 of 100 wait no longer than that. Down
    to `tolerance` of itself, never above it. Requests that never fit do not count.

    math.inf: all of the trace fits at the same time. 0.0: there is no such load, as when more requests than fit arrive
    in one millisecond.

    Bisection is right here. Arrivals that come closer make every wait longer or leave it: seen from a request's
    arrival, all starts ahead of it are then as late or later, hence all departures and its own start, too.

    Raises DcpInvalidArgument as `replay` does. `progress` is called with (replays done, about how many there will be).
    """
    pool = Pool(num_blocks, block_tokens, state_blocks, dcp, max_num_seqs, attention_groups)
    if not is_number(tolerance) or not 1e-4 <= tolerance <= 1:
        raise DcpInvalidArgument(f"replay: tolerance must be a number in 1e-4 .. 1 (got {tolerance!r})")
    if p99_wait_s is not None and (not is_number(p99_wait_s) or not 0 <= p99_wait_s <= 1e9):
        raise DcpInvalidArgument(f"replay: p99_wait_s must be None or a number in 0 .. 1e9 (got {p99_wait_s!r})")
    timeline = _Timeline(requests, pool, prefill_tokens_per_s, tpot_s)
    num_requests = len(timeline.requests)
    if not num_requests:
        return 0.0
    most_waits = num_requests - _rank(num_requests, 99) if p99_wait_s is not None else 0
    limit_ns = round((p99_wait_s or 0.0) * _NS)
    bisections = max(1, math.ceil(math.log2(math.log(2) / math.log1p(tolerance))))
    num_replays = 0

    def is_met(arrivals: list[int]) -> bool:
        nonlocal num_replays
        num_replays += 1
        if progress is not None:
            progress(num_replays, max(num_replays, bisections + 6))
        return timeline.admit(arrivals, most_waits=most_waits, limit_ns=limit_ns) is not None

    if is_met([0] * num_requests):
        return math.inf
    low, high = 1.0, 2.0
    while low >= _MIN_LOAD and not is_met(timeline.arrivals_at(low)):
        low, high = low / 2, low
    if low < _MIN_LOAD:
        return 0.0
    while high <= _MAX_LOAD and is_met(timeline.arrivals_at(high)):
        low, high = high, high * 2
    for _ in range(bisections):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_met(timeline.arrivals_at(middle)) else (low, middle)
    return low


def _rank(count: int, percent: int) -> int:
    """The place, from 1, of the smallest of `count` sorted values that `percent` of them do not exceed."""
    return -(-percent * count // 100)


def _check_load(load: float) -> None:
    if not is_number(load) or not _MIN_LOAD <= load <= _MAX_LOAD:
        raise DcpInvalidArgument(f"replay: load must be a number in {_MIN_LOAD:.0e} .. {_MAX_LOAD:.0e} (got {load!r})")
