"""Writes what the compilers made of every op into docs/targets/cuda.md and docs/targets/hip.md, between two marker
comments of each:

    python -m tests.isa.write_table [cuda] [hip]

A test compares, where the compiler is the one that the table names."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.isa import amd, nvidia
from tests.isa.compiled import AMD_COLUMNS, COLUMNS, CSRC, ROOT, Kernel, amd_rows_of, rows_of, run_tool

BEGIN, END = "<!-- tests/isa/write_table.py: from here -->\n", "<!-- to here -->\n"
OPS = sorted((CSRC / "ops").glob("*.cc"))


def nvcc() -> str:
    return "nvcc " + re.search(r"\bV(\d+\.\d+\.\d+)", run_tool([nvidia.tools()[0], "--version"], CSRC)[0])[1]


def clang() -> str:
    """Debian's has a name of its own: another's of the same version may make other code."""
    maker, version = re.match(
        r"(.*clang) version (\d+\.\d+\.\d+)", run_tool([*amd.tools()[0], "--version"], CSRC)[0]
    ).groups()
    return f"{maker} {version}"


@dataclass(frozen=True)
class Page:
    name: str
    vendor: ModuleType
    compiler: Callable[[], str]
    columns: tuple[str, ...]
    rows_of: Callable[[list[Kernel]], list[tuple[object, ...]]]

    @property
    def path(self) -> Path:
        return ROOT / "docs" / "targets" / f"{self.name}.md"

    def written(self, kernels: dict[str, list[Kernel]], compiler: str) -> str:
        """The part between the markers, from the kernels of each architecture."""
        head = ["| " + " | ".join(self.columns[1:]) + " |", "|---|" + "---:|" * (len(self.columns) - 2)]
        lines = [f"By {compiler}.", ""]
        for arch, of_arch in kernels.items():
            rows = self.rows_of(of_arch)
            lines += [f"`{arch}`", "", *head]
            lines += ["| `" + "` | ".join([str(row[1]), " | ".join(map(str, row[2:]))]) + " |" for row in rows]
            lines.append("")
        return "\n".join(lines)

    def committed(self) -> str:
        return self.path.read_text().partition(BEGIN)[2].partition(END)[0]

    def write(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        jobs = [(arch, op) for arch in self.vendor.ARCHS for op in OPS]
        compiled = pool.map(lambda job: self.vendor.compile_kernels(*job, folder), jobs)
        kernels: dict[str, list[Kernel]] = {arch: [] for arch in self.vendor.ARCHS}
        for (arch, _), found in zip(jobs, compiled, strict=True):
            kernels[arch] += found
        before, begin, rest = self.path.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        assert begin and end, f"{self.path} has no marker comments"
        self.path.write_text(before + BEGIN + self.written(kernels, self.compiler()) + END + after)


PAGES = {
    "cuda": Page("cuda", nvidia, nvcc, COLUMNS, rows_of),
    "hip": Page("hip", amd, clang, AMD_COLUMNS, amd_rows_of),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for name in sys.argv[1:] or PAGES:
            PAGES[name].write(Path(folder), pool)


if __name__ == "__main__":
    main()
