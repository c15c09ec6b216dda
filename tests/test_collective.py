"""The backend over torch.distributed: the same calls give the same bits, between processes over gloo and between thread
ranks, in any groups. Its errors are in test_collective_faults.py."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import Guarded, run_ranks
from dcpkernels.testing.inputs import KINDS
from tests.a2a_calls import assemble, attempt, config_for, make_call, merge, run_calls, same_bits
from tests.test_a2a_layouts import LSE_STRIDES, PAYLOAD_STRIDES, place

MODES = ["thread", "process"]
CONFIG = WorkspaceConfig(24, 64, 4, dtype=torch.float32, num_lanes=2, timeout_s=10.0, first_call_timeout_s=10.0)


def make(group, config=CONFIG, **fields):
    workspace = Workspace(group, config=dataclasses.replace(config, **fields), backend="collective")
    assert workspace.backend == "collective"
    return workspace


def same_as_direct(calls, by_rank, **fields):
    """Bit for bit what the other backend gives, which is within the bound of the truth."""
    for call, got, expected in zip(calls, assemble(by_rank), run_calls(calls, **fields), strict=True):
        assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1]), call.outs.shape
        call.check(*got)


# -- the same numbers


def lengths(num_ranks, num_tokens, seed):
    """Two sequences and some padding, empty on some ranks."""
    gen = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, num_tokens // 2, max(0, num_tokens - 1)], dtype=torch.int32)
    return {"seq_lens": torch.randint(-1, 2, (num_ranks, 2), generator=gen).int(), "query_start_loc": starts}


def semantic_calls(num_ranks, dtype):
    calls = []
    for i, num_tokens in enumerate([3, 0, 4, 1, 9, 13, 4, 0, 0, 5]):
        fields = {"lse_base": "e2"[i % 2], "lane": i % 3 % 2} | (
            lengths(num_ranks, num_tokens, i) if i % 3 == 2 else {}
        )
        kind = KINDS[i % len(KINDS)]
        calls.append(make_call(num_ranks, num_tokens, 24, 72, dtype, kind=kind, seed=i, **fields))
        if i % 2:
            calls[-1].lses = calls[-1].lses.to([torch.float16, torch.bfloat16][i // 2 % 2])
    return calls


def run_semantics(group, num_ranks, dtype):
    """Every call from a strided payload that lies among NaN, into strided outputs; some into outputs of their own."""
    calls = semantic_calls(num_ranks, dtype)
    config = config_for(calls[0], max_num_tokens=4, num_lanes=2, timeout_s=20.0)
    results = []
    with make(group, config) as workspace:
        for i, call in enumerate(calls):
            arguments = call.arguments(workspace.rank)
            turn = i + workspace.rank
            payload = place(
                arguments["partial_out"], [*PAYLOAD_STRIDES.values()][turn % len(PAYLOAD_STRIDES)], turn % 3
            )
            lse = place(arguments["partial_lse"], [*LSE_STRIDES.values()][turn % len(LSE_STRIDES)], 0)
            arguments |= {"partial_out": payload.tensor, "partial_lse": lse.tensor}
            num_tokens, local_heads = call.outs.shape[1], 24 // num_ranks
            if i % 3 == 0:
                results.append(a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments))
                continue
            out = Guarded((num_tokens, local_heads, 72), dtype, strides=(local_heads * 80, 80, 1))
            lse_out = Guarded((num_tokens, local_heads), torch.float32, strides=(1, num_tokens + 2))
            outputs = {"out": out.tensor, "lse_out": lse_out.tensor}
            results.append(a2a_lse_reduce(workspace=workspace, **arguments, **outputs))
            out.check(), lse_out.check(), payload.check()
        assert workspace.stats()["num_calls"] == len(calls)
        counted = workspace.stats()["nonfinite_lse"]
    return [(out.contiguous(), lse.contiguous()) for out, lse in results], counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_same_bits_as_the_direct_backend(num_ranks, dtype):
    """Layouts, empty shards, lengths, padding, T = 0, T above the capacity, both bases, LSE dtypes, two lanes."""
    results = run_ranks(run_semantics, num_ranks, num_ranks, dtype)
    same_as_direct(semantic_calls(num_ranks, dtype), [by_call for by_call, _ in results], num_lanes=2, max_num_tokens=4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_same_bits_between_processes(num_ranks):
    dtype = [torch.bfloat16, torch.float16, torch.float32][num_ranks % 3]
    results = run_ranks(run_semantics, num_ranks, num_ranks, dtype, mode="process")
    same_as_direct(semantic_calls(num_ranks, dtype), [by_call for by_call, _ in results], num_lanes=2, max_num_tokens=4)


def count_nonfinite(group, backend, calls):
    config = config_for(calls[0], num_lanes=2, max_num_tokens=4)
    with Workspace(group, config=config, backend=backend) as workspace:
        counts = []
        for call in calls:
            merge(workspace, call)
            counts.append(workspace.stats())
        return counts


def test_the_counters_are_those_of_the_direct_backend():
    calls = semantic_calls(3, torch.float32)
    call = make_call(3, 5, 24, 72, torch.float32, kind="empty", **lengths(3, 5, 0))
    call.seq_lens.fill_(1)  # every empty LSE contradicts
    calls += [call, call]
    direct, collective = (run_ranks(count_nonfinite, 3, backend, calls) for backend in ("direct", "collective"))
    assert direct == collective and direct[0][-1]["nonfinite_lse"] > 0


@pytest.mark.parametrize("fields", [{"zero_copy": True}, {"wire": "packet"}, {"num_channels": 3}], ids=str)
def test_fields_of_the_direct_backend_do_not_matter(fields):
    """So that a configuration serves both; also tensors of `partial_out`."""
    calls = [make_call(2, n, 24, 64, torch.float32, seed=n, kind="empty") for n in (3, 0, 9, 4)]

    def body(group):
        results = []
        with make(group, **fields) as workspace:
            for call in calls:
                arguments = call.arguments(workspace.rank)
                if call.outs.shape[1] <= 4:
                    arguments["partial_out"] = workspace.partial_out(call.outs.shape[1]).copy_(arguments["partial_out"])
                results.append(a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments))
            return results

    same_as_direct(calls, run_ranks(body, 2))


def lanes_in_threads(group, lanes):
    results, errors = [[], []], []
    with make(group, timeout_s=20.0) as workspace:

        def run(lane):
            delays = random.Random(10 * workspace.rank + lane)
            for call in lanes[lane]:
                if delays.random() < 0.1:
                    time.sleep(delays.random() * 2e-3)
                results[lane].append(merge(workspace, call))

        threads = [threading.Thread(target=lambda i=i: errors.append(attempt(run, i).error)) for i in (0, 1)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert errors == [None] * 2, errors
    return results


@pytest.mark.parametrize("mode", MODES)
def test_lanes_in_threads(mode):
    """The streams do not mix and do not wait for each other."""
    sizes = random.Random(5)
    lanes = [
        [make_call(3, sizes.choice([0, 1, 4, 9]), 24, 64, torch.float32, seed=i, lane=lane) for i in range(40)]
        for lane in (0, 1)
    ]
    by_rank = run_ranks(lanes_in_threads, 3, lanes, mode=mode)
    for lane in (0, 1):
        same_as_direct(lanes[lane], [results[lane] for results in by_rank], num_lanes=2)


def with_traffic(group, calls):
    """The caller's own collectives on the same group between the calls, and from another thread during them."""
    results, sums, errors = [], [], []
    other = dist.new_group(sort_ranks=False)
    with make(group, timeout_s=20.0) as workspace:

        def chatter():
            for i in range(100):
                value = torch.tensor([i + dist.get_rank()])
                dist.all_reduce(value, group=other)
                sums.append(int(value))

        thread = threading.Thread(target=lambda: errors.append(attempt(chatter).error))
        thread.start()
        for i, call in enumerate(calls):
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (i, dist.get_rank()))
            assert gathered == [(i, rank) for rank in range(dist.get_world_size())]
            work = dist.all_reduce(torch.ones(1), async_op=True)  # still in flight during the call
            results.append(merge(workspace, call))
            work.wait()
        thread.join()
    assert errors == [None] and sums == [3 * i + 3 for i in range(100)]
    return results


