"""The backend over torch.distributed when ranks call differently, wrongly, late, or not at all: the errors of the direct
backend, on all ranks, in time, with names."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dcpkernels import a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.heap.gloo import GlooGroup
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests import test_collective
from tests.a2a_calls import attempt, make_call, meet, merge
from tests.test_collective import MODES, same_as_direct

TIMEOUT_S = 1.2
AT_ONCE_S = 1.1
CONFIG = dataclasses.replace(test_collective.CONFIG, timeout_s=TIMEOUT_S)


def make(group, **fields):
    return test_collective.make(group, CONFIG, **fields)


class Rank:
    """One rank that is about to make a call that goes wrong; a good call lies behind every lane."""

    def __init__(self, group, warm=True, **fields) -> None:
        self.workspace = make(group, **fields)
        for lane in range(2 if warm else 0):
            assert self(lane=lane).error is None
        meet(group)

    def __call__(self, num_tokens=3, lse_base="e", lane=0):
        num_heads, num_ranks = 24, self.workspace.num_ranks
        payload, lse = (
            torch.full((num_tokens, num_heads, 64), self.workspace.rank + 1.0),
            torch.zeros(num_tokens, num_heads),
        )
        out = torch.full((num_tokens, num_heads // num_ranks, 64), 7.0)
        lse_out = torch.full((num_tokens, num_heads // num_ranks), 7.0)
        outputs = {"out": out, "lse_out": lse_out}
        result = attempt(
            a2a_lse_reduce, payload, lse, workspace=self.workspace, lse_base=lse_base, lane=lane, **outputs
        )
        if result.error is None:
            assert out.sub((num_ranks + 1) / 2).abs().lt(1e-5).all()
        elif not isinstance(result.error, DcpInvalidArgument):
            assert out.isnan().all() and lse_out.isnan().all()
        return dataclasses.replace(result, value=None)

    def finish(self, first):
        """From a fault on, everything raises the same at once, and close() is local."""
        for again in (self(), self(num_tokens=0), self(num_tokens=9, lane=1), attempt(self.workspace.check)):
            assert type(again.error) is type(first.error) and again.error.ranks == first.error.ranks, (again, first)
            assert again.seconds < AT_ONCE_S
        closed = attempt(self.workspace.close)
        assert closed.error is None and closed.seconds < AT_ONCE_S
        return first


DIFFERENT = {
    "T": {"num_tokens": 4},
    "no tokens": {"num_tokens": 0},
    "more tokens": {"num_tokens": 9},
    "lse_base": {"lse_base": "2"},
    "lane": {"lane": 1},
}


def mismatch(group, different):
    rank = Rank(group)
    result = rank.finish(rank(**(different if rank.workspace.rank == 1 else {})))
    meet(group)
    return result


@pytest.mark.parametrize("num_ranks, mode", [(2, "thread"), (4, "thread"), (3, "process")])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_raise_on_every_rank(name, num_ranks, mode):
    """At once, or at the deadline where lanes differ; with both calls in the text."""
    for rank, result in enumerate(run_ranks(mismatch, num_ranks, DIFFERENT[name], mode=mode)):
        assert type(result.error) is DcpMismatch and 1 in result.error.ranks, (rank, result)
        assert result.seconds < (TIMEOUT_S + 1 if name == "lane" else AT_ONCE_S), result
        text = str(result.error)
        assert text.startswith("a2a_lse_reduce: all ranks must make the same calls"), text
        ((field, value),) = DIFFERENT[name].items()
        assert f"{field}={value!r}" in text and "rank 1: a2a_lse_reduce(" in text, text


def missing(group, absent, seconds):
    rank = Rank(group)
    if rank.workspace.rank in absent:
        time.sleep(seconds)
    elif rank.workspace.rank == 2:
        time.sleep(TIMEOUT_S / 2)
    result = rank.finish(rank())
    meet(group)
    again = Rank(group)
    assert again().error is None  # all are there again: a new workspace works
    again.workspace.close()
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("absent", [[1], [0], [1, 3]], ids=str)
def test_missing_ranks_are_named_on_every_rank(absent, mode):
    """DcpTimeout with the ranks that did not come, on a rank that came later than the others too, and on the late one
    when it comes."""
    for rank, result in enumerate(run_ranks(missing, 4, absent, TIMEOUT_S + 0.8, mode=mode)):
        assert type(result.error) is DcpTimeout and result.error.ranks == tuple(absent), (rank, result)
        assert str(result.error).startswith("a2a_lse_reduce: all ranks must call in time (rank")
        assert result.seconds < TIMEOUT_S + 1
        if rank not in absent:
            assert result.seconds > TIMEOUT_S / 2 - 0.1


def late_within_its_time(group, fields, first, seconds):
    rank = Rank(group, warm=not first, **fields)
    if rank.workspace.rank == 1:
        time.sleep(seconds)
    result = rank()
    rank.workspace.close()
    return result


@pytest.mark.parametrize(
    "timeout_s, first_call_timeout_s, first, seconds, mode",
    [
        (20.0, 2.0, False, 2.6, "process"),
        (0.3, 20.0, True, 1.0, "process"),
        (0, 2.0, False, 2.6, "process"),
        (0.3, 0, True, 1.0, "process"),
        (20.0, 0.5, False, 1.0, "thread"),
        (0.3, 0, True, 1.0, "thread"),
    ],
)
def test_each_call_has_its_own_deadline(timeout_s, first_call_timeout_s, first, seconds, mode):
    """A rank may be as late as the call's timeout says, whatever the other one is; 0 waits for ever."""
    fields = {"timeout_s": timeout_s, "first_call_timeout_s": first_call_timeout_s}
    on_time, late = run_ranks(late_within_its_time, 2, fields, first, seconds, mode=mode)
    assert on_time.error is None and late.error is None and on_time.seconds > seconds - 0.3


