"""The CPU heap when a rank dies, is late, gives up, runs out of descriptors, or when strangers knock."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import as_group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.region import create_file
from dcpkernels.testing import run_ranks

NBYTES = 1 << 16


def make(group, *, init=lambda address: None, timeout_s=20.0, nbytes=NBYTES):
    return CpuHeap.create(as_group(group), nbytes, init=init, payload={}, timeout_s=timeout_s)


def meet(group):
    as_group(group).all_gather_object(None, timeout_s=20.0)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def unix_sockets_and_files():
    """How many of ours are open. Torch's TCP connections come and go by themselves."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    numbers = [link.removeprefix("socket:[").removesuffix("]") for link in links]
    return sum(number in unix or number.startswith("/memfd:dcpkernels-heap") for number in numbers)


def outcome(call):
    """(class, text, ranks, seconds) of what `call` raises, None when it does not."""
    start = time.monotonic()
    try:
        call()
    except DcpError as error:
        return type(error), str(error), error.ranks, time.monotonic() - start
    return None


# ---- alive, gone, left


def _kill_one(group, victim):
    heap = make(group)
    meet(group)
    assert heap.lost_peers() == ()
    meet(group)
    if group.rank() == victim:
        for base in heap.bases:
            ctypes.c_double.from_address(base + 8 * victim).value = time.monotonic()
        die()
    while not (lost := heap.lost_peers()):
        time.sleep(0.001)
    seen = time.monotonic() - ctypes.c_double.from_address(heap.bases[group.rank()] + 8 * victim).value
    closing = time.monotonic()
    heap.close(timeout_s=10)  # waits for the survivors, not for the dead
    assert heap.lost_peers() == (victim,)
    return lost, seen, time.monotonic() - closing


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_within_100_ms(victim):
    results = run_ranks(_kill_one, 4, victim, mode="process", expect_exit={victim: -9})
    for lost, seconds, closing_s in (result for result in results if result):
        assert lost == (victim,)
        assert seconds < 0.1 and closing_s < 5


def _leave_in_turn(group):
    heap = make(group)
    for turn in range(group.size()):
        if group.rank() == turn:
            heap.close(timeout_s=0)
        meet(group)
        if group.rank() > turn:
            # Every peer up to `turn` has closed, with this rank's own goodbye never read or not even sent.
            events = select.poll()
            events.register(heap.socket_fds[turn], select.POLLIN)
            assert events.poll(1000)[0][1] & select.POLLHUP
            assert heap.lost_peers() == ()


def test_an_orderly_close_is_no_loss():
    run_ranks(_leave_in_turn, 4, mode="process")


def _unread_on_both_sides(group):
    heap = make(group)
    os.write(heap.socket_fds[1 - group.rank()], b"B")  # one that is not read
    meet(group)
    if group.rank() == 0:
        heap.close(timeout_s=0)
        meet(group)
        return None
    meet(group)
    return heap.lost_peers()


def test_a_goodbye_counts_although_the_connection_was_reset():
    assert run_ranks(_unread_on_both_sides, 2, mode="process") == [None, ()]


def _close_while_a_peer_stays(group):
    heap = make(group)
    if group.rank() == 0:
        start = time.monotonic()
        heap.close(timeout_s=0.3)
        waited = time.monotonic() - start
        meet(group)
        return waited
    meet(group)
    return heap.lost_peers()


def test_close_waits_for_goodbyes_but_not_for_ever():
    waited, lost = run_ranks(_close_while_a_peer_stays, 2, mode="process")
    assert 0.3 <= waited < 5 and lost == ()


def _fork_and_die(group):
    heap = make(group)
    meet(group)
    if group.rank() == 1:
        ready, write_end = os.pipe()
        if os.fork() == 0:
            assert heap.socket_fds == [-1, -1] and heap.lost_peers() == ()
            heap.close(timeout_s=5)
            os.write(write_end, b"x")
            time.sleep(3)
            os._exit(0)
        assert os.read(ready, 1) == b"x"
        assert heap.lost_peers() == () and heap.socket_fds[0] >= 0  # the child's close is its own
        meet(group)
        die()
    meet(group)
    start = time.monotonic()
    while not heap.lost_peers():
        time.sleep(0.001)
    return time.monotonic() - start