def test_the_callers_own_traffic_does_not_mix():
    calls = [make_call(3, n, 24, 64, torch.float32, seed=i) for i, n in enumerate([3, 0, 9, 1, 4] * 4)]
    same_as_direct(calls, run_ranks(with_traffic, 3, calls, mode="process"))


# -- groups


def in_groups(_):
    """Groups in any order of ranks, ranks that are in different groups, and several workspaces after each other on one."""
    me, results = dist.get_rank(), {}
    if me in (0, 2):  # a group that the others do not know of
        dist.new_group([0, 2], use_local_synchronization=True)
    groups = [(ranks, dist.new_group(ranks, sort_ranks=False)) for ranks in ([2, 0], [3, 1, 0], [3, 2, 1, 0])]
    for turn, (ranks, group) in enumerate([*groups, ([0, 1, 2, 3], None), *groups]):
        if me not in ranks:
            continue
        call = make_call(len(ranks), 3, 24, 64, torch.float32, seed=turn)
        with make(group) as workspace:
            assert (workspace.rank, workspace.num_ranks) == (ranks.index(me), len(ranks))
            results[turn] = (workspace.rank, merge(workspace, call))
    return results


def test_groups_of_any_ranks_in_any_order():
    by_rank = run_ranks(in_groups, 4, mode="process")
    members = [(2, 0), (3, 1, 0), (3, 2, 1, 0)]
    for turn, ranks in enumerate([*members, (0, 1, 2, 3), *members]):
        call = make_call(len(ranks), 3, 24, 64, torch.float32, seed=turn)
        assert [by_rank[rank][turn][0] for rank in ranks] == [*range(len(ranks))]
        same_as_direct([call], [[by_rank[rank][turn][1]] for rank in ranks])


