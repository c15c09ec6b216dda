"""Lanes and epochs: independent streams of one workspace, from several threads at once, across the wrap at 2**32."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, attempt, config_for, make_call, meet, merge, same_bits

CONFIG = WorkspaceConfig(6, 64, 4, dtype=torch.float32, num_lanes=3, timeout_s=5.0, first_call_timeout_s=5.0)


def calls_of(lane: int, count: int):
    """Different numbers of tokens, none and more than the capacity of 4 among them."""
    sizes = random.Random(lane)
    return [
        make_call(
            2, sizes.choice([0, 1, 2, 4, 6, 9]), 6, 64, torch.float32, kind="empty", seed=100 * lane + i, lane=lane
        )
        for i in range(count)
    ]


def check_all(calls, by_rank):
    for call, (out, lse) in zip(calls, assemble(by_rank), strict=True):
        call.check(out, lse)


def test_lanes_in_turn():
    """Calls on three lanes in any order; what counts is the order within each lane."""
    calls = [call for lane in range(3) for call in calls_of(lane, 20)]
    random.Random(1).shuffle(calls)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            return [merge(workspace, call) for call in calls]

    check_all(calls, run_ranks(body, 2))


def test_lanes_from_several_threads_at_once():
    """Two ranks with three threads each, one a lane, with delays: the streams do not wait for each other and do not
    mix."""
    lanes = [calls_of(lane, 60) for lane in range(3)]

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            results, errors = [[] for _ in lanes], []

            def run(lane):
                delays = random.Random(10 * workspace.rank + lane)
                for call in lanes[lane]:
                    if delays.random() < 0.1:
                        time.sleep(delays.random() * 2e-3)
                    results[lane].append(merge(workspace, call))

            threads = [threading.Thread(target=lambda i=i: errors.append(attempt(run, i).error)) for i in range(3)]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            assert errors == [None] * 3
            return results

    by_rank = run_ranks(body, 2)
    for lane, calls in enumerate(lanes):
        check_all(calls, [results[lane] for results in by_rank])


def test_a_lane_that_waits_does_not_hold_up_another():
    """While a call on lane 0 waits for a late peer, lane 1 makes progress, with the same two ranks."""
    call, other = (make_call(2, 3, 6, 64, torch.float32, lane=lane) for lane in (0, 1))

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            waiting = []
            thread = threading.Thread(target=lambda: waiting.append(merge(workspace, call)))
            if workspace.rank == 0:
                thread.start()
                time.sleep(0.1)
            results = [merge(workspace, other) for _ in range(10)]
            assert waiting == []
            meet(group)
            if workspace.rank == 1:
                thread.start()
            thread.join()
            return [*results, *waiting]

    check_all([other] * 10 + [call], run_ranks(body, 2))


def test_a_second_call_on_a_lane_in_flight_is_an_error():
    """It raises at once and breaks nothing: the first call ends as if there had been no other."""
    call = make_call(2, 3, 6, 64, torch.float32)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            results = []
            thread = threading.Thread(target=lambda: results.append(merge(workspace, call)))
            if workspace.rank == 0:
                thread.start()
                time.sleep(0.2)
                second = attempt(merge, workspace, call)
                assert type(second.error) is DcpError and "lane" in str(second.error), second
                assert str(second.error).startswith("a2a_lse_reduce: ") and second.seconds < 0.5
            meet(group)
            if workspace.rank == 1:
                thread.start()
            thread.join()
            results += [merge(workspace, call), merge(workspace, call)]
            assert workspace.stats()["num_calls"] == 3
            return results

    check_all([call] * 3, run_ranks(body, 2))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize(
    "start", [2, 3, 2**32 - 3, 2**32 - 2, 2**32 - 1, 5 * 2**32 - 4, 2**40 + 2, 2**63 - 3], ids=lambda start: hex(start)
)
def test_epochs_across_the_wrap(start, num_lanes, num_ranks):
    """12 calls from just below a multiple of 2**32, one of them in three rounds, on one lane and on several at
    different paces."""
    sizes = [3, 0, 4, 1, 10, 4, 0, 2, 1, 4, 3, 1]
    calls = [
        make_call(num_ranks, n, 6, 64, torch.float32, seed=i, lane=(i % 4) % num_lanes) for i, n in enumerate(sizes)
    ]

    def body(group):
        with Workspace(
            group, config=config_for(calls[0], max_num_tokens=4, num_lanes=num_lanes, start_epoch=start)
        ) as ws:
            return [merge(ws, call) for call in calls]

    check_all(calls, run_ranks(body, num_ranks))


def test_the_start_of_the_epochs_does_not_show():
    """Same bits from any start."""
    call = make_call(3, 4, 6, 64, torch.bfloat16)

    def body(group, start):
        with Workspace(group, config=config_for(call, start_epoch=start)) as workspace:
            return [merge(workspace, call)]

    results = [assemble(run_ranks(body, 3, start))[0] for start in (3, 2**32 - 1)]
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])
