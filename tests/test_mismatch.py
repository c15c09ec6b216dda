"""Calls of every two kinds that meet; a rank that is ahead; waits that are not for a flag; calls that once had one digest;
ranks that find a fault at the same moment. What differs inside of one op is in test_faults.py, test_query_gather_faults.py
and test_kv_gather_faults.py, random programs in torture/test_mismatch.py."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dcpkernels import Workspace, _backend, a2a_lse_reduce, kv_gather_start
from dcpkernels.errors import DcpError, DcpMismatch, DcpTimeout, DcpUnsupported
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet
from tests.torture.mismatch_check import check_programs
from tests.torture.mismatch_programs import Call
from tests.torture.mismatch_ranks import CONFIG, HEAD_DIM, NUM_HEADS, WARM_UP, Maker

TIMEOUT_S = 2.0  # of the direct backend, whose ranks end together; far more than a busy machine holds up a rank
SHORT = dataclasses.replace(CONFIG, timeout_s=TIMEOUT_S)

# -- calls of every two kinds

KINDS = {
    "merge": (Call("reduce", 0, 3, "e"),),
    "merge of more": (Call("reduce", 0, 9, "e"),),
    "merge in lane 1": (Call("reduce", 1, 3, "e"),),
    "query": (Call("query", 0, 3, "float32"),),
    "query with out": (Call("query_out", 0, 3, "float32"),),
    "query in lane 1": (Call("query", 1, 3, "float32"),),
    "release": (Call("release", 0),),
    "chunk": (Call("chunk", 0, 0, 0),),
    "another chunk, split": (Call("start", 0, 1, 0), Call("wait", 0, 1, 0)),
    "chunk in lane 1": (Call("chunk", 1, 0, 0),),
}


def check_pair(number: int, pair: tuple[str, str], backend: str) -> None:
    """The last rank makes the second kind, or, of every other pair, the first."""
    num_ranks = 2 + number % 3
    usual, other = (KINDS[name] for name in (pair if number % 2 else reversed(pair)))
    # Without shared memory ranks do not end together: none must be held up by a busy machine up to another's deadline.
    config = SHORT if backend == "direct" else dataclasses.replace(SHORT, timeout_s=3.0)
    expected, error = check_programs([usual] * (num_ranks - 1) + [other], config, backend=backend)
    assert type(error) is DcpMismatch and num_ranks - 1 in error.ranks, (pair, error)
    assert "all ranks must make the same calls" in str(error)
    assert expected.at_once == (usual[0].stream == other[0].stream), pair


@pytest.mark.parametrize("backend, every", [("direct", 1), ("collective", 4)])
def test_calls_of_every_two_kinds(backend, every):
    """DcpMismatch on all of 2, 3 and 4 ranks, in one text that has both calls; in time; no numbers."""
    pairs = list(enumerate(itertools.combinations(KINDS, 2)))[::every]
    with ThreadPoolExecutor(6) as pool:  # they wait for deadlines
        list(pool.map(lambda pair: check_pair(*pair, backend), pairs))


# -- a rank that is ahead of the others

QUERY, MERGE = Call("query", 0, 3, "float32"), Call("reduce", 0, 3, "e")
LAYER, WIDER = (QUERY, MERGE), (QUERY._replace(number=4), MERGE._replace(number=4))
OTHER_LANE = tuple(call._replace(lane=1) for call in LAYER)
CHUNKS = tuple(Call("chunk", 0, i, 0) for i in range(3))
AHEAD = {  # the calls of all, those that rank 1 leaves out, the error, and how many of the others' calls return
    "by a merge: its next query finds its own one open": (LAYER * 3, [1], DcpError, 1),
    "by a query": (LAYER * 3, [2], DcpMismatch, 2),
    "by a layer of another shape": (LAYER + WIDER + LAYER, [2, 3], DcpMismatch, 2),
    "by a layer of the other lane": (LAYER + OTHER_LANE + LAYER, [2, 3], DcpMismatch, 2),
    "by a layer before one of the other lane": (LAYER + OTHER_LANE + LAYER, [0, 1], DcpMismatch, 0),
    "by a chunk": (CHUNKS, [0], DcpMismatch, 0),
    "by all chunks": (CHUNKS + LAYER, [0, 1, 2], DcpMismatch, 0),
    "by the merges of two layers": ((MERGE, MERGE, QUERY, MERGE), [0, 1], DcpMismatch, 0),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_rank_that_is_ahead(name):
    """It is found at the first call that differs from the others', on all ranks."""
    program, left_out, cls, num_good = AHEAD[name]
    ahead = tuple(call for i, call in enumerate(program) if i not in left_out)
    expected, error = check_programs([program, ahead, program], SHORT)
    assert type(error) is cls and 1 in error.ranks, error
    assert expected.ends[0] == expected.ends[2] == num_good