def several_at_once(group):
    """Two workspaces of the same ranks and one of some of them, calls in turn and in different orders."""
    call, pair = make_call(3, 3, 24, 64, torch.float32), make_call(2, 3, 24, 64, torch.float32)
    first, second = make(group), make(group)
    some = dist.new_group([0, 2])
    results = []
    third = make(some) if group.rank() != 1 else None
    for turn in range(6):
        results.append(merge([first, second][turn % 2], call))
        if third is not None and turn % 3 == 1:
            results_of_pair = merge(third, pair)
    first.close()
    results.append(merge(second, call))
    second.close()
    if third is not None:
        third.close()
        return results, results_of_pair
    return results, None


def test_several_workspaces_at_once():
    by_rank = run_ranks(several_at_once, 3, mode="process")
    call, pair = make_call(3, 3, 24, 64, torch.float32), make_call(2, 3, 24, 64, torch.float32)
    same_as_direct([call] * 7, [results for results, _ in by_rank])
    same_as_direct([pair], [[by_rank[rank][1]] for rank in (0, 2)])


# -- other


def test_num_bytes_grow_with_the_calls():
    def body(group):
        with make(group) as workspace:
            sizes = [workspace.num_bytes]
            for num_tokens in (1, 4, 2, 40):
                merge(workspace, make_call(2, num_tokens, 24, 64, torch.float32))
                sizes.append(workspace.num_bytes)
            return sizes

    for sizes in run_ranks(body, 2):
        row = 12 * 64 * 4 + 64
        assert sizes == [0, 2 * row, 8 * row, 8 * row, 8 * row]


def test_nan_that_comes_out_is_nan_that_went_in():
    """A live shard with NaN, as over the direct backend."""
    call = make_call(2, 2, 24, 64, torch.float32)
    call.outs[1, 0, 0, 5] = math.nan

    def body(group):
        with make(group) as workspace:
            return [merge(workspace, call)]

    ((out, _),) = assemble(run_ranks(body, 2))
    assert out.isnan().sum() == 1 and out[0, 0, 5].isnan()
