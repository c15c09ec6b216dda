"""AMD: the same ops by a second LLVM, that of the Triton wheel. The order of memory must not rest on the compiler that
happens to be here."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.isa import amd
from tests.isa.compiled import Kernel, ToolMissing
from tests.isa.sites import faults
from tests.isa.test_isa import OPS, PROBE, broken_copy

# Each op for the newer architecture; for the older one what has most steps, as each op takes seconds.
JOBS = [("gfx950", op) for op in OPS] + [("gfx942", op) for op in OPS if op.stem == "kv_gather"]


def need(required_by: str, *missing: str) -> None:
    if missing and os.environ.get(required_by) == "1":
        pytest.fail(", ".join(missing))
    if missing:
        pytest.skip(", ".join(missing))


@pytest.fixture(autouse=True)
def tools() -> None:
    try:
        amd.tools()
    except ToolMissing as missing:
        need("DCPKERNELS_REQUIRE_ISA", str(missing))
    try:
        amd.require_triton()
    except ToolMissing as missing:
        need("DCPKERNELS_REQUIRE_TRITON", str(missing))


def test_ops_compile_as_meant_by_the_llvm_of_triton(tmp_path: Path) -> None:
    def compile_op(job: tuple[str, Path]) -> list[Kernel]:
        return amd.compile_kernels_by_triton(*job, tmp_path)

    with ThreadPoolExecutor(max_workers=2) as pool:
        compiled = list(pool.map(compile_op, JOBS))
    assert all(compiled)
    assert faults([kernel for kernels in compiled for kernel in kernels]) == []


BREAKS = {
    "no drain before the barrier": ("drain_stores();\n  cta.sync();", "cta.sync();", "hazard 3"),
    "a store that nothing goes before": (
        "release_fence_sys();\n  store_relaxed_sys(word, value);",
        "store_relaxed_sys(word, value);",
        "before the flag: no release store",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_line_is_found_by_the_llvm_of_triton(case: str, tmp_path: Path) -> None:
    old, new, finding = BREAKS[case]
    csrc = broken_copy(tmp_path, "arch/hip.h", old, new)
    found = faults(amd.compile_kernels_by_triton("gfx942", PROBE, tmp_path, csrc), csrc)
    assert any(finding in text for text in found), found
