"""The Triton kernels of kimi_k3: what they compute, in Triton's interpreter (interpreted/); compiled for GPUs that are not here,
nothing spilled and on matrix units. And that nothing but they need triton."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMITS = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
MATRIX_UNITS = {
    "sm_90": ("wgmma.mma_async", "mma.sync"),
    "sm_100": ("tcgen05.mma", "mma.sync"),
    "sm_103": ("tcgen05.mma", "mma.sync"),
    "gfx942": ("v_mfma_",),
    "gfx950": ("v_mfma_",),
}

COMPILE = """
import json, sys
from dcpkernels.kimi_k3.triton import compile
json.dump({name: {target: compile.compile_for(build, compile.TARGETS[target])._asdict() for target in compile.TARGETS}
           for name, build in compile.BUILDS.items()}, sys.stdout)
"""


@pytest.fixture
def triton() -> None:
    _require_triton()


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        reason = "triton is not installed (pip install 'dcpkernels[triton]')"
        (pytest.fail if os.environ.get("DCPKERNELS_REQUIRE_TRITON") == "1" else pytest.skip)(reason)


def python(*args: str, **environment: str) -> str:
    """What a process of its own prints; a failure is the test's failure."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *args], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("test_mla_decode.py", 36), ("test_kda_step.py", 14)])
def test_in_the_interpreter(triton: None, name: str, least: int) -> None:
    printed = python("-m", "pytest", "-q", "-x", f"tests/kimi_k3/interpreted/{name}", TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", printed)
    assert passed and int(passed[1]) >= least, printed
    assert os.environ.get("DCPKERNELS_REQUIRE_ORACLES") != "1" or "skipped" not in printed, printed


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    _require_triton()
    # A cache of its own: what is read here is what was compiled here.
    return json.loads(python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))))


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("kernel", ["mla_decode.split", "mla_decode.combine", "kda_step"])
def test_resources(compiled: dict[str, dict[str, dict[str, Any]]], kernel: str, target: str) -> None:
    found = compiled[kernel][target]
    assert found["spilled"] == 0
    assert 0 < found["registers"] <= (255 if target.startswith("sm") else 512)
    assert found["shared_bytes"] <= SHARED_LIMITS[target]


@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_attention_runs_on_matrix_units(compiled: dict[str, dict[str, dict[str, Any]]], target: str) -> None:
    found = compiled["mla_decode.split"][target]["matrix"]
    assert found and all(name.startswith(MATRIX_UNITS[target]) for name in found), found


def test_a_spill_is_seen(triton: None, tmp_path: Path) -> None:
    """A tile of 128 heads does not fit the registers of four warps."""
    code = (
        "from dcpkernels.kimi_k3.triton import compile as c; b = c.BUILDS['mla_decode.split'];"
        "b = b._replace(constants={**b.constants, 'TILE_H': 128});"
        "print([c.compile_for(b, c.TARGETS[t]).spilled for t in ('sm_90', 'gfx942')])"
    )
    assert all(spilled > 0 for spilled in json.loads(python("-c", code, TRITON_CACHE_DIR=str(tmp_path))))


def test_nothing_else_needs_triton() -> None:
    """The package, the layers and the command line import where there is no triton."""
    python(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "import dcpkernels.kimi_k3 as k\n"
        "for name in k.__all__: getattr(k, name)\n"
        "import dcpkernels.cli.demo, dcpkernels.kimi_k3.triton\n"
        "assert sys.modules['triton'] is None",
    )
