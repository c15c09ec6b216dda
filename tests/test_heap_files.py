"""The descriptors that ranks exchange: what a rank takes, what becomes of what it does not take, and who else can get at
them: processes that it starts, processes of another user, another job with the same names."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dcpkernels import Workspace, WorkspaceConfig, _backend
from dcpkernels.errors import DcpError, DcpUnsupported
from dcpkernels.heap import cpu, sockets
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import Deadline, as_group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.region import check_file, create_file
from dcpkernels.testing import run_ranks
from tests.heap_sockets import (
    as_another_process,
    as_another_user,
    assert_connected,
    connect,
    descriptors,
    listeners,
    only_root,
    told,
)
from tests.test_heap import meet, memory_files, outcome, resources, same_everywhere

NBYTES = 8192
ADD_SEALS, GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, WRITE = 1, 2, 4, 8


def make(group, nbytes=NBYTES, *, init=lambda address: None, **fields):
    return CpuHeap.create(as_group(group), nbytes, init=init, payload={}, timeout_s=60.0, **fields)


# -- what is taken


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, ADD_SEALS, seals)
    return fd


def reopened(fd: int, flags: int) -> int:
    other = os.open(f"/proc/self/fd/{fd}", flags)
    os.close(fd)
    return other


def a_socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


def a_pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


ALL = SEAL | SHRINK | GROW
FILES = {
    "one byte less": (lambda: memfd(NBYTES - 1, ALL), f"must have {NBYTES} bytes (got {NBYTES - 1})"),
    "one byte more": (lambda: memfd(NBYTES + 1, ALL), f"must have {NBYTES} bytes (got {NBYTES + 1})"),
    "empty": (lambda: memfd(0, ALL), "bytes (got 0)"),
    "2**62 bytes": (lambda: memfd(2**62, ALL), f"bytes (got {2**62})"),
    "may shrink": (lambda: memfd(NBYTES, SEAL | GROW), "must be sealed against resizing"),
    "may grow": (lambda: memfd(NBYTES, SEAL | SHRINK), "must be sealed against resizing"),
    "may get more seals": (lambda: memfd(NBYTES, SHRINK | GROW), "must be sealed against resizing"),
    "without seals": (lambda: memfd(NBYTES, 0), "must be sealed against resizing"),
    "sealed against writing": (lambda: memfd(NBYTES, ALL | WRITE), "mmap of"),
    "open for reading": (lambda: reopened(memfd(NBYTES, ALL), os.O_RDONLY), "mmap of"),
    "only a path": (lambda: reopened(memfd(NBYTES, ALL), os.O_PATH), "must be sealed against resizing"),
    "a pipe": (a_pipe, "bytes (got 0)"),
    "a socket": (a_socket, "bytes (got 0)"),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), "bytes (got 0)"),
    "a folder": (lambda: os.open("/proc", os.O_RDONLY), "must have"),
}


def offer(group):
    """Rank 1 gives one wrong file after the other; what each rank says to it, and what is left."""
    results, create = [], create_file
    for file, _ in FILES.values():
        before = resources()
        with pytest.MonkeyPatch.context() as patch:
            if group.rank() == 1:
                given = file()
                patch.setattr(cpu, "create_file", create)
                exchange = Mesh.exchange_fds

                def exchange_fds(mesh, fd, *arguments, given=given, exchange=exchange, **keywords):
                    exchange(mesh, given, *arguments, **keywords)

                patch.setattr(Mesh, "exchange_fds", exchange_fds)
            error = outcome(lambda: make(group))
        if group.rank() == 1:
            os.close(given)
        results.append((error, before == resources()))
        meet(group)
    make(group).close(timeout_s=10)
    return results


def test_only_a_sealed_file_of_the_right_size_is_taken():
    """Anything else is an error that is the same on all ranks and names the rank that gave it; nothing is left of it,
    and the next try works."""
    for (what, (_, text)), results in zip(
        FILES.items(), zip(*run_ranks(offer, 3, mode="process", timeout_s=180.0), strict=True), strict=True
    ):
        cls, said, ranks = same_everywhere([error for error, _ in results])
        assert cls is DcpError and text in said and "map peers failed on rank 0" in said, (what, said)
        assert ranks == (1,) or "mmap of" in text, (what, ranks)
        assert all(clean for _, clean in results), what


def exchange(meshes, send, take) -> list[Exception | None]:
    """What exchange_fds raises on each of the meshes, which are of threads. `send` may do what a rank would not."""
    errors: list[Exception | None] = [None] * len(meshes)

    def rank(mesh: Mesh) -> None:
        try:
            mesh.exchange_fds(send(mesh), take, Deadline(10.0))
        except Exception as error:  # noqa: BLE001
            errors[mesh.rank] = error

    threads = [threading.Thread(target=rank, args=(mesh,)) for mesh in meshes]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    return errors


@pytest.mark.parametrize("num_fds", [0, 2, 3, 253])
def test_none_or_several_descriptors_in_one_message(num_fds, monkeypatch):
    """Those that are too many are closed, whoever sent them; where there is none it is an error that says so."""
    right, wrong, taken = create_file(NBYTES), os.open("/dev/null", os.O_RDWR), []
    send = sockets.send

    def send_several(sock, peer, message, deadline, fd=None):
        if fd is None:
            send(sock, peer, message, deadline)
        else:
            socket.send_fds(sock, [message], [right, *[wrong] * num_fds][:num_fds])

    monkeypatch.setattr(sockets, "send", send_several)
    with listeners(2) as (made, addresses):
        meshes = connect(made, addresses)
        before = descriptors()
        errors = exchange(meshes, lambda mesh: right, lambda peer, fd: taken.append(os.readlink(f"/proc/self/fd/{fd}")))
        assert descriptors() == before
        if num_fds == 0:
            assert all("file must fit under the limit of open files" in str(error) for error in errors) and not taken
        else:
            assert errors == [None, None] and len(taken) == 2 and all("dcpkernels-heap" in link for link in taken)
        monkeypatch.undo()
        assert_connected(meshes)
    os.close(right), os.close(wrong)


def test_descriptors_that_nobody_asked_for_are_closed():
    """Along with the words of a gather, a goodbye, and a message that nobody waits for."""
    with listeners(2) as (made, addresses), open("/dev/null") as gift:
        meshes = connect(made, addresses)
        before = descriptors()
        send = sockets.send
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sockets,
                "send",
                lambda sock, peer, message, deadline: socket.send_fds(sock, [message], [gift.fileno()] * 9),
            )
            threads = [threading.Thread(target=mesh.all_gather_object, args=(1,)) for mesh in meshes]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert descriptors() == before and sockets.send is send
        socket.send_fds(socket.socket(fileno=os.dup(meshes[0].socket_fds[1])), [b"G?"], [gift.fileno()] * 9)
        assert meshes[1].lost_peers() == ()  # reads it
        assert descriptors() == before
        [mesh.close() for mesh in meshes]


def test_a_size_that_was_checked_stays():
    """Whoever has the descriptor of a region: no call changes its size, or takes the seals off."""
    fd = create_file(NBYTES)
    check_file(fd, NBYTES, 0)
    for change in (
        lambda: os.ftruncate(fd, NBYTES - 1),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, NBYTES + 1),
        lambda: os.pwrite(fd, b"x", NBYTES),
        lambda: os.posix_fallocate(fd, 0, NBYTES + 4096),
        lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
        lambda: fcntl.fcntl(fd, ADD_SEALS, WRITE),
        lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC)),
    ):
        with pytest.raises(OSError):
            change()
        assert os.fstat(fd).st_size == NBYTES and fcntl.fcntl(fd, GET_SEALS) & ALL == ALL
    os.close(fd)


# -- who else gets at them


def look_around() -> list[str]:
    """What a program has open that this process starts as carelessly as it can."""
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    links = [line.split(" -> ")[1] for line in listed.stdout.splitlines() if " -> " in line]
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return [link for link in links if link in unix or "dcpkernels-heap" in link]


def start_programs(group):
    """One while the rank waits for callers, one while it has its own file and a peer's open, one when all is made."""
    seen = {"before": look_around()}
    let_in, check = Mesh._let_in, cpu.check_file
    held = []

    def look_and_let_in(mesh, *arguments):
        let_in(mesh, *arguments)
        held.append(resources()[0] - sockets_before)
        seen["connected"] = look_around()

    def look_and_check(*arguments):
        held.append(len(memory_files()))
        seen["exchange"] = look_around()
        check(*arguments)

    sockets_before = resources()[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "_let_in", look_and_let_in)
        patch.setattr(cpu, "check_file", look_and_check)
        heap = make(group)
    seen["made"] = look_around()
    heap.close(timeout_s=10)
    assert held == [2, 2], held  # the listener and the peer's socket; two files
    return seen