def bad_arguments(group):
    call = make_call(2, 3, 24, 64, torch.float32)
    with make(group, timeout_s=10.0) as workspace:
        arguments = call.arguments(workspace.rank)
        if workspace.rank == 1:
            payload, overlapping = arguments["partial_out"], arguments["partial_out"][:, :12]
            for wrong in (
                {"partial_out": payload[:, :12]},
                {"partial_out": payload.bfloat16()},
                {"lse_base": "10"},
                {"lane": 2},
                {"partial_lse": torch.zeros(4, 24)},
                {"out": overlapping},
                {"out": torch.empty(3, 12, 64), "lse_out": arguments["partial_lse"][:, :12]},
                {"seq_lens": torch.ones(3, dtype=torch.int32)},
            ):
                raised = attempt(a2a_lse_reduce, workspace=workspace, **arguments | wrong)
                assert type(raised.error) is DcpInvalidArgument and raised.seconds < AT_ONCE_S, (wrong.keys(), raised)
        return [merge(workspace, call)]


@pytest.mark.parametrize("mode", MODES)
def test_wrong_arguments_send_nothing(mode):
    """The rank at fault makes the call good, and meets the others, who wait in it."""
    same_as_direct([make_call(2, 3, 24, 64, torch.float32)], run_ranks(bad_arguments, 2, mode=mode))


def busy(group):
    call = make_call(2, 3, 24, 64, torch.float32)
    with make(group, timeout_s=10.0) as workspace:
        results = []
        thread = threading.Thread(target=lambda: results.append(merge(workspace, call)))
        if workspace.rank == 0:
            thread.start()
            time.sleep(0.2)
            second = attempt(merge, workspace, call)
            assert type(second.error) is DcpError and "lane 0 is in flight" in str(second.error), second
            closed = attempt(workspace.close)
            assert type(closed.error) is DcpError and "no call may be in flight" in str(closed.error), closed
        meet(group)
        if workspace.rank == 1:
            thread.start()
        thread.join()
        results.append(merge(workspace, dataclasses.replace(call, lane=1)))
        return results


@pytest.mark.parametrize("mode", MODES)
def test_a_second_call_on_a_lane_in_flight_is_an_error(mode):
    call = make_call(2, 3, 24, 64, torch.float32)
    same_as_direct([call] * 2, run_ranks(busy, 2, mode=mode))


def after_close(group):
    workspace = make(group)
    call = make_call(2, 3, 24, 64, torch.float32)
    merge(workspace, call)
    meet(group)
    closes = [attempt(workspace.close)]
    meet(group)
    closes.append(attempt(workspace.close))
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group()
    closes.append(attempt(workspace.close))
    for op in (lambda: merge(workspace, call), workspace.check, lambda: workspace.partial_out(1), workspace.self_check):
        with pytest.raises(DcpError, match="the workspace must be open"):
            op()
    assert workspace.num_bytes > 0 and workspace.rank in (0, 1)
    return closes


