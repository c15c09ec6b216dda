"""How `bench --device cuda` times: order of operations and arithmetic, with a stand-in for torch.cuda."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from dcpkernels.cli import floor_gpu, measure_gpu
from dcpkernels.cli.bench_device import Times, for_device
from dcpkernels.cli.measure_gpu import GpuBench
from dcpkernels.cli.skew import Skew
from dcpkernels.errors import DcpUnsupported
from tests.fake_gpu.torch_cuda import FakeCuda

HEAD_START = "sleep 200"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for module in (measure_gpu, floor_gpu):
        monkeypatch.setattr(module, "torch", fake.torch_with())
    monkeypatch.setattr(measure_gpu.gc, "collect", lambda: None)  # a quarter of a second with all that tests import
    return fake


def opened(cuda: FakeCuda, mode: str = "eager", rank: int = 1, num_ranks: int = 4) -> GpuBench:
    device = for_device("cuda", mode)
    device.open_rank(rank, num_ranks)
    cuda.take_log()
    return device


def times_of(cuda: FakeCuda, device: GpuBench, candidates: dict[str, Any], **options: Any) -> dict[str, Times]:
    return device.take_turns(
        candidates,
        lambda: cuda.work("barrier", 5.0),
        produce=lambda name: cuda.work(f"produce {name}", 11.0),
        **{"iters": 2, "warmup": 1, "num_calls": 1, "turn": 1, "skew_us": 0.0, **options},
    )


def calls(cuda: FakeCuda, **us: float) -> dict[str, Callable[[], None]]:
    """Ops that take so long."""
    return {name: lambda name=name, each=each: cuda.work(name, each) for name, each in us.items()}


# -- a rank's place


def test_a_rank_has_a_gpu_and_a_stream_of_its_own(cuda: FakeCuda) -> None:
    device = for_device("cuda")
    device.open_rank(2, 4)
    assert (cuda.device, str(device.torch_device), device.mode) == (2, "cuda:2", "eager")
    assert cuda.current_stream().name == "stream 1"
    per_sample = {
        (mode, skew): for_device("cuda", mode).calls_per_sample(skew)
        for mode in ("eager", "graph")
        for skew in (0.0, 5.0)
    }
    assert per_sample == {("eager", 0.0): 1, ("eager", 5.0): 1, ("graph", 0.0): 50, ("graph", 5.0): 1}


def test_what_a_machine_must_have(cuda: FakeCuda) -> None:
    device = for_device("cuda")
    with pytest.raises(DcpUnsupported, match=r"^bench: there must be a GPU for each of the 5 ranks \(found 4\)$"):
        device.require(None, [2, 5])
    with pytest.raises(DcpUnsupported, match="isa must come with device cpu"):
        device.require("v4", [2])
    with pytest.raises(DcpUnsupported, match="mode must be of eager, graph with device cuda"):
        for_device("cuda", "captured")
    assert device.describe() == {"gpu": "a GPU, another GPU", "gpus": 4}


def test_without_a_gpu_it_is_one_clean_error() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DcpUnsupported, match=r"a GPU for each of the 1 ranks \(found 0\)"):
        for_device("cuda").require(None, [1])


# -- samples


def test_a_sample_is_between_events_behind_a_barrier_of_the_device(cuda: FakeCuda) -> None:
    device = opened(cuda)
    times = times_of(cuda, device, calls(cuda, ours=7.0, nccl=20.0), num_calls=3)
    sample = {
        name: ["barrier", f"produce {name}", "barrier", "event", name, name, name, "event"] for name in ("ours", "nccl")
    }
    backward, forward = sample["nccl"] + sample["ours"], sample["ours"] + sample["nccl"]
    assert cuda.take_log() == [*backward, *forward, *backward, "synchronize"]
    assert times["ours"].own_us == pytest.approx([7.0, 7.0]) and times["nccl"].own_us == pytest.approx([20.0, 20.0])


def test_what_a_call_keeps_the_host_is_apart(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_ns = 0

    def call() -> None:
        nonlocal clock_ns
        assert not gc.isenabled()
        clock_ns += 9_000
        cuda.work("ours", 2.0)

    monkeypatch.setattr(measure_gpu.time, "perf_counter_ns", lambda: clock_ns)
    (times,) = times_of(cuda, opened(cuda), {"ours": call}, num_calls=4).values()
    assert gc.isenabled()
    assert times.own_us == pytest.approx([2.0, 2.0]) and times.host_us == pytest.approx([9.0, 9.0])
    # In a graph it is a launch that keeps the host, and all its calls share it.
    monkeypatch.setattr(measure_gpu, "captured", lambda call, num_calls: call)
    (times,) = times_of(cuda, opened(cuda, "graph"), {"ours": call}, num_calls=4).values()
    assert times.own_us == pytest.approx([0.5, 0.5]) and times.host_us == pytest.approx([2.25, 2.25])
    assert not times.entered_ns and not times.returned_ns


def test_the_first_half_of_a_turn_does_not_count(cuda: FakeCuda) -> None:
    us = iter(range(100, 200))
    (times,) = times_of(
        cuda, opened(cuda), {"ours": lambda: cuda.work("ours", next(us))}, iters=3, warmup=2, turn=4
    ).values()
    assert times.own_us == pytest.approx([110, 111, 114])


def test_the_slowest_rank_counts(cuda: FakeCuda) -> None:
    device = for_device("cuda")
    assert device.collective_us([Times([1.0, 5.0]), Times([2.0, 4.0])], num_calls=3, skew_us=0.0) == [2.0, 5.0]


# -- graphs


def test_a_graph_is_captured_before_and_replayed_for_each_sample(cuda: FakeCuda) -> None:
    device = opened(cuda, "graph")
    times = times_of(cuda, device, calls(cuda, ours=7.0, nccl=20.0), num_calls=5)
    log = cuda.take_log()
    setup = [item for name in ("ours", "nccl") for item in [name, name, name, "stream.synchronize", "capture"]]
    assert log[: len(setup)] == setup
    sample = ["barrier", "produce nccl", "barrier", "event", "replay", *["nccl"] * 5, "event"]
    assert log[len(setup) : len(setup) + len(sample)] == sample
    assert log.count("replay") == 6 and log.count("ours") == 3 + 3 * 5
    assert times["ours"].own_us == pytest.approx([7.0, 7.0]) and times["nccl"].own_us == pytest.approx([20.0, 20.0])


def test_a_capture_needs_a_stream_of_its_own(cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError):  # the stand-in's, as the driver would refuse it
        measure_gpu.captured(lambda: None, 2)


# -- skew


def test_with_skew_the_last_rank_in_counts(cuda: FakeCuda) -> None:
    """Ranks one after the other: in each sample one of them is last, and its time is the op's; the others have none."""
    num_ranks, skew_us = 4, 30.0
    per_rank = []
    for rank in range(num_ranks):
        device = opened(cuda, rank=rank, num_ranks=num_ranks)
        times = times_of(cuda, device, calls(cuda, ours=7.0 + rank), iters=9, skew_us=skew_us)
        per_rank.append(times["ours"])
        log = cuda.take_log()
        assert log.count(HEAD_START) == 10
        first = log.index("barrier")
        delay_us = Skew(rank, num_ranks, skew_us).delay_us(0)
        own = [f"sleep {delay_us:g}"] if delay_us else []
        expected = ["barrier", "produce ours", HEAD_START, "barrier", *own, "event", "ours", "event"]
        assert log[first : first + len(expected)] == expected
    last = [
        next(r for r in range(num_ranks) if Skew(r, num_ranks, skew_us).delay_us(i) == skew_us) for i in range(1, 10)
    ]
    assert len(set(last)) > 1
    for rank, times in enumerate(per_rank):
        assert times.own_us == pytest.approx([7.0 + rank if rank == late else 0.0 for late in last])
    together = for_device("cuda").collective_us(per_rank, num_calls=1, skew_us=skew_us)
    assert together == pytest.approx([7.0 + late for late in last])


