"""`dcpkernels bench` of any op: sweeps, ranks that come late, the check of the last calls."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpkernels import cli
from dcpkernels.cli import bench, bench_device, main, measure, skew, stamps
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.cli.bench_a2a_lse_reduce import _Merge as Merge
from dcpkernels.cli.bench_device import Times
from dcpkernels.cli.bench_kv_gather import KvGather
from dcpkernels.cli.bench_op import OURS, BenchOp, Kept, Subject
from dcpkernels.cli.bench_query_gather import QueryGather
from dcpkernels.cli.verify import rank_inputs
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks

FEW = ["--iters", "3", "--warmup", "1", "--turn", "2"]
MERGE = ["bench", "a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--tokens", "2", "--zero-copy", "no", *FEW]


def ops_of(command: str) -> list[BenchOp]:
    return bench.from_args(cli.parser().parse_args(["bench", *command.split()]))


# -- sweeps


def test_a_sweep_is_one_op_for_each_combination() -> None:
    ops = ops_of("a2a_lse_reduce --dtype bf16,fp32 --wire bulk,packet --packet-bytes 8,128 --skew-us 0,5")
    ways = [(op.dtype, op.skew_us, op.wire, op.packet_bytes) for op in ops]
    wires = [("bulk", 8), ("packet", 8), ("packet", 128)]  # packets have a size, bulk has none to repeat it for
    assert ways == [(dtype, us, *wire) for dtype in ("bf16", "fp32") for us in (0, 5) for wire in wires]
    assert [op.fields()["packet_bytes"] for op in ops[:3]] == [None, 8, 128]


@pytest.mark.parametrize(
    ("options", "zero_copy"),
    [
        ("", [False, True]),  # what a caller on a CPU can choose from
        ("--wire auto", [False]),
        ("--wire bulk,packet", [False, False]),
        ("--device cuda --dtype bf16,fp32", [False, False]),
        ("--zero-copy", [True]),
        ("--zero-copy --wire bulk", [True]),
        ("--zero-copy no", [False]),
        ("--zero-copy yes,no,yes", [True, False]),
    ],
)
def test_where_the_input_lies(options: str, zero_copy: list[bool]) -> None:
    assert [op.zero_copy for op in ops_of(f"a2a_lse_reduce {options}")] == zero_copy
    assert [op.zero_copy for op in ops_of("all") if isinstance(op, A2aLseReduce)] == [False, True]


def test_a_sweep_has_nothing_twice() -> None:
    assert len(ops_of("kv_gather --dtype e4m3,bf16,e4m3 --skew-us 0,0.0")) == 2
    (op,) = ops_of("query_gather --ranks 4,2,4 --tokens 8,8 --baselines gloo,gloo --parts 64,64")
    assert (op.ranks, op.tokens, op.baselines, op.parts) == ((4, 2), (8,), ("gloo",), (64, 64))


def test_rows_of_a_sweep_say_all_that_varies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sweep = ["--dtype", "fp16,fp32", "--wire", "bulk,packet", "--packet-bytes", "16", "--baselines", "none"]
    assert main([*MERGE, *sweep, "--seed", "3", "--json", str(out)]) == 0
    rows, printed = json.loads(out.read_text()), capsys.readouterr()
    ways = [("fp16", "bulk", None), ("fp16", "packet", 16), ("fp32", "bulk", None), ("fp32", "packet", 16)]
    assert [(row["dtype"], row["wire"], row["packet_bytes"]) for row in rows] == ways
    for row in rows:
        assert (row["mode"], row["seed"], row["warmup_turns"], row["timed_from"]) == ("eager", 3, 1, "own entry")
    lines = [line.split() for line in printed.out.splitlines()]
    assert any(line[:5] == ["ranks", "tokens", "dtype", "wire", "packet"] for line in lines)
    assert ["2", "2", "fp32", "packet", "16"] in [line[:5] for line in lines]
    # On stderr, a line for each row that is done.
    said = [re.sub(r"[0-9.]+ s$", "", line) for line in printed.err.splitlines()]
    assert said[3] == "row 4 of 4: a2a_lse_reduce, fp32, wire packet, packet_bytes 16, 2 ranks, 2 tokens: 8 calls, "
    assert len(said) == 4


@dataclass(frozen=True, kw_only=True)
class TinyMerge(A2aLseReduce):
    tokens: tuple[int, ...] = (2,)
    num_heads: int = 4
    head_dim: int = 16


@dataclass(frozen=True, kw_only=True)
class TinyQuery(QueryGather):
    tokens: tuple[int, ...] = (1, 3)
    num_heads: int = 4
    head_dim: int = 16


@dataclass(frozen=True, kw_only=True)
class TinyKv(KvGather):
    rows: tuple[int, ...] = (50,)
    kv_dim: int = 16
    iters: int = 5


def test_all_ops_with_what_they_have_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for op in (TinyMerge, TinyQuery, TinyKv):
        monkeypatch.setitem(bench.OPS, op.NAME, op)
    out = tmp_path / "out.json"
    options = ["--warmup", "1", "--turn", "2", "--baselines", "none", "--dtype", "fp32", "--skew-us", "5"]
    assert main(["bench", "all", *options, "--json", str(out)]) == 0
    rows, printed = json.loads(out.read_text()), capsys.readouterr().out
    names = ["a2a_lse_reduce", "a2a_lse_reduce", "query_gather", "query_gather", "kv_gather"]
    assert [row["op"] for row in rows] == names
    assert [row["num_iters"] for row in rows] == [200, 200, 200, 200, 5]  # each op's own
    assert all((row["dtype"], row["skew_us"]) == ("fp32", 5) for row in rows)
    # A table for each.
    assert printed.count("median us") == 3 and printed.count("wrong bytes") == 2 and printed.count("err / bound") == 1


def test_a_bad_combination_ends_the_run_before_the_first_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure_row", lambda *args, **options: pytest.fail("measured"))
    assert main([*MERGE, "--zero-copy", "--wire", "bulk,packet"]) == 2
    assert 'zero_copy must not come with wire="packet"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--mode", "graph"], "bench: mode must be of eager with device cpu (got graph)"),
        (["--mode", ","], "bench: mode must name at least one mode (got none)"),
        (["--zero-copy", ","], "bench: zero_copy must name at least one answer (got none)"),
        (["--dtype", ","], "bench: dtype must name at least one type (got none)"),
        (["--skew-us", ","], "bench: skew_us must name at least one number (got none)"),
        (["--skew-us", "0,2e6"], "bench: skew_us must be at most 1e+06 (got 2e+06)"),
        (["--device", "gpu"], "bench: device must be of cpu, cuda (got 'gpu')"),
    ],
)
def test_a_request_that_cannot_be_served(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MERGE, *options]) == 2
    assert capsys.readouterr().err == f"dcpkernels: error: {text}\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["a2a_lse_reduce", "--dtype", "bf16,e4m3"], "must be of bf16, fp16, fp32 (got e4m3)"),
        (["all", "--dtype", "e5m2"], "must be of bf16, fp16, fp32 (got e5m2)"),
        (["a2a_lse_reduce", "--packet-bytes", "8,12"], "must be of 8, 16, 128 (got 12)"),
        (["a2a_lse_reduce", "--wire", "push"], "must be of auto, bulk, packet (got push)"),
        (["kv_gather", "--skew-us", "5,-1"], "must be a finite number of at least 0 (got -1)"),
        (["kv_gather", "--seed", "-1"], "must be in 0 .. 2**31 - 1 (got -1)"),
        (["kv_gather", "--seed", "99999999999999999999"], "must be in 0 .. 2**31 - 1 (got 99999999999999999999)"),
        (["kv_gather", "--skew-us", "five"], "invalid list of microseconds value"),
        (["all", "--tokens", "2"], "unrecognized arguments: --tokens"),
    ],
)
def test_what_argparse_answers(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *args])
    assert text in capsys.readouterr().err


# -- ranks that come late


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_rank_is_late_in_turn(num_ranks: int) -> None:
    ranks = [skew.Skew(rank, num_ranks, 70.0) for rank in range(num_ranks)]
    steps = [70 * step / (num_ranks - 1) for step in range(num_ranks)]
    late = {8: set(), 2: set()}
    for sample in range(200):
        delays = [rank.delay_us(sample) for rank in ranks]
        assert sorted(delays) == steps
        for turn, seen in late.items():
            if sample % turn >= turn // 2:  # those that count
                seen.add(delays.index(70))
    assert all(seen == set(range(num_ranks)) for seen in late.values())


def test_nobody_is_late_without_skew_or_without_others() -> None:
    assert skew.Skew(1, 2, 0.0).delay_us(3) == skew.Skew(0, 1, 50.0).delay_us(3) == 0


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_a_late_rank_waits_and_yields_where_cpus_are_few(num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    yields = []
    monkeypatch.setattr(skew._backend, "num_usable_cpus", lambda: num_cpus)
    monkeypatch.setattr(skew.os, "sched_yield", lambda: yields.append(1))
    start = time.perf_counter_ns()
    skew.Skew(0, 2, 300.0).wait(300.0)
    assert time.perf_counter_ns() - start >= 300_000 and bool(yields) == (num_cpus == 1)


def test_a_late_rank_waits_behind_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    late = skew.Skew(0, 2, 40.0)
    monkeypatch.setattr(late, "wait", lambda delay_us: log.append(delay_us))
    times = measure.take_turns(
        {"a": lambda: log.append("a"), "b": lambda: log.append("b")},
        lambda: log.append("|"),
        iters=8,
        warmup=1,
        num_calls=2,
        produce=lambda name: log.append(f"in {name}"),
        skew=late,
    )
    expected: list[object] = []
    for sample in range(9):  # both candidates meet the same pattern
        for name in "ab" if sample % 2 else "ba":
            expected += ["|", f"in {name}", "|", *([40.0] if late.delay_us(sample) else []), name, name]
    assert log == expected and 40.0 in log and [len(samples.own_us) for samples in times.values()] == [8, 8]
    for samples in times.values():
        for own_us, start, end in zip(samples.own_us, samples.entered_ns, samples.returned_ns, strict=True):
            assert own_us == (end - start) / 1e3 / 2


def test_the_time_of_late_ranks_is_from_the_last_entry() -> None:
    device = bench_device.for_device("cpu")
    ranks = [
        Times([100.0, 10.0], [1_000, 500_000], [101_000, 510_000]),
        Times([40.0, 30.0], [51_000, 500_500], [91_000, 530_500]),
    ]
    assert device.collective_us(ranks, num_calls=1, skew_us=0) == [100, 30]
    assert device.collective_us(ranks, num_calls=1, skew_us=50) == [50, 30]
    assert device.collective_us(ranks, num_calls=2, skew_us=50) == [25, 15]
    assert device.entry_spread_us(ranks) == [50, 0.5]


def test_the_clock_is_common_to_processes() -> None:
    """What spans of several ranks are held against each other by."""
    assert time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
    before = time.perf_counter_ns()
    stamps_ns = run_ranks(_now_ns, 2, mode="process")
    assert all(before < stamp < time.perf_counter_ns() for stamp in stamps_ns)


def _now_ns(group: torch.distributed.ProcessGroup) -> int:
    return time.perf_counter_ns()


def test_rows_with_and_without_skew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*MERGE, "--skew-us", "0,50", "--baselines", "gloo", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [(row["skew_us"], row["timed_from"]) for row in rows] == [(0, "own entry"), (50, "last entry")]
    for row in rows:
        assert 0 < row["median_us"] and 0 < row["baselines"]["gloo"]["median_us"] and 0 < row["entry_spread_us"]
    printed = capsys.readouterr().out
    assert "ranks up to 0, 50 us late, timed from the entry of the last one" in printed and "skew us" in printed


@dataclass(frozen=True, kw_only=True)
class LateSpy(TinyMerge):
    """Its error is the longest wait of any rank, instead, in units of 100 us."""

    @contextmanager
    def opened(self, workspace: Any, *args: Any) -> Iterator[Subject]:
        with super().opened(workspace, *args) as subject:
            waits: list[float] = [0.0]
            skew.Skew.wait = lambda late, delay_us: waits.append(delay_us)  # in this rank's process alone
            subject.check_last = lambda results: {OURS: max(waits) / 100}
            yield subject


def test_ranks_come_as_late_as_asked() -> None:
    op = LateSpy(dtype="fp32", skew_us=95.0, baselines=(), iters=4, warmup=1, turn=2)
    row, _ = bench.measure_row(op, 2, 2, bench.check(op))
    assert row["max_err_over_bound"] == 0.95  # that of the merge in fp32 is far below


# -- the check of the last calls


class Going(BenchOp):
    """A candidate that is right when it is checked, and goes wrong in its `good_calls`-th call from then on."""

    broken: str = OURS
    stale: bool = False  # it does nothing any more, and what it had is still there; else a byte is wrong on rank 1
    good_calls: int = 4

    @contextmanager
    def opened(self, workspace: Any, *args: Any) -> Iterator[Subject]:
        with super().opened(workspace, *args) as subject:
            subject.candidates[self.broken] = self._going(subject, workspace.rank)
            yield subject

    def _going(self, subject: Subject, rank: int) -> Callable[[], object]:
        right, calls, kept = subject.candidates[self.broken], [0], []

        def candidate() -> object:
            calls[0] += 1
            if self.stale and calls[0] > self.good_calls:
                return kept[0]
            out = right()
            if calls[0] == self.good_calls and isinstance(out, torch.Tensor):
                kept[:] = [out.clone()]
            elif calls[0] == self.good_calls:
                kept[:] = [None]
            if calls[0] > self.good_calls and rank == 1:
                target = out if isinstance(out, torch.Tensor) else subject._outs[self.broken]
                target.view(torch.uint8).view(-1)[1] ^= 0x40
            return out

        return candidate


@dataclass(frozen=True, kw_only=True)
class GoingMerge(Going, TinyMerge):
    broken: str = OURS
    stale: bool = False


@dataclass(frozen=True, kw_only=True)
class GoingQuery(Going, TinyQuery):
    broken: str = OURS
    stale: bool = False


@dataclass(frozen=True, kw_only=True)
class GoingKv(Going, TinyKv):
    broken: str = OURS
    stale: bool = False


@pytest.mark.parametrize(
    "op",
    [
        GoingMerge(),
        GoingMerge(stale=True),
        GoingMerge(stale=True, zero_copy=True),
        GoingMerge(broken="gloo-exchange", stale=True, baselines=("gloo-exchange",)),
        GoingQuery(stale=True),
        GoingQuery(stale=True, quantise=True, parts=(11, 5)),
        GoingKv(stale=True),
        GoingKv(broken="gloo", baselines=("gloo",)),
    ],
    ids=lambda op: f"{op.NAME}-{op.broken}-{'stale' if op.stale else 'wrong'}",
)
def test_a_result_that_goes_wrong_while_it_is_timed_ends_the_run(op: Going) -> None:
    if op.broken == OURS:
        op = type(op)(**{**vars(op), "baselines": ()})
    op = type(op)(**{**vars(op), "iters": 4, "warmup": 1, "turn": 2})
    text = rf"bench: {op.broken} must be (equal|within) .* after it was timed \(got .* at {op.SIZE}={op.sizes[0]}, 2"
    with pytest.raises(DcpError, match=text):
        bench.measure_row(op, 2, op.sizes[0], bench.check(op))


class OldLses(TinyMerge):
    """In gloo's calls from the third one on, those that rank 1 has sent are of the one before. (If those of all ranks were,
    the merge would be the same.)"""

    @contextmanager
    def opened(self, workspace: Any, *args: Any) -> Iterator[Subject]:
        with super().opened(workspace, *args) as subject:
            gloo, lses = subject._others["gloo"], []
            pack = gloo.pack

            def pack_old(partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
                lses.append(partial_lse.clone())
                pack(partial_out, lses[-2] if len(lses) > 2 and workspace.rank == 1 else partial_lse)

            gloo.pack = pack_old
            yield subject


def test_lses_of_an_earlier_call_are_found() -> None:
    op = OldLses(baselines=("gloo",), iters=2, warmup=1, turn=2)
    with pytest.raises(DcpError, match=r"bench: gloo must be within .* after it was timed"):
        bench.measure_row(op, 2, op.sizes[0], bench.check(op))


def test_lses_are_shifted_without_being_rounded() -> None:
    _, plain = rank_inputs(0, 64, 96, 1, torch.bfloat16, seed=0)
    lse = plain.clone()
    for before, stamp in ((0, 1), (1, 63), (63, 64), (64, 5 * 64 + 17)):
        stamps.shift_lse(lse, before, stamp)
        assert torch.equal(lse.double(), plain.double() + stamp % 64)
    stamps.shift_lse(lse, 17, 0)
    assert torch.equal(lse, plain)


class Alternating(TinyQuery):
    """Every other call, from the second one on, does nothing: as if two buffers took turns, and one were never filled."""

    @contextmanager
    def opened(self, workspace: Any, *args: Any) -> Iterator[Subject]:
        with super().opened(workspace, *args) as subject:
            right, kept = subject.candidates["gloo"], []

            def candidate() -> torch.Tensor:
                kept.append(right().clone() if len(kept) % 2 == 0 else kept[-1])
                return kept[-1]

            subject.candidates["gloo"] = candidate
            yield subject


def test_what_is_wrong_in_every_other_call_is_found() -> None:
    """A turn has as many of these as of the others: the last call that is timed is a right one."""
    op = Alternating(baselines=("gloo",), iters=2, warmup=1, turn=2)
    with pytest.raises(DcpError, match=r"bench: gloo must be equal .* before it is timed"):
        bench.measure_row(op, 2, op.sizes[0], bench.check(op))


@pytest.mark.parametrize("burst", [1, 2])
def test_zero_copy_buffers_have_the_same_stamp_on_all_ranks(burst: int) -> None:
    """Which of its two buffers a rank gets depends on its peers. In a burst nobody could write the second one anew."""
    op = TinyMerge(zero_copy=True, burst=burst, baselines=())
    buffers = [torch.zeros(2, 4, 16, dtype=torch.bfloat16) for _ in range(2)]
    order = iter([0, 0, 1, 1, 0, 1])
    workspace = SimpleNamespace(
        rank=0, num_ranks=1, num_local_heads=4, device=torch.device("cpu"), config=op.config(1, 2),
        partial_out=lambda num_tokens: buffers[next(order)],
    )  # fmt: skip
    subject = Merge(op, workspace, {}, (2, 4, 16))
    plain = subject._partial_out.clone()
    subject._restamped(subject._ours.take_input())  # as for the check
    for sample in range(1, 6):
        subject.produce(OURS)
        stamp = subject._stamp_of[OURS]
        assert stamp == (sample if burst == 1 else 0)
        assert torch.equal(subject._ours._partial_out, plain * stamps.signs(stamp, 16, torch.bfloat16))
        stamps.stamp_signs(*subject._restamped(subject._partial_out))  # as a baseline's input


def test_the_error_of_a_row_is_the_larger_of_both_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    op, seen = TinyMerge(baselines=(), iters=1), []
    for before, after in ((0.25, 0.5), (0.5, 0.25)):
        times = Times([1.0], [0], [1_000])
        rank = bench.Samples({OURS: times}, [1.0], {OURS: before}, {OURS: after})
        late = rank._replace(last_errors={OURS: 0.125})  # another rank's
        monkeypatch.setattr(bench, "run_ranks", lambda *args, ranks=(late, rank), **options: list(ranks))
        seen.append(bench.measure_row(op, 2, 2, "v3")[0]["max_err_over_bound"])
    assert seen == [0.5, 0.5]


def test_a_candidate_keeps_its_last_result() -> None:
    values = iter("abc")
    kept = Kept(lambda: next(values))
    kept(), kept()
    assert kept.result == "b"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stamps_go_from_any_one_to_any_other(dtype: torch.dtype) -> None:
    for write in (stamps.stamp_signs, stamps.stamp_bytes):
        plain = torch.randn(3, 40).to(dtype)
        seen = []
        for stamp in (1, 2, 3, 255, 0x5A):
            direct, indirect = plain.clone(), plain.clone()
            write(direct, stamp)
            write(indirect, 7)
            write(indirect, 7 ^ stamp)
            assert torch.equal(direct.view(torch.uint8), indirect.view(torch.uint8))
            seen.append(direct)
        for i, one in enumerate(seen):
            assert not any(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for other in [plain, *seen[:i]])
