"""The kernels of the gathers without Python: the protocol under ThreadSanitizer, and the numbers of float8."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.core.test_core import (
    CSRC,
    HERE,
    MUTATIONS,
    NUMBERS_WRONG,
    RACE,
    RUNNABLE,
    build_race_programs,
    compile_program,
    run_race_program,
)

SOURCES = [HERE / "race_gathers.cpp", CSRC / "ops" / "query_gather.cc", CSRC / "ops" / "kv_gather.cc"]
# Beside those of test_core: a start of a chunk that waits for nobody's release.
NO_CREDITS = {"no credits": 100}
BUFFERS = {"one for all ranks": 1, "one for each": 0}


@pytest.fixture(scope="session")
def race_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return build_race_programs(tmp_path_factory.mktemp("race_gathers"), SOURCES)


def run_race(
    program: Path, ranks: int, channels: int, calls: int, seed: int, buffers: str, mutation: str = "none"
) -> subprocess.CompletedProcess[str]:
    codes = (BUFFERS[buffers], (MUTATIONS | NO_CREDITS)[mutation])
    return run_race_program(program, ranks, channels, calls, seed, *codes)


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(
    ("threads", "ranks", "channels", "calls"),
    [
        *[(1, 1, 1, 30), (1, 2, 1, 150), (1, 2, 3, 40), (1, 3, 1, 100), (1, 3, 2, 40), (1, 8, 1, 20)],
        *[(2, 2, 1, 30), (2, 3, 2, 10), (32, 2, 1, 20), (32, 3, 2, 3)],
    ],
)
def test_no_race(
    race_programs: dict[int, Path], threads: int, ranks: int, channels: int, calls: int, buffers: str
) -> None:
    for seed in (1, 2):
        done = run_race(race_programs[threads], ranks, channels, calls, seed, buffers)
        assert done.returncode == 0, done.stderr[:6000]


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(
    ("mutation", "threads"),
    [
        *[("relaxed signal", 1), ("relaxed signal", 32), ("relaxed release", 1), ("relaxed release", 32)],
        *[("no publish_done", 2), ("no publish_done", 32), ("no cta.sync", 2), ("no cta.sync", 32)],
        *[("no credits", 1), ("no credits", 32)],
    ],
)
def test_a_planted_fault_is_reported(race_programs: dict[int, Path], mutation: str, threads: int, buffers: str) -> None:
    """The proof that the test above can fail."""
    done = run_race(race_programs[threads], 3, 1, 100, 1, buffers, mutation)
    if mutation == "no credits" and done.returncode == NUMBERS_WRONG:
        return  # a reader has seen the bytes of the next chunk, and ended the program before the race was written down
    assert done.returncode == RACE and "data race" in done.stderr, (done.returncode, done.stderr[:2000])


def test_float8_is_right_and_equal_on_all_variants(tmp_path: Path) -> None:
    checksums = {}
    for variant in RUNNABLE:
        program = compile_program(tmp_path, [HERE / "float8.cpp"], variant, "-O3")
        done = subprocess.run([program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{variant}: {done.stderr}"
        checksums[variant] = done.stdout
    assert len(set(checksums.values())) == 1, checksums


def test_aarch64_gives_the_same_float8(tmp_path: Path, aarch64: list[str]) -> None:
    native = compile_program(tmp_path, [HERE / "float8.cpp"], "baseline", "-O3")
    crossed = compile_program(
        tmp_path / "aarch64", [HERE / "float8.cpp"], "baseline", "-O3", "-static", cxx="aarch64-linux-gnu-g++"
    )
    expected = subprocess.run([native], capture_output=True, text=True, timeout=120)
    done = subprocess.run([*aarch64, crossed], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.stdout


def test_aarch64_runs_the_protocol(tmp_path: Path, aarch64: list[str]) -> None:
    """Bytes and order of steps; that the emulator has the weak memory of the real thing is not claimed."""
    flags = ("-O2", "-static", f"-I{HERE}", "-include", "mutation.h")
    program = compile_program(tmp_path, SOURCES, "baseline", *flags, cxx="aarch64-linux-gnu-g++")
    for code in BUFFERS.values():
        command = [*aarch64, str(program), *map(str, (3, 2, 30, 1, code, 0))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
