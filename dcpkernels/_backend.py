"""Finds the compiled target, checks that it belongs to this Python code, and knows how patient a wait may be here."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from dcpkernels import region_layout
from dcpkernels.errors import DcpError, DcpUnsupported


@functools.cache
def load(target: str) -> ModuleType:
    """The module `dcpkernels._C_<target>`. Raises DcpUnsupported when this build has no such target."""
    try:
        module = importlib.import_module(f"dcpkernels._C_{target}")
    except ImportError as error:
        raise DcpUnsupported(
            f"target {target}: dcpkernels must have been built with it (import failed: {error}; build: `make build`)"
        ) from error
    for name in ("FLAG_BYTES", "FAULT_BYTES", "STREAM_BYTES", "CHANNEL_BYTES", "LINK_SLOT_BYTES"):
        compiled, expected = getattr(module, name), getattr(region_layout, name)
        if compiled != expected:
            raise DcpError(
                f"target {target}: {name} must be {expected} (the module was built with {compiled}: rebuild)"
            )
    return module


def affinity() -> frozenset[int]:
    """The CPUs that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def num_usable_cpus(affinities: Iterable[frozenset[int]] = ()) -> int:
    """CPUs that the ranks of this host can keep busy: all that any of them may run on (`affinities`; without any, those
    of this process), cut by the CPU quota of this process's cgroup (v2, then v1)."""
    cpus = len(frozenset().union(*affinities) or affinity())
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(quota_file).read_text().split()
            words += Path(period_file).read_text().split() if period_file else []
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:
            return max(1, min(cpus, math.ceil(quota / period)))
    return cpus


def wait_budget(num_ranks: int, num_cpus: int) -> tuple[int, int]:
    """(polls before the first yield, yields before the first sleep) of a wait of `num_ranks` ranks on `num_cpus` CPUs.

    With a CPU for every rank, the peer is running and a signal is microseconds away: spin for about 15 us. With fewer,
    the peer may need this very CPU: give it away at once. Yields are cheap while
    only ranks want the CPU; but newer kernels set a task back for each one, so they are few. (8 rank processes on 2
    cores, T = 1: 85 us with 5 yields, 106 us with 100, 172 us with none.)
    """
    return (300, 300) if num_ranks <= num_cpus else (0, 10)