@pytest.mark.parametrize("mode", MODES)
def test_close_may_be_repeated(mode):
    """Also when the caller's group is gone."""
    for closes in run_ranks(after_close, 2, mode=mode):
        assert all(closed.error is None and closed.seconds < AT_ONCE_S for closed in closes)


def without_the_group(group):
    """The caller's group may go first: calls do not use it."""
    call = make_call(2, 3, 24, 64, torch.float32)
    with make(group, timeout_s=10.0) as workspace:
        meet(group)
        dist.destroy_process_group()
        gc.collect()
        return [merge(workspace, call) for _ in range(2)]


def test_calls_do_not_need_the_callers_group():
    call = make_call(2, 3, 24, 64, torch.float32)
    same_as_direct([call] * 2, run_ranks(without_the_group, 2, mode="process"))


def closes_early(group):
    rank = Rank(group, timeout_s=10.0)
    if rank.workspace.rank == 1:
        rank.workspace.close()
        meet(group)
        return None
    result = rank.finish(rank())
    meet(group)
    return result


def test_a_rank_that_closes_is_lost_to_the_others():
    """Who still calls does not wait for the deadline."""
    results = run_ranks(closes_early, 3, mode="process")
    for result in results[::2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (1,) and result.seconds < 2, result


def killed(group, victim, seed, timeout_s):
    rank = Rank(group, timeout_s=timeout_s, first_call_timeout_s=timeout_s)
    delays = random.Random(seed)
    moment = max(as_group(group).all_gather_object(time.monotonic(), timeout_s=20)) + 0.05
    if rank.workspace.rank == victim:
        when = moment + delays.random() * 0.05
        threading.Thread(
            target=lambda: (time.sleep(max(0, when - time.monotonic())), os.kill(os.getpid(), signal.SIGKILL))
        ).start()
    sizes, pauses = random.Random(seed), random.Random(seed + rank.workspace.rank)
    while (result := rank(sizes.choice([0, 1, 3, 4, 9]))).error is None:
        if seed % 2:
            time.sleep(pauses.random() * 0.02)
    delay = time.monotonic() - moment
    rank.finish(result)
    survivors = [other for other in range(dist.get_world_size()) if other != victim]
    smaller = dist.new_group(survivors, use_local_synchronization=True)
    again = Rank(smaller, timeout_s=10.0)
    assert again.workspace.num_ranks == 3 and again().error is None
    again.workspace.close()
    return result.error, delay


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_rank_is_named_and_the_others_go_on(seed):
    """kill -9 at a random moment of a loop of calls: all survivors raise with just that rank, long before the deadline, or
    without one; then they make a workspace of their own."""
    victim, timeout_s = 1 + seed % 3, [10.0, 0][seed % 3 == 2]
    results = run_ranks(killed, 4, victim, seed, timeout_s, mode="process", expect_exit={victim: -signal.SIGKILL})
    for error, delay in results[:victim] + results[victim + 1 :]:
        assert type(error) is DcpPeerLost and error.ranks == (victim,), error
        assert delay < 3, delay


def killed_while_others_are_away(group):
    rank = Rank(group, timeout_s=6.0)
    me = rank.workspace.rank
    if me == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if me == 2:
        time.sleep(1.5)
    result = rank()  # ranks 0 and 1 wait for rank 2; it is late, and rank 1 is dead by then
    return rank.finish(result)


def test_a_late_rank_is_not_taken_for_the_dead_one():
    """Both are missing when the connection breaks; who is alive says so when it comes."""
    results = run_ranks(killed_while_others_are_away, 3, mode="process", expect_exit={1: -signal.SIGKILL})
    for result in results[::2]:
        assert type(result.error) is DcpPeerLost and result.error.ranks == (1,), result
    assert results[0].seconds < 3


def stopped(group):
    rank = Rank(group)
    pids = as_group(group).all_gather_object(os.getpid(), timeout_s=20)
    moment = max(as_group(group).all_gather_object(time.monotonic(), timeout_s=20))
    timers = []
    time.sleep(0.2)  # all have come out of the exchange above
    if rank.workspace.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        timers = [threading.Timer(2.5, os.kill, (pids[1], signal.SIGCONT))]
        [timer.start() for timer in timers]
    if rank.workspace.rank == 1:
        while time.monotonic() < moment + 2.0:
            time.sleep(0.01)
    result = rank.finish(rank())
    [timer.join() for timer in timers]
    return result


def test_a_stopped_rank_is_named_and_learns_it():
    for rank, result in enumerate(run_ranks(stopped, 3, mode="process")):
        assert type(result.error) is DcpTimeout and result.error.ranks == (1,), (rank, result)
        assert result.seconds < TIMEOUT_S + 1


class NeverEnding:
    """A gloo whose threads do not end."""

    def __init__(self):
        self.over = threading.Event()

    def __del__(self):
        self.over.wait(20)


def test_close_does_not_wait_for_threads_of_gloo():
    group = object.__new__(GlooGroup)
    group._gloo = gloo = NeverEnding()
    over = gloo.over
    del gloo
    start = time.monotonic()
    group.close()
    assert 0.5 < time.monotonic() - start < 5
    group.close()
    over.set()


def interrupted(group):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = Rank(group, timeout_s=20.0)
    me = rank.workspace.rank
    if me == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if me == 2:
        time.sleep(1.0)
    result = rank()
    again = rank()
    rank.workspace.close()
    meet(group)
    return result, again


def test_ctrl_c_ends_a_wait_on_every_rank():
    """KeyboardInterrupt in the rank that waits; the others, who would wait in vain, learn who gave up."""
    (result, again), *others = run_ranks(interrupted, 3, mode="process")
    assert type(result.error) is KeyboardInterrupt and 0.2 < result.seconds < 0.8
    assert isinstance(again.error, DcpError) and again.error.ranks == (0,)
    for other, other_again in others:
        assert isinstance(other.error, DcpError) and other.error.ranks == (0,), other
        assert type(other_again.error) is type(other.error) and other.seconds < 2


def dropped_after_a_fault(group):
    rank = Rank(group)
    if rank.workspace.rank == 1:
        time.sleep(2)
    else:
        assert type(rank().error) is DcpTimeout
        start = time.monotonic()
        del rank
        gc.collect()
        return time.monotonic() - start
    return 0.0


def test_a_faulted_workspace_can_be_dropped():
    """What gloo still has in flight for a rank that does not come holds up nobody."""
    assert run_ranks(dropped_after_a_fault, 2, mode="process")[0] < 1.2  # a collection takes some time, too


def no_one_comes(group):
    if group.rank() == 1:
        time.sleep(2.5)
        return None
    return attempt(make, group, first_call_timeout_s=1.0)


def test_a_rank_that_does_not_come_to_the_creation():
    results = run_ranks(no_one_comes, 3, mode="process")
    for result in results[::2]:
        assert isinstance(result.error, DcpTimeout) and result.seconds < 2, result


def store_in_rank_0(group, what):
    """As under torchrun without an agent: torch's store is a server in rank 0, and that one is stopped, or killed."""
    store = dist.TCPStore("127.0.0.1", 0, 3, True, wait_for_workers=False) if group.rank() == 0 else None
    port, pid = as_group(group).all_gather_object((store.port, os.getpid()) if store else None, timeout_s=20)[0]
    store = store or dist.TCPStore("127.0.0.1", port, 3, False, wait_for_workers=False)
    meet(group)
    rank = group.rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    mine = Rank(None)
    meet(None)
    if rank == 0:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        return None
    time.sleep(0.2)  # all have come out of the meeting
    if rank == 1 and what == "stop":
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(3.0, os.kill, (pid, signal.SIGCONT))
        timer.start()
    time.sleep(0.1)
    result = mine()
    closed = attempt(mine.workspace.close)
    if rank == 1 and what == "stop":
        timer.join()
    return result, closed


@pytest.mark.parametrize("what", ["stop", "kill"])
def test_no_rank_waits_for_a_store_that_does_not_answer(what):
    """Then nobody can say who is missing; but in time."""
    expect_exit = {0: -signal.SIGKILL} if what == "kill" else None
    for result, closed in run_ranks(store_in_rank_0, 3, what, mode="process", expect_exit=expect_exit)[1:]:
        assert isinstance(result.error, DcpTimeout) and result.error.ranks in ((), (0,)), result
        assert result.seconds < TIMEOUT_S + 1 and closed.error is None and closed.seconds < AT_ONCE_S, (result, closed)
