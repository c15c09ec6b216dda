"""Every planted fault is found, each by the exploration that is meant to find it, and for the reason that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.explorer.explore import explore
from tests.explorer.mutation import Killer
from tests.explorer.mutations import MUTATIONS, NOT_FOUND
from tests.explorer.program import CSRC

KILLERS = [
    pytest.param(number, killer, id=f"{mutation.name} - {killer.scenario}")
    for number, mutation in enumerate(MUTATIONS, 1)
    for killer in mutation.killers
]


@pytest.fixture(scope="session")
def fine(mutants_program: Path) -> dict[str, str]:
    """The verdicts of scenarios without a fault, each explored once."""
    return {}


@pytest.mark.parametrize(("number", "killer"), KILLERS)
def test_a_planted_fault_is_found(mutants_program: Path, fine: dict[str, str], number: int, killer: Killer) -> None:
    name = f"{killer.scenario} {killer.fine}"
    if name not in fine:
        fine[name] = explore(mutants_program, killer.scenario, *killer.fine.split()).verdict
    assert fine[name] == "", "the scenario must be fine without the fault"
    found = explore(mutants_program, f"{killer.scenario} mutation={number}", *killer.options.split())
    assert re.match(killer.verdict, found.verdict), (found.verdict, found.trace[-3000:])


def test_the_table_is_of_this_source() -> None:
    for mutation in [*MUTATIONS, *NOT_FOUND]:
        assert mutation.killers or (mutation.reason and mutation.looked_in), f"nothing finds: {mutation.name}"
        for edit in mutation.edits:
            edit.span((CSRC / edit.file).read_text())
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 25


LOOKED_IN = [
    pytest.param(number, scenario, id=f"{mutation.name} - {scenario}")
    for number, mutation in enumerate(NOT_FOUND, len(MUTATIONS) + 1)
    for scenario in mutation.looked_in
]


@pytest.mark.parametrize(("number", "scenario"), LOOKED_IN)
def test_what_makes_no_difference(mutants_program: Path, number: int, scenario: str) -> None:
    """No faults, or none that this memory model can show (the reason is in the table): it must stay so, or the reason
    is wrong."""
    found = explore(mutants_program, f"{scenario} mutation={number}", "--max-states", "300000")
    assert found.verdict == "" and found.numbers["states"] > 0, (found.verdict, found.trace[-3000:])
