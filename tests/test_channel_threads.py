"""Channels in threads: what their threads may do to a call, to each other and to who is blamed."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from dcpkernels import DcpError, DcpTimeout, Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import run_ranks


def one_after_the_other(num_channels: int, body: Any) -> None:
    body(0, num_channels)


def make(group: Any, parallel_for: Any = None, *, num_channels: int = 2, timeout_s: float = 20, **fields: Any) -> Workspace:
    num_ranks = torch.distributed.get_world_size() if not hasattr(group, "num_ranks") else group.num_ranks
    config = WorkspaceConfig(
        num_ranks, 8, 8, torch.float32, num_channels=num_channels, timeout_s=timeout_s, first_call_timeout_s=timeout_s, **fields
    )
    return Workspace(group, config=config, backend="direct", parallel_for=parallel_for)


def call(workspace: Workspace, value: float = 1.0, **kwargs: Any) -> torch.Tensor:
    heads = workspace.config.num_heads
    return a2a_lse_reduce(torch.full((8, heads, 8), value), torch.zeros(8, heads), workspace=workspace, lse_base="e", **kwargs)


def test_lanes_at_the_same_time_in_another_order() -> None:
    begun = threading.Barrier(4)

    def rank(group: Any) -> None:
        with make(group, num_lanes=2, timeout_s=8) as workspace:
            failures = []

            def lane(index: int, delay_s: float) -> None:
                begun.wait()
                time.sleep(delay_s)
                try:
                    call(workspace, lane=index)
                except DcpError as error:
                    failures.append(error)

            order = (0, 1) if group.rank == 0 else (1, 0)
            threads = [threading.Thread(target=lane, args=(index, 0.2 * i)) for i, index in enumerate(order)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert failures == []

    run_ranks(rank, 2)


def test_warmup_starts_all_threads() -> None:
    def rank(group: Any) -> int:
        with make(group, num_channels=5, num_lanes=2) as workspace:
            workspace.warmup()
            return sum(thread.name.startswith("dcpkernels-channel") for thread in threading.enumerate())

    assert run_ranks(rank, 1) == [8]


def test_who_waits_on_another_channel_is_not_blamed() -> None:
    """Rank 1 has one thread, and waits on channel 0 for rank 2. Rank 0 finds its flag of channel 1 missing."""

    def channel_1_first(num_channels: int, body: Any) -> None:
        other = threading.Thread(target=body, args=(1, 2))
        other.start()
        time.sleep(0.1)
        body(0, 1)
        other.join()

    def rank(group: Any) -> tuple[int, ...]:
        workspace = make(group, channel_1_first if group.rank == 0 else one_after_the_other, timeout_s=1 if group.rank == 0 else 20)
        if group.rank == 2:
            time.sleep(2)
        with pytest.raises(DcpTimeout) as raised:
            call(workspace)
        workspace.close()
        return raised.value.ranks

    assert run_ranks(rank, 3) == [(2,)] * 3


def test_an_interrupt_that_leaves_a_channel_out_ends_the_call_everywhere() -> None:
    """Where parallel_for only raises, or forgets a channel, it is run all the same: tests/test_channels.py."""

    def leaves_out(num_channels: int, body: Any) -> None:
        body(0, 1)
        raise KeyboardInterrupt

    def rank(group: Any) -> str:
        workspace = make(group, leaves_out if group.rank == 0 else one_after_the_other)
        out = torch.zeros(8, 1, 8)
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else DcpError) as raised:
            call(workspace, out=out)
        assert out.isnan().all()
        with pytest.raises(DcpError, match="interrupted inside a call .rank 0 was"):
            workspace.check()
        workspace.close()
        return str(raised.value)

    assert "interrupted inside a call (rank 0 was" in run_ranks(rank, 2)[1]


def interrupted(group: Any) -> str:
    rank = torch.distributed.get_rank()

    def late(num_channels: int, body: Any) -> None:
        body(0, 1)
        time.sleep(2)
        body(1, 2)

    workspace = make(group, late if rank == 1 else None)
    out = torch.zeros(8, 1, 8)
    if rank == 1:
        with pytest.raises(DcpError, match="rank 0 was"):
            call(workspace, out=out)
        return ""
    threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):  # channel 0 is done, and the main thread waits for the pool
        call(workspace, out=out)
    assert out.isnan().all()
    out.fill_(7)
    with pytest.raises(DcpError, match="rank 0 was"):
        workspace.check()
    time.sleep(2.5)
    assert (out == 7).all()  # no channel writes after the call is over
    workspace.close()
    return "interrupted"


def test_an_interrupt_while_other_threads_run_channels() -> None:
    assert run_ranks(interrupted, 2, mode="process")[0] == "interrupted"


def test_handed_out_buffers_and_the_modes_of_torch() -> None:
    def rank(group: Any) -> None:
        with torch.inference_mode():
            workspace = make(group, zero_copy=True)
        for _ in range(2):
            partial_out = workspace.partial_out(8)
            partial_out.copy_(torch.ones(8, 1, 8, requires_grad=True) * 2)
        assert not workspace.partial_out(8).requires_grad  # nothing of the last writer's graph
        workspace.close()

    run_ranks(rank, 1)
