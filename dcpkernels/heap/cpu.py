"""The CPU heap: every rank's region, mapped by every rank of one host; and one more for the group, where asked for.

Setting up takes these steps. Each ends in a group verdict, so that it succeeds on all ranks or raises the
same on all:

1. `check` over the caller's group: same payload, same host, same user, enough memory. Nothing is allocated before.
2. `connect`: a socket between every two ranks. Later verdicts go over these, where a death shows at once.
3. `create region`: a sealed file whose pages all exist, mapped and filled by `init`.
4. `map peers`: descriptors go over the sockets; thread ranks hand over the mapping itself.
5. Two more for the shared region (heap/shared.py).

Nothing has a name in a file system, so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.heap import memory, sockets
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.mesh import Mesh, gave_up
from dcpkernels.heap.region import Region, check_file, collapse, create_file
from dcpkernels.heap.shared import SharedRegion
from dcpkernels.heap.verdict import agree, attempt, require_same

_OP = "workspace"  # the collective call that users know; heads every text


@dataclass(frozen=True)
class _Card:
    """What each rank shows the others in step 1."""

    boot: str
    network: int
    uid: int
    limits: list[memory.Limit]
    payload: dict[str, Any]
    nbytes: int
    shared_nbytes: int
    address: sockets.Address | None  # None for thread ranks


class _Held:
    """What a rank holds of the operating system. Apart from CpuHeap, so that its finaliser can release it."""

    def __init__(self) -> None:
        self.listener: sockets.Listener | None = None
        self.mesh: Mesh | None = None
        self.file = -1
        self.regions: list[Region] = []  # the own one first
        self.shared = SharedRegion()

    def close_sockets(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.mesh is not None:
            self.mesh.close()

    def close_file(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def release(self) -> None:
        """Local, never blocks, may be called again. Ctrl-C in the middle does not keep the rest from being released: a
        finaliser runs only once."""
        try:
            self.close_sockets()
        finally:
            try:
                self.close_file()
                self.shared.release()
            finally:
                while self.regions:
                    self.regions.pop().release()


class CpuHeap:
    """One region per rank. `bases[r]` is where rank r's region starts in this process; `nbytes` is the size
    of each. Besides, where asked for, one shared region of `shared_nbytes` for the whole group: `shared_base` is
    where this process reads and writes it, 0 when there is none.

    `socket_fds[r]` is the socket to rank r's process, -1 for the own rank and for thread ranks. End of file
    on it means that the process is gone or has closed its heap: what it wrote before is in memory, nothing
    more will come. Once closed, `bases` is empty, `shared_base` is 0 and `socket_fds` is all -1.
    """

    rank: int
    num_ranks: int
    nbytes: int
    shared_nbytes: int
    bases: list[int]
    shared_base: int
    socket_fds: list[int]

    def __init__(self, rank: int, card: _Card, bases: list[int], held: _Held) -> None:
        """For `create` only."""
        self.rank, self.num_ranks, self.bases = rank, len(bases), bases
        self.nbytes, self.shared_nbytes, self.shared_base = card.nbytes, card.shared_nbytes, held.shared.address
        self.socket_fds = held.mesh.socket_fds if held.mesh is not None else [-1] * self.num_ranks
        self._held = held
        self._finalizer = weakref.finalize(self, held.release)
        # At exit the operating system releases everything, also while other threads still use the memory.
        self._finalizer.atexit = False

    @classmethod
    def create(
        cls,
        group: Group,
        nbytes: int,
        *,
        shared_nbytes: int = 0,
        init: Callable[[int], None],
        payload: dict[str, Any],
        timeout_s: float,
        read_only_views: bool = False,
    ) -> CpuHeap:
        """Collective. Every rank gets `nbytes` (the same on all) of zeroed shared memory, and everybody's
        mapping; and all together get `shared_nbytes` (the same on all, 0 = none), zeroed and mapped by each.

        `read_only_views`, local to a rank: `shared_memory` gives a second mapping that cannot be written, so that a
        caller who writes into it dies of SIGSEGV there and then, instead of spoiling what the peers read.
        `init(address)` fills the own region before any other rank can see it. `payload` holds what must be
        equal on all ranks, as plain data. `timeout_s` bounds the whole call, 0 = for ever.

        Raises, the same on every rank: DcpUnsupported (payloads differ; not one host or user), DcpError (no
        room, with the bytes needed and available; a step failed on some rank, with its error), DcpTimeout (a
        rank did not come), DcpPeerLost (a rank died). Then nothing is left behind.
        """
        held = _Held()
        try:
            return cls._create(group, nbytes, shared_nbytes, init, payload, timeout_s, read_only_views, held)
        except BaseException as error:
            if held.mesh is not None:
                held.mesh.abort(gave_up(group.rank, error))
            held.release()
            raise

    @classmethod
    def _create(
        cls,
        group: Group,
        nbytes: int,
        shared_nbytes: int,
        init: Callable[[int], None],
        payload: dict[str, Any],
        timeout_s: float,
        read_only_views: bool,
        held: _Held,
    ) -> CpuHeap:
        rank, num_ranks, deadline = group.rank, group.num_ranks, Deadline(timeout_s)
        in_threads = group.exchange_regions(None, timeout_s=deadline.for_call()) is not None

        def check() -> _Card:
            if nbytes <= 0:
                raise DcpInvalidArgument(f"nbytes must be positive (got {nbytes})")
            if shared_nbytes < 0:
                raise DcpInvalidArgument(f"shared_nbytes must be at least 0 (got {shared_nbytes})")
            if num_ranks > 1 and not in_threads:
                held.listener = sockets.Listener(backlog=num_ranks + 64)
            address = held.listener.address if held.listener else None
            return _Card(*sockets.host_id(), os.geteuid(), memory.limits(), payload, nbytes, shared_nbytes, address)

        card, error = attempt(check)
        cards = agree(group, f"{_OP}: check", card, error, timeout_s=deadline.for_call())
        _judge(cards)

        speaking: Group = group
        if held.listener is not None:
            listener, mesh = held.listener, Mesh(rank, num_ranks)
            held.mesh = mesh
            # A part of the time is kept for the verdict, so that ranks can still say who did not come.
            most = Deadline(deadline.for_call() * 0.8)
            _, error = attempt(lambda: mesh.connect(listener, [card.address for card in cards], most))
            if error is not None:
                held.close_sockets()  # those who wait for this rank see it at once
            agree(group, f"{_OP}: connect", error=error, timeout_s=deadline.for_call())
            listener.close()
            speaking = mesh

        def create_region() -> None:
            held.file = create_file(nbytes)
            held.regions.append(Region(held.file, nbytes))
            collapse(held.regions[0].address, nbytes)  # before anybody else maps the file
            init(held.regions[0].address)

        _, error = attempt(create_region)
        agree(speaking, f"{_OP}: create region", error=error, timeout_s=deadline.for_call())

        bases = [0] * num_ranks
        bases[rank] = held.regions[0].address

        def take_fd(peer: int, fd: int) -> None:
            check_file(fd, nbytes, peer)
            held.regions.append(Region(fd, nbytes))
            bases[peer] = held.regions[-1].address

        def map_peers() -> None:
            if held.mesh is not None:
                held.mesh.exchange_fds(held.file, take_fd, deadline)
            elif in_threads:
                theirs = group.exchange_regions(held.regions[0], timeout_s=deadline.for_call())
                for peer, region in enumerate(theirs or ()):
                    if peer != rank:
                        region.retain()
                        held.regions.append(region)
                        bases[peer] = region.address

        _, error = attempt(map_peers)
        # Also the moment from which every thread rank has retained every region: only now may one be
        # released.
        agree(speaking, f"{_OP}: map peers", error=error, timeout_s=deadline.for_call())
        held.close_file()
        if shared_nbytes > 0:
            held.shared.make(
                _OP, speaking, held.mesh, shared_nbytes, read_only_views=read_only_views, deadline=deadline
            )
        return cls(rank, cards[rank], bases, held)

    @property
    def mesh(self) -> Mesh | None:
        """The sockets to the other processes; None for thread ranks and for a rank alone."""
        return self._held.mesh

    def own_memory(self, offset: int, nbytes: int) -> Any:
        """A part of this rank's region as a writable buffer, which stays mapped as long as it is referred to."""
        return self._held.regions[0].memory(offset, nbytes)

    def shared_memory(self, offset: int, nbytes: int) -> Any:
        """A part of the shared region as a buffer, which stays mapped as long as it is referred to. Writable, unless
        the heap was made with `read_only_views`."""
        return self._held.shared.memory(offset, nbytes)

    def lost_peers(self) -> tuple[int, ...]:
        """Ranks whose process ended, or dropped its heap, without `close`. Never blocks. Never names thread ranks."""
        return self._held.mesh.lost_peers() if self._held.mesh is not None else ()

    def close(self, *, timeout_s: float) -> None:
        """Says goodbye, waits up to `timeout_s` for the peers' goodbyes (0 = not at all), and releases
        everything.

        May be called again. Not collective in the sense of a barrier: a peer that is still reading this
        rank's region does so through its own mapping, and a peer that is dead is not waited for.
        """
        self.shared_base = 0
        self.bases.clear()  # nobody can find an address that is about to be unmapped
        try:
            if self._held.mesh is not None:
                self._held.mesh.part(timeout_s)
        finally:
            self._finalizer()


def _judge(cards: list[_Card]) -> None:
    """Every rank has the same cards, so every rank comes to the same error here, without another round."""
    require_same(_OP, [{"host (boot id)": card.boot, "network namespace": card.network} for card in cards])
    require_same(_OP, [{"user id": card.uid} for card in cards])
    require_same(_OP, [card.payload for card in cards])
    require_same(_OP, [{"nbytes": card.nbytes, "shared_nbytes": card.shared_nbytes} for card in cards])
    memory.require(_OP, [card.limits for card in cards], cards[0].nbytes, cards[0].shared_nbytes)
