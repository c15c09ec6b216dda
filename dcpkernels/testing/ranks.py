"""Runs one function on several ranks, as threads or as processes, and comes back in any case.

Whatever a rank does (raise, hang, exit, be killed by a signal), the caller gets control again at the deadline
at the latest, with one text that has the fate of every rank in it, and no rank's process is left over.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.testing._outcome import Clock, Outcome, describe
from dcpkernels.testing._processes import run_processes
from dcpkernels.testing._worker import one_line
from dcpkernels.testing.thread_group import ThreadGroup


class RankFailure(RuntimeError):
    """At least one rank did not do what was expected. The text has every rank's fate, traceback or stack.

    `fates` has the first line of it by rank: "returned", "raised ...", "killed by signal 9 (SIGKILL)", ...
    """

    def __init__(self, text: str, fates: dict[int, str]) -> None:
        super().__init__(text, fates)
        self.fates = fates

    def __str__(self) -> str:
        return self.args[0]


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    mode: str = "thread",
    timeout_s: float = 60.0,
    expect_exit: Mapping[int, int] | None = None,
    start: str = "fork",
) -> list[Any]:
    """Calls `fn(group, *args)` on every rank and returns the results in rank order.

    mode "thread": `group` is a ThreadGroup; `fn`, arguments and results may be anything and are not copied. A
        thread cannot be stopped: one that hangs is named with its stack and left behind as a daemon.
    mode "process": `group` is torch.distributed's WORLD over gloo on the loopback device, with one torch
        thread a rank. Environment, working directory, sys.path, stdout and stderr are the caller's. `fn` has
        to be defined at the top level of a module or script; it, the arguments and the results travel as
        plain pickles, tensors by value. A rank ends by `_exit`, as multiprocessing's do: without atexit
        handlers.

    Args:
        timeout_s: from the start of the ranks to the end of the last one. Processes that have not ended by
            then are killed. Getting a server or an interpreter ready is not counted.
        expect_exit: rank -> exit code (negative for a signal) with which that process has to end instead of
            returning, for example {3: -9}. Its result is None. Process mode only.
        start: "fork": ranks are forks of a server that has torch imported; it starts with the first call
            (seconds) and serves all later ones. "spawn": a new interpreter for every rank.

    Raises:
        RankFailure: a rank raised, died, ended otherwise than expected, or was still running at the deadline.
            After the first failure the others get a few seconds to end by themselves.
        DcpInvalidArgument: an argument is wrong.
    """
    expect_exit = dict(expect_exit or {})
    _require(num_ranks >= 1, "num_ranks must be at least 1", num_ranks)
    _require(mode in ("thread", "process"), 'mode must be "thread" or "process"', mode)
    _require(start in ("fork", "spawn"), 'start must be "fork" or "spawn"', start)
    _require(timeout_s > 0, "timeout_s must be above 0", timeout_s)
    _require(mode == "process" or not expect_exit, "expect_exit needs mode='process'", expect_exit)
    unknown = [rank for rank in expect_exit if not 0 <= rank < num_ranks]
    _require(not unknown, f"expect_exit must name ranks below num_ranks={num_ranks}", unknown)
    if mode == "thread":
        ranks = _run_threads(fn, num_ranks, args, timeout_s)
    else:
        ranks = run_processes(fn, num_ranks, args, timeout_s, expect_exit, start)
    if any(rank.failed for rank in ranks):
        raise RankFailure(describe(ranks, timeout_s), {i: rank.fate for i, rank in enumerate(ranks)})
    return [rank.result for rank in ranks]


def _run_threads(fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout_s: float) -> list[Outcome]:
    groups = ThreadGroup.create(num_ranks)
    ranks = [Outcome() for _ in groups]
    clock = Clock(timeout_s)
    changed = threading.Condition()

    def body(group: ThreadGroup, rank: Outcome) -> None:
        try:
            result = fn(group, *args)
            error, text = None, ""
        except BaseException as caught:  # noqa: BLE001  also SystemExit: it would end the thread in silence
            result, error, text = None, caught, traceback.format_exc()
        group.leave("has returned" if error is None else f"raised {one_line(error)}")
        with changed:
            if rank.ended:  # given up at the deadline
                return
            if error is None:
                rank.end("returned", result=result)
            else:
                rank.end(f"raised {one_line(error)}", failed=True, detail=text)
                clock.first_failure()
            changed.notify()

    threads = [
        threading.Thread(target=body, args=(group, rank), name=f"rank{group.rank}", daemon=True)
        for group, rank in zip(groups, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()
    with changed:
        while not all(rank.ended for rank in ranks) and clock.remaining_s() > 0:
            changed.wait(clock.remaining_s())
        frames = sys._current_frames()
        for thread, rank in zip(threads, ranks, strict=True):
            if not rank.ended:
                frame = frames.get(thread.ident or 0)
                rank.end(
                    clock.why_stopped(),
                    failed=True,
                    detail="".join(traceback.format_stack(frame)) if frame else "",
                )
    for group, rank in zip(groups, ranks, strict=True):
        if rank.fate.startswith("still running"):
            group.leave("was given up at the deadline")
    return ranks


def _require(holds: bool, what: str, given: object) -> None:
    if not holds:
        raise DcpInvalidArgument(f"run_ranks: {what} (got {given!r})")
