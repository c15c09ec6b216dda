"""That a fault is reported, in any process: planted ones, built and run as the module for CPUs is under sanitizers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitizers.planted import ADDRESS, UNDEFINED, build_planted, commit_in_ranks
from tests.sanitizers.sanitized import ROOT, Tree, split_reports

CALL = "from dcpkernels import _C_planted as planted; planted.{}()"


@pytest.fixture
def tree(request, tmp_path: Path) -> Tree:
    sanitizers, leaks = request.param
    made = Tree.make(tmp_path, sanitizers, leaks=leaks)
    build_planted(made)
    return made


@pytest.mark.parametrize("tree", [("address,undefined", False)], indirect=True, ids=["address,undefined"])
def test_a_fault_of_a_rank_is_reported(tree: Tree) -> None:
    faults = ADDRESS | UNDEFINED
    done = commit_in_ranks(tree, list(faults))
    assert done.returncode == 0, done.stdout  # that of pytest, for which all was well
    reports = tree.reports()
    for name, text in faults.items():
        (report,) = [report for report in reports if f" in {name} " in report.text or f" {name}(" in report.text]
        assert text in report.text and report.is_ours, report.text
    assert len(reports) == len(faults)


@pytest.mark.parametrize("tree", [("address,undefined", True)], indirect=True, ids=["leaks"])
def test_a_leak_is_reported_and_leaks_of_python_are_told_apart(tree: Tree) -> None:
    done = tree.run("-c", CALL.format("leak"), timeout_s=120)
    assert done.returncode == 0, done.stdout  # reports say it: other libraries leak, and may
    ours = [report for report in tree.reports() if report.is_ours]
    assert len(ours) == 1 and "Direct leak of 400 byte(s)" in ours[0].text and " in leak " in ours[0].text


@pytest.mark.parametrize("tree", [("thread", False)], indirect=True, ids=["thread"])
def test_a_race_is_reported_and_the_gil_is_seen(tree: Tree) -> None:
    ordered = (
        "import threading; from dcpkernels._C_planted import count_with_gil as count\n"
        "threads = [threading.Thread(target=lambda: [count() for _ in range(2000)]) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert count() == 8001\n"
    )
    done = tree.run("-c", ordered, timeout_s=120)
    assert done.returncode == 0 and not tree.reports(), (done.stdout, tree.reports())
    done = commit_in_ranks(tree, ["race", "race"])
    assert done.returncode == 0, done.stdout
    reports = tree.reports()
    assert len(reports) == 2, reports  # one of each rank
    assert all("data race" in report.text and "planted.cpp" in report.text and report.is_ours for report in reports)


def test_python_without_the_launcher_does_not_import_the_module(tmp_path: Path) -> None:
    """So no process runs the module and reports nothing."""
    tree = Tree.make(tmp_path, "address,undefined")
    build_planted(tree)
    done = subprocess.run(
        [sys.executable, "-c", CALL.format("leak")], cwd=tree.root, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "ASan runtime does not come first" in done.stderr


def test_reports_are_told_apart() -> None:
    asan = "==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x1\n    #0 0x1 in f a.cpp:1\n"
    ubsan = "csrc/core/a.h:3:4: runtime error: shift exponent 40 is too large\n    #0 0x1 in g csrc/core/a.h:3\n"
    leaks = (
        "==7==ERROR: LeakSanitizer: detected memory leaks\n\nDirect leak of 8 byte(s) in 1 object(s) allocated from:\n"
        f"    #0 0x1 in operator new\n    #1 0x2 in h {ROOT}/csrc/host/region.h:5\n\n"
        "Indirect leak of 9 byte(s) in 1 object(s) allocated from:\n    #0 0x1 in malloc\n    #1 0x2 in PyMem_Malloc\n"
    )
    tsan = "==================\nWARNING: ThreadSanitizer: data race (pid=1)\n  Write of size 8\n==================\n"
    assert [report.is_ours for report in split_reports(asan + ubsan)] == [True, True]
    assert [(report.is_leak, report.is_ours) for report in split_reports(leaks)] == [(True, True), (True, False)]
    assert [report.is_ours for report in split_reports(tsan + tsan)] == [True, True]


def test_a_report_file_that_cannot_be_read_apart_is_one_report(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "thread")
    tree.logs.mkdir()
    (tree.logs / "tsan.1").write_text("")
    (tree.logs / "asan.1").write_text("==1==WARNING: AddressSanitizer failed to allocate 0x18000000000000 bytes\n")
    assert not tree.reports()
    (tree.logs / "tsan.2").write_text("==2==Sanitizer CHECK failed: allocator.h:3\n")
    (report,) = tree.reports()
    assert report.is_ours and "CHECK failed" in report.text
