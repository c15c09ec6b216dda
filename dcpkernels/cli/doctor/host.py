"""What this machine and the limits of this process leave to ranks: memory, shared memory, descriptors, IOMMU."""

from __future__ import annotations

import re
from pathlib import Path

from dcpkernels.cli.doctor.check import Check, Facts, Finding, fail, ok, warn
from dcpkernels.cli.doctor.probe import describe
from dcpkernels.cli.doctor.targets import any_device
from dcpkernels.heap import memory

_LITTLE_MEMORY = 256 << 20  # a region of 8 ranks with room for a chunk of keys; see Workspace.size
_FEW_FILES = 256  # 64 ranks hold 63 sockets for each workspace
_LITTLE_SHM = 1 << 30
_LITTLE_LOCKED = 64 << 20
_UNLIMITED = 1 << 60


def check_memory(facts: Facts) -> Finding:
    limits = [limit for limit in memory.limits(str(facts.path("/proc"))) if limit.available < _UNLIMITED]
    if not limits:
        return ok("no limit is known")
    least = min(limits, key=lambda limit: limit.available)
    text = f"{_size(least.available)} available, by {_without_path(least.label)}"
    if least.available < _LITTLE_MEMORY:
        return warn(text, "free memory, or raise the limit of the container; Workspace.size says what a region takes")
    return ok(text)


def _without_path(label: str) -> str:
    """A cgroup's path may hold the names of pods and users."""
    return re.sub(r"^cgroup .* \((.*)\)$", r"the cgroup's \1", label)


def check_shared_memory(facts: Facts) -> Finding:
    if (error := facts.shared_memory_error) is not None:
        return fail(
            f"1 MiB must go from one mapping to another ({describe(error)})",
            "allow memfd_create, AF_UNIX sockets and passing descriptors in the container's seccomp profile; mount /proc",
        )
    return ok("1 MiB made, sealed, sent over a socket and mapped")


def check_shm(facts: Facts) -> Finding:
    try:
        size = facts.shm_bytes(str(facts.path("/dev/shm")))
    except OSError:
        return ok("there is no /dev/shm; dcpkernels does not use it")
    text = f"{_size(size)}; dcpkernels does not use it, but NCCL and PyTorch's data loaders do"
    if size < _LITTLE_SHM:
        return warn(text, "start the container with --shm-size=1g or more, or --ipc=host")
    return ok(text)


def check_open_files(facts: Facts) -> Finding:
    limit = _limit(facts, "Max open files")
    text = f"at most {_number(limit)}; a workspace of W ranks holds W - 1 sockets in each process"
    if limit < _FEW_FILES:
        return warn(text, "raise it: ulimit -n 4096, or --ulimit nofile=4096")
    return ok(text)


def check_locked_memory(facts: Facts) -> Finding:
    limit = _limit(facts, "Max locked memory")
    text = f"at most {_size(limit) if limit < _UNLIMITED else 'unlimited'}; dcpkernels locks none on CPUs"
    if limit < _LITTLE_LOCKED and any_device(facts):
        text = f"at most {_size(limit)}; GPU drivers may lock memory for a process, and RDMA does"
        return warn(text, "raise it: ulimit -l unlimited, or --ulimit memlock=-1")
    return ok(text)


def check_iommu(facts: Facts) -> Finding:
    types = [(path / "type") for path in sorted(facts.root.glob("sys/kernel/iommu_groups/*"))]
    if not types:
        return ok("off, or not to be seen from here")
    kinds = {_first_line(path) for path in types}
    if kinds <= {"identity"}:
        return ok("on, passed through")
    if not kinds & {"DMA", "DMA-FQ"}:
        return ok("on; the kernel does not say in which mode")
    if not any_device(facts):
        return ok("on, translating; that matters to GPUs only")
    return warn(
        "on, translating: GPUs that reach each other by PCIe may be slow, or get wrong bytes",
        "boot with iommu=pt (or switch it and ACS off in the BIOS); each workspace checks its links when it is made",
    )


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _limit(facts: Facts, name: str) -> int:
    """The soft limit; a very large number when there is none."""
    found = re.search(rf"^{name}\s+(\S+)", facts.read("/proc/self/limits") or "", re.MULTILINE)
    return int(found.group(1)) if found and found.group(1).isdigit() else _UNLIMITED


def _number(limit: int) -> str:
    return str(limit) if limit < _UNLIMITED else "unlimited"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes >> 10} KiB"


CHECKS = [
    Check("shared memory", check_shared_memory),
    Check("memory", check_memory),
    Check("open files", check_open_files),
    Check("locked memory", check_locked_memory),
    Check("shm", check_shm),
    Check("iommu", check_iommu),
]
