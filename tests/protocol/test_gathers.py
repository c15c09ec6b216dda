"""Lifetimes of buffers that callers see: which rules hold, and the run that each one prevents."""
from __future__ import annotations

import pytest
from explorer import explore
from gathers import kv_gather, pull_reduce, query_gather
from scripts import Scripts

PLAIN = ("start 0", "wait 0", "use 0")
AHEAD = ("wait 0", "start 1", "use 0")
FAR_AHEAD = ("start 1", "wait 0", "use 0")


def holds(model: Scripts) -> None:
    result = explore(model)
    assert result.ok, str(result)
    assert result.states > 50


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(kv_gather(2, 4, 2, PLAIN), id="2-buffers-no-prefetch"),
        pytest.param(kv_gather(2, 4, 3, AHEAD), id="3-buffers-start-after-wait"),
        pytest.param(kv_gather(3, 3, 3, AHEAD), id="3-buffers-start-after-wait-3-ranks"),
        pytest.param(kv_gather(2, 6, 4, FAR_AHEAD), id="4-buffers-start-before-wait"),
        pytest.param(kv_gather(2, 5, 2, AHEAD, with_credits=True), id="2-buffers-credits"),
        pytest.param(kv_gather(3, 4, 2, AHEAD, with_credits=True), id="2-buffers-credits-3-ranks"),
        pytest.param(kv_gather(2, 5, 3, FAR_AHEAD, with_credits=True), id="3-buffers-credits-start-early"),
    ],
)
def test_kv_gather_holds(model):
    holds(model)


@pytest.mark.parametrize(
    ("model", "last"),
    [
        pytest.param(kv_gather(2, 4, 2, AHEAD), "rank 0: use(0)", id="2-buffers-without-credits"),
        pytest.param(kv_gather(2, 5, 3, FAR_AHEAD), "rank 0: use(0)", id="3-buffers-start-before-wait"),
        pytest.param(kv_gather(2, 4, 2, PLAIN, buffer_of=(0, 1, 0, 0)), "rank 0: use(2)",
                     id="buffer-by-chunk-within-a-layer-of-3"),
    ],
)
def test_kv_gather_overwrites_a_chunk_in_use(model, last):
    result = explore(model)
    assert result.wrong.startswith("wrong data returned: ('buffer', 0, 0, 1)")
    assert result.last == last
    assert result.trace[-2].startswith("rank 1: start(")


def test_kv_gather_with_credits_cannot_start_before_the_wait_that_releases():
    # start(2) needs everybody's release of chunk 0, which is part of their wait(1): no rank gets there.
    result = explore(kv_gather(2, 5, 2, FAR_AHEAD, with_credits=True))
    assert result.wrong == ("deadlock: rank 0: start(2) waits for the release of chunk 0; "
                            "rank 1: start(2) waits for the release of chunk 0")


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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_query_gather_after_a_full_reduce_holds(num_ranks):
    holds(query_gather(num_ranks, 2))


def test_query_gather_after_a_reduce_that_does_nothing():
    result = explore(query_gather(2, 2, reduce="none"))
    assert result.wrong == "wrong data returned: ('query', 0, 1) is 2, not 1"
    assert result.last == "rank 0: attention 0"


def test_query_gather_after_a_reduce_that_leaves_out_a_rank_without_rows():
    result = explore(query_gather(3, 2, reduce="rows", rows=(0, 2)))
    assert result.wrong == "wrong data returned: ('query', 1, 0) is 2, not 1"
    assert result.last == "rank 1: attention 0"
