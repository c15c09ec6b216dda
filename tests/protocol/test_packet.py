"""What the packet way of a2a_lse_reduce promises."""
from __future__ import annotations

import pytest
from a2a_packet import A2aPacket, PacketRules
from a2a_rules import Case, calls
from explorer import Result, explore

WRAP = 2**32


def holds(case: Case, rules: PacketRules = PacketRules()) -> Result:
    result = explore(A2aPacket(case, rules))
    assert result.ok, str(result)
    return result


@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls"),
    [
        pytest.param(2, 1, calls(2, 1, 0, 2, 1, 2), id="two-ranks-T-changes"),
        pytest.param(2, 1, calls(2, 0, 1, 0, 2), id="a-row-that-was-longer-two-rounds-ago"),
        pytest.param(3, 1, calls(1, 0, 1), id="three-ranks-T-0"),
        pytest.param(2, 2, calls(2, 1, 2), id="two-channels"),
        pytest.param(2, 2, calls(5, 1, capacity=3), id="two-channels-rounds"),
        pytest.param(3, 1, calls(2, 1, capacity=1), id="three-ranks-rounds"),
        pytest.param(1, 2, calls(2, 0, 3, capacity=2), id="one-rank"),
    ],
)
def test_every_call_returns_the_merge_of_all_ranks(num_ranks, num_channels, same_calls):
    assert holds(Case((same_calls,) * num_ranks, num_channels=num_channels)).ends == 1


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(PacketRules(), id="not-sent"),
        pytest.param(PacketRules(sends_empty=True), id="sent-and-not-awaited"),
        pytest.param(PacketRules(sends_empty=True, lses_tell=False), id="sent-and-awaited"),
    ],
)
def test_rows_that_are_empty_lie_over_full_ones_of_two_rounds_ago(rules):
    holds(Case((calls(1, 1, 1, 1, 1, senders={2: {0}, 3: set()}),) * 2), rules)


def test_flags_of_calls_need_no_order_after_the_packets():
    for rules in (PacketRules(publish_first=False), PacketRules(publish_first=False, sends_empty=True)):
        holds(Case((calls(1, 2, 1, senders={1: {0}}),) * 2), rules)
        holds(Case((calls(2, 1), calls(1, 1)), "mismatch"), rules)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_calls_go_on_across_the_wrap_of_the_epoch(distance):
    holds(Case((calls(1, 2, 1, 2),) * 2, start_epochs=(WRAP - distance,) * 2))


def test_channels_may_share_a_thread():
    holds(Case((calls(2, 0, 2),) * 2, num_channels=2, channel_orders=((0, 1), ())))


@pytest.mark.parametrize(
    "calls_of_rank",
    [
        pytest.param((calls(2, 1), calls(1, 1)), id="other-T"),
        pytest.param((calls(0, 1), calls(1, 1)), id="T-0-on-one-rank"),
        pytest.param((calls(1, 1), calls(2, 1), calls(0, 1)), id="three-ranks-three-opinions"),
        pytest.param((calls(4, 1, capacity=2), calls(2, 1, capacity=2)), id="more-rounds"),
    ],
)
def test_different_calls_end_in_a_mismatch_on_every_rank(calls_of_rank):
    holds(Case(calls_of_rank, "mismatch"))


def test_a_rank_two_epochs_ahead_never_gets_or_gives_data():
    holds(Case((calls(1, 1),) * 3, "mismatch", start_epochs=(5, 3, 3)))


@pytest.mark.parametrize(
    ("calls_of_rank", "num_channels", "fates"),
    [
        pytest.param((calls(1, 2, 0, 1),) * 2, 1, ("expire", "crash"), id="two-ranks-crash"),
        pytest.param((calls(2, 1),) * 2, 2, ("crash", "lost"), id="two-channels-no-deadline"),
        pytest.param((calls(1, 0, senders={0: {0, 2}}),) * 3, 1, ("expire",), id="three-ranks-late"),
        pytest.param((calls(1, 1),) * 3, 1, ("crash", "lost", "interrupt"), id="three-ranks-no-deadline"),
        pytest.param((calls(1, 1), calls(2, 1)), 1, ("crash", "lost"), id="different-calls-and-a-crash"),
    ],
)
def test_a_fault_ends_all_ranks_and_never_in_wrong_data(calls_of_rank, num_channels, fates):
    assert holds(Case(calls_of_rank, "either", num_channels, fates=fates)).ends > 5


def test_moves_taken_alone_hide_nothing():
    for case in (Case((calls(1, 0, 1),) * 2), Case((calls(1, 1),) * 2, "either", fates=("crash", "lost"))):
        few, all_ = explore(A2aPacket(case)), explore(A2aPacket(case), use_alone=False)
        assert few.ok and all_.ok
