"""Lifetimes of partial outputs that peers read: which rules hold, and the run that each one prevents."""
from __future__ import annotations

import pytest
from explorer import explore
from pull_lifetimes import pull_reduce
from scripts import Scripts


def holds(model: Scripts) -> None:
    result = explore(model)
    assert result.ok, str(result)
    assert result.states > 50


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(pull_reduce(2, (0, 1, 0, 1)), id="two-buffers"),
        pytest.param(pull_reduce(3, (0, 1, 0, 1)), id="two-buffers-3-ranks"),
        pytest.param(pull_reduce(2, (0, 0, 0), gather_between=True), id="one-buffer-a-gather-between"),
        pytest.param(pull_reduce(2, (0, 1, 0, 1), faults=True), id="two-buffers-late-rank"),
        pytest.param(pull_reduce(3, (0, 1, 0), faults=True), id="two-buffers-late-rank-3-ranks"),
    ],
)
def test_pull_reduce_holds(model):
    holds(model)


def test_pull_reduce_from_one_buffer():
    result = explore(pull_reduce(2, (0, 0, 0)))
    assert result.wrong == "wrong data returned: ('partial_out', 0, 0) is 2, not 1"
    assert result.last == "rank 1: reduce 0 reads partial_out[0] of its peers"


def test_pull_reduce_in_a_captured_graph_with_an_odd_number_of_calls():
    # Three calls were captured with buffers 0, 1, 0; the replay starts with 0 again.
    result = explore(pull_reduce(2, (0, 1, 0, 0)))
    assert result.wrong == "wrong data returned: ('partial_out', 0, 0) is 4, not 3"
    assert result.last == "rank 1: reduce 2 reads partial_out[0] of its peers"


def test_pull_reduce_without_confirm_returns_what_a_later_attention_wrote():
    result = explore(pull_reduce(2, (0, 1, 0), faults=True, confirm=False))
    assert result.wrong == "wrong data returned: ('partial_out', 0, 0) is 3, not 1"
    assert result.last == "rank 1: reduce 0 reads partial_out[0] of its peers"
    assert "rank 0: reduce 0 poisons rank 1" in result.trace


def test_pull_reduce_whose_ranks_do_not_pass_on_poison():
    # Rank 0 has told rank 1, not yet rank 2. Rank 1 adopts and returns, its attention writes; rank 2 reads
    # that, and its confirm finds no poison. So a rank returns from a fault, adopted or not, after all readers
    # know of it.
    result = explore(pull_reduce(3, (0, 1, 0), faults=True, forward_poison=False))
    assert result.wrong == "wrong data returned: ('partial_out', 1, 0) is 3, not 1"
    assert result.last == "rank 2: reduce 0 reads partial_out[0] of its peers"
    assert "rank 0: reduce 0 poisons rank 1" in result.trace
    assert "rank 0: reduce 0 poisons rank 2" not in result.trace