@pytest.mark.parametrize("skew_us", [0.7, 5.0, 50.0])  # 0.7 * 6 / 6 is less than 0.7
def test_one_rank_is_last_whatever_the_rounding(cuda: FakeCuda, skew_us: float) -> None:
    for num_ranks in (1, 2, 3, 7, 8):
        own = [
            times_of(cuda, opened(cuda, rank=r, num_ranks=num_ranks), calls(cuda, ours=7.0), skew_us=skew_us)[
                "ours"
            ].own_us
            for r in range(num_ranks)
        ]
        assert [sorted(sample) for sample in zip(*own, strict=True)] == [
            pytest.approx([0.0] * (num_ranks - 1) + [7.0])
        ] * 2


def test_a_delay_is_measured_without_its_launch(cuda: FakeCuda) -> None:
    delay = measure_gpu.Delay(measure_gpu.Stopwatch())
    cuda.take_log()
    delay(50.0)
    assert cuda.take_log() == ["sleep 50"]


def test_skew_that_cannot_be(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DcpUnsupported, match=r"calls of a sample must be 1 with skew_us=5 \(got 50\)"):
        for_device("cuda", "graph").require_samples(50, 5.0)
    for num_calls, skew_us in ((50, 0.0), (1, 5.0)):
        for_device("cuda", "graph").require_samples(num_calls, skew_us)
    monkeypatch.setattr(FakeCuda, "_sleep", None)
    with pytest.raises(DcpUnsupported, match="skew_us must be 0 with a torch that has no cuda._sleep"):
        times_of(cuda, opened(cuda), calls(cuda, ours=7.0), skew_us=5.0)


