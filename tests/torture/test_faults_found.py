"""What the random faults of the other files have found, each as a test that needs no luck."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce, kv_gather_start
from dcpkernels._direct import DirectBackend
from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap import sockets
from dcpkernels.heap.group import as_group
from dcpkernels.heap.mesh import Mesh, gave_up
from dcpkernels.heap.region import Region, create_file
from dcpkernels.heap.shared import SharedRegion
from dcpkernels.heap.verdict import agree, describe
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet, own_mappings
from tests.torture.faults_mix import CHUNK, HEAD_DIM, LOCAL_HEADS, config_for, tables


def fault_between_start_and_wait(group, backend):
    workspace = Workspace(group, config=config_for(2, "bulk", timeout_s=5.0, first_call_timeout_s=5.0), backend=backend)
    context = tables(2).context
    plan, cache = context.plan(workspace.rank, CHUNK), context.caches[workspace.rank]
    kv_gather_start(cache, plan, 0, workspace=workspace)
    num_tokens = 1 + workspace.rank  # not the same
    partial_out, lse = torch.zeros(num_tokens, 2 * LOCAL_HEADS, HEAD_DIM), torch.zeros(num_tokens, 2 * LOCAL_HEADS)
    first = attempt(a2a_lse_reduce, partial_out, lse, workspace=workspace, lse_base="e").error
    calls = (lambda: kv_gather_start(cache, plan, 1, workspace=workspace), workspace.check)
    later = [attempt(call).error for call in calls]
    meet(group)
    workspace.close()
    return [(type(error).__name__, error.ranks) for error in (first, *later)]


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_a_chunk_that_was_started_does_not_hide_the_fault(backend):
    """Every op raises the fault: the chunk cannot be waited for any more, so to ask for that would send nobody on."""
    for errors in run_ranks(fault_between_start_and_wait, 2, backend):
        assert errors == [("DcpMismatch", (0, 1))] * 3


def death_in_the_last_step(group, victim, how):
    if group.rank() == victim:

        def strike(*_):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

        DirectBackend._reserved = strike
    config = config_for(5, "bulk", timeout_s=20.0, first_call_timeout_s=20.0)
    try:
        result = attempt(Workspace, group, config=config, backend="direct")
    finally:
        time.sleep(0.5)  # a rank that exits now would wake others that are stuck
    return type(result.error).__name__, getattr(result.error, "ranks", ()), result.seconds


@pytest.mark.parametrize("how", ["dies", "Ctrl-C"])
def test_all_hear_at_once_of_a_rank_that_fails_in_the_last_step(how):
    """Over the sockets of the workspace: of the caller's group only some ranks would, and the others at the deadline."""
    expect_exit = {2: -9} if how == "dies" else None
    results = run_ranks(death_in_the_last_step, 5, 2, how, mode="process", expect_exit=expect_exit)
    for name, ranks, seconds in results[:2] + results[3:]:
        assert (name, ranks) == ("DcpPeerLost", (2,)) and seconds < 5, results


def file_that_is_not_sent(group, to):
    if group.rank() == 1:
        send = sockets.send

        def send_or_fail(sock, peer, message, *args):
            if (peer, message) == (to, b"F"):
                raise MemoryError
            return send(sock, peer, message, *args)

        sockets.send = send_or_fail
    config = config_for(3, "bulk", timeout_s=20.0, first_call_timeout_s=20.0)
    result = attempt(Workspace, group, config=config, backend="direct")
    meet(group)
    return type(result.error).__name__, getattr(result.error, "ranks", ()), result.seconds


@pytest.mark.parametrize("to", [0, 2])
def test_a_rank_that_cannot_send_what_it_owes_is_named_alone(to):
    """Its next message would come where the file was awaited, and whoever found that out would be named with it."""
    results = run_ranks(file_that_is_not_sent, 3, to, mode="process")
    for name, ranks, seconds in results:
        assert (name, ranks) == ("DcpError", (1,)) and seconds < 5, results


