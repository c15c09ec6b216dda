"""Environment variables: defaults, values, and errors that name the variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcpkernels import env
from dcpkernels.errors import DcpInvalidArgument


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults():
    assert env.cpu_isa() == "auto"
    assert env.timeout_s() is None
    assert env.first_call_timeout_s() is None
    assert env.read_only_views() is False


def test_values(monkeypatch):
    monkeypatch.setenv("DCPKERNELS_CPU_ISA", " v3 ")
    monkeypatch.setenv("DCPKERNELS_TIMEOUT_S", "0")
    monkeypatch.setenv("DCPKERNELS_FIRST_CALL_TIMEOUT_S", "2.5")
    assert (env.cpu_isa(), env.timeout_s(), env.first_call_timeout_s()) == ("v3", 0.0, 2.5)
    for text, expected in (("1", True), ("0", False), (" 1 ", True)):
        monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", text)
        assert env.read_only_views() is expected


def test_empty_is_not_set(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, "")
    assert (env.cpu_isa(), env.timeout_s(), env.first_call_timeout_s()) == ("auto", None, None)
    assert env.read_only_views() is False


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
@pytest.mark.parametrize(
    ("name", "read"),
    [("DCPKERNELS_TIMEOUT_S", env.timeout_s), ("DCPKERNELS_FIRST_CALL_TIMEOUT_S", env.first_call_timeout_s)],
)
def test_bad_seconds(monkeypatch, name, read, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(DcpInvalidArgument, match=f"^{name}: .*got '{text}'"):
        read()


def test_bad_isa(monkeypatch):
    monkeypatch.setenv("DCPKERNELS_CPU_ISA", "avx2")
    with pytest.raises(DcpInvalidArgument, match="^DCPKERNELS_CPU_ISA: .*v4_bf16, v4, v3, baseline.*got 'avx2'"):
        env.cpu_isa()


@pytest.mark.parametrize("text", ["2", "-1", "yes", "true", "01"])
def test_bad_switch(monkeypatch, text):
    monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", text)
    with pytest.raises(DcpInvalidArgument, match=f"^DCPKERNELS_READ_ONLY_VIEWS: must be 0 or 1 .got '{text}'"):
        env.read_only_views()


def test_the_table_lists_exactly_what_is_read():
    source = Path(env.__file__).read_text()
    body = source[source.index("def cpu_isa") :]
    assert sorted(set(re.findall(r'"(DCPKERNELS_\w+)"', body))) == sorted(v.name for v in env.VARIABLES)
