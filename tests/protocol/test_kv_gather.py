"""What kv_gather promises: chunks that hold every rank's rows until the wait for the next one."""
from __future__ import annotations

import pytest
from a2a_rules import Case
from explorer import Result, explore
from kv_gather import TURN, KvGather, KvRules, kv_calls

WRAP = 2**32
PLAIN = "swuswuswuswu"
AHEAD = "swsuwsuwsuwu"  # starts the next chunk before it uses this one


def holds(case: Case, shared: bool = False, rules: KvRules = KvRules()) -> Result:
    result = explore(KvGather(case, rules, shared))
    assert result.ok, str(result)
    return result


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls"),
    [
        pytest.param(2, 1, kv_calls(PLAIN), id="plain"),
        pytest.param(2, 1, kv_calls(AHEAD), id="ahead"),
        pytest.param(2, 1, kv_calls("swuswsuwuswsuwu"), id="now-and-then-ahead"),
        pytest.param(3, 1, kv_calls("swsuwsuwu"), id="three-ranks"),
        pytest.param(2, 2, kv_calls("swsuwsuwu", rows=2), id="two-channels"),
        pytest.param(2, 2, kv_calls("swsuwsuwu", rows=1), id="a-channel-without-rows"),
        pytest.param(2, 2, kv_calls("sdswusdsd", rows=2), id="dequantise"),
        pytest.param(2, 2, kv_calls("qpupu", rows=2), id="one-pass"),
        pytest.param(2, 1, kv_calls("swswswuswsw"), id="chunks-that-are-not-used"),
        pytest.param(1, 2, kv_calls("swsuwuqpu", rows=2), id="one-rank"),
    ],
)
def test_chunks_hold_the_rows_of_all_ranks(num_ranks, num_channels, same_calls, shared):
    assert holds(Case((same_calls,) * num_ranks, num_channels=num_channels), shared).ends == 1


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
def test_credits_go_on_across_the_wrap_of_the_epoch(distance):
    start = WRAP - distance if distance else WRAP + 2
    holds(Case((kv_calls(AHEAD),) * 2, start_epochs=(start,) * 2))


@pytest.mark.parametrize("caller", ["sdsdsd", "swsuwsuwu", "pupupu"])
def test_channels_may_share_a_thread(caller):
    holds(Case((kv_calls(caller, rows=2),) * 2, num_channels=2, channel_orders=((0, 1), ())))


@pytest.mark.parametrize(
    ("num_channels", "calls_of_rank"),
    [
        pytest.param(1, (kv_calls("swsuwu", plans={1: "other"}), *[kv_calls("swsuwu")] * 2), id="plan"),
        pytest.param(2, (kv_calls("swsuwu", plans={0: "other"}), kv_calls("swsuwu")), id="first-plan"),
        pytest.param(1, (kv_calls("swsuwswu", buffers=(0, 1, 2)), kv_calls("swsuwswu")), id="buffer"),
        pytest.param(1, (kv_calls("swswsw")[2:], *[kv_calls("swsw")] * 2), id="rank-0-skipped-a-chunk"),
    ],
)
def test_different_chunks_end_in_a_mismatch_on_every_rank(num_channels, calls_of_rank):
    # No fates: nobody needs a deadline to find out.
    holds(Case(calls_of_rank, "mismatch", num_channels))


@pytest.mark.parametrize(
    ("num_channels", "calls_of_rank"),
    [
        pytest.param(1, (kv_calls("swuwu"), kv_calls("swusw")), id="wait-without-start"),
        pytest.param(2, (kv_calls("swsswsw"), kv_calls("swswsw")), id="start-without-wait"),
        pytest.param(1, (kv_calls("sswuswu"),) * 3, id="two-starts-on-all-ranks"),
        pytest.param(1, (kv_calls("swsuwu", buffers=(0, 0)), kv_calls("swsuwu")), id="same-buffer-on-one-rank"),
        pytest.param(1, (kv_calls(PLAIN, buffers=(0, 1, 0, 0)),) * 2, id="captured-graph-of-three"),
    ],
)
def test_calls_and_buffers_out_of_turn_fault_on_every_rank(num_channels, calls_of_rank):
    holds(Case(calls_of_rank, TURN, num_channels))


@pytest.mark.parametrize("shared", [False, True], ids=["copies", "one-buffer"])
@pytest.mark.parametrize(
    ("num_ranks", "num_channels", "same_calls", "fates"),
    [
        pytest.param(2, 1, kv_calls(AHEAD), ("expire", "crash"), id="two-ranks"),
        pytest.param(2, 2, kv_calls("sws"), ("expire",), id="two-channels"),
        pytest.param(2, 2, kv_calls("sdsw", rows=2), ("crash", "lost"), id="dequantise-no-deadline"),
        pytest.param(3, 1, kv_calls("swus"), ("expire",), id="three-ranks-late"),
        pytest.param(3, 1, kv_calls("swsuwsuw"), ("crash", "lost"), id="three-ranks-no-deadline"),
    ],
)
def test_a_fault_ends_all_ranks_and_never_in_wrong_data(num_ranks, num_channels, same_calls, fates, shared):
    # A reader that faults releases nothing: poison tells who waits for its credit.
    assert holds(Case((same_calls,) * num_ranks, "either", num_channels, fates=fates), shared).ends > 10


@pytest.mark.parametrize(
    "case",
    [
        Case((kv_calls("swsuwswu"),) * 2, num_channels=2),
        Case((kv_calls("swsuwswu"),) * 2, "either", fates=("crash", "lost", "interrupt")),
        Case((kv_calls("swsu", plans={0: "other"}), kv_calls("swsu")), "mismatch", 2),
    ],
    ids=["data", "either", "mismatch"],
)
def test_moves_taken_alone_hide_nothing(case):
    model = KvGather(case)
    few, all_ = explore(model), explore(model, use_alone=False)
    assert few.ok and all_.ok
    assert few.states < all_.states
