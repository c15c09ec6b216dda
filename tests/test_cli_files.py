"""Files and stdout of the commands, where they cannot be written or have odd names: one line, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcpkernels.cli import main, output
from dcpkernels.errors import DcpInvalidArgument

ROOT = Path(__file__).parent.parent
PLAN = ["plan", "--model", "kimi-k3", "--tp", "8", "--available-gib", "34.28"]
ROW = {"op": "query_gather", "num_ranks": 2, "num_tokens": 8, "median_us": 9.0, "p99_us": 10.0}


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpkernels: error: ")
    return line


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_name_that_no_file_can_have(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, option, str(tmp_path / ("x" * 300))]) == 2
    assert f"{option}: must be a file's name" in error_of(capsys)


def test_a_file_that_is_there_and_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there.json"
    there.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != there)  # root may write to any
    output.require_writable("--json", tmp_path / "new.json")
    with pytest.raises(DcpInvalidArgument, match="--json: must be a file in a writable folder"):
        output.require_writable("--json", there)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_disk_that_is_full(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    assert main([*PLAN, option, "/dev/full"]) == 1
    assert "/dev/full must be written (got No space left on device)" in error_of(capsys)


def test_a_folder_that_takes_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    """And says so only when one is made."""
    assert main([*PLAN, "--json", "/proc/no-such-file"]) == 1
    assert "/proc/no-such-file must be written (got No such file" in error_of(capsys)


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_disk_that_is_full_for_a_comparison(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([ROW]))
    assert main(["bench", "--compare", str(rows), str(rows), option, "/dev/full"]) == 1
    assert "/dev/full must be written" in error_of(capsys)


def run_with(redirection: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = f'"$0" -c "import sys; from dcpkernels.cli import main; sys.exit(main())" "$@" {redirection}'
    return subprocess.run(["sh", "-c", command, sys.executable, *PLAN], check=False, cwd=ROOT,
                          env={**os.environ, **env}, capture_output=True, text=True, timeout=60)  # fmt: skip


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_on_a_disk_that_is_full(unbuffered: str) -> None:
    ended = run_with(">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 1
    assert ended.stderr == "dcpkernels: error: the result must be written (got No space left on device)\n"


def test_no_stdout() -> None:
    ended = run_with(">&-")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_that_cannot_be_printed(tmp_path: Path) -> None:
    """Names are bytes; and a terminal may know ASCII alone."""
    path = tmp_path / os.fsdecode(b"\xff\xc3\xbc.json")
    ended = run_with(f"--json '{os.fsdecode(os.fsencode(path))}'", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == f"wrote {tmp_path}/\\udcff\\xfc.json"
    assert json.loads(path.read_text())["model"] == "kimi-k3"


def test_a_trace_that_is_played_at_no_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}')
    assert main([*PLAN, "--trace", str(trace), "--load", "0"]) == 2
    assert "load must be a number in" in error_of(capsys)
