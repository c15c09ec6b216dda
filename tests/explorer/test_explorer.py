"""The ops as they are shipped, in every execution of small cases, and in samples of larger ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.explorer.explore import explore
from tests.explorer.mutations import MUTATIONS

WRAP = 2**32 - 3  # the start epoch: the second round is the last one before the wrap

# Packets of 128 bytes are stored and loaded as words of different sizes, which the memory model does not have; so are
# those of 8 when a rank looks for a culprit.
PUSH, PULL, PACKET8, PACKET16 = (f"a2a wire={wire}" for wire in range(4))
# Buffers that are handed out, passed and copied into, in turns.
PULL_MIXED = "calls=4 tokens=1111 script0=133312 script1=3333"

# Every execution, within seconds.
SMALL = {
    "push": f"{PUSH} calls=4 tokens=1212",
    "push, T = 0 and changing": f"{PUSH} calls=4 tokens=2013",
    "push, empty rows": f"{PUSH} calls=4 tokens=2222 empty=1",
    "push, rounds": f"{PUSH} calls=2 tokens=52 capacity=2",
    "push across the wrap": f"{PUSH} calls=4 tokens=1111 start={WRAP}",
    "push, channels in one thread": f"{PUSH} channels=2 one_thread=1 calls=4 tokens=4444",
    "push, asleep": f"{PUSH} sleep=1",
    "pull, copied": f"{PULL} calls=4 tokens=1111",
    "pull, zero copy": f"{PULL} calls=4 tokens=1111 script0=12121212 script1=12121212",
    "pull, both": f"{PULL} {PULL_MIXED}",
    "pull, rounds": f"{PULL} tokens=5 capacity=1",
    "pull across the wrap": f"{PULL} {PULL_MIXED} start={WRAP}",
    "packets of 8": f"{PACKET8} calls=4 tokens=1111",
    "packets of 8, T = 0": f"{PACKET8} calls=3 tokens=101",
    "packets of 16": f"{PACKET16} calls=2 tokens=11",
    "two lanes in one thread": f"{PUSH} lanes=2 one_thread=1 calls=2 tokens=11",
    "query, view and release": "query script=1212 tokens=21",
    "query, own buffers": "query script=1212 tokens=21 shared=0",
    "query, out in rounds": "query script=33 tokens=31 capacity=1",
    "query, all ways": "query script=12314 tokens=110",
    "query, closed by a reduce": "query script=141414 tokens=121",
    "query, T = 0": "query script=121212 tokens=101",
    "query across the wrap": f"query script=123 tokens=11 start={WRAP}",
    "kv, split with prefetch": "kv script=12132132132",
    "kv, own buffers": "kv script=12132132132 shared=0",
    "kv, whole and split": "kv script=43431234",
    "kv, dequantised": "kv script=151515",
    "kv across the wrap": f"kv script=1213213213 start={WRAP}",
}

# A call that ranks do not make alike, and calls out of turn: a fault on every rank, in every execution.
MISUSE = {
    "another T": f"{PUSH} tokens=1 tokens1=2",
    "another T, packets": f"{PACKET8} tokens=1 tokens1=2",
    "T = 0 on one rank": f"{PUSH} tokens=0 tokens1=1",
    "another T in the second call": f"{PUSH} calls=2 tokens=11 tokens1=12",
    "a view is open": "query script=11 tokens=11 expect=5",
    "a reduce of other rows": "query script=14 other_rows=1 expect=6",
    "a wait without its start": "kv script=123 script1=23 expect=7",
    "the buffer in use": "kv script=121 same_buffer=1 expect=7",
}

# Ranks that stop for ever, deadlines that pass early, Ctrl-C: a fault that names the right rank, or the right result.
FAULTS = {
    "push, a rank dies": f"{PUSH} calls=2 tokens=11 deaths=2",
    "pull, a rank dies": f"{PULL} calls=2 tokens=11 deaths=2",
    "pull, a rank dies and sockets tell": f"{PULL} calls=3 tokens=111 script0=333 script1=1332 deaths=1 lost=1 forever=1",
    "packets, a rank dies": f"{PACKET16} calls=2 tokens=11 deaths=2",
    "query, a rank dies": "query script=12 deaths=2",
    "kv, a rank dies": "kv script=12132132 deaths=2",
    "push, a deadline passes early": f"{PUSH} calls=2 tokens=11 early=1",
    "pull, a deadline passes early": f"{PULL} script0=12 script1=12 early=1",
    "packets, a deadline passes early": f"{PACKET16} early=1",
    "query, a deadline passes early": "query script=12 early=1",
    "kv, a deadline passes early": "kv script=1213 early=1",
    "push, Ctrl-C": f"{PUSH} calls=2 tokens=11 interrupt=1 early=1",
    "push, ranks leave and are not missed": f"{PUSH} calls=2 tokens=11 early=1 lost=1 forever=1",
}


@pytest.mark.parametrize("name", [*SMALL, *MISUSE, *FAULTS])
def test_every_execution_is_right(ops_program: Path, name: str) -> None:
    explore_all(ops_program, (SMALL | MISUSE | FAULTS)[name], 300_000)


# Larger ones: two channels and four epochs, three ranks and three, and more where that takes seconds.
LARGE = {
    "push, 2 ranks, 2 channels, 4 rows, 4 epochs": f"{PUSH} channels=2 calls=4 tokens=4444",
    "pull, 2 ranks, 2 channels, 4 rows, 4 epochs": f"{PULL} channels=2 calls=4 tokens=4444",
    "pull, zero copy, 2 ranks, 2 channels, 4 rows, 3 epochs": (
        f"{PULL} channels=2 calls=3 tokens=444 script0=121212 script1=121212"
    ),
    "packets of 8, 2 ranks, 2 channels, 4 rows, 4 epochs": f"{PACKET8} channels=2 calls=4 tokens=4444",
    "query, 2 ranks, 2 channels, 4 rows, 4 epochs": "query channels=2 script=1212 tokens=44",
    "kv, 2 ranks, 2 channels, 4 rows, 4 epochs": "kv channels=2 rows=4 script=12132132132",
    "push, 3 ranks, 3 epochs": f"{PUSH} ranks=3 calls=3 tokens=121",
    "pull, 3 ranks, 3 epochs": f"{PULL} ranks=3 calls=3 tokens=121",
    "packets of 8, 3 ranks, 3 epochs": f"{PACKET8} ranks=3 calls=3 tokens=111",
    "query, 3 ranks, 3 epochs": "query ranks=3 script=121 tokens=11",
    "kv, 3 ranks, 3 epochs": "kv ranks=3 rows=3 script=12132132",
    "lanes in another order": f"{PUSH} lanes=2 one_thread=1 swap=1",
    "push, 4 ranks, 2 channels, T changes": f"{PUSH} ranks=4 channels=2 calls=8 tokens=40312504 capacity=4",
    "packets of 8, 3 ranks, 2 channels, across the wrap": f"{PACKET8} ranks=3 channels=2 calls=6 tokens=203131 start={WRAP}",
    "two lanes in two threads": f"{PUSH} lanes=2 calls=5 tokens=12012",
    "query, 4 ranks, 2 channels, all ways": "query ranks=4 channels=2 script=1214314 tokens=2132",
    "push, 2 channels in one thread, a deadline passes early": f"{PUSH} channels=2 one_thread=1 tokens=2 early=1",
    "push, 3 ranks, one dies, 2 calls": f"{PUSH} ranks=3 calls=2 tokens=11 deaths=4",
}
# Half a minute and more: sampled in the short form.
LONG = {
    "pull, zero copy, 2 ranks, 2 channels, 4 rows, 4 epochs": (
        f"{PULL} channels=2 calls=4 tokens=4444 script0=12121212 script1=12121212"
    ),
}
# The order of signals that a GPU has. The two gathers have it on a CPU too: they signal all peers at once.
TOGETHER = {
    "push, 2 ranks, 2 channels": f"{PUSH} channels=2 calls=4 tokens=4444",
    "pull, 2 ranks": f"{PULL} {PULL_MIXED}",
    "packets of 8, 2 ranks": f"{PACKET8} calls=4 tokens=1111",
    "push, 3 ranks": f"{PUSH} ranks=3 calls=3 tokens=121",
    "pull, 3 ranks": f"{PULL} ranks=3 calls=3 tokens=121",
    "packets of 8, 3 ranks": f"{PACKET8} ranks=3 calls=3 tokens=111",
    "push, 2 ranks, a deadline passes early": f"{PUSH} calls=2 tokens=11 early=1",
}

SAMPLED = {
    "push, 2 channels, a deadline passes early": f"{PUSH} channels=2 tokens=2 early=1",  # all of it: over half an hour
    "pull, 3 ranks, 2 channels, buffers in every way": (
        f"{PULL} ranks=3 channels=2 calls=6 tokens=213212 script0=133312331 script1=121333112121 script2=333333"
    ),
    "packets of 16, 3 ranks": f"{PACKET16} ranks=3 calls=5 tokens=21021",
    "two lanes in two threads, pull": f"{PULL} lanes=2 calls=5 tokens=12012",
    "kv, 4 ranks, 2 channels": "kv ranks=4 channels=2 rows=6 script=1213213213213",
    "kv, 3 ranks, 2 channels, whole": "kv ranks=3 channels=2 rows=6 script=4343123434",
    "push, 3 ranks, one dies": f"{PUSH} ranks=3 channels=2 calls=3 tokens=222 deaths=4",
    "pull, 3 ranks, one dies": f"{PULL} ranks=3 calls=3 tokens=111 script0=1233 script1=3312 script2=333 deaths=4",
    "kv, 3 ranks, one dies": "kv ranks=3 rows=3 script=1213213213 deaths=4",
    "push, 3 ranks, deadlines pass early": f"{PUSH} ranks=3 calls=3 tokens=121 early=2",
    "pull, 3 ranks, deadlines pass early": f"{PULL} ranks=3 calls=2 tokens=11 script0=1212 script1=1212 script2=33 early=2",
}

SAMPLE = {"random": ["--random", "{}"], "by priority": ["--pct", "{}", "--depth", "4"]}


def explore_all(program: Path, scenario: str, max_states: int) -> None:
    result = explore(program, scenario, "--max-states", str(max_states), timeout_s=7200)
    assert result.verdict == "", (result.verdict, result.trace[-6000:])
    numbers = result.numbers
    print(f"{scenario}: {numbers['executions']} executions, {numbers['states']} states, {numbers['steps']} accesses")
    assert numbers["mode"] == "exhaustive"
    assert numbers["states"] > 10 and numbers["executions"] > 1 and numbers["steps"] > numbers["states"]


@pytest.mark.parametrize("name", LARGE)
def test_every_execution_of_larger_cases(ops_program: Path, name: str) -> None:
    explore_all(ops_program, LARGE[name], 40_000_000)


@pytest.mark.parametrize("name", LONG)
def test_every_execution_of_long_cases(ops_program: Path, torture: bool, name: str) -> None:
    if torture:
        return explore_all(ops_program, LONG[name], 40_000_000)
    result = explore(ops_program, LONG[name], "--random", "300")
    assert result.verdict == "", (result.verdict, result.trace[-6000:])
    assert result.numbers["executions"] == 300 and result.numbers["steps"] > 1000


@pytest.mark.parametrize("name", TOGETHER)
def test_every_execution_with_the_signals_of_a_gpu(together_program: Path, name: str) -> None:
    explore_all(together_program, TOGETHER[name], 300_000)


@pytest.mark.parametrize("way", SAMPLE)
@pytest.mark.parametrize("name", SAMPLED)
def test_samples(ops_program: Path, torture: bool, name: str, way: str) -> None:
    num = 20000 if torture else 200
    options = [option.format(num) for option in SAMPLE[way]]
    result = explore(ops_program, SAMPLED[name], *options, "--seed", "1", timeout_s=7200)
    assert result.verdict == "", (result.verdict, result.trace[-6000:])
    assert result.numbers["executions"] == num and result.numbers["steps"] > 50 * num


# -- what a failing schedule looks like


def planted(name: str) -> str:
    (number,) = [number for number, mutation in enumerate(MUTATIONS, 1) if mutation.name == name]
    return f"mutation={number}"


@pytest.mark.parametrize("mode", [["--max-states", "100000"], ["--random", "1000"], ["--pct", "1000", "--depth", "3"]])
def test_a_failing_schedule_is_replayed_exactly(mutants_program: Path, mode: list[str]) -> None:
    scenario = f"{PACKET16} {planted('a packet whose flag acquires nothing')}"
    failed = explore(mutants_program, scenario, *mode)
    again = explore(mutants_program, scenario, *failed.replay)
    assert failed.verdict.startswith("data: ")
    assert (again.verdict, again.steps) == (failed.verdict, failed.steps)


def test_a_seed_fails_the_same_way_twice(mutants_program: Path) -> None:
    scenario = f"kv script=12132132 {planted('a chunk over one that peers may still read')}"
    first, second = (explore(mutants_program, scenario, "--random", "1000", "--seed", "7") for _ in range(2))
    assert first.verdict.startswith("race: ") and first.trace == second.trace


def test_a_trace_says_who_read_what_and_whether_it_was_stale(mutants_program: Path) -> None:
    scenario = f"{PACKET16} {planted('a packet whose flag acquires nothing')}"
    failed = explore(mutants_program, scenario, "--random", "1000")
    lines = failed.steps.splitlines()
    step = r" *\d+  rank [01] channel 0 +"
    assert any(re.match(step + r"-- rank \d makes call 0", line) for line in lines)
    assert any(
        re.match(step + r"store release rank \d staging\[parity 0\]\[slot 0\]\[row 0\]\+12 := 4", line)
        for line in lines
    )
    # The flag is there, and the payload that was stored before it is not.
    assert any(
        re.search(r"load relaxed rank \d staging.* = 0 \(from the start; STALE: newest is ", line) for line in lines
    )
    assert lines[-1].startswith("wrong: data: rank ")
