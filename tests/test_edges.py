"""Where a workspace meets what it cannot control: a close() from another thread, a lane that is busy while another one
waits in vain, tensors without memory, and stores to peers that go one way or the other."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dcpkernels import DcpError, DcpInvalidArgument, DcpTimeout, Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import ThreadGroup, run_ranks

CONFIG = WorkspaceConfig(2, 8, 1, dtype=torch.float32, num_lanes=2, timeout_s=0.3, first_call_timeout_s=5)
PARTIAL_OUT, PARTIAL_LSE = torch.ones(1, 2, 8), torch.zeros(1, 2)


def call(workspace: Workspace, lane: int = 0) -> torch.Tensor:
    return a2a_lse_reduce(PARTIAL_OUT, PARTIAL_LSE, workspace=workspace, lse_base="e", lane=lane)


def test_close_waits_for_no_call_and_unmaps_under_none():
    """One thread calls without a pause, another closes: the call runs to its end or finds the workspace closed, and
    close() refuses while one is inside. (Once, a call that was about to start found its memory gone.)"""
    for _ in range(200):
        workspace = Workspace(ThreadGroup.create(1)[0], config=CONFIG)
        call(workspace)
        started, texts = threading.Event(), []

        def use(workspace=workspace, started=started, texts=texts):
            try:
                while True:
                    call(workspace)
                    started.set()
            except DcpError as error:
                texts.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        started.wait(10)
        while True:
            try:
                workspace.close()
                break
            except DcpError as error:
                assert "no call may be in flight" in str(error)
        thread.join(10)
        assert texts == ["a2a_lse_reduce: the workspace must be open (it was closed)"]


def test_a_busy_lane_does_not_turn_a_late_rank_into_a_mismatch():
    """Rank 1 never comes on lane 0, while lane 1 goes on between the two: a timeout that names rank 1, no mismatch."""

    def body(group):
        caught = []
        with Workspace(group, config=CONFIG) as workspace:
            call(workspace, 0), call(workspace, 1)

            def lane_1():
                try:
                    while True:
                        call(workspace, 1)
                        if group.rank == 0:
                            time.sleep(0.002)
                except DcpError as error:
                    caught.append(error)

            thread = threading.Thread(target=lane_1)
            thread.start()
            if group.rank == 0:
                with pytest.raises(DcpError) as info:
                    call(workspace, 0)
                caught.append(info.value)
            thread.join(10)
        return caught

    for _ in range(3):
        errors = [error for caught in run_ranks(body, 2) for error in caught]
        assert [(type(error), error.ranks) for error in errors] == [(DcpTimeout, (1,))] * 3


@pytest.mark.parametrize("name", ["partial_out", "partial_lse", "out", "lse_out", "seq_lens", "query_start_loc"])
def test_a_tensor_without_memory_is_refused(name):
    """Freed storage (as FSDP leaves it) and wrapper subclasses have a null data pointer."""
    tensors = {
        "partial_out": torch.ones(1, 2, 8),
        "partial_lse": torch.zeros(1, 2),
        "out": torch.zeros(1, 2, 8),
        "lse_out": torch.zeros(1, 2),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
    }
    with Workspace(ThreadGroup.create(1)[0], config=CONFIG) as workspace:
        assert a2a_lse_reduce(workspace=workspace, lse_base="e", **tensors)[0].eq(1).all()
        tensors[name].untyped_storage().resize_(0)
        with pytest.raises(DcpInvalidArgument, match="memory of its own"):
            a2a_lse_reduce(workspace=workspace, lse_base="e", **tensors)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim", "num_calls"),
    [(3, 6, 72, 150), (40, 6, 72, 150), (700, 6, 72, 12), (2, 2, 600_001, 6)],
    ids=["too-short-to-time", "timed", "timed-in-rounds", "rows-above-1-MiB"],
)
def test_stores_to_peers_give_the_same_bytes_whichever_way_they_go(num_tokens, heads, dim, num_calls):
    """Rows that fill no whole number of cache lines: so short that they are just stored, timed, and so long that they
    go past the caches (always, whatever the timing says). Data change from call to call."""

    def body(group):
        config = WorkspaceConfig(heads, dim, num_tokens, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(5)
        with Workspace(group, config=config) as workspace:
            for i in range(num_calls):
                # Only rank i % 2 has weight: the result is its payload, bit for bit.
                wide = torch.randn(num_tokens, heads, dim + i % 2, generator=generator).bfloat16()
                payload = wide[..., :dim] if group.rank == i % 2 else wide[..., :dim] * float("nan")
                lse = torch.full((num_tokens, heads), 0.0 if group.rank == i % 2 else float("-inf"))
                out = a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e")
                first = group.rank * heads // 2
                assert torch.equal(out, wide[:, first : first + heads // 2, :dim]), i
        return True

    assert run_ranks(body, 2) == [True, True]
