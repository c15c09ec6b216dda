"""The gathers of the collective backend when ranks call differently, in a wrong order, late, or not at all: the errors of
the direct backend, on all ranks, in time, with names."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time

import pytest
import torch

from dcpkernels import (
    KVGatherPlan,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch, DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests import test_collective_gathers
from tests.a2a_calls import attempt, meet
from tests.collective_gather_calls import CONFIG, E4M3, NUM_HEADS, QUERY_DIM, reduce_rows

MODES = ["thread", "process"]
TIMEOUT_S = 1.2
AT_ONCE_S = 1.1


class Rank:
    """One rank that is about to make a call that goes wrong; good calls lie behind every stream."""

    def __init__(self, group, warm=True, backend="collective", **fields) -> None:
        fields = {"timeout_s": TIMEOUT_S} | fields
        self.workspace = test_collective_gathers.make(group, backend, **fields)
        self.started = None  # the plan
        for lane in range(2 if warm else 0):
            for call in (self.query, self.release, self.reduce, self.chunk):
                assert call(lane=lane) is None
        meet(group)

    def query(self, num_tokens=3, dtype=torch.float32, has_out=False, lane=0):
        query = torch.full((num_tokens, NUM_HEADS // self.workspace.num_ranks, QUERY_DIM), self.workspace.rank + 1.0)
        out = torch.zeros(num_tokens, NUM_HEADS, QUERY_DIM, dtype=dtype) if has_out else None
        got = query_gather(query.to(dtype), workspace=self.workspace, lane=lane, out=out)
        owners = torch.arange(NUM_HEADS) // (NUM_HEADS // self.workspace.num_ranks) + 1
        assert got.float().eq(owners[:, None]).all()

    def release(self, lane=0):
        release_query(workspace=self.workspace, lane=lane)

    def reduce(self, num_tokens=3, lane=0):
        reduce_rows(self.workspace, num_tokens, lane)

    def plan(self, chunk_size=8, context_len=20):
        world = {"num_ranks": self.workspace.num_ranks, "rank": self.workspace.rank, "chunk_size": chunk_size}
        return KVGatherPlan([context_len], [[*range(5)]], block_size=4, **world)

    def start(self, chunk_idx=0, row_bytes=96, lane=0, dtype=E4M3, **fields):
        cache = torch.full((5, 4, row_bytes), self.workspace.rank + 1, dtype=torch.uint8).view(dtype)
        self.started = self.plan(**fields)
        kv_gather_start(cache, self.started, chunk_idx, workspace=self.workspace, lane=lane)

    def wait(self, chunk_idx=0, lane=0, **fields):
        got = kv_gather_wait(self.started, chunk_idx, workspace=self.workspace, lane=lane, **fields)
        owners = (torch.arange(len(got)) + chunk_idx * self.started.chunk_size) % self.workspace.num_ranks + 1
        assert fields or got.view(torch.uint8).eq(owners[:, None]).all()

    def chunk(self, chunk_idx=0, row_bytes=96, lane=0, **fields):
        self.start(chunk_idx, row_bytes, lane, **fields)
        self.wait(chunk_idx, lane)

    def finish(self, first):
        """From a fault on, everything raises the same at once, and close() is local."""
        assert isinstance(first.error, DcpError), first
        calls = [self.query, self.release, lambda: self.query(has_out=True), self.reduce, lambda: self.start(lane=1)]
        for call in [*calls, self.workspace.check]:
            again = attempt(call)
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, (again, first)
            assert again.seconds < AT_ONCE_S
        closed = attempt(self.workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return first


# -- different calls

# The two calls, what the texts say of them, and whether they are of one stream: then it is found at once.
DIFFERENT = {
    "T": (("query", {}), ("query", {"num_tokens": 4}), "num_tokens=4, dtype=float32, lane=0", True),
    "no tokens": (("query", {}), ("query", {"num_tokens": 0}), "num_tokens=0", True),
    "dtype": (("query", {}), ("query", {"dtype": torch.bfloat16}), "dtype=bfloat16", True),
    "out": (("query", {}), ("query", {"has_out": True}), "dtype=float32, out, lane=0", True),
    "release": (("query", {}), ("release", {}), "rank 1: release_query(lane=0)", True),
    "lane": (("query", {}), ("query", {"lane": 1}), "lane=1", False),
    "merge": (("query", {}), ("reduce", {}), "rank 1: a2a_lse_reduce(", False),
    "chunk of a query": (("reduce", {}), ("chunk", {}), "rank 1: kv_gather(chunk_idx=0", False),
    "chunk": (("chunk", {}), ("chunk", {"chunk_idx": 1}), "rank 1: kv_gather(chunk_idx=1", True),
    "plan": (("chunk", {}), ("chunk", {"context_len": 19}), "rank 1: kv_gather(chunk_idx=0", True),
    "row": (("chunk", {}), ("chunk", {"row_bytes": 48}), "rank 1: kv_gather(chunk_idx=0", True),
    "format": (("chunk", {}), ("chunk", {"dtype": torch.float8_e4m3fnuz}), "dtype=float8_e4m3fnuz, plan=", True),
    "lane of a chunk": (("chunk", {}), ("chunk", {"lane": 1}), "lane=1", False),
}


def mismatch(group, name):
    rank = Rank(group)
    op, fields = DIFFERENT[name][rank.workspace.rank == 1]
    result = rank.finish(attempt(getattr(rank, op), **fields))
    meet(group)
    return result


@pytest.mark.parametrize("num_ranks, mode", [(2, "thread"), (3, "process")])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_raise_on_every_rank(name, num_ranks, mode):
    """At once, or at the deadline where streams differ; with both calls in the text."""
    *_, text, at_once = DIFFERENT[name]
    for rank, result in enumerate(run_ranks(mismatch, num_ranks, name, mode=mode)):
        assert type(result.error) is DcpMismatch and 1 in result.error.ranks, (rank, result)
        assert result.seconds < (AT_ONCE_S if at_once else TIMEOUT_S + 1), result
        assert "all ranks must make the same calls" in str(result.error) and text in str(result.error), result


# -- what is open


def open_query(group, calls, wrong, backend):
    """Good calls, and one that may not be made."""
    rank = Rank(group, backend=backend)
    for op, fields in calls:
        getattr(rank, op)(**fields)
    meet(group)
    result = attempt(getattr(rank, wrong[0]), **wrong[1])
    if backend == "collective":
        rank.finish(result)
    else:
        rank.workspace.close()
    meet(group)
    return result


NOT_RELEASED = "the query gathered before must have been released, by a2a_lse_reduce or release_query"
TWO = [("query", {}), ("release", {}), ("query", {"num_tokens": 0})]


@pytest.mark.parametrize("mode, backend", [("thread", "collective"), ("process", "collective"), ("thread", "direct")])
@pytest.mark.parametrize(
    "calls, wrong",
    [
        ([("query", {})], ("query", {})),
        ([("query", {"lane": 1})], ("query", {"lane": 1, "has_out": True})),
        (TWO, ("query", {"num_tokens": 0})),
    ],
    ids=["again", "again with out", "no rows"],
)
def test_a_query_on_an_open_one_is_an_error_on_every_rank(calls, wrong, mode, backend):
    results = run_ranks(open_query, 3, calls, wrong, backend, mode=mode)
    assert len({str(result.error) for result in results}) == 1, results
    for result in results:
        assert type(result.error) is DcpError and len(result.error.ranks) == 1, result
        assert str(result.error).startswith(f"query_gather: {NOT_RELEASED} (reported by rank ") and result.seconds < 0.5
        assert f"in query_gather(num_tokens={wrong[1].get('num_tokens', 3)}, " in str(result.error)


@pytest.mark.parametrize("mode, backend", [("thread", "collective"), ("process", "collective"), ("thread", "direct")])
@pytest.mark.parametrize(
    "calls, rows",
    [([("query", {})], 4), ([("query", {})], 0), (TWO, 3)],
    ids=["more", "none", "instead of none"],
)
def test_a_merge_of_other_rows_than_those_gathered_is_an_error(calls, rows, mode, backend):
    results = run_ranks(open_query, 3, calls, ("reduce", {"num_tokens": rows}), backend, mode=mode)
    assert len({str(result.error) for result in results}) == 1, results
    for result in results:
        assert type(result.error) is DcpMismatch and result.seconds < AT_ONCE_S, result
        text = str(result.error)
        assert text.startswith("a2a_lse_reduce: a2a_lse_reduce after query_gather must have its number of tokens"), text
        assert f"a2a_lse_reduce(num_tokens={rows}, " in text
        assert f" after query_gather(num_tokens={calls[-1][1].get('num_tokens', 3)}, " in text


def closes(group):
    """What closes a query and what does not need to; other lanes have their own."""
    rank = Rank(group, timeout_s=10.0)
    rank.query()
    rank.query(lane=1)  # another lane
    rank.reduce()
    rank.query(num_tokens=2)
    rank.release()
    rank.release()  # nothing is open: no harm
    rank.query(num_tokens=9, has_out=True)
    rank.query(has_out=True)  # nothing stays open
    rank.reduce(num_tokens=2)  # a merge without a gather
    rank.query(num_tokens=0)
    rank.reduce(num_tokens=0)
    rank.query(num_tokens=1)
    wrong = attempt(
        a2a_lse_reduce, torch.zeros(1, NUM_HEADS, 16), torch.zeros(1, 2), workspace=rank.workspace, lse_base="e"
    )
    assert type(wrong.error) is DcpInvalidArgument
    rank.reduce(num_tokens=1)
    rank.chunk()
    rank.reduce(num_tokens=3, lane=1)
    rank.workspace.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_closes_a_query(mode):
    run_ranks(closes, 3, mode=mode)


def nan_output(group):
    rank = Rank(group)
    rank.query(num_tokens=2)
    out = torch.zeros(3, NUM_HEADS // 2, 16)
    arguments = {"workspace": rank.workspace, "lse_base": "e", "out": out}
    result = attempt(a2a_lse_reduce, torch.zeros(3, NUM_HEADS, 16), torch.zeros(3, NUM_HEADS), **arguments)
    assert type(result.error) is DcpMismatch
    return bool(out.isnan().all())


def test_a_merge_that_is_refused_gives_nan():
    assert run_ranks(nan_output, 2) == [True, True]


# -- late, lost


def missing(group, op, absent):
    rank = Rank(group)
    if op == "wait":
        rank.start()
    if rank.workspace.rank in absent:
        time.sleep(TIMEOUT_S + 0.8)
    result = rank.finish(attempt(getattr(rank, op)))
    meet(group)
    again = Rank(group)  # all are there again: a new workspace works
    again.query()
    again.chunk()
    again.workspace.close()
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["query", "release", "chunk", "wait"])
def test_a_missing_rank_is_named_on_every_rank(op, mode):
    absent = [1] if op in ("query", "wait") else [0]
    name = {"query": "query_gather", "release": "release_query", "chunk": "kv_gather_wait", "wait": "kv_gather_wait"}[
        op
    ]
    for rank, result in enumerate(run_ranks(missing, 3, op, absent, mode=mode)):
        assert type(result.error) is DcpTimeout and result.error.ranks == tuple(absent), (rank, result)
        assert str(result.error).startswith(f"{name}: all ranks must call in time (rank {absent[0]} did not"), result
        assert result.seconds < TIMEOUT_S + 1
        if rank not in absent:
            assert result.seconds > TIMEOUT_S / 2 - 0.1


def first_call(group):
    """A rank is late for the first call of a stream."""
    rank = Rank(group, warm=False, timeout_s=0.3, first_call_timeout_s=20.0)
    results = []
    for op in (rank.query, rank.reduce, rank.chunk):
        if rank.workspace.rank == 1:
            time.sleep(0.8)
        results.append(attempt(op).error)
    rank.workspace.close()
    return results


def test_the_first_call_of_every_stream_has_its_own_deadline():
    assert run_ranks(first_call, 2) == [[None] * 3] * 2


def killed(group, victim, seed):
    rank = Rank(group, timeout_s=10.0)
    delays, choices = random.Random(seed), random.Random(seed)
    moment = max(as_group(group).all_gather_object(time.monotonic(), timeout_s=20)) + 0.05
    if rank.workspace.rank == victim:
        when = moment + delays.random() * 0.05
        wait = lambda: (time.sleep(max(0, when - time.monotonic())), os.kill(os.getpid(), signal.SIGKILL))
        threading.Thread(target=wait).start()

    def step():
        num_tokens = choices.choice([0, 1, 4])
        rank.query(num_tokens)
        rank.chunk(choices.randrange(3))
        rank.query(9, has_out=True, lane=1)
        rank.reduce(num_tokens)

    while (result := attempt(step)).error is None:
        pass
    delay = time.monotonic() - moment
    rank.workspace.close()
    return result.error, delay


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_rank_is_named(seed):
    """kill -9 at a random moment of a loop of all ops."""
    victim = 1 + seed % 2
    results = run_ranks(killed, 3, victim, seed, mode="process", expect_exit={victim: -signal.SIGKILL})
    for error, delay in results[:victim] + results[victim + 1 :]:
        assert type(error) is DcpPeerLost and error.ranks == (victim,), error
        assert delay < 3, delay


def killed_in_between(group):
    rank = Rank(group, timeout_s=10.0)
    me = rank.workspace.rank
    if me == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt([rank.query, rank.chunk][me])


def test_a_killed_rank_is_named_by_ranks_in_different_ops():
    """As when it died between two ops, and its last bytes came to some ranks and not to others."""
    results = run_ranks(killed_in_between, 3, mode="process", expect_exit={2: -signal.SIGKILL})
    for result in results[:2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (2,) and result.seconds < 3, result


# -- this rank alone


def orders(group):
    rank = Rank(group, timeout_s=10.0)
    workspace, errors = rank.workspace, []

    def refused(call, *args, **kwargs):
        raised = attempt(call, *args, **kwargs)
        assert type(raised.error) is DcpInvalidArgument and raised.seconds < AT_ONCE_S, raised
        errors.append(str(raised.error))

    rank.started = rank.plan()
    refused(rank.wait)  # nothing was started
    rank.start(1)
    first = rank.started
    refused(rank.start, 2)  # not waited for
    rank.started = first
    refused(rank.wait, 2)  # another chunk
    rank.started = rank.plan()
    refused(rank.wait, 1)  # another plan, though it is equal
    rank.started = first
    refused(rank.wait, 1, lane=1)
    refused(rank.wait, 1, out=torch.zeros(8, 96, dtype=torch.bfloat16))  # without a scale
    rank.wait(1)
    refused(rank.wait, 1)  # has been waited for
    rank.start(2)
    rank.wait(2, scale=2.0)
    rank.chunk(0)
    workspace.close()
    return errors


@pytest.mark.parametrize("mode", MODES)
def test_chunks_in_a_wrong_order_send_nothing(mode):
    for errors in run_ranks(orders, 2, mode=mode):
        assert (
            "(got none was started)" in errors[0] and "the chunk started before on lane 0 must be waited" in errors[1]
        )
        assert "chunk 1 was started; asked for 2" in errors[2]


def memory(group):
    """On rank 1 tensors that share memory; then the call put right, which meets the others."""
    rank = Rank(group, timeout_s=10.0)
    workspace, mine = rank.workspace, slice(0, NUM_HEADS // 2)
    query, out = torch.ones(3, NUM_HEADS // 2, QUERY_DIM), torch.zeros(3, NUM_HEADS, QUERY_DIM)
    view = query_gather(query, workspace=workspace)
    release_query(workspace=workspace)
    # Of the buffer, or of `out`: as the query, as a part, as `out`.
    wrong = [(view[:, mine], None), ((query[..., :4], view[:, mine, 4:]), None), (query, view), (out[:, mine], out)]
    for given, wanted in wrong if workspace.rank == 1 else []:
        raised = attempt(query_gather, given, workspace=workspace, out=wanted)
        assert type(raised.error) is DcpInvalidArgument and "overlap" in str(raised.error), raised
        assert raised.seconds < AT_ONCE_S
    rank.query()
    rank.release()
    plan = rank.plan(chunk_size=4)
    cache = torch.full((5, 4, 96), 7, dtype=torch.uint8).view(E4M3)
    chunks = [kv_gather(cache, rank.plan(), i, workspace=workspace) for i in range(2)]
    kv_gather_start(cache, plan, 0, workspace=workspace)
    for chunk in chunks:  # in each of the two buffers
        wanted = as_strided_bf16(chunk)
        raised = attempt(kv_gather_wait, plan, 0, workspace=workspace, scale=2.0, out=wanted)
        assert type(raised.error) is DcpInvalidArgument and "overlap" in str(raised.error), raised
    assert kv_gather_wait(plan, 0, workspace=workspace).view(torch.uint8).eq(7).all()
    workspace.close()


def as_strided_bf16(chunk):
    """Its first bytes as an `out` of [4, 96]."""
    return chunk.view(torch.uint8).view(-1)[: 4 * 96 * 2].view(torch.bfloat16).view(4, 96)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_share_memory_send_nothing(mode):
    run_ranks(memory, 2, mode=mode)


def busy(group, op):
    rank = Rank(group, timeout_s=10.0)
    workspace = rank.workspace
    errors = []
    thread = threading.Thread(target=lambda: errors.append(attempt(getattr(rank, op)).error))
    if workspace.rank == 0:
        thread.start()
        time.sleep(0.2)
        seconds = [rank.query, rank.release] if op == "query" else [rank.start]
        for call in seconds:
            second = attempt(call)
            assert type(second.error) is DcpError and "lane 0 is in flight" in str(second.error), second
        closed = attempt(workspace.close)
        assert type(closed.error) is DcpError and "no call may be in flight" in str(closed.error), closed
        assert attempt(lambda: rank.start(lane=1)).error is None
    meet(group)
    if workspace.rank == 1:
        thread.start()
    thread.join()
    assert errors == [None], errors
    rank.reduce()
    return True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["query", "chunk"])
def test_a_second_call_in_flight_is_an_error(op, mode):
    assert run_ranks(busy, 2, op, mode=mode) == [True, True]


def after_close(group):
    rank = Rank(group)
    rank.query()
    rank.start()
    rank.workspace.close()
    return [str(attempt(call).error) for call in (rank.query, rank.release, rank.start, rank.wait, rank.chunk)]


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_workspace_says_so(mode):
    for texts in run_ranks(after_close, 2, mode=mode):
        assert all("the workspace must be open" in text for text in texts), texts


def test_a_workspace_without_the_parts_says_so():
    def body(group):
        config = {"query_head_dim": 0, "padded_num_heads": 0, "kv_chunk_rows": 0, "kv_dim": 0}
        rank = Rank(group, warm=False, **config)
        with rank.workspace:
            return [type(attempt(call).error) for call in (rank.query, rank.release, rank.start)]

    assert run_ranks(body, 2) == [[DcpUnsupported] * 3] * 2
    assert dataclasses.replace(CONFIG, query_head_dim=0, padded_num_heads=0).region_layout(2).ops[1:] == ("kv_gather",)


def interrupted(group):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = Rank(group, timeout_s=20.0)
    me = rank.workspace.rank
    if me == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if me == 2:
        time.sleep(1.0)
    rank.start()
    result = attempt(rank.wait)
    again = attempt(rank.query)
    rank.workspace.close()
    meet(group)
    return result, again


def test_ctrl_c_ends_a_wait_for_a_chunk():
    (result, again), *others = run_ranks(interrupted, 3, mode="process")
    assert type(result.error) is KeyboardInterrupt and 0.2 < result.seconds < 0.8
    assert isinstance(again.error, DcpError) and again.error.ranks == (0,)
    for other, _ in others:
        assert isinstance(other.error, DcpError) and other.error.ranks == (0,), other
