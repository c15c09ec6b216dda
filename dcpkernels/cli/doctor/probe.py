"""Asks the compiled modules, torch and drivers, in a child process with a deadline.

A driver may hang in a call, in the kernel even, and an import may kill the process; nothing of that may happen to the doctor,
and nothing may be initialised in its process. The child goes through sections one by one and writes what it finds, a line
each. Whatever stops it stops one section; another child does the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from dcpkernels.cli.doctor.check import Section

_DEADLINE_S = 60.0  # of one section: torch from a cold disk, eight GPUs that nobody has used since the boot
_KILLED_S = 2.0
_MAX_TEXT = 1000

SECTIONS = "dcpkernels.cli.doctor.targets:SECTIONS"


def gather(**questions: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """Every answer, or the text of the error in its place."""
    facts: dict[str, dict[str, Any]] = {}
    for name, question in questions.items():
        try:
            facts[name] = {"value": question()}
        except Exception as error:  # noqa: BLE001  whatever a broken installation raises
            facts[name] = {"error": describe(error)}
    return facts


def describe(error: BaseException) -> str:
    """The text of an error of ours, which says what to do; the type as well of any other."""
    ours = type(error).__module__.startswith("dcpkernels.")
    return (str(error) if ours else f"{type(error).__name__}: {error}")[:_MAX_TEXT]


# -- the child


def serve(fd: int, sections: str, names: Sequence[str]) -> None:
    """Writes to `fd`, for each name: the name; and when they are known the facts, and the error that there is in their place.
    `sections`: `module:attribute` of a dict of functions."""
    module, _, attribute = sections.partition(":")
    table = getattr(importlib.import_module(module), attribute)
    with open(fd, "w") as file:
        for name in names:
            print(json.dumps([name]), file=file, flush=True)
            facts, lost = {}, ""
            try:
                facts = table[name]()
            except Exception as error:  # noqa: BLE001
                lost = describe(error)
            print(json.dumps([name, facts, lost]), file=file, flush=True)


# -- the parent


def ask(names: Sequence[str], sections: str = SECTIONS, deadline_s: float = _DEADLINE_S) -> dict[str, Section]:
    """The facts of each section, or why there are none."""
    found: dict[str, Section] = {}
    while remaining := [name for name in names if name not in found]:
        try:
            with _Child(sections, remaining) as child:
                known, why_stopped = child.listen(deadline_s)
        except OSError as error:  # no descriptor or no process left for it
            known, why_stopped = {}, f"no process could be started to ask ({describe(error)})"
        found |= known
        # Where it stopped; what comes behind is for another child.
        for name in [name for name in remaining if name not in found][:1]:
            found[name] = Section({}, lost=why_stopped)
    return found


def _absolute(paths: Sequence[str]) -> list[str]:
    """Without those that begin in a working directory that is no more."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.path.abspath(path))
    return found


class _Child:
    def __init__(self, sections: str, names: Sequence[str]) -> None:
        self._out, out = os.pipe()
        command = f"from dcpkernels.cli.doctor.probe import serve; serve({out}, {sections!r}, {list(names)!r})"
        # The very dcpkernels that the parent has, wherever that came from.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(_absolute(sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[out],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )
        except BaseException:
            os.close(self._out)
            raise
        finally:
            os.close(out)

    def __enter__(self) -> _Child:  # noqa: PYI034  typing has Self from Python 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        self._kill()

    def listen(self, deadline_s: float) -> tuple[dict[str, Section], str]:
        """The sections that came, and why no more did."""
        known: dict[str, Section] = {}
        buffer, until = b"", time.monotonic() + deadline_s
        while select.select([self._out], [], [], max(0.0, until - time.monotonic()))[0]:
            data = os.read(self._out, 1 << 16)
            if not data:
                return known, self._end()
            *lines, buffer = (buffer + data).split(b"\n")
            for name, *more in map(json.loads, lines):
                known |= {name: Section(*more)} if more else {}
                until = time.monotonic() + deadline_s
        return known, f"no answer within {deadline_s:g} s"

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_KILLED_S)
            if code >= 0:
                return f"the process that asked ended by exit code {code}"
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "?"
            return f"the process that asked was killed by signal {-code} ({name})"
        return "the process that asked does not end"

    def _kill(self) -> None:
        """A process that is stuck in the kernel stays; nobody waits for it for long."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
