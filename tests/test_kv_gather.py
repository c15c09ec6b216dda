"""kv_gather: the chunk that it returns and how long that lives, who writes which rows, and the split form's order.

All ranks, lengths and caches are in test_kv_gather_matrix.py; refused arguments, in test_kv_gather_arguments.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal

import pytest
import torch

from dcpkernels import KVGatherPlan, Workspace, WorkspaceConfig, kv_gather, kv_gather_start, kv_gather_wait
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import PATTERN, Buffers, Context, any_bits

CONFIG = WorkspaceConfig(12, 8, 4, num_lanes=2, kv_chunk_rows=256, kv_dim=32, timeout_s=10.0, first_call_timeout_s=10.0)
MULTICAST = pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])


def context_of(num_ranks, lens=(300, 0, 77, 500), **fields):
    return Context(lens, num_ranks, 32, torch.bfloat16, **{"interleave": 2} | fields)


@pytest.mark.parametrize(
    "dtype, dim", [(torch.bfloat16, 576), (torch.float8_e4m3fn, 656), (torch.float32, 132)], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_rows_as_wide_as_a_model_s(num_ranks, dtype, dim):
    """Also of row widths that are a multiple of 16 bytes and of nothing larger."""
    context = Context((1000, 3, 2000), num_ranks, dim, dtype, 1, 64, "layers inside of blocks")
    config = dataclasses.replace(CONFIG, num_heads=num_ranks, kv_chunk_rows=1024, kv_dim=dim, kv_dtype=dtype)

    def body(group):
        with Workspace(group, config=config) as workspace:
            plan = context.plan(workspace.rank, 1024)
            for i in range(plan.num_chunks):
                chunk = kv_gather(context.caches[workspace.rank], plan, i, workspace=workspace)
                assert same_bits(chunk, context.chunk(1024, i))

    run_ranks(body, num_ranks)


# -- the view


@MULTICAST
def test_two_buffers_a_lane(multicast):
    """Contiguous and without padding; chunks alternate between two places, whatever plans they are of and whatever dtype
    and width rows have. Lanes have their own."""
    context = context_of(2)
    narrow = Context((100,), 2, 16, torch.float8_e5m2)

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, multicast=multicast)) as workspace:
            places = [[], []]
            for turn in range(3):
                for lane in (0, 1):
                    for given, size in ((context, 200), (narrow, 64), (context, 256)):
                        plan = given.plan(workspace.rank, size)
                        chunk = kv_gather(given.caches[workspace.rank], plan, turn % 2, workspace=workspace, lane=lane)
                        assert same_bits(chunk, given.chunk(size, turn % 2)) and chunk.is_contiguous()
                        assert not chunk.requires_grad
                        places[lane].append(chunk.data_ptr())
            return places

    for first, second in run_ranks(body, 2):
        assert len(set(first)) == len(set(second)) == 2 and not set(first) & set(second)
        for lane in (first, second):
            assert all(a != b for a, b in itertools.pairwise(lane)), "not in turn"
        apart = sorted({*first, *second})
        assert all(b - a >= 256 * 64 for a, b in itertools.pairwise(apart))


@MULTICAST
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_chunk_lives_until_the_next_one_has_been_waited_for(num_ranks, multicast):
    """Also when every rank has started that one, and when it was plainly gathered before."""
    context = context_of(num_ranks)

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, multicast=multicast)) as workspace:
            cache, plan = context.caches[workspace.rank], context.plan(workspace.rank, 100)
            chunk = kv_gather(cache, plan, 0, workspace=workspace)
            for i in range(1, plan.num_chunks):
                kv_gather_start(cache, plan, i, workspace=workspace)
                meet(group)  # all rows of chunk i are stored
                assert same_bits(chunk, context.chunk(100, i - 1)), i
                chunk = kv_gather_wait(plan, i, workspace=workspace)
                assert same_bits(chunk, context.chunk(100, i))
                meet(group)

    run_ranks(body, num_ranks)


def test_the_chunk_stays_memory_after_the_workspace():
    def body(group):
        for multicast in (True, False):
            context = context_of(2)
            workspace = Workspace(group, config=dataclasses.replace(CONFIG, multicast=multicast))
            chunk = kv_gather(context.caches[group.rank], context.plan(group.rank, 100), 0, workspace=workspace)
            workspace.close()
            meet(group)
            chunk.clone()

    run_ranks(body, 2)


def writes_into_the_chunk(group):
    context = context_of(2)
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=2.0))
    plan, cache = context.plan(workspace.rank, 100), context.caches[workspace.rank]
    chunk = kv_gather(cache, plan, 0, workspace=workspace)
    assert same_bits(chunk, context.chunk(100, 0))
    meet(group)
    if workspace.rank == 1:
        chunk.view(torch.uint8)[0, 0] = 1
    return attempt(kv_gather, cache, plan, 1, workspace=workspace).error


def test_read_only_views(monkeypatch):
    monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", "1")
    error, _ = run_ranks(writes_into_the_chunk, 2, mode="process", expect_exit={1: -signal.SIGSEGV})
    assert isinstance(error, DcpError) and error.ranks == (1,)


# -- who writes what


@pytest.mark.parametrize("multicast, num_channels", [(True, 1), (True, 3), (False, 1), (False, 3)])
@pytest.mark.parametrize("interleave", [1, 16])
def test_a_rank_writes_the_rows_it_owns_and_no_others(interleave, multicast, num_channels):
    """One rank after the other starts; after each, exactly its rows have come, on all ranks, and other bytes are as before:
    rows of peers, the rest of the buffer, the other buffers."""
    config = dataclasses.replace(CONFIG, multicast=multicast, num_channels=num_channels)
    context = context_of(3, interleave=interleave)
    owners, num_bytes = context.owners(), 64

    def body(group):
        with Workspace(group, config=config) as workspace:
            buffers = Buffers(group, workspace, "kv_gather")
            cache, plan = context.caches[workspace.rank], context.plan(workspace.rank, 200)
            for i in range(plan.num_chunks):
                buffers.fill()
                truth = context.chunk(200, i).view(torch.uint8)
                first = i % 2 * len(buffers.bytes) // 4  # the first of two lanes
                rows = buffers.bytes[first : first + len(truth) * num_bytes].view(-1, num_bytes)
                written = torch.zeros(len(truth), dtype=torch.bool)
                for owner in (2, 0, 1):
                    if workspace.rank == owner:
                        kv_gather_start(cache, plan, i, workspace=workspace)
                    meet(group)
                    written |= owners[200 * i :][: len(truth)] == owner
                    assert torch.equal(rows[written], truth[written]), (i, owner)
                    assert rows[~written].eq(PATTERN).all(), (i, owner)
                    buffers.check(first, first + len(truth) * num_bytes)
                assert kv_gather_wait(plan, i, workspace=workspace).data_ptr() == rows.data_ptr()
                meet(group)

    run_ranks(body, 3)


def test_only_the_blocks_of_the_context_are_read():
    """Entries past what the lengths need may be anything, and so may the cache be there: a huge block number would be a
    crash. The caches of ranks that own nothing may be empty."""
    cache = any_bits((4, 16, 32), torch.bfloat16)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = workspace.rank
            fields = {"block_size": 16, "num_ranks": 3, "rank": rank, "chunk_size": 64, "interleave": 64}
            plan = KVGatherPlan([20], [[2, 1, 2**31 - 1, -5]], **fields)
            mine = cache if rank == 0 else cache[:0]
            chunk = kv_gather(mine, plan, 0, workspace=workspace)
            assert same_bits(chunk, torch.cat([cache[2], cache[1, :4]]))

    run_ranks(body, 3)


def test_the_cache_may_change_as_soon_as_start_returns():
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            for turn in range(10):
                context = context_of(3, seed=turn)
                cache, plan = context.caches[workspace.rank].clone(), context.plan(workspace.rank, 256)
                for i in range(plan.num_chunks):
                    kept = cache.clone()
                    kv_gather_start(cache, plan, i, workspace=workspace)
                    cache.view(torch.uint8).fill_(turn)
                    assert same_bits(kv_gather_wait(plan, i, workspace=workspace), context.chunk(256, i))
                    cache.copy_(kept)

    run_ranks(body, 3)


# -- the order of chunks


@pytest.mark.parametrize("fields", [{}, {"multicast": False}, {"num_channels": 3}], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_loop_of_the_manual(num_ranks, fields):
    """The next chunk travels while one is used; layer after layer with one plan, plain calls between."""

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, **fields)) as workspace:
            rank = workspace.rank
            for layer in range(4):
                context = context_of(num_ranks, seed=layer)
                plan, cache, used = context.plan(rank, 96), context.caches[rank], []
                kv_gather_start(cache, plan, 0, workspace=workspace)
                for i in range(plan.num_chunks):
                    chunk = kv_gather_wait(plan, i, workspace=workspace)
                    if i + 1 < plan.num_chunks:
                        kv_gather_start(cache, plan, i + 1, workspace=workspace)
                    used.append(chunk.clone())
                assert same_bits(torch.cat(used), context.rows)
                assert same_bits(kv_gather(cache, plan, 5, workspace=workspace), context.chunk(96, 5))

    run_ranks(body, num_ranks)


def test_any_order_of_chunks():
    """The same one twice, backwards, of two plans in turn: what counts is that all ranks do the same."""
    context, other = context_of(2), context_of(2, lens=(64, 1), seed=5)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = workspace.rank
            for i in (8, 3, 3, 0, 8, 1):
                plan = context.plan(rank, 100)
                assert same_bits(kv_gather(context.caches[rank], plan, i, workspace=workspace), context.chunk(100, i))
                plan = other.plan(rank, 256)
                assert same_bits(kv_gather(other.caches[rank], plan, 0, workspace=workspace), other.rows)

    run_ranks(body, 2)


def test_plans_without_chunks():
    """Empty contexts: nothing to gather, and chunk 0 is none."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            context = context_of(2, lens=(0, 0))
            plan = context.plan(workspace.rank, 100)
            assert plan.num_chunks == 0
            raised = attempt(kv_gather, context.caches[workspace.rank], plan, 0, workspace=workspace)
            assert isinstance(raised.error, ValueError)

    run_ranks(body, 2)


@pytest.mark.parametrize("start", [2, 2**32 - 3, 2**32 - 1, 2**63 - 14], ids=hex)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_across_the_wrap_of_the_epochs(num_ranks, start):
    context = context_of(num_ranks)

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, start_epoch=start)) as workspace:
            plan, used = context.plan(workspace.rank, 100), []
            for i in range(plan.num_chunks):
                kv_gather_start(context.caches[workspace.rank], plan, i, workspace=workspace)
                used.append(kv_gather_wait(plan, i, workspace=workspace).clone())
            assert same_bits(torch.cat(used), context.rows)

    run_ranks(body, num_ranks)
