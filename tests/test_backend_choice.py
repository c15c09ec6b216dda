"""Which backend a workspace gets: decided by all ranks together, whatever fails on one of them; and several workspaces,
of several groups, that do not disturb each other."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dcpkernels import Workspace, WorkspaceConfig, _backend
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap import cpu, memory, sockets
from dcpkernels.heap.gloo import GlooGroup
from dcpkernels.heap.group import as_group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import (
    attempt,
    check_with_peers,
    config_for,
    make_call,
    meet,
    merge,
    own_mappings,
    run_calls,
    same_bits,
)

CONFIG = WorkspaceConfig(12, 64, 8, dtype=torch.float32, num_lanes=2, timeout_s=5.0, first_call_timeout_s=10.0)
CALL_SEED = 3


class Lines(logging.Handler):
    """What the library logs, at every level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("dcpkernels")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


# -- one rank cannot


def refuse(*_, **__):
    raise OSError(errno.EPERM, "refused for the test")


def break_one(how, patch):
    """Makes a step of the direct backend fail in this process."""
    if how == "memfd":
        patch.setattr(os, "memfd_create", refuse)
    elif how == "mmap":
        patch.setattr(cpu, "Region", refuse)
    elif how == "pages":
        patch.setattr(os, "posix_fallocate", refuse)
    elif how == "init":
        patch.setattr(_backend.load("cpu"), "init_region", refuse)
    elif how == "socket":
        patch.setattr(sockets, "Listener", refuse)
    elif how == "connect":
        patch.setattr(Mesh, "connect", refuse)
    elif how == "descriptors":
        send = sockets.send

        def send_no_fd(sock, peer, message, deadline, fd=None):
            refuse() if fd is not None and peer == 1 else send(sock, peer, message, deadline, fd)

        patch.setattr(sockets, "send", send_no_fd)
    elif how == "size":
        patch.setattr(cpu, "check_file", refuse)
    elif how == "endpoint":
        patch.setattr(_backend.load("cpu"), "Endpoint", refuse)
    elif how == "host":
        patch.setattr(sockets, "host_id", lambda: ("another", 1))
    elif how == "network":
        patch.setattr(sockets, "host_id", lambda boot=sockets.host_id()[0]: (boot, 1))
    elif how == "user":
        patch.setattr(os, "geteuid", lambda: 4711)
    elif how == "room":
        limits = [memory.Limit((1,), "host memory (MemAvailable)", 4096)]
        patch.setattr(memory, "limits", lambda: limits)


REASONS = {
    "memfd": "create region failed on rank {rank}: PermissionError",
    "mmap": "create region failed on rank {rank}: PermissionError",
    "pages": "create region failed on rank {rank}: PermissionError",
    "init": "create region failed on rank {rank}: PermissionError",
    "socket": "check failed on rank {rank}: PermissionError",
    "connect": "connect failed on rank {rank}: PermissionError",
    "descriptors": "map peers failed on rank 1: rank {rank}'s file must",
    "size": "map peers failed on rank {rank}: PermissionError",
    "endpoint": "start failed on rank {rank}: PermissionError",
    "host": "all ranks must agree on host (boot id)",
    "network": "all ranks must agree on network namespace",
    "user": "all ranks must agree on user id",
    "room": "host memory (MemAvailable) must have room for 1 regions",
}


def one_cannot(group, how, rank):
    lines = Lines()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            break_one(how, patch)
        direct = attempt(Workspace, group, config=CONFIG, backend="direct")
        said = lines.take()
        left = len(own_mappings())
        start = time.monotonic()
        with Workspace(group, config=CONFIG, backend="auto") as workspace:
            seconds = time.monotonic() - start
            check_with_peers(group, workspace, make_call(3, 9, 12, 64, torch.float32))
            backend = workspace.backend
        auto = lines.take()
    with Workspace(
        group, config=CONFIG, backend="direct"
    ) as workspace:  # it was that one step, and nothing is left of it
        check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
    return direct, said, left, backend, seconds, auto


