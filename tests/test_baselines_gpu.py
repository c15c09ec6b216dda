"""The baselines of GPUs on a CPU: gloo in place of NCCL, memory files in place of torch's symmetric memory. What a merge
or a gather comes out as, and that nobody's buffer is written while somebody still reads it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dcpkernels import reference
from dcpkernels.cli import baselines, baselines_gpu
from dcpkernels.errors import DcpUnsupported
from dcpkernels.testing import error_bound, max_err_over_bound, merge_inputs, run_ranks
from tests.cuda.fake_symm_mem import FakeSymmMem

CPU = torch.device("cpu")
LATE_S = 0.03
MERGES = ("nccl", "symm_mem")


class SymmMem(FakeSymmMem):
    """With what the baselines use. The last rank comes back late from a barrier: whoever does not wait for it overtakes."""

    late_s = LATE_S

    def empty(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Out of a pool: not at the beginning of an allocation, where `get_buffer` begins."""
        self.pooled = 64
        return self.empty_strided_p2p((torch.Size(size).numel(),), (1,), dtype, device).view(size)

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        handle = super().rendezvous(tensor, group)
        block, mapped, _ = handle.keeps

        def get_buffer(rank: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            return torch.frombuffer(mapped.get(rank, block), dtype=dtype)[: sizes.numel()].view(sizes)

        def barrier() -> None:
            dist.barrier(group)
            time.sleep(self.late_s * (handle.rank == handle.world_size - 1))

        handle.get_buffer, handle.barrier = get_buffer, barrier
        return handle


def use_stand_ins(late_s: float = LATE_S) -> None:
    """In a rank process."""
    symm_mem = SymmMem()
    symm_mem.late_s = late_s
    baselines_gpu._symmetric_memory = lambda: symm_mem
    baselines_gpu._BACKEND = "gloo"


# -- merges


def worst_error(
    name: str, baseline: Any, rank: int, num_ranks: int, shape: tuple[int, int, int], call_idx: int
) -> float:
    num_tokens, num_heads, head_dim = shape
    kind = ("spread", "dominant")[call_idx % 2]
    outs, lses = merge_inputs(num_ranks, *shape, torch.bfloat16, kind=kind, seed=call_idx)
    num_local = num_heads // num_ranks
    heads = slice(rank * num_local, (rank + 1) * num_local)
    time.sleep(LATE_S * (rank == 0))  # the first rank packs late: who loads before a barrier loads what was there
    merged = torch.empty(num_tokens, num_local, head_dim, dtype=torch.bfloat16)
    baseline(outs[rank], lses[rank], merged)
    outs, lses = outs[:, :, heads], lses[:, :, heads]
    exact, _ = reference.a2a_lse_reduce(outs, lses, lse_base="e")
    bound = error_bound(outs, lses, lse_base="e", out_dtype=torch.bfloat16)
    return max_err_over_bound(merged, exact, bound)


def merge_rank(group: dist.ProcessGroup, shape: tuple[int, int, int]) -> dict[str, list[float]]:
    use_stand_ins()
    rank, num_ranks = group.rank(), group.size()
    with baselines_gpu.opened(MERGES, group, *shape, torch.bfloat16, device=CPU) as others:
        return {
            name: [worst_error(name, other, rank, num_ranks, shape, call_idx) for call_idx in range(5)]
            for name, other in others.items()
        }


@pytest.mark.parametrize(("num_ranks", "shape"), [(1, (2, 3, 8)), (2, (5, 6, 16)), (3, (1, 6, 7))])
def test_merges_are_within_the_bound(num_ranks: int, shape: tuple[int, int, int]) -> None:
    for errors in run_ranks(merge_rank, num_ranks, shape, mode="process", timeout_s=60):
        assert list(errors) == list(MERGES)
        assert all(0 <= error <= 1 for own in errors.values() for error in own), errors


def exchange_rank(group: dist.ProcessGroup) -> dict[str, list[bool]]:
    """The bare exchange: what is in `packed` arrives, again and again."""
    use_stand_ins()
    rank, num_ranks, right = group.rank(), group.size(), {}
    names = [f"{name}-exchange" for name in MERGES]
    with baselines_gpu.opened(names, group, 1, num_ranks, 8, torch.float32, device=CPU) as others:
        for name, other in others.items():
            right[name] = []
            for turn in range(3):
                dist.barrier(group)
                other.packed.copy_(torch.tensor([[100 + 10 * turn + rank], [200 + 10 * turn + rank]]))
                other.exchange()
                expected = torch.tensor([[100 * (rank + 1) + 10 * turn + peer] for peer in range(num_ranks)])
                right[name].append(torch.equal(other.received, expected.to(torch.uint8).expand_as(other.received)))
                other.merge(torch.empty(1, 1, 8))  # of what was received, so that it can be checked
                dist.barrier(group)
    return right


def test_a_bare_exchange_is_of_what_is_packed() -> None:
    for right in run_ranks(exchange_rank, 2, mode="process", timeout_s=60):
        assert list(right.values()) == [[True] * 3] * 2, right


# -- gathers


def gather_rank(group: dist.ProcessGroup, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, list[bool]]:
    use_stand_ins()
    rank, num_ranks, right = group.rank(), group.size(), {}
    send = torch.empty(shape, dtype=dtype)
    recv = torch.empty(num_ranks * shape[0], *shape[1:], dtype=dtype)

    def part(rank: int, turn: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * turn + rank)
        return torch.randint(256, (send.numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator)

    with baselines_gpu.exchanges(MERGES, group) as makers:
        for name, make in makers.items():
            exchange, right[name] = make(recv, send), []
            for turn in range(4):
                time.sleep(LATE_S * (rank == 0))
                send.view(torch.uint8).view(-1).copy_(part(rank, turn))
                exchange()
                expected = torch.cat([part(peer, turn) for peer in range(num_ranks)])
                right[name].append(torch.equal(recv.view(torch.uint8).view(-1), expected))
    return right


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "shape"),
    [(2, torch.int64, (3, 2, 5)), (3, torch.int16, (2, 3)), (2, torch.float8_e4m3fn, (1, 7)), (1, torch.int32, (4, 4))],
)
def test_gathers_are_equal_in_every_byte(num_ranks: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for right in run_ranks(gather_rank, num_ranks, dtype, shape, mode="process", timeout_s=60):
        assert right == {name: [True] * 4 for name in MERGES}


# -- what is handed over


def bytes_rank(group: dist.ProcessGroup) -> list[Any]:
    """What NCCL is given: bytes, of which it has a type, as it has none of 16 bits."""
    seen = []
    baselines_gpu.all_gather = lambda recv, send, group: seen.append((recv.dtype, send.dtype, recv.shape, send.shape))
    use_stand_ins()
    with baselines_gpu.exchanges(["nccl"], group) as makers:
        makers["nccl"](torch.empty(4, 3, dtype=torch.int16), torch.empty(4, 3, dtype=torch.int16))()
    return seen


def test_nccl_gathers_bytes() -> None:
    ((seen,),) = run_ranks(bytes_rank, 1, mode="process", timeout_s=60)
    assert seen == (torch.uint8, torch.uint8, (4, 6), (4, 6))


class _Device:
    """In place of a torch.device as the default one: whether it is, right now."""

    is_default = False

    def __enter__(self) -> None:
        self.is_default = True

    def __exit__(self, *_: object) -> None:
        self.is_default = False


def test_tensors_are_made_on_the_device_and_calls_are_timed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default device would cost each call of torch some microseconds."""
    device, seen = _Device(), []
    for baseline in ("FewLaunches", "AlternatingAllToAll"):
        monkeypatch.setattr(baselines_gpu, baseline, lambda *args: seen.append(device.is_default))
    monkeypatch.setattr(baselines_gpu, "_nccl_group", lambda names, group: contextlib.nullcontext())
    with baselines_gpu.opened(MERGES, None, 1, 1, 8, torch.float32, device=device):
        assert seen == [True, True] and not device.is_default


class _Factories(TorchFunctionMode):
    """What is asked to make tensors, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty, torch.zeros):
            self.devices.append((kwargs or {}).get("device"))
        return func(*args, **(kwargs or {}))


