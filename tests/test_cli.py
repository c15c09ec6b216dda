"""The command line: what it measures is right, what is wrong makes it fail, a bad request ends in one clean line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpkernels import __version__, _backend
from dcpkernels.cli import bench, demo, floor, main, measure, table
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks

ROOT = Path(__file__).parents[1]
TINY_ARGS = ["--ranks", "2", "--context", "300", "--batch", "3", "--iters", "3"]
TINY_BENCH = ["bench", "a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--iters", "5", "--warmup", "1"]
TINY_BENCH += ["--zero-copy", "no"]


# -- bench


def test_bench_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*TINY_BENCH, "--device", "cpu", "--ranks", "2,4", "--tokens", "1,3", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "gloo median us" in printed and torch.__version__ in printed
    rows = json.loads(out.read_text())
    assert [(row["num_ranks"], row["num_tokens"]) for row in rows] == [(2, 1), (2, 3), (4, 1), (4, 3)]
    for row in rows:
        assert (row["op"], row["device"]) == ("a2a_lse_reduce", "cpu")
        assert (row["num_heads"], row["head_dim"], row["dtype"]) == (4, 64, "bf16")
        assert row["isa"] in ("v4_bf16", "v4", "v3", "baseline") and row["machine"]["cpu"] in printed
        assert row["bytes"] == row["num_tokens"] * {2: 2, 4: 3}[row["num_ranks"]] * (64 * 2 + 4)
        gloo = row["baselines"]["gloo"]
        for timed in (row, gloo):
            assert (
                0 < timed["median_us"] <= timed["p99_us"]
                and 0 <= timed["iqr_us"] <= timed["p99_us"]
                and 0 < timed["max_err_over_bound"] <= 1
            )
        assert 0 < row["floor_us"]
        assert row["pct_of_floor"] == pytest.approx(100 * row["floor_us"] / row["median_us"], abs=0.2)
        assert row["speedup"] == pytest.approx(gloo["median_us"] / row["median_us"], rel=0.02, abs=0.01)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--zero-copy"], {"wire": "auto", "zero_copy": True}),
        (["--wire", "packet", "--packet-bytes", "128"], {"wire": "packet", "zero_copy": False}),
        (["--zero-copy", "--burst", "3", "--turn", "1"], {"calls_per_sample": 3, "samples_per_turn": 1}),
    ],
)
def test_bench_of_other_ways(tmp_path: Path, options: list[str], expected: dict[str, object]) -> None:
    """The result is checked before it is timed, as ever, and the row says which way it was."""
    out = tmp_path / "out.json"
    command = [*TINY_BENCH, "--ranks", "2", "--tokens", "5", "--baselines", "gloo-exchange", *options]
    assert main([*command, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert {name: row[name] for name in expected} == expected
    assert row["max_err_over_bound"] <= 1 and row["speedup"] is None  # an exchange alone is not the op


def test_bench_of_a_variant_without_baselines_and_with_one_rank(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--ranks", "1", "--tokens", "2", "--dtype", "fp32", "--isa", "baseline", "--baselines", "none"]
    assert main([*TINY_BENCH, *options, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["isa"] == "baseline" and row["dtype"] == "fp32" and row["baselines"] == {} and row["speedup"] is None
    assert row["bytes"] == 0 and row["floor_us"] == 0 and row["pct_of_floor"] is None


def test_bench_times_nothing_wrong() -> None:
    wrong = A2aLseReduce(tokens=(2,), num_heads=4, head_dim=64, iters=2, warmup=1, lse_base="2")
    with pytest.raises(DcpError, match=r"dcpkernels must be within the error bound .* times the bound at num_tokens=2"):
        bench.measure_row(wrong, 2, 2, bench.check(wrong))


def test_the_floor_is_of_the_copies_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "num_usable_cpus", lambda: 2)
    assert floor.of_all_ranks_us([[3.0, 4.0]]) == 3
    assert floor.of_all_ranks_us([[3.0, 4.0], [5.0, 2.0]]) == 3  # the second round, two at once
    assert floor.of_all_ranks_us([[1.0], [2.0], [3.0], [4.0]]) == 5  # two on each CPU


def test_pytest_benchmark_reads_the_times_of_the_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "bench/bench_a2a_lse_reduce.py",
        "-k",
        "2-1-",
        f"--benchmark-json={out}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    ours, gloo, *_ = json.loads(out.read_text())["benchmarks"]
    for entry, row in ((ours, ours["extra_info"]), (gloo, gloo["extra_info"]["baselines"]["gloo"])):
        assert entry["stats"]["rounds"] == 100
        assert entry["stats"]["median"] * 1e6 == pytest.approx(row["median_us"], rel=1e-3, abs=0.01)


def test_ranks_keep_to_their_own_cpus() -> None:
    before, after = zip(*run_ranks(_bind, 2, mode="process"), strict=True)
    if _backend.num_usable_cpus() < 2:
        assert after == before
    else:
        assert all(after) and not after[0] & after[1] and (after[0] | after[1]) <= before[0]


def _bind(group: torch.distributed.ProcessGroup) -> tuple[set[int], set[int]]:
    before = os.sched_getaffinity(0)
    measure.bind_to_own_cpus(group.rank(), group.size())
    return before, os.sched_getaffinity(0)


# -- what is refused


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["bench", "a2a_lse_reduce", "--device", "cuda", "--ranks", "48"], "a GPU for each of the 48 ranks (found"),
        (["bench", "a2a_lse_reduce", "--device", "gpu"], "device must be of cpu, cuda (got 'gpu')"),
        (["bench", "a2a_lse_reduce", "--ranks", "7"], "num_heads must be divisible by num_ranks=7 (got 96)"),
        (
            ["bench", "a2a_lse_reduce", "--baselines", "gloo,nccl"],
            "baselines must be of gloo, gloo-exchange, openmpi, openmpi-exchange (got nccl)",
        ),
        (["bench", "a2a_lse_reduce", "--tokens", ","], "tokens must name at least one number"),
        (["bench", "a2a_lse_reduce", "--ranks", ","], "ranks must name at least one number"),
        (["bench", "a2a_lse_reduce", "--json", "/nowhere/out.json"], "--json: must be a file in a writable folder"),
        (["bench", "a2a_lse_reduce", "--tokens", "2,1000000000"], "bench: inputs must fit into memory: 183,105.5 GiB for all ranks (got "),
        (["bench", "query_gather", "--tokens", "1000000000"], "bench: inputs must fit into memory: 102,996.8 GiB for all ranks (got "),
        (["bench", "kv_gather", "--block-size", "100000000"], "bench: inputs must fit into memory: 858.3 GiB for all ranks (got "),
        (["demo", "--context", "2000000000", "--batch", "1"], "demo: caches must fit into memory: 19,311.9 GiB for all ranks (got "),
        (["demo", "--batch", "1000000000"], "--batch: must be at most 65,536 (got 1,000,000,000)"),
        (["demo", "--ranks", "5"], "num_heads must be divisible by num_ranks=5 (got 96)"),
        (["demo", "--png", "/nowhere/demo.png"], "--png: must be a file in a writable folder"),
    ],
)
def test_a_request_that_cannot_be_served(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpkernels: error: ") and text in line


@pytest.mark.parametrize(
    ("args", "exit_code", "text"),
    [
        (["--version"], 0, f"dcpkernels {__version__}"),
        (["--help"], 0, "bench"),
        (["bench", "--help"], 0, "pct_of_floor"),
        (["demo", "--help"], 0, "--interleave"),
        ([], 2, "COMMAND"),
        (["demo", "--ranks", "0"], 2, "must be at least 1 (got 0)"),
        (["demo", "--seed", "99999999999"], 2, "must be in 0 .. 2**31 - 1"),
        (["demo", "--min-ratio", "nan"], 2, "must be a finite number of at least 0 (got nan)"),
        (["demo", "--context", "2147483648"], 2, "must be at most 2**31 - 1 (got 2147483648)"),
        (["bench", "kv_gather", "--interleave", "2147483648"], 2, "must be at most 2**31 - 1"),
        (["bench", "a2a_lse_reduce", "--seed", "-1"], 2, "must be in 0 .. 2**31 - 1"),
        (["bench", "a2a_lse_reduce", "--seed", "99999999999999999999"], 2, "must be in 0 .. 2**31 - 1"),
        (["bench", "a2a_lse_reduce", "--help"], 0, "max_err_over_bound"),
        (["bench", "a2a_lse_reduce", "--tokens", "1,x"], 2, "invalid list of count value"),
        (["bench", "a2a_lse_reduce", "--ranks", "2,0"], 2, "must be at least 1 (got 0)"),
        (["bench", "a2a_lse_reduce", "--rows", "7"], 2, "unrecognized arguments: --rows"),
        (["bench", "all_to_all"], 2, "invalid choice: 'all_to_all'"),
        (["bench"], 2, "OP"),
    ],
)
def test_what_argparse_answers(args: list[str], exit_code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == exit_code
    printed = capsys.readouterr()
    assert text in (printed.err if exit_code else printed.out)


def test_help_needs_no_torch() -> None:
    code = "import sys, dcpkernels.cli as cli; cli.parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_failing_ranks_end_the_command_with_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_rank", _raise)
    assert main(["demo", *TINY_ARGS, "--no-png"]) == 1
    errors = capsys.readouterr().err
    assert "this rank fails on purpose" in errors and "rows: 0 of 945" in errors


def _raise(group: object, task: object) -> None:
    raise ValueError("this rank fails on purpose")


# -- tables


def test_tables_with_and_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table.show(["rank", "us"], [["0", "1.5"], ["10", "1,234.5"]])
    assert capsys.readouterr().out.splitlines() == ["rank       us", "----  -------", "   0      1.5", "  10  1,234.5"]
    with table.Bar("rows", 8) as bar:
        bar.update(3)
    assert capsys.readouterr().err == "rows: 3 of 8\n"

    monkeypatch.setattr(table, "is_rich", lambda stream: True)
    table.show(["rank", "us"], [["0", "1.5"], ["10", "1,234.5"]])
    assert "1,234.5" in capsys.readouterr().out
    with table.Bar("rows", 8) as bar:
        bar.update(8)
    assert "8/8" in capsys.readouterr().err


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_no_number_is_cut_off_in_a_narrow_terminal(width: int, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["T", "context", "TP us", "DCP 8 us", "saved us", "verdict", "blocks a request", "fastest DCP may be"]
    rows = [["64", "1,048,576", "5,300-9,700", "690-1,300", "4,600-8,500", "too close to call", "1,733", "1/2/4/8"]]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", term)
    table.show(columns, rows)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert " ".join(rows[0]) in [" ".join(line.split()) for line in lines]
