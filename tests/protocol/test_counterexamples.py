"""Each decision of a2a_lse_reduce's protocol, turned off: the search must find the run that it prevents."""
from __future__ import annotations

import pytest
from a2a_lse_reduce import A2aLseReduce
from a2a_rules import Case, Rules, calls, low32
from explorer import Result, explore

WRAP = 2**32


def fails(case: Case, rules: Rules) -> Result:
    assert explore(A2aLseReduce(case)).ok, "the case must be fine under the rules as they are"
    return explore(A2aLseReduce(case, rules))


def contiguous_rows(row: int, num_rows: int, num_channels: int) -> int:
    return row // -(-num_rows // num_channels)


def skip_zero_only(epoch: int) -> int:
    return epoch + 1 if low32(epoch + 1) else epoch + 2


def two_less(epoch: int) -> int:
    return epoch - 2


def test_rows_of_a_channel_that_depend_on_the_number_of_rows():
    # Rounds of 3, 3, 2 rows: row 1 belongs to channel 0, 0, 1. A channel two rounds ahead meets a slower one.
    case = Case((calls(8, capacity=3),) * 2, num_channels=2)
    result = fails(case, Rules(row_channel=contiguous_rows))
    assert result.wrong == "wrong data returned: row 1 of rank 0 held call 0 round 0, not call 0 round 2"
    assert result.last == "rank 1 ch 1: confirm (epoch 6)"


def test_rows_of_a_channel_matter_between_rounds_only():
    # Between calls the channels of a rank meet, so that none is ahead: it is rounds that need row % channels.
    case = Case((calls(3, 3, 2),) * 2, num_channels=2)
    assert explore(A2aLseReduce(case, Rules(row_channel=contiguous_rows))).ok


@pytest.mark.parametrize(
    ("same_calls", "rules"),
    [
        pytest.param(calls(1, 1, 1, senders={0: {0}, 1: {0}}), Rules(signal_empty=False), id="no-rows"),
        pytest.param(calls(1, 0, 1, senders={1: set()}), Rules(signal_empty=False), id="T-0-no-signals"),
        pytest.param(calls(1, 0, 1), Rules(round_when_empty=False), id="T-0-returns-early"),
    ],
)
def test_a_rank_that_nobody_waits_for_is_overtaken(same_calls, rules):
    result = fails(Case((same_calls,) * 2, "either"), rules)
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 2 round 0, not call 0 round 0"
    assert result.last == "rank 1 ch 0: confirm (epoch 4)"
    # One call ahead is what parities are for; it takes the second to break.
    assert "rank 0 ch 0: publish row 0 to rank 1 (epoch 6)" in result.trace


