"""The CUDA heap over a fake driver: what every rank sees, with and without multicast, and what is left afterwards."""

import ctypes
import faulthandler
import gc
import os

import pytest

from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.heap_calls import make
from tests.fake_gpu import heap_cases, pages
from tests.fake_gpu.heap_calls import (
    CONTROL_NBYTES,
    NBYTES,
    held,
    meet,
    on_hosts,
    outcome,
    read,
    same_everywhere,
    write,
)
from tests.fake_gpu.heap_cases import run_over

BOTH = pytest.mark.parametrize("mode", ["thread", "process"])


def run(fn, num_ranks, *args, **options):
    return run_over(FakeDriver, fn, num_ranks, *args, **options)


# ---- what the ranks see


def _see_each_other(group, fake):
    rank, num_ranks = as_group(group).rank, as_group(group).num_ranks
    start = [bytes([17 * r + 1]) * CONTROL_NBYTES for r in range(num_ranks)]

    def init(address):
        assert address % 4096 == 0 and read(address, CONTROL_NBYTES) == bytes(CONTROL_NBYTES)
        write(address, start[rank])

    before = held(fake)
    heap = make(group, fake, init=init)
    assert (heap.rank, heap.num_ranks, heap.nbytes, heap.device) == (rank, num_ranks, NBYTES, rank)
    assert heap.device_name == f"Fake H100 {rank}" and heap.control_nbytes == CONTROL_NBYTES
    assert len(set(heap.bases)) == num_ranks and all(base % 65536 == 0 for base in heap.bases)
    # What init wrote, and zeros behind it, from everywhere.
    for peer, base in enumerate(heap.bases):
        assert read(base, NBYTES) == start[peer] + bytes(NBYTES - CONTROL_NBYTES)
    table = (ctypes.c_uint64 * num_ranks).from_address(heap.bases_table)
    assert list(table) == heap.bases and heap.bases_table >= heap.bases[rank] + NBYTES
    meet(group)
    num_files = pages.files() - before[2]
    assert num_files == len({id(memory) for memory in fake.handles.values()})  # none that was handed over
    # Loads and stores by the CPU say nothing of the device's; and multicast is for the own device.
    assert all(rank in fake.mapping_at(base, NBYTES)[1].ordinals for base in heap.bases)
    assert fake.mapping_at(heap.multicast, NBYTES)[1].ordinals == {rank}
    assert read(heap.host_control, CONTROL_NBYTES) == bytes(CONTROL_NBYTES)
    meet(group)
    for base in heap.bases:
        write(base + CONTROL_NBYTES + 8 * rank, bytes([100 + rank]) * 8)
        write(base + NBYTES - 1 - rank, bytes([200 + rank]))
    meet(group)
    assert heap.read(CONTROL_NBYTES, 8 * num_ranks) == b"".join(bytes([100 + r]) * 8 for r in range(num_ranks))
    assert heap.read(NBYTES - num_ranks, num_ranks) == bytes(200 + r for r in reversed(range(num_ranks)))
    assert heap.read(0, 0) == b""
    # Each rank's multicast store reaches all.
    assert heap.multicast_reason == "yes" and heap.multicast % (128 << 10) == 0
    fake.multimem_store(heap.multicast + 2000 + rank, bytes([1 + rank]))
    meet(group)
    assert heap.read(2000, num_ranks) == bytes(range(1, num_ranks + 1))
    assert list(table) == heap.bases
    result = heap.bases[:], heap.socket_fds[:]
    meet(group)
    heap.close(timeout_s=10)
    assert (heap.bases, heap.bases_table, heap.multicast, heap.host_control) == ([], 0, 0, 0)
    assert heap.socket_fds == [-1] * num_ranks and heap.lost_peers() == ()
    heap.close(timeout_s=10)  # again
    meet(group)
    assert held(fake) == before
    return result


@BOTH
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_all_ranks_see_all_bytes(mode, num_ranks):
    for rank, (bases, fds) in enumerate(results := run(_see_each_other, num_ranks, mode=mode)):
        if mode == "thread":
            assert bases == results[0][0]  # one mapping: equal pointers, not only equal bytes
        expected = {rank} if mode == "process" else set(range(num_ranks))
        assert {peer for peer, fd in enumerate(fds) if fd == -1} == expected


