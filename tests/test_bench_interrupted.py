"""`dcpkernels bench` that is told to end, by Ctrl-C or SIGTERM: one line, exit code 130, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpkernels import cli
from dcpkernels.cli import openmpi, openmpi_place
from dcpkernels.cli.progress import Progress
from dcpkernels.errors import DcpUnsupported

ROOT = Path(__file__).parents[1]
LONG = ["bench", "a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--tokens", "2", "--iters", "1000000"]
CODE = "import sys; from dcpkernels.cli import main; sys.exit(main(sys.argv[1:]))"
_UNTIL_S = 120.0


class Command:
    """A bench in a session of its own, as from a terminal. Its processes are known by their environment."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.marker = f"BENCH_OF_THIS_TEST={uuid.uuid4().hex}"
        name, _, value = self.marker.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, *LONG, *options],
            cwd=ROOT, env={**os.environ, name: value, "TMPDIR": str(folder)}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> list[list[str]]:
        """The command lines of all that run, its own included."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            # Only of ours can it be read to the end; others end meanwhile.
            with contextlib.suppress(OSError):
                if self.marker.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_bytes().decode().split("\0"))
        return found

    def wait_until(self, holds: Callable[[Command], bool]) -> None:
        until = time.monotonic() + _UNTIL_S
        while not holds(self):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)


def server_starts(command: Command) -> bool:
    """A fork server that still imports: it has no thread but its own, and the ranks have not begun."""
    return any("serve(" in " ".join(arguments) for arguments in command.processes())


def ranks_time(command: Command) -> bool:
    for fd in Path(f"/proc/{command.process.pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            if "dcpkernels-progress" in os.readlink(fd):
                return Progress(str(fd)).read()[1] > 0
    return False


def mpi_places_are_there(command: Command) -> bool:
    return sum(openmpi_place.__file__ in arguments for arguments in command.processes()) >= 2


def missing_mpi() -> str:
    try:
        openmpi.require()
    except DcpUnsupported as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("phase", "options", "signum", "to_group"),
    [
        # As a terminal does it: the fork server must not answer it with a traceback of its own, nor be waited for.
        (server_starts, ["--baselines", "none"], signal.SIGINT, True),
        (ranks_time, ["--baselines", "gloo"], signal.SIGINT, True),
        pytest.param(
            *(mpi_places_are_there, ["--baselines", "openmpi"], signal.SIGTERM, False),
            marks=pytest.mark.skipif(bool(missing_mpi()), reason=missing_mpi()),
        ),
    ],
    ids=["server", "timing", "mpi"],
)
def test_nothing_is_left(
    phase: Callable[[Command], bool], options: list[str], signum: int, to_group: bool, tmp_path: Path
) -> None:
    shm = set(os.listdir("/dev/shm"))
    command = Command(tmp_path, *options)
    try:
        command.wait_until(phase)
        (os.killpg if to_group else os.kill)(command.process.pid, signum)
        _, errors = command.process.communicate(timeout=_UNTIL_S)
    finally:
        command.process.kill()
    assert (command.process.returncode, errors) == (130, "dcpkernels: error: interrupted\n")
    # Ranks are killed with their server: gone a moment later at most.
    left = [command.processes, lambda: set(os.listdir("/dev/shm")) - shm, lambda: list(tmp_path.rglob("*"))]
    until = time.monotonic() + 10
    while any(what() for what in left) and time.monotonic() < until:
        time.sleep(0.02)
    assert [what() for what in left] == [[], set(), []]


def test_what_somebody_else_handles_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example ignored, as by nohup."""
    seen = []
    monkeypatch.setattr(
        cli, "parser", lambda: seen.append([signal.getsignal(signum) for signum in cli._ENDING]) or 1 / 0
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(ZeroDivisionError):
            cli.main([])
        assert seen == [[signal.default_int_handler, signal.SIG_IGN]]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
