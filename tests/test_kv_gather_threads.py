"""The gathers from several threads: channels, lanes at the same time, and context that travels in a side thread while the
main thread decodes on the same lane."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from dcpkernels import (
    Workspace,
    WorkspaceConfig,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    reference,
    release_query,
)
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, same_bits
from tests.gather_calls import Context, any_bits, release_by_merge
from tests.test_a2a_matrix import PARALLEL_FORS

CONFIG = {"query_head_dim": 40, "kv_chunk_rows": 128, "kv_dim": 32, "timeout_s": 20.0, "first_call_timeout_s": 20.0}
WAYS = pytest.mark.parametrize(
    "fields", [{}, {"multicast": False}, {"num_channels": 3}, {"num_channels": 2, "multicast": False}], ids=str
)


def open_workspace(group, fields, num_heads=12, parallel_for=None):
    config = WorkspaceConfig(num_heads, 16, 16, **CONFIG | fields)
    return Workspace(group, config=config, backend="direct", parallel_for=parallel_for)


def decode(workspace, count, lane=0, seed=0):
    """Steps of an engine: gather, merge. Every query is checked after a pause, just before its use ends."""
    sizes, pauses = random.Random(seed), random.Random(100 * seed + workspace.rank)
    num_ranks = workspace.num_ranks
    for step in range(count):
        num_tokens = sizes.choice([0, 1, 2, 7, 16])
        queries = [
            any_bits((num_tokens, 12 // num_ranks, 40), torch.bfloat16, 1000 * seed + 10 * step + r)
            for r in range(num_ranks)
        ]
        view = query_gather(queries[workspace.rank], workspace=workspace, lane=lane)
        if pauses.random() < 0.2:
            time.sleep(pauses.random() * 2e-3)
        assert same_bits(view, reference.query_gather(queries)), (lane, step)
        if sizes.random() < 0.7:
            release_by_merge(workspace, num_tokens, lane)
        else:
            release_query(workspace=workspace, lane=lane)


def prefill(workspace, count, lane=0, seed=0):
    """Contexts in chunks, each chunk checked after a pause while the next one travels."""
    pauses = random.Random(100 * seed + workspace.rank)
    for layer in range(count):
        context = Context((200, 0, 300), workspace.num_ranks, 32, torch.bfloat16, 2, seed=50 * seed + layer)
        plan, cache = context.plan(workspace.rank, 128), context.caches[workspace.rank]
        kv_gather_start(cache, plan, 0, workspace=workspace, lane=lane)
        for i in range(plan.num_chunks):
            chunk = kv_gather_wait(plan, i, workspace=workspace, lane=lane)
            if i + 1 < plan.num_chunks:
                kv_gather_start(cache, plan, i + 1, workspace=workspace, lane=lane)
            if pauses.random() < 0.2:
                time.sleep(pauses.random() * 2e-3)
            assert same_bits(chunk, context.chunk(128, i)), (lane, layer, i)
        assert same_bits(kv_gather(cache, plan, 1, workspace=workspace, lane=lane), context.chunk(128, 1))


def at_the_same_time(*bodies) -> None:
    """Each in a thread of its own; the first error of any is raised here."""
    results = [None] * len(bodies)

    def run(i):
        try:
            bodies[i]()
        except BaseException as error:  # noqa: BLE001  raised below
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    for error in filter(None, results):
        raise error


def both_ops_on_one_lane(group, fields):
    with open_workspace(group, fields) as workspace:
        at_the_same_time(lambda: prefill(workspace, 12), lambda: decode(workspace, 60))


@WAYS
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_travels_while_the_main_thread_decodes(num_ranks, fields):
    run_ranks(both_ops_on_one_lane, num_ranks, fields)


def test_context_travels_while_the_main_thread_decodes_between_processes():
    run_ranks(both_ops_on_one_lane, 2, {"num_channels": 2}, mode="process")


@WAYS
def test_two_lanes_in_two_threads_each(fields):
    """Both ops on both lanes of two ranks at once."""

    def body(group):
        with open_workspace(group, fields | {"num_lanes": 2}) as workspace:
            at_the_same_time(
                lambda: decode(workspace, 30, lane=0, seed=1),
                lambda: decode(workspace, 30, lane=1, seed=2),
                lambda: prefill(workspace, 6, lane=0, seed=3),
                lambda: prefill(workspace, 6, lane=1, seed=4),
            )

    run_ranks(body, 2)


def test_a_lane_that_waits_does_not_hold_up_another():
    """While a gather on lane 0 waits for a late peer, both ops make progress on lane 1, and kv_gather on lane 0."""

    def body(group):
        with open_workspace(group, {"num_lanes": 2}) as workspace:
            results = []
            query = any_bits((3, 6, 40), torch.bfloat16)

            def late():
                results.append(attempt(query_gather, query, workspace=workspace).error)

            thread = threading.Thread(target=late)
            if workspace.rank == 0:
                thread.start()
                time.sleep(0.1)
            decode(workspace, 10, lane=1)
            prefill(workspace, 2, lane=1)
            prefill(workspace, 2, lane=0)
            if workspace.rank == 0:
                assert results == []
            group.all_gather_object(None, timeout_s=20)
            if workspace.rank == 1:
                thread.start()
            thread.join()
            assert results == [None]
            release_query(workspace=workspace)

    run_ranks(body, 2)


@pytest.mark.parametrize("num_channels", [2, 7])
@pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])
def test_channels_in_threads_of_any_kind(multicast, num_channels):
    """Each rank has its own parallel_for; rows are fewer than channels, none, and more."""
    fields = {"multicast": multicast, "num_channels": num_channels}

    def body(group):
        with open_workspace(group, fields, num_heads=15, parallel_for=PARALLEL_FORS[group.rank]) as workspace:
            for turn, num_tokens in enumerate((9, 1, 0, 16, 3, 40)):
                queries = [any_bits((num_tokens, 3, 40), torch.bfloat16, 10 * turn + rank) for rank in range(5)]
                out = torch.empty(num_tokens, 15, 40, dtype=torch.bfloat16) if num_tokens > 16 else None
                result = query_gather(queries[workspace.rank], workspace=workspace, out=out)
                assert same_bits(result, reference.query_gather(queries))
                release_query(workspace=workspace)
            prefill(workspace, 2)
            context = Context((3,), 5, 32, torch.bfloat16)
            plan = context.plan(workspace.rank, 128)
            chunk = kv_gather(context.caches[workspace.rank], plan, 0, workspace=workspace)
            assert same_bits(chunk, context.rows)

    run_ranks(body, 5)