def test_a_layer_like_the_next_one_is_missed_at_the_end_only():
    """What a digest cannot see: the ranks made the same calls, as far as any of them can know, until one had no more. Each
    layer of the others was merged with the layer after it of rank 1, and with nothing else."""
    expected, error = check_programs([LAYER * 3, LAYER * 2, LAYER * 3], SHORT)
    assert type(error) is DcpTimeout and error.ranks == (1,)
    assert expected.ends == [4, 4, 4] and expected.matched[0][2] == (2, 2, 2)


def test_lanes_in_threads():
    """A call that differs in one lane ends what another thread does in the other lane, on all ranks, by the same error."""

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=20.0)) as workspace:

            def calls(lane: int) -> DcpError:
                maker = Maker(workspace)
                for i in itertools.count():
                    differs = lane == 0 and i == 30 and workspace.rank == 1
                    result = attempt(maker, Call("reduce", lane, 5 if differs else 3, "e"), 7)
                    if result.error is not None:
                        return result.error
                    assert result.value == (7,) * workspace.num_ranks
                raise AssertionError

            with ThreadPoolExecutor(2) as pool:
                errors = list(pool.map(calls, (0, 1)))
            meet(group)
            return errors

    errors = [error for of_rank in run_ranks(body, 3) for error in of_rank]
    assert len({str(error) for error in errors}) == 1
    assert type(errors[0]) is DcpMismatch and 1 in errors[0].ranks and "num_tokens=5" in str(errors[0])


def test_a_lane_that_goes_on_does_not_hide_where_a_rank_waits():
    """At the deadline rank 1 waits in two streams: for a moment in lane 1, where all is well, and in a query for good."""

    def body(group):
        config = dataclasses.replace(CONFIG, timeout_s=5.0 if group.rank == 1 else 0.5)
        with Workspace(group, config=config) as workspace:
            maker = Maker(workspace)
            for call in WARM_UP:
                maker(call, 0)
            meet(group)

            def goes_on() -> DcpError:
                while True:
                    time.sleep(0.02 if group.rank == 0 else 0)
                    if error := attempt(maker, Call("reduce", 1, 3, "e"), 0).error:
                        return error

            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(goes_on)
                error = attempt(
                    maker, Call(("reduce", "query")[group.rank], 0, 3, ("e", "float32")[group.rank]), 0
                ).error
                errors = [error, other.result()]
            meet(group)
            return errors

    errors = [error for of_rank in run_ranks(body, 2) for error in of_rank]
    assert len({str(error).partition(": ")[2] for error in errors}) == 1
    assert type(errors[0]) is DcpMismatch and errors[0].ranks == (0, 1), errors[0]


def test_lengths_that_contradict_are_each_rank_s_own():
    """The last rank calls rows 2 and up padding, the others call no row so: its shard is left out of these, and of nothing
    else. No rank can know who is right."""

    def body(group):
        with Workspace(group, config=SHORT) as workspace:
            rank = workspace.rank
            lengths = {
                "seq_lens": torch.tensor([5], dtype=torch.int32),
                "query_start_loc": torch.tensor([0, 2 if rank == 2 else 4], dtype=torch.int32),
            }
            payload = torch.full((4, NUM_HEADS, HEAD_DIM), float(3 * rank))
            return a2a_lse_reduce(payload, torch.zeros(4, NUM_HEADS), workspace=workspace, lse_base="e", **lengths)

    for out in run_ranks(body, 3):
        expected = torch.tensor([3.0, 3.0, 1.5, 1.5]).view(4, 1, 1)
        assert (out - expected).abs().max() < 1e-5


