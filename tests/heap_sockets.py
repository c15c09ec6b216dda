"""What the tests of strangers share: the sockets of several ranks without anything else, processes of another user, and
an object that tells when it is unpickled."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from dcpkernels.errors import DcpError
from dcpkernels.heap.group import Deadline
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.sockets import Listener

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
unpickled: list[str] = []


def explode(what: str) -> None:
    unpickled.append(what)


class Bomb:
    """Leaves a mark in the process in which it is unpickled."""

    def __reduce__(self):
        return explode, ("boom",)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def listeners(num_ranks: int):
    """A listening socket for each rank, as they are before the first rank connects, and what the group tells of them."""
    before = descriptors()
    made = [Listener(num_ranks + 64) for _ in range(num_ranks)]
    yield made, [listener.address for listener in made]
    for listener in made:
        listener.close()
    assert descriptors() == before, "descriptors are left"


def connect(made, addresses, *, ranks=None, timeout_s: float = 10.0) -> list[Mesh | DcpError | None]:
    """What came of connecting, rank by rank. The ranks are threads; to the sockets it is all the same."""
    ranks = range(len(made)) if ranks is None else ranks
    outcomes: list = [None] * len(made)

    def rank(number: int) -> None:
        mesh = Mesh(number, len(made))
        try:
            mesh.connect(made[number], addresses, Deadline(timeout_s))
            outcomes[number] = mesh
        except DcpError as error:
            made[number].close()
            mesh.close()
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in ranks]
    [thread.start() for thread in threads], [thread.join(timeout_s + 20.0) for thread in threads]
    return [outcomes[number] for number in ranks]  # None: it is still there, long after its deadline


def assert_connected(outcomes) -> None:
    """Every rank hears every other one, and itself, and nobody else."""
    heard: list = [None] * len(outcomes)

    def speak(mesh: Mesh) -> None:
        heard[mesh.rank] = mesh.all_gather_object(f"I am {mesh.rank}", timeout_s=10.0)

    assert all(isinstance(outcome, Mesh) for outcome in outcomes), outcomes
    threads = [threading.Thread(target=speak, args=(mesh,)) for mesh in outcomes]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert heard == [[f"I am {rank}" for rank in range(len(outcomes))]] * len(outcomes)
    for mesh in outcomes:
        mesh.close()


def caller_of(name: bytes) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(10.0)
    caller.connect(name)
    return caller


def answer_to(caller: socket.socket) -> bytes:
    """All that it is told before the other end hangs up."""
    with caller, contextlib.suppress(ConnectionResetError):  # hung up with words unread
        return caller.recv(1 << 16)
    return b""


children: dict[int, int] = {}


def as_another_user(body, *arguments) -> int:
    return as_another_process(body, *arguments, user=NOBODY)


def as_another_process(body, *arguments, user: int | None = None) -> int:
    """A child, which writes what `body` returns to the pipe that comes back, and ends."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if user is not None:
                os.setgroups([]), os.setgid(user), os.setuid(user)
            text = repr(body(*arguments))
        except BaseException as error:  # noqa: BLE001  a child must not go on as its parent
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    children[reading] = child
    return reading


def told(reading: int) -> str:
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(children.pop(reading), 0)
    return text
