"""Multicast: one address at which a store of a kernel lands in every rank's region, by the NVLink switches.

Nothing needs it; it saves bandwidth. So a failure here, of any rank at any step, is not an error: all ranks undo what
they have of it and go on without, with the same reason. Steps, each with a vote of the group:

1. `create multicast`: rank 0 makes the object, for as many devices as there are ranks.
2. `join multicast`: it is handed over as memory is (cuda.py), and every rank adds its device. The driver lets a bind wait
   for the last device, for ever; so nobody binds before the vote says that all devices are there.
3. `bind multicast`: every rank binds its region, at offset 0.
4. `map multicast`: every rank gets an address for it. Its own: a mapping is for the device of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpError
from dcpkernels.heap.cuda_driver import Driver
from dcpkernels.heap.gpu_driver import FABRIC, FD, NONE
from dcpkernels.heap.gpu_region import Handle, Mapping, Region
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.verdict import agree, attempt, describe, rank_list

_OP = "workspace"
_MAKER = 0


@dataclass(frozen=True)
class Team:
    """What a rank says of itself before anything is allocated."""

    wanted: bool
    uuid: str
    device: str  # for people
    granularity: int  # 0: this device cannot
    why_not: str


def refusal(teams: Sequence[Team]) -> str:
    """Why these ranks cannot have multicast, "" when it is worth a try. The same on all ranks."""
    unwilling = [rank for rank, team in enumerate(teams) if not team.wanted]
    if unwilling:
        return f"no: {rank_list(unwilling)} asked for none"
    if len(teams) == 1:
        return "no: the group has one rank"
    first: dict[str, int] = {}
    for rank, team in enumerate(teams):
        other = first.setdefault(team.uuid, rank)
        if other != rank:
            return f"no: ranks {other} and {rank} are on the same device ({team.device}), a team takes each once"
    for rank, team in enumerate(teams):
        if team.granularity == 0:
            return f"no: rank {rank}: {team.why_not}"
    return ""


class _Refused(Exception):
    """Raised on all ranks alike by a vote; its text is the reason."""


class Multicast:
    """What one rank holds of it: nothing, until `make`."""

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._mapping: Mapping | None = None
        self._bound: tuple[Driver, int] | None = None

    @property
    def address(self) -> int:
        """0 when there is none."""
        return self._mapping.address if self._mapping is not None else 0

    def make(
        self,
        group: Group,
        mesh: Mesh | None,
        driver: Driver,
        region: Region,
        *,
        kind: str,
        alignment: int,
        deadline: Deadline,
    ) -> str:
        """Collective. Returns "yes" or the reason why there is none, the same on all ranks.

        `group` carries the votes. Raises only what ends the group: a late or lost rank.
        """
        try:
            self._make(group, mesh, driver, region, kind, alignment, deadline)
        except _Refused as refused:
            self.release()
            return str(refused)
        return "yes"

    def _make(
        self,
        group: Group,
        mesh: Mesh | None,
        driver: Driver,
        region: Region,
        kind: str,
        alignment: int,
        deadline: Deadline,
    ) -> None:
        is_maker, nbytes = group.rank == _MAKER, region.nbytes
        files: list[int] = []

        def create() -> bytes | None:
            if not is_maker:
                return None
            with driver.current():
                self._handle = Handle(driver, driver.multicast_create(group.num_ranks, nbytes, kind))
                if kind == FD:
                    files.append(driver.export_fd(self._value))
                return driver.export_fabric(self._value) if kind == FABRIC else None

        def take_fd(_: int, fd: int) -> None:
            with driver.current():
                self._handle = Handle(driver, driver.import_fd(fd))

        def join() -> None:
            # What goes to all ranks goes first, whatever fails here: the next message must be the vote.
            if mesh is not None:
                mesh.exchange_fds(files[0] if is_maker else -1, take_fd, deadline, only_from=_MAKER)
            elif kind == NONE:
                theirs = group.exchange_regions(self._handle, timeout_s=deadline.for_call())
                if not is_maker and theirs is not None:
                    theirs[_MAKER].retain()
                    self._handle = theirs[_MAKER]
            with driver.current():
                if kind == FABRIC and not is_maker:
                    self._handle = Handle(driver, driver.import_fabric(from_maker))
                driver.multicast_add_device(self._value)

        def bind() -> None:
            assert region.handle is not None
            with driver.current():
                driver.multicast_bind(self._value, region.handle.value, nbytes)
                self._bound = driver, nbytes

        def map_it() -> None:
            with driver.current():
                self._mapping = Mapping(driver, self._handle, nbytes, [driver.device], alignment=alignment)

        try:
            from_maker = _vote(group, "create multicast", create, deadline)[_MAKER]
            _vote(group, "join multicast", join, deadline)
        finally:
            for file in files:
                os.close(file)
        _vote(group, "bind multicast", bind, deadline)
        _vote(group, "map multicast", map_it, deadline)

    @property
    def _value(self) -> Any:
        if self._handle is None:
            raise DcpError(f"the multicast object must have come from rank {_MAKER} (it has not)", ranks=(_MAKER,))
        return self._handle.value

    def release(self) -> None:
        """Local, never raises, may be called again. The order is the reverse of how it was made."""
        mapping, self._mapping = self._mapping, None
        bound, self._bound = self._bound, None
        handle, self._handle = self._handle, None
        if mapping is not None:
            mapping.release()
        if bound is not None and handle is not None:
            driver, nbytes = bound
            driver.quietly(driver.multicast_unbind, handle.value, nbytes)
        if handle is not None:
            handle.release()


def _vote(group: Group, step: str, work: Callable[[], Any], deadline: Deadline) -> list[Any]:
    """Every rank's result, or _Refused on all ranks. A late or lost rank ends the vote too, by an error, as everywhere."""
    result, error = attempt(work)
    text = None if error is None else describe(error)[1]
    votes = agree(group, f"{_OP}: {step}", (result, text), timeout_s=deadline.for_call())
    for rank, (_, why) in enumerate(votes):
        if why is not None:
            raise _Refused(f"no: rank {rank}: {why}")
    return [result for result, _ in votes]
