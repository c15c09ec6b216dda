"""Each decision about query_gather's one buffer, turned off: the search must find the run that it prevents."""
from __future__ import annotations

import pytest
from a2a_rules import Case
from explorer import Result, explore
from query_gather import OPEN, QueryGather, QueryRules, query_calls

OVERWRITTEN = "wrong data returned: row 0 of rank 0 held call {} round 0, not call 0 round 0"


def fails(case: Case, rules: QueryRules, shared: bool = False) -> Result:
    assert explore(QueryGather(case, shared=shared)).ok, "the case must be fine under the rules as they are"
    return explore(QueryGather(case, rules, shared))


def two_ranks(caller: str, num_channels: int = 1, capacity: int = 8, promise: str = "data") -> Case:
    return Case((query_calls(caller, capacity),) * 2, promise, num_channels)


def contiguous_rows(row: int, num_rows: int, num_channels: int) -> int:
    return row // -(-num_rows // num_channels)


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    ("caller", "rules"),
    [
        pytest.param("g1 g1", QueryRules(open_word=False), id="two-views"),
        pytest.param("g1 o1", QueryRules(open_word_of_out=False), id="out-while-a-view-is-open"),
    ],
)
def test_a_gather_that_does_not_look_whether_a_view_is_open(caller, rules, shared):
    result = fails(two_ranks(caller, promise=OPEN), rules, shared)
    assert result.wrong == OVERWRITTEN.format(1)
    assert result.last == "rank 1 ch 0: attend (epoch 5)"  # rank 0 is in its second gather


def test_a_release_that_is_no_round():
    result = fails(two_ranks("g1 x g1"), QueryRules(release_round=False))
    assert result.wrong == OVERWRITTEN.format(2)
    assert result.last == "rank 1 ch 0: attend (epoch 5)"


def test_a_reduce_of_other_rows_than_the_gather_had():
    # T = 0 returns early, after a gather that had rows.
    rules = QueryRules(reduce_checks_rows=False, round_when_empty=False)
    result = fails(two_ranks("g1 r0 g1", promise="mismatch"), rules)
    assert result.wrong == OVERWRITTEN.format(2)


def test_views_without_rows_need_no_full_round():
    # Not a counterexample: as long as a reduce has the gather's T, there is nothing to read where it returns
    # early. Rows of a2a_lse_reduce itself need that round.
    assert explore(QueryGather(two_ranks("g0 r0 g1 r1 g0 r0 g1"), QueryRules(round_when_empty=False))).ok


def test_a_reduce_that_closes_the_view_when_it_enters():
    # Not a counterexample: its caller makes no other call before this one is over, and none after a fault.
    rules, same_calls = QueryRules(closes_last=False), query_calls("g2 r2 g2")
    assert explore(QueryGather(Case((same_calls,) * 2, num_channels=2), rules)).ok
    assert explore(QueryGather(Case((same_calls,) * 2, "either", fates=("expire", "crash")), rules)).ok


def test_out_without_an_empty_epoch_after_the_copy():
    result = fails(two_ranks("o2", capacity=1), QueryRules(empty_epoch=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 0 round 1, not call 0 round 0"
    result = fails(two_ranks("o1 g1"), QueryRules(empty_epoch=False))  # the last round needs it too
    assert result.wrong == OVERWRITTEN.format(1)


def test_rows_of_a_channel_that_depend_on_the_number_of_rows_of_out():
    result = fails(two_ranks("o8", 2, capacity=3), QueryRules(row_channel=contiguous_rows))
    assert result.wrong == "wrong data returned: row 1 of rank 0 held call 0 round 0, not call 0 round 2"
    # Between calls the channels of a rank meet. It is rounds that need it.
    assert explore(QueryGather(two_ranks("g3 r3 g2 r2 g3", 2), QueryRules(row_channel=contiguous_rows))).ok


def test_a_view_and_out_of_one_digest():
    # One rank passes out=, the other does not. The first is in a second epoch that the other one never enters.
    assert explore(QueryGather(Case((query_calls("o1 r1"), query_calls("g1 r1")), "mismatch"))).ok
    same = tuple(query_calls(caller, digest_says_view=False) for caller in ("o1 r1", "g1 r1"))
    assert explore(QueryGather(Case(same, "mismatch"))).wrong == (
        "deadlock: rank 0 ch 0: wait for rank 1 (epoch 5); rank 1 ch 0: wait for rank 0 (epoch 4)")


def test_a_rank_that_poisons_its_peers_and_not_itself():
    # Rank 0 gives up its gather, and its open word stays 0. Its caller goes on, up to the next gather; that
    # overwrites what rank 1, which had all flags, still reads. Staging is safe in that case: test_protocol.py.
    case = Case((query_calls("g1 r1 g1"),) * 2, "either", fates=("expire",))
    result = fails(case, QueryRules(poison_self=False))
    assert result.wrong == OVERWRITTEN.format(2)
    assert "rank 0 ch 0: wait for rank 1 (epoch 4), expire" in result.trace


def test_a_view_is_safe_without_confirm_as_long_as_faulted_ranks_stay_away():
    # Not a counterexample: who overwrites it has the reader's next signal, of its reduce or its empty epoch.
    case = Case((query_calls("g1 r1 o2 g1", capacity=1),) * 2, "either", fates=("expire", "crash"))
    assert explore(QueryGather(case, QueryRules(confirm=False))).ok


def test_a_reporter_that_dies_half_way_leaves_a_rank_in_its_gather_for_ever():
    case = Case((query_calls("g1 r1"),) * 3, "either", fates=("interrupt", "crash", "lost"))
    result = fails(case, QueryRules(forward_poison=False))
    assert result.wrong == "deadlock: rank 2 ch 0: wait for rank 1 (epoch 4)"
    assert "rank 0 ch 0: poison rank 2 (epoch 4)" not in result.trace