@pytest.mark.parametrize("how", REASONS)
def test_one_rank_cannot_share_memory(how):
    """direct: all raise the same, in time. auto: all take the other backend, and each says so in one line, with the
    reason."""
    rank = [0, 2][len(how) % 2]
    results = run_ranks(one_cannot, 3, how, rank, mode="process")
    reason = REASONS[how].format(rank=rank)
    errors = {(type(direct.error), str(direct.error), direct.error.ranks) for direct, *_ in results}
    assert len(errors) == 1, errors
    ((cls, text, ranks),) = errors
    assert issubclass(cls, DcpError) and not issubclass(cls, DcpTimeout) and reason in text, text
    assert rank in ranks
    for direct, said, left, backend, seconds, auto in results:
        assert direct.seconds < 5 and said == [] and left == 0
        assert backend == "collective" and seconds < 5
        assert len(auto) == 1 and auto[0].startswith("INFO workspace: target cpu (") and reason in auto[0], auto
        assert "backend collective (" in auto[0] and "wire torch.distributed" in auto[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_thread_rank_cannot(rank, monkeypatch):
    init = _backend.load("cpu").init_region

    def fails_on_one(*args):
        if threading.current_thread().name == f"rank{rank}":
            raise MemoryError("for the test")
        init(*args)

    monkeypatch.setattr(_backend.load("cpu"), "init_region", fails_on_one)

    def body(group):
        raised = attempt(Workspace, group, config=CONFIG, backend="direct")
        with Workspace(group, config=CONFIG) as workspace:
            check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
            return str(raised.error), workspace.backend

    results = run_ranks(body, 3)
    assert len(set(results)) == 1 and results[0][1] == "collective"
    assert f"create region failed on rank {rank}: MemoryError: for the test" in results[0][0]


def one_cannot_connect(group, backend):
    """Neither memory nor torch.distributed."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "memfd_create", refuse)
            patch.setattr(GlooGroup, "__init__", refuse)
        raised = attempt(
            Workspace, group, config=dataclasses.replace(CONFIG, first_call_timeout_s=4.0), backend=backend
        )
    with Workspace(group, config=CONFIG) as workspace:
        check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
    return raised


def test_one_rank_cannot_do_either():
    """The same error on all ranks, within the time for making it."""
    results = run_ranks(one_cannot_connect, 3, "auto", mode="process")
    texts = {(type(raised.error), str(raised.error)) for raised in results}
    assert len(texts) == 1, texts
    assert "connect by torch.distributed failed on rank 1: PermissionError" in results[0].error.args[0]
    assert all(raised.seconds < 4.5 for raised in results)


def what_is_said(group, backend):
    lines = Lines()
    with Workspace(group, config=CONFIG, backend=backend) as workspace:
        name = workspace.backend
    return name, lines.take()


@pytest.mark.parametrize(
    "backend, name, reason",
    [
        ("auto", "direct", "all ranks share one host's memory"),
        ("direct", "direct", "as asked"),
        ("collective", "collective", "as asked"),
    ],
)
def test_one_line_says_which_and_why(backend, name, reason):
    for rank, (got, lines) in enumerate(run_ranks(what_is_said, 2, backend, mode="process")):
        assert got == name and len(lines) == 1
        assert f"rank {rank} of 2, backend {name} ({reason})" in lines[0]


# -- all ranks must want the same


@pytest.mark.parametrize(
    "changed",
    [
        {"zero_copy": True},
        {"num_channels": 2},
        {"wire": "bulk"},
        {"wire": "packet"},
        {"packet_bytes": 16},
        {"backend": 1},
    ],
    ids=lambda changed: " ".join(map(str, *changed.items())),
)
@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_wishes_that_differ_are_refused_on_all_ranks(changed, backend):
    """No rank falls back: the configurations would still differ. A new try with equal ones works."""

    def body(group):
        config, mine = CONFIG, backend
        if group.rank == 2:
            if "backend" in changed:
                mine = "direct"
            else:
                config = dataclasses.replace(CONFIG, **changed)
        raised = attempt(Workspace, group, config=config, backend=mine)
        with Workspace(group, config=CONFIG, backend=backend) as workspace:
            check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
        return type(raised.error), str(raised.error), raised.error.ranks, raised.seconds < 2

    results = run_ranks(body, 3)
    assert len(set(results)) == 1
    cls, text, ranks, in_time = results[0]
    assert cls is DcpUnsupported and ranks == (2,) and in_time
    assert f"all ranks must agree on {[*changed][0]} (ranks 0, 1: " in text and "rank 2: " in text


@pytest.mark.parametrize("backend", ["", "nccl", None, 1, ["direct"]], ids=str)
def test_a_backend_that_there_is_not(backend):
    def body(group):
        mine = backend if group.rank == 1 else "auto"
        return attempt(Workspace, group, config=CONFIG, backend=mine)

    for raised in run_ranks(body, 2):
        assert type(raised.error) is DcpInvalidArgument and raised.error.ranks == (1,)
        assert "backend must be one of" in str(raised.error) and raised.seconds < 2


@pytest.mark.parametrize("backend", ["auto", "direct", "collective"])
def test_a_rank_that_never_comes_is_no_reason_to_fall_back(backend):
    """DcpTimeout after the time for making it, with the rank where it is known."""
    config = dataclasses.replace(CONFIG, first_call_timeout_s=0.5)

    def body(group):
        if group.rank == 1:
            time.sleep(0.8)
            group.leave("does not want to")
            return None
        return attempt(Workspace, group, config=config, backend=backend)

    for raised in run_ranks(body, 3)[::2]:
        assert isinstance(raised.error, DcpTimeout) and raised.error.ranks == (1,) and raised.seconds < 1.5, raised


def goes_away(group, where):
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            end = lambda *_, **__: os._exit(7)
            patch.setattr(*{"connect": (Mesh, "connect"), "init": (_backend.load("cpu"), "init_region")}[where], end)
            Workspace(group, config=CONFIG)
    config = dataclasses.replace(CONFIG, first_call_timeout_s=3.0)
    return attempt(Workspace, group, config=config, backend="auto")


@pytest.mark.parametrize("where", ["connect", "init"])
def test_a_rank_that_dies_meanwhile_is_no_reason_to_fall_back(where):
    results = run_ranks(goes_away, 3, where, mode="process", expect_exit={1: 7})
    for raised in results[::2]:
        assert isinstance(raised.error, DcpError) and raised.seconds < 4, raised
        if where == "init":  # over the own sockets every rank sees it
            assert type(raised.error) is DcpPeerLost and raised.error.ranks == (1,), raised


# -- several groups, workspaces and lanes at once


def schedule(seed, num_calls):
    """(workspace, lane, T) of each call; workspaces 0 and 1 are of four ranks, 2 and 3 of ranks 0 and 2."""
    choices = random.Random(seed)
    return [(choices.randrange(4), choices.randrange(2), choices.choice([0, 1, 3, 8, 11])) for _ in range(num_calls)]


def call_of(i, workspace_idx, lane, num_tokens):
    num_ranks = 4 if workspace_idx < 2 else 2
    return make_call(num_ranks, num_tokens, 12, 64, torch.float32, kind="empty", seed=i, lane=lane)


def entangled(group, seed, zero_copy, backends):
    """Calls of all workspaces on all lanes; two threads a rank, one for each lane, with delays of their own."""
    rank = as_group(group).rank
    if isinstance(group, ThreadGroup):
        pair = group.subgroup([0, 2]) if rank in (0, 2) else None
    else:
        pair = dist.new_group([0, 2])
    workspaces = []
    for i, backend in enumerate(backends):
        config = dataclasses.replace(
            CONFIG, zero_copy=zero_copy != (i % 2 == 1), timeout_s=20.0, first_call_timeout_s=20.0
        )
        if i < 2 or rank in (0, 2):
            workspaces.append(Workspace(group if i < 2 else pair, config=config, backend=backend))
    results, errors = {}, []

    def run(lane):
        delays = random.Random(1000 * seed + 10 * rank + lane)
        for i, (workspace_idx, lane_of_call, num_tokens) in enumerate(schedule(seed, 120)):
            if lane_of_call != lane or workspace_idx >= len(workspaces):
                continue
            if delays.random() < 0.2:
                time.sleep(delays.random() * 2e-3)
            workspace, call = workspaces[workspace_idx], call_of(i, workspace_idx, lane, num_tokens)
            if num_tokens <= 8 and delays.random() < 0.7:
                mine = workspace.partial_out(num_tokens, lane=lane).copy_(call.outs[workspace.rank])
                call.outs = {workspace.rank: mine}
            results[i] = merge(workspace, call)

    threads = [threading.Thread(target=lambda i=i: errors.append(attempt(run, i).error)) for i in (0, 1)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert errors == [None, None], errors
    meet(group)
    for workspace in workspaces:
        workspace.close()
    return results


@pytest.mark.parametrize(
    "mode, seed, zero_copy, backends",
    [
        ("thread", 1, False, ["direct"] * 4),
        ("thread", 2, True, ["direct"] * 4),
        ("thread", 3, True, ["direct", "collective"] * 2),
        ("process", 4, False, ["direct"] * 4),
        ("process", 5, True, ["direct"] * 4),
        ("process", 6, True, ["collective", "direct"] * 2),
    ],
    ids=str,
)
def test_no_cross_talk(mode, seed, zero_copy, backends):
    by_rank = run_ranks(entangled, 4, seed, zero_copy, backends, mode=mode)
    plan = list(enumerate(schedule(seed, 120)))
    for num_ranks, ranks in ((4, [0, 1, 2, 3]), (2, [0, 2])):
        mine = [(i, call_of(i, *entry)) for i, entry in plan if (entry[0] < 2) == (num_ranks == 4)]
        expected = run_calls([call for _, call in mine], num_lanes=2, max_num_tokens=11)
        for (i, _), (out, lse) in zip(mine, expected, strict=True):
            parts = [by_rank[rank][i] for rank in ranks]
            assert same_bits(torch.cat([part for part, _ in parts], 1), out), (i, num_ranks)
            assert same_bits(torch.cat([part for _, part in parts], 1), lse), (i, num_ranks)


def test_many_workspaces_one_after_the_other():
    """Making and closing leaves nothing: mappings, descriptors, threads; over both backends in turn."""

    def body(group):
        call = make_call(2, 3, 12, 64, torch.float32)
        for i in range(20):
            with Workspace(
                group, config=config_for(call, num_channels=2), backend=["direct", "collective"][i % 2]
            ) as workspace:
                merge(workspace, call)

    before, threads = len(own_mappings()), threading.active_count()
    run_ranks(body, 2)
    assert len(own_mappings()) == before and threading.active_count() <= threads


def many(group):
    call = make_call(2, 3, 12, 64, torch.float32)

    def descriptors():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for i in range(12):
        with Workspace(group, config=CONFIG, backend=["direct", "collective"][i % 2]) as workspace:
            merge(workspace, call)
        meet(group)
        if i == 1:
            before = descriptors()
    return before, descriptors()


def test_many_workspaces_of_processes_one_after_the_other():
    for before, after in run_ranks(many, 2, mode="process"):
        assert after[0] <= before[0] + 2 and after[1] == before[1], (before, after)
