"""Where the numbers come from: what has to stand beside every time that is shown or written."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch

import dcpkernels
from dcpkernels import _backend
from dcpkernels.errors import DcpInvalidArgument, DcpUnsupported
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
    mpi = f"; {machine['mpi']}" if "mpi" in machine else ""
    return (
        f"{machine['cpu']}, {cpus}, {machine['system']}; torch {machine['torch']}; "
        f"dcpkernels {machine['dcpkernels']}, target cpu ({isa}){mpi}"
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not every system has /proc
    return platform.processor() or platform.machine()


def require_writable(option: str, path: Path | None) -> None:
    """Finds a bad place for a result before the work, not after. Raises DcpInvalidArgument."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise DcpInvalidArgument(f"{option}: must be a file in a writable folder (got {str(path)!r})")


def require_matplotlib(option: str) -> None:
    """Before the work, as well. Raises DcpUnsupported."""
    if importlib.util.find_spec("matplotlib") is None:
        raise DcpUnsupported(f"{option}: matplotlib must be installed, by `pip install 'dcpkernels[cli]'` (not found)")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks: an error that has no number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
