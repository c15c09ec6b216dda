"""The HIP heap when a call of the runtime fails, each of them, on one rank: all ranks say the same, and nothing is left."""

import re
from collections import Counter
from pathlib import Path

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError, DcpUnsupported
from dcpkernels.heap import gpu_later, hip_driver
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.fake_gpu.heap_calls import NBYTES, held, meet, outcome, read, same_everywhere, write
from tests.fake_gpu.quick_group import QuickGroup
from tests.hip.fake_hip import FakeHip
from tests.hip.heap_calls import make

# Every function of the runtime that the layer names: a new one is in the sweeps below, or fails them.
FUNCTIONS = set(re.findall(r'"(hip[A-Z]\w+)"', Path(hip_driver.__file__).read_text()))
FUNCTIONS = {name for name in FUNCTIONS if hasattr(FakeHip, name)}


def attempt(call):
    """What came of it, as plain data: ("up", how, why), or (class, text, ranks)."""
    try:
        heap = call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    result = "up", heap.handles, heap.handles_reason
    heap.close(timeout_s=10)
    return result


def works(group, fake, handles, options):
    """That ranks of the same processes can have a heap, and all of it works."""
    heap = make(group, fake, init=lambda address: write(address, b"init"), **options)
    assert [read(base, 5) for base in heap.bases] == [b"init\0"] * heap.num_ranks
    meet(group)
    for base in heap.bases:
        write(base + NBYTES - 1 - heap.rank, bytes([heap.rank + 1]))
    meet(group)
    expected = bytes(range(heap.num_ranks, 0, -1))
    assert heap.read(NBYTES - heap.num_ranks, heap.num_ranks) == expected
    assert heap.handles == handles, heap.handles_reason
    meet(group)
    heap.close(timeout_s=10)


# What may stay behind when this call fails while something is given back: what it was to give back, and what rests on that.
IPC_IN_USE = [
    {"streams": 1, "allocations": 1, "host": 1},
    {"streams": 1, "allocations": 1},
]
VMM_IN_USE = [{"streams": 1, "handles": 1, "reserved": 1, "mapped": 1} | host for host in ({}, {"host": 1})]
LEFT = {
    "hipDeviceSynchronize": [{}, *IPC_IN_USE, *VMM_IN_USE],
    "hipIpcCloseMemHandle": [{"opened": 1}],
    "hipFree": [{"allocations": 1}],
    "hipMemUnmap": [{"mapped": 1, "reserved": 1}],
    "hipMemAddressFree": [{"reserved": 1}],
    "hipMemRelease": [{"handles": 1}],
    "hipHostFree": [{"host": 1}],
    "hipStreamDestroy": [{"streams": 1}],
}
# A rank that cannot close what is a peer's does not hear of the peer's that it frees it.
LEFT_ELSEWHERE = {name: [{}, {"broken": 1}] for name in ("hipDeviceSynchronize", "hipIpcCloseMemHandle")}
AROUND = {"hipThreadExchangeStreamCaptureMode", "hipGetDevice", "hipSetDevice"}
IN_READ = AROUND | {"hipMemcpyDtoHAsync", "hipStreamSynchronize"}
HANDLES = {"hipIpcGetMemHandle", "hipIpcOpenMemHandle"}  # where one of these fails, there is another way
# Where one of these does, it is the other way that there is not, unless only that is asked for.
ASKS_FOR_VMM = {"hipDeviceGetAttribute", "hipMemGetAllocationGranularity"}
BY_IPC = HANDLES | {"hipExtMallocWithFlags", "hipIpcCloseMemHandle", "hipFree"}
BY_DESCRIPTORS = {
    "hipMemAddressFree",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipMemExportToShareableHandle",
    "hipMemImportFromShareableHandle",
    "hipMemMap",
    "hipMemRelease",
    "hipMemSetAccess",
    "hipMemUnmap",
}
IN_PROCESSES = FUNCTIONS - {"hipDeviceEnablePeerAccess", "hipMemcpyDtoHAsync"}
IN_THREADS = IN_PROCESSES - BY_DESCRIPTORS - HANDLES - set(LEFT) | {"hipDeviceEnablePeerAccess"}
IN_THREADS -= ASKS_FOR_VMM  # as nothing goes by descriptors


# ---- each call of `create`


def _nths(name, count, which):
    """Which calls of a function are to fail: "all", "most" (of those around all others only the ends), "ends", "last" (of
    those for memory)."""
    if name == "hipGetLastError":  # whose result is no failure of its own
        return ()
    if which == "all" or (which == "most" and name not in AROUND):
        return range(1, count + 1)
    if which == "last":
        return (count,) if name in BY_IPC else ()
    return sorted({1, count})


