"""The CPU heap: what every rank sees, what is left afterwards, and that all ranks agree about a refusal."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.heap import sockets
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import Group, TorchGroup, as_group
from dcpkernels.heap.region import check_file, create_file
from dcpkernels.testing import run_ranks

NBYTES = 3 * 4096 + 100  # not a multiple of the page
BOTH = pytest.mark.parametrize("mode", ["thread", "process"])


def make(group, nbytes=NBYTES, *, init=lambda address: None, payload=None, timeout_s=20.0):
    return CpuHeap.create(as_group(group), nbytes, init=init, payload=payload or {}, timeout_s=timeout_s)


def write(address, offset, data):
    ctypes.memmove(address + offset, data, len(data))


def meet(group):
    as_group(group).all_gather_object(None, timeout_s=20.0)


def outcome(call):
    """(class, text, ranks) of what `call` raises; fails when it raises nothing."""
    try:
        call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    raise AssertionError("must raise")


def resources():
    """What a heap could leave behind: memory files and Unix sockets that are open, mappings, files in /dev/shm.

    Not all descriptors: gloo opens and closes TCP sockets of its own, when it likes.
    """
    maps = Path("/proc/self/maps").read_text().count("memfd:dcpkernels-heap")
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    sockets = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets += os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]") in unix
    return sockets, maps, len(memory_files()), sorted(os.listdir("/dev/shm"))


def memory_files():
    """Open descriptors of regions."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread's, closed since
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if link.startswith("/memfd:dcpkernels-heap")]


def same_everywhere(results):
    assert all(result == results[0] for result in results), results
    return results[0]


# ---- what the ranks see


def _see_each_other(group):
    rank, num_ranks = as_group(group).rank, as_group(group).num_ranks
    pattern = [bytes([17 * r + 1]) * NBYTES for r in range(num_ranks)]

    def init(address):
        assert ctypes.string_at(address, NBYTES) == bytes(NBYTES)  # zeroed
        write(address, 0, pattern[rank])

    heap = make(group, init=init)
    assert (heap.rank, heap.num_ranks, heap.nbytes) == (rank, num_ranks, NBYTES)
    assert not any(os.get_inheritable(fd) for fd in heap.socket_fds if fd >= 0)
    assert all(base % 4096 == 0 for base in heap.bases) and len(set(heap.bases)) == num_ranks
    seen = [ctypes.string_at(base, NBYTES) for base in heap.bases]
    meet(group)
    assert resources()[1] == num_ranks and not memory_files()  # a mapping needs no open file
    for peer, base in enumerate(heap.bases):
        write(base, rank, bytes([100 + rank]))
        write(base, NBYTES - 1 - rank, bytes([200 + rank]))
    meet(group)
    own = ctypes.string_at(heap.bases[rank], NBYTES)
    result = heap.bases[:], heap.socket_fds[:]
    assert seen == pattern
    assert own[:num_ranks] == bytes(100 + r for r in range(num_ranks))
    assert own[: -1 - num_ranks : -1] == bytes(200 + r for r in range(num_ranks))
    heap.close(timeout_s=10)
    assert heap.bases == [] and heap.socket_fds == [-1] * num_ranks and heap.lost_peers() == ()
    heap.close(timeout_s=10)  # again
    return result


@BOTH
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_see_all_bytes(mode, num_ranks):
    results = run_ranks(_see_each_other, num_ranks, mode=mode)
    for rank, (bases, fds) in enumerate(results):
        if mode == "thread":
            assert bases == results[0][0]  # one mapping: equal pointers, not only equal bytes
        expected = {rank} if mode == "process" else set(range(num_ranks))
        assert {peer for peer, fd in enumerate(fds) if fd == -1} == expected
    assert resources()[1] == 0


def _close_in_turn(group):
    heap = make(group, init=lambda address: write(address, 0, bytes([group.rank + 1])))
    for turn in range(group.num_ranks):
        if group.rank == turn:
            heap.close(timeout_s=0)
        meet(group)
        if group.rank > turn:
            assert [ctypes.string_at(base, 1)[0] for base in heap.bases] == [1, 2, 3]


def test_the_last_thread_to_close_unmaps():
    before = resources()
    run_ranks(_close_in_turn, 3)
    assert resources() == before


