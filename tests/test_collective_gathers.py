"""The gathers of the collective backend: byte for byte the reference, and what the direct backend gives, between processes
over gloo and between thread ranks. Their errors are in test_collective_gathers_faults.py."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcpkernels import (
    KVGatherPlan,
    Workspace,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet
from tests.collective_gather_calls import (
    CONFIG,
    E4M3,
    FNUZ,
    KV_BYTES,
    NUM_HEADS,
    QUERY_DIM,
    Context,
    as_bytes,
    contexts,
    gather_query,
    queries,
    reduce_rows,
    run_context,
    run_queries,
)

MODES = ["thread", "process"]
RANKS = [1, 2, 3]


def make(group, backend="collective", **fields):
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, **fields), backend=backend)
    assert workspace.backend == backend
    return workspace


# -- exchanges of bytes


def gather_chunks(group, rounds):
    exchange = as_group(group).duplicate(timeout_s=20.0)
    results = []
    for i, sizes in enumerate(rounds):
        start = sum(sizes[: exchange.rank])
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
        buffer[start : start + sizes[exchange.rank]] = 10 * i + exchange.rank + 1
        exchange.all_gather(buffer, sizes, timeout_s=20.0)
        results.append(buffer.tolist())
        buffer.zero_()  # nobody reads it any more
    exchange.close()
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_gather_of_chunks_of_any_size(num_ranks, mode):
    sizes = random.Random(num_ranks)
    rounds = [[sizes.choice([0, 0, 1, 5, 3000]) for _ in range(num_ranks)] for _ in range(8)]
    rounds += [[0] * num_ranks, [0] * (num_ranks - 1) + [7], [7] + [0] * (num_ranks - 1)]
    expected = [[10 * i + r + 1 for r, size in enumerate(sizes) for _ in range(size)] for i, sizes in enumerate(rounds)]
    assert run_ranks(gather_chunks, num_ranks, rounds, mode=mode) == [expected] * num_ranks


# -- query_gather


def body_queries(group, backend):
    """Every rank makes the calls for itself: torch cannot pickle fp8."""
    with make(group, backend) as workspace:
        calls = queries(workspace.num_ranks)
        results = run_queries(workspace, calls)
        num_merges = sum(not call.has_out and i % 2 == 0 for i, call in enumerate(calls))
        num_releases = sum(not call.has_out and i % 2 == 1 for i, call in enumerate(calls))
        assert workspace.stats()["num_calls"] == len(calls) + num_merges + num_releases
        return results


def check_queries(calls, by_rank):
    truths = [call.truth() for call in calls]
    for rank, results in enumerate(by_rank):
        for i, (got, truth) in enumerate(zip(results, truths, strict=True)):
            assert torch.equal(got, truth), (rank, i, calls[i].parts[0][0].dtype, calls[i].scale)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_queries_are_those_of_the_reference_and_of_the_direct_backend(num_ranks):
    calls = queries(num_ranks)
    check_queries(calls, run_ranks(body_queries, num_ranks, "collective"))
    check_queries(calls, run_ranks(body_queries, num_ranks, "direct"))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_queries_between_processes(num_ranks):
    check_queries(queries(num_ranks), run_ranks(body_queries, num_ranks, "collective", mode="process"))


def test_the_calls_of_these_tests_are_of_every_kind():
    calls = queries(2)
    kinds = {(call.has_out, call.parts[0][0].dtype, call.scale is None) for call in calls}
    assert len(kinds) == 2 * (7 + 3)
    scaled = [call for call in calls if call.scale is not None]
    assert {(call.has_out, type(call.scale)) for call in scaled} == {
        (o, t) for o in (0, 1) for t in (float, torch.Tensor)
    }
    assert {(call.has_out, call.to) for call in scaled} == {(False, E4M3), (True, E4M3), (True, FNUZ)}
    assert {call.num_tokens for call in calls if not call.has_out} >= {0, 1, 4}
    assert {call.num_tokens for call in calls if call.has_out} >= {0, 4, 13} and CONFIG.max_num_tokens == 4
    assert {len(call.parts[0]) for call in calls} == {1, 2, 4} and {call.lane for call in calls} == {0, 1}
    codes = torch.cat([call.truth() for call in scaled])
    assert len(codes.unique()) > 200  # not all of them saturate


def test_padded_heads_lie_behind_the_view():
    """Consumers may read past the last row; at first there are zeros."""

    def body(group):
        with make(group) as workspace:
            view = query_gather(torch.ones(4, NUM_HEADS // 2, QUERY_DIM), workspace=workspace)
            assert view.stride() == (NUM_HEADS * QUERY_DIM, QUERY_DIM, 1)
            behind = view.as_strided((4 * (8 - NUM_HEADS) * QUERY_DIM,), (1,), view.numel())
            return behind.eq(0).all().item()

    assert run_ranks(body, 2) == [True, True]


def test_a_tensor_with_history_or_of_inference_mode_will_do():
    def body(group):
        with make(group) as workspace:
            query = torch.ones(2, NUM_HEADS // 2, QUERY_DIM, requires_grad=True)
            with torch.inference_mode():
                out = torch.zeros(2, NUM_HEADS, QUERY_DIM)
                view = query_gather(query, workspace=workspace)
            release_query(workspace=workspace)
            got = query_gather(query, workspace=workspace, out=out)
            wanted = torch.zeros(2, NUM_HEADS, QUERY_DIM, requires_grad=True)
            assert query_gather(query, workspace=workspace, out=wanted) is wanted
            assert got is out and not view.is_inference() and not view.requires_grad
            results = [bool(value.eq(1).all()) for value in (view, out, wanted.detach())]
            scaled = query_gather(query, workspace=workspace, scale=torch.tensor(0.5, requires_grad=True))
            assert not scaled.requires_grad
            kept = weakref.ref(query)
            del query
            assert kept() is None  # no history holds it
            plan = Context(2, E4M3, [9], scale=1.0).plan(workspace.rank)
            cache = torch.ones(9, 4, KV_BYTES).to(E4M3).requires_grad_()
            with torch.inference_mode():
                chunk = torch.zeros(9, KV_BYTES, dtype=torch.bfloat16)
            kv_gather(cache, plan, 0, workspace=workspace, scale=1.0, out=chunk)
            return [*results, bool(scaled.float().eq(2).all()), bool(chunk.eq(1).all())]

    assert run_ranks(body, 2) == [[True] * 5] * 2


# -- kv_gather


def body_contexts(group, backend):
    with make(group, backend) as workspace:
        made = contexts(workspace.num_ranks)
        turn = iter(range(workspace.rank, 1000))
        results = [run_context(workspace, context, next(turn), split) for context in made for split in (False, True)]
        assert workspace.stats()["num_calls"] == sum(map(len, results))
        return results


def check_contexts(made, by_rank):
    truths = [truths for context in made for truths in [context.truths()] * 2]
    for rank, results in enumerate(by_rank):
        for i, (got, truth) in enumerate(zip(results, truths, strict=True)):
            same = [torch.equal(a, b) for a, b in zip(got, truth, strict=True)]
            assert same == [True] * len(truth), (rank, made[i // 2], same)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_chunks_are_those_of_the_reference_and_of_the_direct_backend(num_ranks):
    made = contexts(num_ranks)
    check_contexts(made, run_ranks(body_contexts, num_ranks, "collective"))
    check_contexts(made, run_ranks(body_contexts, num_ranks, "direct"))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_chunks_between_processes(num_ranks):
    check_contexts(contexts(num_ranks), run_ranks(body_contexts, num_ranks, "collective", mode="process"))


def test_some_ranks_own_no_row_of_some_chunks():
    """Else the tests above would not show that it works."""
    rows = [context.plan(0).rank_rows(i) for context in contexts(3) for i in range(context.plan(0).num_chunks)]
    assert any(0 in of_ranks for of_ranks in rows) and any(of_ranks.count(0) == 2 for of_ranks in rows)
    assert len({len(set(of_ranks)) for of_ranks in rows}) == 3  # equal parts, and different ones


@pytest.mark.parametrize("strides", ["contiguous", "K of [blocks, 2, size, dim]", "size outermost", "one block"])
def test_caches_of_any_strides(strides):
    context = Context(2, torch.bfloat16, [37, 9], chunk_size=24)

    def body(group):
        with make(group) as workspace:
            cache = context.caches[workspace.rank]
            if strides.startswith("K"):
                cache = torch.stack([cache, torch.full_like(cache, 7.0)], dim=1)[:, 0]
            elif strides == "size outermost":
                cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
            elif strides == "one block":  # all blocks are the same memory
                cache = cache[:1].expand_as(cache)
            plan = context.plan(workspace.rank)
            return [as_bytes(kv_gather(cache, plan, i, workspace=workspace)) for i in range(plan.num_chunks)]

    if strides == "one block":
        context.caches = [cache[:1].expand_as(cache).contiguous() for cache in context.caches]
    for results in run_ranks(body, 2):
        assert all(map(torch.equal, results, context.truths()))


@pytest.mark.parametrize("mode", MODES)
def test_the_cache_may_change_once_a_chunk_is_started(mode):
    context = Context(2, torch.float16, [40], chunk_size=20)
    for results in run_ranks(body_changes, 2, context, mode=mode):
        assert all(map(torch.equal, results, context.truths()))


def body_changes(group, context):
    """Also: a chunk is still there when the next one has been started."""
    with make(group) as workspace:
        plan, results = context.plan(workspace.rank), []
        view = None
        for i in range(plan.num_chunks):
            cache = context.caches[workspace.rank].clone()
            kv_gather_start(cache, plan, i, workspace=workspace)
            cache.fill_(1.0)
            if view is not None:
                results.append(as_bytes(view))
            meet(group)
            view = kv_gather_wait(plan, i, workspace=workspace)
        return [*results, as_bytes(view)]


def starts_and_merges(group, context):
    """Rank 0 starts a chunk before the merge, rank 1 behind it."""
    with make(group) as workspace:
        plan, cache = context.plan(workspace.rank), context.caches[workspace.rank]
        for turn in range(4):
            if workspace.rank != turn % 2:
                kv_gather_start(cache, plan, 0, workspace=workspace)
            reduce_rows(workspace, 2)
            if workspace.rank == turn % 2:
                kv_gather_start(cache, plan, 0, workspace=workspace)
            got = as_bytes(kv_gather_wait(plan, 0, workspace=workspace))
        return got


@pytest.mark.parametrize("mode", MODES)
def test_a_started_chunk_keeps_nobody_waiting(mode):
    """As over shared memory, `start` is not a meeting: other ops may come before it on one rank and after it on another."""
    context = Context(2, torch.float32, [20])
    for got in run_ranks(starts_and_merges, 2, context, mode=mode):
        assert torch.equal(got, context.truth(0))


# -- both at once


def side_thread(group, context):
    """Chunks in one thread; queries, merges and releases in the other, on the same lane."""
    calls, chunks, errors = queries(3), [], []
    with make(group) as workspace:
        delays = random.Random(workspace.rank)

        def gather():
            for split in (False, True) * 4:
                time.sleep(delays.random() * 3e-3)
                chunks.append(run_context(workspace, context, split=split))

        thread = threading.Thread(target=lambda: errors.append(attempt(gather).error))
        thread.start()
        results = [run_queries(workspace, calls) for _ in range(3)]
        thread.join()
    assert errors == [None]
    return results, chunks


@pytest.mark.parametrize("mode", MODES)
def test_a_side_thread_gathers_chunks_on_the_same_lane(mode):
    calls, context = queries(3), Context(3, torch.bfloat16, [50, 3, 20])
    for results, chunks in run_ranks(side_thread, 3, context, mode=mode):
        truths = [call.truth() for call in calls]
        assert [all(map(torch.equal, of_turn, truths)) for of_turn in results] == [True] * 3
        assert len(chunks) == 8 and all(all(map(torch.equal, got, context.truths())) for got in chunks)


@pytest.mark.parametrize(
    "without", [{"query_head_dim": 0, "padded_num_heads": 0}, {"kv_chunk_rows": 0, "kv_dim": 0}], ids=str
)
def test_only_ops_that_are_asked_for_have_streams(without, monkeypatch):
    """A group for each op and lane, and none besides."""

    def body(group):
        made = []
        duplicate = type(group).duplicate
        with monkeypatch.context() as patch:
            patch.setattr(group, "duplicate", lambda **fields: made.append(1) or duplicate(group, **fields))
            workspace = make(group, **without)
        with workspace:
            if "query_head_dim" in without:
                run_context(workspace, Context(2, torch.float16, [30]))
            else:
                gather_query(workspace, queries(2)[0])
            reduce_rows(workspace, 4)
            return len(made)

    assert run_ranks(body, 2) == [2 * CONFIG.num_lanes] * 2


# -- memory


class Largest(TorchDispatchMode):
    """The largest tensor that any op makes, in bytes; views count nothing."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in before:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("op", ["query", "query with a scale", "query with out", "kv", "kv with a scale"])