# -- waits that are not for a flag, or on another channel


@pytest.mark.parametrize("impatient", ["the rank that is elsewhere", "the ranks that start a chunk"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_gathers_a_query_while_the_others_wait_to_start_a_chunk(num_ranks, impatient):
    """A start waits for its peers' credits, and for no flag. Whoever looks first must see that it waits."""

    def body(group):
        elsewhere = group.rank == num_ranks - 1
        patient = elsewhere != (impatient == "the rank that is elsewhere")
        with Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=5.0 if patient else 0.5)) as workspace:
            maker = Maker(workspace)
            for call in WARM_UP:
                maker(call, 0)
            maker(Call("start", 0, 1, 0), 0)
            meet(group)
            if elsewhere:
                return attempt(maker, Call("query", 0, 3, "float32"), 0)
            maker(Call("wait", 0, 1, 0), 0)
            return attempt(kv_gather_start, maker._cache(0), maker.plans[0], 2, workspace=workspace)

    results = run_ranks(body, num_ranks)
    assert len({str(result.error).partition(": ")[2] for result in results}) == 1
    for result in results:
        assert type(result.error) is DcpMismatch and result.seconds < 0.5 + 1, result
        assert num_ranks - 1 in result.error.ranks and len(result.error.ranks) == 2
        assert f"rank {num_ranks - 1}: query_gather(num_tokens=3" in str(result.error)
        assert ": kv_gather(chunk_idx=2" in str(result.error)


def backwards(num_channels, run):
    with ThreadPoolExecutor(num_channels) as pool:
        ends = []
        for i in reversed(range(num_channels)):
            ends.append(pool.submit(run, i, i + 1))
            time.sleep(0.05)
        for end in ends:
            end.result()


def test_channels_in_threads_and_channels_in_one():
    """Rank 0 runs its last channel first, rank 1 all in one thread: only its first one comes to a wait."""

    def body(group):
        timeout_s, parallel_for = ((0.5, backwards), (5.0, lambda n, run: run(0, n)))[group.rank]
        config = dataclasses.replace(CONFIG, num_channels=3, timeout_s=timeout_s)
        with Workspace(group, config=config, parallel_for=parallel_for) as workspace:
            maker = Maker(workspace)
            for call in WARM_UP:
                maker(call, 0)
            meet(group)
            return attempt(maker, Call("reduce", group.rank, 3, "e"), 0)

    for result in run_ranks(body, 2):
        assert type(result.error) is DcpMismatch and result.error.ranks == (0, 1), result
        assert "lane=0" in str(result.error) and "lane=1" in str(result.error)


def test_a_rank_that_waits_on_another_channel_is_not_named_with_the_late_one():
    """Rank 2 does not come. Rank 1 has not signalled on the channel that rank 0 waits on, because it waits on another."""

    def body(group):
        parallel_for = None if group.rank == 2 else (backwards, lambda n, run: run(0, n))[group.rank]
        config = dataclasses.replace(CONFIG, num_channels=3, timeout_s=0.5 if group.rank == 0 else 5.0)
        with Workspace(group, config=config, parallel_for=parallel_for) as workspace:
            maker = Maker(workspace)
            for call in WARM_UP:
                maker(call, 0)
            meet(group)
            result = None if group.rank == 2 else attempt(maker, Call("reduce", 0, 3, "e"), 0)
            meet(group)
            return result

    for result in run_ranks(body, 3)[:2]:
        assert type(result.error) is DcpTimeout and result.error.ranks == (2,), result


# -- builds


def another_build(group, name):
    module = _backend.load("cpu")
    usual = getattr(module, name)
    if group.rank() == 1:
        setattr(module, name, 99)
    refused = [attempt(Workspace, group, config=SHORT, backend=backend).error for backend in ("direct", "auto")]
    setattr(module, name, usual)
    Workspace(group, config=SHORT).close()
    return refused


@pytest.mark.parametrize("name, word", [("BUILD_ID", "build"), ("PROTOCOL_VERSION", "protocol")])
def test_ranks_of_different_builds_exchange_nothing(name, word):
    """Refused on all ranks when the workspace is made, with the rank that differs; with any backend."""
    for refused in run_ranks(another_build, 3, name, mode="process"):
        for error in refused:
            assert type(error) is DcpUnsupported and error.ranks == (1,), error
            assert f"all ranks must agree on {word} (ranks 0, 2: " in str(error) and "rank 1: 99" in str(error)


