"""The shared region: one memory for all ranks, views of it that cannot be written, what is left, and its limits."""

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dcpkernels.errors import DcpError
from dcpkernels.heap import memory
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import as_group
from dcpkernels.heap.region import Region, create_file
from dcpkernels.testing import run_ranks
from tests.test_heap import BOTH, meet, memory_files, resources, same_everywhere, write

NBYTES, SHARED = 4096, 5 * 4096 + 100  # a size that no other mapping here has, and not a multiple of the page
HUGE = (2 << 20) + 4096


def make(group, shared_nbytes=SHARED, *, init=lambda address: None, timeout_s=20.0, read_only_views=False):
    return CpuHeap.create(
        as_group(group),
        NBYTES,
        shared_nbytes=shared_nbytes,
        init=init,
        payload={},
        timeout_s=timeout_s,
        read_only_views=read_only_views,
    )


def mappings_at(address):
    """(permissions, inode) of the mapping that holds `address`, [] when there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return [(line.split()[1], line.split()[4])]
    return []


# ---- what the ranks see


def _see_each_other(group, nbytes, read_only_views):
    heap = make(group, nbytes, read_only_views=read_only_views)
    rank, num_ranks = heap.rank, heap.num_ranks
    base, view = heap.shared_base, heap.shared_memory(0, nbytes)
    address = ctypes.addressof(view)
    assert heap.shared_nbytes == nbytes and base % 4096 == 0 and base not in heap.bases
    assert bytes(view) == bytes(nbytes)  # zeroed
    (permissions, inode), (view_permissions, view_inode) = mappings_at(base) + mappings_at(address)
    assert permissions == "rw-s" and view_inode == inode
    assert view_permissions == ("r--s" if read_only_views else "rw-s") and (address == base) != read_only_views
    meet(group)
    assert not memory_files()  # a mapping needs no open file
    write(base, rank, bytes([100 + rank]))
    write(base, nbytes - 1 - rank, bytes([200 + rank]))
    meet(group)
    seen = bytes(view)
    assert seen == ctypes.string_at(base, nbytes)
    assert seen[:num_ranks] == bytes(100 + r for r in range(num_ranks))
    assert seen[: -1 - num_ranks : -1] == bytes(200 + r for r in range(num_ranks))
    assert seen[num_ranks:-num_ranks] == bytes(nbytes - 2 * num_ranks)
    assert bytes(heap.shared_memory(3, 2)) == seen[3:5]
    meet(group)
    heap.close(timeout_s=10)
    assert heap.shared_base == 0
    with pytest.raises(DcpError, match="closed"):
        heap.shared_memory(0, 1)
    assert bytes(view) == seen  # still mapped
    del view
    gc.collect()
    return base, address, inode


@BOTH
@pytest.mark.parametrize("read_only_views", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_what_one_rank_stores_all_see(mode, read_only_views, num_ranks):
    before = resources()
    results = run_ranks(_see_each_other, num_ranks, SHARED, read_only_views, mode=mode)
    bases, views, inodes = zip(*results, strict=True)
    assert len(set(inodes)) == 1  # one memory, whatever the addresses
    if mode == "thread":
        assert len(set(bases)) == 1  # one mapping to write through: equal pointers, not only equal bytes
        assert len(set(views)) == (num_ranks if read_only_views else 1)
        assert resources() == before


@BOTH
def test_one_of_huge_pages_does_the_same(mode):
    run_ranks(_see_each_other, 2, HUGE, True, mode=mode)


def _collapses(group):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcpkernels.heap.shared.collapse", lambda *call: calls.append((*call, resources()[1])))
        heap = make(group)
    base = heap.shared_base
    heap.close(timeout_s=10)
    return [(address == base, nbytes, maps) for address, nbytes, maps in calls]


def test_the_maker_alone_asks_for_huge_pages_before_anybody_else_maps_it():
    assert run_ranks(_collapses, 2, mode="process") == [[(True, SHARED, 3)], []]


def _none(group):
    heap = make(group, 0, read_only_views=True)
    meet(group)
    maps = resources()[1]
    assert (heap.shared_base, heap.shared_nbytes) == (0, 0)
    with pytest.raises(DcpError, match="must be a shared region"):
        heap.shared_memory(0, 1)
    meet(group)
    heap.close(timeout_s=10)
    return maps


@BOTH
def test_size_0_is_none(mode):
    assert run_ranks(_none, 3, mode=mode) == [3, 3, 3]


def _count_mappings(group, read_only_views):
    with_read_only = read_only_views == "all" or (read_only_views == "rank 1" and as_group(group).rank == 1)
    heap = make(group, read_only_views=with_read_only)
    meet(group)
    maps = resources()[1]
    meet(group)
    heap.close(timeout_s=10)
    return maps


@pytest.mark.parametrize("read_only_views", ["none", "rank 1", "all"])
def test_each_process_has_one_mapping_more_and_one_for_its_own_read_only_views(read_only_views):
    more = {"none": [0, 0, 0], "rank 1": [0, 1, 0], "all": [1, 1, 1]}[read_only_views]
    assert run_ranks(_count_mappings, 3, read_only_views, mode="process") == [4 + n for n in more]
    assert run_ranks(_count_mappings, 3, read_only_views, mode="thread") == [4 + sum(more)] * 3


# ---- views that cannot be written

# Forks of a process that has imported all.
WRITER = """
import ctypes, os, resource
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.testing.thread_group import ThreadGroup
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def write(read_only_views):
    heap = CpuHeap.create(ThreadGroup.create(1)[0], 4096, shared_nbytes=8192, init=lambda a: None, payload={},
                          timeout_s=5, read_only_views=read_only_views)
    view = heap.shared_memory(4096, 10)
    ctypes.memmove(heap.shared_base + 4096, b"x", 1)
    print(view[0:2], flush=True)
    view[1] = b"y"
    print(ctypes.string_at(heap.shared_base + 4096, 2), flush=True)

