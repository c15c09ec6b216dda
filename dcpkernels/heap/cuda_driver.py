"""The thin layer over the CUDA driver: one short method per need, and an error that says what to do for each failure.

Everything the heap asks of a GPU goes through `Driver`. It works on the module `cuda.bindings.driver` of cuda-python,
or on anything with the same functions (tests/cuda/fake_driver.py). cuda-python has no part in importing this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dcpkernels.errors import DcpDeviceError, DcpError, DcpUnsupported
from dcpkernels.heap.cuda_errors import call_error
from dcpkernels.heap.gpu_driver import FABRIC, FD, NONE, GpuDriver, text_of

# 12.3 is the first with fabric handles. Multicast came with 12.1, the rest is older.
MIN_VERSION = 12030

_EXCHANGE = "cuThreadExchangeStreamCaptureMode"

_HANDLE_TYPES = {
    NONE: "CU_MEM_HANDLE_TYPE_NONE",
    FD: "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    FABRIC: "CU_MEM_HANDLE_TYPE_FABRIC",
}


def load_api() -> Any:
    """The module cuda.bindings.driver. Raises DcpUnsupported, with the cause and the fix, where it cannot work."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        text = f"cuda-python must be installed (pip install 'dcpkernels[cuda]') (got {type(error).__name__}: {error})"
        raise DcpUnsupported(text) from error
    try:
        driver.cuDriverGetVersion()
    except RuntimeError as error:  # "Failed to dlopen libcuda.so.1"
        raise _no_driver(error) from error
    return driver


def _no_driver(error: Exception) -> DcpUnsupported:
    return DcpUnsupported(
        f"the NVIDIA driver must have what is asked of it (got {error}): libcuda.so.1 comes with the driver, and into a "
        f"container with the NVIDIA container toolkit (--gpus); version {dotted(MIN_VERSION)} or later is needed"
    )


