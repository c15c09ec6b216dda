"""Writes what the compilers made of every op into docs/targets/cuda.md, between two marker comments:

    python -m tests.isa.write_table

A test compares the two, where the nvcc is the one that the table names."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.isa import nvidia
from tests.isa.compiled import COLUMNS, CSRC, ROOT, Kernel, rows_of, run_tool

PAGE = ROOT / "docs" / "targets" / "cuda.md"
BEGIN, END = "<!-- tests/isa/write_table.py: from here -->\n", "<!-- to here -->\n"
OPS = sorted((CSRC / "ops").glob("*.cc"))


def nvcc_version() -> str:
    return re.search(r"\bV(\d+\.\d+\.\d+)", run_tool([nvidia.tools()[0], "--version"], CSRC)[0])[1]


def written(kernels: dict[str, list[Kernel]], version: str) -> str:
    """The part of the page between the markers, from the kernels of each architecture."""
    lines = [f"By nvcc {version}.", ""]
    for arch, of_arch in kernels.items():
        lines += [f"`{arch}`", "", "| " + " | ".join(COLUMNS[1:]) + " |", "|---|" + "---:|" * (len(COLUMNS) - 2)]
        lines += ["| `" + "` | ".join([str(row[1]), " | ".join(map(str, row[2:]))]) + " |" for row in rows_of(of_arch)]
        lines.append("")
    return "\n".join(lines)


def committed() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(arch, op) for arch in nvidia.ARCHS for op in OPS]
        compiled = pool.map(lambda job: nvidia.compile_kernels(*job, Path(folder)), jobs)
        kernels: dict[str, list[Kernel]] = {arch: [] for arch in nvidia.ARCHS}
        for (arch, _), found in zip(jobs, compiled, strict=True):
            kernels[arch] += found
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE} has no marker comments"
    PAGE.write_text(before + BEGIN + written(kernels, nvcc_version()) + END + after)


if __name__ == "__main__":
    main()
