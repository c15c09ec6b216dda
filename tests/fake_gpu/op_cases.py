"""What ranks do in tests of the three ops over the memory of a GPU's heap. `gpus(index)`: where a workspace that is made
meanwhile finds its device (fake_device.py)."""

import ctypes
import dataclasses
import random

import torch

from dcpkernels import (
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    reference,
)
from dcpkernels._gpu_device import GpuDevice
from tests.a2a_calls import attempt, check_with_peers, make_call, same_bits
from tests.gather_calls import Context

CONFIG = WorkspaceConfig(
    24, 64, 16, torch.bfloat16, query_head_dim=48, kv_chunk_rows=32, kv_dim=48, timeout_s=2.0, first_call_timeout_s=20.0
)


def run_all_ops(group, gpus, fields):
    config = dataclasses.replace(CONFIG, **fields)
    with gpus(group.rank()) as made, Workspace(group, config=config, backend="direct") as workspace:
        workspace.self_check()
        for num_tokens in (1, 0, 16, 5, 200):  # 200: in rounds
            check_with_peers(group, workspace, make_call(workspace.num_ranks, num_tokens, 24, 64, torch.bfloat16))
        stats = workspace.stats()
        workspace.check()
    return stats["num_calls"], len(made[0].streams), made[0].driver_api.live()


def gather_chunks(group, gpus, by_halves, scaled):
    """Chunks at once, in halves, and by some ranks so and by others so."""
    rank = group.rank()
    with (
        gpus(rank),
        Workspace(
            group, config=dataclasses.replace(CONFIG, num_channels=1 if scaled else 3, kv_dim=32), backend="direct"
        ) as workspace,
    ):
        dtype = torch.float8_e4m3fn if scaled else torch.bfloat16
        context = Context((70, 0, 41), workspace.num_ranks, 32, dtype)
        plan, cache = context.plan(rank, 32), context.caches[rank]
        scale = 0.5 if scaled else None
        for i in [*range(plan.num_chunks)] * 4:
            if by_halves(rank, i):
                kv_gather_start(cache, plan, i, workspace=workspace)
                chunk = kv_gather_wait(plan, i, workspace=workspace, scale=scale)
            else:
                chunk = kv_gather(cache, plan, i, workspace=workspace, scale=scale)
            expected = context.chunk(32, i)
            if scaled:  # a NaN has several codes
                chunk, expected = chunk.nan_to_num(3e4), (expected.float() * scale).to(torch.bfloat16).nan_to_num(3e4)
            assert same_bits(chunk, expected), i
        kv_gather_start(cache, plan, 0, workspace=workspace)
        raised = attempt(kv_gather, cache, plan, 1, workspace=workspace)  # one is to be waited for
        kv_gather_wait(plan, 0, workspace=workspace, scale=scale)
        workspace.check()
    return type(raised.error)


def never(rank, i):
    return False


def by_chunk(rank, i):
    return i % 2 == 0


def by_rank(rank, i):
    return (rank + i) % 2 == 0


