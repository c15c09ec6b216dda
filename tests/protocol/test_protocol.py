"""What the protocol of a2a_lse_reduce promises, over every interleaving of small cases."""
from __future__ import annotations

import pytest
from a2a_lse_reduce import A2aLseReduce
from a2a_rules import Case, Rules, calls, next_epoch, old_epoch, previous_epoch
from explorer import Result, TooManyStates, explore

WRAP = 2**32


def holds(case: Case, rules: Rules = Rules()) -> Result:
    result = explore(A2aLseReduce(case, rules))
    assert result.ok, str(result)
    return result


@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls"),
    [
        pytest.param(2, 1, calls(2, 1, 0, 2), id="two-ranks-T-changes"),
        pytest.param(3, 1, calls(1, 1, 0, 1), id="three-ranks-T-changes"),
        pytest.param(2, 2, calls(2, 2, 1, 2), id="two-channels-T-changes"),
        pytest.param(2, 2, calls(3, 0, 1), id="two-channels-with-T-0"),
        pytest.param(2, 2, calls(8, capacity=3), id="two-channels-rounds-of-3-3-2"),
        pytest.param(2, 2, calls(5, 0, 1, capacity=3), id="rounds-then-T-0"),
        pytest.param(3, 1, calls(3, 0, 2, capacity=2), id="three-ranks-rounds"),
        pytest.param(4, 1, calls(1, 0), id="four-ranks"),
        pytest.param(1, 2, calls(2, 0, 3, capacity=2), id="one-rank"),
        pytest.param(2, 1, calls(1, 1, 1, senders={0: {0}, 1: {0}}), id="rank-1-has-no-rows-twice"),
        pytest.param(3, 1, calls(1, 1, 1, senders={0: {0, 2}, 1: set(), 2: {1}}), id="some-have-no-rows"),
    ],
)
def test_every_call_returns_the_merge_of_all_ranks(num_ranks, num_channels, same_calls):
    result = holds(Case((same_calls,) * num_ranks, num_channels=num_channels))
    assert result.ends == 1  # whatever the schedule, all end the same way


@pytest.mark.parametrize("orders", [((0, 1, 2), (0, 1, 2)), ((0, 1, 2), ())], ids=["all-share", "one-rank-shares"])
def test_channels_may_share_a_thread(orders):
    holds(Case((calls(5, 0, 3, capacity=3),) * 2, num_channels=3, channel_orders=orders))


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_channels"), [(2, 1), (2, 2), (3, 1)])
def test_calls_go_on_across_the_wrap_of_the_epoch(num_ranks, num_channels, distance):
    same_calls = calls(1, 1, 1) if num_ranks == 3 else calls(2, 2, 2, 2)
    start = next_epoch(WRAP - 1) if distance == 0 else WRAP - distance
    holds(Case((same_calls,) * num_ranks, num_channels=num_channels, start_epochs=(start,) * num_ranks))


def test_epochs_alternate_parity_and_skip_untouched_memory():
    epochs = [WRAP - 4]
    for _ in range(7):
        epochs.append(next_epoch(epochs[-1]))
    assert [epoch - WRAP for epoch in epochs] == [-4, -3, -2, -1, 2, 3, 4, 5]
    assert [epoch & 1 for epoch in epochs] == [0, 1] * 4
    assert [previous_epoch(epoch) for epoch in epochs[1:]] == epochs[:-1]
    assert [old_epoch(epoch) for epoch in epochs[2:]] == epochs[:-2]


