"""Channels in threads: whatever runs them, a call makes each of them once, in step with the peers; and it ends."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpMismatch, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, attempt, make_call, meet, merge, run_calls, same_bits

CONFIG = WorkspaceConfig(
    6, 64, 8, dtype=torch.float32, num_channels=3, num_lanes=2, timeout_s=5.0, first_call_timeout_s=10.0
)
SIZES = [5, 0, 8, 1, 20, 2, 0, 7]
WAYS = [{}, {"zero_copy": True}, {"wire": "packet", "packet_bytes": 16}]


def calls_of(num_ranks, sizes=SIZES, **fields):
    return [make_call(num_ranks, n, 6, 64, torch.float32, kind="empty", seed=i, **fields) for i, n in enumerate(sizes)]


def check_all(calls, by_rank):
    """Bit for bit what one channel gives."""
    plain = run_calls(calls, num_lanes=2, max_num_tokens=8)
    for call, got, expected in zip(calls, assemble(by_rank), plain, strict=True):
        assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1])
        call.check(*got)


def channel_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dcpkernels-channel")]


# -- ways to run them


def one_by_one(num_channels, body):
    for channel in range(num_channels):
        body(channel, channel + 1)


def all_in_one(num_channels, body):
    body(0, num_channels)


def in_threads_of_its_own(num_channels, body):
    threads = [threading.Thread(target=body, args=(channel, channel + 1)) for channel in range(num_channels)]
    for thread in random.sample(threads, len(threads)):
        thread.start()
    for thread in threads:
        thread.join()


def in_two_parts(num_channels, body):
    with ThreadPoolExecutor(2) as pool:
        for part in [pool.submit(body, 0, 1), pool.submit(body, 1, num_channels)]:
            part.result()


def with_empty_ranges(num_channels, body):
    body(0, 0)
    body(0, num_channels - 1)
    body(num_channels - 1, num_channels)
    body(num_channels, num_channels)


RUNNERS = [None, one_by_one, all_in_one, in_threads_of_its_own, in_two_parts, with_empty_ranges]


@pytest.mark.parametrize("fields", WAYS, ids=str)
@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: getattr(runner, "__name__", "default"))
def test_any_way_to_run_them(runner, fields):
    """Each rank in another way; results, num_calls and the order of the calls are those of one channel."""
    calls = calls_of(3)

    def body(group):
        mine = RUNNERS[(RUNNERS.index(runner) + group.rank) % len(RUNNERS)]
        config = dataclasses.replace(CONFIG, **fields)
        with Workspace(group, config=config, parallel_for=mine) as workspace:
            results = [merge(workspace, call) for call in calls]
            assert workspace.stats()["num_calls"] == len(calls)
            return results

    check_all(calls, run_ranks(body, 3))


@pytest.mark.parametrize("num_channels", [1, 2, 7])
def test_parallel_for_is_told_what_to_do(num_channels):
    """One call of it for each call of an op, with the number of channels; also where there is only one."""
    calls = calls_of(2)

    def body(group):
        seen = []

        def parallel_for(n, run):
            seen.append(n)
            assert threading.current_thread().name == f"rank{group.rank}"  # in the caller's thread
            one_by_one(n, run)

        config = dataclasses.replace(CONFIG, num_channels=num_channels)
        with Workspace(group, config=config, parallel_for=parallel_for) as workspace:
            workspace.warmup()  # does not disturb it
            del seen[:]
            results = [merge(workspace, call) for call in calls]
        assert seen == [num_channels] * len(calls)
        return results

    check_all(calls, run_ranks(body, 2))


# -- threads of the library


def test_threads_are_made_with_the_workspace_and_go_with_it():
    """num_channels - 1 a lane at most; warmup starts all; none is left after close, or when the workspace is dropped."""
    assert channel_threads() == []

    def body(group):
        workspace = Workspace(group, config=CONFIG)
        workspace.warmup()
        group.barrier()
        count = len(channel_threads())
        merge(workspace, calls_of(2)[0])
        group.barrier()
        assert len(channel_threads()) == count
        group.barrier()
        workspace.close() if group.rank else None
        return count

    assert run_ranks(body, 2) == [2 * 2 * 2] * 2
    deadline = time.monotonic() + 5
    while channel_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert channel_threads() == []


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_lanes_do_not_take_each_others_threads(fields):
    """Two lanes from two threads, which the ranks start in different orders: a thread that waits in one lane must not be
    what the other lane's channel needs."""
    lanes = [calls_of(2, [3, 8, 1, 5] * 12, lane=lane) for lane in (0, 1)]

    def body(group):
        config = dataclasses.replace(CONFIG, **fields)
        with Workspace(group, config=config) as workspace:
            results, errors = [[], []], []

            def run(lane):
                delays = random.Random(10 * workspace.rank + lane)
                for call in lanes[lane]:
                    time.sleep(delays.random() * 1e-3)
                    results[lane].append(merge(workspace, call))

            threads = [threading.Thread(target=lambda i=i: errors.append(attempt(run, i).error)) for i in (0, 1)]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            assert errors == [None, None], errors
            return results

    by_rank = run_ranks(body, 2)
    for lane in (0, 1):
        check_all(lanes[lane], [results[lane] for results in by_rank])


