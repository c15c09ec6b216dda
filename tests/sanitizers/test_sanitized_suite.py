"""The tests of the CPU target on a module under sanitizers. Long form: all of them; short form: some of each kind.

AddressSanitizer sees accesses of our code to memory of the heap, of stacks and to globals. A region is one mapping: past
its end is a SIGSEGV, and from one part of it into the next one is seen by nobody here. ThreadSanitizer sees what thread
ranks do to each other, for these share one mapping; between processes it sees nothing. Python and torch are not
instrumented: of them it sees locks, so the GIL, and no accesses.
"""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

import pytest

from tests.sanitizers.run import run_tests
from tests.sanitizers.sanitized import ROOT, Tree
from tests.sanitizers.suite import LEFT_OUT, LIMIT_S, run_file, whole_suite

# Arguments, memory, the end of a workspace, and T = 0 and 1 of each op. ThreadSanitizer is for the long form: that the short
# one has no time to compile a second module. The kernels have it in tests/core at any rate.
SHORT = ("tests/test_far_strides.py", "tests/test_gather_edges.py")
SLOW = """
import os, pathlib, subprocess, sys
def test_slow():
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code])
    pathlib.Path({path!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
    child.wait()
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "file" in metafunc.fixturenames:
        long = metafunc.config.getoption("--torture")
        kinds = ("address,undefined", "thread") if long else ("address,undefined",)
        rows = [(kind, file) for kind in kinds for file in (whole_suite() if long else SHORT)]
        metafunc.parametrize("tree, file", rows, indirect=["tree"], ids=[f"{file}-{kind}" for kind, file in rows])


@pytest.fixture(scope="module")
def tree(request: pytest.FixtureRequest, torture: bool, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    faulthandler.cancel_dump_traceback_later()  # of pytest, 600 s for a test: a build takes longer, and a file has its own
    made = Tree.make(tmp_path_factory.mktemp("sanitized"), request.param)
    made.add_module("" if torture else "baseline")
    return made


def test_no_report(tree: Tree, file: str, torture: bool) -> None:
    faulthandler.cancel_dump_traceback_later()
    outcome = run_file(tree, file, timeout_s=LIMIT_S if torture else 450)
    assert not outcome.fault, outcome.fault


def test_a_file_that_is_not_done_in_time_is_a_fault(tmp_path: Path) -> None:
    tree = Tree.make(tmp_path, "address,undefined")
    (tree.root / "tests" / "test_slow.py").write_text(SLOW.format(path=str(tmp_path / "started")))
    outcome = run_tests(tree, "tests/test_slow.py", timeout_s=30)
    assert outcome.ended is None and "was not done in time" in outcome.fault
    pids, end = (tmp_path / "started").read_text().split(), time.monotonic() + 10
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert len(pids) == 2 and not left


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_left_out_exists() -> None:
    for name in LEFT_OUT:
        path, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / path).read_text()
