"""Builds programs of the explorer: scenarios and the kernel source, instrumented; the engine, not."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"

ENGINE = (
    "fiber",
    "shape",
    "model",
    "canonical",
    "races",
    "execution",
    "accesses",
    "faults",
    "snapshot",
    "runtime",
    "reduction",
    "search",
    "sample",
    "trace",
    "main",
)
COMMON = ["-std=c++20", "-g0", "-Wall", "-Wextra", "-Werror", f"-I{HERE}"]
# As csrc is compiled for its baseline variant. Copies of the C library are calls that the engine sees. Nothing is
# inlined: what a function has left behind is then gone with its frame, and threads that have come to the same place on
# different ways are the same.
INSTRUMENTED = [
    "-O1",
    "-fsanitize=thread",
    "-fno-inline",
    "-Dalways_inline=",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-include",
    "instrumented.h",
    "-DDCP_TARGET_CPU",
    "-DDCP_NS=baseline",
]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++")


def compile_objects(folder: Path, sources: Sequence[Path], flags: Sequence[str], jobs: int = 2) -> list[Path]:
    """Objects of the sources, each made once in a folder, however many programs are linked from it."""
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        if not target.exists():
            command = [*compiler(), *COMMON, *flags, "-c", str(source), "-o", str(target)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-6000:]}"
        return target

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(compile_one, sources))


def build_engine(folder: Path) -> list[Path]:
    return compile_objects(folder / "engine", [HERE / f"{name}.cpp" for name in ENGINE], ["-O2"])


def build(
    folder: Path, name: str, sources: Sequence[Path], *flags: str, csrc: Path = CSRC, objects: Sequence[Path] = ()
) -> Path:
    """The program `name` of these sources (scenarios, kernels), which are instrumented, and the engine."""
    objects = [*objects, *compile_objects(folder / name, sources, [*INSTRUMENTED, f"-I{csrc}", *flags])]
    program = folder / f"{name}_program"
    command = [*compiler(), *map(str, objects), *map(str, build_engine(folder)), "-o", str(program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return program