def _sizes(group, fake, sizes):
    rank, num_ranks = as_group(group).rank, as_group(group).num_ranks
    for nbytes in sizes:
        heap = make(group, fake, nbytes, control_nbytes=1, init=lambda address: write(address, b"i"))
        assert heap.read(0, nbytes) == b"i" + bytes(nbytes - 1)
        meet(group)
        fake.multimem_store(heap.multicast + nbytes - 1, b"m")
        meet(group)
        assert heap.read(nbytes - 1, 1) == b"m"
        # Rounded up, with the table, to the smallest size that both granularities allow.
        behind = -(-nbytes // 256) * 256 + 8 * num_ranks
        assert {mapping.nbytes for mapping in fake.mapped.values()} == {-(-behind // (128 << 10)) * (128 << 10)}
        assert heap.bases_table % 256 == 0 and heap.bases_table >= heap.bases[rank] + nbytes
        assert list((ctypes.c_uint64 * num_ranks).from_address(heap.bases_table)) == heap.bases
        meet(group)
        heap.close(timeout_s=10)


def test_any_size():
    edge = (128 << 10) - 16  # the table of two ranks ends with the granule
    run(_sizes, 2, [1, 255, 256, edge - 256, edge - 255, edge, 128 << 10, (128 << 10) + 1, 1 << 20])


def _uneven_rounding(group, options):
    fake = FakeDriver(**options[group.rank()])
    heap = make(group, fake)
    meet(group)
    for base in heap.bases:
        write(base + NBYTES - 1 - heap.rank, b"x")
    sizes = {mapping.nbytes for mapping in fake.mapped.values()}
    meet(group)
    assert heap.read(NBYTES - 2, 2) == b"xx"
    heap.close(timeout_s=10)
    return sizes


def test_devices_that_round_differently_agree_on_a_size():
    options = [{"granularity": 64 << 10}, {"granularity": 256 << 10}]
    assert run_ranks(_uneven_rounding, 2, options, mode="process") == [{256 << 10}] * 2


def _alone(group, fake):
    heap = make(group, fake)
    assert heap.multicast == 0 and "one rank" in heap.multicast_reason and len(heap.bases) == 1
    write(heap.bases[0] + 5, b"abc")
    assert heap.read(4, 5) == b"\0abc\0" and heap.socket_fds == [-1]
    heap.close(timeout_s=1)
    return fake.live()


@BOTH
def test_a_rank_alone(mode):
    assert set(run(_alone, 1, mode=mode)[0].values()) == {0}


# ---- lifetimes


@BOTH
def test_own_memory_outlives_the_heap(mode):
    run(heap_cases.own_memory, 3, make, mode=mode)


@BOTH
def test_a_rank_that_closes_first_takes_nothing_away(mode):
    assert set(run(heap_cases.close_in_turn, 3, make, mode=mode)[-1].values()) == {0}


@BOTH
def test_a_heap_that_is_dropped_releases_everything(mode):
    run(heap_cases.dropped, 3, make, mode=mode)


def _many(group, fake):
    before = held(fake)
    for turn in range(20):
        heaps = [make(group, fake, multicast=turn % 2 == 0) for _ in range(2)]
        for heap in heaps if turn % 3 else reversed(heaps):
            heap.close(timeout_s=10)
    meet(group)
    assert held(fake) == before


def test_heap_after_heap_leaves_nothing():
    run(_many, 2)


def test_a_forked_child_makes_no_call_of_the_driver():
    assert set(run(heap_cases.forked, 2, make)[0].values()) == {0}


def _contexts(group, fake):
    """The thread's current context is the caller's business."""
    fake.cuInit(0)
    other = fake.cuDevicePrimaryCtxRetain(fake.cuDeviceGet(5)[1])[1]
    fake.cuCtxPushCurrent(other)
    seen = []
    heap = make(group, fake, check_links=lambda heap: seen.append(fake.stack()[-1]))
    heap.read(0, 10)
    heap.close(timeout_s=10)
    assert seen == [as_group(group).rank] and fake.stack() == [5]

    def fail(heap):
        raise ValueError("no")

    outcome(lambda: make(group, fake, check_links=fail))
    mode = fake.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert fake.stack() == [5] and fake.capture_mode() == mode  # also after an error


def test_the_callers_context_stays_current():
    run(_contexts, 2)


def _captures(group, fake):
    assert set(heap_cases.at_work_during_a_capture(group, fake, make).values()) == {0}
    meet(group)
    heap_cases.gone_during_an_own_capture(group, fake, make)
    meet(group)
    left = heap_cases.gone_during_a_capture(group, fake, make)
    meet(group)
    assert set(heap_cases.put_off_again(group, fake, make).values()) == {0}
    fake.capture = "going on"
    return left, fake.cuMemCreate(0, fake.CUmemAllocationProp(), 0)[0], fake.capture


def test_what_a_capture_holds_up_is_released_after_it():
    view = {"contexts": 1, "handles": 1, "mapped": 1, "reserved": 1, "streams": 1}
    for left, number, capture in run(_captures, 2):
        assert left[0] == left[1] == view
        assert all(kinds["host"] == 1 and kinds["bound"] == 1 for kinds in left[2:])
        assert (number, capture) == (900, "broken")  # the fake driver does see a call that breaks one


def _stray(group, fake):
    heap = make(group, fake)
    if (child := os.fork()) == 0:
        faulthandler.disable()
        write(heap.multicast, b"x")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    heap.close(timeout_s=10)
    return code


def test_a_plain_store_to_the_multicast_address_is_a_fault():
    assert run(_stray, 2) == [-11, -11]


# ---- ranks on one device, devices in another order


def _on_one_device(group, fake):
    heap = make(group, fake, device=3)
    meet(group)
    for base in heap.bases:
        write(base + CONTROL_NBYTES + heap.rank, bytes([heap.rank + 1]))
    meet(group)
    assert heap.read(CONTROL_NBYTES, 3) == b"\1\2\3" and heap.multicast == 0
    reason = heap.multicast_reason
    meet(group)
    heap.close(timeout_s=10)
    return reason


@BOTH
def test_ranks_may_share_a_device_without_multicast(mode):
    reason = same_everywhere(run(_on_one_device, 3, mode=mode))
    expected = "no: ranks 0 and 1 are on the same device (device 3, Fake H100 3, 0000:03:00.0), a team takes each once"
    assert reason == expected


def _other_order(group, orders):
    rank = group.rank()
    fake = FakeDriver(devices=orders[rank], cut=[(7, 6), (6, 7)])
    heap = make(group, fake, device=0)
    meet(group)
    for base in heap.bases:
        write(base + 2000 + rank, bytes([rank + 1]))
    meet(group)
    assert heap.read(2000, 3) == b"\1\2\3" and heap.multicast_reason == "yes"
    name = heap.device_name
    meet(group)
    heap.close(timeout_s=10)
    return name


def test_every_process_may_number_the_devices_its_own_way():
    # As by CUDA_VISIBLE_DEVICES. Rank 2 sees nobody else's device.
    names = run_ranks(_other_order, 3, [[5, 0, 3], [3, 5], [1]], mode="process")
    assert names == ["Fake H100 5", "Fake H100 3", "Fake H100 1"]


# ---- several hosts


def _between_hosts(group, folder, hosts):
    rank = group.rank()
    on_hosts(hosts[rank])
    os.geteuid = lambda: 1000 + rank  # users have numbers of their own on each host
    fake = FakeDriver(fabric=folder)
    before = held(fake)
    heap = make(group, fake, init=lambda address: write(address, bytes([rank + 1])))
    assert [read(base, 1) for base in heap.bases] == [bytes([r + 1]) for r in range(4)]
    assert heap.socket_fds == [-1] * 4 and heap.multicast_reason == "yes" and heap.lost_peers() == ()
    meet(group)
    fake.multimem_store(heap.multicast + 2000 + rank, bytes([rank + 1]))
    meet(group)
    assert heap.read(2000, 4) == b"\1\2\3\4"
    meet(group)
    heap.close(timeout_s=10)
    assert held(fake) == before
    meet(group)
    return sorted(os.listdir(folder))


def test_several_hosts_share_memory_by_fabric_handles(tmp_path):
    assert run_ranks(_between_hosts, 4, tmp_path, ["a", "a", "b", "b"], mode="process") == [[]] * 4


# ---- arguments of the heap's own


def test_what_is_outside_the_region_is_refused():
    run(heap_cases.ranges, 1, make)


def test_kernels_end_before_memory_goes():
    (fake,) = run_ranks(_calls_of_a_drop, 1, mode="process")
    assert fake.index("cuCtxSynchronize") < fake.index("cuMemUnmap")


def _calls_of_a_drop(group):
    fake = FakeDriver()
    heap = make(group, fake)
    start = len(fake.calls)
    del heap
    gc.collect()
    return fake.calls[start:]
