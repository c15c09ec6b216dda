"""Interleaved ownership: against the shared table, and against dealing out tokens one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcpkernels import layout
from dcpkernels.errors import DcpInvalidArgument

CASES = json.loads((Path(__file__).parent / "data" / "lse_merge.json").read_text())["local_lengths"]
SHARDINGS = [(1, 1), (1, 4), (2, 1), (3, 2), (4, 16), (6, 5), (8, 1)]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"n{c['n']}-w{c['num_ranks']}-i{c['interleave']}")
def test_local_lengths_of_the_table(case):
    assert layout.local_lengths(case["n"], case["num_ranks"], case["interleave"]) == case["lengths"]


@pytest.mark.parametrize(("num_ranks", "interleave"), SHARDINGS)
def test_agrees_with_dealing_out_one_by_one(num_ranks, interleave):
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    turn, run = 0, 0
    for p in range(3 * num_ranks * interleave + 2):
        assert layout.local_lengths(p, num_ranks, interleave) == [len(hand) for hand in hands]
        for rank, hand in enumerate(hands):
            assert layout.local_positions(p, num_ranks, rank, interleave) == hand
        assert layout.owner(p, num_ranks, interleave) == turn
        assert layout.local_slot(p, num_ranks, interleave) == len(hands[turn])
        hands[turn].append(p)
        run += 1
        if run == interleave:
            turn, run = (turn + 1) % num_ranks, 0


def test_positions_beyond_32_bits():
    p = 8 * 2**40 + 5
    assert layout.owner(p, 8) == 5
    assert layout.local_slot(p, 8) == 2**40
    assert layout.local_lengths(p, 8) == [2**40 + (rank < 5) for rank in range(8)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: layout.owner(-1, 4), "owner: p must be at least 0 (got -1)"),
        (lambda: layout.local_slot(3, 0), "local_slot: num_ranks must be at least 1 (got 0)"),
        (lambda: layout.local_lengths(3, 2, 0), "local_lengths: interleave must be at least 1 (got 0)"),
        (lambda: layout.local_length(3, 2, 2), "local_length: rank must be below num_ranks=2 (got 2)"),
        (lambda: layout.local_positions(3, 2, -1), "local_positions: rank must be at least 0 (got -1)"),
        (lambda: layout.owner(1.0, 4), "owner: p must be an integer (got 1.0)"),
    ],
)
def test_bad_arguments(call, text):
    with pytest.raises(DcpInvalidArgument) as caught:
        call()
    assert str(caught.value) == text
