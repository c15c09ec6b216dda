"""Each decision of the pull way, turned off: the search must find the run that it prevents."""
from __future__ import annotations

from functools import cache

import pytest
from a2a_pull import A2aPull, PullRules, equal_credit, low_half_credit, no_credit, parity_credit
from a2a_rules import Case, calls
from explorer import Result, explore

WRAP = 2**32


@cache
def is_fine(case: Case, callers: tuple[str, ...]) -> bool:
    return explore(A2aPull(case, callers=callers)).ok


def fails(case: Case, callers: tuple[str, ...], rules: PullRules) -> Result:
    assert is_fine(case, callers), "the case must be fine under the rules as they are"
    return explore(A2aPull(case, rules, callers))


def two_ranks(*tokens: int, capacity: int = 8, num_channels: int = 1) -> Case:
    return Case((calls(*tokens, capacity=capacity),) * 2, num_channels=num_channels)


@pytest.mark.parametrize(
    "rules", [PullRules(credit=no_credit), PullRules(kernel_awaits=False)], ids=["no-credit", "acquire-skipped"])
@pytest.mark.parametrize(
    ("case", "callers", "held"),
    [
        pytest.param(two_ranks(1, 1, 1), ("occz", "ccc"), "call 1 round 0", id="the-other-buffer-is-out"),
        pytest.param(two_ranks(2, capacity=1), (), "call 0 round 1", id="rounds-of-one-call"),
    ],
)
def test_a_copy_into_a_buffer_that_is_being_read(case, callers, held, rules):
    result = fails(case, callers, rules)
    assert result.wrong == f"wrong data returned: row 0 of rank 0 held {held}, not call 0 round 0"
    assert [step for step in result.trace if step.startswith("rank 0 ch 0: acquire")][1:]  # it copied once more


