"""Zero copy with peers that are slow, stopped or dead: a buffer that is being read is not written, and nobody waits for
ever."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, _backend, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.region_layout import FLAG_BYTES
from dcpkernels.testing import fill_nan, run_ranks
from tests.a2a_calls import attempt, make_call, meet, merge
from tests.test_zero_copy import buffer, merge_from

TIMEOUT_S = 0.6
AT_ONCE_S = 0.5
CONFIG = WorkspaceConfig(6, 64, 8, dtype=torch.float32, zero_copy=True, timeout_s=TIMEOUT_S, first_call_timeout_s=10.0)


def a_call(num_ranks):
    return make_call(num_ranks, 4, 6, 64, torch.float32)


# The last rank is played by hand, so that it stops between any two of its steps.


class Puppet:
    """Rank `rank`, step by step: what its kernel would write into the other ranks' regions. It sends LSEs of 0 and
    payload that nobody has to look at."""

    def __init__(self, workspace) -> None:
        impl = workspace._impl
        self.rank, self.num_ranks = workspace.rank, workspace.num_ranks
        self.bases, self.layout = impl._heap.bases, impl._layout
        self.epoch = workspace.config.start_epoch

    def flag(self, owner, source):
        """{value, payload offset, token stride, head stride, released}"""
        first = self.layout.parts["flags"].offset
        index = (self.epoch & 1) * self.layout.num_channels * self.num_ranks + source
        return (ctypes.c_uint64 * 5).from_address(self.bases[owner] + first + index * FLAG_BYTES)

    def peers(self):
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def signal(self) -> None:
        """Takes part in the next round, as far as `signal`: {epoch, digest} is what the others have raised here."""
        self.epoch += 1
        for peer in self.peers():
            deadline = time.monotonic() + 10
            while self.flag(self.rank, peer)[0] & 0xFFFFFFFF != self.epoch & 0xFFFFFFFF:
                assert time.monotonic() < deadline, "no signal"
                time.sleep(1e-3)
            self.flag(peer, self.rank)[0] = self.flag(self.rank, peer)[0]

    def release(self, *peers) -> None:
        """To these peers, or to all."""
        for peer in peers or self.peers():
            self.flag(peer, self.rank)[4] = self.epoch


def test_a_buffer_that_is_being_read_is_not_handed_out():
    """One is free, as the reader has released it; the one that was used last comes when the reader releases it, and
    not before."""
    call = a_call(2)

    def body(group):
        workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=10.0))
        if workspace.rank == 1:
            puppet = Puppet(workspace)
            puppet.signal(), puppet.release()
            puppet.signal()
            meet(group)
            time.sleep(0.3)
            released_s = time.monotonic()
            puppet.release()
            meet(group)
            return released_s
        first = buffer(workspace, call)
        merge_from(workspace, call, first)
        second = buffer(workspace, call)
        merge_from(workspace, call, second)
        meet(group)
        start = time.monotonic()
        assert workspace.partial_out(4).data_ptr() != second.data_ptr()
        assert time.monotonic() - start < 0.2
        assert workspace.partial_out(4).data_ptr() == second.data_ptr()
        got_s = time.monotonic()
        meet(group)
        return got_s

    got_s, released_s = run_ranks(body, 2)
    assert released_s <= got_s < released_s + 0.2


def test_an_ordinary_tensor_is_not_copied_into_a_buffer_that_is_being_read():
    """The copy waits inside the call: nothing is sent before the release, and the reader still finds the old bytes."""
    call = a_call(2)

    def body(group):
        workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=10.0))
        meet(group)
        if workspace.rank == 1:
            puppet = Puppet(workspace)
            for turn in range(2):
                puppet.signal()
            meet(group)
            theirs = (ctypes.c_char * 64).from_address(
                puppet.bases[0] + puppet.layout.parts["a2a_lse_reduce.partial_out"].offset
            )
            before = bytes(theirs)
            time.sleep(0.3)
            puppet.epoch += 1
            value = puppet.flag(1, 0)[0] & 0xFFFFFFFF
            assert value != puppet.epoch and bytes(theirs) == before, "written before the release"
            puppet.epoch -= 2  # the use of the buffer that is next
            puppet.release()
            puppet.epoch += 1
            puppet.signal()
            meet(group)
            return
        for _ in range(2):
            merge(workspace, call)
        meet(group)
        result = attempt(merge, workspace, call)
        assert result.error is None and result.seconds > 0.2
        meet(group)

    run_ranks(body, 2)


@pytest.mark.parametrize("way", ["partial_out", "copy"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_reader_that_does_not_come_back_is_named(num_ranks, way):
    """DcpTimeout at the deadline with the reader's rank, from partial_out as from a call; the other ranks raise the same
    at their next call, though the reader has released their buffers; it stays so."""
    call = a_call(num_ranks)
    reader = num_ranks - 1

    def body(group):
        workspace = Workspace(group, config=CONFIG)
        if workspace.rank == reader:
            puppet = Puppet(workspace)
            for _ in range(2):
                puppet.signal()
                for peer in puppet.peers():
                    if peer != 0:
                        puppet.release(peer)
            meet(group)
            meet(group)
            result = attempt(workspace.partial_out, 1)
            workspace.close()
            return dataclasses.replace(result, value=None)
        for _ in range(2):
            merge_from(workspace, call, buffer(workspace, call))
        meet(group)
        if workspace.rank != 0:
            meet(group)
            result = attempt(merge, workspace, call)
        else:
            result = attempt(workspace.partial_out, 4) if way == "partial_out" else attempt(merge, workspace, call)
            meet(group)
        again = [attempt(workspace.partial_out, 4), attempt(merge, workspace, call), attempt(workspace.check)]
        for later in again:
            assert type(later.error) is DcpTimeout and later.error.ranks == (reader,) and later.seconds < AT_ONCE_S
        closed = attempt(workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return dataclasses.replace(result, value=None)

    results = run_ranks(body, num_ranks)
    for rank, result in enumerate(results):
        assert type(result.error) is DcpTimeout and result.error.ranks == (reader,), (rank, result)
    assert TIMEOUT_S - 0.1 < results[0].seconds < TIMEOUT_S + 1
    assert all(result.seconds < AT_ONCE_S for result in results[1:])
    op = "partial_out" if way == "partial_out" else "a2a_lse_reduce"
    assert str(results[0].error).startswith(
        f"{op}: all ranks must call in time (rank {reader} did not; reported by rank 0"
    )


def killed_reader(group, way):
    call = a_call(3)
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=20.0))
    if workspace.rank == 2:
        puppet = Puppet(workspace)
        puppet.signal(), puppet.signal()
        meet(group)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        merge_from(workspace, call, buffer(workspace, call))
    meet(group)
    if workspace.rank == 1:
        time.sleep(0.8)
    result = attempt(workspace.partial_out, 4) if way == "partial_out" else attempt(merge, workspace, call)
    checked = attempt(workspace.check)
    closed = attempt(workspace.close)
    return dataclasses.replace(result, value=None), checked.error, closed


@pytest.mark.parametrize("way", ["partial_out", "copy"])
def test_a_reader_that_is_killed_is_named_at_once(way):
    results = run_ranks(killed_reader, 3, way, mode="process", expect_exit={2: -signal.SIGKILL})
    for result, checked, closed in results[:2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (2,), result
        assert type(checked) is DcpPeerLost and checked.ranks == (2,)
        assert result.seconds < 1.5 and closed.error is None and closed.seconds < AT_ONCE_S


def interrupted(group):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    call = a_call(2)
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=20.0))
    if workspace.rank == 1:
        puppet = Puppet(workspace)
        puppet.signal(), puppet.signal()
        meet(group)
        meet(group)
        return attempt(workspace.check).error
    for _ in range(2):
        merge_from(workspace, call, buffer(workspace, call))
    meet(group)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    result = attempt(workspace.partial_out, 4)
    assert 0.1 < result.seconds < 0.7
    again = attempt(workspace.partial_out, 4)
    meet(group)
    return result.error, again.error


def test_ctrl_c_ends_the_wait_for_a_reader():
    (error, again), other = run_ranks(interrupted, 2, mode="process")
    assert type(error) is KeyboardInterrupt
    for each in (again, other):
        assert isinstance(each, DcpError) and each.ranks == (0,), each


def stopped(group, seed):
    """Rank 1 is the slow one: the baseline variant converts fp16 one by one. Stopped while it reads, or right after."""
    isa = "baseline" if group.rank() == 1 else None
    config = WorkspaceConfig(
        2, 4096, 256, dtype=torch.float16, zero_copy=True, timeout_s=0.6, first_call_timeout_s=10.0, cpu_isa=isa
    )
    workspace = Workspace(group, config=config)
    pid = os.getpid()
    pids = [None, None]
    torch.distributed.all_gather_object(pids, pid)
    payload = torch.ones(256, 2, 4096, dtype=torch.float16)
    lses = torch.zeros(256, 2)
    outs = [torch.empty(256, 1, 4096, dtype=torch.float16) for _ in range(2)]
    error = None
    try:
        for i in range(2):
            tensor = workspace.partial_out(256).copy_(payload)
            meet(group)
            a2a_lse_reduce(tensor, lses, workspace=workspace, lse_base="e", out=outs[i])
        if workspace.rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
            timer = threading.Timer(1.2, os.kill, (pids[1], signal.SIGCONT))
            timer.start()
            result = attempt(lambda: [fill_nan(workspace.partial_out(256)) for _ in range(2)])
            timer.join()
            return result.error, result.seconds
        time.sleep(0.05)
    except DcpError as caught:
        error = caught
        assert outs[0].eq(1).all() and outs[1].isnan().all()
    return error, bool(outs[1].isnan().any())


def test_a_reader_that_is_stopped():
    """SIGSTOP in the middle of its reads: the writer gets DcpTimeout; the reader, when it goes on, finds that it was given
    up, and discards what it read. Where it had read everything before, all is well, and nothing is NaN."""
    outcomes = set()
    for seed in range(8):
        (error, seconds), (reader_error, any_nan) = run_ranks(stopped, 2, seed, mode="process")
        if error is None:
            assert reader_error is None and not any_nan
        else:
            assert type(error) is DcpTimeout and error.ranks == (1,) and 0.5 < seconds < 1.6
            assert reader_error is None or (type(reader_error) is DcpTimeout and reader_error.ranks == (1,))
            assert reader_error is not None or not any_nan
        outcomes.add((error is None, reader_error is None))
        if (False, False) in outcomes:
            break
    # Where the baseline is all there is, the reader is as fast as the writer, and may always be done.
    assert (False, False) in outcomes or len(_backend.load("cpu").runnable_variants) == 1, outcomes


def test_partial_out_of_a_faulted_workspace():
    """Raises what the ops raise, on every lane, with its own name in front."""
    call, other = (make_call(2, n, 6, 64, torch.float32) for n in (4, 5))

    def body(group):
        workspace = Workspace(group, config=dataclasses.replace(CONFIG, num_lanes=2))
        tensor = workspace.partial_out(8)
        raised = attempt(merge_from, workspace, call if workspace.rank else other, tensor[: 5 - workspace.rank])
        assert type(raised.error) is DcpMismatch
        for lane in (0, 1):
            again = attempt(workspace.partial_out, 4, lane=lane)
            assert type(again.error) is DcpMismatch and again.error.ranks == (0, 1) and again.seconds < AT_ONCE_S
            assert str(again.error).startswith("partial_out: all ranks must make the same calls")
        tensor.fill_(1.0)  # it is still memory
        workspace.close()
        tensor.fill_(2.0)

    run_ranks(body, 2)


def test_partial_out_of_a_closed_workspace():
    def body(group):
        workspace = Workspace(group, config=CONFIG)
        workspace.close()
        with pytest.raises(DcpError, match="partial_out: the workspace must be open"):
            workspace.partial_out(4)

    run_ranks(body, 2)