def test_a_baseline_names_no_device() -> None:
    """So that all its tensors are on the default one."""

    class Group:
        rank, size = (lambda self: 0), (lambda self: 2)

    with _Factories() as factories:
        baselines_gpu.FewLaunches(Group(), 2, 4, 8, torch.bfloat16)
    assert len(factories.devices) == 4 and not any(factories.devices)


# -- refusals


def test_what_a_baseline_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert baselines_gpu.require([]) == baselines_gpu.require(["symm_mem", "symm_mem-exchange"]) == {}
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for name in ("nccl", "nccl-exchange"):
        with pytest.raises(DcpUnsupported, match="baseline nccl must come with a torch that has it"):
            baselines_gpu.require([name])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert baselines_gpu.require(["symm_mem", "nccl"]) == {"nccl": "2.27.5"}


def refused_rank(group: dist.ProcessGroup) -> str:
    use_stand_ins()
    baselines_gpu._symmetric_memory().faults.add("rendezvous, before it")
    with pytest.raises(DcpUnsupported) as raised, baselines_gpu.exchanges(["symm_mem"], group) as makers:
        makers["symm_mem"](torch.empty(2), torch.empty(2))
    return str(raised.value)


def test_symmetric_memory_that_cannot_be_had() -> None:
    (text,) = run_ranks(refused_rank, 1, mode="process", timeout_s=60)
    assert text.startswith(
        "bench: baseline symm_mem must have memory that all ranks reach (CUDA driver error: rendezvous"
    )


def test_names() -> None:
    assert baselines_gpu.BASELINES == ("nccl", "nccl-exchange", "symm_mem", "symm_mem-exchange")
    assert [baselines.is_exchange(name) for name in baselines_gpu.BASELINES] == [False, True, False, True]


def test_torch_has_what_symmetric_memory_is_made_of() -> None:
    """The real module: names, not more, as there is no such memory on a CPU."""
    symm_mem = baselines_gpu._symmetric_memory()
    assert callable(symm_mem._SymmetricMemory.empty_strided_p2p) and callable(symm_mem.rendezvous)
    assert callable(symm_mem._SymmetricMemory.get_buffer) and callable(symm_mem._SymmetricMemory.barrier)
