"""How a CUDA heap comes to be, on one rank: what is NVIDIA's of gpu_setup.py, and multicast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dcpkernels.errors import DcpError, DcpUnsupported
from dcpkernels.heap.cuda_driver import Driver, load_api
from dcpkernels.heap.cuda_multicast import Multicast, Team, refusal
from dcpkernels.heap.gpu_driver import FABRIC, FD
from dcpkernels.heap.gpu_held import Held
from dcpkernels.heap.gpu_region import Handle, Region
from dcpkernels.heap.gpu_setup import Card, Measure, Setup, round_up


class CudaHeld(Held):
    driver: Driver | None

    def __init__(self) -> None:
        super().__init__()
        self.multicast = Multicast()

    def _release_more(self) -> None:
        self.multicast.release()


class CudaSetup(Setup):
    """`multicast_reason`: after `make`, "yes" or why there is none."""

    _held: CudaHeld
    _asked = "cuDeviceCanAccessPeer"

    def __init__(self, *args: Any, multicast: bool, **options: Any) -> None:
        self._multicast = multicast
        super().__init__(*args, **options)

    @property
    def _driver(self) -> Driver:
        assert self._held.driver is not None  # since step `check`
        return self._held.driver

    def _new_driver(self, api: Any) -> Driver:
        return Driver(load_api() if api is None else api, self._device)

    def _between(self, cards: list[Card], one_host: bool) -> str:
        return FD if one_host else FABRIC

    def _no_link(self, devices: list[str]) -> str:
        mig = any("MIG" in device for device in devices)
        return "MIG devices have no peer access" if mig else "see `nvidia-smi topo -p2p rw`"

    def _granularity(self) -> int:
        return self._driver.granularity(self._kind)

    def _measure_more(self, own: Card, granularity: int) -> Team:
        driver = self._driver
        multicast, why_not = 0, ""
        if self._multicast and self._num_ranks > 1:
            try:
                if driver.attribute("MULTICAST_SUPPORTED"):
                    size = round_up(self._nbytes, granularity)
                    multicast = driver.multicast_granularity(self._num_ranks, size, self._kind)
                else:
                    why_not = (
                        f"{driver} has none (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0): no NVLink switch, a "
                        "MIG device, or a confidential virtual machine"
                    )
            except DcpError as error:
                why_not = str(error)
        return Team(self._multicast, own.uuid, own.device, multicast, why_not)

    def _consider(self, cards: list[Card], measures: list[Measure]) -> int:
        """A team binds regions by its own rounding."""
        teams = [measure.more for measure in measures]
        self._why_not = refusal(teams)
        self._alignment = math.lcm(*(team.granularity for team in teams)) if not self._why_not else 1
        return self._alignment

    def _make_memory(
        self, init: Callable[[int], None], cards: list[Card], measures: list[Measure], bases: list[int]
    ) -> None:
        handles = self._verdict("create region", lambda: self._create_region(init, self._allocate, self._export))
        # Also the moment from which every thread rank has retained every region: only now may one be released.
        self._verdict("map peers", lambda: self._map_peers(cards, bases, handles))
        self._held.close_files()
        self.multicast_reason = self._why_not or self._held.multicast.make(
            self._speaking,
            self._held.mesh,
            self._driver,
            self._own,
            kind=self._kind,
            alignment=self._alignment,
            deadline=self._deadline,
        )

    def _allocate(self) -> Region:
        driver = self._driver
        with self._between_hosts():
            handle = Handle(driver, driver.create_memory(self._size, self._kind))
        return Region.map(driver, handle, self._size, self._devices)

    def _export(self, own: Region) -> bytes | None:
        """Makes ready what the others are to have of it."""
        assert own.handle is not None
        if self._kind == FD:
            self._held.files.append(self._driver.export_fd(own.handle.value))
        if self._kind == FABRIC:
            with self._between_hosts():
                return self._driver.export_fabric(own.handle.value)
        return None

    def _map_peers(self, cards: list[Card], bases: list[int], handles: list[bytes | None]) -> None:
        bases[self._rank] = self._own.address
        if self._held.mesh is not None:
            self._exchange_files(cards, bases)
        elif self._in_threads:
            self._exchange_mappings(bases)
        elif self._kind == FABRIC:
            for peer, data in enumerate(handles):
                if peer != self._rank and data is not None:
                    with self._between_hosts():
                        self._take(cards, bases, peer, lambda data=data: self._map(self._driver.import_fabric(data)))
        self._write_table(bases)

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
