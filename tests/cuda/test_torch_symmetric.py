"""TorchSymmetricHeap, over a stand-in for torch's module (fake_symm_mem.py) on the CPU: what the ranks see, what is
left afterwards, and that all ranks agree about a refusal. What the stand-in cannot have is marked gpu."""

import ctypes
import gc
import os
import time
from pathlib import Path

import pytest
import torch

from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpTimeout, DcpUnsupported
from dcpkernels.heap import torch_symmetric
from dcpkernels.heap.group import as_group
from dcpkernels.heap.torch_symmetric import TorchSymmetricHeap
from dcpkernels.testing import run_ranks
from tests.cuda.fake_symm_mem import MULTICAST, NAME, FakeSymmMem

NBYTES, CONTROL = 3 * 4096 + 100, 520
RANKS = pytest.mark.parametrize("num_ranks", [2, 4])


def make(group, symm_mem, nbytes=NBYTES, *, device=0, control_nbytes=CONTROL, init=lambda address: None, **arguments):
    arguments = {"payload": {}, "timeout_s": 20.0, **arguments}
    return TorchSymmetricHeap.create(
        as_group(group), nbytes, device=device, control_nbytes=control_nbytes, init=init, symm_mem=symm_mem, **arguments
    )


def meet(group):
    return as_group(group).all_gather_object(None, timeout_s=20.0)


def outcome(call):
    """(class, text, ranks) of what `call` raises; fails when it raises nothing."""
    try:
        call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    raise AssertionError("must raise")


def resources():
    """What the stand-in's memory is known by to the operating system: mappings, and open files."""
    files = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            files += NAME in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass
    return Path("/proc/self/maps").read_text().count(f"memfd:{NAME}"), files


def same_everywhere(results):
    assert all(result == results[0] for result in results), results
    return results[0]


# ---- what the ranks see


def _see_each_other(group):
    rank, num_ranks = group.rank(), group.size()
    symm_mem = FakeSymmMem(multicast=True)
    seen = []

    def init(address):
        assert ctypes.string_at(address, CONTROL) == bytes(CONTROL)
        (region,) = symm_mem.allocations()
        assert address not in range(region, region + NBYTES)  # a device's could not be written from here
        ctypes.memset(address, 17 * rank + 1, CONTROL)

    def check_links(heap):  # everybody has filled, nobody has returned
        seen.extend(ctypes.string_at(base, NBYTES) for base in heap.bases)

    heap = make(group, symm_mem, device=3, init=init, check_links=check_links)
    assert symm_mem.asked == [((NBYTES,), (1,), torch.uint8, torch.device("cuda", 3))]
    assert seen == [bytes([17 * r + 1]) * CONTROL + bytes(NBYTES - CONTROL) for r in range(num_ranks)]
    assert (heap.rank, heap.num_ranks, heap.nbytes) == (rank, num_ranks, NBYTES)
    assert list((ctypes.c_uint64 * num_ranks).from_address(heap.bases_table)) == heap.bases
    assert (heap.multicast, heap.multicast_reason) == (MULTICAST + rank, "")
    assert ctypes.string_at(heap.host_control, CONTROL) == bytes(CONTROL)
    assert heap.host_control not in range(heap.bases[rank], heap.bases[rank] + NBYTES)
    assert heap.socket_fds == [-1] * num_ranks and heap.lost_peers() == ()
    meet(group)
    for base in heap.bases:
        ctypes.memset(base + 1000 + rank, 100 + rank, 1)
        ctypes.memset(base + NBYTES - 1 - rank, 200 + rank, 1)
    meet(group)
    assert heap.read(1000, num_ranks) == bytes(100 + r for r in range(num_ranks))
    assert heap.read(NBYTES - num_ranks, num_ranks) == bytes(200 + r for r in reversed(range(num_ranks)))
    assert len(heap.read(0, NBYTES)) == NBYTES and heap.read(NBYTES, 0) == b""
    meet(group)
    bases = heap.bases
    heap.close(timeout_s=10)
    assert (bases, heap.bases_table, heap.multicast, heap.host_control) == ([], 0, 0, 0)
    heap.close(timeout_s=10)  # again
    assert heap.socket_fds == [-1] * num_ranks and heap.lost_peers() == () and resources() == (0, 0)


@RANKS
def test_all_ranks_see_all_bytes(num_ranks):
    run_ranks(_see_each_other, num_ranks, mode="process")