def test_a_partial_out_that_does_not_wait():
    # The second buffer is handed out and not used, so that the first one comes round after a single call.
    result = fails(two_ranks(1, 1), ("ozooz", "cc"), PullRules(host_awaits=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 1 round 0, not call 0 round 0"
    assert result.trace[-6:-4] == ("rank 0 ch 0: partial_out buffer 0 (epoch 5)", "rank 0 ch 0: enter (epoch 5)")


def test_buffers_that_strictly_take_turns_need_no_credit():
    # Not a counterexample: here two parities are enough, as for staging. Credits are for callers that hand out
    # and do not use, or copy in between, as any engine does that has two code paths.
    rules = PullRules(credit=no_credit)
    assert explore(A2aPull(two_ranks(1, 1, 1, 1), rules, ("ozozozoz", "ozozozoz"))).ok
    assert explore(A2aPull(two_ranks(1, 1, 1, 1), rules, ("ozozozoz", "cccc"))).ok


def test_copies_that_do_not_spare_a_buffer_that_is_out():
    result = fails(two_ranks(1, 1, 1), ("occz", "ccc"), PullRules(copies_spare_handed_out=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 1 round 0, not call 2 round 0"


def test_a_credit_before_the_reads():
    result = fails(two_ranks(1, 1, 1), ("occz", "ccc"), PullRules(release_last=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 1 round 0, not call 0 round 0"
    assert result.trace[-4:] == (
        "rank 1 ch 0: release rank 0 (epoch 4)",
        "rank 0 ch 0: acquire buffer 1 (epoch 5)",
        "rank 1 ch 0: reduce rows 0 (epoch 4)",
        "rank 1 ch 0: confirm (epoch 4)",
    )


def test_a_credit_that_only_says_which_parity():
    # The release of epoch 4 is taken for that of epoch 6.
    result = fails(two_ranks(4, capacity=1), (), PullRules(credit=parity_credit))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 0 round 3, not call 0 round 2"


def test_a_credit_of_exactly_the_epoch_of_use():
    # A buffer that rests while the other one is used: its readers have gone on, to a later epoch of that parity.
    result = fails(two_ranks(1, 3, 1, capacity=1), (), PullRules(credit=equal_credit))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 0 (epoch 8); "
                            "rank 1 ch 0: acquire buffer 0 (epoch 8)")


def test_a_credit_of_32_bits():
    # The low half of an epoch before the wrap is larger than that of any epoch soon after it.
    case = Case((calls(5, capacity=1),) * 2, start_epochs=(WRAP - 3,) * 2)
    result = fails(case, (), PullRules(credit=low_half_credit))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 0 round 3, not call 0 round 2"


def test_a_credit_looked_for_in_the_line_of_the_current_round():
    result = fails(two_ranks(1, 1, 1), ("occz", "ccc"), PullRules(credit_line_of_use=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 1 (epoch 5); "
                            "rank 1 ch 0: wait for rank 0 (epoch 5)")


def test_no_release_of_a_round_without_rows():
    result = fails(two_ranks(0, 0, 0), ("occz", "ccc"), PullRules(release_empty=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 1 (epoch 5); "
                            "rank 1 ch 0: wait for rank 0 (epoch 5)")


def test_acquire_of_a_channel_that_looks_at_its_own_credit_only():
    # A view may start at any row of a buffer, with any strides: what one channel of a peer reads of it lies where
    # another channel will copy to. Here row 1 of the buffer is row 0 of the call, of channel 0.
    case = two_ranks(2, 2, num_channels=2)
    result = fails(case, ("ovoc", "cc"), PullRules(acquire_from="own"))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 1 round 0, not call 0 round 0"
    assert result.trace[-4:] == (
        "rank 0 ch 1: acquire buffer 0 (epoch 5)",
        "rank 1 ch 0: reduce rows 0 (epoch 4)",
        "rank 1 ch 0: release rank 0 (epoch 4)",
        "rank 1 ch 0: confirm (epoch 4)",
    )
    # Copies lie row by row, so that its own credit is enough where there are no views.
    assert explore(A2aPull(case, PullRules(acquire_from="own"), ("ozoc", "cc"))).ok


def test_acquire_of_a_channel_that_waits_for_all_channels_in_every_round():
    # Channels that share a thread run one after the other: the first one's second round would wait for the
    # second one's first. From a call before, all channels have done their part.
    shared = Case((calls(4, capacity=2),) * 2, num_channels=2, channel_orders=((0, 1),) * 2)
    result = fails(shared, (), PullRules(acquire_from="all"))
    assert result.wrong.startswith("deadlock: rank 0 ch 0: acquire buffer 0 (epoch 5); rank 0 ch 1: enter (epoch 4)")


def test_a_descriptor_after_the_flag():
    result = fails(two_ranks(1), (), PullRules(descriptor_first=False))
    assert result.wrong == "wrong data returned: row 0 of rank 1 held nothing, not call 0 round 0"


def test_a_buffer_chosen_by_parity():
    # What a caller holds is not for the epoch to decide: rank 1 looks into the buffer that its own parity names.
    result = fails(two_ranks(1, 1, 1), ("occz", "ccc"), PullRules(reads_by_descriptor=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held call 2 round 0, not call 0 round 0"


@pytest.mark.parametrize("rules", [PullRules(confirm_last=False), PullRules(confirm=False)], ids=["early", "none"])
def test_a_late_rank_that_does_not_confirm_after_its_reads(rules):
    # Rank 0 gives up, poisons rank 1 and returns; its caller writes. Unlike staging, a buffer does not stay
    # untouched under a late reader.
    case = Case((calls(1, 1),) * 2, "either", fates=("expire",))
    result = fails(case, ("ozoz", "ozoz"), rules)
    assert result.wrong == "wrong data returned: row 0 of rank 0 held what no call passes, not call 0 round 0"
    assert result.last == "rank 1 ch 0: reduce rows 0 (epoch 4)"
    assert "rank 0 ch 0: poison rank 1 (epoch 4)" in result.trace


@pytest.mark.parametrize(
    ("rules", "step"),
    [
        pytest.param(PullRules(forward_poison=False), "wait for rank 2 (epoch 4)", id="call"),
        pytest.param(PullRules(host_forwards=False), "partial_out buffer 1 (epoch 5)", id="partial_out"),
    ],
)
def test_who_adopts_poison_and_returns_before_all_readers_know(rules, step):
    # Rank 0 has told rank 1, not yet rank 2. Rank 1 raises, and its caller writes into what rank 2 still reads.
    case = Case((calls(1),) * 3, "either", fates=("expire",))
    result = fails(case, ("ozo",) * 3, rules)
    assert result.wrong == "wrong data returned: row 0 of rank 1 held what no call passes, not call 0 round 0"
    assert f"rank 1 ch 0: {step}, adopts poison" in result.trace
    assert "rank 0 ch 0: poison rank 2 (epoch 4)" not in result.trace


@pytest.mark.parametrize(
    ("callers", "stuck"),
    [
        pytest.param(("ccc", "ozoozc"), "partial_out buffer 0 (epoch 5)", id="partial_out"),
        pytest.param(("ccc", "occz"), "acquire buffer 1 (epoch 5)", id="acquire"),
    ],
)
def test_a_lost_reader_that_is_looked_for_by_its_flag(callers, stuck):
    # Rank 0 signalled and died before it released. Its flag is there; what is missing is the release.
    case = Case((calls(1, 1, 1),) * 2, "either", fates=("crash", "lost"))
    result = fails(case, callers, PullRules(lost_by_credit=False))
    assert result.wrong == f"deadlock: rank 1 ch 0: {stuck}"
    assert result.last == "rank 0: crash"