@pytest.mark.parametrize(
    ("num_channels", "calls_of_rank"),
    [
        pytest.param(1, (calls(2, 1), calls(1, 1)), id="other-T"),
        pytest.param(1, (calls(2, 2), calls(2, 1)), id="other-T-later"),
        pytest.param(1, (calls(0, 1), calls(1, 1)), id="T-0-on-one-rank"),
        pytest.param(2, (calls(2, 1, 2), calls(2, 2, 2)), id="two-channels"),
        pytest.param(1, (calls(2, 1), calls(2, 2), calls(2, 2)), id="three-ranks"),
        pytest.param(1, (calls(1, 1), calls(2, 1), calls(0, 1)), id="three-ranks-three-opinions"),
        pytest.param(1, (calls(4, 1, capacity=2), *[calls(2, 1, capacity=2)] * 2), id="more-rounds"),
        pytest.param(1, (calls(1, 2, 1)[1:], *[calls(1, 2, 1)[:2]] * 2), id="rank-0-skipped-a-call"),
    ],
)
def test_different_calls_end_in_a_mismatch_on_every_rank(num_channels, calls_of_rank):
    # No fates: nobody needs a deadline to find out.
    holds(Case(calls_of_rank, "mismatch", num_channels))


@pytest.mark.parametrize("fates", [(), ("expire", "crash")])
def test_a_rank_two_epochs_ahead_never_gets_or_gives_data(fates):
    case = Case((calls(1, 1),) * 3, "either" if fates else "mismatch", start_epochs=(5, 3, 3), fates=fates)
    holds(case)


def test_a_rank_one_epoch_ahead_is_found_by_the_deadline_only():
    # Its flags lie in the other parity, where they look like those of a peer that has come one call further.
    ahead = (calls(1, 1),) * 3
    assert explore(A2aLseReduce(Case(ahead, "mismatch", start_epochs=(4, 3, 3)))).wrong.startswith("deadlock")
    holds(Case(ahead, "either", start_epochs=(4, 3, 3), fates=("expire",)))


@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls", "fates"),
    [
        pytest.param(2, 1, calls(1, 2, 0, 1), ("expire", "crash"), id="two-ranks-crash"),
        pytest.param(2, 2, calls(2, 2), ("expire", "crash"), id="two-channels-crash"),
        pytest.param(2, 2, calls(5, capacity=3), ("expire",), id="two-channels-rounds"),
        pytest.param(3, 1, calls(1, 1, 1), ("expire",), id="three-ranks-late"),
        pytest.param(3, 1, calls(1, 0, 1), ("expire", "crash"), id="three-ranks-crash"),
        pytest.param(3, 1, calls(1, 1), ("interrupt",), id="interrupt-without-deadline"),
        pytest.param(3, 1, calls(1, 1, 1), ("crash", "lost"), id="lost-peer-without-deadline"),
        pytest.param(2, 2, calls(2, 2), ("crash", "lost", "interrupt"), id="two-channels-without-deadline"),
    ],
)
def test_a_fault_ends_all_ranks_and_never_in_wrong_data(num_ranks, num_channels, same_calls, fates):
    result = holds(Case((same_calls,) * num_ranks, "either", num_channels, fates=fates))
    assert result.ends > 10  # faults were possible in many places


@pytest.mark.parametrize(("num_ranks", "same_calls"), [(2, calls(1, 1, 1, 1)), (3, calls(1, 1))])
@pytest.mark.parametrize(
    "rules", [Rules(poison_self=False), Rules(forward_poison=False)], ids=["peers-only", "not-forwarded"])
def test_other_ways_to_spread_poison_are_safe_as_well(rules, num_ranks, same_calls):
    holds(Case((same_calls,) * num_ranks, "either", fates=("expire", "crash")), rules)


def test_different_calls_with_deadlines_and_a_crash_on_top():
    holds(Case((calls(2, 1), *[calls(1, 1)] * 2), "either", fates=("expire", "crash")))


@pytest.mark.parametrize(
    "case",
    [
        Case((calls(1, 0, 1),) * 3),
        Case((calls(1, 1),) * 2, "either", 2, fates=("crash", "lost", "interrupt")),
        Case((calls(1, 1), calls(2, 1)), "mismatch", 2),
    ],
    ids=["data", "either", "mismatch"],
)
def test_moves_taken_alone_hide_nothing(case):
    model = A2aLseReduce(case)
    few, all_ = explore(model), explore(model, use_alone=False)
    assert few.ok and all_.ok
    assert few.states < all_.states


def test_a_search_that_is_cut_off_shows_nothing():
    with pytest.raises(TooManyStates):
        explore(A2aLseReduce(Case((calls(1, 1),) * 3)), max_states=100)
