"""Rank processes that are killed, stopped, interrupted, or end without a word: the others raise at once or in time,
name exactly those ranks, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet

CONFIG = WorkspaceConfig(12, 64, 4, dtype=torch.float32, timeout_s=20.0, first_call_timeout_s=20.0)
NUM_RANKS = 4
AT_ONCE_S = 1.0  # against timeouts of 20 s or none; 0.1 s is usual


def call(workspace: Workspace, num_tokens: int = 3) -> None:
    """All ranks pass their own number plus one, with equal weights."""
    num_heads, num_ranks = workspace.config.num_heads, workspace.num_ranks
    payload = torch.full((num_tokens, num_heads, 64), workspace.rank + 1.0)
    out = torch.full((num_tokens, num_heads // num_ranks, 64), 7.0)
    try:
        a2a_lse_reduce(payload, torch.zeros(num_tokens, num_heads), workspace=workspace, lse_base="e", out=out)
    except DcpError:
        assert out.isnan().all()
        raise
    assert out.sub((num_ranks + 1) / 2).abs().lt(1e-5).all()


def call_until_it_raises(workspace: Workspace, seed: int, pause_s: float = 0.0):
    """Calls with 0 to 9 tokens, the same on all ranks; each rank pauses now and then by itself."""
    sizes, pauses = random.Random(seed), random.Random(100 * seed + workspace.rank)

    def loop():
        while True:
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * pause_s)
            call(workspace, sizes.choice([0, 1, 2, 4, 9]))

    return attempt(loop)


def at(moment: float, pid: int, signum: int) -> threading.Thread:
    """Sends the signal at a time of the monotonic clock, which is one for all processes of the machine."""

    def send():
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(pid, signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def common_start(group) -> float:
    """A moment shortly ahead that all ranks know."""
    return max(as_group(group).all_gather_object(time.monotonic(), timeout_s=20)) + 0.05


# -- killed


def killed(group, victim, seed, config):
    workspace = Workspace(group, config=config)
    call(workspace)
    moment = common_start(group) + random.Random(seed).random() * 0.03
    if workspace.rank == victim:
        at(moment, os.getpid(), signal.SIGKILL)
    result = call_until_it_raises(workspace, seed, pause_s=1e-3 if seed % 2 else 0.0)
    delay = time.monotonic() - moment
    again, checked, closed = attempt(call, workspace), attempt(workspace.check), attempt(workspace.close)
    return result.error, delay, again, checked, closed


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_rank_is_named_at_once(seed):
    """kill -9 at a random moment of a loop of calls, with and without pauses: every survivor raises DcpPeerLost with
    just that rank, long before the timeout, half of the times with none set at all."""
    victim, config = seed % NUM_RANKS, CONFIG
    if seed % 4 >= 2:
        config = dataclasses.replace(config, timeout_s=0, first_call_timeout_s=0)
    before = set(os.listdir("/dev/shm"))
    results = run_ranks(killed, NUM_RANKS, victim, seed, config, mode="process", expect_exit={victim: -signal.SIGKILL})
    assert results[victim] is None
    for error, delay, again, checked, closed in results[:victim] + results[victim + 1 :]:
        assert type(error) is DcpPeerLost and error.ranks == (victim,), error
        assert str(error).startswith("a2a_lse_reduce: ") and f"rank {victim}" in str(error), error
        assert -0.01 < delay < 2 * AT_ONCE_S, delay
        for later in (again, checked):
            assert type(later.error) is DcpPeerLost and later.error.ranks == (victim,) and later.seconds < AT_ONCE_S
        assert closed.error is None and closed.seconds < AT_ONCE_S
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "dcp" in name]
    assert zombies() == []


def zombies() -> list[str]:
    """Ended processes among our descendants that nobody has waited for."""
    parents, states = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], states[pid] = int(parent), state

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [f"process {pid}" for pid, state in states.items() if state == "Z" and is_ours(pid)]


def killed_while_idle(group, victim):
    workspace = Workspace(group, config=CONFIG)
    call(workspace)
    workspace.check()
    meet(group)
    if workspace.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while (checked := attempt(workspace.check)).error is None:
        assert checked.seconds < AT_ONCE_S
        time.sleep(0.01)
    return checked.error, attempt(call, workspace).error


def test_check_tells_without_a_call():
    for checked, called in run_ranks(killed_while_idle, 3, 1, mode="process", expect_exit={1: -9})[::2]:
        assert type(checked) is type(called) is DcpPeerLost and checked.ranks == called.ranks == (1,)


def start_again(group, victim):
    workspace = Workspace(group, config=CONFIG)
    call(workspace)
    survivors = [rank for rank in range(NUM_RANKS) if rank != victim]
    meet(group)
    if workspace.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    assert type(call_until_it_raises(workspace, 1).error) is DcpPeerLost
    workspace.close()
    smaller = dist.new_group(survivors, use_local_synchronization=True)
    with Workspace(smaller, config=CONFIG) as workspace:
        assert workspace.num_ranks == NUM_RANKS - 1
        for num_tokens in (3, 0, 9):
            call(workspace, num_tokens)
    return True


@pytest.mark.parametrize("victim", [1, 3])
def test_survivors_can_make_a_smaller_workspace(victim):
    """In the same processes, over a new process group of those who are left."""
    results = run_ranks(start_again, NUM_RANKS, victim, mode="process", expect_exit={victim: -9})
    assert [result for result in results if result] == [True] * (NUM_RANKS - 1)


def leaves(group, how):
    workspace = Workspace(group, config=CONFIG)
    call(workspace)
    meet(group)
    if workspace.rank == 1:
        if how == "exit":
            os._exit(3)
        globals()["kept"] = workspace  # a rank that returns ends its process, without close()
        return None
    result = attempt(call, workspace)
    return result.error, result.seconds


@pytest.mark.parametrize("how", ["return", "exit"])
def test_a_rank_that_ends_without_close_is_lost(how):
    """Any end of the process will do, not only a violent one."""
    expect_exit = {1: 3} if how == "exit" else None
    for error, seconds in run_ranks(leaves, 3, how, mode="process", expect_exit=expect_exit)[::2]:
        assert type(error) is DcpPeerLost and error.ranks == (1,) and seconds < 5


# -- stopped


def stopped(group, victim, seed):
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=0.7, first_call_timeout_s=5))
    call(workspace)
    pid = as_group(group).all_gather_object(os.getpid(), timeout_s=20)[victim]
    moment = common_start(group) + random.Random(seed).random() * 0.02
    senders = []
    if workspace.rank == (victim + 1) % NUM_RANKS:
        senders = [at(moment, pid, signal.SIGSTOP), at(moment + 1.5, pid, signal.SIGCONT)]
    result = call_until_it_raises(workspace, seed)
    delay = time.monotonic() - moment
    workspace.close()
    [sender.join() for sender in senders]
    return result.error, delay


@pytest.mark.parametrize("seed", range(4))
def test_a_stopped_rank_is_late_and_learns_it(seed):
    """SIGSTOP at a random moment: the others raise DcpTimeout after the timeout and name it; after SIGCONT it finds
    that it has been given up, and raises the same, whatever it had read."""
    victim = seed % NUM_RANKS
    for rank, (error, delay) in enumerate(run_ranks(stopped, NUM_RANKS, victim, seed, mode="process")):
        assert type(error) is DcpTimeout and error.ranks == (victim,), (rank, error)
        if rank == victim:
            assert delay < 1.5 + 1
        else:
            assert 0.6 < delay < 0.7 + 1


# -- interrupted


def interrupted(group, first_call):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workspace = Workspace(group, config=CONFIG)
    if not first_call:
        call(workspace)
    moment = common_start(group) + 0.3
    if workspace.rank == 0:
        at(moment, os.getpid(), signal.SIGINT)
    if workspace.rank == 2:
        time.sleep(1.0)  # does not come before rank 0 has given up
    result = attempt(call, workspace)
    delay = time.monotonic() - moment
    again = attempt(call, workspace).error
    workspace.close()
    return result.error, delay, again


@pytest.mark.parametrize("first_call", [True, False])
def test_ctrl_c_ends_a_wait(first_call):
    """KeyboardInterrupt in the rank that waits, within 0.3 s, and an error that names it in all others: they would wait
    in vain. Its own next call raises too."""
    (error, delay, again), *others = run_ranks(interrupted, 3, first_call, mode="process")
    assert type(error) is KeyboardInterrupt and -0.01 < delay < 0.3, (error, delay)
    for other, other_delay, other_again in others:
        for each in (other, other_again, again):
            assert isinstance(each, DcpError) and each.ranks == (0,), each
        assert other_delay < 0.7 + AT_ONCE_S


def handled(group):
    handled_at = []
    signal.signal(signal.SIGUSR2, lambda *_: handled_at.append(time.monotonic()))
    workspace = Workspace(group, config=CONFIG)
    call(workspace)
    moment = common_start(group) + 0.2
    if workspace.rank == 0:
        at(moment, os.getpid(), signal.SIGUSR2)
    else:
        time.sleep(0.8)
    result = attempt(call, workspace)
    workspace.close()
    return result.error, [when - moment for when in handled_at]


def test_a_signal_handler_runs_during_a_wait():
    """And the wait goes on when it returns."""
    (error, delays), (other, none) = run_ranks(handled, 2, mode="process")
    assert error is None and other is None and none == []
    assert len(delays) == 1 and delays[0] < 0.3
