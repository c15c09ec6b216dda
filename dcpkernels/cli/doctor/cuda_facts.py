"""What the child asks of CUDA: the module, cuda-python, the driver, and NVML for what the driver does not tell.

Nothing of this has run on a GPU: tests have the fake driver in its place.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

from dcpkernels import _backend
from dcpkernels.cli.doctor.build import module_facts
from dcpkernels.cli.doctor.probe import gather
from dcpkernels.errors import DcpError
from dcpkernels.heap.cuda_driver import Driver, load_api
from dcpkernels.heap.gpu_driver import FABRIC, FD

_P2P_OK = 0  # NVML_P2P_STATUS_OK


def facts() -> dict[str, Any]:
    return module_facts("cuda") | of_driver(load_api, _load_nvml, _usable)


def _usable(device: int) -> str:
    """The compiled module's word on a device, "" when it has code for it and a driver that will do."""
    try:
        _backend.load("cuda").require_device(device)
    except DcpError as error:
        return str(error)
    return ""


def _load_nvml() -> Any:
    from cuda.bindings import nvml

    nvml.init_v2()
    return nvml


def of_driver(
    load: Callable[[], Any], load_nvml: Callable[[], Any], usable: Callable[[int], str]
) -> dict[str, dict[str, Any]]:
    drivers: list[Driver] = []

    def version() -> str:
        api = load()
        drivers.append(Driver(api, 0))
        drivers.extend(Driver(api, ordinal) for ordinal in range(1, drivers[0].num_devices))
        return drivers[0].version_text

    found = gather(python=lambda: importlib.metadata.version("cuda-bindings"), driver=version)
    if not drivers:
        return found
    nvml = _Nvml(drivers, load_nvml)
    return found | gather(
        devices=lambda: [_device(driver) for driver in drivers],
        usable=lambda: next(filter(None, (usable(driver.device) for driver in drivers)), ""),
        peers=lambda: [[a is b or a.can_access_peer(b.device) for b in drivers] for a in drivers],
        atomics=lambda: [[a is b or _has_atomics(load(), a.device, b.device) for b in drivers] for a in drivers],
        links=nvml.links,
        multicast=lambda: [bool(driver.attribute("MULTICAST_SUPPORTED")) for driver in drivers],
        has_fabric=lambda: [bool(driver.attribute("HANDLE_TYPE_FABRIC_SUPPORTED")) for driver in drivers],
        fabric=nvml.fabric,
        handles=lambda: [_error_of(_pass_descriptor, driver) for driver in drivers],
        fabric_handle=lambda: _error_of(_make_fabric_handle, drivers[0]),
    )


def _device(driver: Driver) -> dict[str, Any]:
    major, minor = (driver.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return {"name": driver.name, "capability": [major, minor]}


def _has_atomics(api: Any, device: int, peer: int) -> bool:
    wanted = api.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    result, value = api.cuDeviceGetP2PAttribute(wanted, api.cuDeviceGet(device)[1], api.cuDeviceGet(peer)[1])
    if int(result) != 0:
        raise DcpError(f"cuDeviceGetP2PAttribute must succeed (got error {int(result)})")
    return bool(value)


def _error_of(work: Callable[[Driver], None], driver: Driver) -> str:
    try:
        work(driver)
    except DcpError as error:
        return str(error)
    return ""


def _pass_descriptor(driver: Driver) -> None:
    """As regions go from process to process on one host, without the other process."""
    memory = driver.create_memory(driver.granularity(FD), FD)
    try:
        fd = driver.export_fd(memory)
        try:
            driver.release(driver.import_fd(fd))
        finally:
            os.close(fd)
    finally:
        driver.release(memory)


def _make_fabric_handle(driver: Driver) -> None:
    """As between hosts. The attribute says yes also where the process may not."""
    memory = driver.create_memory(driver.granularity(FABRIC), FABRIC)
    try:
        driver.export_fabric(memory)
    finally:
        driver.release(memory)


class _Nvml:
    """By the place on the PCI bus, for NVML knows nothing of CUDA_VISIBLE_DEVICES."""

    def __init__(self, drivers: list[Driver], load: Callable[[], Any]) -> None:
        self._drivers, self._load = drivers, load

    def _open(self) -> tuple[Any, list[Any]]:
        nvml = self._load()
        return nvml, [nvml.device_get_handle_by_pci_bus_id_v2(driver.pci) for driver in self._drivers]

    def links(self) -> list[list[str]]:
        nvml, handles = self._open()
        by_nvlink = nvml.GpuP2PCapsIndex.P2P_CAPS_INDEX_NVLINK

        def link(a: Any, b: Any) -> str:
            return "NVLink" if int(nvml.device_get_p2p_status(a, b, int(by_nvlink))) == _P2P_OK else "PCIe"

        return [["" if a is b else link(a, b) for b in handles] for a in handles]

    def fabric(self) -> list[list[int]]:
        """(state, status) of each device: the registration of a GPU with the NVLink switches."""
        nvml, handles = self._open()
        infos = [nvml.device_get_gpu_fabric_info_v(handle) for handle in handles]
        return [[int(info.state), int(info.status)] for info in infos]
