"""A rank of `bench --device cuda` from its inputs to its times, with the timing and the baselines of GPUs, over tensors of
the CPU: gloo, memory files and the host's clock stand in for what a GPU has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from dcpkernels.cli import baselines, baselines_gather, baselines_gpu, bench, floor_gpu, machine, main, measure_gpu
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.cli.bench_device import Times
from dcpkernels.cli.bench_kv_gather import KvGather
from dcpkernels.cli.bench_op import OURS, BenchOp
from dcpkernels.cli.bench_query_gather import QueryGather
from dcpkernels.testing import run_ranks
from tests.test_baselines_gpu import use_stand_ins

CPU = torch.device("cpu")


class HostEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.at_s - self.at_s)


class HostBench(measure_gpu.GpuBench):
    """Its calls run on the host, at once."""

    expected_calls: int  # of a sample

    def take_turns(self, *args: Any, **options: Any) -> dict[str, Times]:
        assert options["num_calls"] == self.expected_calls
        return super().take_turns(*args, **options)

    @property
    def torch_device(self) -> torch.device:
        return CPU


def use_host() -> None:
    """In a rank process."""
    use_stand_ins(late_s=0)
    cuda = SimpleNamespace(
        Event=HostEvent,
        Stream=lambda: None,
        set_device=lambda idx: None,
        set_stream=lambda stream: None,
        synchronize=lambda: None,
        _sleep=lambda cycles: time.sleep(cycles / 1e9),
    )
    measure_gpu.torch = SimpleNamespace(cuda=cuda)
    measure_gpu.captured = captured
    floor_gpu.Copies = lambda *args: SimpleNamespace(num_bytes=1000)
    floor_gpu.samples_us = lambda num_bytes, *args: [num_bytes / 100] * 20
    bench.for_device = lambda name, mode: HostBench(mode or "eager")
    baselines.opened = lambda *args, mpi_job, device: baselines_gpu.opened(*args, device=device)
    baselines_gather.exchanges = exchanges_on_gpu


def captured(call: Callable[[], object], num_calls: int) -> Callable[[], object]:
    for _ in range(measure_gpu._WARMUP_CALLS):
        call()
    return lambda: [call() for _ in range(num_calls)]


@contextlib.contextmanager
def exchanges_on_gpu(names: tuple[str, ...], group: dist.ProcessGroup, mpi_job: None, device: torch.device) -> Any:
    def checked(make: Callable[..., Any], recv: torch.Tensor, send: torch.Tensor) -> Any:
        assert _get_current_function_mode_stack(), "a gather's baseline must be made with a default device"
        return make(recv, send)

    with baselines_gpu.exchanges(names, group) as makers:
        yield {name: partial(checked, make) for name, make in makers.items()}


def rank_of_row(group: dist.ProcessGroup, op: BenchOp, size: int) -> bench.Samples:
    use_host()
    HostBench.expected_calls = op.num_calls
    return bench._rank(group, op, size, None, None)


MERGE = A2aLseReduce(device="cuda", num_heads=4, head_dim=16, tokens=(3,), baselines=baselines_gpu.BASELINES)
QUERY = QueryGather(device="cuda", num_heads=4, head_dim=16, tokens=(3,), baselines=baselines_gpu.BASELINES)
KV = KvGather(device="cuda", kv_dim=8, rows=(30,), block_size=4, baselines=baselines_gpu.BASELINES)
FEW = {"iters": 4, "warmup": 1, "turn": 2}


@pytest.mark.parametrize(
    ("op", "num_calls"),
    [
        (replace(MERGE, **FEW), 1),
        (replace(MERGE, mode="graph", skew_us=20.0, **FEW), 1),
        (replace(QUERY, **FEW), 1),
        (replace(QUERY, mode="graph", skew_us=20.0, baselines=(), **FEW), 1),
        (replace(QUERY, mode="graph", burst=5, parts=(12, 4), quantise=True, **FEW), 5),
        (replace(KV, skew_us=20.0, **FEW), 1),
    ],
    ids=lambda value: f"{value.NAME} {value.mode} {value.skew_us:g}" if isinstance(value, BenchOp) else "",
)
def test_a_rank(op: BenchOp, num_calls: int) -> None:
    """What is timed is right before and after, and every rank has all samples of every candidate."""
    assert op.num_calls == num_calls
    (size,) = op.sizes
    per_rank = run_ranks(rank_of_row, 2, op, size, mode="process", timeout_s=60)
    for samples in per_rank:
        assert list(samples.times) == list(samples.errors) == list(samples.last_errors) == [OURS, *op.baselines]
        assert all(0 <= error <= op.MAX_ERROR for error in (*samples.errors.values(), *samples.last_errors.values()))
        for times in samples.times.values():
            assert len(times.own_us) == len(times.host_us) == 4 and min(times.host_us) > 0
            assert not times.entered_ns
        assert samples.floor_us == [op.num_bytes(2, size) / 100] * 20
    for name in per_rank[0].times:
        own = list(zip(*(samples.times[name].own_us for samples in per_rank), strict=True))
        assert all((min(sample) == 0) == (op.skew_us > 0) and max(sample) > 0 for sample in own)


def test_a_row_says_what_a_call_keeps_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    op = replace(MERGE, mode="graph", burst=3, **FEW)
    monkeypatch.setattr(bench, "_rank", rank_of_row_without_progress)
    row, _ = bench.measure_row(op, 2, 3, "cuda")
    assert (row["device"], row["mode"], row["calls_per_sample"]) == ("cuda", "graph", 3)
    assert 0 < row["host_us"] and row["entry_spread_us"] is None and set(row["baselines"]) == set(op.baselines)


def rank_of_row_without_progress(
    group: dist.ProcessGroup, op: BenchOp, size: int, mpi_job: None, progress_path: None
) -> bench.Samples:
    return rank_of_row(group, op, size)


def test_a_row_says_which_gpus() -> None:
    host = machine.describe()
    assert machine.one_line(host, "v4").endswith("target cpu (v4)")
    on_gpu = host | {"gpu": "A GPU", "gpus": 8, "nccl": "2.27.5"}
    assert machine.one_line(on_gpu, "cuda").endswith("target cuda (A GPU, 8 there); nccl 2.27.5")


# -- options


def test_baselines_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        baselines_gpu, "opened", lambda *args, device: made.append(device) or contextlib.nullcontext({})
    )
    device = torch.device("cuda", 1)
    with baselines.opened(["nccl"], None, 1, 1, 1, torch.bfloat16, mpi_job=None, device=device) as others:
        assert others == {} and made == [device]
    monkeypatch.setattr(baselines_gpu, "exchanges", lambda names, group: contextlib.nullcontext({"nccl": names}))
    with baselines_gather.exchanges(["nccl"], None, None, device) as makers:
        assert makers == {"nccl": ["nccl"]}
    monkeypatch.setattr(baselines_gpu, "require", lambda names: {"nccl": f"of {len(names)}"})
    assert baselines.require(["nccl", "symm_mem"]) == {"nccl": "of 2"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ("nccl",)),
        (["--baselines", "none"], ()),
        (["--baselines", "nccl-exchange,symm_mem"], ("nccl-exchange", "symm_mem")),
    ],
)
def test_which_baselines(given: list[str], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(bench, "run", lambda ops, outputs: taken.extend(ops) or 0)
    assert main(["bench", "a2a_lse_reduce", "--device", "cuda", "--mode", "eager,graph", *given]) == 0
    assert [(op.mode, op.baselines, op.num_calls) for op in taken] == [("eager", expected, 1), ("graph", expected, 50)]
    taken.clear()
    assert main(["bench", "query_gather", *given]) == 0
    assert taken[0].baselines == (expected if given else ("gloo",)) and taken[0].num_calls == 1


def test_bytes_between_gpus() -> None:
    """To every other GPU, where a CPU's ranks share one buffer."""
    for num_ranks, copies in ((1, 1), (2, 1), (4, 3)):
        for op in (QUERY, KV):
            assert op.num_bytes(num_ranks, 30) == copies * replace(op, device="cpu").num_bytes(num_ranks, 30)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["a2a_lse_reduce", "--baselines", "gloo"], "nccl, nccl-exchange, symm_mem, symm_mem-exchange with device cuda (got gloo)"),
        (["a2a_lse_reduce", "--zero-copy"], "zero_copy must come with device cpu (got cuda)"),
        (["a2a_lse_reduce", "--mode", "graph", "--skew-us", "5", "--burst", "4"],
         "calls of a sample must be 1 with skew_us=5 (got 4)"),
        (["kv_gather", "--mode", "graph"], "kv_gather must be timed with mode eager (got graph)"),
        (["a2a_lse_reduce", "--mode", "captured"], "mode must be of eager, graph with device cuda (got captured)"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_on_a_gpu(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *args, "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpkernels: error: bench: ") and text in line


def test_the_release_is_timed_where_nothing_else_is_between_calls() -> None:
    op = replace(QUERY, mode="graph")
    assert op.releases and "with its release" in op.describe()
    assert replace(op, skew_us=5.0).releases  # the calls before a capture
    assert not QUERY.releases and "release" not in QUERY.describe()
