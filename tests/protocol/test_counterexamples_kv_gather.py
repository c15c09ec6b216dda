"""Each decision about kv_gather's two buffers, turned off: the search must find the run that it prevents."""
from __future__ import annotations

import pytest
from a2a_pull import low_half_credit, no_credit, parity_credit
from a2a_rules import Case
from explorer import Result, explore
from kv_gather import TURN, KvGather, KvRules, kv_calls, two_less

WRAP = 2**32
AHEAD = "swsuwsuwsuwu"
BY_CHUNK = (0, 1, 0, 0, 1, 0)  # buffers of two layers of three chunks
OVERWRITTEN = "wrong data returned: row 0 of rank 0 held call {} round 0, not call {} round 0"


def fails(case: Case, rules: KvRules, shared: bool = False) -> Result:
    assert explore(KvGather(case, shared=shared)).ok, "the case must be fine under the rules as they are"
    return explore(KvGather(case, rules, shared))


def two_ranks(caller: str, rows: int = 1, buffers: tuple[int, ...] = (), promise: str = "data") -> Case:
    return Case((kv_calls(caller, rows, buffers),) * 2, promise, rows)


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    "rules", [KvRules(credit=no_credit), KvRules(releases_previous=False)], ids=["no-credit", "its-own-chunk"])
def test_a_chunk_that_is_overwritten_in_use(rules, shared):
    # Without a credit, or with one that wait(n) gives for chunk n, before its use.
    result = fails(two_ranks("swsuwsuwu"), rules, shared)
    assert result.wrong == OVERWRITTEN.format(2, 0)
    assert result.last == "rank 1 ch 0: use (epoch 5)"


@pytest.mark.parametrize("caller", ["swuswuswuswu", "swswswsw"], ids=["used-before-the-next-start", "not-used"])
def test_flags_and_chunks_that_strictly_take_turns_need_no_credit(caller):
    # Not a counterexample. No flag is overwritten unseen, because start comes after the wait for the chunk before:
    # there, this rank saw every peer's flag, which the peer raised after its own wait for the one before that.
    assert explore(KvGather(Case((kv_calls(caller),) * 2), KvRules(credit=no_credit))).ok


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
def test_a_peer_whose_credit_is_not_awaited(shared):
    result = fails(Case((kv_calls("swsuwsuwu"),) * 3), KvRules(credits_from="all but one"), shared)
    assert result.wrong == OVERWRITTEN.format(2, 0)


def test_stores_to_one_peer_before_the_credit_of_another():
    # Right where each rank has a copy. In a buffer that they share, all must have released before the first store.
    case, rules = Case((kv_calls("swsuwsuwu"),) * 3), KvRules(credits_before="each")
    assert explore(KvGather(case, rules)).ok
    assert fails(case, rules, shared=True).wrong == OVERWRITTEN.format(2, 0)


@pytest.mark.parametrize(
    ("credit", "start"), [(parity_credit, 3), (low_half_credit, WRAP - 2)], ids=["parity", "32-bits"])
def test_a_credit_that_is_not_a_whole_epoch(credit, start):
    case = Case((kv_calls(AHEAD),) * 2, start_epochs=(start,) * 2)
    assert fails(case, KvRules(credit=credit)).wrong == OVERWRITTEN.format(3, 1)


def test_a_use_two_epochs_back_that_does_not_know_the_wrap():
    case = Case((kv_calls(AHEAD),) * 2, start_epochs=(WRAP - 2,) * 2)
    result = fails(case, KvRules(last_use=two_less))
    assert result.wrong == (f"deadlock: rank 0 ch 0: acquire buffer 0 (epoch {WRAP + 3}); "
                            f"rank 1 ch 0: acquire buffer 0 (epoch {WRAP + 3})")


