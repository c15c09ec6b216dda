"""One connected socket between every two ranks of a process group: verdicts, descriptors, and word of a
death.

Over these sockets every rank sees the death of another at once. In a torch group only some ranks see it: a
gloo collective ends on the two neighbours of the dead rank and leaves the others waiting.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpPeerLost, DcpTimeout
from dcpkernels.heap import sockets
from dcpkernels.heap.group import Deadline
from dcpkernels.heap.sockets import Address, Listener
from dcpkernels.heap.verdict import describe, restore

# First byte of a message.
_HELLO, _GATHER, _FD, _ABORT, _BYE = b"H", b"G", b"F", b"A", b"B"
_PROBE_EVERY_S = 0.1  # how often a rank that has not connected yet is asked whether it is still there
_MAX_STRANGERS = 64  # connections that have not said who they are; more of them push out the oldest


class Mesh:
    """The sockets of one rank, and a Group over them.

    `socket_fds[peer]` is the connected socket of each peer, -1 for the own rank, for peers that are not
    connected, and after `close` or in a forked child. The list object stays the same.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.socket_fds = [-1] * num_ranks
        self._peers: dict[int, socket.socket] = {}
        self._left: set[int] = set()  # said goodbye
        self._lost: set[int] = set()  # end of file without a goodbye
        self._failure: DcpError | None = None  # what ended the setup; nothing is sent or awaited after that
        self._lock = threading.Lock()
        self._closing = False
        sockets.after_fork.add(self)

    # ---- connecting

    def connect(self, listener: Listener, addresses: list[Address], deadline: Deadline) -> None:
        """Connects to every lower rank and lets in every higher one.

        All listeners exist before the first rank comes here. Raises DcpTimeout, DcpPeerLost, DcpError or
        OSError.
        """
        # All calls before the first answer: a call needs only the other's listener, so no rank waits for
        # another's progress, and when this rank gives up, all lower ones see its sockets close.
        for peer in range(self.rank):
            self._add(peer, sockets.dial(peer, addresses[peer], deadline))
        for peer in range(self.rank):
            sockets.send(self._peers[peer], peer, self._hello(addresses[peer]), deadline)
        self._let_in(listener, addresses, deadline)
        for peer in range(self.rank):
            _, answer = self._next({peer}, deadline)  # unpickled is only what comes from a rank that is known
            if answer == b"":
                raise sockets.gone(peer)
            if answer != _HELLO + listener.address.nonce + struct.pack("<I", peer):
                raise DcpError(f"rank {peer} must answer with this rank's nonce (it did not)", ranks=(peer,))

    def _hello(self, to: Address) -> bytes:
        return _HELLO + to.nonce + struct.pack("<I", self.rank)

    def _let_in(self, listener: Listener, addresses: list[Address], deadline: Deadline) -> None:
        missing = set(range(self.rank + 1, self.num_ranks))
        strangers: dict[int, socket.socket] = {}
        poller = select.poll()
        poller.register(listener.socket, select.POLLIN)
        next_probe = time.monotonic() + _PROBE_EVERY_S
        try:
            while missing:
                for fd, _ in poller.poll(min(sockets.poll_ms(deadline), _PROBE_EVERY_S * 1000)):
                    if fd in strangers:
                        poller.unregister(fd)
                        stranger = strangers.pop(fd)
                        peer = _identify(stranger, listener.address.nonce)
                        if peer in missing:
                            self._add(peer, stranger)
                            missing.discard(peer)
                            sockets.send(stranger, peer, self._hello(addresses[peer]), deadline)
                        else:
                            stranger.close()
                    elif fd == listener.socket.fileno() and (caller := sockets.accept(listener.socket)):
                        strangers[caller.fileno()] = caller
                        poller.register(caller, select.POLLIN)
                if len(strangers) > _MAX_STRANGERS:
                    oldest = next(iter(strangers))
                    poller.unregister(oldest)
                    strangers.pop(oldest).close()
                if missing and time.monotonic() >= next_probe:
                    # One that died or gave up before it got here has no listener any more. One that has
                    # finished and closed its listener is not missing: we let it in.
                    for peer in sorted(missing):
                        sockets.dial(peer, addresses[peer], deadline, probe=True)
                    next_probe = time.monotonic() + _PROBE_EVERY_S
                if missing and deadline.expired:
                    raise sockets.timeout(missing, deadline)
        finally:
            for stranger in strangers.values():
                stranger.close()

    def _add(self, peer: int, sock: socket.socket) -> None:
        self._peers[peer] = sock
        self.socket_fds[peer] = sock.fileno()

    # ---- as a group

    def all_gather_object(self, obj: Any, *, timeout_s: float = 0.0) -> list[Any]:
        """As Group.all_gather_object. A dead or late peer ends it on every rank, with the first cause seen."""
        message = _GATHER + pickle.dumps(obj)
        if len(message) > sockets.MAX_MESSAGE:
            size = f"{sockets.MAX_MESSAGE} bytes (got {len(message)})"
            raise DcpInvalidArgument(f"all_gather_object: obj must pickle to at most {size}")
        gathered = [obj] * self.num_ranks

        def keep(peer: int, answer: bytes) -> None:
            gathered[peer] = pickle.loads(_body(answer, _GATHER, peer))

        deadline = Deadline(timeout_s)
        self._exchange(lambda sock, peer: sockets.send(sock, peer, message, deadline), keep, deadline)
        self._heed_timeouts()
        return gathered

    def _heed_timeouts(self) -> None:
        # A late rank finds every answer that it wants, and only behind one the word that its sender has given up. At
        # the last step nothing would be read after that, and the rank would be alone with its success.
        for sock in self._peers.values():
            message = sockets.peek(sock)
            if message[:1] == _ABORT and type(cause := restore(pickle.loads(message[1:]))) is DcpTimeout:
                self.abort(cause)  # else the peers would hear of this rank that it gave up
                raise cause

    def exchange_regions(self, region: Any, *, timeout_s: float = 0.0) -> None:
        return None

    def exchange_fds(
        self, fd: int, take: Callable[[int, int], None], deadline: Deadline, *, only_from: int | None = None
    ) -> None:
        """Sends `fd` to every peer; calls `take(peer, its_fd)` for each one that comes, and closes it
        afterwards. With `only_from` that rank alone sends, and the others' `fd` is not looked at.

        Every peer's message is read even when `take` raises for one (the first error is raised at the end),
        so that the sockets are in step for the verdict that follows.
        """
        first: list[Exception] = []

        def send_one(sock: socket.socket, peer: int) -> None:
            try:
                sockets.send(sock, peer, _FD, deadline, fd)
            except DcpError:
                raise
            except OSError as error:  # for example too many descriptors in flight; the peer waits for the message
                first.append(error)
                sockets.send(sock, peer, _FD, deadline)

        def open_one(peer: int, message: bytes, fds: list[int]) -> None:
            try:
                _body(message, _FD, peer)
                if not fds:  # the kernel drops it when this process may not open more
                    raise DcpError(f"rank {peer}'s file must fit under the limit of open files (ulimit -n)")
                take(peer, fds[0])
            except Exception as error:
                first.append(error)

        self._exchange(send_one, open_one, deadline, with_fds=True, only_from=only_from)
        if first:
            raise first[0]

    def _exchange(
        self,
        send: Callable[[socket.socket, int], None],
        take: Callable[..., None],
        deadline: Deadline,
        *,
        with_fds: bool = False,
        only_from: int | None = None,
    ) -> None:
        """Has one message sent to every peer, and hands one from each to `take`, as they come."""
        senders = {*self._peers, self.rank} if only_from is None else {only_from}
        if self._failure is not None:
            raise self._failure
        try:
            try:
                for peer, sock in self._peers.items() if self.rank in senders else ():
                    with suppress(DcpPeerLost):  # what it said last is read below, and is the better error
                        send(sock, peer)
            except DcpError:
                raise
            except Exception as error:  # peers would take the next message for the one that this rank owes them
                text = f"rank {self.rank} could not send: {describe(error)[1]}"
                self.abort(DcpError(text, ranks=(self.rank,)))
                raise
            missing = senders & set(self._peers)
            while missing:
                fds: list[int] = []
                try:
                    peer, answer = self._receive(missing, deadline, fds)
                    missing.discard(peer)
                    take(peer, answer, fds) if with_fds else take(peer, answer)
                finally:
                    for received in fds:
                        os.close(received)
        except DcpTimeout as error:
            self.abort(error)
            raise

    def _receive(self, peers: Iterable[int], deadline: Deadline, fds: list[int] | None = None) -> tuple[int, bytes]:
        """The next message of any of `peers`, which have said who they are. Raises what a peer gives up for."""
        peer, message = self._next(peers, deadline, fds)
        if message[:1] == _ABORT:
            raise restore(pickle.loads(message[1:]))
        if message in (b"", _BYE):
            raise sockets.gone(peer)
        return peer, message

    def _next(self, peers: Iterable[int], deadline: Deadline, fds: list[int] | None = None) -> tuple[int, bytes]:
        """The next message of any of `peers`; a fast peer's message of the next step stays in its queue."""
        by_fd = {self._peers[peer].fileno(): peer for peer in peers}
        poller = select.poll()
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while ready := poller.poll(sockets.poll_ms(deadline)):
            peer = min(by_fd[fd] for fd, _ in ready)
            message = sockets.read(self._peers[peer], fds)
            if message is not None:
                return peer, message
        raise sockets.timeout(by_fd.values(), deadline)

    def abort(self, cause: DcpError) -> None:
        """Tells the peers why this rank gives up, so that all raise the first cause. Never blocks or raises."""
        if self._failure is None:
            self._failure = cause
            for sock in self._peers.values():
                sockets.try_send(sock, _ABORT + pickle.dumps(describe(cause)))

    # ---- alive

    def lost_peers(self) -> tuple[int, ...]:
        """Peers whose process is gone without a goodbye. Never blocks; after `close` the last answer stays."""
        with self._lock:
            self._look()
            return tuple(sorted(self._lost))

    def _look(self) -> list[int]:
        """Reads what has come; returns the peers that are still there. The caller holds the lock."""
        for peer, sock in self._peers.items():
            while peer not in self._left and peer not in self._lost:
                message = sockets.read(sock)
                if message is None:
                    break
                if message == _BYE:
                    self._left.add(peer)
                elif message == b"":
                    self._lost.add(peer)
        return [peer for peer in self._peers if peer not in self._left | self._lost]

    def close(self) -> None:
        """Closes the sockets without a word: peers take this rank for lost. Local, never blocks."""
        with self._lock:
            self._closing = True
            self._close_sockets()

    def part(self, timeout_s: float) -> None:
        """Says goodbye to the peers, waits up to `timeout_s` for theirs (0 = not at all), closes the sockets."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for sock in self._peers.values():
                sockets.try_send(sock, _BYE)
        try:
            if timeout_s > 0:
                self._await_goodbyes(Deadline(timeout_s))
        finally:
            self.close()

    def _await_goodbyes(self, deadline: Deadline) -> None:
        while not deadline.expired:
            with self._lock:
                there = self._look()
                if not there:
                    return
                poller = select.poll()
                for peer in there:
                    poller.register(self._peers[peer], select.POLLIN)
            poller.poll(sockets.poll_ms(deadline))

    def close_in_child(self) -> None:
        """After fork: a copy of a socket in the child would keep this rank alive in the eyes of its peers."""
        self._lock = threading.Lock()  # the old one may be held by a thread that the child does not have
        self._closing = True
        self._close_sockets()

    def _close_sockets(self) -> None:
        self.socket_fds[:] = [-1] * self.num_ranks
        for sock in self._peers.values():
            sock.close()
        self._peers.clear()


def gave_up(rank: int, error: BaseException) -> DcpPeerLost:
    """What the peers hear of a rank that leaves the setup otherwise than by a verdict, for example by Ctrl-C."""
    return DcpPeerLost(f"rank {rank} gave up: {describe(error)[1]}", ranks=(rank,))


def _identify(sock: socket.socket, nonce: bytes) -> int:
    """The rank that a connection claims, if it proves with our nonce that it is of the group; -1 for a stranger."""
    message = sockets.read(sock) or b""
    known = secrets.compare_digest(message[:-4], _HELLO + nonce)
    return struct.unpack("<I", message[-4:])[0] if known else -1


def _body(message: bytes, kind: bytes, peer: int) -> bytes:
    if message[:1] != kind:
        sent = f"sent {message[:1]!r} for {kind!r}"
        raise DcpError(f"rank {peer} must be at the same step ({sent})", ranks=(peer,))
    return message[1:]
