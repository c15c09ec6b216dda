"""The kernel source itself, without Python: arithmetic of every variant, and the protocol under ThreadSanitizer."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dcpkernels import _backend

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
VARIANT_FLAGS = {
    "v4": ["-march=x86-64-v4", "-Wno-maybe-uninitialized"],
    "v3": ["-march=x86-64-v3"],
    "baseline": [],
}
RUNNABLE = [name for name in VARIANT_FLAGS if name in _backend.load("cpu").runnable_variants]


def compile_program(folder: Path, sources: list[Path], variant: str, *flags: str) -> Path:
    cxx = shlex.split(os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++")
    program = folder / "_".join([sources[0].stem, variant, *(flag.strip("-").replace("=", "_") for flag in flags)])
    command = [
        *cxx,
        "-std=c++20",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
        "-Wall",
    ]
    command += [
        "-Wextra",
        "-Werror",
        f"-I{CSRC}",
        "-DDCP_TARGET_CPU",
        f"-DDCP_NS={variant}",
        *VARIANT_FLAGS[variant],
    ]
    done = subprocess.run([*command, *flags, *map(str, sources), "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


# -- arithmetic


def test_numbers_are_right_and_equal_on_all_variants(tmp_path: Path) -> None:
    checksums = {}
    for variant in RUNNABLE:
        program = compile_program(tmp_path, [HERE / "numbers.cpp"], variant, "-O3")
        done = subprocess.run([program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{variant}: {done.stderr}"
        checksums[variant] = done.stdout
    assert len(set(checksums.values())) == 1, checksums


def test_variants_share_no_symbol(tmp_path: Path) -> None:
    """A function emitted by two variants under one name would be linked once, perhaps with instructions that the
    processor lacks. So an object defines nothing outside its own namespace."""
    for variant, flags in VARIANT_FLAGS.items():
        if variant != "baseline" and platform.machine() != "x86_64":
            continue
        target = tmp_path / f"{variant}.o"
        source = CSRC / "ops" / "a2a_lse_reduce.cc"
        command = [
            "g++",
            "-std=c++20",
            "-O3",
            "-fPIC",
            f"-I{CSRC}",
            "-DDCP_TARGET_CPU",
            f"-DDCP_NS={variant}",
            *flags,
        ]
        subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True, capture_output=True)
        symbols = subprocess.run(
            ["nm", "-C", "--defined-only", target], check=True, capture_output=True, text=True
        ).stdout
        names = [line.split(" ", 2)[2] for line in symbols.splitlines() if line.split(" ", 2)[1] in "TWVu"]
        assert any(name.startswith(f"dcp::{variant}::") for name in names)
        assert [name for name in names if not name.startswith(f"dcp::{variant}::")] == []


# -- races


def run_race(program: Path, ranks: int, channels: int, calls: int, seed: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, (ranks, channels, calls, seed))]
    if shutil.which("setarch"):  # the address layout of newer kernels can be too random for older sanitizers
        command = ["setarch", "-R", *command]
    environment = {**os.environ, "TSAN_OPTIONS": "exitcode=66 halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="session")
def race_sources() -> list[Path]:
    return [HERE / "race_a2a_lse_reduce.cpp", CSRC / "ops" / "a2a_lse_reduce.cc"]


@pytest.fixture(scope="session")
def race_program(tmp_path_factory: pytest.TempPathFactory, race_sources: list[Path]) -> Path:
    return compile_program(tmp_path_factory.mktemp("race"), race_sources, "baseline", "-O1", "-g", "-fsanitize=thread")


@pytest.mark.parametrize(
    ("ranks", "channels", "calls"),
    [(1, 1, 50), (2, 1, 600), (2, 3, 300), (3, 2, 300), (4, 1, 300), (8, 1, 60)],
)
def test_no_race(race_program: Path, ranks: int, channels: int, calls: int) -> None:
    for seed in (1, 2):
        done = run_race(race_program, ranks, channels, calls, seed)
        assert done.returncode == 0, done.stderr[:6000]


def test_a_weaker_signal_is_reported(tmp_path: Path, race_sources: list[Path]) -> None:
    """The proof that the test above can fail: with a relaxed store in place of the release, a race is found."""
    flags = ("-O1", "-g", "-fsanitize=thread", "-DDCP_MUTATE_RELAXED_SIGNAL")
    done = run_race(compile_program(tmp_path, race_sources, "baseline", *flags), 3, 1, 300, 1)
    assert done.returncode == 66
    assert "data race" in done.stderr and "reduce" in done.stderr