def test_a_release_in_the_line_of_the_chunk_that_is_awaited():
    result = fails(two_ranks("swsuwsuwu"), KvRules(release_line_of_use=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 0 (epoch 6); "
                            "rank 1 ch 0: acquire buffer 0 (epoch 6)")


def test_a_release_after_the_flags():
    # Not a counterexample: whoever awaits the credit has raised its flag. Released first, it comes sooner.
    assert explore(KvGather(Case((kv_calls("swsuwsuwu"),) * 3), KvRules(release_first=False))).ok


def test_start_before_the_wait_for_the_chunk_before():
    case = two_ranks("sswuswuswu", promise=TURN)
    result = fails(case, KvRules(checks_turn=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 0 (epoch 6); "
                            "rank 1 ch 0: acquire buffer 0 (epoch 6)")
    result = fails(case, KvRules(checks_turn=False, credit=no_credit))
    assert result.wrong == OVERWRITTEN.format(2, 0)


def test_a_third_buffer_does_not_allow_two_chunks_on_the_way():
    # The buffers and credits would, as counters; but flags have two parities, and one is overwritten unseen.
    case = two_ranks("sswuswuswuwu", buffers=(0, 1, 2, 0, 1, 2))
    result = explore(KvGather(case, KvRules(checks_turn=False)))
    assert result.wrong == "a healthy call faults (mismatch)"


def test_a_wait_without_its_start():
    # It finds the flags of all peers, but nobody wrote its own rows.
    result = fails(Case((kv_calls("swuwu"), kv_calls("swusw")), TURN), KvRules(checks_turn=False))
    assert result.wrong == "wrong data returned: row 0 of rank 0 held nothing, not call 1 round 0"
    assert result.last == "rank 0 ch 0: use (epoch 6)"


def test_buffers_by_the_parity_of_a_chunk_in_its_layer():
    # As in a captured graph of three chunks that is replayed. Chunk 3 is to go where chunk 2 is in use.
    case = two_ranks("swuswuswuswu", buffers=BY_CHUNK, promise=TURN)
    result = fails(case, KvRules(checks_buffer=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: acquire buffer 0 (epoch 7); "
                            "rank 1 ch 0: acquire buffer 0 (epoch 7)")
    result = fails(case, KvRules(checks_buffer=False, credit=no_credit))
    assert result.wrong == OVERWRITTEN.format(3, 2)


def test_a_buffer_that_this_rank_itself_has_in_use():
    # The peers, who use another buffer, have released. Nobody asks rank 0 itself.
    case = Case((kv_calls("swsuwu", buffers=(0, 0)), kv_calls("swsuwu")), TURN)
    result = fails(case, KvRules(checks_buffer=False))
    assert result.wrong == OVERWRITTEN.format(1, 0)
    assert result.last == "rank 0 ch 0: use (epoch 5)"


def test_dequantise_after_the_flags_of_its_own_channel():
    result = fails(two_ranks("sdsd", rows=2), KvRules(dequantise_awaits_all=False))
    assert result.wrong.endswith("held nothing, not call 0 round 0")


def test_dequantise_in_one_pass_of_each_channel():
    # Where channels share a thread, the first one's wait comes before the second one's start. So all channels
    # start before any waits, as two calls do.
    shared_thread = ((0, 1),) * 2
    two_passes = Case((kv_calls("sdsd", rows=2),) * 2, num_channels=2, channel_orders=shared_thread)
    assert explore(KvGather(two_passes)).ok
    one_pass = Case((kv_calls("qq", rows=2),) * 2, num_channels=2, channel_orders=shared_thread)
    assert explore(KvGather(one_pass)).wrong == (
        "deadlock: rank 0 ch 0: wait for rank 1 (epoch 4); rank 0 ch 1: enter (epoch 4); "
        "rank 1 ch 0: wait for rank 0 (epoch 4); rank 1 ch 1: enter (epoch 4)")


def test_dequantise_in_one_pass_from_the_own_rows_in_the_buffer():
    # No flag says that the other channels of this very rank have written there.
    result = fails(two_ranks("q", rows=2), KvRules(dequantise_own_rows="buffer"))
    assert result.wrong.endswith("held nothing, not call 0 round 0")
    assert explore(KvGather(two_ranks("sdsd", rows=2), KvRules(dequantise_own_rows="buffer"))).ok


def test_a_lost_peer_that_is_looked_for_in_one_channel_only():
    # Rank 0 raised the flag of channel 0 and died. Rank 1's channel 0 waits for that of channel 1; its own channel 1
    # comes later in the same thread, and would have missed it.
    case = Case((kv_calls("sdsd", rows=2),) * 2, "either", 2, fates=("crash", "lost"), channel_orders=((), (0, 1)))
    result = fails(case, KvRules(lost_by_all=False))
    assert result.wrong == "deadlock: rank 1 ch 0: wait for rank 0 (epoch 4); rank 1 ch 1: enter (epoch 4)"


def test_a_chunk_is_safe_without_confirm():
    # Not a counterexample: who overwrites it has the reader's credit.
    case = Case((kv_calls(AHEAD),) * 2, "either", fates=("expire", "crash"))
    assert explore(KvGather(case, KvRules(confirm=False))).ok


def test_a_reporter_that_dies_half_way_leaves_a_rank_in_its_wait_for_ever():
    case = Case((kv_calls("sws"),) * 3, "either", fates=("interrupt", "crash", "lost"))
    result = fails(case, KvRules(forward_poison=False))
    assert result.wrong == "deadlock: rank 2 ch 0: wait for rank 1 (epoch 4)"
    assert "rank 0 ch 0: poison rank 2 (epoch 4)" not in result.trace
