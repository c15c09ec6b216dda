"""One call that one rank makes otherwise, at random points of random programs: every rank gets one typed error in time, and
no rank a number that is not of the calls that were matched."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from tests.torture.mismatch_check import check_programs
from tests.torture.mismatch_programs import CHANGES, Program, changed, legal_program, outcome
from tests.torture.mismatch_ranks import CONFIG

TIMEOUT_S = 2.0  # far more than a busy machine holds up a rank that is to come
WAYS: list[dict[str, Any]] = [
    {},
    {"zero_copy": True},
    {"wire": "packet", "packet_bytes": 16},
    {"multicast": False},
    {"num_channels": 2},
]


class Point(NamedTuple):
    seed: int
    change: str
    programs: list[Program]
    closes: bool
    way: dict[str, Any]

    def shows(self, backend: str) -> bool:
        """Whether any rank can know: not where two equal calls have changed places, a chunk is started a little earlier, or
        nobody waits for the last chunk."""
        expected = outcome(self.programs, closes=self.closes, sees_closed=False, direct=backend == "direct")
        return bool(expected.faults or expected.refused)


def points() -> Iterator[Point]:
    for seed in itertools.count():
        rng = random.Random(seed)
        change, num_ranks = CHANGES[seed % len(CHANGES)], rng.choice((2, 3, 4))
        program = legal_program(rng, rng.randrange(4, 11))
        programs = [program] * num_ranks
        programs[rng.randrange(num_ranks)] = changed(rng, program, change)
        yield Point(seed, change, programs, rng.random() < 0.5, rng.choice(WAYS))


def check_point(point: Point, backend: str, mode: str) -> str:
    """Returns what came of it."""
    config = dataclasses.replace(CONFIG, timeout_s=TIMEOUT_S, **point.way)
    try:
        expected, error = check_programs(point.programs, config, closes=point.closes, backend=backend, mode=mode)
    except Exception as failure:
        raise AssertionError(f"seed {point.seed}: {point.change}, {point.way}, {backend}, {mode}") from failure
    if error is None:
        return "refused, by itself" if expected.refused else "no error"
    return type(error).__name__


@pytest.mark.parametrize(
    "backend, mode, bounded",
    [("direct", "thread", 20), ("direct", "process", 4), ("collective", "thread", 4), ("collective", "process", 4)],
)
def test_random_points(backend: str, mode: str, bounded: int, torture: bool) -> None:
    """All that show end in an error of all ranks; a few that do not are made, too. Most of the time is waiting."""
    number = bounded if not torture else 1000 if (backend, mode) == ("direct", "thread") else 50
    shown = itertools.islice((point for point in points() if point.shows(backend)), number)
    hidden = itertools.islice((point for point in points() if not point.shows(backend)), number // 4)
    with ThreadPoolExecutor(1 if mode == "process" else 4) as pool:
        came = Counter(pool.map(lambda point: check_point(point, backend, mode), shown))
        unseen = Counter(pool.map(lambda point: check_point(point, backend, mode), hidden))
    print(backend, mode, dict(came), "not to be seen:", dict(unseen))
    assert "no error" not in came and set(unseen) <= {"no error"}
    assert came["DcpMismatch"] >= number // 3
