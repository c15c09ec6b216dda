"""The engine itself: what small programs may show, by the literature on release and acquire, and that the reduction
loses none of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.explorer.explore import TOO_MANY, explore
from tests.explorer.program import HERE, build

RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = 0, 2, 3, 4, 5
MODES = ("--exhaustive", "--no-merging", "--no-reduction", "--brute-force")


@pytest.fixture(scope="session")
def litmus(explorer_folder: Path) -> Path:
    return build(explorer_folder, "litmus", [HERE / "litmus.cpp"])


def pairs(text: str) -> set[str]:
    """Outcomes "ab cd ..." of a program in which each thread, or two, read two words."""
    return {" ".join(outcome.ljust(4, "0")) for outcome in text.split()}


def all_but(num_reads: int, *forbidden: str) -> set[str]:
    outcomes = {"".join(bits) for bits in itertools.product("01", repeat=num_reads)}
    return pairs(" ".join(outcomes - set(forbidden)))


SC = f"store={SEQ_CST} load={SEQ_CST}"
# What threads read, with a zero for each of four places that nobody wrote.
ALLOWED = {
    # Message passing: who has seen the flag sees what came before it.
    "mp": all_but(2, "10"),
    f"mp store={RELAXED}": all_but(2),
    f"mp load={RELAXED}": all_but(2),
    # Store buffering: only seq_cst forbids that both miss the other's store.
    "sb": all_but(2),
    f"sb {SC}": all_but(2, "00"),
    # Load buffering with relaxed accesses may show 11 in C++; this model never does (model.h).
    f"lb store={RELAXED} load={RELAXED}": all_but(2, "11"),
    # Independent reads of independent writes: two readers may disagree on the order, but not with seq_cst.
    "iriw": all_but(4),
    f"iriw {SC}": all_but(4, "1010"),
    # Write to read causality is transitive.
    "wrc": all_but(3, "110"),
    f"wrc store={RELAXED}": all_but(3),
    f"wrc load={RELAXED}": all_but(3),
    # Coherence: two loads of one word go forward in its modification order.
    "corr": pairs("00 01 02 11 12 22"),
    # 2+2W: without C++'s 11, in which modification order runs against execution (model.h).
    "2+2w unordered=1": {"1 0 2 0", "2 0 1 0", "2 0 2 0"},
    # Atomicity.
    "sums": {" ".join([*order, "0"]) for order in itertools.permutations("012")},
    "lock": {"0 1 0 0", "1 0 0 0"},
    "ring": {"0 1 2 1"},
    # A link of a release sequence is an RMW; the reader of the link knows what its head released.
    "rmw_sequence": {"0 0 0 0", "1 0 0 0", "2 1 0 0"},
    "flag": {"7 0 0 0"},
    f"dekker {SC}": {"0 0 0 0"},
    "sleeper": {"0 0 0 0"},
    "late_load": {"1 0 0 0"},
    "joined one_rank=1": {"5 5 0 0"},
    "choices": {f"{a} {b} 0 0" for a in range(3) for b in range(3)},
    # A deadline that passes when nobody can move any more, or early; a death, and what the survivor hears.
    "patience deadline=5000": {"1 0 0 0"},
    "give_up deadline=5000": {"2 1 0 0", "2 2 0 0"},
    "patience deadline=5000 early=1": {"1 0 0 0", "2 0 0 0"},
    "patience deadline=5000 mortal=1 deaths=1": {"1 0 0 0", "2 1 0 0"},
}
FORBIDDEN = {
    # C++20: a later store of another thread is no link of a release sequence.
    "store_sequence": "race",
    f"flag store={RELAXED}": "race",
    f"flag load={RELAXED}": "race",
    f"lock store={RELAXED}": "race",
    f"dekker store={ACQ_REL} load={ACQUIRE}": "race",
    "plain_race": "race",
    "atomic_race": "race",
    f"late_load store={RELAXED} load={RELAXED}": "race",
    f"late_store store={RELAXED} load={RELAXED}": "race",
    "never": "deadlock",
    "lost_wakeup": "deadlock",
    "2+2w": "unordered",
    f"ring store={RELAXED}": "unordered",
    # Threads of two ranks do not meet in a join.
    "joined": "race",
}


# Ways that meet in one place with views that differ: what the search must still tell apart (canonical.h).
UNSEEN = {
    **{
        f"unseen_race first={first} second={second}": "race"
        for first, second in ((0, 1), (0, 0), (1, 0), (0, 3), (0, 2), (1, 2), (2, 1), (2, 0), (3, 0))
    },
    "unseen_release": "race",
    "unseen_second": "race",
    "unseen_relaxed": "unordered",
    "unseen_floor": {"0 0 0 0", "1 0 0 0"},
    "unseen_value": {f"{value} 0 0 0" for value in range(4)},
    "unseen_order": {"0 0 0 0", "1 0 0 0"},
}
FORGETFUL = (
    ("random2", 6, "unordered=1"),
    ("random2", 6, ""),
    ("random3", 4, "unordered=1"),
    ("random3", 4, "unordered=1 one_rank=1"),
)


@pytest.mark.parametrize("program", ALLOWED)
def test_outcomes_are_those_of_the_literature(litmus: Path, program: str) -> None:
    for mode in MODES:
        found = explore(litmus, program, mode)
        assert found.verdict == "", (mode, found.verdict)
        assert set(found.numbers["outcomes"]) == ALLOWED[program], mode
    for mode in ("--random", "--pct"):
        found = explore(litmus, program, mode, "300")
        assert found.verdict == "", (mode, found.verdict)
        assert set(found.numbers["outcomes"]) <= ALLOWED[program], mode


@pytest.mark.parametrize("program", FORBIDDEN)
def test_wrong_programs_are_found_and_replayed(litmus: Path, program: str) -> None:
    for mode in MODES:
        found = explore(litmus, program, mode)
        assert found.verdict.startswith(FORBIDDEN[program] + ":"), (mode, found.verdict)
        assert "the replay ends otherwise" not in found.trace
        again = explore(litmus, program, *found.replay)
        assert again.verdict == found.verdict
        assert "rank " in again.trace


def test_the_reduction_loses_no_outcome_of_random_programs(litmus: Path, torture: bool) -> None:
    """Loads, stores, sums and compare-exchanges of two words, in all orders of memory."""
    reduced = full = 0
    num_programs = 300 if torture else 40
    for name, accesses, programs in (("random2", 4, num_programs), ("random3", 3, num_programs // 2)):
        for number in range(programs):
            arguments = f"{name} program={number} accesses={accesses} unordered=1"
            one, other = (explore(litmus, arguments, mode) for mode in ("--exhaustive", "--no-reduction"))
            assert one.numbers["outcomes"] == other.numbers["outcomes"], arguments
            assert one.verdict == other.verdict == "", arguments
            reduced += one.numbers["states"]
            full += other.numbers["states"]
    assert reduced < full / 2


@pytest.mark.parametrize("program", UNSEEN)
def test_states_that_differ_in_views_alone_are_two(litmus: Path, program: str) -> None:
    for mode in ("--exhaustive", "--no-merging"):
        found = explore(litmus, program, mode, "--search-alone")
        expected = UNSEEN[program]
        if isinstance(expected, str):
            assert found.numbers["kind"] == expected, (mode, found.verdict)
        else:
            assert found.verdict == "" and set(found.numbers["outcomes"]) == expected, (mode, found.verdict)


def test_states_that_are_taken_for_one_have_one_future(litmus: Path, torture: bool) -> None:
    """What a state is told apart by (canonical.h), against the search that takes no two states for one. Threads forget
    what they have read but for the last, so that views and clocks decide. Whether a plain load raced is an outcome."""
    merged = unmerged = 0
    programs = [
        f"{name} program={number} accesses={accesses} plain=2 {options}"
        for number in range(150 if torture else 12)
        for name, accesses, options in FORGETFUL
    ]
    for arguments in programs:
        one, other = (explore(litmus, arguments, mode) for mode in ("--exhaustive", "--no-merging"))
        assert one.numbers["kind"] == other.numbers["kind"], arguments
        assert one.verdict != "" or one.numbers["outcomes"] == other.numbers["outcomes"], arguments
        merged += one.numbers["states"]
        unmerged += other.numbers["states"]
    assert merged < unmerged / 2


def test_brute_force_agrees_without_merging(litmus: Path, torture: bool) -> None:
    """The search without saved states, on programs that are small enough for it."""
    for number in range(60 if torture else 10):
        arguments = f"random2 program={number} accesses=3 unordered=1"
        one, other = (explore(litmus, arguments, mode) for mode in ("--exhaustive", "--brute-force"))
        assert one.numbers["outcomes"] == other.numbers["outcomes"], arguments


def test_a_search_that_was_cut_off_is_an_error(litmus: Path) -> None:
    found = explore(litmus, "iriw", "--no-reduction", "--max-states", "20")
    assert found.code == TOO_MANY
    assert found.verdict == "too many"


def test_a_seed_gives_the_same_executions(litmus: Path) -> None:
    first, second, other = (explore(litmus, "iriw", "--random", "5", "--seed", seed) for seed in ("7", "7", "70"))
    assert first.numbers["outcomes"] == second.numbers["outcomes"]
    assert first.numbers["steps"] == second.numbers["steps"]
    assert first.numbers["outcomes"] != other.numbers["outcomes"]


def test_traces_say_what_was_read(litmus: Path) -> None:
    found = explore(litmus, f"dekker store={ACQ_REL} load={ACQUIRE}")
    assert "exchange acq_rel memory := 1, was 0 (from the start)" in found.trace.replace("+64", "")
    assert "= 0 (from the start; STALE: newest is 1 by rank" in found.trace
