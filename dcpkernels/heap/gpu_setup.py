"""How a heap on GPUs comes to be, on one rank: the steps that gpu.py lists. What differs between vendors is in
cuda_setup.py and hip_setup.py."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.heap import gpu_later, sockets
from dcpkernels.heap.gpu_driver import FABRIC, NONE, GpuDriver
from dcpkernels.heap.gpu_held import Held
from dcpkernels.heap.gpu_region import Handle, Region
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.verdict import agree, attempt, require_same

OP = "workspace"  # the collective call that users know; heads every text
_TABLE_ALIGNMENT = 256
_MAX_PAIRS = 8  # that one text names


@dataclass(frozen=True)
class Card:
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
class Measure:
    """And in step `measure`."""

    granularity: int
    unreachable: list[int]  # ranks whose memory this rank's device cannot reach
    more: Any  # what a vendor has to know


@dataclass
class Made:
    """What `Setup.make` has made, besides what is held."""

    nbytes: int
    control_nbytes: int
    device: int
    device_name: str
    bases: list[int]
    bases_table: int


class Setup(ABC):
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
        deadline: Deadline,
    ) -> None:
        self._group, self._speaking, self._held, self._deadline = group, group, held, deadline
        self._rank, self._num_ranks = group.rank, group.num_ranks
        self._nbytes, self._control_nbytes, self._device = nbytes, control_nbytes, device
        self._payload = payload
        self._in_threads = group.exchange_regions(None, timeout_s=deadline.for_call()) is not None

    # ---- what a vendor has

    @abstractmethod
    def _new_driver(self, api: Any) -> GpuDriver:
        """Of this rank's device; `api` as in the heap's `create`."""

    @abstractmethod
    def _between(self, cards: list[Card], one_host: bool) -> str:
        """How handles go from process to process, FD, FABRIC or IPC. The same on all ranks, also in what it raises."""

    @abstractmethod
    def _measure_more(self, own: Card, granularity: int) -> Any:
        """For `Measure.more`."""

    @abstractmethod
    def _granularity(self) -> int: ...

    def _consider(self, cards: list[Card], measures: list[Measure]) -> int:
        """What else the size of a region has to be a multiple of. The same on all ranks, also in what it raises."""
        return 1

    @abstractmethod
    def _make_memory(
        self, init: Callable[[int], None], cards: list[Card], measures: list[Measure], bases: list[int]
    ) -> None:
        """Collective. From step `create region` on; fills `bases`."""

    _asked = ""  # the call that says whether a device reaches another one's memory

    @abstractmethod
    def _no_link(self, devices: list[str]) -> str:
        """What to look at where these `devices` do not."""

    # ---- the steps

    def make(self, init: Callable[[int], None], driver_api: Any) -> Made:
        """Collective. Raises the same on all ranks; what is held by then is the caller's to release."""
        gpu_later.try_again()  # there may be need of that memory
        cards: list[Card] = self._verdict("check", lambda: self._check(driver_api))
        self._judge(cards)
        one_host = len({card.host for card in cards}) == 1
        self._kind = NONE if self._in_threads or self._num_ranks == 1 else self._between(cards, one_host)
        # A mapping of thread ranks serves the devices of all of them.
        self._devices = sorted({card.ordinal for card in cards}) if self._in_threads else [self._device]
        self._connect(cards)

        measures: list[Measure] = self._verdict("measure", lambda: self._measure(cards))
        self._judge_links(cards, measures)
        # The same size everywhere: a mapping of it must fit every rank's rounding.
        granularity = math.lcm(*(measure.granularity for measure in measures), self._consider(cards, measures))
        self._table = -(-self._nbytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
        self._size = round_up(self._table + 8 * self._num_ranks, granularity)

        bases = [0] * self._num_ranks
        self._make_memory(init, cards, measures, bases)
        table = self._own.address + self._table
        return Made(self._nbytes, self._control_nbytes, self._device, self._driver.name, bases, table)

    def check_links(self, check: Callable[[Any], None], heap: Any) -> None:
        """Collective. `check(heap)` on all ranks, and the verdict on it."""

        def in_context() -> None:
            with self._driver.current():
                check(heap)

        self._verdict("check links", in_context)

    def _verdict(self, step: str, work: Callable[[], Any]) -> list[Any]:
        """Every rank's result of `work`, or the same error on all."""
        result, error = attempt(work)
        return agree(self._speaking, f"{OP}: {step}", result, error, timeout_s=self._deadline.for_call())

    @property
    def _driver(self) -> GpuDriver:
        assert self._held.driver is not None  # since step `check`
        return self._held.driver

    @property
    def _own(self) -> Region:
        assert self._held.own is not None  # since step `create region`
        return self._held.own

    # ---- before anything is allocated

    def _check(self, driver_api: Any) -> Card:
        if self._nbytes <= 0:
            raise DcpInvalidArgument(f"nbytes must be positive (got {self._nbytes})")
        if not 0 < self._control_nbytes <= self._nbytes:
            text = f"control_nbytes must be from 1 to nbytes={self._nbytes} (got {self._control_nbytes})"
            raise DcpInvalidArgument(text)
        driver = self._held.driver = self._new_driver(driver_api)
        if self._num_ranks > 1 and not self._in_threads:
            self._held.listener = sockets.Listener(backlog=self._num_ranks + 64)
        return Card(
            host=sockets.host_id(),
            uid=os.geteuid(),
            payload=self._payload,
            nbytes=self._nbytes,
            control_nbytes=self._control_nbytes,
            device=driver.place,
            uuid=driver.uuid,
            ordinal=driver.device,
            driver_version=driver.version_text,
            address=self._held.listener.address if self._held.listener else None,
        )

    def _judge(self, cards: list[Card]) -> None:
        """Every rank has the same cards, so every rank comes to the same error here, without another round."""
        require_same(OP, [card.payload for card in cards])
        require_same(OP, [{"nbytes": card.nbytes, "control_nbytes": card.control_nbytes} for card in cards])
        if len({card.host for card in cards}) == 1:
            require_same(OP, [{"user id": card.uid} for card in cards])

    def _connect(self, cards: list[Card]) -> None:
        listener = self._held.listener
        if listener is None or self._kind == FABRIC:
            self._held.close_sockets()
            return
        mesh = self._held.mesh = Mesh(self._rank, self._num_ranks)
        # A part of the time is kept for the verdict, so that ranks can still say who did not come.
        most = Deadline(self._deadline.for_call() * 0.8)
        _, error = attempt(lambda: mesh.connect(listener, [card.address for card in cards], most))
        if error is not None:
            self._held.close_sockets()  # those who wait for this rank see it at once
        agree(self._group, f"{OP}: connect", error=error, timeout_s=self._deadline.for_call())
        listener.close()
        self._speaking = mesh

    def _measure(self, cards: list[Card]) -> Measure:
        granularity = self._granularity()
        own, unreachable = cards[self._rank], []
        for rank, card in enumerate(cards):
            if card.host[0] == own.host[0] and card.uuid != own.uuid:
                ordinal = self._driver.ordinal_of(card.uuid)
                # A device that this process does not see cannot be asked about; mapping its memory will tell.
                if ordinal is not None and not self._driver.can_access_peer(ordinal):
                    unreachable.append(rank)
        return Measure(granularity, unreachable, self._measure_more(own, granularity))

    def _judge_links(self, cards: list[Card], measures: list[Measure]) -> None:
        pairs = [(rank, peer) for rank, measure in enumerate(measures) for peer in measure.unreachable]
        if not pairs:
            return
        named = [f"rank {a} ({cards[a].device}) to rank {b} ({cards[b].device})" for a, b in pairs[:_MAX_PAIRS]]
        more = f" and {len(pairs) - _MAX_PAIRS} more" if len(pairs) > _MAX_PAIRS else ""
        ranks = [rank for pair in pairs for rank in pair]
        text = f"every device must reach the memory of every other, by {self._asked} (no: {'; '.join(named)}{more})"
        raise DcpUnsupported(f"{OP}: {text}: {self._no_link([cards[rank].device for rank in ranks])}", ranks=ranks)

    # ---- memory

    def _create_region(
        self, init: Callable[[int], None], allocate: Callable[[], Region], export: Callable[[Region], Any]
    ) -> Any:
        """The own region, and memory of the host. Returns what `export` makes of it, or raises."""
        held, driver = self._held, self._driver
        if not held.is_open:
            driver.open()
            held.is_open = True
        with driver.current():
            own = held.own = allocate()
            driver.zero(own.address, self._size)
            with mmap.mmap(-1, self._control_nbytes) as buffer:  # zeroed, and aligned for whatever init writes
                start = ctypes.c_char.from_buffer(buffer)
                try:
                    init(ctypes.addressof(start))
                    driver.copy_to_device(own.address, ctypes.addressof(start), self._control_nbytes)
                finally:
                    del start  # or the buffer cannot be closed
            if not held.host:
                held.host = driver.host_alloc(self._control_nbytes)
            ctypes.memset(held.host, 0, self._control_nbytes)
            if (seen := driver.host_device_address(held.host)) != held.host:
                text = f"pinned memory of the host must have one address for host and {driver} (got {seen:#x} there)"
                raise DcpUnsupported(f"{text}: unified addressing is needed")
            return export(own)

    def _take(self, cards: list[Card], bases: list[int], peer: int, make: Callable[[], Region]) -> None:
        """Keeps the region of `peer`, which `make` maps."""
        card = cards[peer]
        with naming(f"the region of rank {peer} ({card.device}, driver {card.driver_version})"), self._driver.current():
            self._held.peers.append(make())
        bases[peer] = self._held.peers[-1].address

    def _exchange_files(self, cards: list[Card], bases: list[int]) -> None:
        """Every rank sends the descriptor of its region, and maps those that come."""
        driver, mesh = self._driver, self._held.mesh
        assert mesh is not None

        def take(peer: int, fd: int) -> None:
            self._take(cards, bases, peer, lambda: self._map(driver.import_fd(fd)))

        mesh.exchange_fds(self._held.files[0], take, self._deadline)

    def _map(self, value: Any) -> Region:
        """What another rank has handed over, for this rank's device."""
        return Region.map(self._driver, Handle(self._driver, value), self._size, [self._device])

    def _exchange_mappings(self, bases: list[int]) -> None:
        """Thread ranks."""
        theirs = self._group.exchange_regions(self._own, timeout_s=self._deadline.for_call())
        for peer, region in enumerate(theirs or ()):
            if peer != self._rank:
                region.retain()
                self._held.peers.append(region)
                bases[peer] = region.address

    def _write_table(self, bases: list[int]) -> None:
        table = (ctypes.c_uint64 * self._num_ranks)(*bases)
        with self._driver.current():
            self._driver.copy_to_device(self._own.address + self._table, ctypes.addressof(table), ctypes.sizeof(table))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Heads what is raised inside by `what` it is about."""
    try:
        yield
    except DcpError as error:
        raise type(error)(f"{what}: {error}", ranks=error.ranks) from error


def round_up(nbytes: int, granularity: int) -> int:
    return -(-nbytes // granularity) * granularity
