"""Rank processes in a mix of calls, and one more process, the nemesis, that kills and stops them from outside.

A world is one call of `run_ranks`: W ranks and the nemesis, which is in the default group but in no workspace. It goes
through rounds: the ranks that are left make a workspace over a new group, run the mix, and are struck at a random moment;
survivors look at their error, close, count what they hold, and go on to the next round.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from dcpkernels import Workspace
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.torture import faults_instruction
from tests.torture.faults_instruction import Stepper
from tests.torture.faults_mix import Mix, config_for
from tests.torture.faults_resources import ended_processes, more_threads, num_threads, resources, settled, state_of

LONG_S = 60.0  # no wait takes as long, unless something hangs
AT_ONCE_S = 2.0  # a death is noticed within 0.05 s of waiting; the rest is for a machine with other work


@dataclass(frozen=True)
class Round:
    """What is done to the ranks `victims` (places among those that are left)."""

    how: str  # "kill", "stop", "none", "slow" (stopped often, for short), "crowd" (all ranks on one processor)
    victims: tuple[int, ...] = ()
    variant: str = "bulk"
    backend: str = "direct"
    lanes: bool = False  # a thread for each lane
    pause_s: float = 0.0
    timeout_s: float = 20.0
    instruction: bool = False  # the victim strikes itself at a random instruction of the compiled module


@dataclass(frozen=True)
class World:
    num_ranks: int
    seed: int
    rounds: tuple[Round, ...]
    stop_s: float = 1.6  # how long a rank is stopped

    def members(self, round_idx: int) -> list[int]:
        """World ranks that take part in a round."""
        left = list(range(self.num_ranks))
        for round_ in self.rounds[:round_idx]:
            if round_.how == "kill":
                left = [rank for place, rank in enumerate(left) if place not in round_.victims]
        return left

    def survivors(self, round_idx: int) -> list[int]:
        """The places of a round whose processes live on."""
        round_, num_members = self.rounds[round_idx], len(self.members(round_idx))
        return [place for place in range(num_members) if round_.how != "kill" or place not in round_.victims]


@dataclass
class Seen:
    """What one rank saw of one round."""

    error: str = ""  # class; "" = none
    ranks: tuple[int, ...] = ()
    text: str = ""
    at: float = 0.0  # monotonic, when it came out of the call
    num_calls: int = 0
    later: list[tuple[str, tuple[int, ...], float]] = field(default_factory=list)  # the same of what is called after it
    close_s: float = 0.0
    left_over: str = ""
    num_more_threads: int = 0


def run(world: World, timeout_s: float = 120.0) -> list[dict[int, Seen]]:
    """Runs a world, looks at everything that must hold, and returns what each survivor saw of each round, by its place in
    the round. A failure names the world, so that it can be run again."""
    dead = {world.members(i)[v]: -9 for i, r in enumerate(world.rounds) if r.how == "kill" for v in r.victims}
    before = settled({}, 0, _in_shm)
    try:
        helper = faults_instruction.build() if any(round_.instruction for round_ in world.rounds) else b""
        args = (world, helper)
        results = run_ranks(_rank, world.num_ranks + 1, *args, mode="process", timeout_s=timeout_s, expect_exit=dead)
        moments, views = results[-1]
        for round_idx, moment in enumerate(moments):
            _judge(world, round_idx, moment, views[round_idx])
    except Exception as error:
        error.add_note(f"to run it again: {world}")
        raise
    assert settled({}, 0, _in_shm) == before
    assert ended_processes() == [], world
    return views


def _in_shm() -> dict[str, int]:
    return {name: 1 for name in os.listdir("/dev/shm") if "dcp" in name}


def _judge(world: World, round_idx: int, moment: float, views: dict[int, Seen]) -> None:
    """What must hold of a round for every rank that is still there at its end."""
    round_, num_members = world.rounds[round_idx], len(world.members(round_idx))
    assert list(views) == world.survivors(round_idx)
    for place, view in views.items():
        where = f"round {round_idx}, place {place} of {num_members}: {view}"
        assert view.left_over == "" and view.num_more_threads <= 0, where
        if round_.how not in ("kill", "stop"):
            assert view.error == "" and view.num_calls > 0, where
            continue
        expected = {"kill": "DcpPeerLost", "stop": "DcpTimeout"}[round_.how]
        assert view.error == expected, where
        named = set(view.ranks)
        # gloo does not tell, and torch's store may be held by the rank that is stopped (docs/errors.md).
        assert named <= set(round_.victims) and (named or round_.backend == "collective"), where
        limit = AT_ONCE_S if round_.how == "kill" else round_.timeout_s + 1
        delay = view.at - moment
        if round_.how == "stop" and place in round_.victims:
            assert delay < world.stop_s + 1 + 0.5, f"{delay}: {where}"  # and a half for the nemesis itself
        else:
            assert delay < limit, f"{delay}: {where}"
        for error, ranks, seconds in view.later:
            assert (error, ranks) == (view.error, view.ranks) and seconds < 1, where
        assert view.close_s < (0.6 if round_.backend == "direct" else 1.5), (
            where
        )  # less than timeout_s: waits for nobody
    if len(round_.victims) == 1 and round_.backend == "direct":
        assert len({(view.error, view.ranks) for view in views.values()}) <= 1, f"round {round_idx}: {views}"


# -- in the processes


def _rank(group: Any, world: World, helper: bytes) -> Any:
    store, rank = dist.distributed_c10d._get_default_store(), group.rank()
    if rank == world.num_ranks:
        return _nemesis(store, world)
    stepper = Stepper(helper) if helper else None
    for round_idx in range(len(world.rounds)):
        seen = _play(store, world, round_idx, world.members(round_idx), rank, stepper)
        store.set(f"seen/{round_idx}/{rank}", pickle.dumps(seen))  # this rank may not be there at the end
    return None


def _play(store: Any, world: World, round_idx: int, members: list[int], rank: int, stepper: Stepper | None) -> Seen:
    round_ = world.rounds[round_idx]
    # Made by word of those who are left alone.
    group = dist.new_group(members, use_local_synchronization=True)
    place, seed = members.index(rank), world.seed * 1000 + round_idx
    before, threads = resources(), num_threads()
    processors = os.sched_getaffinity(0)
    if round_.how == "crowd":
        os.sched_setaffinity(0, {min(processors)})
    config = config_for(len(members), round_.variant, timeout_s=round_.timeout_s, first_call_timeout_s=20.0)
    workspace = Workspace(group, config=config, backend=round_.backend)
    mix = Mix(workspace, seed, pause_s=round_.pause_s)
    mix.warm_up()
    play = mix.play_lanes if round_.lanes else mix.play
    store.set(f"ready/{round_idx}/{rank}", str(os.getpid()))
    seen = Seen()
    if place in round_.victims and round_.instruction:
        draw, heap = random.Random(seed + place), workspace._impl._heap
        mix.play(most=draw.randrange(5))
        signum = signal.SIGKILL if round_.how == "kill" else signal.SIGSTOP
        assert stepper is not None
        pages = -(-heap.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        stepper.arm(heap.bases[place], pages, signum, draw.randint(1, faults_instruction.MOST))
    try:
        play(most=None if round_.how in ("kill", "stop") else 150)
    except DcpError as error:
        seen = Seen(type(error).__name__, error.ranks, str(error), time.monotonic())
        if round_.how == "kill" and place in round_.victims and not round_.instruction:
            time.sleep(LONG_S)  # another victim was the first; this one has no next round
    seen.num_calls = mix.num_calls
    if stepper is not None:
        stepper.disarm()
    if seen.error:
        seen.later = [_again(lambda: mix.play(most=1)), _again(workspace.check)]
    start = time.monotonic()
    workspace.close()
    seen.close_s = time.monotonic() - start if seen.error else 0.0
    mix = workspace = play = None
    gc.collect()  # an error and the frames that it came through refer to each other
    os.sched_setaffinity(0, processors)
    direct = round_.backend == "direct"
    seen.left_over = settled(before) if direct else ""
    seen.num_more_threads = more_threads(threads) if direct else 0
    if round_.how == "stop":  # gloo needs all of them: the stopped rank is awaited
        store.wait([f"resumed/{round_idx}"])
    return seen


def _again(call: Any) -> tuple[str, tuple[int, ...], float]:
    start = time.monotonic()
    try:
        call()
    except DcpError as error:
        return type(error).__name__, error.ranks, time.monotonic() - start
    return "", (), time.monotonic() - start


def _nemesis(store: Any, world: World) -> tuple[list[float], list[dict[int, Seen]]]:
    """When each round was struck, and what its survivors saw."""
    moments, views = [], []
    for round_idx in range(len(world.rounds)):
        moments.append(_strike(store, world, round_idx))
        members, views_of = world.members(round_idx), {}
        for place in world.survivors(round_idx):
            views_of[place] = pickle.loads(_word(store, f"seen/{round_idx}/{members[place]}"))
        views.append(views_of)
    return moments, views


def _word(store: Any, key: str) -> bytes:
    end = time.monotonic() + LONG_S
    while not store.check([key]):
        assert time.monotonic() < end, f"{key}: a rank did not come to it"
        time.sleep(0.005)
    return store.get(key)


def _strike(store: Any, world: World, round_idx: int) -> float:
    """Waits until all are in their mix, strikes at a random moment, and returns when that was."""
    round_, members = world.rounds[round_idx], world.members(round_idx)
    words = [_word(store, f"ready/{round_idx}/{rank}") for rank in members]
    pids = [int(words[place]) for place in round_.victims]
    draw = random.Random(world.seed * 1000 + round_idx)
    if round_.how == "slow":
        _slow_down(pids, draw)
    if round_.how not in ("kill", "stop"):
        return time.monotonic()
    if not round_.instruction:
        time.sleep(draw.random() * 0.03)
    first = None
    for pid in pids:
        if not round_.instruction:
            os.kill(pid, signal.SIGKILL if round_.how == "kill" else signal.SIGSTOP)
        _wait_until(lambda pid=pid: state_of(pid) in (("", "Z") if round_.how == "kill" else ("T",)), round_)
        first = first or time.monotonic()
        time.sleep(draw.choice([0, draw.random() * 1e-3]))  # another one a little later
    if round_.how == "stop":
        time.sleep(world.stop_s)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        store.set(f"resumed/{round_idx}", "yes")
    return first or 0.0


def _slow_down(pids: list[int], draw: random.Random) -> None:
    for _ in range(8):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.random() * 0.1)
            os.kill(pid, signal.SIGCONT)
        time.sleep(draw.random() * 0.02)


def _wait_until(holds: Any, what: Any) -> None:
    end = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.0005)
