"""How a HIP heap comes to be, on one rank: what is AMD's of gpu_setup.py, and how regions go from process to process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpPeerLost, DcpUnsupported
from dcpkernels.heap.gpu_driver import FD, IPC, NONE
from dcpkernels.heap.gpu_held import Held
from dcpkernels.heap.gpu_region import Block, Handle, Region
from dcpkernels.heap.gpu_setup import OP, Card, Measure, Setup
from dcpkernels.heap.hip_driver import GRANULE, Driver, load_api
from dcpkernels.heap.verdict import describe, rank_list, restore

# What `handles` may be.
AUTO, BY_IPC, BY_VMM = "auto", "ipc", "vmm"

GOODBYE_S = 1.0  # for ranks that meet the same fault, and so leave together

_Described = tuple[str, str, tuple[int, ...]]


class HipHeld(Held):
    """HIP leaves open what becomes of memory that is freed while other processes have it open. So a rank closes its peers'
    regions before it tells them that it leaves, and frees its own when all have told, or are dead, or do not come."""

    driver: Driver | None

    def before_goodbye(self) -> None:
        with self._lock:
            if self.peers and self.driver is not None and self.driver.becomes_idle():
                self.release_peers()

    def release(self) -> None:
        with self._lock:
            self.before_goodbye()  # for peers take the end of the sockets for one, or for a death
            super().release()

    def give_up(self, cause: DcpPeerLost) -> None:
        super().give_up(cause)
        if self.mesh is not None and self.own is not None:
            self.before_goodbye()
            self.mesh.part(GOODBYE_S)


class HipSetup(Setup):
    """After `make`, `handles` is "ipc", "vmm" or "none", and `handles_reason` says why."""

    _held: HipHeld
    _asked = "hipDeviceCanAccessPeer"

    def __init__(self, *args: Any, handles: str, payload: dict[str, Any], **options: Any) -> None:
        self._wanted = handles
        super().__init__(*args, payload=payload | {"handles": handles}, **options)

    @property
    def _driver(self) -> Driver:
        assert self._held.driver is not None  # since step `check`
        return self._held.driver

    # ---- before anything is allocated

    def _new_driver(self, api: Any) -> Driver:
        if self._wanted not in (AUTO, BY_IPC, BY_VMM):
            raise DcpInvalidArgument(f"handles must be 'auto', 'ipc' or 'vmm' (got {self._wanted!r})")
        return Driver(load_api() if api is None else api, self._device)

    def _between(self, cards: list[Card], one_host: bool) -> str:
        if not one_host:
            hosts: dict[Any, list[int]] = {}
            for rank, card in enumerate(cards):
                hosts.setdefault(card.host, []).append(rank)
            named = "; ".join(rank_list(ranks) for ranks in hosts.values())
            raise DcpUnsupported(
                f"{OP}: all ranks must be on one host, in one network namespace (apart: {named}): no handle of these GPUs' "
                "memory goes further; containers of one host need --network=host",
                ranks=[rank for ranks in list(hosts.values())[1:] for rank in ranks],
            )
        return FD if self._wanted == BY_VMM else IPC

    def _no_link(self, devices: list[str]) -> str:
        return "see `amd-smi topology`, and large BAR and IOMMU (iommu=pt) for links by PCIe"

    def _granularity(self) -> int:
        # By IPC alone, or with nobody to hand anything to, it does not matter what else the runtime has.
        asks = self._wanted == BY_VMM or (self._wanted == AUTO and self._kind != NONE)
        self._no_vmm = "" if asks else "not asked for"
        try:
            self._no_vmm = self._no_vmm or self._driver.vmm_refusal()
            if not self._no_vmm:
                with self._driver.current():
                    return math.lcm(GRANULE, self._driver.granularity(FD))
        except DcpError as error:
            if self._wanted == BY_VMM:
                raise
            self._no_vmm = str(error)  # there may be no need of it
        return GRANULE

    def _measure_more(self, own: Card, granularity: int) -> str:
        return self._no_vmm

    def _consider(self, cards: list[Card], measures: list[Measure]) -> int:
        self._no_vmm = ""
        for rank, measure in enumerate(measures):
            if measure.more:
                self._no_vmm = f"rank {rank}: {measure.more}"
                break
        if self._wanted == BY_VMM and self._no_vmm:
            ranks = [rank for rank, measure in enumerate(measures) if measure.more]
            raise DcpUnsupported(f"{OP}: handles='vmm' must be possible on all ranks (no: {self._no_vmm})", ranks=ranks)
        return 1

    # ---- memory

    def _make_memory(
        self, init: Callable[[int], None], cards: list[Card], measures: list[Measure], bases: list[int]
    ) -> None:
        self.handles, self.handles_reason = self._wanted, "asked for"
        if self._wanted == BY_VMM:
            self._share_by_vmm(init, cards, bases)
        elif (refusal := self._share_by_ipc(init, cards, bases)) is not None:
            self._fall_back(refusal, init, cards, bases)
        elif self._wanted == AUTO:
            self.handles, self.handles_reason = BY_IPC, "the first choice"
        if self._kind == NONE:
            one = "the group has one rank" if self._num_ranks == 1 else "ranks are threads of one process"
            self.handles, self.handles_reason = "none", f"{one}, and need none"

    def _fall_back(
        self, refusal: tuple[int, _Described], init: Callable[[int], None], cards: list[Card], bases: list[int]
    ) -> None:
        """Raises, the same on all ranks, when there is no other way either."""
        rank, (cls, text, ranks) = refusal
        reason = f"no IPC handles: rank {rank}: {text}"
        if self._wanted == BY_IPC or self._no_vmm:
            instead = "" if self._wanted == BY_IPC else f"; and no descriptors: {self._no_vmm}"
            text = f"{OP}: all ranks must reach all regions ({reason}{instead})"
            raise restore((cls, text, ranks or (rank,)))
        self._start_over()
        self.handles, self.handles_reason = BY_VMM, reason
        try:
            self._share_by_vmm(init, cards, bases)
        except DcpError as error:
            raise type(error)(f"{error} (tried as there are {reason})", ranks=error.ranks) from error

    def _share_by_ipc(
        self, init: Callable[[int], None], cards: list[Card], bases: list[int]
    ) -> tuple[int, _Described] | None:
        """Returns the first rank that cannot, and why; the same on all ranks, which then have what they have of it."""

        def allocate() -> Region:
            driver = self._driver
            return Region(driver, Block(driver, driver.allocate(self._size), driver.free), self._size)

        def export(own: Region) -> tuple[bytes | None, _Described | None]:
            if self._kind == NONE:
                return None, None
            try:
                return self._driver.export_ipc(own.address, self._size), None
            except DcpError as error:
                return None, describe(error)

        made = self._verdict("create region", lambda: self._create_region(init, allocate, export))
        refusals = [refusal for _, refusal in made]
        if not any(refusals):
            handles = [data for data, _ in made]
            # Also the moment from which every thread rank has retained every region: only now may one be released.
            refusals = self._verdict("map peers", lambda: self._open_peers(cards, bases, handles))
        return next(((rank, refusal) for rank, refusal in enumerate(refusals) if refusal), None)

    def _open_peers(self, cards: list[Card], bases: list[int], handles: list[bytes]) -> _Described | None:
        driver = self._driver
        bases[self._rank] = self._own.address
        if self._in_threads:
            self._exchange_mappings(bases)
            with driver.current():
                for ordinal in self._devices:
                    if ordinal != self._device:
                        driver.enable_peer_access(ordinal)
        elif self._kind != NONE:
            for peer, data in enumerate(handles):
                if peer != self._rank:
                    try:
                        self._take(cards, bases, peer, lambda data=data: self._open(data))
                    except DcpError as error:
                        return describe(error)
        self._write_table(bases)
        return None

    def _open(self, data: bytes) -> Region:
        driver = self._driver
        return Region(driver, Block(driver, driver.open_ipc(data, self._size), driver.close_ipc), self._size)

    def _start_over(self) -> None:
        """Gives back what is there of regions, for another try. Nobody frees what another rank still has open."""
        self._verdict("unmap peers", self._held.release_peers)
        own, self._held.own = self._own, None
        own.release()
        self._kind = FD

    def _share_by_vmm(self, init: Callable[[int], None], cards: list[Card], bases: list[int]) -> None:
        def allocate() -> Region:
            driver = self._driver
            handle = Handle(driver, driver.create_memory(self._size, self._kind))
            return Region.map(driver, handle, self._size, self._devices)

        def export(own: Region) -> None:
            if self._kind != NONE and own.handle is not None:
                self._held.files.append(self._driver.export_fd(own.handle.value))

        def map_peers() -> None:
            bases[self._rank] = self._own.address
            if self._in_threads:
                self._exchange_mappings(bases)
            elif self._kind != NONE:
                self._exchange_files(cards, bases)
            self._write_table(bases)

        self._verdict("create region", lambda: self._create_region(init, allocate, export))
        self._verdict("map peers", map_peers)
        self._held.close_files()
