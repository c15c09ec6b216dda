"""A group whose ranks are threads of one process. It fulfils `dcpkernels.heap.group.Group`.

Objects and regions are handed over as they are, never copied: all ranks see one mapping of a region, so an
address means the same to all of them and ThreadSanitizer sees one location. A collective ends when all have
come, or at its deadline, or as soon as a rank that it waits for has left (its thread returned or raised).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dcpkernels.errors import DcpMismatch, DcpPeerLost, DcpTimeout


class ThreadGroup:
    """One rank's handle, for one thread. `ThreadGroup.create(n)` makes those of all ranks."""

    def __init__(self, world: _World, room: _Room, members: tuple[int, ...], rank: int) -> None:
        self.rank = rank
        self.num_ranks = len(members)
        self._world = world
        self._room = room
        self._members = members  # of each rank here, its rank in the first group
        self._num_subgroups: dict[tuple[int, ...], int] = {}

    @classmethod
    def create(cls, num_ranks: int, *, timeout_s: float = 0.0) -> list[ThreadGroup]:
        """The handles of a new group. `timeout_s` is for collectives that bring none (0 = for ever)."""
        world, room = _World(timeout_s), _Room()
        return [cls(world, room, tuple(range(num_ranks)), rank) for rank in range(num_ranks)]

    def all_gather_object(self, obj: Any, *, timeout_s: float = 0.0) -> list[Any]:
        """Every rank's `obj` itself, in rank order. Raises DcpTimeout, DcpPeerLost, DcpMismatch."""
        return self._meet("all_gather_object", obj, timeout_s)

    def exchange_regions(self, region: Any, *, timeout_s: float = 0.0) -> list[Any]:
        """Every rank's region object, in rank order. Raises as `all_gather_object`."""
        return self._meet("exchange_regions", region, timeout_s)

    def all_to_all(
        self,
        receive: Any,
        send: Any,
        receive_sizes: list[int],
        send_sizes: list[int],
        *,
        timeout_s: float = 0.0,
        note: int = 0,
    ) -> None:
        """Moves chunks between tensors. Raises as `all_gather_object`."""
        start = 0
        for rank, (theirs, sizes, _) in enumerate(self._meet("all_to_all", (send, send_sizes, note), timeout_s)):
            first = sum(sizes[: self.rank])
            receive[start : start + receive_sizes[rank]] = theirs[first : first + sizes[self.rank]]
            start += receive_sizes[rank]
        self._meet("all_to_all, end", None, timeout_s)  # only now may anybody write into its `send` again

    def all_gather(self, buffer: Any, sizes: list[int], *, timeout_s: float = 0.0, note: int = 0) -> None:
        """`buffer` holds a chunk of each rank: the own one is there, the others come. Raises as `all_gather_object`."""
        start = 0
        for rank, (theirs, _, _) in enumerate(self._meet("all_gather", (buffer, sizes, note), timeout_s)):
            if rank != self.rank:
                buffer[start : start + sizes[rank]] = theirs[start : start + sizes[rank]]
            start += sizes[rank]
        self._meet("all_gather, end", None, timeout_s)  # only now may anybody write into its own chunk again

    def awaited_by(self, rank: int) -> tuple[int, int] | None:
        """(number of the meeting, note) of the exchange in which `rank` waits for this one, which has not come."""
        with self._world.changed:
            came, number = self._room.came, self._room.num_met
            if rank not in came or self.rank in came or came[rank][0] not in ("all_to_all", "all_gather"):
                return None
            return number, came[rank][1][2]

    def duplicate(self, *, timeout_s: float = 0.0, beside: object = None) -> ThreadGroup:
        """A group of the same ranks with meetings of its own. Who leaves has left all groups."""
        return self.subgroup(range(self.num_ranks))

    def close(self) -> None:
        """Nothing to give back."""

    def barrier(self, *, timeout_s: float = 0.0) -> None:
        """Returns when every rank has called it. Raises as `all_gather_object`."""
        self._meet("barrier", None, timeout_s)

    def subgroup(self, ranks: Sequence[int]) -> ThreadGroup:
        """This rank's handle of a group of some of the ranks, in the order given. Called by each of them, not
        waiting for the others; the n-th call with the same ranks gives the n-th such group."""
        members = tuple(self._members[rank] for rank in ranks)
        serial = self._num_subgroups[members] = self._num_subgroups.get(members, 0) + 1
        room = self._world.subroom((self._room, members, serial))
        return ThreadGroup(self._world, room, members, tuple(ranks).index(self.rank))

    def leave(self, why: str) -> None:
        """Says that this rank will make no further call: who waits for it raises DcpPeerLost with `why`."""
        with self._world.changed:
            self._world.left[self._members[self.rank]] = why
            self._world.changed.notify_all()

    def _meet(self, kind: str, obj: Any, timeout_s: float) -> list[Any]:
        world, room = self._world, self._room
        timeout_s = timeout_s or world.timeout_s
        with world.changed:
            if room.broken is not None:
                raise room.broken()
            room.came[self.rank] = (kind, obj)
            if len(room.came) == self.num_ranks:
                room.last = [room.came[rank] for rank in range(self.num_ranks)]
                room.came = {}
                room.num_met += 1
                world.changed.notify_all()
            else:
                num_met = room.num_met
                world.changed.wait_for(
                    lambda: room.num_met != num_met or room.broken is not None or self._missing_left(),
                    timeout_s if timeout_s > 0 else None,
                )
                if room.num_met == num_met:
                    if room.broken is None:
                        room.broken = self._failure(kind, timeout_s)
                        world.changed.notify_all()
                    raise room.broken()
            # The next meeting cannot complete, and so not replace `last`, before this rank has come to it.
            met = room.last
        others = [rank for rank, (other, _) in enumerate(met) if other != kind]
        if others:
            theirs = f"rank {others[0]} {met[others[0]][0]}"
            raise DcpMismatch(f"{kind}: every rank must make the same call (given {theirs})", ranks=others)
        return [value for _, value in met]

    def _missing_left(self) -> dict[int, str]:
        """The ranks that the current meeting still waits for and that have left, with the reason."""
        left = self._world.left
        missing = (rank for rank in range(self.num_ranks) if rank not in self._room.came)
        return {rank: left[self._members[rank]] for rank in missing if self._members[rank] in left}

    def _failure(self, kind: str, timeout_s: float) -> Callable[[], DcpTimeout]:
        left = self._missing_left()
        if left:
            reasons = ", ".join(f"rank {rank} {why}" for rank, why in left.items())
            return partial(DcpPeerLost, f"{kind}: every rank must take part ({reasons})", ranks=left)
        missing = [rank for rank in range(self.num_ranks) if rank not in self._room.came]
        names = ", ".join(map(str, missing))
        text = f"{kind}: every rank must come within {timeout_s:g} s (missing: {names})"
        return partial(DcpTimeout, text, ranks=missing)


class _Room:
    """Where the ranks of one group meet, time after time. Guarded by the world's condition."""

    def __init__(self) -> None:
        # (kind of call, object) by rank: of who has come to the present meeting, and of all at the one before.
        self.came: dict[int, tuple[str, Any]] = {}
        self.last: list[tuple[str, Any]] = []
        self.num_met = 0
        self.broken: Callable[[], DcpTimeout] | None = None  # makes the exception: each rank raises its own


class _World:
    """All that the handles of a group and its subgroups share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.left: dict[int, str] = {}  # rank in the first group -> why it left
        self._subrooms: dict[Any, _Room] = {}

    def subroom(self, key: Any) -> _Room:
        with self.changed:
            return self._subrooms.setdefault(key, _Room())