def test_a_lane_that_waits_does_not_hold_up_another():
    """Lane 0 of rank 0 waits, with all its channels, for a rank that makes ten calls on lane 1 first."""
    (waiting,), (other,) = calls_of(2, [5]), calls_of(2, [5], lane=1)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            results = []
            thread = threading.Thread(target=lambda: results.append(merge(workspace, waiting)))
            if workspace.rank == 0:
                thread.start()
                time.sleep(0.1)
            others = [merge(workspace, other) for _ in range(10)]
            assert results == []
            meet(group)
            if workspace.rank == 1:
                thread.start()
            thread.join()
            return [*others, *results]

    check_all([other] * 10 + [waiting], run_ranks(body, 2))


# -- a parallel_for that does not do as it should


class Oops(Exception):
    pass


def raises_before(num_channels, body):
    raise Oops


def raises_after_the_first(num_channels, body):
    body(0, 1)
    raise Oops


def raises_after_the_last(num_channels, body):
    all_in_one(num_channels, body)
    raise Oops


def raises_beside_a_thread(num_channels, body):
    """A channel still runs in another thread, or has not even started, when this one gives up."""
    threading.Thread(target=lambda: (time.sleep(0.1), attempt(body, 1, 2))).start()
    threading.Thread(target=body, args=(2, 3)).start()
    raise Oops


def leaves_one_out(num_channels, body):
    body(0, 1)
    body(2, num_channels)


def does_nothing(num_channels, body):
    pass


def does_one_twice(num_channels, body):
    all_in_one(num_channels, body)
    body(1, 2)


def goes_beyond(num_channels, body):
    body(0, num_channels + 1)


def starts_below(num_channels, body):
    body(-1, num_channels)


BAD = [
    (raises_before, Oops, None),
    (raises_after_the_first, Oops, None),
    (raises_after_the_last, Oops, None),
    (raises_beside_a_thread, Oops, None),
    (leaves_one_out, DcpError, r"parallel_for: body must be called for all channels \(was not for \[1\]\)"),
    (does_nothing, DcpError, r"parallel_for: body must be called for all channels \(was not for \[0, 1, 2\]\)"),
    (does_one_twice, DcpError, r"parallel_for: body must be called once for each channel"),
    (goes_beyond, DcpError, r"parallel_for: body must be called once for each channel"),
    (starts_below, DcpError, r"parallel_for: body must be called once for each channel"),
]


