"""Rank processes killed, stopped and slowed in an endless mix of all ops: every survivor raises the same typed error in
time, nothing is left behind, and those who are left go on in a new workspace.

A failure prints the `World`, with its seed; `run(World(...))` runs it again.
"""

from __future__ import annotations

import random

import pytest

from tests.torture import faults_instruction
from tests.torture.faults_mix import VARIANTS
from tests.torture.faults_world import Round, World, run

STOP_TIMEOUT_S = 0.8


def a_round(draw: random.Random, how: str, victims: tuple[int, ...], **fields) -> Round:
    variant, pause_s = draw.choice(list(VARIANTS)), draw.choice([0.0, 1e-3])
    lanes = not fields.get("instruction") and draw.random() < 0.4
    return Round(how, victims, variant, **{"lanes": lanes, "pause_s": pause_s, **fields})


def deaths(num_ranks: int, seed: int, **fields) -> World:
    """One death after the other, until one rank is left, which goes on alone."""
    draw = random.Random(seed)
    rounds = [a_round(draw, "kill", (draw.randrange(left),), **fields) for left in range(num_ranks, 1, -1)]
    return World(num_ranks, seed, (*rounds, a_round(draw, "none", ())))


def stops(num_ranks: int, seed: int, num_rounds: int, num_victims: int = 1, **fields) -> World:
    """Each time longer than the deadline. All ranks live on, and make a new workspace together."""
    draw, fields = random.Random(seed), {"timeout_s": STOP_TIMEOUT_S, **fields}
    victims = [tuple(draw.sample(range(num_ranks), num_victims)) for _ in range(num_rounds)]
    return World(num_ranks, seed, tuple(a_round(draw, "stop", each, **fields) for each in victims))


needs_steps = pytest.mark.skipif(not faults_instruction.HERE, reason="steps by the trap flag of x86-64")
# Ten deaths each in the short form.
RANKS = pytest.mark.parametrize("num_ranks", [8, 4])


@RANKS
def test_killed_from_outside(num_ranks, torture):
    for seed in range(30 if torture else 1):
        run(deaths(num_ranks, seed))


@needs_steps
@RANKS
def test_killed_between_two_instructions(num_ranks, torture):
    for seed in range(100, 130 if torture else 101):
        run(deaths(num_ranks, seed, instruction=True))


def test_two_ranks_killed(torture):
    """At the same moment or nearly so. Each survivor names one of them, or both; two may find a fault at the same moment,
    and then each keeps its own."""
    for seed in range(200, 230 if torture else 201):
        draw = random.Random(seed)
        rounds = [a_round(draw, "kill", tuple(draw.sample(range(left), 2))) for left in (8, 6, 4)]
        run(World(8, seed, (*rounds, a_round(draw, "none", ()))))


STOPS = [(2, 5), (3, 5), (4, 5), (8, 5)]  # ranks, rounds: twenty in the short form


@pytest.mark.parametrize(("num_ranks", "num_rounds"), STOPS)
def test_stopped_and_resumed(num_ranks, num_rounds, torture):
    """The late rank discards what it has, and raises the same error."""
    for seed in range(300, 330 if torture else 301):
        run(stops(num_ranks, seed, num_rounds))


@needs_steps
def test_stopped_between_two_instructions(torture):
    for seed in range(400, 430 if torture else 401):
        run(stops(3, seed, 20 if torture else 4, instruction=True))


def test_two_ranks_stopped(torture):
    for seed in range(500, 520 if torture else 501):
        run(stops(4, seed, 2, num_victims=2))


def test_a_slow_rank_is_waited_for(torture):
    """Stopped again and again, for less than the deadline; and all ranks on one processor. No error, no wrong result."""
    for seed in range(600, 620 if torture else 601):
        draw = random.Random(seed)
        rounds = (a_round(draw, "slow", (draw.randrange(3),)), a_round(draw, "crowd", ()))
        run(World(3, seed, rounds))


def test_the_collective_backend(torture):
    """A death, and a stop, as far as docs/errors.md promises it: the same class in time; who it was, where torch's store
    can tell."""
    for seed in range(700, 720 if torture else 701):
        draw = random.Random(seed)
        fields = {"variant": "bulk", "backend": "collective"}
        stop = Round("stop", (draw.randrange(3),), timeout_s=STOP_TIMEOUT_S, **fields)
        kills = [Round("kill", (draw.randrange(left),), **fields) for left in (3, 2)]
        run(World(3, seed, (stop, *kills, Round("none", **fields))))