def test_t_0_on_one_rank_that_returns_early_is_not_noticed():
    result = fails(Case((calls(0, 1), calls(1, 1)), "mismatch"), Rules(round_when_empty=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: wait for rank 1 (epoch 5); "
                            "rank 1 ch 0: wait for rank 0 (epoch 4)")


def test_signal_before_publish():
    result = fails(Case((calls(1),) * 2), Rules(publish_first=False))
    assert result.wrong.endswith("held nothing, not call 0 round 0")
    assert result.last == "rank 0 ch 0: confirm (epoch 4)"


def test_one_staging_buffer():
    result = fails(Case((calls(1, 1),) * 2), Rules(staging_by_parity=False))
    assert result.wrong.endswith("held call 1 round 0, not call 0 round 0")
    assert result.trace[-4:] == (
        "rank 0 ch 0: publish row 0 to rank 1 (epoch 5)",
        "rank 1 ch 0: wait for rank 0 (epoch 4)",
        "rank 1 ch 0: reduce rows 0 (epoch 4)",
        "rank 1 ch 0: confirm (epoch 4)",
    )


def test_a_flag_that_is_new_enough_whatever_its_digest():
    result = fails(Case((calls(1), calls(2)), "mismatch"), Rules(exact_match=False))
    assert result.wrong == "wrong data returned: row 1 of rank 0 held nothing, not call 0 round 0"
    assert result.last == "rank 1 ch 0: confirm (epoch 4)"


def test_a_skipped_call_of_the_same_shape_cannot_be_seen():
    # A limit, not a rule: a digest tells shapes apart, not layers. A rank that leaves out one call (its
    # argument check raised, its stream was busy) must fault its peers or never call again.
    rank_0, others = calls(1, 1, 1)[1:], calls(1, 1, 1)[:2]
    result = explore(A2aLseReduce(Case((rank_0, others, others), "mismatch")))
    assert result.wrong == "wrong data returned: row 0 of rank 1 held call 0 round 0, not call 1 round 0"
    assert result.last == "rank 0 ch 0: confirm (epoch 4)"


def test_a_wrap_that_skips_only_zero_repeats_a_parity():
    case = Case((calls(1, 1, 1),) * 2, "either", start_epochs=(WRAP - 2,) * 2)
    result = fails(case, Rules(next_epoch=skip_zero_only, old_epoch=two_less))
    assert result.wrong.endswith("held call 1 round 0, not call 0 round 0")
    assert result.last == f"rank 1 ch 0: confirm (epoch {WRAP - 1})"
    assert f"rank 0 ch 0: publish row 0 to rank 1 (epoch {WRAP + 1})" in result.trace


def test_an_old_flag_is_not_two_less_after_the_wrap():
    result = fails(Case((calls(1, 1, 1),) * 2, start_epochs=(WRAP - 2,) * 2), Rules(old_epoch=two_less))
    assert result.wrong == "a healthy call faults (mismatch)"
    assert result.last == f"rank 0 ch 0: wait for rank 1 (epoch {WRAP + 2}), mismatch"


def test_fresh_flags_that_all_hold_the_start_epoch():
    result = fails(Case((calls(1),) * 2), Rules(fill_by_parity=False))
    assert result.wrong == "a healthy call faults (mismatch)"
    assert result.last == "rank 0 ch 0: wait for rank 1 (epoch 4), mismatch"


def test_the_first_channel_to_leave_stores_the_epoch():
    # A channel that starts late reads the epoch of the next call.
    result = fails(Case((calls(2),) * 2, num_channels=2), Rules(last_stores_epoch=False))
    assert result.wrong.startswith("deadlock")
    assert "rank 1 ch 1: enter (epoch 5)" in result.trace


def test_channels_that_share_a_thread_in_another_order_on_every_rank():
    # Each rank's first channel waits for the peer's, which comes second there.
    case = Case((calls(2),) * 2, num_channels=2, channel_orders=((0, 1), (1, 0)))
    assert explore(A2aLseReduce(Case(case.calls, num_channels=2, channel_orders=((0, 1), (0, 1))))).ok
    assert explore(A2aLseReduce(case)).wrong == (
        "deadlock: rank 0 ch 0: wait for rank 1 (epoch 4); rank 0 ch 1: enter (epoch 4); "
        "rank 1 ch 0: enter (epoch 4); rank 1 ch 1: wait for rank 0 (epoch 4)")


def test_without_confirm_a_late_rank_returns_what_an_impatient_one_overwrote():
    # Takes a rank that goes on to publish after it has reported a fault: a late peer may read that.
    case = Case((calls(1, 1, 1),) * 2, "either", fates=("expire",))
    assert explore(A2aLseReduce(case, Rules(poison_self=False))).ok
    result = explore(A2aLseReduce(case, Rules(poison_self=False, confirm=False)))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 2 round 0, not call 0 round 0"
    assert result.last == "rank 1 ch 0: reduce rows 0 (epoch 4)"
    assert "rank 0 ch 0: poison rank 1 (epoch 4)" in result.trace


@pytest.mark.parametrize(("num_ranks", "num_channels"), [(3, 1), (2, 2)])
def test_confirm_is_a_second_line_of_defence_as_long_as_faulted_ranks_stay_away(num_ranks, num_channels):
    # Not a counterexample: a rank writes into a slot again only after the reader's next signal, and a rank
    # with a fault publishes no more. So staging stays untouched under a late reader, with or without confirm.
    # Where readers look at memory that callers write, confirm is what protects them: pull_reduce in
    # test_pull_lifetimes.py.
    same_calls = calls(1, 1, 1) if num_channels == 1 else calls(2, 2)
    case = Case((same_calls,) * num_ranks, "either", num_channels, fates=("expire",))
    assert explore(A2aLseReduce(case, Rules(confirm=False))).ok


def test_a_reporter_that_dies_half_way_leaves_a_rank_that_waits_for_ever():
    # Without deadlines: rank 0 is interrupted, tells rank 1 and is killed. Rank 1 stays away for good, but
    # lives; rank 2 has rank 0's flag already, so that loss is none of its business. Deadlines end this (and
    # blame rank 1); a rank that passes on the poison it adopts ends it at once, and lets the first cause
    # through.
    case = Case((calls(1, 1),) * 3, "either", fates=("interrupt", "crash", "lost"))
    result = explore(A2aLseReduce(case, Rules(forward_poison=False)))
    assert result.wrong == "deadlock: rank 2 ch 0: wait for rank 1 (epoch 4)"
    assert "rank 0 ch 0: poison rank 1 (epoch 4)" in result.trace
    assert "rank 0 ch 0: poison rank 2 (epoch 4)" not in result.trace
    assert explore(A2aLseReduce(case)).ok
