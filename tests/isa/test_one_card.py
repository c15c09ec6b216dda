"""The script for one GPU, on a machine without one: its harness compiles for the card without spills and can be
imported; it says that there is no device; and all that does not need one runs, on ranks that are threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.card import build
from tests.isa.compiled import ROOT

SCRIPT = ROOT / "tests/gpu/one_card.py"


def need_nvcc() -> None:
    try:
        build.find_nvcc()
    except build.ToolMissing as missing:
        if os.environ.get("DCPKERNELS_REQUIRE_ISA") == "1":
            raise
        pytest.skip(str(missing))


def run_script(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both targets: they share the bindings."""
    return tmp_path_factory.mktemp("one_card")


def test_the_harness_compiles_for_the_card(build_dir: Path) -> None:
    need_nvcc()
    module, log = build.build(build_dir, "cuda")
    kernels = build.resources(log)
    names = " ".join(kernels)
    assert all(name in names for name in ("kernel_entry", "ranks_entry", "for_each_entry")), sorted(kernels)
    wasteful = {name: use for name, use in kernels.items() if use["spills"] or use["stack"]}
    assert wasteful == {}
    # In a process of its own: what it registers would stay in this one.
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
        f"from tests.gpu.card import build; ext = build.load(Path({str(module)!r}))\n"
        "assert ext.has_device and ext.A2aParams().query_stream_idx == -1 and ext.capture"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    if device_is_here():
        pytest.skip("there is a device")
    result = tmp_path / "one_card.json"
    done = run_script("--json", str(result))
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert "no device" in report["error"] and "no device" in done.stdout
    assert not report["passed"] and report["sections"] == {}


def device_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def test_the_rest_of_it_runs_on_threads(build_dir: Path, tmp_path: Path) -> None:
    result = tmp_path / "one_card.json"
    done = run_script("--dry-run", "--pattern-s", "1", "--json", str(result), "--build-dir", str(build_dir))
    report = json.loads(result.read_text())
    assert done.returncode == 0, json.dumps(report, indent=1)[-6000:] + done.stderr
    sections = {"build", "streams", "replay", "latency", "merge_bandwidth", "pattern"}
    assert set(report["sections"]) == sections and report["running"] is None


def test_a_section_that_ends_its_process_does_not_end_the_run(tmp_path: Path) -> None:
    """With a module that aborts when it is loaded: each section is in the report, and the run comes to its end."""
    folder = tmp_path / "build"
    folder.mkdir()
    source = tmp_path / "module.cpp"
    source.write_text('#include <cstdlib>\nextern "C" void* PyInit_one_card_module() { abort(); }\n')
    module = build.module_file(folder, "cpu")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(module)], check=True)
    result = tmp_path / "one_card.json"
    done = run_script("--dry-run", "--only", "streams,pattern", "--json", str(result), "--build-dir", str(folder))
    assert done.returncode == 1
    sections = json.loads(result.read_text())["sections"]
    assert {name: section["passed"] for name, section in sections.items()} == {
        "build": True, "streams": False, "pattern": False,
    }  # fmt: skip
    assert "ended with -6" in sections["streams"]["error"] and "ended with -6" in sections["pattern"]["error"]


def test_a_run_ends_at_its_limit(tmp_path: Path) -> None:
    """With a module that never comes back."""
    folder = tmp_path / "build"
    folder.mkdir()
    source = tmp_path / "module.cpp"
    source.write_text('#include <unistd.h>\nextern "C" void* PyInit_one_card_module() { for (;;) sleep(1); }\n')
    module = build.module_file(folder, "cpu")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(module)], check=True)
    result = tmp_path / "one_card.json"
    options = ("--dry-run", "--only", "streams,pattern", "--json", str(result), "--build-dir", str(folder))
    done = run_script(*options, "--limit-s", "8")
    assert done.returncode == 1
    sections = json.loads(result.read_text())["sections"]
    assert "limit of 8 s" in sections["streams"]["error"] and "not run" in sections["pattern"]["error"]