for read_only_views in (False, True):
    if os.fork() == 0:
        write(read_only_views)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_write_into_a_read_only_view_is_a_segmentation_fault():
    done = subprocess.run([sys.executable, "-c", WRITER], capture_output=True, text=True, timeout=60)
    expected = ["b'x\\x00'", "b'xy'", "0", "b'x\\x00'", str(-signal.SIGSEGV)]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def _write_into_the_view(group):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    heap = make(group, read_only_views=True)
    view = heap.shared_memory(0, SHARED)
    if group.rank() == 1:
        write(heap.shared_base, 5, b"good")
        ctypes.memset(ctypes.addressof(view), 255, SHARED)
    while 1 not in heap.lost_peers():
        time.sleep(0.001)
    return bytes(view)


def test_who_writes_into_a_view_dies_before_its_peers_see_anything():
    expected = bytes(5) + b"good" + bytes(SHARED - 9)
    results = run_ranks(_write_into_the_view, 3, mode="process", expect_exit={1: -signal.SIGSEGV})
    assert [results[0], results[2]] == [expected] * 2


def test_a_mapping_that_cannot_be_made_read_only_is_not_left_writable(monkeypatch):
    fd = create_file(SHARED)
    region = Region(fd, SHARED)
    os.close(fd)
    before = resources()
    with monkeypatch.context() as patch:
        patch.setattr("dcpkernels.heap.region._PROT_READ", 1 << 20)  # what mprotect refuses
        with pytest.raises(OSError, match="mprotect"):
            region.read_only()
    assert resources() == before
    region.release()
    with pytest.raises(OSError, match="mremap"):
        region.read_only()  # of what is gone


# ---- what is left


def _keep_a_view(group, read_only_views):
    heap = make(group, read_only_views=read_only_views)
    write(heap.shared_base, 7, b"kept")
    view = heap.shared_memory(7, 4)
    meet(group)
    heap.close(timeout_s=10)
    del heap
    gc.collect()
    maps, seen = resources()[1], bytes(view)
    del view
    gc.collect()
    return maps, seen, resources()[1]


@pytest.mark.parametrize("read_only_views", [False, True])
def test_a_view_keeps_its_mapping_and_no_other(read_only_views):
    assert run_ranks(_keep_a_view, 2, read_only_views, mode="process") == [(1, b"kept", 0)] * 2


