"""The child that the doctor has ask drivers: what stops it costs one section and no more."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dcpkernels.cli.doctor.check import NotMade, Section
from dcpkernels.cli.doctor.probe import ask, describe, gather
from dcpkernels.errors import DcpUnsupported

SECTIONS = "tests.doctor_sections:SECTIONS"


def test_what_stops_a_section_costs_no_other():
    start = time.monotonic()
    found = ask(["well", "dies", "pid", "hangs", "ends", "raises"], SECTIONS, deadline_s=1.5)
    assert time.monotonic() - start < 20
    assert list(found) == ["well", "dies", "pid", "hangs", "ends", "raises"]
    assert found["well"].get("answer") == 42 and found["pid"].get("pid") != os.getpid()
    assert found["dies"].lost == "the process that asked was killed by signal 11 (SIGSEGV)"
    assert found["hangs"].lost == "no answer within 1.5 s"
    assert found["ends"].lost == "the process that asked ended by exit code 3"
    assert found["raises"].lost == "LookupError: nothing here"


def test_no_child_is_left():
    pid = ask(["pid"], SECTIONS)["pid"].get("pid")
    ask(["hangs"], SECTIONS, deadline_s=0.2)
    assert not os.path.exists(f"/proc/{pid}")
    children = Path("/proc/thread-self/children").read_text().split()
    assert not [pid for pid in children if b"doctor_sections" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_table_that_cannot_be_imported():
    found = ask(["a", "b"], "tests.no_such_module:SECTIONS")
    assert [section.lost for section in found.values()] == ["the process that asked ended by exit code 1"] * 2


def test_without_a_descriptor_or_a_working_directory(monkeypatch):
    def refuse():
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("os.pipe", refuse)
        found = ask(["well", "pid"], SECTIONS)
    assert [section.lost for section in found.values()] == [
        "no process could be started to ask (OSError: [Errno 24] Too many open files)"
    ] * 2

    def is_gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("sys.path", [*sys.path, ""])
    monkeypatch.setattr("os.getcwd", is_gone)
    assert ask(["well"], SECTIONS)["well"].lost == ""


def test_answers_and_errors_in_their_place():
    def refuse():
        raise DcpUnsupported("must be (is not): do so")

    section = Section(gather(one=lambda: 1, none=lambda: None, bad=lambda: 1 // 0, ours=refuse))
    assert (section.get("one"), section.get("none"), section.known("bad", 7)) == (1, None, 7)
    assert section.error("one") == section.error("none") == ""
    assert section.error("bad").startswith("ZeroDivisionError: ") and section.error("ours") == "must be (is not): do so"
    assert section.error("never") == "it was not asked for"
    for read in (section, Section({"one": {"value": 1}}, lost="the process died")):
        try:
            read.get("bad")
        except NotMade as error:
            assert str(error) == read.error("bad")
        else:
            raise AssertionError("a fact that is not there was read")
    assert len(describe(ValueError("x" * 5000))) == 1000