def test_a_forked_child_does_not_keep_its_dead_parent_alive():
    assert run_ranks(_fork_and_die, 2, mode="process", expect_exit={1: -9})[0] < 1


# ---- dying, late or giving up while the heap is being made


def _fail_in_create(group, victim, where, timeout_s):
    init = lambda address: None
    if group.rank() == victim:
        if where == "check":
            die()
        elif where in ("connect", "exchange_fds"):
            setattr(Mesh, where, die)
        elif where == "init":
            init = die
        elif where == "late":
            init = lambda address: time.sleep(timeout_s + 1)
        elif where == "late at the last step":
            exchange_fds = Mesh.exchange_fds

            def exchange_and_sleep(*arguments, **keywords):
                exchange_fds(*arguments, **keywords)
                time.sleep(timeout_s + 1)

            Mesh.exchange_fds = exchange_and_sleep
        elif where == "Ctrl-C":

            def init(address):
                raise KeyboardInterrupt

    before = unix_sockets_and_files()
    try:
        result = outcome(lambda: make(group, init=init, timeout_s=timeout_s))
    except KeyboardInterrupt:
        result = "interrupted"
    assert unix_sockets_and_files() == before
    time.sleep(0.5)  # a rank that exits now would wake others that are stuck
    return result


def _survivors(where, victim, timeout_s=20.0):
    dead = {} if where.startswith("late") or where == "Ctrl-C" else {victim: -9}
    results = run_ranks(_fail_in_create, 5, victim, where, timeout_s, mode="process", expect_exit=dead)
    return [result for rank, result in enumerate(results) if rank != victim], results[victim]


@pytest.mark.parametrize("victim", [0, 2, 4])
@pytest.mark.parametrize("where", ["init", "exchange_fds"])
def test_a_death_after_connecting_is_seen_by_all_at_once(where, victim):
    survivors, _ = _survivors(where, victim)
    step = "create region" if where == "init" else "map peers"
    text = f"workspace: {step}: rank {victim} is gone: its process ended, or it gave up"
    assert {result[:3] for result in survivors} == {(DcpPeerLost, text, (victim,))}
    assert all(seconds < 5 for *_, seconds in survivors)  # not the deadline


@pytest.mark.parametrize("where", ["check", "connect"])
def test_a_death_before_connecting_is_an_error_that_names_the_step(where):
    # Only torch's group connects the ranks here, and only the neighbours of the dead rank hear of it from gloo;
    # the others see the deadline.
    survivors, _ = _survivors(where, 2, timeout_s=2.0)
    for cls, text, _, seconds in survivors:
        assert issubclass(cls, DcpError) and text.startswith(f"workspace: {where}") and seconds < 4


@pytest.mark.parametrize(("where", "step"), [("late", "create region"), ("late at the last step", "map peers")])
def test_a_late_rank_is_named_and_raises_too(where, step):
    survivors, late = _survivors(where, 3, timeout_s=1.0)
    everybody = [*survivors, late]
    assert {(cls, ranks) for cls, _, ranks, _ in everybody} == {(DcpTimeout, (3,))}
    assert all(text.startswith(f"workspace: {step}: no answer from rank 3") for _, text, *_ in everybody)
    assert all(seconds < 3 for *_, seconds in survivors)


def test_ctrl_c_on_one_rank_ends_the_others():
    survivors, interrupted = _survivors("Ctrl-C", 1)
    assert interrupted == "interrupted"
    text = "workspace: create region: rank 1 gave up: KeyboardInterrupt"
    assert {result[:3] for result in survivors} == {(DcpPeerLost, text, (1,))}


def _interrupted_in_torch(group):
    group = as_group(group)
    if group.rank == 1:
        time.sleep(1.5)  # alive, but does not come
        return None
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make(group)
    return time.monotonic() - start


def test_ctrl_c_ends_the_wait_for_a_rank_that_does_not_come():
    assert run_ranks(_interrupted_in_torch, 2, mode="process")[0] < 1


def _comes_later(group):
    if group.rank() == 1:
        time.sleep(0.5)
    make(group).close(timeout_s=10)


def test_a_rank_may_come_later_within_the_deadline():
    run_ranks(_comes_later, 3, mode="process")


# ---- descriptors run out


