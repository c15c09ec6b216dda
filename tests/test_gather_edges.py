"""What lies around the calls of the gathers: interrupts, memory that nobody or everybody has, indices of odd types, and the
end of a workspace."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from dcpkernels import (
    KVGatherPlan,
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.testing import run_ranks
from dcpkernels.testing.thread_group import ThreadGroup
from tests.a2a_calls import attempt, own_mappings

E4M3 = torch.float8_e4m3fn
CONFIG = WorkspaceConfig(4, 8, 8, num_lanes=2, query_head_dim=16, kv_chunk_rows=64, kv_dim=32)
BACKENDS = pytest.mark.parametrize("backend", ["direct", "collective"])


@pytest.fixture(autouse=True)
def nothing_is_left():
    """An error that is kept keeps its frames, and with them views; other tests count what this process has mapped."""
    yield
    gc.collect()


def alone(backend: str = "direct", config: WorkspaceConfig = CONFIG, **more) -> Workspace:
    (group,) = ThreadGroup.create(1)
    return Workspace(group, config=config, backend=backend, **more)


def a_plan(lens=(100,)) -> KVGatherPlan:
    return KVGatherPlan(lens, [list(range(8))], block_size=16, num_ranks=1, rank=0, chunk_size=64)


def a_cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(8 * 16 * 32).remainder(251).view(8, 16, 32).to(dtype)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


# -- a start that ends by an exception


def test_a_start_that_raises_behind_its_end_can_be_waited_for():
    """Ctrl-C, say: the chunk is started all the same, and the lane goes on."""

    class LeavesOneOut:
        is_on = False

        def __call__(self, num_channels, body):
            body(0, num_channels - self.is_on)

    channels = LeavesOneOut()
    plan, cache = a_plan(), a_cache()
    with alone(
        config=WorkspaceConfig(4, 8, 8, num_channels=2, kv_chunk_rows=64, kv_dim=32), parallel_for=channels
    ) as workspace:
        channels.is_on = True
        with pytest.raises(DcpError, match="body must be called for all channels"):
            kv_gather_start(cache, plan, 0, workspace=workspace)
        channels.is_on = False
        assert torch.equal(kv_gather_wait(plan, 0, workspace=workspace), cache.view(-1, 32)[:64])
        assert torch.equal(kv_gather(cache, plan, 1, workspace=workspace), cache.view(-1, 32)[64:100])


# -- memory


@BACKENDS
def test_tensors_without_memory(backend):
    plan, cache, query = a_plan(), a_cache(E4M3), torch.ones(2, 4, 16)
    with alone(backend) as workspace:
        wrong = [
            {"scale": 1.0, "out": without_memory(torch.zeros(64, 32, dtype=torch.bfloat16))},
            {"scale": without_memory(torch.tensor([2.0]))},
        ]
        for arguments in wrong:
            with pytest.raises(DcpInvalidArgument, match="kv_gather: .* must have memory of its own"):
                kv_gather(cache, plan, 0, workspace=workspace, **arguments)
        for _ in range(2):  # the second one is of a shape that is known
            with pytest.raises(DcpInvalidArgument, match="query_gather: scale must have memory of its own"):
                query_gather(query, workspace=workspace, scale=without_memory(torch.tensor([2.0])))
        kv_gather(cache, plan, 0, workspace=workspace, scale=2.0)  # nothing was started


@pytest.mark.parametrize("read_only", ["0", "1"])
@pytest.mark.parametrize("multicast", [True, False])
def test_no_tensor_of_a_call_may_lie_in_what_the_gathers_hand_out(multicast, read_only, monkeypatch):
    """Of any lane, of any of them: peers read it, or will write it."""
    monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", read_only)
    config = WorkspaceConfig(4, 8, 8, num_lanes=2, query_head_dim=16, kv_chunk_rows=64, kv_dim=32, multicast=multicast)
    with alone(config=config) as workspace:
        query, plan = torch.ones(2, 4, 16, dtype=torch.bfloat16), a_plan()
        view = query_gather(query, workspace=workspace, lane=1)
        chunk = kv_gather(a_cache(), plan, 0, workspace=workspace)
        partial, lse = torch.ones(2, 4, 8, dtype=torch.bfloat16), torch.zeros(2, 4)
        calls = {
            "out of another lane": lambda: query_gather(query, workspace=workspace, out=view),
            "query of another lane": lambda: query_gather(view, workspace=workspace),
            "out in a chunk": lambda: query_gather(query, workspace=workspace, out=chunk.view(-1)[:128].view(2, 4, 16)),
            "merged out": lambda: a2a_lse_reduce(
                partial, lse, workspace=workspace, lse_base="e", out=view[..., :8], lane=1
            ),
            "cache": lambda: kv_gather(chunk.view(4, 16, 32), a_plan((60,)), 0, workspace=workspace, lane=1),
            "converted out": lambda: kv_gather(
                a_cache(E4M3), plan, 0, workspace=workspace, scale=1.0, out=chunk[:64], lane=1
            ),
        }
        for name, call in calls.items():
            error = attempt(call).error
            assert isinstance(error, DcpInvalidArgument) and "overlap" in str(error), (name, error)
        a2a_lse_reduce(partial, lse, workspace=workspace, lse_base="e", lane=1)
        assert torch.equal(view, query) and torch.equal(chunk, a_cache().view(-1, 32)[:64])
        kv_gather(a_cache(E4M3), plan, 0, workspace=workspace, scale=1.0, lane=1)  # nothing was started


# -- indices


@BACKENDS
def test_an_index_is_taken_for_the_number_that_it_is(backend):
    plan, cache = a_plan(), a_cache()
    with alone(backend) as workspace:
        index = torch.tensor(0)
        assert len(kv_gather(cache, plan, index, workspace=workspace)) == 64
        index += 1
        assert len(kv_gather(cache, plan, index, workspace=workspace)) == 36
        assert len(kv_gather(cache, plan, np.int64(0), workspace=workspace)) == 64
        kv_gather_start(cache, plan, np.int64(1), workspace=workspace)
        for wrong in (np.array([0, 1]), torch.tensor([0, 1]), 1.0, True):
            with pytest.raises(DcpInvalidArgument):
                kv_gather_wait(plan, wrong, workspace=workspace)
        with pytest.raises(DcpInvalidArgument, match="chunk 1 was started; asked for 1 of another plan"):
            kv_gather_wait(a_plan(), 1, workspace=workspace)
        assert len(kv_gather_wait(plan, 1, workspace=workspace)) == 36


# -- the end


def heap_bytes() -> int:
    spans = [line.split()[0].split("-") for line in own_mappings()]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_a_closed_workspace_has_no_memory():
    before = heap_bytes()
    workspace = alone()
    query_gather(torch.ones(2, 4, 16, dtype=torch.bfloat16), workspace=workspace)
    kv_gather(a_cache(), a_plan(), 0, workspace=workspace)
    release_query(workspace=workspace)
    assert heap_bytes() > before
    workspace.close()
    assert heap_bytes() == before


def test_a_closed_collective_workspace_has_no_buffers():
    workspace = alone("collective")
    chunk = weakref.ref(workspace._impl.gathers._kv[0].buffers[0])
    num_bytes = workspace.num_bytes
    workspace.close()
    assert chunk() is None and workspace.num_bytes == num_bytes > 0


def test_a_dropped_workspace_goes_at_once():
    """No cycle keeps it, and with it the sockets by which its peers see that it is gone."""
    gc.disable()
    try:
        workspace = alone()
        query_gather(torch.ones(2, 4, 16, dtype=torch.bfloat16), workspace=workspace)
        heap = weakref.ref(workspace._impl._heap)
        del workspace
        assert heap() is None
    finally:
        gc.enable()


def wrong_switch(group):
    import os

    if group.rank() == 1:
        os.environ["DCPKERNELS_READ_ONLY_VIEWS"] = "yes"
    return attempt(Workspace, group, config=CONFIG)


def test_a_switch_that_is_wrong_on_one_rank_is_an_error_on_all():
    for result in run_ranks(wrong_switch, 2, mode="process"):
        assert type(result.error) is DcpInvalidArgument and "on rank 1: DCPKERNELS_READ_ONLY_VIEWS" in str(result.error)
        assert result.seconds < 10
