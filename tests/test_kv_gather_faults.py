"""kv_gather with ranks that call differently, do not come, do not wait, or die: every rank raises the same typed error in
time, and nobody gets a chunk."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch

from dcpkernels import KVGatherPlan, Workspace, WorkspaceConfig, kv_gather, kv_gather_start, kv_gather_wait
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import Context, any_bits, check_ctrl_c, release_by_merge

TIMEOUT_S = 0.6
AT_ONCE_S = 0.5  # below the timeout: no wait took place, on a busy machine either
CONFIG = WorkspaceConfig(
    12,
    8,
    4,
    num_lanes=2,
    kv_chunk_rows=64,
    kv_dim=32,
    timeout_s=TIMEOUT_S,
    first_call_timeout_s=10.0,
)
LENS = (100, 33, 60)


class Rank:
    """One rank of a workspace that is about to break: two good calls lie behind every lane, and all ranks know that."""

    def __init__(self, group, **fields) -> None:
        self.group = group
        self.workspace = Workspace(group, config=dataclasses.replace(CONFIG, **fields), backend="direct")
        for lane in range(CONFIG.num_lanes):
            for _ in range(2):
                assert self(lane=lane).error is None
        meet(group)

    def context(self, lens=LENS, dtype=torch.bfloat16, dim=32, interleave=1):
        return Context(lens, self.workspace.num_ranks, dim, dtype, interleave)

    def __call__(self, chunk_idx=0, *, lane=0, chunk_size=64, **context):
        given, rank = self.context(**context), self.workspace.rank
        plan = given.plan(rank, chunk_size)
        result = attempt(kv_gather, given.caches[rank], plan, chunk_idx, workspace=self.workspace, lane=lane)
        if result.error is None:
            assert same_bits(result.value, given.chunk(chunk_size, chunk_idx))
        assert result.error is None or result.value is None
        return dataclasses.replace(result, value=None)

    def start(self, chunk_idx=0):
        given, rank = self.context(), self.workspace.rank
        plan = given.plan(rank, 64)
        return plan, attempt(kv_gather_start, given.caches[rank], plan, chunk_idx, workspace=self.workspace)

    def finish(self, first):
        """What holds from a fault on: calls on all lanes, and check(), raise the same at once; close() is local."""
        merge = attempt(release_by_merge, self.workspace, 3)
        calls = [self(), self(2, lane=1), self.start()[1], merge, attempt(self.workspace.check)]
        for again in calls:
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, again
            assert again.seconds < AT_ONCE_S
            texts = [str(error).partition(": ")[2] for error in (again.error, first.error)]
            assert texts[0] == texts[1], "the first cause stays"
        closed = attempt(self.workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return first


# -- ranks that make different calls

DIFFERENT = {  # what rank 1 does; the others gather chunk 0 of LENS in chunks of 64 rows of 64 bytes
    "chunk": {"chunk_idx": 1},
    "the last chunk": {"chunk_idx": 3},
    "chunk_size": {"chunk_size": 63},
    "lengths": {"lens": (100, 34, 59)},
    "the order of lengths": {"lens": (33, 100, 60)},
    "a request without context": {"lens": (100, 33, 60, 0)},
    "interleave": {"interleave": 2},
    "dtype": {"dtype": torch.float16},
    "dtype and width": {"dtype": torch.float8_e4m3fn},
    "row width": {"dim": 24},
}


def mismatch(group, different, fields, usual=()):
    rank = Rank(group, **fields)
    return rank.finish(rank(**(different if rank.workspace.rank == 1 else dict(usual))))


@pytest.mark.parametrize("fields", [{}, {"multicast": False, "num_channels": 3}], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_raise_on_every_rank(name, num_ranks, fields):
    """DcpMismatch within the deadline, with both calls and who made them; no chunk; nothing works after."""
    for result in run_ranks(mismatch, num_ranks, DIFFERENT[name], fields):
        assert type(result.error) is DcpMismatch and result.seconds < TIMEOUT_S + 1, result
        text = str(result.error)
        assert text.startswith("kv_gather: all ranks must make the same calls"), text
        assert "rank 1: kv_gather(" in text and 1 in result.error.ranks, text
        if name == "chunk":
            assert "chunk_idx=1" in text and "chunk_idx=0" in text


@pytest.mark.parametrize("dtype, usual", [("e4m3fnuz", "e4m3fn"), ("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")])
def test_formats_of_fp8_that_differ_are_named(dtype, usual):
    """The rows are as wide, and of the same bits: only the names tell."""
    dtypes = ({"dtype": getattr(torch, f"float8_{name}")} for name in (dtype, usual))
    for result in run_ranks(mismatch, 3, next(dtypes), {}, next(dtypes)):
        assert type(result.error) is DcpMismatch and result.seconds < TIMEOUT_S + 1, result
        text = str(result.error)
        assert f"rank 1: kv_gather(chunk_idx=0 (mod 4096), dtype=float8_{dtype}, plan=" in text, text
        assert f"kv_gather(chunk_idx=0 (mod 4096), dtype=float8_{usual}, plan=" in text, text


def test_mismatch_between_processes():
    results = run_ranks(mismatch, 3, {"chunk_idx": 1}, {}, mode="process")
    assert {type(result.error) for result in results} == {DcpMismatch}


@pytest.mark.parametrize("start_epoch", [2**32 - 2, 2**32 - 4])
def test_a_mismatch_at_the_wrap_of_the_epochs(start_epoch):
    results = run_ranks(mismatch, 3, {"chunk_idx": 1}, {"start_epoch": start_epoch})
    assert {type(result.error) for result in results} == {DcpMismatch}


@pytest.mark.parametrize("other", [1, 4095, 4096, 8192])
def test_chunks_of_a_plan_with_many(other):
    """Far apart, too: an index has more bits than a descriptor of a call has room for."""
    cache = any_bits((600, 16, 32), torch.bfloat16)

    def body(group):
        rank = Rank(group)
        place = rank.workspace.rank
        fields = {"block_size": 16, "num_ranks": 2, "rank": place, "chunk_size": 2}
        plan = KVGatherPlan([18_000], [range(600)], **fields)
        result = attempt(kv_gather, cache, plan, other * place, workspace=rank.workspace)
        assert result.value is None
        return rank.finish(result)

    assert {type(result.error) for result in run_ranks(body, 2)} == {DcpMismatch}


def test_another_lane():
    """Looks as if the rank did not come. On every rank, in time."""

    def body(group):
        rank = Rank(group)
        return rank.finish(rank(lane=rank.workspace.rank))

    for result in run_ranks(body, 2):
        assert type(result.error) in (DcpMismatch, DcpTimeout) and result.seconds < TIMEOUT_S + 1, result


def test_a_rank_that_is_a_chunk_ahead():
    """It leaves out one, and is found there, before its rows are taken for those of another chunk."""

    def body(group):
        rank = Rank(group)
        for chunk_idx in (2, 0, 1, 2):
            if rank.workspace.rank == 1 and chunk_idx == 2:
                continue
            result = rank(chunk_idx)
            if result.error is not None:
                return rank.finish(result)
        return None

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpMismatch, result


def test_a_mismatch_in_the_split_form():
    """Found by wait at the latest; start may return before anybody else has come."""

    def body(group):
        rank = Rank(group)
        plan, started = rank.start(rank.workspace.rank % 2)
        assert started.error is None or type(started.error) is DcpMismatch
        if started.error is not None:
            return rank.finish(started)
        result = attempt(kv_gather_wait, plan, rank.workspace.rank % 2, workspace=rank.workspace)
        assert result.value is None
        return rank.finish(result)

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpMismatch and "chunk_idx=1" in str(result.error), result


# -- ranks that do not come


def missing(group, absent):
    rank = Rank(group)
    if rank.workspace.rank in absent:
        time.sleep(TIMEOUT_S + 0.5)
    result = rank.finish(rank())
    meet(group)
    Rank(group).workspace.close()  # all are there again: a new workspace works
    return result


@pytest.mark.parametrize(
    "absent, mode", [([1], "thread"), ([0], "thread"), ([1, 3], "thread"), ([2], "process")], ids=str
)
def test_missing_ranks_are_named_on_every_rank(absent, mode):
    """DcpTimeout with the whole set of those who did not come, and on these too, at once, when they do."""
    for rank, result in enumerate(run_ranks(missing, 4, absent, mode=mode)):
        assert type(result.error) is DcpTimeout and result.error.ranks == tuple(absent), (rank, result)
        assert str(result.error).startswith("kv_gather: all ranks must call in time (rank"), result
        if rank in absent:
            assert result.seconds < AT_ONCE_S
        else:
            assert TIMEOUT_S - 0.1 < result.seconds < TIMEOUT_S + 1


def test_a_rank_that_owns_no_rows_is_awaited_too():
    """64 tokens with interleave 64: all rank 0's. The others have nothing to say, and still have to come."""

    def body(group):
        rank = Rank(group)
        assert rank(lens=(64,), interleave=64).error is None
        meet(group)
        if rank.workspace.rank == 2:
            time.sleep(TIMEOUT_S + 0.5)
        return rank.finish(rank(lens=(64,), interleave=64))

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpTimeout and result.error.ranks == (2,), result


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_does_not_wait_holds_up_the_chunk_after_next(num_ranks):
    """It has the first of two buffers in use, so nobody may write there: DcpTimeout from start, with that rank."""

    def body(group):
        rank = Rank(group)
        slow = num_ranks - 1
        for i in (0, 1, 2):
            plan, started = rank.start(i)
            if started.error is not None:
                return rank.finish(started), i
            if i == 1 and rank.workspace.rank == slow:
                time.sleep(TIMEOUT_S + 0.5)
            waited = attempt(kv_gather_wait, plan, i, workspace=rank.workspace)
            if waited.error is not None:
                assert waited.value is None
                return rank.finish(waited), i
        return None

    *others, late = run_ranks(body, num_ranks)
    for result, i in others:
        assert type(result.error) is DcpTimeout and result.error.ranks == (num_ranks - 1,) and i == 2, (result, i)
        assert result.seconds < TIMEOUT_S + 1
    assert type(late[0].error) is DcpTimeout and late[0].error.ranks == (num_ranks - 1,) and late[1] == 1, late