def _own_memory(group):
    heap = make(group, FakeSymmMem())
    memory = heap.own_memory(4096, 64)
    interface = memory.__cuda_array_interface__
    assert interface == {
        "shape": (64,),
        "typestr": "|u1",
        "data": (heap.bases[group.rank()] + 4096, False),
        "version": 3,
    }
    for offset, nbytes in ((-1, 4), (NBYTES, 1), (0, NBYTES + 1), (8, -4)):
        for call in (heap.own_memory, heap.read):
            with pytest.raises(DcpInvalidArgument, match="must be a part of the region's"):
                call(offset, nbytes)
    meet(group)
    peer = (group.rank() + 1) % group.size()
    ctypes.memset(heap.bases[peer] + 4096, group.rank() + 7, 64)
    meet(group)
    heap.close(timeout_s=0)
    del heap
    gc.collect()
    assert resources() == (
        1,
        2,
    )  # the own allocation, and none of the peers' (a file, and mmap's copy of its descriptor)
    assert ctypes.string_at(interface["data"][0], 64) == bytes([(group.rank() - 1) % group.size() + 7]) * 64
    del memory
    assert resources() == (0, 0)


@RANKS
def test_own_memory_stays_after_close(num_ranks):
    run_ranks(_own_memory, num_ranks, mode="process")


def _closed(group):
    heap = make(group, FakeSymmMem())
    heap.close(timeout_s=0)
    for call in (heap.own_memory, heap.read):
        with pytest.raises(DcpError, match=r"the heap must be open \(it was closed\)"):
            call(0, 1)


def test_a_closed_heap_gives_nothing():
    run_ranks(_closed, 1, mode="process")


# ---- multicast, tables


def _features(group, case):
    rank, faults, arguments = group.rank(), [], {}
    has = case not in ("none", "one lacks") or (case == "one lacks" and rank != 1)
    if case == "one refuses":
        arguments["multicast"] = rank != 2
    if case == "no table":
        faults = ["no table"]
    heap = make(group, FakeSymmMem(*faults, multicast=has), **arguments)
    assert list((ctypes.c_uint64 * group.size()).from_address(heap.bases_table)) == heap.bases
    result = heap.multicast - rank if heap.multicast else 0, heap.multicast_reason
    heap.close(timeout_s=0)
    return result


@pytest.mark.parametrize(
    ("case", "multicast", "reason"),
    [
        ("none", 0, "torch found none on ranks 0, 1, 2: all ranks must be on one NVSwitch, with a driver that has it"),
        ("one lacks", 0, "torch found none on rank 1: all ranks must be on one NVSwitch, with a driver that has it"),
        ("one refuses", 0, "not asked for on rank 2"),
        ("no table", MULTICAST, ""),
    ],
)
def test_multicast_is_everybodys_or_nobodys(case, multicast, reason):
    assert same_everywhere(run_ranks(_features, 3, case, mode="process")) == (multicast, reason)


# ---- what is left


def _cycles(group):
    before = resources()
    symm_mem = FakeSymmMem()
    for attempt in range(50):
        if attempt % 2:
            outcome(lambda: make(group, symm_mem, init=lambda address: 1 / 0))
        else:
            make(group, symm_mem).close(timeout_s=10)
        assert resources() == before, attempt
    heap = make(group, symm_mem)
    del heap  # without a close
    gc.collect()
    return before, resources()


def test_fifty_tries_leave_nothing():
    for before, after in run_ranks(_cycles, 2, mode="process"):
        assert before == after == (0, 0)


def _a_broken_device(group):
    heap = make(group, FakeSymmMem())
    torch_symmetric._idle = lambda region: False
    heap.close(timeout_s=0)
    assert heap.bases == []
    del heap
    gc.collect()
    return resources()


def test_memory_is_kept_when_the_device_cannot_say_that_it_is_free():
    assert run_ranks(_a_broken_device, 2, mode="process") == [(2, 3)] * 2


def _a_late_peer(group):
    heap = make(group, FakeSymmMem())
    if group.rank() == 0:
        heap.close(timeout_s=0)
    meet(group)
    if group.rank() == 1:
        ctypes.memset(heap.bases[0], 1, NBYTES)
        heap.close(timeout_s=0)


def test_a_peer_may_still_store_to_what_has_been_closed():
    run_ranks(_a_late_peer, 2, mode="process")


