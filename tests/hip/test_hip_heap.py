"""The HIP heap over a fake runtime: what every rank sees, by IPC handles and by descriptors, and what is left afterwards."""

import ctypes
import gc
import time

import pytest

from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.fake_gpu import heap_cases, pages
from tests.fake_gpu.heap_calls import CONTROL_NBYTES, NBYTES, held, meet, outcome, read, write
from tests.fake_gpu.heap_cases import run_over
from tests.hip.fake_hip import FakeHip
from tests.hip.fake_ipc import UNCACHED
from tests.hip.heap_calls import GRANULE, make

BOTH = pytest.mark.parametrize("mode", ["thread", "process"])
# How memory goes from process to process: where IPC handles do not work, by descriptors.
WAYS = {"ipc": {}, "fd": {"no_export": 1}}


def run(fn, num_ranks, *args, **options):
    return run_over(FakeHip, fn, num_ranks, *args, **options)


def run_both_ways(fn, num_ranks, *args):
    """`fn(group, fake, *args)` in processes, in the same ones for both ways: what each rank returns, by way."""
    return run_ranks(_both_ways, num_ranks, fn, *args, mode="process")


def _both_ways(group, fn, *args):
    return {way: fn(group, FakeHip(**options), *args) for way, options in WAYS.items()}


# ---- what the ranks see


def _see_each_other(group, fake):
    way = "thread" if not hasattr(group, "size") else "fd" if fake.no_export else "ipc"
    rank, num_ranks = as_group(group).rank, as_group(group).num_ranks
    start = [bytes([17 * r + 1]) * CONTROL_NBYTES for r in range(num_ranks)]

    def init(address):
        assert address % 4096 == 0 and read(address, CONTROL_NBYTES) == bytes(CONTROL_NBYTES)
        write(address, start[rank])

    before = held(fake)
    heap = make(group, fake, init=init)
    assert (heap.rank, heap.num_ranks, heap.nbytes, heap.device) == (rank, num_ranks, NBYTES, rank)
    assert heap.device_name.startswith(f"Fake MI300X {rank}") and heap.control_nbytes == CONTROL_NBYTES
    assert len(set(heap.bases)) == num_ranks and all(base % 4096 == 0 for base in heap.bases)
    # What init wrote, and zeros behind it, from everywhere.
    for peer, base in enumerate(heap.bases):
        assert read(base, NBYTES) == start[peer] + bytes(NBYTES - CONTROL_NBYTES)
    table = (ctypes.c_uint64 * num_ranks).from_address(heap.bases_table)
    assert list(table) == heap.bases and heap.bases_table >= heap.bases[rank] + NBYTES
    meet(group)
    # Loads and stores by the CPU say nothing of the device's.
    assert all(fake.can_touch(rank, base, NBYTES) for base in heap.bases)
    if way == "ipc":
        assert {allocation.flags for allocation in fake.allocations.values()} == {UNCACHED}
        assert len(fake.opened) == num_ranks - 1 and not fake.handles
    elif way == "fd":
        assert not fake.allocations and len(fake.mapped) == num_ranks
        num_files = pages.files() - before[2]
        assert num_files == len({id(memory) for memory in fake.handles.values()})  # none that was handed over
    assert read(heap.host_control, CONTROL_NBYTES) == bytes(CONTROL_NBYTES)
    meet(group)
    for base in heap.bases:
        write(base + CONTROL_NBYTES + 8 * rank, bytes([100 + rank]) * 8)
        write(base + NBYTES - 1 - rank, bytes([200 + rank]))
    meet(group)
    assert heap.read(CONTROL_NBYTES, 8 * num_ranks) == b"".join(bytes([100 + r]) * 8 for r in range(num_ranks))
    assert heap.read(NBYTES - num_ranks, num_ranks) == bytes(200 + r for r in reversed(range(num_ranks)))
    assert all(heap.read(NBYTES - 1 - rank, 1, peer) == bytes([200 + rank]) for peer in range(num_ranks))
    assert heap.read(0, 0) == b"" and heap.multicast == 0 and heap.multicast_reason == "these GPUs have none"
    result = heap.bases[:], heap.socket_fds[:]
    meet(group)
    heap.close(timeout_s=10)
    assert (heap.bases, heap.bases_table, heap.host_control) == ([], 0, 0)
    assert heap.socket_fds == [-1] * num_ranks and heap.lost_peers() == ()
    heap.close(timeout_s=10)  # again
    meet(group)
    assert held(fake) == before and fake.broken == [] and fake.last_error() == 0
    return result


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_all_processes_see_all_bytes(num_ranks):
    for rank, results in enumerate(run_both_ways(_see_each_other, num_ranks)):
        for _, fds in results.values():
            assert [peer for peer, fd in enumerate(fds) if fd == -1] == [rank]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_all_threads_see_all_bytes(num_ranks):
    results = run(_see_each_other, num_ranks, mode="thread")
    for bases, fds in results:
        assert bases == results[0][0]  # one mapping: equal pointers, not only equal bytes
        assert fds == [-1] * num_ranks