def test_no_temporary_is_larger_than_what_is_received(op):
    """The second call: staging is there. Values are converted in pieces of 256 KiB."""
    num_tokens, dim, piece = 512, 512, 4 << 16
    fields = {"query_head_dim": dim, "max_num_tokens": num_tokens, "padded_num_heads": 0}
    fields |= {"kv_chunk_rows": 8192, "kv_dim": dim}

    def body(group):
        with make(group, **fields) as workspace:
            query = torch.zeros(num_tokens, NUM_HEADS // 2, dim)
            cache = torch.zeros(64, 64, dim, dtype=torch.uint8).view(E4M3)
            table = [[*range(64)]]
            plan = KVGatherPlan([8192], table, block_size=64, num_ranks=2, rank=workspace.rank, chunk_size=8192)
            out = torch.zeros(8192, dim, dtype=torch.bfloat16)
            gathered = torch.zeros(num_tokens, NUM_HEADS, dim)
            call = {
                "query": lambda: query_gather(query, workspace=workspace),
                "query with a scale": lambda: query_gather(query, workspace=workspace, scale=2.0),
                "query with out": lambda: query_gather(query, workspace=workspace, out=gathered),
                "kv": lambda: kv_gather(cache, plan, 0, workspace=workspace),
                "kv with a scale": lambda: kv_gather(cache, plan, 0, workspace=workspace, scale=2.0, out=out),
            }[op]
            call()
            release_query(workspace=workspace)
            before = workspace.num_bytes
            with Largest() as largest:
                result = call()
            assert workspace.num_bytes == before
            return largest.num_bytes, result.nbytes // result.dtype.itemsize * (
                4 if op in ("query", "query with out") else 1
            )

    for largest, received in run_ranks(body, 2):
        assert received > 2 * piece
        assert 0 < largest <= piece, (largest, received)


def test_num_bytes_are_buffers_and_staging():
    def body(group):
        with make(group) as workspace:
            sizes = [workspace.num_bytes]
            query = torch.zeros(4, NUM_HEADS // 2, QUERY_DIM)
            for num_tokens in (1, 4, 2):
                query_gather(query[:num_tokens], workspace=workspace)
                release_query(workspace=workspace)
                sizes.append(workspace.num_bytes)
            run_context(workspace, Context(2, torch.float16, [20, 30], chunk_size=24))
            sizes.append(workspace.num_bytes)
            return sizes

    layout = CONFIG.region_layout(2)
    buffers = CONFIG.num_lanes * (layout.query_buffer_bytes + 2 * layout.kv_buffer_bytes)
    row = NUM_HEADS * QUERY_DIM * 4
    for sizes in run_ranks(body, 2):
        expected = [buffers, buffers + row, buffers + 4 * row, buffers + 4 * row]
        assert sizes == [*expected, buffers + 4 * row + 24 * 96]