# ---- refusals are the same on every rank, and leave nothing

DEVICE_TEXT = "RuntimeError: CUDA driver error"
ALLOCATE = f"torch must allocate {NBYTES} bytes of symmetric memory on cuda:0, {CONTROL} of the host"
REMEDY = "free memory there, or make the workspace smaller"
# case -> what is wrong on rank 1; class, beginning of the text, ranks
REFUSALS = {
    "get_backend": (DcpError, f"check failed on rank 1: {DEVICE_TEXT}", (1,)),
    "backend": (
        DcpUnsupported,
        "check failed on rank 1: torch's symmetric memory on cuda:0 must be of the backend CUDA (got NVSHMEM; symm_mem",
        (1,),
    ),
    "no bytes": (DcpInvalidArgument, "check failed on rank 1: nbytes must be positive (got 0)", (1,)),
    "control": (
        DcpInvalidArgument,
        f"check failed on rank 1: control_nbytes must be in 1 .. nbytes={NBYTES} (got {NBYTES + 1})",
        (1,),
    ),
    "payload": (DcpUnsupported, "all ranks must agree on num_heads (ranks 0, 2: 96; rank 1: 64)", (1,)),
    "nbytes": (DcpUnsupported, f"all ranks must agree on nbytes (ranks 0, 2: {NBYTES}; rank 1: {NBYTES + 1})", (1,)),
    "torch": (
        DcpUnsupported,
        f"all ranks must agree on torch (ranks 0, 2: {torch.__version__!r}; rank 1: '2.9.0')",
        (1,),
    ),
    "empty_strided_p2p": (
        DcpDeviceError,
        f"allocate failed on rank 1: {ALLOCATE} ({DEVICE_TEXT}: empty_strided_p2p is not what it was); {REMEDY}",
        (1,),
    ),
    # The others hear of it from the store, after a while; still it is rank 1's own error that all raise.
    "rendezvous, before it": (
        DcpDeviceError,
        (
            f"rendezvous failed on rank 1: torch must map the memory of all 3 ranks ({DEVICE_TEXT}: rendezvous, before "
            "it is not what it was); ranks need a GPU each, NVLink or PCIe peer access between all of them"
        ),
        (0, 1, 2),
    ),
    "rendezvous, at its end": (DcpDeviceError, "rendezvous failed on rank 1: torch must map the memory of all 3", (1,)),
    "an address less": (
        DcpUnsupported,
        (
            "rendezvous failed on rank 1: every rank's region must be where kernels can load and store (torch has no "
            "address for rank 2)"
        ),
        (2,),
    ),
    "no address of rank 1": (DcpUnsupported, "rendezvous failed on rank 1: every rank's region must be where", (1,)),
    "another rank": (
        DcpUnsupported,
        "rendezvous failed on rank 1: torch's rendezvous must be one of rank 1 of 3 (got rank 2 of 3)",
        (1,),
    ),
    "no such tensor": (
        DcpUnsupported,
        "rendezvous failed on rank 1: torch must know the tensor as symmetric",
        (0, 1, 2),
    ),
    "pooled": (
        DcpUnsupported,
        "rendezvous failed on rank 0: the region must be where its allocation starts (got buffer_ptrs[0]=0x",
        (0, 1, 2),
    ),
    # A fake region that cannot be written: what a device's error of earlier work looks like.
    "write": (
        DcpDeviceError,
        "fill failed on rank 1: torch must write the region on cuda:0 (RuntimeError: ",
        (1,),
    ),
    "init": (DcpError, "fill failed on rank 1: OSError: [Errno 5] disk on fire", (1,)),
    "links": (DcpUnsupported, "check links failed on rank 1: ranks 0 and 1 must have NVLink", (0, 1)),
}


