"""What the child asks of HIP: the module, hip-python, the runtime. Nothing of this has run on a GPU: tests have the fake
runtime in its place."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from dcpkernels import _backend
from dcpkernels.cli.doctor.build import module_facts
from dcpkernels.cli.doctor.probe import gather
from dcpkernels.errors import DcpError
from dcpkernels.heap.hip_driver import GRANULE, Driver, load_api

# hsa_amd_link_info_type_t
_LINKS = {0: "HyperTransport", 1: "QPI", 2: "PCIe", 3: "InfiniBand", 4: "xGMI"}


def facts() -> dict[str, Any]:
    with contextlib.suppress(
        Exception
    ):  # torch has a section of its own; here it brings its runtime, as in a workspace
        import torch  # noqa: F401
    return module_facts("hip") | of_runtime(load_api, _usable)


def _usable(device: int) -> str:
    """The compiled module's word on a device, "" when it has code for it and a runtime that will do."""
    try:
        _backend.load("hip").require_device(device)
    except DcpError as error:
        return str(error)
    return ""


def of_runtime(load: Callable[[], Any], usable: Callable[[int], str]) -> dict[str, dict[str, Any]]:
    drivers: list[Driver] = []
    apis: list[Any] = []

    def version() -> str:
        apis.append(load())
        drivers.append(Driver(apis[0], 0))
        drivers.extend(Driver(apis[0], ordinal) for ordinal in range(1, drivers[0].num_devices))
        return drivers[0].version_text

    found = gather(python=lambda: importlib.metadata.version("hip-python"), driver=version)
    if not drivers:
        return found
    return found | gather(
        devices=lambda: [{"name": driver.name} for driver in drivers],
        usable=lambda: next(filter(None, (usable(driver.device) for driver in drivers)), ""),
        peers=lambda: [[a is b or a.can_access_peer(b.device) for b in drivers] for a in drivers],
        links=lambda: [["" if a is b else _link(apis[0], a.device, b.device) for b in drivers] for a in drivers],
        ipc=lambda: [_error_of_ipc(driver) for driver in drivers],
        vmm=lambda: next(filter(None, (driver.vmm_refusal() for driver in drivers)), ""),
    )


def _link(api: Any, device: int, peer: int) -> str:
    result, kind, _ = api.hipExtGetLinkTypeAndHopCount(device, peer)
    if int(result) != 0:
        raise DcpError(f"hipExtGetLinkTypeAndHopCount must succeed (got error {int(result)})")
    return _LINKS.get(int(kind), "")


def _error_of_ipc(driver: Driver) -> str:
    """As regions go from process to process, without the other process."""
    try:
        driver.open()
        try:
            with driver.current():
                address = driver.allocate(GRANULE)
                try:
                    driver.export_ipc(address, GRANULE)
                finally:
                    driver.free(address)
        finally:
            driver.close()
    except DcpError as error:
        return str(error)
    return ""