def _sweep(group, victims, machines, options, which):
    """On each rank, for each victim: what came of failing each call that a clean run makes there (`which`: as `_nths`), from
    `create` to the end of `close`, and what that has left here. All in the same processes, so that a small leak adds up."""
    # Two ranks: by gloo.
    group = as_group(group) if group.size() == 2 else QuickGroup(group)
    rank, swept, lefts = group.rank, [], []
    fake = FakeHip(**machines.get(rank, {}))

    def try_it():
        before, start = held(fake), len(fake.calls)
        fake.busy.add(rank)
        result = attempt(lambda: make(group, fake, **options))
        calls, after = fake.calls[start:], held(fake)
        left = {kind: n - before[0][kind] for kind, n in after[0].items() if n != before[0][kind]}
        assert after[-1] == before[-1] and (left.keys() - {"broken"} or after[1:] == before[1:]), (calls, result)
        assert fake.last_error() == 0, (calls, result)
        meet(group)
        happened = fake.heal()
        if gpu_later.num_put_off():
            gpu_later.try_again()
            assert gpu_later.num_put_off() == 0
            live = held(fake)[0]
            assert {kind: n for kind, n in live.items() if n != before[0][kind]}.keys() <= {"broken"}, (calls, live)
        fake.hipSetDevice(7)
        return result, calls, left, happened

    fake.hipSetDevice(7)  # the caller's: not the heap's
    clean, calls, left, _ = try_it()
    assert left == {} and clean[0] == "up"
    calls = group.all_gather_object(calls)
    for victim in victims:
        for name, count in Counter(calls[victim]).items():
            for nth in _nths(name, count, which):
                if rank == victim:
                    fake.fail(name, nth)
                result, _, left, happened = try_it()
                assert happened or result[0] == "up", (name, nth)  # else it was not made: there is no other way then
                swept.append((victim, name, result))
                lefts.append((victim, name, left))
    fake.heal()
    works(group, fake, clean[1], options)
    return clean[1], swept, lefts


def sweep(num_ranks, victims, *, machines=None, options=None, which="most"):
    """How memory went in a clean run, and the functions of which a call failed. Checks what came of it."""
    args = num_ranks, victims, machines or {}, options or {}, which
    results = run_ranks(_sweep, *args, mode="process", timeout_s=240)
    handles, swept = same_everywhere([(handles, swept) for handles, swept, _ in results])
    for victim, name, result in swept:
        check(handles, victim, name, result)
    for rank, (_, _, lefts) in enumerate(results):
        for victim, name, left in lefts:
            assert left in (LEFT if rank == victim else LEFT_ELSEWHERE).get(name, [{}]), (rank, victim, name, left)
    if which == "all":  # nothing that a kernel may use is given back where the device cannot tell, at any of its calls
        seen = [left for victim, name, left in results[victims[0]][2] if name == "hipDeviceSynchronize"]
        assert all(left in seen for left in IPC_IN_USE), seen
    return handles, {name for _, name, _ in swept}


def check(handles, victim, name, result):
    if result[0] == "up":
        assert name in AROUND | HANDLES | ASKS_FOR_VMM | set(LEFT), (name, result)
        if result[1] == handles:
            return  # it was in `close`, or there was another way
        assert result[1] == "vmm", result
        text = result[2]
        assert text.startswith(f"no IPC handles: rank {victim}: "), text
    else:
        cls, text, ranks = result
        if f"; and no descriptors: rank {victim}: {name} " in text:  # after rank 1 has no IPC handles
            assert name in AROUND | ASKS_FOR_VMM and cls is DcpUnsupported and ranks == (1,), (name, result)
            return
        assert name not in HANDLES | set(LEFT) and cls is DcpDeviceError and ranks == (victim,), (name, result)
        region = r"(the region of rank \d \(.+?, driver HIP 7.15.60940\): )?"
        assert re.match(rf"workspace: [a-z ]+ failed on rank {victim}: {region}{name} ", text), text
    assert f"{name} " in text and "(got hipErrorUnknown, error 999" in text and "device " in text


@pytest.mark.parametrize(("num_ranks", "victims", "which"), [(2, [1], "all"), (3, [0, 2], "most")])
def test_any_call_that_fails_on_one_rank_is_the_same_on_all(num_ranks, victims, which):
    assert sweep(num_ranks, victims, which=which) == ("ipc", IN_PROCESSES - BY_DESCRIPTORS)


@pytest.mark.parametrize(("num_ranks", "victim"), [(4, 0), (8, 5)])
def test_calls_for_memory_that_fail_on_one_rank_of_many_are_the_same_on_all(num_ranks, victim):
    assert sweep(num_ranks, [victim], which="last") == ("ipc", BY_IPC)


def test_any_call_that_fails_on_the_way_by_descriptors_is_the_same_on_all():
    found = sweep(2, [0, 1], options={"handles": "vmm"})
    assert found == ("vmm", IN_PROCESSES - BY_IPC)


