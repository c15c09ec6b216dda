"""Unix sockets between processes: find each other, know each other, pass messages and descriptors.

Names are abstract (no file, nothing to unlink), so ranks must share a network namespace. A connection counts
only if the kernel says that its other end runs as the same user and its first message has the random nonce
that travelled through the group; anything else that connects is dropped. Sockets keep message boundaries
(SOCK_SEQPACKET): one send is one message, and an empty read is the end of the peer's process or heap.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap.group import Deadline
from dcpkernels.heap.verdict import rank_list

NONCE_BYTES = 16
MAX_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and what a caller must say to be let in. Travels through the group."""

    name: bytes
    nonce: bytes


def host_id() -> tuple[str, int]:
    """Boot and network namespace: equal exactly when two processes can reach each other's abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, os.stat("/proc/self/ns/net").st_ino


class Listener:
    """A listening socket under a random abstract name; exists before its address is told to anybody."""

    def __init__(self, backlog: int) -> None:
        name = b"\0dcpkernels-" + secrets.token_hex(16).encode()
        self.address = Address(name, secrets.token_bytes(NONCE_BYTES))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self.socket.bind(self.address.name)
            self.socket.listen(backlog)
        except BaseException:
            self.socket.close()
            raise
        after_fork.add(self)

    def close(self) -> None:
        self.socket.close()

    close_in_child = close


# Open sockets by weak reference. A fork hook can be set only once and never removed, so it cannot live in the
# objects.
after_fork: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_after_fork() -> None:
    for item in list(after_fork):
        item.close_in_child()


os.register_at_fork(after_in_child=_close_after_fork)


def dial(peer: int, address: Address, deadline: Deadline, *, probe: bool = False) -> socket.socket:
    """Connects to a rank's listener; a probe only finds out whether there is one, and hangs up."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        while True:
            code = sock.connect_ex(address.name)
            if code == 0 or (probe and code == errno.EAGAIN):
                break
            if code == errno.ECONNREFUSED:
                raise gone(peer)
            if code != errno.EAGAIN:  # EAGAIN: the queue of the listener is full
                raise OSError(code, f"connect to rank {peer}: {os.strerror(code)}")
            if deadline.expired:
                raise timeout({peer}, deadline)
            time.sleep(0.005)
        if probe:
            sock.close()
        elif not _same_user(sock):
            raise DcpError(f"rank {peer} must run as the same user (it does not)", ranks=(peer,))
        return sock
    except BaseException:
        sock.close()
        raise


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection by a process of the same user; None when there is none."""
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    sock.setblocking(False)
    if not _same_user(sock):
        sock.close()
        return None
    return sock


def _same_user(sock: socket.socket) -> bool:
    uid: int
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()


def read(sock: socket.socket, fds: list[int] | None = None) -> bytes | None:
    """One message; None when there is none yet, b"" at the end. Descriptors that came along go to `fds`."""
    resets = 0
    while True:
        try:
            room_for_one = socket.CMSG_SPACE(4)
            message, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, room_for_one, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionError:
            # Reported once, ahead of messages still in the queue, when the peer closed with some of ours
            # unread; its goodbye may be among them.
            resets += 1
            if resets > 2:
                return b""
            continue
        received = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
        if fds is not None:
            fds.extend(received)
        else:
            for fd in received:
                os.close(fd)
        return message


def peek(sock: socket.socket) -> bytes:
    """The message that `read` would give, which stays where it is; b"" also when there is none."""
    try:
        return sock.recv(MAX_MESSAGE, socket.MSG_PEEK)
    except OSError:
        return b""


def send(sock: socket.socket, peer: int, message: bytes, deadline: Deadline, fd: int | None = None) -> None:
    """Sends a message to rank `peer`, with a descriptor if given. Raises DcpPeerLost, DcpTimeout or OSError."""
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    while True:
        try:
            sock.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            if not poller.poll(poll_ms(deadline)):
                raise timeout({peer}, deadline) from None
        except ConnectionError:
            raise gone(peer) from None


def try_send(sock: socket.socket, message: bytes) -> None:
    """Sends one message if that is possible at once; never blocks, never raises."""
    try:
        sock.send(message, socket.MSG_NOSIGNAL)
    except OSError:
        pass  # it is gone, or so far behind that its queue is full: it will see the end of file


def poll_ms(deadline: Deadline) -> float:
    """What is left, for `poll`: whole days at most, because poll counts in an int."""
    return min(deadline.remaining_s(), 86400.0) * 1000


def timeout(peers: Iterable[int], deadline: Deadline) -> DcpTimeout:
    missing = sorted(peers)
    return DcpTimeout(f"no answer from {rank_list(missing)} within {deadline.timeout_s:.3g} s", ranks=missing)


def gone(peer: int) -> DcpPeerLost:
    return DcpPeerLost(f"rank {peer} is gone: its process ended, or it gave up", ranks=(peer,))
