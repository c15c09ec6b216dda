"""Machines that are made up, for the checks of `dcpkernels doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section
from dcpkernels.cli.doctor.privacy import Scrubber
from dcpkernels.cli.doctor.run import ALL_CHECKS

# What the child finds on a machine for CPUs with all targets built.
CPU_MODULE = {"build_id": "b", "protocol": 1, "built": ["v4", "v3", "baseline"], "runnable": ["v3", "baseline"]}
BARE: dict[str, dict[str, Any]] = {
    "cpu": {"built": True, "module": CPU_MODULE},
    "torch": {"version": "2.13.0", "build": {"cuda": None, "hip": None}},
    "cuda": {"built": True, "module": {"build_id": "c", "protocol": 1, "built": ["cuda"], "runnable": ["cuda"]}},
    "hip": {"built": True, "module": {"build_id": "h", "protocol": 1, "built": ["hip"], "runnable": ["hip"]}},
    "torch device": {"count": 0},
}

# What a bare machine's /proc says; a test names what is different.
FILES = {
    "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n",
    "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n",
    "/proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t0\n",
    "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n"
    "Max open files            20000                20000                files\n",
}
NODE = {"/dev/kfd": "", "/dev/nvidia0": ""}  # of devices, of either vendor


class Lost(str):
    """In place of a fact: the text of the error that there was instead."""


def section(**facts: Any) -> Section:
    return Section({name: {"error" if isinstance(fact, Lost) else "value": fact} for name, fact in facts.items()})


def machine(
    root: Path,
    files: Mapping[str, str | None] | None = None,
    sections: Mapping[str, Mapping[str, Any] | Section] | None = None,
    *,
    links: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    **more: Any,
) -> Facts:
    """`files` and `sections` are what is different from a bare machine: a file that is None is not there, a section's facts
    are added to those of the bare one."""
    for name, content in (FILES | dict(files or {})).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_text(content)
    for name, target in (links or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    found = {name: section(**facts) for name, facts in BARE.items()}
    for name, facts in (sections or {}).items():
        found[name] = facts if isinstance(facts, Section) else section(**(BARE.get(name, {}) | dict(facts)))
    options = {
        "num_cpus": 4,
        "shm_bytes": lambda path: 8 << 30,
        "try_shared_memory": lambda: None,
        "scrubber": Scrubber(),
    } | more
    return Facts(found, root=root, environ=dict(environ or {}), **options)


def check(name: str) -> Check:
    (found,) = [check for check in ALL_CHECKS if check.name == name]
    return found


def finding(name: str, facts: Facts) -> Finding | None:
    return check(name).make(facts)