def replay(group, gpus, num_calls):
    """Calls of several T are recorded, as a graph records a launch with its arguments; then graphs of them are replayed in
    any order, between calls that were not. What is right then depends on nothing that the host does at a call."""
    rank, shuffled = group.rank(), random.Random(7)
    config = dataclasses.replace(CONFIG, query_dtype=torch.float32)
    with gpus(rank) as made, Workspace(group, config=config, backend="direct") as workspace:
        (device,), num_ranks = made, workspace.num_ranks
        calls = {t: make_call(num_ranks, t, 24, 64, torch.bfloat16, seed=t) for t in (1, 4, 16, 40)}
        inputs = {t: (call.outs[rank].clone(), call.lses[rank].clone()) for t, call in calls.items()}
        outputs = {t: torch.empty(t, 24 // num_ranks, 64, dtype=torch.bfloat16) for t in calls}
        queries = {t: torch.zeros(t, 24 // num_ranks, 48, dtype=torch.float32) for t in (1, 4, 16)}
        graphs, views = {}, {}
        for t in calls:
            device.graph = graphs[t] = []
            if t in queries:
                views[t] = query_gather(queries[t], workspace=workspace)
            a2a_lse_reduce(*inputs[t], workspace=workspace, lse_base="e", out=outputs[t])
        device.graph = None
        for i in range(num_calls):
            t = shuffled.choice(list(calls))
            fresh = make_call(num_ranks, t, 24, 64, torch.bfloat16, seed=1000 + i)
            inputs[t][0].copy_(fresh.outs[rank])
            inputs[t][1].copy_(fresh.lses[rank])
            if t in queries:
                queries[t].fill_(1000 * i + rank)
            if shuffled.random() < 0.7:
                for k, (call, args) in enumerate(graphs[t]):
                    assert call(*args) == 0
                    if k + 1 < len(graphs[t]):  # the query, before the merge that ends its use
                        expected = torch.arange(num_ranks).repeat_interleave(24 // num_ranks).float() + 1000 * i
                        assert torch.equal(views[t], expected[None, :, None].expand(t, 24, 48))
                check_rank(fresh, rank, outputs[t])
            else:
                check_with_peers(group, workspace, fresh)
        return workspace.stats()["num_calls"] >= num_calls


def check_rank(call, rank, out):
    """This rank's heads of the truth; the bound is checked elsewhere."""
    exact, _ = reference.a2a_lse_reduce(call.outs, call.lses, lse_base=call.lse_base)
    heads = slice(rank * out.shape[1], (rank + 1) * out.shape[1])
    torch.testing.assert_close(out.double(), exact[:, heads], rtol=2**-7, atol=1e-3)


def leave_one_out(group, gpus, absent, num_channels):
    """What each rank raises: those in a call, and the absent one when it looks."""
    config = dataclasses.replace(CONFIG, num_channels=num_channels, timeout_s=0.5, first_call_timeout_s=20.0)
    rank = group.rank()
    with gpus(rank), Workspace(group, config=config, backend="direct") as workspace:
        call = make_call(workspace.num_ranks, 7, 24, 64, torch.bfloat16)
        check_with_peers(group, workspace, call)
        if rank == absent:
            group.barrier().wait()
            raised = attempt(workspace.check)
        else:
            out = torch.zeros(7, 24 // workspace.num_ranks, 64, dtype=torch.bfloat16)
            raised = attempt(merge_into, workspace, call, rank, out)
            assert out.isnan().all()
            group.barrier().wait()
        again = attempt(merge_into, workspace, call, rank, None)
    # The reporter's own words, also where it is another rank.
    assert "num_tokens=7" in str(raised.error) and "after 0." in str(raised.error), raised.error
    return type(raised.error), raised.error.ranks, type(again.error), again.error.ranks


def merge_into(workspace, call, rank, out):
    return a2a_lse_reduce(call.outs[rank], call.lses[rank], workspace=workspace, lse_base=call.lse_base, out=out)


def cut_a_link(group, gpus):
    """Rank 1 sees another memory in the place of rank 0's."""
    rank = group.rank()
    with gpus(rank) as made:
        original = GpuDevice._check_links

        def check_links(self, heap, *args):
            if rank == 1:
                heap.bases[0] = heap.bases[2]
                ctypes.memmove(heap.bases_table, ctypes.addressof(ctypes.c_uint64(heap.bases[2])), 8)
            original(self, heap, *args)

        GpuDevice._check_links = check_links
        raised = attempt(
            Workspace, group, config=dataclasses.replace(CONFIG, first_call_timeout_s=4.0), backend="direct"
        )
        GpuDevice._check_links = original
        assert set(made[0].driver_api.live().values()) == {0}
    return type(raised.error), str(raised.error)
