"""Ranks that call differently or do not come: every rank raises the same typed error in time, and nobody gets numbers.

Ranks that are killed, stopped or interrupted are in test_fault_signals.py.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpMismatch, DcpTimeout
from dcpkernels.testing import Guarded, run_ranks
from tests.a2a_calls import attempt, meet

TIMEOUT_S = 0.6
AT_ONCE_S = 0.5  # below the timeout: no wait took place, on a busy machine either
CONFIG = WorkspaceConfig(12, 64, 4, dtype=torch.float32, num_lanes=2, timeout_s=TIMEOUT_S, first_call_timeout_s=10.0)


class Rank:
    """One rank of a workspace that is about to break: a good call lies behind every lane, and all ranks know that."""

    def __init__(self, group, config=CONFIG, *, warm: bool = True) -> None:
        self.workspace = Workspace(group, config=config)
        self.num_good = 0
        for lane in range(config.num_lanes if warm else 0):
            assert self(lane=lane).error is None
        meet(group)

    def __call__(self, num_tokens=3, lse_base="e", lane=0):
        """The call with ones everywhere; on success the output is checked."""
        num_heads = self.workspace.config.num_heads
        payload, lse = torch.ones(num_tokens, num_heads, 64), torch.zeros(num_tokens, num_heads)
        local_heads = num_heads // self.workspace.num_ranks
        out = Guarded((num_tokens, local_heads, 64), torch.float32, strides=(local_heads * 72, 72, 1))
        lse_out = Guarded((num_tokens, local_heads), torch.float32, strides=(1, num_tokens + 3))
        out.tensor.fill_(7.0), lse_out.tensor.fill_(7.0)
        outputs = {"out": out.tensor, "lse_out": lse_out.tensor}
        result = attempt(
            a2a_lse_reduce, payload, lse, workspace=self.workspace, lse_base=lse_base, lane=lane, **outputs
        )
        out.check(), lse_out.check()
        if result.error is None:
            self.num_good += 1
            assert out.tensor.sub(1).abs().lt(1e-6).all()
        else:
            # A call that a fault ends leaves NaN in all its rows, never what was there before and looks like a result.
            assert out.tensor.isnan().all() and lse_out.tensor.isnan().all()
        return dataclasses.replace(result, value=None)

    def finish(self, first):
        """What holds from a fault on: calls on all lanes, and check(), raise the same at once; close() is local."""
        for again in (self(), self(num_tokens=0), self(num_tokens=9, lane=1), attempt(self.workspace.check)):
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, again
            assert again.seconds < AT_ONCE_S
            texts = [str(error).partition(": ")[2] for error in (again.error, first.error)]
            assert texts[0] == texts[1], "the first cause stays"
        self.num_calls = self.workspace.stats()["num_calls"]
        closed = attempt(self.workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return first


# -- ranks that make different calls

DIFFERENT = {  # what rank 1 passes, and what the text has to show of its call and of the others'
    "T": ({"num_tokens": 4}, "num_tokens=4", "num_tokens=3"),
    "no tokens": ({"num_tokens": 0}, "num_tokens=0", "num_tokens=3"),
    "several rounds": ({"num_tokens": 9}, "num_tokens=9", "num_tokens=3"),
    "lse_base": ({"lse_base": "2"}, "lse_base='2'", "lse_base='e'"),
    "lane": ({"lane": 1}, "lane=1", "lane=0"),
}


def mismatch(group, different, start_epoch=3):
    rank = Rank(group, dataclasses.replace(CONFIG, start_epoch=start_epoch))
    return rank.finish(rank(**(different if rank.workspace.rank == 1 else {})))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_raise_on_every_rank(name, num_ranks):
    """DcpMismatch within the deadline, with both calls and who made them; the outputs are NaN; nothing works after."""
    different, *shown = DIFFERENT[name]
    results = run_ranks(mismatch, num_ranks, different)
    for result in results:
        assert type(result.error) is DcpMismatch and result.seconds < TIMEOUT_S + 1, result
        text = str(result.error)
        assert text.startswith("a2a_lse_reduce: all ranks must make the same calls"), text
        assert all(part in text for part in (*shown, "rank 1: ")), text


@pytest.mark.parametrize("name", ["T", "lse_base"])
def test_a_mismatch_names_the_ranks_whose_calls_differ(name):
    """`.ranks` are those of the text, on every rank: the one that differs, and one of those it differs from."""
    for result in run_ranks(mismatch, 4, DIFFERENT[name][0]):
        ranks = result.error.ranks
        assert len(ranks) == 2 and 1 in ranks, ranks
        assert all(f"rank {rank}: a2a_lse_reduce(" in str(result.error) for rank in ranks), result.error


@pytest.mark.parametrize("start_epoch", [2**32 - 1, 2**32 - 2, 2**32 - 3, 2**32 - 4])
def test_a_mismatch_at_the_wrap_of_the_epochs(start_epoch):
    results = run_ranks(mismatch, 3, {"num_tokens": 4}, start_epoch)
    assert {type(result.error) for result in results} == {DcpMismatch}


def test_mismatch_between_processes():
    results = run_ranks(mismatch, 3, {"num_tokens": 4}, mode="process")
    assert {type(result.error) for result in results} == {DcpMismatch}


def skips_one(group, skipped):
    """Rank 1 leaves out the first of the calls that the others make. Each rank goes on until a call raises."""
    rank = Rank(group)
    for num_tokens in [skipped, 2, 2, 2]:
        if rank.workspace.rank == 1 and num_tokens == skipped:
            skipped = None
            continue
        result = rank(num_tokens)
        if result.error is not None:
            return rank.finish(result)
    return result


def test_a_rank_that_is_a_call_ahead():
    """It is found at the call that it left out, if that differs from the next one."""
    results = run_ranks(skips_one, 3, 5)
    for result in results:
        assert type(result.error) is DcpMismatch and result.seconds < TIMEOUT_S + 1, result
        assert all(part in str(result.error) for part in ("num_tokens=5", "num_tokens=2")), result


# -- ranks that do not come


def missing(group, absent, seconds):
    rank = Rank(group)
    if rank.workspace.rank in absent:
        time.sleep(seconds)
    result = rank.finish(rank())
    meet(group)
    Rank(group).workspace.close()  # all are there again: a new workspace works
    return result


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("absent", [[1], [0], [1, 3]], ids=str)
def test_missing_ranks_are_named_on_every_rank(absent, mode):
    """DcpTimeout after timeout_s with the whole set of those who did not come, and on these too, at once, when they do:
    a late rank gets no numbers."""
    results = run_ranks(missing, 4, absent, TIMEOUT_S + 0.6, mode=mode)
    for rank, result in enumerate(results):
        assert type(result.error) is DcpTimeout and result.error.ranks == tuple(absent), (rank, result)
        assert str(result.error).startswith("a2a_lse_reduce: all ranks must call in time (rank"), result
        if rank in absent:
            assert result.seconds < AT_ONCE_S
        else:
            assert TIMEOUT_S - 0.1 < result.seconds < TIMEOUT_S + 1
        assert isinstance(pickle.loads(pickle.dumps(result.error)), TimeoutError)


def test_no_tokens_wait_for_all_ranks_too():
    """A call with T = 0 is a full round: it does not return before the peers have come, or raises."""

    def body(group):
        rank = Rank(group)
        if rank.workspace.rank == 1:
            time.sleep(TIMEOUT_S + 0.6)
        return rank.finish(rank(num_tokens=0))

    assert [result.error.ranks for result in run_ranks(body, 3)] == [(1,)] * 3


def test_a_rank_that_comes_at_the_very_deadline():
    """All ranks get the right numbers, or those that do not get DcpTimeout with the late rank; whoever still got
    numbers raises at the next call. 25 times around the deadline, so that both outcomes occur."""
    config = dataclasses.replace(CONFIG, timeout_s=0.1)

    def body(group):
        delays, outcomes = random.Random(0), set()
        for _ in range(25):
            rank = Rank(group, config)
            late, delay = delays.randrange(3), 0.1 + delays.uniform(-0.015, 0.005)
            if group.rank == late:
                time.sleep(delay)
            results = [rank(num_tokens=9), None]
            everybody = group.all_gather_object(results[0].error is None)
            results[1] = rank()
            for result in results:
                assert result.error is None or (type(result.error) is DcpTimeout and result.error.ranks == (late,))
            assert all(everybody) or results[1].error is not None
            outcomes.add(all(everybody))
            meet(group)
            rank.workspace.close()
        return outcomes

    assert run_ranks(body, 3) == [{True, False}] * 3


def test_a_rank_that_does_not_come_to_the_creation():
    """The others raise within first_call_timeout_s, and it too when it comes; then a new try works."""
    config = dataclasses.replace(CONFIG, first_call_timeout_s=0.5)

    def body(group):
        if group.rank == 1:
            time.sleep(1.0)
        return attempt(Workspace, group, config=config)

    for result in run_ranks(body, 3):
        assert isinstance(result.error, DcpTimeout) and result.error.ranks == (1,), result
        assert result.seconds < 0.5 + 1


@pytest.mark.parametrize("lane", [0, 1])
def test_the_first_call_of_a_lane_has_its_own_deadline(lane):
    """A rank 0.8 s late is fine at the first call of each lane, with 5 s for it, and too late for the 0.3 s later."""
    config = dataclasses.replace(CONFIG, timeout_s=0.3, first_call_timeout_s=5.0)

    def body(group):
        rank, results = Rank(group, config, warm=False), []
        for on in (lane, lane, 1 - lane, lane):
            if rank.workspace.rank == 1 and len(results) in (0, 2, 3):
                time.sleep(0.8)
            results.append(rank(lane=on))
        rank.finish(results[-1])
        return results

    by_rank = run_ranks(body, 2)
    for results in by_rank:
        assert [result.error for result in results[:3]] == [None] * 3
        assert type(results[3].error) is DcpTimeout and results[3].error.ranks == (1,)
    assert 0.2 < by_rank[0][3].seconds < 1.3


@pytest.mark.parametrize("late", ["first call", "later call"])
def test_a_timeout_of_0_waits(late):
    """A second, that is: longer than any other deadline in this file."""
    config = dataclasses.replace(CONFIG, timeout_s=0, first_call_timeout_s=0)

    def body(group):
        rank = Rank(group, config, warm=late == "later call")
        if rank.workspace.rank == 1:
            time.sleep(1.5)
        result = rank()
        rank.workspace.close()
        return result

    on_time, late_one = run_ranks(body, 2)
    assert on_time.error is None and late_one.error is None and on_time.seconds > 1.2


def test_the_environment_replaces_the_timeouts(monkeypatch):
    """DCPKERNELS_TIMEOUT_S and DCPKERNELS_FIRST_CALL_TIMEOUT_S, for calls after the first and for the first."""
    monkeypatch.setenv("DCPKERNELS_TIMEOUT_S", "0.4")
    monkeypatch.setenv("DCPKERNELS_FIRST_CALL_TIMEOUT_S", "0.8")
    config = dataclasses.replace(CONFIG, timeout_s=30, first_call_timeout_s=30)

    def body(group, good_calls):
        rank = Rank(group, config, warm=False)
        for _ in range(good_calls):
            assert rank().error is None
        meet(group)
        result = rank() if rank.workspace.rank == 0 else None
        meet(group)
        rank.workspace.close()
        return result

    for good_calls, seconds in ((1, 0.4), (0, 0.8)):
        result, _ = run_ranks(body, 2, good_calls)
        assert type(result.error) is DcpTimeout and seconds - 0.1 < result.seconds < seconds + 1, result


def test_a_faulted_workspace_does_not_concern_another():
    """Same ranks, same process: the other workspace goes on, and a new one can be made."""

    def body(group):
        other, broken = Rank(group), Rank(group)
        broken.finish(broken(num_tokens=3 + broken.workspace.rank))
        assert other().error is None
        new = Rank(group)
        meet(group)
        other.workspace.close(), new.workspace.close()

    run_ranks(body, 3)


def test_calls_that_raised_are_not_counted():
    """`num_calls` of stats(): completed calls."""

    def body(group):
        rank = Rank(group)
        rank.finish(rank(num_tokens=3 + rank.workspace.rank))
        return rank.num_calls - rank.num_good

    assert run_ranks(body, 2) == [0, 0]


def test_all_faults_are_dcp_errors():
    """One `except` is enough for an engine, and built-ins do for callers who have never heard of this library."""
    assert issubclass(DcpMismatch, DcpError) and issubclass(DcpTimeout, (DcpError, TimeoutError))