def _close_in_turn(group):
    heap = make(group, read_only_views=group.rank % 2 == 0)
    for turn in range(group.num_ranks):  # the maker first
        if group.rank == turn:
            heap.close(timeout_s=0)
        meet(group)
        if group.rank > turn:
            write(heap.shared_base, group.rank, b"x")
            assert bytes(heap.shared_memory(group.rank, 1)) == b"x"


def test_the_last_thread_to_close_unmaps():
    before = resources()
    run_ranks(_close_in_turn, 3)
    assert resources() == before


def _cycles(group):
    before = resources()
    for i in range(30):
        make(group, read_only_views=i % 2 == 0).close(timeout_s=10)
    return before, resources()


def test_cycles_leave_nothing_in_a_process():
    for before, after in run_ranks(_cycles, 3, mode="process"):
        assert before == after


def test_cycles_leave_nothing_in_a_process_of_threads():
    before = resources()
    run_ranks(_cycles, 3, mode="thread")
    assert before == resources()


def _drop_without_close(group):
    before = resources()
    heap = make(group, read_only_views=True)
    meet(group)
    del heap
    gc.collect()
    assert resources() == before
    meet(group)


def test_a_dropped_heap_is_released():
    run_ranks(_drop_without_close, 2, mode="process")


def _kill_the_maker(group):
    heap = make(group)
    if group.rank() == 0:
        write(heap.shared_base, 0, b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
    while 0 not in heap.lost_peers():
        time.sleep(0.001)
    return bytes(heap.shared_memory(0, 10)), os.listdir("/dev/shm")


def test_a_killed_maker_takes_nothing_along_and_leaves_nothing():
    before = os.listdir("/dev/shm")
    results = run_ranks(_kill_the_maker, 3, mode="process", expect_exit={0: -9})
    assert results[1:] == [(b"last words", before)] * 2


# ---- memory limits

PAGE = 4096


def _make_under(group, limits):
    memory.limits = limits  # for processes; for threads it is that already
    try:
        make(group).close(timeout_s=10)
    except DcpError as error:
        return type(error), str(error), error.ranks
    return None


def _limits(room):
    return [memory.Limit((), "host memory", room)]


@BOTH
def test_the_shared_region_counts_once(mode, monkeypatch):
    # Made-up limits: where the check is broken, the real one would be found by the machine's last byte.
    size = -(-SHARED // PAGE) * PAGE
    needed = 3 * NBYTES + size
    enough, too_little = partial(_limits, needed), partial(_limits, needed - 1)
    monkeypatch.setattr(memory, "limits", enough)
    assert run_ranks(_make_under, 3, enough, mode=mode) == [None] * 3
    monkeypatch.setattr(memory, "limits", too_little)
    error = same_everywhere(run_ranks(_make_under, 3, too_little, mode=mode))
    text = (
        f"workspace: host memory must have room for 3 regions of {NBYTES} bytes and a shared one of {size} bytes "
        f"({needed} bytes needed, {needed - 1} bytes available)"
    )
    assert error == (DcpError, text, (0, 1, 2))


def test_a_limit_that_the_maker_does_not_live_under_does_not_count_it():
    pods = [[memory.Limit((), "host", 100 * PAGE), memory.Limit((1, n), f"pod {n}", 30 * PAGE)] for n in (1, 1, 2, 2)]
    memory.require("op", pods, 10 * PAGE, 10 * PAGE)
    memory.require("op", pods, 15 * PAGE)
    with pytest.raises(DcpError, match=f"pod 1 must .* of {11 * PAGE} bytes .{31 * PAGE} bytes needed") as caught:
        memory.require("op", pods, 10 * PAGE, 10 * PAGE + 1)  # a whole page more
    assert caught.value.ranks == (0, 1)
    pods[0][1] = pods[1][1] = memory.Limit((1, 1), "pod 1", 1000 * PAGE)
    memory.require("op", pods, 15 * PAGE, 40 * PAGE)  # pod 2 has room for no more than its regions
    with pytest.raises(DcpError, match=f"host must .* of {41 * PAGE} bytes .{101 * PAGE} bytes needed"):
        memory.require("op", pods, 15 * PAGE, 41 * PAGE)
