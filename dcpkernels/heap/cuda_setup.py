"""How a CUDA heap comes to be, on one rank: the steps that dcpkernels/heap/cuda.py lists, and what a rank holds of them."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.heap import sockets
from dcpkernels.heap.cuda_driver import FABRIC, FD, NONE, Driver, dotted, load_api
from dcpkernels.heap.cuda_multicast import Multicast, Team, refusal
from dcpkernels.heap.cuda_region import Handle, Region
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.verdict import agree, attempt, require_same

_OP = "workspace"  # the collective call that users know; heads every text
_TABLE_ALIGNMENT = 256
_MAX_PAIRS = 8  # that one text names


@dataclass(frozen=True)
class _Card:
    """What each rank shows the others in step `check`."""

    host: tuple[str, int]  # boot id and network namespace: equal exactly when descriptors can be passed
    uid: int
    payload: dict[str, Any]
    nbytes: int
    control_nbytes: int
    device: str  # for people
    uuid: str
    ordinal: int
    driver_version: str  # need not be the same; of those who cannot import each other's memory it says much
    address: sockets.Address | None  # None for thread ranks


@dataclass(frozen=True)
class _Measure:
    """And in step `measure`."""

    granularity: int
    unreachable: list[int]  # ranks whose memory this rank's device cannot reach
    team: Team


@dataclass
class Made:
    """What `Setup.make` has made, besides what is held."""

    nbytes: int
    control_nbytes: int
    device: int
    device_name: str
    bases: list[int]
    bases_table: int
    multicast_reason: str


class Held:
    """What a rank holds. Apart from CudaHeap, so that its finaliser can release it."""

    def __init__(self) -> None:
        self.listener: sockets.Listener | None = None
        self.mesh: Mesh | None = None
        self.driver: Driver | None = None
        self.is_open = False
        self.files: list[int] = []
        self.own: Region | None = None
        self.peers: list[Region] = []
        self.multicast = Multicast()
        self.host = 0

    def close_sockets(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.mesh is not None:
            self.mesh.close()

    def close_files(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def release(self) -> None:
        """Local, may be called again. Waits for no rank, but for kernels of this process, which end at their deadlines. In
        the order in which one rests on the other: multicast on the own region, everything on the context. Where the device
        cannot tell whether it is idle, nothing that a kernel may use is given back."""
        self.close_sockets()
        self.close_files()
        driver = self.driver
        if self.own is not None and self.is_open and driver is not None and not driver.quietly(driver.wait_idle):
            return
        self.multicast.release()
        while self.peers:
            self.peers.pop().release()
        own, self.own = self.own, None
        if own is not None:
            own.release()
        host, self.host = self.host, 0
        if host and self.driver is not None:
            self.driver.quietly(self.driver.host_free, host)
        is_open, self.is_open = self.is_open, False
        if is_open and self.driver is not None:
            self.driver.close()


class Setup:
    """The steps on one rank; used once."""

    def __init__(
        self,
        group: Group,
        held: Held,
        *,
        nbytes: int,
        control_nbytes: int,
        device: int,
        payload: dict[str, Any],
        multicast: bool,
        deadline: Deadline,
    ) -> None:
        self._group, self._speaking, self._held, self._deadline = group, group, held, deadline
        self._rank, self._num_ranks = group.rank, group.num_ranks
        self._nbytes, self._control_nbytes, self._device = nbytes, control_nbytes, device
        self._payload, self._multicast = payload, multicast
        self._in_threads = group.exchange_regions(None, timeout_s=deadline.for_call()) is not None

    def make(self, init: Callable[[int], None], driver_api: Any) -> Made:
        """Collective. Raises the same on all ranks; what is held by then is the caller's to release."""
        cards: list[_Card] = self._verdict("check", lambda: self._check(driver_api))
        self._judge(cards)
        one_host = len({card.host for card in cards}) == 1
        self._kind = NONE if self._in_threads or self._num_ranks == 1 else FD if one_host else FABRIC
        # A mapping of thread ranks serves the devices of all of them.
        self._devices = sorted({card.ordinal for card in cards}) if self._in_threads else [self._device]
        self._connect(cards)

        measures: list[_Measure] = self._verdict("measure", lambda: self._measure(cards))
        self._judge_links(cards, measures)
        why_not = refusal([measure.team for measure in measures])
        # The same size everywhere: a mapping of it, and a team that binds it, must fit every rank's rounding.
        granularity = math.lcm(*(measure.granularity for measure in measures))
        alignment = math.lcm(*(measure.team.granularity for measure in measures)) if not why_not else 1
        self._table = -(-self._nbytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
        self._size = _round_up(self._table + 8 * self._num_ranks, math.lcm(granularity, alignment))

        handles = self._verdict("create region", lambda: self._create_region(init))
        bases = [0] * self._num_ranks
        # Also the moment from which every thread rank has retained every region: only now may one be released.
        self._verdict("map peers", lambda: self._map_peers(cards, bases, handles))
        self._held.close_files()
        reason = why_not or self._held.multicast.make(
            self._speaking,
            self._held.mesh,
            self._driver,
            self._own,
            kind=self._kind,
            alignment=alignment,
            deadline=self._deadline,
        )
        table = self._own.address + self._table
        return Made(
            self._nbytes, self._control_nbytes, self._device, self._driver.name, bases, table, reason
        )  # fmt: skip

    def check_links(self, check: Callable[[Any], None], heap: Any) -> None:
        """Collective. `check(heap)` on all ranks, and the verdict on it."""

        def in_context() -> None:
            with self._driver.current():
                check(heap)

        self._verdict("check links", in_context)

    def _verdict(self, step: str, work: Callable[[], Any]) -> list[Any]:
        """Every rank's result of `work`, or the same error on all."""
        result, error = attempt(work)
        return agree(self._speaking, f"{_OP}: {step}", result, error, timeout_s=self._deadline.for_call())

    @property
    def _driver(self) -> Driver:
        assert self._held.driver is not None  # since step `check`
        return self._held.driver

    @property
    def _own(self) -> Region:
        assert self._held.own is not None  # since step `create region`
        return self._held.own

    # ---- before anything is allocated

    def _check(self, driver_api: Any) -> _Card:
        if self._nbytes <= 0:
            raise DcpInvalidArgument(f"nbytes must be positive (got {self._nbytes})")
        if not 0 < self._control_nbytes <= self._nbytes:
            text = f"control_nbytes must be from 1 to nbytes={self._nbytes} (got {self._control_nbytes})"
            raise DcpInvalidArgument(text)
        driver = self._held.driver = Driver(load_api() if driver_api is None else driver_api, self._device)
        if self._num_ranks > 1 and not self._in_threads:
            self._held.listener = sockets.Listener(backlog=self._num_ranks + 64)
        return _Card(
            host=sockets.host_id(),
            uid=os.geteuid(),
            payload=self._payload,
            nbytes=self._nbytes,
            control_nbytes=self._control_nbytes,
            device=f"{driver}, {driver.pci}",
            uuid=driver.uuid,
            ordinal=driver.device,
            driver_version=dotted(driver.version),
            address=self._held.listener.address if self._held.listener else None,
        )

    def _judge(self, cards: list[_Card]) -> None:
        """Every rank has the same cards, so every rank comes to the same error here, without another round."""
        require_same(_OP, [card.payload for card in cards])
        require_same(_OP, [{"nbytes": card.nbytes, "control_nbytes": card.control_nbytes} for card in cards])
        if len({card.host for card in cards}) == 1:
            require_same(_OP, [{"user id": card.uid} for card in cards])

    def _connect(self, cards: list[_Card]) -> None:
        listener = self._held.listener
        if listener is None or self._kind != FD:
            self._held.close_sockets()
            return
        mesh = self._held.mesh = Mesh(self._rank, self._num_ranks)
        # A part of the time is kept for the verdict, so that ranks can still say who did not come.
        most = Deadline(self._deadline.for_call() * 0.8)
        _, error = attempt(lambda: mesh.connect(listener, [card.address for card in cards], most))
        if error is not None:
            self._held.close_sockets()  # those who wait for this rank see it at once
        agree(self._group, f"{_OP}: connect", error=error, timeout_s=self._deadline.for_call())
        listener.close()
        self._speaking = mesh

    def _measure(self, cards: list[_Card]) -> _Measure:
        granularity = self._driver.granularity(self._kind)
        own, unreachable = cards[self._rank], []
        for rank, card in enumerate(cards):
            if card.host[0] == own.host[0] and card.uuid != own.uuid:
                ordinal = self._driver.ordinal_of(card.uuid)
                # A device that this process does not see cannot be asked about; mapping its memory will tell.
                if ordinal is not None and not self._driver.can_access_peer(ordinal):
                    unreachable.append(rank)
        return _Measure(granularity, unreachable, self._team(own, granularity))

    def _team(self, own: _Card, granularity: int) -> Team:
        multicast, why_not = 0, ""
        if self._multicast and self._num_ranks > 1:
            try:
                if self._driver.attribute("MULTICAST_SUPPORTED"):
                    size = _round_up(self._nbytes, granularity)
                    multicast = self._driver.multicast_granularity(self._num_ranks, size, self._kind)
                else:
                    why_not = (
                        f"{self._driver} has none (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0): no NVLink switch, a "
                        "MIG device, or a confidential virtual machine"
                    )
            except DcpError as error:
                why_not = str(error)
        return Team(self._multicast, own.uuid, own.device, multicast, why_not)

    def _judge_links(self, cards: list[_Card], measures: list[_Measure]) -> None:
        pairs = [(rank, peer) for rank, measure in enumerate(measures) for peer in measure.unreachable]
        if not pairs:
            return
        named = [f"rank {a} ({cards[a].device}) to rank {b} ({cards[b].device})" for a, b in pairs[:_MAX_PAIRS]]
        more = f" and {len(pairs) - _MAX_PAIRS} more" if len(pairs) > _MAX_PAIRS else ""
        mig = any("MIG" in cards[rank].device for pair in pairs for rank in pair)
        advice = "MIG devices have no peer access" if mig else "see `nvidia-smi topo -p2p rw`"
        text = f"every device must reach the memory of every other, by cuDeviceCanAccessPeer (no: {'; '.join(named)}{more})"
        raise DcpUnsupported(f"{_OP}: {text}: {advice}", ranks=[rank for pair in pairs for rank in pair])

    # ---- memory

    def _create_region(self, init: Callable[[int], None]) -> bytes | None:
        held, driver, size = self._held, self._driver, self._size
        driver.open()
        held.is_open = True
        with driver.current():
            with self._between_hosts():
                handle = Handle(driver, driver.create_memory(size, self._kind))
            held.own = Region(driver, handle, size, self._devices)
            driver.zero(held.own.address, size)
            with mmap.mmap(-1, self._control_nbytes) as buffer:  # zeroed, and aligned for whatever init writes
                start = ctypes.c_char.from_buffer(buffer)
                try:
                    init(ctypes.addressof(start))
                    driver.copy_to_device(held.own.address, ctypes.addressof(start), self._control_nbytes)
                finally:
                    del start  # or the buffer cannot be closed
            held.host = driver.host_alloc(self._control_nbytes)
            ctypes.memset(held.host, 0, self._control_nbytes)
            if (seen := driver.host_device_address(held.host)) != held.host:
                text = f"pinned memory of the host must have one address for host and {driver} (got {seen:#x} there)"
                raise DcpUnsupported(f"{text}: unified addressing is needed")
            if self._kind == FD:
                held.files.append(driver.export_fd(handle.value))
            if self._kind == FABRIC:
                with self._between_hosts():
                    return driver.export_fabric(handle.value)
        return None

    def _map_peers(self, cards: list[_Card], bases: list[int], handles: list[bytes | None]) -> None:
        held, driver = self._held, self._driver
        bases[self._rank] = self._own.address

        def take(peer: int, load: Callable[[], Any]) -> None:
            card = cards[peer]
            with _naming(f"the region of rank {peer} ({card.device}, driver {card.driver_version})"), driver.current():
                held.peers.append(Region(driver, Handle(driver, load()), self._size, [self._device]))
            bases[peer] = held.peers[-1].address

        if held.mesh is not None:
            held.mesh.exchange_fds(
                held.files[0], lambda peer, fd: take(peer, lambda: driver.import_fd(fd)), self._deadline
            )  # fmt: skip
        elif self._in_threads:
            theirs = self._group.exchange_regions(self._own, timeout_s=self._deadline.for_call())
            for peer, region in enumerate(theirs or ()):
                if peer != self._rank:
                    region.retain()
                    held.peers.append(region)
                    bases[peer] = region.address
        elif self._kind == FABRIC:
            for peer, data in enumerate(handles):
                if peer != self._rank and data is not None:
                    with self._between_hosts():
                        take(peer, lambda data=data: driver.import_fabric(data))
        table = (ctypes.c_uint64 * self._num_ranks)(*bases)
        with driver.current():
            driver.copy_to_device(self._own.address + self._table, ctypes.addressof(table), ctypes.sizeof(table))

    @contextmanager
    def _between_hosts(self) -> Iterator[None]:
        """Says why a fabric handle was wanted at all."""
        try:
            yield
        except DcpUnsupported as error:
            if self._kind != FABRIC:
                raise
            why = "the ranks are on several hosts, or in several network namespaces, and so need fabric handles"
            raise DcpUnsupported(f"{error}; {why}") from error


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except DcpError as error:
        raise type(error)(f"{what}: {error}", ranks=error.ranks) from error


def _round_up(nbytes: int, granularity: int) -> int:
    return -(-nbytes // granularity) * granularity