def _out_of_descriptors(group, spare):
    before = unix_sockets_and_files()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if group.rank() == 1:
        free = [fd for fd in range(1024) if not os.path.lexists(f"/proc/self/fd/{fd}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
    held = []
    result = outcome(lambda: held.append(make(group, timeout_s=10.0)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for heap in held:
        heap.close(timeout_s=10)
    meet(group)
    assert unix_sockets_and_files() == before
    return result


@pytest.mark.parametrize("spare", range(5))
def test_running_out_of_descriptors_is_an_error_on_all_ranks(spare):
    results = run_ranks(_out_of_descriptors, 4, spare, mode="process")
    assert None not in results and len({result[:3] for result in results}) == 1, results
    cls, text, ranks, _ = results[0]
    assert cls is DcpError and ranks[0] <= 1 <= ranks[-1] and "on rank 1: " in text
    assert "Too many open files" in text or "limit of open files" in text
    assert all(seconds < 5 for *_, seconds in results)  # not the deadline


def test_a_heap_of_four_ranks_needs_five_descriptors():
    # Three sockets, a file, and one that is being received.
    assert run_ranks(_out_of_descriptors, 4, 5, mode="process") == [None] * 4


# ---- strangers


def _knocked_at(group):
    """Every rank knocks at every rank's door, in every wrong way, before it connects in the right way."""
    connect, held = Mesh.connect, []

    def knock(mesh, listener, addresses, deadline):
        for peer, address in enumerate(addresses):
            for words in (
                b"",
                b"\0" * 21,
                b"H" + bytes(16) + struct.pack("<I", mesh.rank),  # a wrong nonce
                b"H" + address.nonce + struct.pack("<I", peer),  # a rank that cannot call
                b"H" + address.nonce + struct.pack("<I", 1 << 31),
                b"H" + address.nonce,
                b"H" * 5000,
                *[None] * 40,  # says nothing and stays
            ):
                caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                caller.setblocking(False)
                if caller.connect_ex(address.name) == 0:
                    if words is not None:
                        caller.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 1))])
                    held.append(caller)
        connect(mesh, listener, addresses, deadline)

    Mesh.connect = knock
    before = len(os.listdir("/proc/self/fd"))
    heap = make(group, init=lambda address: ctypes.memset(address, group.rank() + 1, NBYTES))
    seen = [ctypes.string_at(base, NBYTES) for base in heap.bases]
    heap.close(timeout_s=10)
    for caller in held:
        caller.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert seen == [bytes([rank + 1]) * NBYTES for rank in range(group.size())]
    return len(held)


def test_strangers_are_dropped_and_the_ranks_still_meet():
    assert sum(run_ranks(_knocked_at, 4, mode="process")) > 200


def _impersonated(group):
    """Rank 1's own nonce and rank, in the hands of another user's process, before rank 1 itself connects."""
    connect = Mesh.connect
    dropped = []

    def lend(mesh, listener, addresses, deadline):
        if mesh.rank == 1:
            child = os.fork()
            if child == 0:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                    caller.settimeout(10)
                    caller.connect(addresses[0].name)
                    with contextlib.suppress(BrokenPipeError):  # it hung up before it heard a word
                        caller.send(mesh._hello(addresses[0]))
                    with contextlib.suppress(ConnectionResetError):
                        os._exit(10 + len(caller.recv(100)))
                os._exit(10)
            dropped.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        connect(mesh, listener, addresses, deadline)

    Mesh.connect = lend
    make(group).close(timeout_s=10)
    return dropped


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_with_the_right_words_is_dropped():
    assert run_ranks(_impersonated, 2, mode="process") == [[], [10]]


# ---- pages


def test_every_page_exists_and_no_call_for_pages_takes_long(monkeypatch):
    # Before a memfd is mapped all its pages must be there, or a full machine means SIGBUS later. A call for very many
    # could be started over for ever: older kernels give up fallocate at any signal, such as a profiler's.
    calls, real = [], os.posix_fallocate

    def posix_fallocate(fd, offset, length):
        calls.append((offset, length))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    nbytes = (9 << 20) + 5000
    fd = create_file(nbytes)
    assert os.fstat(fd).st_size == nbytes and os.fstat(fd).st_blocks * 512 >= nbytes
    os.close(fd)
    assert max(length for _, length in calls) <= 4 << 20
    assert [offset for offset, _ in calls[1:]] == [offset + length for offset, length in calls[:-1]]
