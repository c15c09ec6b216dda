"""What the pull way of a2a_lse_reduce promises: payload is read where its source, or its source's caller, wrote it."""
from __future__ import annotations

import pytest
from a2a_pull import A2aPull, PullRules
from a2a_rules import Case, calls
from explorer import Result, explore

WRAP = 2**32


def holds(case: Case, callers: tuple[str, ...] = (), rules: PullRules = PullRules()) -> Result:
    result = explore(A2aPull(case, rules, callers))
    assert result.ok, str(result)
    return result


@pytest.mark.parametrize(
    ("same_calls", "callers", "num_channels"),
    [
        pytest.param(calls(2, 1, 0, 2), ("ozozozoz", "ozozozoz"), 1, id="buffers-T-changes"),
        pytest.param(calls(2, 1, 0, 2), ("cccc", "cccc"), 1, id="tensors-T-changes"),
        pytest.param(calls(1, 2, 1), ("ozozoz", "ccc"), 1, id="one-rank-copies"),
        pytest.param(calls(1, 1, 1, 1), ("occzoc", "cozcc"), 1, id="tensors-while-a-buffer-is-out"),
        pytest.param(calls(1, 1, 1), ("ozoocooz", "oocoocoz"), 1, id="buffers-that-are-not-used"),
        pytest.param(calls(5, 1, 3, capacity=2), ("ccc", "occc"), 1, id="rounds-with-copies"),
        pytest.param(calls(1, 3, 0, 1, capacity=1), ("ozocozc", "cocczo"), 1, id="rounds-between-buffers"),
        pytest.param(calls(1, 1, 1, 1), ("ovocovc", "cccc"), 1, id="views"),
        pytest.param(calls(2, 1, 2), ("occz", "occz"), 2, id="two-channels"),
        pytest.param(calls(2, 2, 2), ("ovocovo", "ccc"), 2, id="two-channels-views"),
        pytest.param(calls(5, 1, capacity=2), ("coz", "cc"), 2, id="two-channels-rounds"),
        pytest.param(calls(1, 1, 1), ("ozozozo", "ccc", "occz"), 1, id="three-ranks"),
        pytest.param(calls(3, 0, capacity=2), ("cc", "occ", "coz"), 1, id="three-ranks-rounds"),
        pytest.param(calls(1, 2), ("ozoozo",), 2, id="one-rank"),
    ],
)
def test_every_call_returns_what_the_callers_wrote(same_calls, callers, num_channels):
    assert holds(Case((same_calls,) * len(callers), num_channels=num_channels), callers).ends == 1


def test_ranks_without_rows_are_waited_for_and_release_too():
    same_calls = calls(1, 1, 1, senders={0: {0}, 1: set(), 2: {1}})
    holds(Case((same_calls,) * 2), ("ozoozoz", "occz"))


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_credits_go_on_across_the_wrap_of_the_epoch(distance):
    case = Case((calls(1, 3, 1, 1, capacity=1),) * 2, start_epochs=(WRAP - distance,) * 2)
    holds(case, ("cococz", "cccoz"))


@pytest.mark.parametrize(
    ("same_calls", "callers"), [(calls(4, 2, 2, capacity=2), ("covc", "occz")), (calls(2, 2, 2), ("ovocz", "cozc"))])
def test_channels_that_share_a_thread_wait_for_no_channel_after_them(same_calls, callers):
    holds(Case((same_calls,) * 2, num_channels=2, channel_orders=((0, 1),) * 2), callers)
    holds(Case((same_calls,) * 2, num_channels=2, channel_orders=((0, 1), ())), callers)


@pytest.mark.parametrize(
    ("calls_of_rank", "callers"),
    [
        pytest.param((calls(1, 2, 1), calls(1, 1, 1)), ("occz", "ozozoz"), id="other-T"),
        pytest.param((calls(1, 0), calls(1, 1)), ("occo", "ccoo"), id="T-0-on-one-rank"),
        pytest.param((calls(1, 2), calls(1, 1), calls(1, 1)), ("occ", "ozoz", "ozc"), id="three-ranks"),
        pytest.param((calls(3, 1, capacity=1), calls(2, 1, capacity=1)), ("cc", "occ"), id="more-rounds"),
    ],
)
def test_different_calls_end_in_a_mismatch_on_every_rank(calls_of_rank, callers):
    holds(Case(calls_of_rank, "mismatch"), callers)


@pytest.mark.parametrize(
    ("same_calls", "callers", "num_channels", "fates"),
    [
        pytest.param(calls(1, 0, 2, 1), ("ozoozcozo", "occzc"), 1, ("expire", "crash"), id="two-ranks"),
        pytest.param(calls(1, 4, 1, capacity=2), ("cocz", "occz"), 1, ("expire", "crash"), id="rounds"),
        pytest.param(calls(2, 1), ("ovc", "coz"), 2, ("crash", "lost", "interrupt"), id="two-channels-no-deadline"),
        pytest.param(calls(3, capacity=2), ("co", "oc"), 2, ("interrupt",), id="two-channels-rounds"),
        pytest.param(calls(1, 1), ("ozooz", "ozc", "cco"), 1, ("expire",), id="three-ranks-late"),
        pytest.param(calls(1, 1), ("cco", "ozooz", "ozc"), 1,
                     ("crash", "lost", "interrupt"), id="three-ranks-no-deadline"),
    ],
)
def test_a_fault_ends_all_ranks_and_never_in_wrong_data(same_calls, callers, num_channels, fates):
    # The owner writes into both buffers as soon as its call has failed. A reader that faults releases nothing:
    # poison tells the owner, who waits for the release. Nobody waits for ever, with a deadline or without.
    assert holds(Case((same_calls,) * len(callers), "either", num_channels, fates=fates), callers).ends > 10


@pytest.mark.parametrize(
    ("case", "callers"),
    [
        (Case((calls(1, 1),) * 3), ("ozoz", "cc", "occ")),
        (Case((calls(1, 1, 1),) * 2, "either", fates=("crash", "lost", "interrupt")), ("occz", "ozoozc")),
        (Case((calls(1, 1), calls(2, 1)), "mismatch", 2), ("occ", "ovc")),
    ],
    ids=["data", "either", "mismatch"],
)
def test_moves_taken_alone_hide_nothing(case, callers):
    model = A2aPull(case, callers=callers)
    few, all_ = explore(model), explore(model, use_alone=False)
    assert few.ok and all_.ok
    assert few.states <= all_.states