def _in_subgroups(world):
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in ([2, 0], [1, 3], [3, 2, 1])]
    seen = []
    for group in groups:
        if dist.get_rank(group) >= 0:
            me = bytes([world.rank()])
            heap = make(group, init=lambda address, me=me: write(address, 0, me))
            seen.append((heap.rank, [ctypes.string_at(base, 1)[0] for base in heap.bases]))
            heap.close(timeout_s=10)
        else:
            with pytest.raises(DcpInvalidArgument, match="this process"):
                TorchGroup(group)
    return seen


def test_ranks_follow_the_order_of_an_unsorted_group():
    assert run_ranks(_in_subgroups, 4, mode="process") == [
        [(1, [2, 0])],
        [(0, [1, 3]), (2, [3, 2, 1])],
        [(0, [2, 0]), (1, [3, 2, 1])],
        [(1, [1, 3]), (0, [3, 2, 1])],
    ]


def _two_heaps(group):
    a = make(group, init=lambda address: write(address, 0, b"a"))
    b = make(group, init=lambda address: write(address, 0, b"b"))
    a.close(timeout_s=10)
    meet(group)
    assert b.lost_peers() == () and [ctypes.string_at(base, 1) for base in b.bases] == [b"b"] * 2
    b.close(timeout_s=10)


@BOTH
def test_two_heaps_live_side_by_side(mode):
    run_ranks(_two_heaps, 2, mode=mode)


# ---- what is left


def _cycles(group):
    before = resources()
    for _ in range(50):
        make(group).close(timeout_s=10)
    return before, resources()


def test_fifty_cycles_leave_nothing_in_a_process():
    for before, after in run_ranks(_cycles, 4, mode="process"):
        assert before == after


def test_fifty_cycles_leave_nothing_in_a_process_of_threads():
    before = resources()  # from outside: a thread would count what another one holds at that moment
    run_ranks(_cycles, 4, mode="thread")
    assert before == resources()


def _drop_without_close(group):
    before = resources()
    heap = make(group)
    assert resources()[1] == group.size()
    if group.rank() == 1:
        del heap
        gc.collect()
        assert resources() == before
    meet(group)
    lost = heap.lost_peers() if group.rank() != 1 else None
    meet(group)
    return lost


def test_a_dropped_heap_is_released_and_counts_as_lost():
    assert run_ranks(_drop_without_close, 3, mode="process") == [(1,), None, (1,)]


