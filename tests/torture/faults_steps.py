"""One rank fails at one step of `Workspace(...)` or of `close()`; every rank says how it went on.

A step is any call of one of the product's own functions there, or that they make of the operating system (memfd_create,
sendmsg, ...): a profile hook counts them, and strikes at a given one, before it runs. Memory is mapped by calls that the
hook does not see (ctypes): those are in test_faults_system.py.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import dcpkernels
from dcpkernels import Workspace
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.torture.faults_mix import Mix, config_for
from tests.torture.faults_resources import ended_processes, more_threads, num_threads, resources, settled, state_of

_PACKAGE = os.path.dirname(dcpkernels.__file__) + os.sep
_FILES = ("workspace.py", "_direct.py", "_cpu_device.py", "_gathers.py", "_channels.py", "heap" + os.sep)
# What gives something back: where such a call does not take place, it is of course still there.
_GIVES_BACK = {
    "close",
    "release",
    "unregister",
    "clear",
    "pop",
    "abort",
    "close_sockets",
    "_close_sockets",
    "close_file",
}
_SYSTEM = {"posix", "fcntl", "_socket", "select", "_pickle", "_ctypes"}
ABOVE_S = 1.0  # over the deadline


class Injected(Exception):
    """What a struck step raises."""


class Steps:
    """Counts the steps in a block, in this thread, and strikes at number `at`."""

    def __init__(self, strike: Callable[[str], None] | None = None, at: int = -1) -> None:
        self.num_steps, self.struck = 0, ""
        self._strike, self._at = strike, at

    def __enter__(self) -> None:
        sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_call") or not code.co_filename.startswith(_PACKAGE):
            return
        if not code.co_filename[len(_PACKAGE) :].startswith(_FILES):
            return
        called = "" if event == "call" else arg.__name__
        if {called, code.co_name} & _GIVES_BACK or code.co_name.startswith("<"):
            return
        if called and not {arg.__module__, type(arg.__self__).__module__} & _SYSTEM:  # len, append, ...
            return
        if self.num_steps == self._at and self._strike is not None:
            file = os.path.basename(code.co_filename)
            self.struck = f"{file}:{frame.f_lineno} {code.co_name}" + (f": {called}" if called else "")
            strike, self._strike = self._strike, None
            strike(self.struck)
        self.num_steps += 1


@dataclass(frozen=True)
class Plan:
    """Rounds of one kind; in round i the step at `fractions[i]` of all steps is struck."""

    num_ranks: int
    seed: int
    how: str  # "dies", "stops", "raises", "Ctrl-C"
    where: str  # "create", "close"
    fractions: tuple[float, ...]
    deadline_s: float = 6.0
    variant: str = "zero copy"

    def members(self, round_idx: int) -> list[int]:
        left = list(range(self.num_ranks))
        for i in range(round_idx if self.how == "dies" else 0):
            del left[self.victim(i)]
        return left

    def victim(self, round_idx: int) -> int:
        """The place of the rank that fails, among those that are left."""
        left = self.num_ranks - (round_idx if self.how == "dies" else 0)
        return random.Random(self.seed * 1000 + round_idx).randrange(left)


@dataclass
class Step:
    """How something went on one rank."""

    error: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""
    seconds: float = 0.0


@dataclass
class Went:
    """How a round went on one rank."""

    create: Step = field(default_factory=Step)
    call: Step | None = None  # only where it was made
    close: Step | None = None
    struck: str = ""
    left_over: str = ""
    num_more_threads: int = 0


def spread(num: int, seed: int) -> tuple[float, ...]:
    """Fractions of all steps: one in each of `num` equal parts."""
    draw = random.Random(seed)
    return tuple((i + draw.random()) / num for i in range(num))


def run(plan: Plan, timeout_s: float = 300.0) -> list[dict[int, Went]]:
    dead = {}
    if plan.how == "dies":
        dead = {plan.members(i)[plan.victim(i)]: -9 for i in range(len(plan.fractions))}
    try:
        rounds = run_ranks(_rank, plan.num_ranks + 1, plan, mode="process", timeout_s=timeout_s, expect_exit=dead)[-1]
        for round_idx, went in enumerate(rounds):
            _judge(plan, round_idx, went)
    except Exception as error:
        error.add_note(f"to run it again: {plan}")
        raise
    assert ended_processes() == []
    return rounds


def _judge(plan: Plan, round_idx: int, went: dict[int, Went]) -> None:
    victim = plan.victim(round_idx)
    others = {place: one for place, one in went.items() if place != victim}
    shown = f"round {round_idx}, place {victim} {plan.how} in {plan.where}: {went}"
    for one in went.values():
        assert one.left_over == "" and one.num_more_threads <= 0, shown
    for one in others.values():
        # check arguments, and once more all that follows.
        assert one.create.seconds < 2 * plan.deadline_s + ABOVE_S, shown
        assert one.call is None or one.call.seconds < plan.deadline_s + ABOVE_S, shown
        assert one.close is None or (one.close.error == "" and one.close.seconds < plan.deadline_s + ABOVE_S), shown
        assert one.create.error in ("", "DcpError", "DcpTimeout", "DcpPeerLost"), shown
    if plan.where == "close":
        assert all(one.create.error == "" for one in went.values()), shown
        assert plan.how == "stops" or all(one.close and one.close.seconds < 2 for one in others.values()), shown
        return
    made = {place for place, one in others.items() if one.create.error == ""}
    if made and len(made) < len(others):
        # Struck between two messages of the last verdict. Nothing can make all ranks sure that all are sure; who has a
        # workspace hears at its first call.
        failed = [one for place, one in others.items() if place not in made]
        assert all("workspace: start" in one.create.text and one.create.ranks == (victim,) for one in failed), shown
    for place in made:  # or nobody needed anything of the victim any more
        call = others[place].call
        assert call is not None, shown
        if call.error:
            assert call.error in ("DcpPeerLost", "DcpTimeout") and victim in call.ranks, shown
            assert len(made) < len(others) or call.ranks == (victim,), shown
        else:
            assert victim in went and went[victim].create.error == "", shown
    if made:
        return
    if all(_has_sockets(one.create.text) for one in others.values()):
        # Over sockets of our own, where all hear of a death or an error at once, and of the same one.
        assert len({(one.create.error, one.create.ranks) for one in others.values()}) == 1, shown
        one = next(iter(others.values()))
        assert one.create.ranks == (victim,), shown
        assert one.create.error in {"dies": ("DcpPeerLost",), "stops": ("DcpTimeout",)}.get(
            plan.how, ("DcpError", "DcpPeerLost")
        ), shown
        assert plan.how == "stops" or all(one.create.seconds < 3 for one in others.values()), shown


def _has_sockets(text: str) -> bool:
    return any(f"workspace: {step}" in text for step in ("create", "map", "start"))


# -- in the processes


def _rank(group: Any, plan: Plan) -> Any:
    store, rank = dist.distributed_c10d._get_default_store(), group.rank()
    if rank == plan.num_ranks:
        return _watch(store, plan)
    store.set(f"pid/{rank}", str(os.getpid()))
    num_steps = 0
    for round_idx, fraction in enumerate(plan.fractions):
        members = plan.members(round_idx)
        group = dist.new_group(members, use_local_synchronization=True)
        if plan.how == "dies" or num_steps == 0:
            num_steps = _round(plan, group, -1)[1]  # counts: there are fewer with fewer ranks
        at = int(fraction * num_steps) if members[plan.victim(round_idx)] == rank else -1
        went, _ = _round(plan, group, at)
        store.set(f"went/{round_idx}/{rank}", pickle.dumps(went))
    return num_steps


def _strike(how: str) -> Callable[[str], None]:
    def strike(step: str) -> None:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "Ctrl-C":
            raise KeyboardInterrupt
        else:
            raise Injected(f"at {step}")

    return strike


def _round(plan: Plan, group: Any, at: int) -> tuple[Went, int]:
    went, strike = Went(), _strike(plan.how)
    before, threads = resources(), num_threads()
    create_s = plan.deadline_s if plan.where == "create" else 20.0
    times = {"timeout_s": plan.deadline_s, "first_call_timeout_s": create_s}
    config = config_for(dist.get_world_size(group), plan.variant, num_channels=2, **times)
    creating, closing = (Steps(strike, at if plan.where == where else -1) for where in ("create", "close"))
    made: list[Workspace] = []
    with creating:
        went.create = _step(lambda: made.append(Workspace(group, config=config, backend="direct")))
    if made:
        if plan.where == "create":
            went.call = _step(lambda: Mix(made[0], plan.seed).play(most=3))
        with closing:
            went.close = _step(made[0].close)
    went.struck = creating.struck or closing.struck
    if at >= 0 and not went.struck and plan.how == "dies":  # looks at sockets that were empty made it more steps before
        strike("the end")
    if went.close is not None and went.close.error:
        _step(made[0].close)  # a close that was broken off can be made again
    made.clear()
    gc.collect()
    went.left_over, went.num_more_threads = settled(before), more_threads(threads)
    return went, (creating if plan.where == "create" else closing).num_steps


def _step(call: Callable[[], Any]) -> Step:
    start = time.monotonic()
    try:
        call()
    except (DcpError, Injected, KeyboardInterrupt) as error:
        ranks = error.ranks if isinstance(error, DcpError) else ()
        return Step(type(error).__name__, ranks, str(error), time.monotonic() - start)
    return Step(seconds=time.monotonic() - start)


def _watch(store: Any, plan: Plan) -> list[dict[int, Went]]:
    """Lets stopped ranks go on when the others have given them up, and collects what all say."""
    rounds: list[dict[int, Went]] = []
    for round_idx in range(len(plan.fractions)):
        members, went = plan.members(round_idx), {}
        awaited = {place: rank for place, rank in enumerate(members)}
        if plan.how == "dies":
            del awaited[plan.victim(round_idx)]
        stopped_at: dict[int, float] = {}
        while awaited:
            for place, rank in list(awaited.items()):
                if store.check([key := f"went/{round_idx}/{rank}"]):
                    went[place] = pickle.loads(store.get(key))
                    del awaited[place]
                elif store.check([f"pid/{rank}"]) and state_of(pid := int(store.get(f"pid/{rank}"))) == "T":
                    since = stopped_at.setdefault(place, time.monotonic())
                    if time.monotonic() - since > 2 * plan.deadline_s + 0.5:
                        os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
        rounds.append(dict(sorted(went.items())))
    return rounds