class Driver(GpuDriver):
    """The last `close` gives up the context. `current` leaves the thread's current context as it was."""

    def __init__(self, api: Any, device: int) -> None:
        """Raises DcpUnsupported (no driver, too old a one, no such device) or DcpDeviceError."""
        super().__init__(api, device)
        self._context: Any = None
        self._call("cuInit", 0)
        self.version = int(self._call("cuDriverGetVersion"))
        if self.version < MIN_VERSION:
            text = f"the CUDA driver must be of version {dotted(MIN_VERSION)} or later (got {dotted(self.version)})"
            raise DcpUnsupported(text)
        self.num_devices = int(self._call("cuDeviceGetCount"))
        if not 0 <= device < self.num_devices:
            text = f"device must be one of the {self.num_devices} that this process sees (got {device})"
            raise DcpUnsupported(f"{text}: see CUDA_VISIBLE_DEVICES")
        self._device = self._call("cuDeviceGet", device)
        self.name = text_of(self._call("cuDeviceGetName", 256, self._device))
        self.uuid = bytes(self._call("cuDeviceGetUuid", self._device).bytes).hex()
        self.pci = text_of(self._call("cuDeviceGetPCIBusId", 32, self._device))

    @property
    def version_text(self) -> str:
        return dotted(self.version)

    def _no_library(self, error: Exception) -> DcpError:
        return _no_driver(error)

    def _call_error(self, call: str, result: Any, details: dict[str, Any]) -> DcpError:
        return call_error(call, getattr(result, "name", "CUresult"), int(result), where=str(self), **details)

    def _too_new(self, call: str, error: Exception) -> str:
        return f"{call} must succeed on {self} (got {error}): the driver is newer than cuda-python, update that"

    # ---- the device

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_<name>."""
        wanted = self._enum("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", wanted, self._device, more=name))

    def ordinal_of(self, uuid: str) -> int | None:
        """What this process calls the device of another rank; None when it does not see it. Ordinals differ between
        processes, by CUDA_VISIBLE_DEVICES."""
        for ordinal in range(self.num_devices):
            if bytes(self._call("cuDeviceGetUuid", self._call("cuDeviceGet", ordinal)).bytes).hex() == uuid:
                return ordinal
        return None

    def can_access_peer(self, ordinal: int) -> bool:
        """Whether kernels of this device can load and store in the memory of another one."""
        peer = self._call("cuDeviceGet", ordinal)
        return bool(self._call("cuDeviceCanAccessPeer", self._device, peer, more=f"peer device {ordinal}"))

    # ---- context and stream

    def _take(self) -> None:
        """Retains the primary context, which is also PyTorch's."""
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def _give_back(self) -> None:
        self._try(self._call, "cuDevicePrimaryCtxRelease", self._device)
        self._context = None

    def _new_stream(self) -> Any:
        # Non-blocking: it neither waits for the default stream nor is waited for.
        return self._call("cuStreamCreate", int(self._enum("CUstream_flags", "CU_STREAM_NON_BLOCKING")))

    def _destroy_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def _entering(self) -> Sequence[Callable[[], Callable[[], Any]]]:
        """Keeps what is done out of graphs, too: by default a call for memory on any thread breaks a capture that is going
        on on another; and garbage collection may come from the middle of one."""

        def relax() -> Callable[[], Any]:
            before = self._call(_EXCHANGE, self._enum("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED"))
            return lambda: self._call(_EXCHANGE, before)

        def push() -> Callable[[], Any]:
            self._call("cuCtxPushCurrent", self._context)
            return lambda: self._call("cuCtxPopCurrent")

        return relax, push

    def wait_idle(self) -> None:
        self._call("cuCtxSynchronize")

    # ---- memory: handles, address ranges, mappings

    def granularity(self, kind: str) -> int:
        """The minimum, not the recommended one, as for multicast."""
        option = self._enum("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_MINIMUM")
        return int(self._call("cuMemGetAllocationGranularity", self._memory(kind), option, fabric=kind == FABRIC))

    def create_memory(self, nbytes: int, kind: str) -> Any:
        """A handle of new memory on this device."""
        try:
            return self._call("cuMemCreate", nbytes, self._memory(kind), 0, nbytes=nbytes, fabric=kind == FABRIC)
        except DcpDeviceError as error:
            raise type(error)(f"{error}{self._free_memory()}") from error

    def _free_memory(self) -> str:
        try:
            result, free, total = self._api.cuMemGetInfo()
        except (RuntimeError, ValueError, KeyError):
            return ""
        return f" ({free} of {total} bytes are free)" if int(result) == 0 else ""

    def _memory(self, kind: str) -> Any:
        prop = self._api.CUmemAllocationProp()
        prop.type = self._enum("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED")
        prop.location.type = self._enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
        prop.location.id = self.device
        prop.requestedHandleTypes = self._handle_type(kind)
        return prop

    def _handle_type(self, kind: str) -> Any:
        return self._enum("CUmemAllocationHandleType", _HANDLE_TYPES[kind])

    def export_fd(self, handle: Any) -> int:
        """A new descriptor, the caller's to close."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._handle_type(FD), 0))

    def import_fd(self, fd: int) -> Any:
        """A handle of another process' memory; the descriptor may be closed afterwards."""
        # For this handle type the pointer argument is the number itself.
        return self._call("cuMemImportFromShareableHandle", int(fd), self._handle_type(FD))

    def export_fabric(self, handle: Any) -> bytes:
        """64 bytes that mean this memory on every host of the NVLink domain, for as long as it lives."""
        kind = self._handle_type(FABRIC)
        return bytes(self._call("cuMemExportToShareableHandle", handle, kind, 0, fabric=True).data)

    def import_fabric(self, data: bytes) -> Any:
        return self._call("cuMemImportFromShareableHandle", bytes(data), self._handle_type(FABRIC), fabric=True)

    def reserve(self, nbytes: int, alignment: int) -> int:
        """The start of a free range of addresses."""
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0, nbytes=nbytes))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0, nbytes=nbytes)

    def set_access(self, address: int, nbytes: int, devices: Sequence[int]) -> None:
        """Lets kernels of `devices` read and write there. Without it every access is a fault."""
        descs = []
        for device in devices:
            desc = self._api.CUmemAccessDesc()
            desc.location.type = self._enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
            desc.location.id = device
            desc.flags = self._enum("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            descs.append(desc)
        more = f"for devices {', '.join(map(str, devices))}"
        self._call("cuMemSetAccess", address, nbytes, descs, len(descs), nbytes=nbytes, more=more)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes, nbytes=nbytes)

    def free_address(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes, nbytes=nbytes)

    def release(self, handle: Any) -> None:
        """Of memory or of a multicast object. Memory that is mapped anywhere lives on until it is not."""
        self._call("cuMemRelease", handle)

    # ---- multicast

    def multicast_granularity(self, num_devices: int, nbytes: int, kind: str) -> int:
        """The minimum. The recommended one may be hundreds of MiB, which every rank would lose to a region of a few."""
        option = self._enum("CUmulticastGranularity_flags", "CU_MULTICAST_GRANULARITY_MINIMUM")
        return int(self._call("cuMulticastGetGranularity", self._team(num_devices, nbytes, kind), option))

    def multicast_create(self, num_devices: int, nbytes: int, kind: str) -> Any:
        team = self._team(num_devices, nbytes, kind)
        more = f"{num_devices} devices"
        return self._call("cuMulticastCreate", team, nbytes=nbytes, fabric=kind == FABRIC, more=more)

    def _team(self, num_devices: int, nbytes: int, kind: str) -> Any:
        prop = self._api.CUmulticastObjectProp()
        prop.numDevices, prop.size = num_devices, nbytes
        prop.handleTypes, prop.flags = int(self._handle_type(kind)), 0
        return prop

    def multicast_add_device(self, handle: Any) -> None:
        self._call("cuMulticastAddDevice", handle, self._device)

    def multicast_bind(self, handle: Any, memory: Any, nbytes: int) -> None:
        """Waits, in the driver and for ever, until all devices are in the team: vote first."""
        self._call("cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0, nbytes=nbytes)

    def multicast_unbind(self, handle: Any, nbytes: int) -> None:
        self._call("cuMulticastUnbind", handle, self._device, 0, nbytes, nbytes=nbytes)

    # ---- host memory, copies

    def host_alloc(self, nbytes: int) -> int:
        """Pinned memory of the host, for every context of the process and for kernels. Not zeroed."""
        flags = int(self._api.CU_MEMHOSTALLOC_PORTABLE) | int(self._api.CU_MEMHOSTALLOC_DEVICEMAP)
        return int(self._call("cuMemHostAlloc", nbytes, flags, nbytes=nbytes))

    def host_device_address(self, address: int) -> int:
        """Where kernels see pinned memory of the host."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    # On an own stream, of which alone the end is awaited.

    def copy_to_device(self, address: int, source: int, nbytes: int) -> None:
        """From `source`, an address of the host."""
        self._call("cuMemcpyHtoDAsync", address, source, nbytes, self._stream, nbytes=nbytes)
        self._call("cuStreamSynchronize", self._stream)

    def copy_from_device(self, target: int, address: int, nbytes: int) -> None:
        """To `target`, an address of the host."""
        self._call("cuMemcpyDtoHAsync", target, address, nbytes, self._stream, nbytes=nbytes)
        self._call("cuStreamSynchronize", self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", address, 0, nbytes, self._stream, nbytes=nbytes)
        self._call("cuStreamSynchronize", self._stream)


def dotted(version: int) -> str:
    """13000 is 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"
