"""Hours of ordinary use in one process: workspaces of two groups and of both backends side by side, with every op, number
of tokens, lane, wire and way to pass tensors mixed at random, and every result checked in every bit."""

from __future__ import annotations

import pytest

from dcpkernels.testing import run_ranks
from tests.torture.soak_ranks import SITES, members, soak

# Calls of the short and of the long form; a million of the long ones together.
RUNS = [
    ("process", 2, 9_000, 650_000),
    ("process", 4, 4_000, 250_000),
    ("process", 8, 1_500, 100_000),
    ("thread", 2, 4_000, 60_000),
    ("thread", 3, 1_500, 20_000),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode, num_ranks, short, long", RUNS, ids=lambda value: str(value))
def test_mixed_calls(mode, num_ranks, short, long, torture, capsys):
    """No result is late, torn, of another call, lane, workspace or group; nothing is left open."""
    num_calls = long if torture else short
    results = run_ranks(soak, num_ranks, num_calls, 17, torture, mode=mode, timeout_s=6 * 3600.0 if torture else 300.0)
    for idx, (which, weight, _, _) in enumerate(SITES):
        counts = {results[rank]["calls"][idx] for rank in members(which, num_ranks)}
        assert len(counts) == 1 and counts.pop() > num_calls * weight / 200, (which, counts)
    if mode == "process":  # thread ranks make and close workspaces while others count
        for result in results:
            before, after = result["descriptors"]
            assert after == before, "descriptors are left open by workspaces that were made anew"
    seconds = max(result["seconds"] for result in results)
    with capsys.disabled():
        print(f"\n[soak, {num_ranks} {mode} ranks: {num_calls} calls, {num_calls / seconds:.0f} a second]")