def test_torch_has_what_a_delay_is_made_of() -> None:
    import torch

    assert callable(torch.cuda._sleep)


# -- the floor


def test_the_floor_is_copies_to_all_other_gpus_at_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_gpu, "BLOCK_BYTES", 3_000)
    device = opened(cuda, rank=2)
    samples = device.floor_samples_us(600, lambda: cuda.work("barrier", 5.0))
    log = cuda.take_log()
    assert [item[1] for item in log if item[0] == "allocate"] == ["cuda:2", "cuda:3", "cuda:0", "cuda:1"]
    forks = [step for i, peer in enumerate((3, 0, 1), start=2) for step in
             (f"stream {i} waits for stream 1", f"1000 bytes to cuda:{peer} on stream {i}")]  # fmt: skip
    joins = [f"stream 1 waits for stream {i}" for i in (2, 3, 4)]
    assert log[4:16] == ["barrier", "event", *forks, *joins, "event"]
    # 3,000 bytes took 30 us, so 600 take 6.
    assert len(samples) == 20 and samples == pytest.approx([6.0] * 20)
    assert log.count("barrier") == 22


def test_the_floor_of_one_gpu_is_a_copy_within_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_gpu, "BLOCK_BYTES", 1_000)
    device = opened(cuda, rank=0, num_ranks=1)
    assert device.floor_samples_us(500, lambda: None) == pytest.approx([5.0] * 20)
    assert "1000 bytes to cuda:0 on stream 2" in cuda.take_log()


def test_the_floor_of_nothing_copies_nothing(cuda: FakeCuda) -> None:
    device = opened(cuda)
    assert device.floor_samples_us(0, lambda: None) == [0.0] * 20 and cuda.take_log() == []


def test_the_floor_is_the_slowest_ranks_in_the_best_round() -> None:
    assert for_device("cuda").floor_us([[3.0, 9.0, 5.0], [8.0, 2.0, 6.0]]) == 6.0