def test_programs_that_a_rank_starts_inherit_nothing():
    """Sockets and files are closed on exec, those that have just come from a peer too."""
    for seen in run_ranks(start_programs, 2, mode="process"):
        assert seen["connected"] == seen["exchange"] == seen["made"] == seen["before"]


SYS_PIDFD_GETFD, SYS_PROCESS_VM_READV = 438, 310  # of x86-64


def spy(pid: int, address: int, fds: list[int]) -> list[str]:
    """Every way to what a process has open or mapped, for who is not its user: what there is to see."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = []

    def attempt(what, way):
        try:
            found.append(f"{what}: {way()!r}")
        except OSError as error:
            if error.errno not in (1, 13):  # EPERM, EACCES
                found.append(f"{what}: {error}")

    def call(number, *arguments):
        # As whole words: the seventh argument of syscall() is on the stack, where an int leaves half a word as it was.
        words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
        if (result := libc.syscall(ctypes.c_long(number), *words)) < 0:
            raise OSError(ctypes.get_errno(), "")
        return result

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    for fd in fds:
        attempt(f"/proc/PID/fd/{fd}", lambda fd=fd: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        attempt(f"link of {fd}", lambda fd=fd: os.readlink(f"/proc/{pid}/fd/{fd}"))
    for name in ("fd", "map_files"):
        attempt(name, lambda name=name: os.listdir(f"/proc/{pid}/{name}"))
    for name in ("mem", "maps", "environ"):
        attempt(name, lambda name=name: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
    if os.uname().machine == "x86_64":
        pidfd = os.pidfd_open(pid)
        for fd in fds:
            attempt(f"pidfd_getfd {fd}", lambda fd=fd: call(SYS_PIDFD_GETFD, pidfd, fd, 0))
        here, there = Vector(ctypes.addressof(ctypes.create_string_buffer(8)), 8), Vector(address, 8)
        attempt(
            "process_vm_readv",
            lambda: call(SYS_PROCESS_VM_READV, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
        )
    return found


def spied_upon(group):
    check, found = cpu.check_file, []

    def look(*arguments):
        check(*arguments)
        fds = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
        found.append(told(as_another_user(spy, os.getpid(), addresses[0], fds)))

    addresses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "check_file", look)
        heap = make(group, init=addresses.append)
    found.append(told(as_another_user(spy, os.getpid(), heap.bases[0], heap.socket_fds[1 - heap.rank :][:1])))
    seen_by_oneself = told(as_another_process(spy, os.getpid(), heap.bases[0], []))
    meet(group)
    heap.close(timeout_s=10)
    return found, seen_by_oneself


@only_root
def test_another_user_can_open_nothing_of_it():
    """Neither while the descriptors are open nor afterwards, by no way that /proc and the kernel have."""
    for found, seen_by_oneself in run_ranks(spied_upon, 2, mode="process"):
        assert found == ["[]", "[]"]
        for way in ("fd: ", "map_files: ", "mem: ", "maps: "):
            assert way in seen_by_oneself, "is that a way at all?"


# -- another job


def jobs_side_by_side(world, folder):
    """Ranks 0 and 1 are a job, with a WORLD of their own, and 2 and 3 another one. Each round begins in both at once;
    what a rank finds in the regions."""
    job, rank = divmod(world.rank(), 2)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"job{job}"), 2), rank=rank, world_size=2)
    found = []
    for i in range(20):
        (folder / f"{job}-{rank}-{i}").touch()
        while not (folder / f"{1 - job}-{rank}-{i}").exists():
            time.sleep(0.0005)
        mark = bytes([100 * job + 10 * rank + i % 10])
        heap = make(dist.group.WORLD, init=lambda address, mark=mark: ctypes.memmove(address, mark * NBYTES, NBYTES))
        found.append([ctypes.string_at(base, NBYTES) for base in heap.bases])
        heap.close(timeout_s=10)
    return dist.group.WORLD.group_name, found


def test_two_jobs_with_the_same_names_do_not_meet(tmp_path):
    """Twenty heaps at the same time in two jobs on one host, whose groups have the same name, ranks and sizes."""
    results = run_ranks(jobs_side_by_side, 4, tmp_path, mode="process", timeout_s=180.0)
    assert len({name for name, _ in results}) == 1, "the names are not the same"
    for number, (_, found) in enumerate(results):
        for i, regions in enumerate(found):
            marks = [100 * (number // 2) + 10 * rank + i % 10 for rank in (0, 1)]
            assert regions == [bytes([mark]) * NBYTES for mark in marks]


# -- another version


def another_version(group):
    config = WorkspaceConfig(6, 64, 2, timeout_s=20.0, first_call_timeout_s=20.0)
    raised, module, before = [], _backend.load("cpu"), resources()
    for name, value in (("PROTOCOL_VERSION", 0), ("BUILD_ID", "of last week")):
        for backend in ("direct", "auto"):
            with pytest.MonkeyPatch.context() as patch:
                if group.rank() == 1:
                    patch.setattr(module, name, value)
                raised.append(outcome(lambda backend=backend: Workspace(group, config=config, backend=backend)))
    assert resources() == before
    Workspace(group, config=config, backend="direct").close()
    return raised


def test_another_version_is_refused_before_anything_is_made():
    """Of the protocol, or of the build, on one rank: the same on all, with both values; no backend is good enough."""
    errors = same_everywhere(run_ranks(another_version, 3, mode="process"))
    for (cls, text, ranks), name in zip(errors, ["protocol", "protocol", "build", "build"], strict=True):
        assert cls is DcpUnsupported and ranks == (1,) and f"all ranks must agree on {name} (rank" in text, text
        assert ("rank 1: 0" if name == "protocol" else "rank 1: 'of last week'") in text, text