def test_the_first_gather_of_a_lane_has_its_own_deadline():
    config = dataclasses.replace(CONFIG, timeout_s=0.3, first_call_timeout_s=10.0)
    context = Context(LENS, 2, 32, torch.bfloat16)

    def body(group):
        workspace, results = Workspace(group, config=config), []
        plan, cache = context.plan(workspace.rank, 64), context.caches[workspace.rank]
        for _ in range(2):
            if workspace.rank == 1:
                time.sleep(0.5)
            results.append(attempt(kv_gather, cache, plan, 0, workspace=workspace).error)
            meet(group)
        workspace.close()
        return results

    for first, second in run_ranks(body, 2):
        assert first is None and type(second) is DcpTimeout and second.ranks == (1,), (first, second)


# -- ranks that die


def killed(group, where):
    rank = Rank(group, timeout_s=20.0)
    plan = None
    if where == "before wait":
        plan, started = rank.start(0)
        assert started.error is None
        meet(group)
    if rank.workspace.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan is None:
        return rank.finish(rank())
    time.sleep(0.3)
    # Its rows of chunk 0 are there. Of chunk 1 they will not be.
    waited = attempt(kv_gather_wait, plan, 0, workspace=rank.workspace)
    return rank.finish(waited if waited.error is not None else rank(1))


@pytest.mark.parametrize("where", ["before start", "before wait"])
def test_a_killed_process_is_named_at_once(where):
    results = run_ranks(killed, 3, where, mode="process", expect_exit={2: -signal.SIGKILL})
    for result in results[:2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (2,) and result.seconds < 2, result


def test_ctrl_c_ends_the_wait():
    check_ctrl_c(Rank)


# -- two threads on one lane


def test_a_second_call_while_one_is_in_flight():
    """Typed, at once; the first one is not disturbed."""

    def body(group):
        rank = Rank(group, timeout_s=10.0)
        if rank.workspace.rank == 0:
            results = []
            thread = threading.Thread(target=lambda: results.append(rank(1)))
            thread.start()
            time.sleep(0.1)
            second = rank(1)
            assert type(second.error) in (DcpError, DcpInvalidArgument) and second.seconds < AT_ONCE_S, second
            meet(group)
            thread.join()
            assert results[0].error is None
        else:
            meet(group)
            assert rank(1).error is None
        assert rank(2).error is None
        rank.workspace.close()

    run_ranks(body, 2)
