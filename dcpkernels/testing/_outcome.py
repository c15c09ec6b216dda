"""What became of each rank of a run, and the clock that the run is under."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_GRACE_S = 3.0  # how long the other ranks may go on after the first has failed


@dataclass
class Outcome:
    """One rank's fate in a few words, and its traceback or stack where there is one."""

    ended: bool = False
    failed: bool = False
    fate: str = ""
    detail: str = ""
    result: Any = None

    def end(self, fate: str, *, result: Any = None, failed: bool = False, detail: str = "") -> None:
        self.ended, self.failed, self.fate, self.detail, self.result = True, failed, fate, detail, result


def describe(ranks: Sequence[Outcome], timeout_s: float) -> str:
    """The text of a failed run. Failures come first: people and log limits begin at the top."""
    failed = [i for i, rank in enumerate(ranks) if rank.failed]
    lines = [f"run_ranks: every rank must end well within {timeout_s:g} s (failed: {', '.join(map(str, failed))})"]
    for i in sorted(range(len(ranks)), key=lambda i: not ranks[i].failed):
        lines.append(f"--- rank {i}: {ranks[i].fate}")
        if ranks[i].detail:
            lines.append(ranks[i].detail.rstrip())
    return "\n".join(lines)


class Clock:
    """The deadline of a run. It moves closer when the first rank fails: the others then wait for nothing."""

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._at = self._start + timeout_s
        self._failed = False

    def remaining_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def first_failure(self) -> None:
        """To be called at every failure; the first one counts."""
        if not self._failed:
            self._failed, self._at = True, min(self._at, time.monotonic() + _GRACE_S)

    def why_stopped(self) -> str:
        passed = time.monotonic() - self._start
        return f"still running after {passed:.1f} s" + (", another rank having failed" if self._failed else "")
