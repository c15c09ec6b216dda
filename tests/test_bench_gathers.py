"""`dcpkernels bench` of the gathers: rows say what was measured, every byte is checked, a wrong one ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpkernels.cli import bench, exact, main
from dcpkernels.cli.baselines import is_exchange
from dcpkernels.cli.baselines_gather import AllGather
from dcpkernels.cli.bench_gather import GatherSubject
from dcpkernels.cli.bench_kv_gather import KvGather
from dcpkernels.cli.bench_op import OURS, BenchOp, Subject
from dcpkernels.cli.bench_query_gather import QueryGather
from dcpkernels.errors import DcpError

FEW = ["--iters", "3", "--warmup", "1", "--turn", "2"]
QUERY = ["bench", "query_gather", "--device", "cpu", "--heads", "6", "--head-dim", "24", *FEW]
KV = ["bench", "kv_gather", "--device", "cpu", "--kv-dim", "24", "--block-size", "16", *FEW]


def rows_of(args: list[str], folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.json"
    assert main([*args, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    for row in rows:
        assert row["op"] == args[1] and row["device"] == "cpu" and row["isa"] in ("v4_bf16", "v4", "v3", "baseline")
        assert 0 < row["median_us"] <= row["p99_us"] and 0 < row["floor_us"] and row["wrong_bytes"] == 0
        assert row["pct_of_floor"] == pytest.approx(100 * row["floor_us"] / row["median_us"], abs=0.2)
        for entry in row["baselines"].values():
            assert 0 < entry["median_us"] <= entry["p99_us"] and entry["wrong_bytes"] == 0
            assert row["speedup"] == pytest.approx(entry["median_us"] / row["median_us"], rel=0.02, abs=0.01)
        assert (row["num_iters"], row["samples_per_turn"]) == (3, 2) and row["machine"]["torch"] == torch.__version__
    return rows


# -- rows


def test_rows_of_query_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of([*QUERY, "--ranks", "2,3", "--tokens", "1,5", "--baselines", "gloo"], tmp_path)
    assert "wrong bytes" in capsys.readouterr().out
    assert [(row["num_ranks"], row["num_tokens"]) for row in rows] == [(2, 1), (2, 5), (3, 1), (3, 5)]
    for row in rows:
        assert (row["num_heads"], row["head_dim"], row["dtype"]) == (6, 24, "bf16")
        assert (row["parts"], row["quantise"], list(row["baselines"])) == ([], False, ["gloo"])
        assert row["bytes"] == row["num_tokens"] * 6 // row["num_ranks"] * 24 * 2


@pytest.mark.parametrize(
    ("options", "item_bytes"),
    [
        (["--dtype", "e5m2"], 1),
        (["--dtype", "fp32", "--parts", "16,5,3"], 4),
        (["--dtype", "e4m3", "--parts", "17,7"], 1),
        (["--dtype", "e4m3fnuz", "--parts", "17,7"], 1),
        (["--quantise"], 1),
        (["--quantise", "--dtype", "fp32", "--parts", "17,7"], 1),
    ],
)
def test_query_gather_of_other_types_and_parts(options: list[str], item_bytes: int, tmp_path: Path) -> None:
    (row,) = rows_of([*QUERY, "--tokens", "3", *options], tmp_path)
    assert row["bytes"] == 3 * 3 * 24 * item_bytes and row["quantise"] == ("--quantise" in options)
    assert sum(row["parts"]) in (0, 24) and bool(row["parts"]) == ("--parts" in options)


def test_rows_of_kv_gather(tmp_path: Path) -> None:
    rows = rows_of([*KV, "--ranks", "2,3", "--rows", "1,200", "--baselines", "gloo"], tmp_path)
    assert [(row["num_ranks"], row["num_rows"]) for row in rows] == [(2, 1), (2, 200), (3, 1), (3, 200)]
    for row in rows:
        assert (row["kv_dim"], row["dtype"], row["block_size"], row["interleave"]) == (24, "bf16", 16, 1)
        assert row["bytes"] == -(-row["num_rows"] // row["num_ranks"]) * 24 * 2


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        (["--interleave", "16", "--rows", "70"], (32 + 6) * 48),
        (["--interleave", "3", "--rows", "100", "--dtype", "fp32"], 51 * 96),
        (["--dtype", "e4m3", "--kv-dim", "32", "--rows", "33", "--burst", "2"], 17 * 32),
        (["--ranks", "1", "--rows", "33"], 33 * 48),
    ],
)
def test_kv_gather_of_other_types_and_interleaves(options: list[str], num_bytes: int, tmp_path: Path) -> None:
    (row,) = rows_of([*KV, *options], tmp_path)
    assert row["bytes"] == num_bytes and list(row["baselines"]) == ["gloo"]


@pytest.mark.parametrize(
    "command", [[*QUERY, "--tokens", "3"], [*KV, "--rows", "50"]], ids=["query_gather", "kv_gather"]
)
def test_a_gather_without_baselines(command: list[str], tmp_path: Path) -> None:
    (row,) = rows_of([*command, "--baselines", "none"], tmp_path)
    assert row["baselines"] == {} and row["speedup"] is None


# -- the check


@dataclass(frozen=True, kw_only=True)
class Broken(BenchOp):
    """One byte of one candidate's result is another one, on rank 1 alone."""

    broken: str = OURS

    @contextmanager
    def opened(self, workspace: Any, *args: Any) -> Iterator[Subject]:
        with super().opened(workspace, *args) as subject:
            right = subject.candidates[self.broken]

            def wrong() -> torch.Tensor:
                out = right().clone()
                out.view(torch.uint8).view(-1)[7] ^= 1
                return out

            def wrong_exchange() -> None:
                packed = subject.bare[self.broken].packed.view(torch.uint8).view(-1)
                packed[7] ^= 1
                right()
                packed[7] ^= 1  # it may be the input of all

            if workspace.rank == 1:
                subject.candidates[self.broken] = wrong_exchange if is_exchange(self.broken) else wrong
            yield subject


