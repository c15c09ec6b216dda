"""What the bench shows: bars on stderr, tables on stdout, rows by what they have."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace

import pytest

from dcpkernels import cli
from dcpkernels.cli import bench, bench_device, bench_table, measure, progress, table
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.cli.bench_op import BenchOp
from dcpkernels.errors import DcpUnsupported

FEW = ["--iters", "3", "--warmup", "1", "--turn", "2"]
MERGE = ["bench", "a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--tokens", "2", "--zero-copy", "no", *FEW]


def ops_of(command: str) -> list[BenchOp]:
    return bench.from_args(cli.parser().parse_args(["bench", *command.split()]))


def test_bars_of_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.RowBars(2) as bars:
        with bars.row("one", 2, 40) as path:
            for rank, calls in ((0, 3), (1, 2)):
                counter = progress.Progress(path, rank)
                for _ in range(calls):
                    counter.add_call()
            assert progress.Progress(path).read() == (0, 2)  # the slowest rank's
        with pytest.raises(ValueError, match="on purpose"), bars.row("two", 2, 40):
            raise ValueError("on purpose")
    assert re.fullmatch(r"row 1 of 2: one: 40 calls, [0-9.]+ s\n", capsys.readouterr().err)

    monkeypatch.setattr(table, "is_rich", lambda stream: True)
    with progress.RowBars(2) as bars, bars.row("one", 1, 40) as path:
        progress.Progress(path).add_call()
    printed = capsys.readouterr().err
    assert "1/2" in printed and "row 1 of 2" not in printed


def test_bars_leave_stdout_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where stderr is a terminal and stdout a file; and no table is printed while bars are shown."""
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with progress.RowBars(2) as bars:
        with bars.row("text " * 20, 1, 40) as path:
            print("of a row")
            counter = progress.Progress(path)
            for _ in range(40):
                counter.add_call()
            time.sleep(0.3)  # so that it is seen
        with bars.aside():
            before = capsys.readouterr()
            print("of the table")
            time.sleep(0.15)  # longer than bars are left as they are
        printed = capsys.readouterr()
    assert "40/40" in before.err and "…" not in before.err  # in 80 columns too
    assert before.out == "of a row\n" and printed.out == "of the table\n" and "of the table" not in printed.err
    assert before.err.endswith("\x1b[2K") and "1/2" in printed.err  # wiped, and there again


def test_a_row_is_named_by_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    op = A2aLseReduce(wire="auto", ranks=(2,), tokens=(4,), num_heads=8, head_dim=16, iters=1, baselines=())
    with pytest.MonkeyPatch.context() as patch, progress.RowBars(3) as bars:
        patch.setattr(bench, "measure_row", lambda *args, **options: ({}, {}))
        for way in ({"wire": "auto"}, {"wire": "packet"}, {"zero_copy": True}):
            bench._rows(replace(op, **way), "baseline", bars)
    auto, packet, zero_copy = capsys.readouterr().err.splitlines()
    assert "wire auto, 2 ranks" in auto and "wire packet, packet_bytes 8, 2 ranks" in packet
    assert "wire auto, zero_copy, 2 ranks" in zero_copy


def test_a_table_has_columns_for_what_differs() -> None:
    common = {"op": "x", "num_ranks": 2, "num_rows": 1_000, "dtype": "bf16", "p99_us": 9.0, "bytes": 2**20, "mode": "eager",
              "floor_us": 1.0, "wrong_bytes": 0, "pct_of_floor": 50.0}  # fmt: skip
    rows = [
        {**common, "median_us": 2.0, "skew_us": 0.0, "baselines": {}},
        {**common, "median_us": 4.0, "skew_us": 5.0, "baselines": {"gloo": {"median_us": 10.0, "p99_us": 20.0}}},
        {**common, "op": "y", "median_us": 1.0, "skew_us": 0.0, "baselines": {}, "pct_of_floor": None},
    ]
    x, y = bench_table.tables_of(rows)
    assert (x.op, y.op) == ("x", "y")
    assert x.columns[:4] == ["ranks", "rows", "skew us", "median us"] and y.columns[2] == "median us"
    assert x.lines[0] == ["2", "1,000", "0", "2.0", "9.0", "1.000", "1.0", "50", "0", "-", "-", "-"]
    assert x.lines[1][-3:] == ["10.0", "20.0", "2.5x"] and y.lines[0][-2:] == ["-", "0"]


def test_a_table_of_both_places_of_the_input() -> None:
    common = {"op": "x", "num_ranks": 2, "num_tokens": 1, "median_us": 2.0, "p99_us": 9.0, "bytes": 2**20,
              "floor_us": 1.0, "max_err_over_bound": 0.5, "pct_of_floor": 50.0, "baselines": {}}  # fmt: skip
    (shown,) = bench_table.tables_of([{**common, "zero_copy": zero_copy} for zero_copy in (False, True)])
    assert shown.columns[2] == "zero copy" and [line[2] for line in shown.lines] == ["no", "yes"]


def test_devices_and_their_modes() -> None:
    device = bench_device.for_device("cpu")
    assert isinstance(device, measure.CpuBench) and device.mode == "eager" and device.torch_device.type == "cpu"
    assert bench_device.for_device("cpu", "eager").require("baseline", [2]) == "baseline"
    with pytest.raises(DcpUnsupported, match=r"device must be of cpu, cuda \(got 'tpu'\)"):
        bench_device.for_device("tpu")