# Forks of a process that has imported all. Each ends as a script does.
EXIT = """
import os, sys
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.testing.thread_group import ThreadGroup
for last in sys.argv[1:]:
    if os.fork() == 0:
        heap = CpuHeap.create(ThreadGroup.create(1)[0], 4096, init=lambda a: None, payload={}, timeout_s=5)
        exec(last)
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_the_interpreter_exits_in_silence():
    lasts = ["", "sys.modules['dcpkernels.heap'].keep = heap", "heap.close(timeout_s=5)"]
    done = subprocess.run([sys.executable, "-c", EXIT, *lasts], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n" * 3, "")


def test_the_heap_needs_no_torch():
    code = "import sys, dcpkernels.heap.cpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def _close_after_the_group(group):
    heap = make(group)
    meet(group)
    dist.destroy_process_group()
    heap.close(timeout_s=10)
    return resources()[1]


def test_closes_when_the_process_group_is_gone():
    assert run_ranks(_close_after_the_group, 2, mode="process") == [0, 0]


# ---- refusals are the same on every rank, and leave nothing


def _fail(group, kind):
    group = as_group(group)
    before = resources()
    rank, nbytes, payload = group.rank, NBYTES, {}

    def init(address):
        if kind == "init" and rank in (1, 2):
            raise OSError(5, "disk on fire") if rank == 1 else DcpUnsupported("other text")
        if kind == "unsupported" and rank == 2:
            raise DcpUnsupported("lanes must be even (got 3)")

    if kind == "memory":
        nbytes = 1 << 50
    elif kind == "payload":
        payload = {"build": "abc", "num_heads": 64 if rank == 1 else 96} | ({} if rank == 2 else {"old": 1})
    elif kind == "nbytes":
        nbytes += rank == 0
    elif kind == "no bytes":
        nbytes = 0
    result = outcome(lambda: make(group, nbytes, init=init, payload=payload))
    meet(group)  # the group is still in step,
    make(group).close(timeout_s=10)  # and can build a heap
    return result, before, resources()


EXPECTED = {
    "init": (
        DcpError,
        "workspace: create region failed on rank 1: OSError: [Errno 5] disk on fire (also failed on rank 2)",
        (1, 2),
    ),
    "unsupported": (
        DcpUnsupported,
        "workspace: create region failed on rank 2: lanes must be even (got 3)",
        (2,),
    ),
    "payload": (
        DcpUnsupported,
        (
            "workspace: all ranks must agree on num_heads (ranks 0, 2, 3: 96; rank 1: 64), "
            "old (ranks 0, 1, 3: 1; rank 2: not given)"
        ),
        (1, 2),
    ),
    "nbytes": (
        DcpUnsupported,
        f"workspace: all ranks must agree on nbytes (rank 0: {NBYTES + 1}; ranks 1, 2, 3: {NBYTES})",
        (0,),
    ),
    "no bytes": (
        DcpInvalidArgument,
        "workspace: check failed on rank 0: nbytes must be positive (got 0) (also failed on ranks 1, 2, 3)",
        (0, 1, 2, 3),
    ),
}


@BOTH
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_refusal_is_the_same_on_every_rank(mode, kind):
    before = resources()
    results = run_ranks(_fail, 4, kind, mode=mode)
    assert same_everywhere([error for error, _, _ in results]) == EXPECTED[kind]
    assert resources() == before and (mode == "thread" or all(start == end for _, start, end in results))


@BOTH
def test_too_large_a_heap_names_needed_and_available_bytes(mode):
    results = run_ranks(_fail, 4, "memory", mode=mode)
    cls, text, ranks = same_everywhere([error for error, _, _ in results])
    assert cls is DcpError and ranks == (0, 1, 2, 3)
    assert f"4 regions of {1 << 50} bytes ({4 << 50} bytes needed, " in text
    available = int(text.split("bytes needed, ")[1].split()[0])
    assert 0 < available < 1 << 50


def _elsewhere(group, field):
    host, network = sockets.host_id()
    if group.rank() == 1:
        changed = ("other-boot", network) if field == "host" else (host, network + 1)
        sockets.host_id = lambda: changed
    return outcome(lambda: make(group))


@pytest.mark.parametrize("field", ["host", "network namespace"])
def test_another_host_or_network_is_refused_by_all(field):
    cls, text, ranks = same_everywhere(run_ranks(_elsewhere, 3, field, mode="process"))
    assert cls is DcpUnsupported and ranks == (1,) and f"all ranks must agree on {field}" in text


def test_received_files_must_be_sealed_and_of_the_size(tmp_path):
    good = create_file(8192)
    check_file(good, 8192, 3)
    with pytest.raises(OSError):
        os.ftruncate(good, 4096)
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    (tmp_path / "plain").write_bytes(bytes(8192))
    plain = os.open(tmp_path / "plain", os.O_RDWR)
    pipe = os.pipe()
    for fd, nbytes, text in [
        (good, 8193, "must have 8193 bytes"),
        (unsealed, 8192, "must be sealed"),
        (plain, 8192, "must be sealed"),
        (pipe[0], 0, "must have 0 bytes"),
    ]:
        with pytest.raises(DcpError, match=f"rank 3 {text}"):
            check_file(fd, nbytes, 3)
    for fd in (good, unsealed, plain, *pipe):
        os.close(fd)


@pytest.mark.parametrize("thing", [3, "world", object()])
def test_as_group_refuses_what_is_no_group(thing):
    with pytest.raises(DcpInvalidArgument, match="ProcessGroup"):
        as_group(thing)


def test_as_group_needs_an_initialised_torch_distributed():
    with pytest.raises(DcpInvalidArgument, match="init_process_group"):
        as_group(None)


def _as_group(group):
    assert as_group(as_group(group)) is not group
    wrapped = as_group(group)
    assert isinstance(wrapped, Group) and as_group(wrapped) is wrapped
    assert as_group(None).rank == wrapped.rank == group.rank()


def test_as_group_wraps_a_process_group_once():
    run_ranks(_as_group, 2, mode="process")