def _sizes(group, fake, sizes):
    num_ranks = as_group(group).num_ranks
    for nbytes in sizes:
        heap = make(group, fake, nbytes, control_nbytes=1, init=lambda address: write(address, b"i"))
        assert heap.read(0, nbytes) == b"i" + bytes(nbytes - 1)
        meet(group)
        write(heap.bases[1 - heap.rank] + nbytes - 1, b"m")
        meet(group)
        assert heap.read(nbytes - 1, 1) == b"m"
        assert heap.bases_table % 256 == 0 and heap.bases_table >= heap.bases[heap.rank] + nbytes
        assert list((ctypes.c_uint64 * num_ranks).from_address(heap.bases_table)) == heap.bases
        meet(group)
        heap.close(timeout_s=10)
    assert fake.broken == []


def test_any_size():
    edge = (64 << 10) - 16  # the table of two ranks ends with the granule
    run_both_ways(_sizes, 2, [1, 255, 256, edge - 256, edge - 255, edge, 64 << 10, (64 << 10) + 1, 1 << 20])


def _whole_granules(group, fake):
    heap = make(group, fake, granule=GRANULE)
    sizes = {opened.nbytes for opened in fake.opened.values()}
    meet(group)
    heap.close(timeout_s=10)
    assert fake.broken == []
    return sizes


def test_what_is_handed_over_is_whole_granules():
    assert run(_whole_granules, 2, ipc_granularity=2 << 20) == [{2 << 20}] * 2


def _alone(group, fake):
    heap = make(group, fake)
    write(heap.bases[0] + 5, b"abc")
    assert heap.read(4, 5) == b"\0abc\0" and heap.socket_fds == [-1] and len(heap.bases) == 1
    heap.close(timeout_s=1)
    return fake.live()


@BOTH
def test_a_rank_alone(mode):
    assert set(run(_alone, 1, mode=mode)[0].values()) == {0}


# ---- lifetimes


def test_own_memory_outlives_the_heap():
    run_both_ways(heap_cases.own_memory, 3, make)
    run(heap_cases.own_memory, 3, make, mode="thread")


def test_what_is_outside_the_region_is_refused():
    run(heap_cases.ranges, 1, make)


def test_a_forked_child_makes_no_call_of_the_runtime():
    assert set(run(heap_cases.forked, 2, make)[0].values()) == {0}


def _many(group, fake):
    before = held(fake)
    for turn in range(10):
        heaps = [make(group, fake) for _ in range(2)]
        for heap in heaps if turn % 3 else reversed(heaps):
            heap.close(timeout_s=10)
    meet(group)
    assert held(fake) == before


def test_heap_after_heap_leaves_nothing():
    run_both_ways(_many, 2)


def _current_device(group, fake):
    """The thread's current device is the caller's business, and so is its last error."""
    fake.hipSetDevice(5)
    seen = []
    heap = make(group, fake, check_links=lambda heap: seen.append(fake.current()))
    heap.read(0, 10)
    heap.close(timeout_s=10)
    assert seen == [as_group(group).rank] and fake.current() == 5 and fake.last_error() == 0

    def fail(heap):
        raise ValueError("no")

    outcome(lambda: make(group, fake, check_links=fail))
    assert fake.current() == 5 and fake.last_error() == 0  # also after an error
    del heap
    gc.collect()
    assert fake.current() == 5


def test_the_callers_device_stays_current():
    run_both_ways(_current_device, 2)
    run(_current_device, 2, mode="thread")


def _captures(group, fake):
    # Going over from handles to descriptors gives memory back.
    def make_it(*args, **options):
        return make(*args, handles="vmm" if fake.no_export else "ipc", **options)

    assert set(heap_cases.at_work_during_a_capture(group, fake, make_it).values()) == {0}
    meet(group)
    heap_cases.gone_during_an_own_capture(group, fake, make_it)
    meet(group)
    fake.broken.clear()
    left = heap_cases.gone_during_a_capture(group, fake, make_it)
    meet(group)
    assert heap_cases.put_off_again(group, fake, make_it)["mapped"] == 0
    fake.capture = "going on"
    return left, int(fake.hipMemCreate(0, None, 0)[0]), fake.capture


