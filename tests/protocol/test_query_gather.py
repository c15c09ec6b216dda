"""What query_gather promises: a view that holds every rank's heads until the call that ends its life."""
from __future__ import annotations

import pytest
from a2a_rules import Case
from explorer import Result, explore
from query_gather import OPEN, QueryGather, QueryRules, query_calls

WRAP = 2**32


def holds(case: Case, shared: bool = False, rules: QueryRules = QueryRules()) -> Result:
    result = explore(QueryGather(case, rules, shared))
    assert result.ok, str(result)
    return result


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls"),
    [
        pytest.param(2, 1, query_calls("g2 r2 g1 r1 g0 r0 g2 r2"), id="T-changes"),
        pytest.param(3, 1, query_calls("g1 r1 g1 x g1"), id="three-ranks"),
        pytest.param(2, 2, query_calls("g3 r3 g2 x g3 r3 g1"), id="two-channels"),
        pytest.param(3, 1, query_calls("x g1 x x r1 g1"), id="release-of-what-is-not-open"),
        pytest.param(2, 2, query_calls("g3 r3 g3", reduce_capacity=2), id="reduce-in-rounds"),
        pytest.param(2, 2, query_calls("o5 g3", capacity=3), id="out-in-rounds-then-view"),
        pytest.param(2, 1, query_calls("g1 r1 o3 r3 o0 g1 x o1", capacity=2), id="out-and-views"),
        pytest.param(3, 1, query_calls("o2 g1", capacity=1), id="three-ranks-out"),
        pytest.param(2, 1, query_calls("g1 g1' r1 g1 r1' r1 g1' r1'"), id="two-lanes"),
        pytest.param(1, 2, query_calls("g2 r2 o5 g1 x", capacity=2), id="one-rank"),
    ],
)
def test_views_and_copies_hold_the_heads_of_all_ranks(num_ranks, num_channels, same_calls, shared):
    assert holds(Case((same_calls,) * num_ranks, num_channels=num_channels), shared).ends == 1


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
def test_gathers_go_on_across_the_wrap_of_the_epoch(distance):
    start = WRAP - distance if distance else WRAP + 2
    same_calls = query_calls("g1 r1 o2 x g1 r1", capacity=1)
    holds(Case((same_calls,) * 2, num_channels=2, start_epochs=(start,) * 2))


def test_channels_may_share_a_thread():
    case = Case((query_calls("g2 r2 o5 g2", capacity=2),) * 2, num_channels=2, channel_orders=((0, 1), ()))
    holds(case)


@pytest.mark.parametrize(
    ("callers", "num_channels"),
    [
        pytest.param(("g1 g1",) * 3, 1, id="on-all-ranks"),
        pytest.param(("g1 g1 r1", "g1 r1 g1", "g1 r1 g1"), 1, id="on-one-rank"),
        pytest.param(("g2 g2 r2", "g2 r2 g2"), 2, id="two-channels"),
        pytest.param(("g1 o1",) * 2, 1, id="by-out"),
        pytest.param(("g0 g1",) * 2, 1, id="a-view-without-rows"),
        pytest.param(("g1 r1' g1",) * 2, 1, id="reduce-on-the-other-lane"),
    ],
)
def test_a_gather_while_a_view_is_open_faults_on_every_rank(callers, num_channels):
    holds(Case(tuple(query_calls(caller) for caller in callers), OPEN, num_channels))


@pytest.mark.parametrize(
    ("callers", "num_channels"),
    [
        pytest.param(("g2 r2", "g1 r1", "g1 r1"), 1, id="gather"),
        pytest.param(("g0 r0", "g1 r1"), 2, id="gather-of-T-0"),
        pytest.param(("g1 r2", "g1 r1", "g1 r1"), 1, id="reduce"),
        pytest.param(("g1 r0", "g1 r1"), 2, id="reduce-of-T-0"),
        pytest.param(("g1 r2", "g1 r2"), 1, id="reduce-on-all-ranks"),
        pytest.param(("o4", "o2", "o2"), 1, id="more-rounds"),
        pytest.param(("o1 r1", "g1 r1", "g1 r1"), 1, id="view-and-out"),
        pytest.param(("g1 r1 x", "g1 r1 g1"), 1, id="release-and-gather"),
    ],
)
def test_different_calls_end_in_a_mismatch_on_every_rank(callers, num_channels):
    # No fates: nobody needs a deadline to find out.
    holds(Case(tuple(query_calls(caller, capacity=2) for caller in callers), "mismatch", num_channels))


@pytest.mark.parametrize(
    "callers", [("g1 x", "g1 r1"), ("r1 g1", "g1 r1"), ("g1 g1'", "g1' g1")], ids=["release", "order", "lanes"])
def test_calls_on_different_streams_are_found_by_the_deadline_only(callers):
    calls = tuple(query_calls(caller) for caller in callers)
    assert explore(QueryGather(Case(calls))).wrong.startswith("deadlock")
    holds(Case(calls, "either", fates=("expire",)))


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls", "fates"),
    [
        pytest.param(2, 1, query_calls("g1 r1 g1 x o2 g1", capacity=1), ("expire", "crash"), id="two-ranks"),
        pytest.param(2, 2, query_calls("g1 r1 g1"), ("crash", "lost", "interrupt"), id="two-channels-no-deadline"),
        pytest.param(3, 1, query_calls("g1 r1 g1"), ("expire",), id="three-ranks-late"),
        pytest.param(3, 1, query_calls("o1 g1"), ("crash", "lost", "interrupt"), id="three-ranks-no-deadline"),
    ],
)
def test_a_fault_ends_all_ranks_and_never_in_wrong_data(num_ranks, num_channels, same_calls, fates, shared):
    assert holds(Case((same_calls,) * num_ranks, "either", num_channels, fates=fates), shared).ends > 10


@pytest.mark.parametrize(
    "case",
    [
        Case((query_calls("g1 r1 o1"),) * 3),
        Case((query_calls("g1 r1 g1"),) * 2, "either", fates=("crash", "lost", "interrupt")),
        Case((query_calls("g1 g1 r1"), query_calls("g1 r1 g1")), OPEN, 2),
    ],
    ids=["data", "either", "open"],
)
def test_moves_taken_alone_hide_nothing(case):
    model = QueryGather(case)
    few, all_ = explore(model), explore(model, use_alone=False)
    assert few.ok and all_.ok
    assert few.states < all_.states
