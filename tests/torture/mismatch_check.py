"""Runs programs that differ on one rank, and holds what comes of them against the model."""

from __future__ import annotations

import threading
import time

from dcpkernels import WorkspaceConfig
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.torture.mismatch_programs import Outcome, Program, outcome
from tests.torture.mismatch_ranks import Made, make_program

_TICK_S = 0.02


class _Stalls(threading.Thread):
    """What the machine withheld: how much longer than asked a thread slept that wanted nothing but to wake up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds, self._over = 0.0, threading.Event()

    def run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            self.seconds, before = self.seconds + now - before - _TICK_S, now

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.seconds


def check_programs(
    programs: list[Program],
    config: WorkspaceConfig,
    *,
    closes: bool = False,
    backend: str = "direct",
    mode: str = "thread",
) -> tuple[Outcome, DcpError | None]:
    """On one rank a thread or process. Returns what had to come of them, and the error that the ranks raised."""
    num_ranks = len(programs)
    direct = backend == "direct"
    expected = outcome(programs, closes=closes, sees_closed=mode == "process" or not direct, direct=direct)
    stalls = _Stalls()
    stalls.start()
    try:
        by_rank = run_ranks(make_program, num_ranks, config, backend, programs, closes, mode=mode)
    finally:
        in_time_s = config.timeout_s + 1 + 2 * stalls.stop()
    lines = [*map(str, programs), str(expected), *(f"rank {rank}: {made}" for rank, made in enumerate(by_rank))]
    found = [
        f"rank {rank}: {what}"
        for rank in range(num_ranks)
        for what in _wrong(rank, programs, expected, by_rank[rank], in_time_s)
    ]
    errors = [
        made.error
        for rank, made in enumerate(by_rank)
        if made.error is not None and not _is_refused(expected, rank, made)
    ]
    errors += [made.check for made in by_rank if made.check is not None]
    # One cause on all ranks, in one text (which has the number of the call in a rank's own stream, where no memory is
    # shared). Of several ranks that leave, each rank may miss another one first.
    said = {(type(error), error.ranks, str(error).partition(": ")[2] if direct else "") for error in errors}
    if any(fault.error == "DcpPeerLost" for fault in expected.faults):
        said = {(cls, (), "") for cls, *_ in said}
    if len(said) > 1:
        found.append(f"one cause on all ranks, not {said}")
    assert not found, "\n".join([*found, *lines])
    return expected, errors[0] if errors else None


def _is_refused(expected: Outcome, rank: int, made: Made) -> bool:
    return rank in expected.refused and type(made.error).__name__ == "DcpInvalidArgument"


def _wrong(rank: int, programs: list[Program], expected: Outcome, made: Made, in_time_s: float) -> list[str]:
    wrong = []
    for place, places in made.places.items():
        wanted = expected.matched[rank].get(place, places)  # none: a call that waits for nobody
        if any(theirs not in (None, of) for theirs, of in zip(places, wanted, strict=True)):  # None: it has no rows
            wrong.append(f"call {place} returned what was sent at {places}, not {wanted}")
    if len(made.places) > expected.ends[rank]:
        wrong.append(f"{len(made.places)} calls returned, not {expected.ends[rank]}")
    if made.error is None:
        if expected.ends[rank] < len(programs[rank]) or len(made.places) < len(programs[rank]):
            wrong.append("no error")
    elif made.seconds > in_time_s:
        wrong.append(f"raised after {made.seconds:.1f} s, not {in_time_s:.1f} s")
    elif not _is_refused(expected, rank, made):
        wrong += _wrong_error(made.error, programs, expected)
    return wrong


def _wrong_error(error: DcpError, programs: list[Program], expected: Outcome) -> list[str]:
    fault = next((fault for fault in expected.faults if fault.error == type(error).__name__), None)
    if fault is None or error.ranks not in fault.ranks:
        return [f"{error!r} of ranks {error.ranks} is none of {expected.faults}"]
    if type(error).__name__ != "DcpMismatch" or len(error.ranks) < 2:
        return []
    # Both calls, of those that the ranks have made or are in.
    wrong = []
    for rank in error.ranks:
        calls = programs[rank][: expected.ends[rank] + 1]
        if not any(call.is_named(rank, str(error)) for call in calls):
            wrong.append(f"the text names no call of rank {rank}: {error}")
    return wrong
