"""What holds between calls: a query that is open, what ends its use, and who learns of a breach. On every rank, in time,
and never with a view."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce, query_gather, reference, release_query
from dcpkernels.errors import DcpError, DcpMismatch
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import Buffers, any_bits, release_by_merge

AT_ONCE_S = 1.0
CONFIG = WorkspaceConfig(
    12, 16, 8, num_lanes=2, query_head_dim=24, query_dtype=torch.float32, timeout_s=5.0, first_call_timeout_s=5.0
)
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3])
WAYS = pytest.mark.parametrize("fields", [{}, {"multicast": False}, {"num_channels": 3}], ids=str)


class Rank:
    """One rank: every gather is checked."""

    def __init__(self, group, **fields) -> None:
        self.group = group
        self.workspace = Workspace(group, config=dataclasses.replace(CONFIG, **fields), backend="direct")
        self.turn = 0

    def query(self, num_tokens, rank, dtype=torch.bfloat16):
        return any_bits((num_tokens, 12 // self.workspace.num_ranks, 24), dtype, 10 * self.turn + rank)

    def truth(self, num_tokens, dtype=torch.bfloat16):
        return reference.query_gather([self.query(num_tokens, r, dtype) for r in range(self.workspace.num_ranks)])

    def gather(self, num_tokens=3, lane=0, out=None, dtype=torch.bfloat16):
        self.turn += 1
        query = self.query(num_tokens, self.workspace.rank, dtype)
        result = query_gather(query, workspace=self.workspace, lane=lane, out=out)
        assert same_bits(result, self.truth(num_tokens, dtype))
        return result

    def reduce(self, num_tokens=3, lane=0, **kwargs):
        release_by_merge(self.workspace, num_tokens, lane, **kwargs)

    def release(self, lane=0):
        release_query(workspace=self.workspace, lane=lane)

    def breach(self, call, *args, **kwargs):
        """A call that is to raise on every rank. Nobody is inside the one before it any more: it would raise there too."""
        meet(self.group)
        return attempt(call, *args, **kwargs)

    def finish(self, first):
        """After a breach all calls of the workspace raise the same at once."""
        calls = [self.gather, lambda: self.gather(0, lane=1), self.reduce, self.release, self.workspace.check]
        for again in map(attempt, calls):
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, again
            assert again.seconds < AT_ONCE_S and again.value is None
        assert attempt(self.workspace.close).seconds < AT_ONCE_S
        return first


# -- an open query


@WAYS
@RANKS
@pytest.mark.parametrize("again", ["the same", "other rows", "no rows", "out"])
def test_a_second_gather_on_an_open_query(again, num_ranks, fields):
    """DcpError on every rank, which names the op and both ways out. The bytes of the first one are as they were."""

    def body(group):
        rank = Rank(group, **fields)
        view = rank.gather()
        before = rank.truth(3)
        second = {
            "the same": rank.gather,
            "other rows": lambda: rank.gather(8),
            "no rows": lambda: rank.gather(0),
            "out": lambda: rank.gather(3, out=torch.empty(3, 12, 24, dtype=torch.bfloat16)),
        }[again]
        raised = rank.breach(second)
        assert same_bits(view, before)
        meet(group)
        return rank.finish(raised)

    for result in run_ranks(body, num_ranks):
        assert type(result.error) is DcpError and result.value is None and result.seconds < AT_ONCE_S, result
        text = str(result.error)
        assert text.startswith("query_gather: ") and "a2a_lse_reduce" in text and "release_query" in text, text


def second_gather(group):
    rank = Rank(group)
    rank.gather()
    return rank.finish(rank.breach(rank.gather))


def test_a_second_gather_between_processes():
    for result in run_ranks(second_gather, 2, mode="process"):
        assert type(result.error) is DcpError and "release_query" in str(result.error)


def test_a_second_gather_on_one_rank_alone():
    """The others merge as they should, and learn of it: none of them gets numbers and goes on."""

    def body(group):
        rank = Rank(group)
        rank.gather()
        return rank.finish(rank.breach(rank.gather if rank.workspace.rank == 1 else rank.reduce))

    for result in run_ranks(body, 3):
        assert isinstance(result.error, DcpError) and result.value is None and result.seconds < 6, result


@pytest.mark.parametrize("opened", [0, 8])
def test_no_rows_are_a_query_too(opened):
    """T = 0 opens, and is closed by T = 0 or a release."""

    def body(group):
        rank = Rank(group)
        rank.gather(0)
        rank.reduce(0)
        rank.gather(opened)
        rank.reduce(opened)
        rank.gather(0)
        rank.release()
        rank.gather(0)
        return rank.finish(rank.breach(rank.gather, 0))

    for result in run_ranks(body, 2):
        assert type(result.error) is DcpError and "release_query" in str(result.error)


# -- what ends it


@WAYS
@RANKS
def test_gathers_that_are_ended(num_ranks, fields):
    """By a merge, by a release, or never opened, because of `out`; in any order, each followed by any other."""

    def body(group):
        rank = Rank(group, **fields)
        for first, then in itertools.product(("reduce", "release", "out"), repeat=2):
            for end in (first, then):
                num_tokens = rank.turn % 9
                if end == "out":
                    rows = num_tokens + 9 * (then == "release")
                    rank.gather(rows, out=torch.empty(rows, 12, 24, dtype=torch.bfloat16))
                else:
                    rank.gather(num_tokens)
                    rank.reduce(num_tokens) if end == "reduce" else rank.release()
        rank.workspace.close()

    run_ranks(body, num_ranks)


def test_merges_and_releases_with_nothing_open():
    """Any number of rows: also more than the capacity, and after `out`."""

    def body(group):
        rank = Rank(group)
        rank.release(), rank.release()
        rank.reduce(5), rank.reduce(8), rank.reduce(20), rank.reduce(0)
        rank.gather(4)
        rank.reduce(4)
        rank.reduce(7)
        rank.gather(4, out=torch.empty(4, 12, 24, dtype=torch.bfloat16))
        rank.reduce(7)
        rank.gather(6)
        rank.release(), rank.release()
        rank.reduce(1)
        rank.workspace.close()

    run_ranks(body, 3)


@pytest.mark.parametrize("reduced", [0, 2, 4, 8, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_merge_of_other_rows_than_the_query(num_ranks, reduced):
    """DcpMismatch on all ranks, from the merge; with T = 9 the merge takes two rounds."""

    def body(group):
        rank = Rank(group)
        rank.gather(3)
        out = torch.full((reduced, 12 // num_ranks, 16), 7.0, dtype=torch.bfloat16)
        inputs = torch.ones(reduced, 12, 16, dtype=torch.bfloat16), torch.zeros(reduced, 12)
        raised = rank.breach(a2a_lse_reduce, *inputs, workspace=rank.workspace, lse_base="e", out=out)
        assert out.isnan().all()
        return rank.finish(raised)

    for result in run_ranks(body, num_ranks):
        assert type(result.error) is DcpMismatch and result.value is None and result.seconds < AT_ONCE_S, result
        text = str(result.error)
        assert text.startswith("a2a_lse_reduce: ") and "query_gather" in text, text


def test_the_rows_of_the_last_gather_count():
    """Not those of one before."""

    def body(group):
        rank = Rank(group)
        rank.gather(3)
        rank.release()
        rank.gather(5)
        rank.reduce(5)
        rank.gather(5)
        return rank.finish(rank.breach(rank.reduce, 3))

    assert {type(result.error) for result in run_ranks(body, 2)} == {DcpMismatch}


# -- lanes


def test_lanes_are_independent():
    """Each has its own open query, buffer and rows; also where a call fills its buffer."""

    def body(group):
        rank = Rank(group)
        first = rank.gather(8, lane=0, dtype=torch.float32)
        kept = rank.truth(8, torch.float32)
        second = rank.gather(5, lane=1)
        meet(group)
        assert same_bits(first, kept), "the other lane's gather wrote into it"
        also = rank.truth(5)
        rank.reduce(8, lane=0)
        rank.gather(8, lane=0)
        assert same_bits(second, also)
        rank.release(lane=1)
        rank.reduce(8, lane=0)
        rank.gather(1, lane=1)
        return rank.finish(rank.breach(rank.gather, 1, lane=1))

    for result in run_ranks(body, 3):
        assert type(result.error) is DcpError and "release_query" in str(result.error)


def test_a_second_call_while_one_is_in_flight():
    """Typed, at once, and it disturbs nothing: also a merge, or a release, which would end what the other opens."""

    def body(group):
        rank = Rank(group)
        if rank.workspace.rank == 0:
            results = []
            thread = threading.Thread(target=lambda: results.append(attempt(rank.gather)))
            thread.start()
            time.sleep(0.1)
            query = rank.query(3, 0)
            second = attempt(query_gather, query, workspace=rank.workspace)
            assert type(second.error) is DcpError and "in flight" in str(second.error), second
            assert second.seconds < 0.5 and second.value is None
            released = attempt(rank.release)
            assert type(released.error) is DcpError and "in flight" in str(released.error), released
            meet(group)
            thread.join()
            assert results[0].error is None
        else:
            meet(group)
            rank.gather()
        rank.reduce()
        rank.workspace.close()

    run_ranks(body, 2)


def test_a_refused_gather_opens_nothing():
    def body(group):
        rank = Rank(group)
        for wrong in (
            lambda: rank.gather(9),
            lambda: rank.gather(3, lane=7),
            lambda: rank.gather(3, dtype=torch.int16),
        ):
            assert isinstance(attempt(wrong).error, ValueError)
        rank.gather(2)
        rank.reduce(2)
        rank.workspace.close()

    run_ranks(body, 2)


@pytest.mark.parametrize("start", [2, 2**32 - 3, 2**32 - 1, 2**63 - 9], ids=hex)
def test_across_the_wrap_of_the_epochs(start):
    def body(group):
        rank = Rank(group, start_epoch=start)
        for turn in range(8):
            num_tokens = (3, 0, 8)[turn % 3]
            rank.gather(num_tokens)
            rank.reduce(num_tokens) if turn % 2 else rank.release()
        rank.gather(20, out=torch.empty(20, 12, 24, dtype=torch.bfloat16))
        rank.gather(1)
        return rank.finish(rank.breach(rank.gather))

    assert {type(result.error) for result in run_ranks(body, 3)} == {DcpError}


def test_stats_count_all_ops():
    def body(group):
        rank = Rank(group)
        before = rank.workspace.stats()["num_calls"]
        rank.gather(3)
        rank.reduce(3)
        rank.gather(20, out=torch.empty(20, 12, 24, dtype=torch.bfloat16))
        rank.gather(0)
        rank.release()
        return rank.workspace.stats()["num_calls"] - before

    assert run_ranks(body, 2) == [5, 5]


def test_a_breach_writes_nothing():
    """The buffer of the open query, and all of the other lanes', stay as they were on every rank."""

    def body(group):
        rank = Rank(group)
        buffers = Buffers(group, rank.workspace, "query_gather")
        buffers.fill()
        view = rank.gather(3)
        assert rank.breach(rank.gather, 8).error is not None
        meet(group)
        buffers.check_around(view)

    run_ranks(body, 3)