@pytest.mark.parametrize("fields", WAYS, ids=str)
@pytest.mark.parametrize("bad, error, text", BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_parallel_for_does_not_harm_the_others(bad, error, text, fields):
    """This rank raises; its peers, who were in the same call, get their results, and no call after it is mixed with this
    one: the next ones, of the same shape, are right on all ranks."""
    first, *others = calls_of(3, [7, 7, 7, 7, 20])

    def body(group):
        is_bad = [False]

        def parallel_for(num_channels, run):
            (bad if is_bad[0] else all_in_one)(num_channels, run)

        config = dataclasses.replace(CONFIG, **fields)
        with Workspace(group, config=config, parallel_for=parallel_for if group.rank == 1 else None) as workspace:
            is_bad[0] = True
            if group.rank == 1:
                with pytest.raises(error, match=text):
                    merge(workspace, first)
                result = None
            else:
                result = merge(workspace, first)
            is_bad[0] = False
            workspace.check()
            results = [merge(workspace, call) for call in others]
            return result, results

    by_rank = run_ranks(body, 3)
    check_all(others, [results for _, results in by_rank])
    (whole,) = run_calls([first])
    for rank in (0, 2):
        (out, lse), heads = by_rank[rank][0], slice(2 * rank, 2 * rank + 2)
        assert same_bits(out, whole[0][:, heads].contiguous()) and same_bits(lse, whole[1][:, heads].contiguous())


def test_no_thread_can_be_started(monkeypatch):
    """The call is made all the same, by the thread that there is; the reason is raised after it."""
    (call,) = calls_of(2, [7])
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("dcpkernels-channel"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            if group.rank == 1:
                workspace.warmup()
            group.barrier()
            if group.rank == 0:
                monkeypatch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    merge(workspace, call)
                monkeypatch.undo()
            else:
                merge(workspace, call)
            group.barrier()
            return [merge(workspace, call)]

    check_all([call], run_ranks(body, 2))


# -- faults


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_a_fault_in_any_channel_is_one_of_the_call(fields):
    """A rank that does not come, and one that calls otherwise: NaN in all rows of all channels, and one error."""
    config = dataclasses.replace(CONFIG, timeout_s=0.5, **fields)

    def body(group):
        outcomes = []
        for what in ("late", "different"):
            workspace = Workspace(group, config=config)
            (call,) = calls_of(3, [7])
            merge(workspace, call)
            meet(group)
            if group.rank == 1 and what == "late":
                time.sleep(1.0)
            if group.rank == 1 and what == "different":
                (call,) = calls_of(3, [8])
            out = torch.full((call.outs.shape[1], 2, 64), 7.0)
            result = attempt(merge_into, workspace, call, out)
            outcomes.append((type(result.error), result.error.ranks, bool(out.isnan().all()), result.seconds < 1.5))
            workspace.close()
        return outcomes

    for late, different in run_ranks(body, 3):
        assert late == (DcpTimeout, (1,), True, True)
        assert different[0] is DcpMismatch and 1 in different[1] and different[2:] == (True, True)


def merge_into(workspace, call, out):
    return a2a_lse_reduce(workspace=workspace, out=out, **call.arguments(workspace.rank))


def interrupted(group, fields, num_channels):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = dataclasses.replace(CONFIG, timeout_s=20.0, num_channels=num_channels, **fields)
    workspace = Workspace(group, config=config)
    call = make_call(3, 7, 6, 64, torch.float32)
    merge(workspace, call)
    meet(group)
    me = workspace.rank
    if me == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if me == 2:
        time.sleep(1.0)
    out = torch.full((7, 2, 64), 7.0)
    result = attempt(merge_into, workspace, call, out)
    again = attempt(merge, workspace, call)
    closed = attempt(workspace.close)
    return result.error, result.seconds, again.error, closed.error, bool(out.isnan().all())


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_ctrl_c_inside_a_call_with_channels(fields):
    """KeyboardInterrupt at once in the rank that waits, an error that names it in the others; no channel runs on."""
    (error, seconds, again, closed, all_nan), *others = run_ranks(interrupted, 3, fields, 3, mode="process")
    assert type(error) is KeyboardInterrupt and seconds < 0.8 and closed is None and all_nan
    assert isinstance(again, DcpError) and again.ranks == (0,)
    for other, other_seconds, other_again, other_closed, other_nan in others:
        assert type(other) is DcpError and other.ranks == (0,) and other_closed is None and other_nan
        assert other_again.ranks == (0,) and other_seconds < 2


def interrupted_at_the_end(group):
    """Rank 0's main thread is done with its channel, and waits for those of the pool; rank 1 comes late to these."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    late = [False]

    def slow(num_channels, body):
        body(0, 1)
        time.sleep(1.0 if late[0] else 0)
        body(1, num_channels)

    workspace = Workspace(
        group, config=dataclasses.replace(CONFIG, timeout_s=20.0), parallel_for=slow if group.rank() else None
    )
    first, *others = calls = calls_of(2, [7, 7, 7])
    merge(workspace, first)
    meet(group)
    late[0] = True
    if workspace.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    result = attempt(merge, workspace, calls[0])
    late[0] = False
    time.sleep(0.1)
    results = [attempt(merge, workspace, call) for call in others]
    closed = attempt(workspace.close)
    return result, results, closed.error


def test_ctrl_c_while_only_other_threads_wait():
    """The call must not end while channels run in other threads: they would write into what the caller has freed. After
    that the ranks are in step: both go on, or both raise."""
    (result, results, closed), (other, other_results, other_closed) = run_ranks(
        interrupted_at_the_end, 2, mode="process"
    )
    assert type(result.error) is KeyboardInterrupt and closed is None and other_closed is None
    errors = [raised.error for raised in (*results, *other_results)]
    if other.error is None:
        assert errors == [None] * 4
        check_all(calls_of(2, [7, 7, 7])[1:], [[r.value for r in results], [r.value for r in other_results]])
    else:
        assert all(isinstance(error, DcpError) and error.ranks == (0,) for error in (*errors, other.error))