@pytest.mark.parametrize("machine", [{"no_open": 17}, {"no_export": 1}], ids=["no open", "no export"])
def test_any_call_that_fails_while_ranks_change_to_descriptors_is_the_same_on_all(machine):
    """Rank 1 has no IPC handles; what there is of regions is given back, and made anew."""
    found = sweep(2, [0, 1], machines={1: machine}, which="ends")
    assert found == (
        "vmm",
        IN_PROCESSES - ({"hipIpcCloseMemHandle", "hipIpcOpenMemHandle"} if "no_export" in machine else set()),
    )


def _granularity_fails(group, cases):
    rank, results = group.rank(), []
    for handles, machine in cases:
        fake = FakeHip(**machine)
        if rank == 1:
            fake.fail("hipMemGetAllocationGranularity", 1, 1)
        results.append(attempt(lambda: make(group, fake, handles=handles)))  # noqa: B023
        assert fake.heal() and set(fake.live().values()) == {0} and fake.last_error() == 0
    return results


def test_a_runtime_that_knows_no_uncached_descriptors_still_has_ipc_handles():
    cases = [("auto", {}), ("auto", {"no_export": 1}), ("vmm", {})]
    results = same_everywhere(run_ranks(_granularity_fails, 2, cases, mode="process"))
    assert results[0] == ("up", "ipc", "the first choice")
    text = "; and no descriptors: rank 1: hipMemGetAllocationGranularity must succeed on device 1, "
    assert (
        results[1][0] is DcpUnsupported and text in results[1][1] and "hipErrorInvalidValue, error 1" in results[1][1]
    )
    assert results[2][0] is DcpDeviceError and results[2][1].startswith(
        "workspace: measure failed on rank 1: hipMemGet"
    )


def _thread_sweep(group, fake):
    """Thread ranks have one runtime: the nth call of any of them fails."""
    meet(group)
    start = len(fake.calls)
    meet(group)
    heap = make(group, fake)
    meet(group)
    calls = fake.calls[start:]
    meet(group)
    heap.close(timeout_s=10)
    meet(group)
    before, results = held(fake), []
    for name, count in sorted(Counter(calls).items()):
        for nth in _nths(name, count, "most"):
            if group.rank == 0:
                fake.peer_access.clear()
                fake.fail(name, nth)
            meet(group)
            result = attempt(lambda: make(group, fake))
            meet(group)
            assert fake.heal() or group.rank, (name, nth)
            fake.heal()
            assert held(fake) == before, (name, nth, result)
            meet(group)
            results.append((name, result))
    works(group, fake, "none", {})
    return results


def test_any_call_that_fails_in_thread_ranks_is_the_same_on_all():
    fake = FakeHip()
    results = same_everywhere(run_ranks(_thread_sweep, 3, fake, timeout_s=200))
    assert set(fake.live().values()) == {0}
    for name, (cls, text, ranks) in results:
        assert f" {name} " in text and "hipErrorUnknown" in text and cls is DcpDeviceError and len(ranks) == 1
    assert {name for name, _ in results} == IN_THREADS


# ---- taking down


def _all_of_close_fails(group):
    fake = FakeHip()
    heap = make(group, fake)
    memory = heap.own_memory(0, 10)
    for name in FUNCTIONS:
        setattr(fake, name, lambda *_: (fake.hipError_t(4), None))  # as in a process that is ending
    heap.close(timeout_s=10)
    del memory
    return heap.bases


def test_close_raises_nothing_when_the_runtime_has_shut_down():
    assert run_ranks(_all_of_close_fails, 2, mode="process") == [[], []]


def _first_error(group):
    fake = FakeHip()
    if group.rank() == 1:
        fake.fail("hipMemsetD8Async", 1, 2)
        fake.fail("hipFree", 1, 700)
        fake.fail("hipStreamDestroy", 1, 4)
    return outcome(lambda: make(group, fake))


def test_an_error_while_giving_back_does_not_hide_the_first():
    _, text, _ = same_everywhere(run_ranks(_first_error, 2, mode="process"))
    assert text.startswith("workspace: create region failed on rank 1: hipMemsetD8Async of 65536 bytes")


# ---- `read`


def _read_fails(group):
    fake = FakeHip()
    fake.hipSetDevice(3)
    heap = make(group, fake)
    texts = []
    for name in sorted(IN_READ):
        fake.fail(name, 1, 719)
        texts.append(outcome(lambda: heap.read(0, 8))[1])
        assert fake.last_error() == 0 and fake.heal()
        fake.hipSetDevice(3)
    assert heap.read(0, 8) == bytes(8)
    heap.close(timeout_s=1)
    return texts


def test_read_raises_what_its_calls_say():
    for name, text in zip(sorted(IN_READ), run_ranks(_read_fails, 1, mode="process")[0], strict=True):
        assert text.startswith(name) and "hipErrorLaunchFailure, error 719" in text and "nothing runs" in text