def late_behind_another(group, leaves):
    """Rank 0 does not come. Rank 2 waits for it in the first group; rank 1 is past that, and waits in the second one, and
    gives up before rank 2. Where it `leaves`, it closes then."""
    first = as_group(group).duplicate(timeout_s=20)
    second = as_group(group).duplicate(timeout_s=20, beside=first)
    size, rank = [1] * 3, group.rank()
    exchange = {1: second, 2: first}.get(rank)
    result = None
    if exchange is not None:
        first._num_exchanges += rank == 1
        receive, send = torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
        timeout_s = {1: 0.8, 2: 20.0 if leaves else 2.5}[rank]
        result = attempt(exchange.all_to_all, receive, send, size, size, timeout_s=timeout_s).error
        if leaves and rank == 1:
            first.close(), second.close()
    meet(group)
    first.close(), second.close()
    return type(result).__name__, getattr(result, "ranks", ())


@pytest.mark.parametrize("leaves", [False, True])
def test_the_collective_backend_does_not_name_who_waits_for_the_late_one(leaves):
    """A rank that left no note here may be past this exchange, or not yet at it because it is held up as well; and one that
    gave up in another group closes this one, for the reason that it found there."""
    for result in run_ranks(late_behind_another, 3, leaves, mode="process")[1:]:
        assert result == ("DcpTimeout", (0,))


def interrupted_close(group, where):
    workspace = Workspace(
        group, config=config_for(2, "bulk", timeout_s=5.0, first_call_timeout_s=5.0), backend="direct"
    )

    def interrupted(*_):
        raise KeyboardInterrupt

    meet(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where, interrupted)
        error = attempt(workspace.close).error
    workspace.close()
    return type(error), own_mappings()


@pytest.mark.parametrize("where", [(SharedRegion, "_close_file"), (Mesh, "close")], ids=["file", "sockets"])
def test_ctrl_c_in_close_leaves_no_memory_mapped(where):
    for error, mappings in run_ranks(interrupted_close, 2, where, mode="process"):
        assert error is KeyboardInterrupt and mappings == []


def test_a_view_that_cannot_be_made_does_not_keep_its_region(monkeypatch):
    before = own_mappings()
    region = Region(fd := create_file(4096), 4096)
    os.close(fd)

    def no_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("dcpkernels.heap.region.weakref.finalize", no_memory)
        region.memory(0, 8)
    assert len(own_mappings()) == len(before) + 1
    region.release()
    assert own_mappings() == before


def test_a_late_rank_passes_on_why_the_others_gave_up():
    """It finds all answers, and behind one the word that its sender has given up. A third rank, a step ahead, hears of this
    one first: a timeout, as from the others, and no loss."""
    mesh, ends = Mesh(0, 3), []
    for peer in (1, 2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        mesh._add(peer, ours)
        theirs.send(b"G" + pickle.dumps(peer))
        ends.append(theirs)
    cause = DcpTimeout("no answer from rank 0", ranks=(0,))
    ends[0].send(b"A" + pickle.dumps(describe(cause)))
    with pytest.raises(DcpTimeout):
        mesh.all_gather_object(0, timeout_s=5.0)
    mesh.abort(gave_up(0, cause))  # as CpuHeap.create does
    assert ends[1].recv(1000) == b"G" + pickle.dumps(0)
    assert pickle.loads(ends[1].recv(1000)[1:]) == describe(cause)
    mesh.close()
    [end.close() for end in ends]


class _Broken:
    rank, num_ranks = 0, 2

    def all_gather_object(self, obj, *, timeout_s=0.0):
        raise DcpPeerLost("rank 1 is gone", ranks=(1,))


def test_a_failed_step_names_whom_its_error_names_without_a_verdict_too():
    with pytest.raises(DcpError) as raised:
        agree(_Broken(), "step", error=DcpError("rank 1 must be at the same step", ranks=(1,)))
    assert raised.value.ranks == (1,)
