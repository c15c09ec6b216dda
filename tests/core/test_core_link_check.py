"""link_check without Python: the order of its stores and loads under ThreadSanitizer, CTAs of several threads too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.test_core import CSRC, HERE, MUTATIONS, NUMBERS_WRONG, RACE, build_race_programs, run_race_program

SOURCES = [HERE / "race_link_check.cpp", CSRC / "ops" / "link_check.cc"]
# Beside those of test_core: nothing between two checks.
NO_EXCHANGE = {"no exchange": 100}
MULTICAST = {"multicast": 1, "none": 0}


@pytest.fixture(scope="session")
def race_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return build_race_programs(tmp_path_factory.mktemp("race_link_check"), SOURCES)


@pytest.mark.parametrize("multicast", MULTICAST)
@pytest.mark.parametrize(
    ("threads", "ranks", "checks"),
    [(1, 1, 20), (1, 2, 100), (1, 3, 50), (1, 8, 10), (2, 2, 30), (2, 3, 20), (32, 2, 10), (32, 3, 5)],
)
def test_no_race(race_programs: dict[int, Path], threads: int, ranks: int, checks: int, multicast: str) -> None:
    done = run_race_program(race_programs[threads], ranks, checks, MULTICAST[multicast], 0)
    assert done.returncode == 0, done.stderr[:6000]


@pytest.mark.parametrize("threads", [1, 2, 32])
def test_a_slot_without_multicast_needs_no_exchange(race_programs: dict[int, Path], threads: int) -> None:
    """The echo says that the slot may be written again."""
    done = run_race_program(race_programs[threads], 3, 40, MULTICAST["none"], NO_EXCHANGE["no exchange"])
    assert done.returncode == 0, done.stderr[:6000]


@pytest.mark.parametrize(
    ("mutation", "threads"),
    [
        *[("relaxed release", 1), ("relaxed release", 32)],
        *[("no publish_done", 2), ("no publish_done", 32), ("no cta.sync", 2), ("no cta.sync", 32)],
        ("no exchange", 1),
    ],
)
def test_a_planted_fault_is_reported(race_programs: dict[int, Path], mutation: str, threads: int) -> None:
    """The proof that the tests above can fail."""
    code = (MUTATIONS | NO_EXCHANGE)[mutation]
    done = run_race_program(race_programs[threads], 3, 200, MULTICAST["multicast"], code)
    if mutation == "no exchange" and done.returncode == NUMBERS_WRONG:
        return  # a reader has seen the pattern of the next check before the race was written down
    assert done.returncode == RACE and "data race" in done.stderr, (done.returncode, done.stderr[:2000])
