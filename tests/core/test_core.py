"""The kernel source itself, without Python: arithmetic of every variant, and the protocol under ThreadSanitizer."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpkernels import _backend

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
VARIANT_FLAGS = {
    "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-Wno-uninitialized"],
    "v4": ["-march=x86-64-v4", "-Wno-uninitialized"],
    "v3": ["-march=x86-64-v3"],
    "baseline": [],
}
RUNNABLE = [name for name in VARIANT_FLAGS if name in _backend.load("cpu").runnable_variants]


def compile_program(folder: Path, sources: list[Path], variant: str, *flags: str, cxx: str = "") -> Path:
    cxx = cxx or os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++"
    folder.mkdir(exist_ok=True)
    program = folder / f"{sources[0].stem}_{variant}"
    command = [
        *shlex.split(cxx),
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


def built_objects(variant: str) -> list[Path]:
    """The objects of all ops that `make build` has left, where they are as new as their sources."""
    sources = max(path.stat().st_mtime for path in CSRC.rglob("*") if path.is_file())
    built = [*CSRC.parent.glob(f"build/temp*/cpu/{variant}/*.o"), *CSRC.parent.glob(f"build/cpu/{variant}/*.o")]
    ops = {f"{op.name}.o" for op in CSRC.glob("ops/*.cc")}
    objects = [path for path in built if path.name in ops and path.stat().st_mtime > sources]
    return objects if {path.name for path in objects} == ops else []


def test_variants_share_no_symbol(tmp_path: Path) -> None:
    """A function emitted by two variants under one name would be linked once, perhaps with instructions that the
    processor lacks. So an object defines nothing outside its own namespace."""
    for variant, flags in VARIANT_FLAGS.items():
        if variant != "baseline" and platform.machine() != "x86_64":
            continue
        objects = built_objects(variant)
        for source in [] if objects else CSRC.glob("ops/*.cc"):
            target = tmp_path / f"{variant}_{source.name}.o"
            command = ["g++", "-std=c++20", "-O3", "-fPIC", f"-I{CSRC}", "-DDCP_TARGET_CPU", f"-DDCP_NS={variant}", *flags]
            subprocess.run([*command, "-c", str(source), "-o", str(target)], check=True, capture_output=True)
            objects.append(target)
        for target in objects:
            symbols = subprocess.run(["nm", "-C", "--defined-only", target], check=True, capture_output=True, text=True)
            lines = [line.split(" ", 2) for line in symbols.stdout.splitlines()]
            # Of a template, the return type is shown too.
            names = [name.removeprefix("dcp::Status ") for _, kind, name in lines if kind in "TWVu"]
            assert any(name.startswith(f"dcp::{variant}::") for name in names)
            assert [name for name in names if not name.startswith(f"dcp::{variant}::")] == []


# -- races

# core/types.h: Wire; arch/cpu.h and cta_threads.h: the planted faults.
WIRES = {"push": 0, "pull": 1, "packet8": 2, "packet16": 3, "packet128": 4}
MUTATIONS = {"none": 0, "relaxed signal": 1, "relaxed release": 2, "no publish_done": 3, "no cta.sync": 4, "no lanes.sync": 5}
RACE, NUMBERS_WRONG = 66, 1


def build_race_programs(folder: Path, sources: list[Path]) -> dict[int, Path]:
    """A race program for CTAs of 1 thread (as it is shipped), 2 and 32 threads; the last one goes as GPUs do: a head
    is merged by all lanes of a group, flags of all peers are raised side by side."""
    common = ["-Og", "-fsanitize=thread", f"-I{HERE}", "-include", "mutation.h"]

    def build(threads: int) -> Path:
        several = ['-DDCP_CPU_CTA="cta_threads.h"', f"-DDCP_CTA_THREADS={threads}"] if threads > 1 else []
        several += ["-DDCP_HEAD_TILE=1", "-DDCP_SIGNALS_TOGETHER=true"] if threads == 32 else []
        return compile_program(folder / str(threads), sources, "baseline", *common, *several)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 2, 32), pool.map(build, (1, 2, 32)), strict=True))


def run_race_program(program: Path, *args: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, args)]
    if shutil.which("setarch"):  # the address layout of newer kernels can be too random for older sanitizers
        command = ["setarch", "-R", *command]
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE} halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="session")
def race_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    sources = [HERE / "race_a2a_lse_reduce.cpp", CSRC / "ops" / "a2a_lse_reduce.cc"]
    return build_race_programs(tmp_path_factory.mktemp("race"), sources)


def run_race(
    program: Path, ranks: int, channels: int, calls: int, seed: int, wire: str = "push", mutation: str = "none"
) -> subprocess.CompletedProcess[str]:
    return run_race_program(program, ranks, channels, calls, seed, WIRES[wire], MUTATIONS[mutation])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("threads", "ranks", "channels", "calls"),
    [
        *[(1, 1, 1, 50), (1, 2, 1, 400), (1, 2, 3, 100), (1, 3, 2, 100), (1, 4, 1, 200), (1, 8, 1, 50)],
        *[(2, 1, 1, 30), (2, 2, 1, 150), (2, 3, 2, 40), (32, 2, 1, 60), (32, 3, 2, 15)],
    ],
)
def test_no_race(race_programs: dict[int, Path], threads: int, ranks: int, channels: int, calls: int, wire: str) -> None:
    for seed in (1, 2) if threads == 1 else (1,):  # barriers between threads take their time
        done = run_race(race_programs[threads], ranks, channels, calls, seed, wire)
        assert done.returncode == 0, done.stderr[:6000]


@pytest.mark.parametrize(
    ("mutation", "threads", "wires"),
    [
        ("relaxed signal", 1, ("push", "pull")),
        ("relaxed signal", 32, ("push", "pull")),
        ("relaxed release", 1, ("pull",)),  # the owner writes a buffer that a peer still reads
        ("no publish_done", 2, ("push", "pull")),
        ("no publish_done", 32, ("push", "pull")),
        ("no cta.sync", 2, tuple(WIRES)),
        ("no cta.sync", 32, tuple(WIRES)),
        ("no lanes.sync", 32, tuple(WIRES)),
    ],
)
def test_a_planted_fault_is_reported(
    race_programs: dict[int, Path], mutation: str, threads: int, wires: tuple[str, ...]
) -> None:
    """The proof that the test above can fail."""
    for wire in wires:
        done = run_race(race_programs[threads], 3, 1, 100, 1, wire, mutation)
        found = done.returncode == RACE and "data race" in done.stderr
        if (wire, mutation) == ("packet128", "no lanes.sync"):
            # Words of a packet are atomic: a flag that overtakes those of other lanes is no race, but wrong numbers.
            found |= done.returncode == NUMBERS_WRONG and "expected" in done.stderr
        assert found, (wire, done.returncode, done.stderr[:2000])


# -- aarch64


def test_aarch64_gives_the_same_numbers(tmp_path: Path, aarch64: list[str]) -> None:
    native = compile_program(tmp_path, [HERE / "numbers.cpp"], "baseline", "-O3")
    crossed = compile_program(tmp_path / "aarch64", [HERE / "numbers.cpp"], "baseline", "-O3", "-static", cxx="aarch64-linux-gnu-g++")
    expected = subprocess.run([native], capture_output=True, text=True, timeout=120)
    done = subprocess.run([*aarch64, crossed], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.stdout


def test_aarch64_runs_the_protocol(tmp_path: Path, aarch64: list[str]) -> None:
    """Numbers and order of steps; that the emulator has the weak memory of the real thing is not claimed."""
    sources = [HERE / "race_a2a_lse_reduce.cpp", CSRC / "ops" / "a2a_lse_reduce.cc"]
    flags = ("-O2", "-static", f"-I{HERE}", "-include", "mutation.h")
    program = compile_program(tmp_path, sources, "baseline", *flags, cxx="aarch64-linux-gnu-g++")
    for wire, code in WIRES.items():
        command = [*aarch64, str(program), *map(str, (3, 2, 60, 1, code, 0))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (wire, done.stderr)
