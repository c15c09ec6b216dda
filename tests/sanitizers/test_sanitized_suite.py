"""The tests of the CPU target on a module under sanitizers. Long form: all of them; short form: some of each kind.

AddressSanitizer sees accesses of our code to memory of the heap, of stacks and to globals. A region is one mapping: past
its end is a SIGSEGV, and from one part of it into the next one is seen by nobody here. ThreadSanitizer sees what thread
ranks do to each other, for these share one mapping; between processes it sees nothing. Python and torch are not
instrumented: of them it sees locks, so the GIL, and no accesses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sanitizers.run import run_tests
from tests.sanitizers.sanitized import ROOT, Tree

# What a run under sanitizers says nothing about, or what cannot be true there.
LEFT_OUT = {
    "tests/test_packaging.py": "builds of small projects, and instructions of the module as it is shipped",
    "tests/test_packaging_gpu.py": "the same for GPUs",
    "tests/test_overhead.py": "how long a call takes",
    "tests/test_a2a_memory.py::test_no_copy_of_a_strided_input": "resident memory, to which a sanitizer adds its own",
}
# Arguments, memory, the end of a workspace, and T = 0 and 1 of each op. ThreadSanitizer is for the long form: that the short
# one has no time to compile a second module. The kernels have it in tests/core at any rate.
SHORT = ("tests/test_far_strides.py", "tests/test_gather_edges.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sanitizers" in metafunc.fixturenames:
        long = ("thread",) if metafunc.config.getoption("--torture") else ()
        metafunc.parametrize("sanitizers", ("address,undefined", *long))


def whole_suite() -> list[str]:
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py"))
    return [*files, "tests/kimi_k3", "tests/torture", *(word for name in LEFT_OUT for word in ("--deselect", name))]


def test_no_report(sanitizers: str, torture: bool, tmp_path: Path) -> None:
    tree = Tree.make(tmp_path, sanitizers)
    tree.add_module("" if torture else "baseline")
    tests = whole_suite() if torture else SHORT
    fault = run_tests(tree, "-m", "not gpu", *tests, timeout_s=12 * 3600 if torture else 900)
    assert not fault, fault


def test_what_is_left_out_exists() -> None:
    for name in LEFT_OUT:
        path, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / path).read_text()
