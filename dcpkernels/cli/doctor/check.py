"""What a check is, what it finds, and the facts that it looks at: nothing but these, so that tests can make up a machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dcpkernels.cli.doctor.privacy import Scrubber

OK, WARN, FAIL = "ok", "warn", "fail"


class Finding(NamedTuple):
    status: str
    text: str
    fix: str = ""


def ok(text: str) -> Finding:
    return Finding(OK, text)


def warn(text: str, fix: str) -> Finding:
    """Something works not, or not as it could; `fix` is what to do."""
    return Finding(WARN, text, fix)


def fail(text: str, fix: str) -> Finding:
    """Nothing can be done with the library before this is mended."""
    return Finding(FAIL, text, fix)


class NotMade(Exception):
    """A fact that a check needs could not be had, and why."""


class Section:
    """What the child found out about one subject (probe.py): by name a value, or the text of an error in its place."""

    def __init__(self, facts: Mapping[str, Mapping[str, Any]], lost: str = "") -> None:
        self._facts, self.lost = facts, lost

    def get(self, name: str) -> Any:
        """Raises NotMade where there is an error instead, or the child was lost."""
        if self.lost or "value" not in self._facts.get(name, {}):
            raise NotMade(self.error(name))
        return self._facts[name]["value"]

    def known(self, name: str, default: Any = None) -> Any:
        return default if self.lost else self._facts.get(name, {}).get("value", default)

    def error(self, name: str) -> str:
        """Why there is no value; "" when there is one."""
        if self.lost:
            return self.lost
        fact = self._facts.get(name, {"error": "it was not asked for"})
        return str(fact.get("error", ""))


def _try_shared_memory() -> None:
    from dcpkernels.cli.doctor.shared_memory import try_it

    try_it()


def _installed_vllm() -> tuple[str, bool] | None:
    from dcpkernels.cli.doctor.engines import installed_vllm

    return installed_vllm()


@dataclass
class Facts:
    """A machine as the checks see it. `root` stands before every path of /proc, /sys and /dev."""

    sections: Mapping[str, Section]
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    num_cpus: int = 1  # that ranks of this host can keep busy
    shm_bytes: Callable[[str], int] = lambda path: os.statvfs(path).f_frsize * os.statvfs(path).f_blocks
    try_shared_memory: Callable[[], None] = _try_shared_memory
    installed_vllm: Callable[[], tuple[str, bool] | None] = _installed_vllm
    scrubber: Scrubber = field(default_factory=Scrubber)

    @cached_property
    def shared_memory_error(self) -> Exception | None:
        """Why ranks on CPUs could share no memory; None where they can. Tried once."""
        try:
            self.try_shared_memory()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def section(self, name: str) -> Section:
        return self.sections.get(name, Section({}, lost="it was not asked"))

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """The text of a file; None when it is not there or may not be read."""
        try:
            return self.path(path).read_text(errors="replace")
        except OSError:
            return None

    def exists(self, pattern: str) -> bool:
        """Whether a path, with wildcards, is there."""
        return any(True for _ in self.root.glob(pattern.lstrip("/")))

    def link(self, path: str) -> str:
        """Where a symbolic link points to; "" when there is none."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return ""


class Check(NamedTuple):
    """`make` returns None where there is nothing to say: of a device that is not there."""

    name: str
    make: Callable[[Facts], Finding | None]


class Result(NamedTuple):
    status: str
    name: str
    text: str
    fix: str = ""


def results(checks: Sequence[Check], facts: Facts) -> list[Result]:
    """One for each check that has something to say. What a check raises is a warning; the rest go on."""
    found = (result_of(check.name, lambda check=check: check.make(facts), facts.scrubber) for check in checks)
    return [result for result in found if result is not None]


def result_of(name: str, make: Callable[[], Finding | None], scrubber: Scrubber) -> Result | None:
    """What `make` finds as a line without anything private in it."""
    try:
        finding = make()
    except Exception as error:  # noqa: BLE001  a doctor that falls ill helps nobody
        why = str(error) if isinstance(error, NotMade) else f"{type(error).__name__}: {error}"
        finding = warn(f"check {name} could not be made ({why})", "see docs/doctor.md; report it with these lines")
    if finding is None:
        return None
    return Result(finding.status, name, scrubber.clean(finding.text), scrubber.clean(finding.fix))


def split_advice(text: str) -> tuple[str, str]:
    """An error of ours, `what must hold (what was given): what to do`, as what is and what to do."""
    head, separator, advice = text.partition("): ")
    return (f"{head})", advice) if separator else (text, "")