@dataclass(frozen=True, kw_only=True)
class BrokenQuery(Broken, QueryGather):
    pass


@dataclass(frozen=True, kw_only=True)
class BrokenKv(Broken, KvGather):
    pass


@pytest.mark.parametrize("name", [OURS, "gloo", "gloo-exchange"])
@pytest.mark.parametrize(
    "op",
    [BrokenQuery(num_heads=4, head_dim=8, tokens=(3,)), BrokenKv(kv_dim=8, block_size=4, rows=(30,))],
    ids=["query_gather", "kv_gather"],
)
def test_bench_times_nothing_wrong(op: Broken, name: str) -> None:
    op = replace(op, broken=name, baselines=("gloo", "gloo-exchange"))
    size = f"{op.SIZE}={op.sizes[0]}"
    with pytest.raises(DcpError, match=rf"bench: {name} must be equal .* \(got 1 wrong bytes at {size}, 2 ranks\)"):
        bench.measure_row(op, 2, op.sizes[0], bench.check(op))


class Copied(AllGather):
    """`is_packed`: the input is what is sent, as that of a query in one part is."""

    def __init__(self, query: torch.Tensor, *, is_packed: bool) -> None:
        self.query, self.packed = query, query if is_packed else torch.zeros_like(query)
        self.received = torch.zeros_like(query)

    def pack(self) -> None:
        self.packed.copy_(self.query)

    def exchange(self) -> None:
        self.received.copy_(self.packed)

    def unpack(self) -> torch.Tensor:
        return self.received


class OneRank(GatherSubject):
    def truth(self) -> torch.Tensor:
        return torch.arange(4.0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_bare_exchange_is_timed_alone_with_its_packed_buffer_written_anew(is_packed: bool) -> None:
    query = torch.arange(4.0)
    others = {name: Copied(query, is_packed=is_packed) for name in ("gloo", "gloo-exchange")}
    bare = others["gloo-exchange"]
    subject = OneRank((query,), query.clone, others)
    assert subject.check() == {OURS: 0, "gloo": 0, "gloo-exchange": 0}

    results: dict[str, object] = {}
    for name in ("gloo", "gloo-exchange", OURS, "gloo-exchange", "gloo"):
        before = bare.packed.clone(), query.clone()
        subject.produce(name)
        written = [not torch.equal(*pair) for pair in zip(before, (bare.packed, query), strict=True)]
        assert written == ([True, True] if is_packed else [name == "gloo-exchange", name != "gloo-exchange"])
        results[name] = subject.candidates[name]()
        if name == "gloo-exchange":
            assert torch.equal(bare.received, bare.packed) and results[name] is None  # nothing before, nothing behind
    assert subject.check_last(results) == {OURS: 0, "gloo": 0, "gloo-exchange": 0}
    subject.produce("gloo-exchange")  # and it does not run: what it has received is of the call before
    assert subject.check_last(results) == {OURS: 0, "gloo": 0, "gloo-exchange": 16}


def test_what_counts_as_a_wrong_byte() -> None:
    truth = torch.tensor([[1.0, float("nan")], [-0.0, 4.0]])
    assert exact.wrong_bytes(truth.clone(), truth) == 0
    zero = truth.clone()
    zero[1, 0] = 0.0  # equal, but not in its bits
    assert exact.wrong_bytes(zero, truth) == 1
    assert exact.wrong_bytes(truth[:1], truth) == exact.wrong_bytes(truth.double(), truth) == 16


# -- what is refused


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["query_gather", "--ranks", "7"], "num_heads must be divisible by num_ranks=7 (got 96)"),
        (["query_gather", "--ranks", "2,7"], "num_heads must be divisible by num_ranks=7 (got 96)"),
        (
            ["query_gather", "--baselines", "mpi"],
            "baselines must be of gloo, gloo-exchange, openmpi, openmpi-exchange (got mpi)",
        ),
        (["query_gather", "--parts", "512,63"], "parts must sum to head_dim=576 (got 512,63)"),
        (
            ["query_gather", "--quantise", "--dtype", "e5m2"],
            "dtype must be bf16, fp16 or fp32 with quantise (got e5m2)",
        ),
        (["query_gather", "--tokens", ","], "tokens must name at least one number"),
        (["kv_gather", "--rows", ","], "rows must name at least one number"),
        (["kv_gather", "--kv-dim", "7"], "must have a multiple of 16 bytes (got 14)"),
        (["kv_gather", "--device", "hip"], "device must be of cpu, cuda (got 'hip')"),
        (["kv_gather", "--json", "/nowhere/out.json"], "--json: must be a file in a writable folder"),
    ],
)
def test_a_request_that_cannot_be_served(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpkernels: error: ") and text in line


@pytest.mark.parametrize(
    ("args", "exit_code", "text"),
    [
        (["query_gather", "--help"], 0, "release_query"),
        (["kv_gather", "--help"], 0, "transposed view"),
        (["query_gather", "--burst", "2"], 2, "unrecognized arguments: --burst"),
        (["kv_gather", "--rows", "0"], 2, "must be at least 1 (got 0)"),
    ],
)
def test_what_argparse_answers(args: list[str], exit_code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args])
    assert ended.value.code == exit_code
    printed = capsys.readouterr()
    assert text in (printed.err if exit_code else printed.out)
