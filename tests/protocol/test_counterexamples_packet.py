"""Each decision of the packet way, turned off: the search must find the run that it prevents."""
from __future__ import annotations

import pytest
from a2a_packet import A2aPacket, PacketRules, flag_of_parity
from a2a_rules import Case, calls
from explorer import Result, explore

WRAP = 2**32


def fails(case: Case, rules: PacketRules) -> Result:
    assert explore(A2aPacket(case)).ok, "the case must be fine under the rules as they are"
    return explore(A2aPacket(case, rules))


def two_ranks(*tokens: int, capacity: int = 8, num_channels: int = 1) -> Case:
    return Case((calls(*tokens, capacity=capacity),) * 2, num_channels=num_channels)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(two_ranks(1, 0, 1), id="T-0"),
        pytest.param(two_ranks(3, 2, capacity=2, num_channels=2), id="a-channel-without-rows"),
    ],
)
def test_no_wait_at_the_end_of_a_round_without_packets(case):
    # Packets that came say that their sender has done with the round before; where none come, nothing says it. A
    # peer goes two rounds ahead and writes over packets that were not received. (They no longer bear the epoch that
    # is awaited, so this ends in a fault, not in wrong data.)
    result = fails(case, PacketRules(waits="none"))
    assert result.wrong == "a healthy call faults (mismatch)"


def test_packets_from_every_peer_in_every_round_would_do_without_a_wait():
    # Not a counterexample, and not to be relied on: it is T and the number of channels that decide.
    assert explore(A2aPacket(two_ranks(1, 1, 1, 1), PacketRules(waits="none"))).ok


def test_no_wait_returns_the_data_of_another_call():
    result = fails(Case((calls(1), calls(2)), "mismatch"), PacketRules(waits="none"))
    assert result.wrong == "not all a mismatch: [None, ('mismatch', 0)]"


def test_a_packet_flag_that_only_says_which_parity():
    result = fails(two_ranks(1, 1, 1), PacketRules(packet_flag=flag_of_parity))
    assert result.wrong == "wrong data returned: row 0 of rank 1 held call 0 round 0, not call 2 round 0"
    # It takes no rank that is ahead: the packets of two rounds ago are simply still there.
    assert result.trace.index("rank 0 ch 0: receive from rank 1 (epoch 6)") < result.trace.index(
        "rank 1 ch 0: publish LSEs of row 0 to rank 0 (epoch 6)")


def test_a_packet_flag_that_comes_round_again_finds_a_row_that_was_not_written_since():
    # A limit of every flag of few bits, here of two. 32 bits come round after 2^32 - 2 rounds, and a row would have
    # to be written in none between the two.
    result = explore(A2aPacket(two_ranks(2, 1, 1, 1, 2), PacketRules(packet_flag=lambda epoch: 2 + epoch % 4)))
    assert result.wrong == "wrong data returned: row 1 of rank 1 held call 0 round 0, not call 4 round 0"


def test_a_packet_flag_that_looks_like_untouched_memory():
    every_epoch = {"next_epoch": lambda epoch: epoch + 1, "old_epoch": lambda epoch: epoch - 2}
    case = Case((calls(1, 2),) * 2, start_epochs=(WRAP - 2,) * 2)
    result = fails(case, PacketRules(**every_epoch))
    assert result.wrong == "wrong data returned: row 0 of rank 1 held nothing, not call 1 round 0"


def test_payload_of_an_empty_row_is_not_awaited():
    case = Case((calls(1, 1, senders={1: {0}}),) * 2)
    result = fails(case, PacketRules(lses_tell=False))
    assert result.wrong == "deadlock: rank 0 ch 0: receive from rank 1 (epoch 5)"


def test_packets_of_one_parity():
    result = fails(two_ranks(1, 1), PacketRules(staging_by_parity=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: receive from rank 1 (epoch 5); "
                            "rank 1 ch 0: receive from rank 0 (epoch 4)")


def test_receive_that_does_not_look_at_poison():
    result = fails(Case((calls(1),) * 3, "either", fates=("interrupt",)), PacketRules(receive_finds_poison=False))
    assert result.wrong == "deadlock: rank 1 ch 0: receive from rank 2 (epoch 4)"


def test_receive_that_does_not_look_at_the_flag_of_a_rank_two_epochs_ahead():
    # Nobody gets as far as wait, where bulk finds this at once.
    case = Case((calls(1, 1),) * 3, "mismatch", start_epochs=(5, 3, 3))
    result = fails(case, PacketRules(receive_looks_at_flag=False))
    assert result.wrong == ("deadlock: rank 0 ch 0: receive from rank 1 (epoch 6); rank 1 ch 0: receive from rank 0 "
                            "(epoch 4); rank 2 ch 0: receive from rank 0 (epoch 4)")


def test_receive_that_does_not_look_at_the_flag_of_a_rank_that_died_in_another_call():
    # Rank 0 sent fewer rows and its flag, and died before its own wait could find the mismatch. Its flag is there,
    # so it is not missed: no deadline and no closed socket would end this.
    case = Case((calls(1, 1), calls(2, 1)), "either", fates=("crash", "lost"))
    result = fails(case, PacketRules(receive_looks_at_flag=False))
    assert result.wrong == "deadlock: rank 1 ch 0: receive from rank 0 (epoch 4)"
    assert result.last == "rank 0: crash"


def test_between_living_ranks_of_different_T_the_one_with_fewer_rows_finds_out():
    # Not a counterexample: its receive ends, its wait sees the other's digest, and it poisons the others.
    rules = PacketRules(receive_looks_at_flag=False)
    assert explore(A2aPacket(Case((calls(1, 1), calls(2, 1), calls(0, 1)), "mismatch"), rules)).ok
