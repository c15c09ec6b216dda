"""query_gather with ranks that call differently, do not come, or die: every rank raises the same typed error in time, and
nobody gets a view."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, query_gather, reference, release_query
from dcpkernels.errors import DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import any_bits, check_ctrl_c, release_by_merge

TIMEOUT_S = 0.6
AT_ONCE_S = 0.5  # below the timeout: no wait took place, on a busy machine either
CONFIG = WorkspaceConfig(
    12,
    16,
    4,
    num_lanes=2,
    query_head_dim=24,
    query_dtype=torch.float32,
    timeout_s=TIMEOUT_S,
    first_call_timeout_s=10.0,
)


class Rank:
    """One rank of a workspace that is about to break: a good call of each kind lies behind every lane, and all know it."""

    def __init__(self, group, **fields) -> None:
        self.group = group
        self.workspace = Workspace(group, config=dataclasses.replace(CONFIG, **fields), backend="direct")
        for lane in range(CONFIG.num_lanes):
            assert self(lane=lane).error is None
            release_by_merge(self.workspace, 3, lane)
        meet(group)

    def __call__(self, num_tokens=3, lane=0, dtype=torch.bfloat16, out=False, scale=None, to=torch.float8_e4m3fn):
        num_ranks = self.workspace.num_ranks
        queries = [any_bits((num_tokens, 12 // num_ranks, 24), dtype, rank) for rank in range(num_ranks)]
        target = None
        if out:
            target = torch.empty(num_tokens, 12, 24, dtype=dtype if scale is None else to)
        query = queries[self.workspace.rank]
        result = attempt(query_gather, query, workspace=self.workspace, lane=lane, out=target, scale=scale)
        if result.error is None and scale is None:
            assert same_bits(result.value, reference.query_gather(queries))
        assert result.error is None or result.value is None
        return dataclasses.replace(result, value=None)

    def finish(self, first):
        """What holds from a fault on: calls on all lanes, and check(), raise the same at once; close() is local."""
        release = attempt(release_query, workspace=self.workspace)
        merge = attempt(release_by_merge, self.workspace, 3)
        for again in (
            self(),
            self(num_tokens=0),
            self(9, lane=1, out=True),
            release,
            merge,
            attempt(self.workspace.check),
        ):
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, again
            assert again.seconds < AT_ONCE_S
            texts = [str(error).partition(": ")[2] for error in (again.error, first.error)]
            assert texts[0] == texts[1], "the first cause stays"
        closed = attempt(self.workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return first


# -- ranks that make different calls

DIFFERENT = {  # what rank 1 passes and what the others do, and what the text has to show of both
    "T": ({"num_tokens": 4}, {}, "num_tokens=4", "num_tokens=3"),
    "no tokens": ({"num_tokens": 0}, {}, "num_tokens=0", "num_tokens=3"),
    "dtype": ({"dtype": torch.float16}, {}, "dtype=float16", "dtype=bfloat16"),
    "dtype of another size": ({"dtype": torch.float32}, {}, "dtype=float32", "dtype=bfloat16"),
    "fp8": ({"dtype": torch.float8_e5m2}, {"dtype": torch.float8_e4m3fn}, "dtype=float8_e5m2", "dtype=float8_e4m3fn"),
    "fnuz": (
        {"dtype": torch.float8_e4m3fnuz},
        {"dtype": torch.float8_e4m3fn},
        "dtype=float8_e4m3fnuz,",
        "dtype=float8_e4m3fn,",
    ),
    "e5m2": (
        {"dtype": torch.float8_e5m2},
        {"dtype": torch.float8_e5m2fnuz},
        "dtype=float8_e5m2,",
        "dtype=float8_e5m2fnuz,",
    ),
    "quantised to": (
        {"scale": 1.0, "out": True, "to": torch.float8_e4m3fnuz},
        {"scale": 1.0, "out": True},
        "dtype=float8_e4m3fnuz,",
        "dtype=float8_e4m3fn,",
    ),
    "quantised": ({"scale": 1.0}, {}, "dtype=float8_e4m3fn", "dtype=bfloat16"),
    "out": ({"out": True}, {}, "out", "lane=0"),
    "no out": ({}, {"out": True}, "out", "lane=0"),
    "rows of out": ({"out": True, "num_tokens": 9}, {"out": True}, "num_tokens=9", "num_tokens=3"),
    "rounds of out": (
        {"out": True, "num_tokens": 9},
        {"out": True, "num_tokens": 10},
        "num_tokens=9",
        "num_tokens=10",
    ),
}


def mismatch(group, different, usual, fields):
    rank = Rank(group, **fields)
    return rank.finish(rank(**(different if rank.workspace.rank == 1 else usual)))


@pytest.mark.parametrize("fields", [{}, {"multicast": False, "num_channels": 3}], ids=str)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_raise_on_every_rank(name, num_ranks, fields):
    """DcpMismatch within the deadline, with both calls and who made them; no view; nothing works after."""
    different, usual, *shown = DIFFERENT[name]
    for result in run_ranks(mismatch, num_ranks, different, usual, fields):
        assert type(result.error) is DcpMismatch and result.seconds < TIMEOUT_S + 1, result
        text = str(result.error)
        assert text.startswith("query_gather: all ranks must make the same calls"), text
        assert all(part in text for part in (*shown, "rank 1: ")) and 1 in result.error.ranks, text


def test_mismatch_between_processes():
    results = run_ranks(mismatch, 3, {"num_tokens": 4}, {}, {}, mode="process")
    assert {type(result.error) for result in results} == {DcpMismatch}


@pytest.mark.parametrize("start_epoch", [2**32 - 1, 2**32 - 3])
def test_a_mismatch_at_the_wrap_of_the_epochs(start_epoch):
    results = run_ranks(mismatch, 3, {"num_tokens": 4}, {}, {"start_epoch": start_epoch})
    assert {type(result.error) for result in results} == {DcpMismatch}


OTHER_CALLS = {
    "another lane": lambda rank: rank(lane=1),
    "release_query": lambda rank: attempt(release_query, workspace=rank.workspace),
    "a2a_lse_reduce": lambda rank: attempt(release_by_merge, rank.workspace, 3),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", OTHER_CALLS)
def test_another_call_than_the_peers(name, num_ranks):
    """A call elsewhere may look like one that does not come: typed, on every rank, in time."""

    def body(group):
        rank = Rank(group)
        return rank.finish((OTHER_CALLS[name] if rank.workspace.rank == 1 else Rank.__call__)(rank))

    for result in run_ranks(body, num_ranks):
        assert type(result.error) in (DcpMismatch, DcpTimeout) and 1 in result.error.ranks, result
        assert result.seconds < TIMEOUT_S + 1


# -- ranks that do not come


def missing(group, absent, call):
    rank = Rank(group)
    if rank.workspace.rank in absent:
        time.sleep(TIMEOUT_S + 0.5)
    result = rank.finish(rank(**call))
    meet(group)
    Rank(group).workspace.close()  # all are there again: a new workspace works
    return result


@pytest.mark.parametrize(
    "absent, call, mode",
    [
        ([1], {}, "thread"),
        ([0], {"num_tokens": 0}, "thread"),
        ([1, 3], {"num_tokens": 9, "out": True}, "thread"),
        ([2], {"scale": 2.0}, "process"),
    ],
    ids=str,
)
def test_missing_ranks_are_named_on_every_rank(absent, call, mode):
    """DcpTimeout with the whole set of those who did not come, and on these too, at once, when they do."""
    for rank, result in enumerate(run_ranks(missing, 4, absent, call, mode=mode)):
        assert type(result.error) is DcpTimeout and result.error.ranks == tuple(absent), (rank, result)
        assert str(result.error).startswith("query_gather: all ranks must call in time (rank"), result
        if rank in absent:
            assert result.seconds < AT_ONCE_S
        else:
            assert TIMEOUT_S - 0.1 < result.seconds < TIMEOUT_S + 1
        assert isinstance(pickle.loads(pickle.dumps(result.error)), TimeoutError)


def test_a_missing_release():
    """As a missing gather: release_query is a full round."""

    def body(group):
        rank = Rank(group)
        assert rank().error is None
        meet(group)
        if rank.workspace.rank == 1:
            time.sleep(TIMEOUT_S + 0.5)
        return rank.finish(attempt(release_query, workspace=rank.workspace))

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpTimeout and result.error.ranks == (1,), result
        assert str(result.error).startswith("release_query: all ranks must call in time (rank 1"), result


@pytest.mark.parametrize("lane", [0, 1])
def test_the_first_gather_of_a_lane_has_its_own_deadline(lane):
    """A rank 0.5 s late is fine at the first call of the lane, and too late at the next one."""
    config = dataclasses.replace(CONFIG, timeout_s=0.3, first_call_timeout_s=10.0)
    query = any_bits((3, 6, 24), torch.bfloat16)

    def body(group):
        workspace, results = Workspace(group, config=config), []
        for _ in range(2):
            if workspace.rank == 1:
                time.sleep(0.5)
            results.append(attempt(query_gather, query, workspace=workspace, lane=lane).error)
            if results[-1] is None:
                attempt(release_query, workspace=workspace, lane=lane)
            meet(group)
        workspace.close()
        return results

    for first, second in run_ranks(body, 2):
        assert first is None and type(second) is DcpTimeout and second.ranks == (1,), (first, second)


# -- ranks that die


def killed(group, call):
    rank = Rank(group, timeout_s=20.0)
    if rank.workspace.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank.finish(rank(**call))


@pytest.mark.parametrize("call", [{}, {"num_tokens": 9, "out": True}], ids=str)
def test_a_killed_process_is_named_at_once(call):
    results = run_ranks(killed, 3, call, mode="process", expect_exit={2: -signal.SIGKILL})
    for result in results[:2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (2,) and result.seconds < 2, result


def test_ctrl_c_ends_the_wait():
    check_ctrl_c(Rank)


# -- after a mismatch nothing that looks like a result is left


def test_a_rank_that_is_a_call_ahead():
    """Rank 1 leaves one call out and goes on. It is found at that call, if that differs from the next one."""

    def body(group):
        rank = Rank(group)
        for num_tokens in (2, 4, 1, 3):
            if rank.workspace.rank == 1 and num_tokens == 2:
                continue
            result = rank(num_tokens)
            if result.error is not None:
                return rank.finish(result)
            release_query(workspace=rank.workspace)
        return None

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpMismatch and "num_tokens=2" in str(result.error), result
