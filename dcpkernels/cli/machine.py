"""Where the numbers come from: what has to stand beside every time that is shown or written."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import dcpkernels
from dcpkernels import _backend
from dcpkernels.errors import DcpUnsupported
from dcpkernels.heap import memory
from dcpkernels.testing import ThreadGroup


def chosen_isa(isa: str | None = None) -> str:
    """The CPU kernel variant that a workspace gets on this machine when it asks for `isa` (None = the best).

    Raises DcpUnsupported, as a workspace does, when the build or the processor lacks it.
    """
    config = dcpkernels.WorkspaceConfig(num_heads=1, head_dim=1, max_num_tokens=1, cpu_isa=isa)
    with dcpkernels.Workspace(ThreadGroup.create(1)[0], config=config) as workspace:
        return workspace.isa


def describe() -> dict[str, Any]:
    """Host and versions, the same for all rows of a run."""
    return {
        "cpu": _cpu_model(),
        "cpus": _backend.num_usable_cpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dcpkernels": dcpkernels.__version__,
    }


def one_line(machine: dict[str, Any], isa: str) -> str:
    cpus = f"{machine['cpus']} CPU{'s' if machine['cpus'] != 1 else ''}"
    target = f"cpu ({isa})" if "gpu" not in machine else f"{isa} ({machine['gpu']}, {machine['gpus']} there)"
    peers = f"; {machine['mpi']}" if "mpi" in machine else ""
    peers += f"; nccl {machine['nccl']}" if "nccl" in machine else ""
    return (
        f"{machine['cpu']}, {cpus}, {machine['system']}; torch {machine['torch']}; "
        f"dcpkernels {machine['dcpkernels']}, target {target}{peers}"
    )


def require_memory(what: str, num_bytes: int) -> None:
    """Before ranks are started, which would all fail, or be killed. Raises DcpUnsupported."""
    limit = min(memory.limits(), key=lambda limit: limit.available)
    if num_bytes > limit.available:
        raise DcpUnsupported(
            f"{what} must fit into memory: {num_bytes / 2**30:,.1f} GiB for all ranks (got {limit.available / 2**30:,.1f} GiB "
            f"available)"
        )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not every system has /proc
    return platform.processor() or platform.machine()