def test_what_a_capture_holds_up_is_released_after_it():
    view = {"ipc": {"allocations": 1, "streams": 1}, "fd": {"handles": 1, "mapped": 1, "reserved": 1, "streams": 1}}
    for results in run_both_ways(_captures, 2):
        for way, (left, number, capture) in results.items():
            assert left[0] == left[1] == view[way]
            assert all(kinds["host"] == 1 for kinds in left[2:])
            assert (number, capture) == (900, "broken")  # the fake runtime does see a call that breaks one


# ---- ranks on one device, devices in another order


def _on_one_device(group, fake):
    heap = make(group, fake, device=3)
    meet(group)
    for base in heap.bases:
        write(base + CONTROL_NBYTES + heap.rank, bytes([heap.rank + 1]))
    meet(group)
    assert heap.read(CONTROL_NBYTES, 3) == b"\1\2\3"
    meet(group)
    heap.close(timeout_s=10)
    assert fake.broken == []


@BOTH
def test_ranks_may_share_a_device(mode):
    run(_on_one_device, 3, mode=mode)


def _other_order(group, orders, cases):
    return [_in_order(group, orders, options) for options in cases]


def _in_order(group, orders, options):
    rank = group.rank()
    fake = FakeHip(devices=orders[rank], cut=[(7, 6), (6, 7)], **options)
    heap = make(group, fake, device=0)
    assert all(fake.can_touch(0, base, NBYTES) for base in heap.bases)
    meet(group)
    for base in heap.bases:
        write(base + 2000 + rank, bytes([rank + 1]))
    meet(group)
    assert heap.read(2000, 3) == b"\1\2\3"
    name = heap.device_name
    meet(group)
    heap.close(timeout_s=10)
    return name


def test_every_process_may_number_the_devices_its_own_way():
    # As by HIP_VISIBLE_DEVICES. Rank 2 sees nobody else's device.
    cases = [{}, {"no_uuids": True}, WAYS["fd"]]
    names = run_ranks(_other_order, 3, [[5, 0, 3], [3, 5], [1]], cases, mode="process")
    assert [[name[:13] for name in some] for some in names] == [[f"Fake MI300X {idx}"] * 3 for idx in (5, 3, 1)]


def test_kernels_end_before_memory_goes():
    calls = run_ranks(_calls_of_a_drop, 1, mode="process")[0]
    assert calls.index("hipDeviceSynchronize") < calls.index("hipFree")


def _calls_of_a_drop(group):
    fake = FakeHip()
    heap = make(group, fake)
    start = len(fake.calls)
    del heap
    gc.collect()
    return fake.calls[start:]


def _leaves_first(group, fake):
    """Rank 0 leaves while the others go on for a while."""
    heap = make(group, fake)
    base = heap.bases[0] + 100 + 8 * heap.rank
    meet(group)
    start = time.monotonic()
    if heap.rank > 0:
        for idx in range(100):
            write(base, bytes([idx]) * 8)
            time.sleep(0.002)
            assert read(base, 8) == bytes([idx]) * 8
    heap.close(timeout_s=20)
    seconds = time.monotonic() - start
    meet(group)
    assert set(fake.live().values()) == {0}
    return seconds


def test_nobody_frees_what_another_rank_has_open():
    assert all(0.2 < seconds < 10 for seconds in run(_leaves_first, 3))


def test_by_descriptors_a_rank_that_closes_first_takes_nothing_away():
    assert set(run(heap_cases.close_in_turn, 3, make, **WAYS["fd"])[-1].values()) == {0}


def _dropped_slowly(group, fake):
    """Rank 1 drops its heap, and takes its time over what it has open of rank 0's."""
    heap = make(group, fake)
    meet(group)
    if heap.rank == 1:
        fake.act("hipIpcCloseMemHandle", 1, lambda: time.sleep(0.3))
        del heap
        gc.collect()
    else:
        heap.close(timeout_s=20)
    meet(group)
    return fake.live()


def test_a_heap_that_is_dropped_lets_go_of_peers_before_they_hear_of_it():
    assert all(set(live.values()) == {0} for live in run(_dropped_slowly, 2))
