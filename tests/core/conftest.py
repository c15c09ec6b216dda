"""What the tests of this folder share."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def aarch64() -> list[str]:
    """What runs a program for aarch64; the tests that need it are left out where it cannot be made or run."""
    missing = [tool for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(tool)]
    if missing and os.environ.get("DCPKERNELS_REQUIRE_AARCH64") == "1":
        pytest.fail(f"not installed: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return ["qemu-aarch64"]
