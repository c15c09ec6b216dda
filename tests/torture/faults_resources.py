"""What a process holds of the operating system: counted before and after, to see what a fault leaves behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def resources() -> dict[str, int]:
    """Open descriptors by kind, mappings of regions, threads. Without TCP sockets, which gloo opens and closes when it
    likes; every other descriptor counts, whoever opened it."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder, or another thread's
            target = os.readlink(f"/proc/self/fd/{fd}")
            kind, _, number = target.partition(":[")
            if kind == "socket":
                kind = "Unix socket" if number.rstrip("]") in unix else "TCP socket"
            held["/proc" if kind.startswith("/proc/") else kind] += 1
    del held["TCP socket"], held["/proc"]
    held["mapping of a region"] = Path("/proc/self/maps").read_text().count("memfd:dcpkernels-heap")
    return dict(held)


def settled(before: dict[str, int], within_s: float = 2.0, measure: Callable[[], dict[str, int]] = resources) -> str:
    """What is there that was not there `before`, in words; "" when that is nothing. Others (gloo's threads) may need a
    moment to close what is theirs."""
    end = time.monotonic() + within_s
    while True:
        now = measure()
        more = {kind: n - before.get(kind, 0) for kind, n in now.items() if n > before.get(kind, 0)}
        if not more or time.monotonic() > end:
            return ", ".join(f"{n} more of {kind}" for kind, n in more.items())
        time.sleep(0.02)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def more_threads(before: int, within_s: float = 2.0) -> int:
    """How many there are more than `before`. The system still lists a thread for a moment that has been joined."""
    end = time.monotonic() + within_s
    while (more := num_threads() - before) > 0 and time.monotonic() < end:
        time.sleep(0.02)
    return more


def ended_processes() -> list[str]:
    """Ended processes among our descendants that nobody has waited for (zombies)."""
    parents, states = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            parents[int(stat.parent.name)], states[int(stat.parent.name)] = int(parent), state

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [f"process {pid}" for pid, state in states.items() if state == "Z" and is_ours(pid)]


def state_of(pid: int) -> str:
    """One letter: R, S, T (stopped), Z (a zombie), or "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
