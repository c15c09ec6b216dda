"""How much memory there is, asked before any is taken.

Shared memory over the limit is not a failed call but a killed process, so the answer must come first. Ranks
may live under different cgroups; each reports the limits that it lives under, and every rank judges all
reports alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcpkernels.errors import DcpError

SHARED_MAKER = 0  # the rank that allocates the memory that the group has once
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True)
class Limit:
    """One limit that a process lives under. Ranks that report the same `key` share its `available` bytes."""

    key: tuple[int, ...]
    label: str
    available: int


def limits(proc: str = "/proc") -> list[Limit]:
    """The limits of this process: free memory of the host, and each cgroup (v1, v2) from the own one upwards."""
    found = [Limit((), "host memory (MemAvailable)", _mem_available(Path(proc)))]
    for directory, files in _cgroups(Path(proc)):
        maximum, used = _number(directory / files[0]), _number(directory / files[1])
        if maximum is None or used is None or maximum >= _UNLIMITED:
            continue
        # Page cache counts as used and makes way under pressure; a rank that has just read a checkpoint sits
        # at its limit with nothing but cache. Memory of our kind (shmem) is on the anonymous lists, so it is
        # not in here.
        stat = dict(line.split(maxsplit=1) for line in _lines(directory / "memory.stat"))
        cache = sum(int(stat.get(files[2] + name, 0)) for name in ("inactive_file", "active_file"))
        status = os.stat(directory)
        free = max(0, maximum - max(0, used - cache))
        found.append(Limit((status.st_dev, status.st_ino), f"cgroup {directory} ({files[0]})", free))
    return found


def require(op: str, limits_by_rank: Sequence[Sequence[Limit]], nbytes: int, shared_nbytes: int = 0) -> None:
    """Raises DcpError, with the needed and the available bytes, unless `nbytes` for each rank, and `shared_nbytes`
    once, fit under every limit.

    `limits_by_rank` is every rank's `limits()`, gathered before any rank allocates; so all ranks judge alike.
    """
    page = os.sysconf("SC_PAGESIZE")
    size, shared_size = -(-nbytes // page) * page, -(-shared_nbytes // page) * page
    sharers: dict[tuple[int, ...], list[tuple[int, Limit]]] = {}
    for rank, own in enumerate(limits_by_rank):
        for limit in own:
            sharers.setdefault(limit.key, []).append((rank, limit))
    for users in sharers.values():
        ranks = [rank for rank, _ in users]
        # A page is charged to who allocates it, however many map it: shared ones to the cgroups of the rank that makes
        # them, and to the host, which that rank lives under as well.
        shared = shared_size if SHARED_MAKER in ranks else 0
        needed, available = len(users) * size + shared, min(limit.available for _, limit in users)
        if needed > available:
            also = f" and a shared one of {shared} bytes" if shared else ""
            raise DcpError(
                f"{op}: {users[0][1].label} must have room for {len(users)} regions of {size} bytes{also} "
                f"({needed} bytes needed, {available} bytes available)",
                ranks=ranks,
            )


def _mem_available(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNLIMITED  # unreadable: better to try than to refuse


def _cgroups(proc: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Directories of the memory controller, from the own cgroup up to the top of the mount, and file names there."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _lines(proc / "self" / "mountinfo"):
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        root, top = (_unescape(field) for field in fields.split()[3:5])
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # In a container the path may be the host's while the mount starts at the container's own cgroup.
        relative = paths[kind]
        if root != "/":
            inside = relative == root or relative.startswith(root + "/")
            relative = relative[len(root) :] if inside else "/"
        if ".." in relative.split("/"):
            relative = "/"
        names = {
            "cgroup2": ("memory.max", "memory.current", ""),
            "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        }[kind]
        directory = Path(top + relative.rstrip("/"))
        while True:
            yield directory, names
            if directory == Path(top) or directory == directory.parent:
                break
            directory = directory.parent


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None  # "max" is no number


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _unescape(field: str) -> str:
    # mountinfo writes blanks and backslashes as octal
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
