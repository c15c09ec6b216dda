"""A rank that dies, is stopped, fails or is interrupted at any step of `Workspace(...)` and of `close()`: the others raise
typed errors in time, all make the workspace or none, nothing is left behind, and the next one can be made.

A failure prints the `Plan`, with its seed; `run(Plan(...))` runs it again.
"""

from __future__ import annotations

import pytest

from tests.torture.faults_steps import Plan, run, spread

WHERE = pytest.mark.parametrize("where", ["create", "close"])


@WHERE
@pytest.mark.parametrize(("how", "num_ranks"), [("raises", 3), ("Ctrl-C", 2)])
def test_a_step_that_raises(how, num_ranks, where, torture):
    """Nobody dies, so one world tries many steps."""
    num = (900 if torture else 9) // (1 if where == "create" else 3)
    run(Plan(num_ranks, 1, how, where, spread(num, num_ranks), deadline_s=3.0), timeout_s=3600 if torture else 90)


@WHERE
def test_a_death_at_a_step(where, torture):
    """One after the other, until one rank is left."""
    num_ranks = 5
    for seed in range(60 if torture else 1):
        run(Plan(num_ranks, seed, "dies", where, spread(num_ranks - 1, seed)), timeout_s=600 if torture else 90)


@WHERE
def test_a_stop_at_a_step(where, torture):
    """For longer than the deadline; then the rank that was stopped finds that it has been given up."""
    run(Plan(3, 2, "stops", where, spread(200 if torture else 3, 2), deadline_s=3.0), timeout_s=3600 if torture else 90)