def _refuse(group, case):
    rank, nbytes, faults, arguments, payload, kept = group.rank(), NBYTES, [], {}, {"num_heads": 96}, []
    version = torch.__version__

    def fail(error):
        def raise_it(argument):
            kept.append(argument)
            raise error

        return raise_it

    if case == "pooled":
        arguments = {"symm_mem": FakeSymmMem(pooled=4096)}
    elif rank == 1:
        match case:
            case "no bytes":
                nbytes = 0
            case "control":
                arguments["control_nbytes"] = NBYTES + 1
            case "payload":
                payload["num_heads"] = 64
            case "nbytes":
                nbytes += 1
            case "torch":
                torch.__version__ = "2.9.0"
            case "init":
                arguments["init"] = fail(OSError(5, "disk on fire"))
            case "links":
                arguments["check_links"] = fail(DcpUnsupported("ranks 0 and 1 must have NVLink", ranks=(0, 1)))
            case _:
                faults = [case]
    errors = []
    try:
        make(group, arguments.pop("symm_mem", None) or FakeSymmMem(*faults), nbytes, payload=payload, **arguments)
    except DcpError as error:
        errors.append(error)  # kept, with its tracebacks: nothing may hang on those
    assert resources() == (0, 0), "left behind"
    assert all(heap.bases == [] for heap in kept if isinstance(heap, TorchSymmetricHeap))
    torch.__version__ = version
    meet(group)  # the group is still in step,
    make(group, FakeSymmMem()).close(timeout_s=10)  # and can build a heap
    (error,) = errors
    return type(error), str(error), error.ranks


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_the_same_on_every_rank(case):
    results = run_ranks(_refuse, 3, case, mode="process")
    if case == "pooled":  # ends in addresses
        results = [(cls, text.partition("=0x")[0] + "=0x", ranks) for cls, text, ranks in results]
    found, (cls, text, ranks) = same_everywhere(results), REFUSALS[case]
    assert found[0] is cls and found[1].startswith(f"workspace: {text}") and found[2] == ranks, found


def _a_late_rank(group):
    if group.rank() == 1:
        time.sleep(2)
        return None
    return outcome(lambda: make(group, FakeSymmMem(), timeout_s=0.5))


def test_a_rank_that_does_not_come_is_a_timeout():
    cls, text, _ = run_ranks(_a_late_rank, 2, mode="process")[0]
    assert cls is DcpTimeout and text.startswith("workspace: check: ")


def _a_slow_rendezvous(group):
    make(group, FakeSymmMem("slow rendezvous"), timeout_s=0.5).close(timeout_s=0)


def test_the_time_in_torchs_rendezvous_is_not_counted():
    run_ranks(_a_slow_rendezvous, 2, mode="process")


def test_thread_ranks_are_refused():
    found = same_everywhere(run_ranks(lambda group: outcome(lambda: make(group, FakeSymmMem())), 2))
    text = "workspace: check failed on rank 0: torch's symmetric memory needs a torch process group (got ThreadGroup)"
    assert found == (DcpUnsupported, f"{text} (also failed on rank 1)", (0, 1))


def _without_a_device(group):
    return outcome(lambda: make(group, None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a torch without CUDA")
def test_torchs_own_module_without_a_device():
    cls, text, ranks = same_everywhere(run_ranks(_without_a_device, 2, mode="process"))
    assert cls is DcpUnsupported and ranks == (0, 1) and "of the backend CUDA (got None" in text


# ---- torch's own module


def _on_a_device(group):
    rank, num_ranks = group.rank(), group.size()
    torch.cuda.set_device(0)

    def init(address):
        ctypes.memset(address, rank + 1, CONTROL)

    for _ in range(3):
        heap = make(group, None, init=init)
        expected = bytes([rank + 1]) * CONTROL + bytes(NBYTES - CONTROL)
        assert heap.read(0, NBYTES) == expected
        own = torch.as_tensor(heap.own_memory(0, NBYTES), device="cuda:0")
        assert own.data_ptr() == heap.bases[rank] and own.cpu().numpy().tobytes() == expected
        meet(group)
        view = torch_symmetric._Memory.__new__(torch_symmetric._Memory)
        for peer, base in enumerate(heap.bases):
            view.__cuda_array_interface__ = {
                "shape": (1,),
                "typestr": "|u1",
                "data": (base + 600 + rank, False),
                "version": 3,
            }
            torch.as_tensor(view, device="cuda:0").fill_(10 * peer + rank)
        torch.cuda.synchronize()
        meet(group)
        assert heap.read(600, num_ranks) == bytes(10 * rank + r for r in range(num_ranks))
        assert heap.bases_table != 0 and heap.host_control != 0
        meet(group)
        heap.close(timeout_s=10)
        assert own.cpu().numpy().tobytes()[:CONTROL] == expected[:CONTROL]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_on_a_device(num_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # ranks share the first GPU
    run_ranks(_on_a_device, num_ranks, mode="process", start="spawn")