# -- digests


def descriptors_of_a_stream(lane: int) -> list[list[int]]:
    """With T = 0: of merges, and of queries and releases, which find each other."""
    module = _backend.load("cpu")
    merges = [
        module.call_descriptor(op=1, lane=lane, dtype=dtype, lse_base=base, num_tokens=0)
        for dtype in range(3)
        for base in (0, 1)
    ]
    queries = [
        module.query_descriptor(lane=lane, dtype=dtype, has_out=has_out, num_tokens=0)
        for dtype in range(7)
        for has_out in (False, True)
    ]
    return [merges, [*queries, module.release_descriptor(lane=lane)]]


@pytest.mark.parametrize("lane", [0, 1, 7, 255])
def test_no_two_calls_of_a_stream_have_one_digest(lane):
    """With T below 2^28. T goes into the digest as it is, and what else may differ is farther apart than that."""
    digest = _backend.load("cpu").call_digest
    for calls in descriptors_of_a_stream(lane):
        assert len(set(calls)) == len(calls)
        for call in calls:
            for num_tokens in (1, 2**28 - 1, *random.Random(lane).sample(range(2**28), 50)):
                assert digest(call | num_tokens) == digest(call) ^ num_tokens
        assert all(digest(a) ^ digest(b) >= 2**28 for a, b in itertools.combinations(calls, 2))


@pytest.mark.parametrize(
    "calls",
    [
        (Call("reduce", 0, 2762, "e"), Call("reduce", 0, 2967, "e")),
        (Call("query_out", 1, 5035, "float32"), Call("query_out", 1, 13507, "float32")),
    ],
    ids=str,
)
def test_calls_of_many_rows(calls):
    """These had one digest when it was a mix of all bits: one rank merged what it had, and the other one waited."""
    _, error = check_programs([(call,) for call in calls], dataclasses.replace(SHORT, max_num_tokens=2048))
    assert type(error) is DcpMismatch and error.ranks == (0, 1)


# -- ranks that find a fault at the same moment


def fault_record(group, workspace):
    """Of this rank, in memory: csrc/core/types.h, FaultRecord."""
    part = workspace._impl._layout.parts["fault"]
    return (ctypes.c_uint64 * 8).from_buffer(workspace._impl._heap.own_memory(part.offset, 64))


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_that_find_a_fault_at_the_same_moment_name_one(num_ranks):
    """Each of two ranks has marked its own fault before it hears of the other's. All raise that of which rank 0 hears
    first, whoever asks first."""

    def body(group):
        workspace = Workspace(group, config=SHORT)
        try:
            record = fault_record(group, workspace)
            if group.rank in (1, 2):
                peer, T = 3 - group.rank, 10 + group.rank
                call = _backend.load("cpu").call_descriptor(op=1, lane=0, dtype=0, lse_base=0, num_tokens=T)
                other = _backend.load("cpu").call_descriptor(op=1, lane=0, dtype=0, lse_base=0, num_tokens=T + 10)
                record[1:8] = [1, 1 << peer, 0, 5, call, other, 0]
                record[0] = 2 << 56 | group.rank << 48 | peer << 40 | 1 << 32 | 5
            meet(group)
            if group.rank == 2:
                assert "rank 2: a2a_lse_reduce(num_tokens=12" in str(attempt(workspace.check).error)
            meet(group)
            raised = attempt(workspace.check)
            again = attempt(
                a2a_lse_reduce, torch.ones(3, 12, 16), torch.zeros(3, 12), workspace=workspace, lse_base="e"
            )
            meet(group)
            return [str(error).partition(": ")[2] for error in (raised.error, again.error) if error is not None]
        finally:
            workspace.close()

    texts = run_ranks(body, num_ranks)
    expected = (
        "all ranks must make the same calls (rank 2: a2a_lse_reduce(num_tokens=12, dtype=float32, lse_base='e', lane=0)"
    )
    for rank, said in enumerate(texts):
        assert said and all(text.startswith(expected) for text in said), (rank, said)
        assert rank > 2 or len(said) == 2
