"""Cases of the Triton kernels that run in Triton's interpreter: in one child process for each module. TRITON_INTERPRET
decides what a kernel is when it is defined, Triton's own tl.sum and the like included, so it has to be set before
triton is imported for the first time; other tests of this process compile their kernels.

A module of cases has CASES, a dict of functions by name, and imports no kernel before one of them runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SETS = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "PYTHONPATH")


def need(*packages: str) -> None:
    """Skips where a package is missing; fails there with DCPKERNELS_REQUIRE_TRITON=1."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("DCPKERNELS_REQUIRE_TRITON") == "1":
        pytest.fail(f"not installed: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def child(*arguments: str, **environment: str) -> str:
    """stdout of a Python in the repository's root, without what this process has of Triton's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _SETS}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT, env={**kept, "PYTHONPATH": str(ROOT), **environment},
        check=False, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_cases(module: str) -> dict[str, str]:
    """For each of the module's cases: what it failed with, "" when it passed."""
    *_, last = child("-m", __name__, module, TRITON_INTERPRET="1").splitlines()
    return json.loads(last)


def _passes(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:  # noqa: BLE001  reported by the test of the case
        return traceback.format_exc(limit=-6)
    return ""


def main(module: str) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases: dict[str, Callable[[], None]] = importlib.import_module(module).CASES
    results = {name: _passes(case) for name, case in cases.items()}
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
