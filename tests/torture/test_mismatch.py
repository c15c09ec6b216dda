"""One call that one rank makes otherwise, at random points of random programs: every rank gets one typed error in time, and
no rank a number that is not of the calls that were matched."""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.torture.mismatch_check import check_programs
from tests.torture.mismatch_programs import CHANGES, changed, legal_program
from tests.torture.mismatch_ranks import CONFIG

TIMEOUT_S = 2.0  # far more than a busy machine holds up a rank that is to come
WAYS = [{}, {"zero_copy": True}, {"wire": "packet", "packet_bytes": 16}, {"multicast": False}, {"num_channels": 2}]


def check_point(seed: int, backend: str = "direct", mode: str = "thread") -> str:
    """One random point. Returns what came of it."""
    rng = random.Random(seed)
    num_ranks, closes, change = rng.choice((2, 3, 4)), rng.random() < 0.5, CHANGES[seed % len(CHANGES)]
    program, which = legal_program(rng, rng.randrange(4, 11)), rng.randrange(num_ranks)
    programs = [program] * num_ranks
    programs[which] = changed(rng, program, change)
    config = dataclasses.replace(CONFIG, timeout_s=TIMEOUT_S, **rng.choice(WAYS))
    try:
        _, error = check_programs(programs, config, closes=closes, backend=backend, mode=mode)
    except Exception as failure:
        raise AssertionError(f"seed {seed}: {change} on rank {which} of {num_ranks}, {backend}, {mode}") from failure
    return "no error" if error is None else type(error).__name__


@pytest.mark.parametrize(
    "backend, mode, bounded",
    [("direct", "thread", 20), ("direct", "process", 4), ("collective", "thread", 4), ("collective", "process", 4)],
)
def test_random_points(backend: str, mode: str, bounded: int, torture: bool) -> None:
    """20 in CI, where what takes them is waiting; 1000 in the long form."""
    seeds = range(1000 if torture and (backend, mode) == ("direct", "thread") else 50 if torture else bounded)
    with ThreadPoolExecutor(1 if mode == "process" else 4) as pool:
        what = list(pool.map(lambda seed: check_point(seed, backend, mode), seeds))
    counts = {name: what.count(name) for name in sorted(set(what))}
    print(backend, mode, counts)
    assert counts.get("DcpMismatch", 0) > 0, counts
