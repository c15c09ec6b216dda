"""The thin layer over the HIP runtime: one short method per need, and an error that says what to do for each failure.

It works on the module hip.hip of hip-python as `load_api` returns it, or on anything with the same functions. hip-python has
no part in importing this file. HIP has no contexts: a thread has a current device, which calls refer to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dcpkernels.errors import DcpDeviceError, DcpError, DcpUnsupported
from dcpkernels.heap.gpu_driver import FD, NONE, GpuDriver, text_of
from dcpkernels.heap.hip_errors import call_error
from dcpkernels.heap.hip_library import load_api, no_library

__all__ = ["GRANULE", "MIN_VERSION", "Driver", "dotted", "load_api"]

# As hipRuntimeGetVersion counts. 6.2 is the oldest series that hip-python knows, and older than any that PyTorch 2.9 is built
# for: nobody tests older ones any more.
MIN_VERSION = 6_02_00000
# hipMemCreate takes hipMemAllocationTypeUncached since 7.0.2 and 7.1, and gave memory that is cached, until
# https://github.com/ROCm/rocm-systems/pull/4476 (opened in March 2026): no call tells. HIP 7.15, which is ROCm 10.0, has that
# by its source; whether the releases 7.13 and 7.14 have it we do not know.
VMM_VERSION = 7_15_00000

# An allocation that is handed over as a whole is whole pages of the largest kind, and shares none with anybody.
GRANULE = 2 << 20

_UNCACHED = 0x3  # hipDeviceMallocUncached, for which hip-python has no name
_IPC_BYTES = 64
_PEER_ACCESS_ALREADY_ENABLED = 704


class _AllocationProp(ctypes.Structure):
    """hipMemAllocationProp. hip-python's has no field for what is in a union in C, the handle types."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_uint8 * 4),
    )


class _AccessDesc(ctypes.Structure):
    """hipMemAccessDesc, of which an array is wanted."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


class Driver(GpuDriver):
    """The last `close` gives up the stream. `current` leaves the thread's current device as it was.

    `uuid` is that of the device and its place on the PCI bus: some runtimes give all devices one uuid, or none, and
    partitions of one device share their place.
    """

    def __init__(self, api: Any, device: int) -> None:
        """Raises DcpUnsupported (no runtime, too old a one, no such device) or DcpDeviceError."""
        super().__init__(api, device)
        self.version = int(self._call("hipRuntimeGetVersion"))
        if self.version < MIN_VERSION:
            text = f"the HIP runtime must be of version {dotted(MIN_VERSION)} or later (got {dotted(self.version)})"
            raise DcpUnsupported(text)
        self.num_devices = int(self._call("hipGetDeviceCount"))
        if not 0 <= device < self.num_devices:
            text = f"device must be one of the {self.num_devices} that this process sees (got {device})"
            raise DcpUnsupported(f"{text}: see HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES")
        self.name = text_of(self._call("hipDeviceGetName", 256, device))
        self.pci = text_of(self._call("hipDeviceGetPCIBusId", 32, device))
        self.uuid = self._identity(device)

    def _identity(self, ordinal: int) -> str:
        uuid = bytes(self._call("hipDeviceGetUuid", ordinal).bytes).hex()
        return f"{uuid}@{text_of(self._call('hipDeviceGetPCIBusId', 32, ordinal))}"

    @property
    def place(self) -> str:
        uuid = bytes.fromhex(self.uuid.partition("@")[0]).rstrip(b"\0")
        # Sixteen letters as a rule, which ROCR_VISIBLE_DEVICES takes with "GPU-" before them.
        named = f", GPU-{uuid.decode()}" if uuid.isalnum() else ""
        return f"{self}, {self.pci}{named}"

    @property
    def version_text(self) -> str:
        return f"HIP {dotted(self.version)}"

    def _no_library(self, error: Exception) -> DcpError:
        return no_library(error)

    def _call_error(self, call: str, result: Any, details: dict[str, Any]) -> DcpError:
        self._clear_error()
        return call_error(call, getattr(result, "name", "hipError_t"), int(result), where=str(self), **details)

    def _clear_error(self) -> None:
        """HIP keeps the last error of a thread until somebody asks. PyTorch asks after each of its launches, and would
        take ours for its own."""
        with contextlib.suppress(Exception):
            self._api.hipGetLastError()

    def _too_new(self, call: str, error: Exception) -> str:
        self._clear_error()
        return f"{call} must succeed on {self} (got {error}): the HIP runtime is newer than hip-python, update that"

    # ---- the device

    def ordinal_of(self, uuid: str) -> int | None:
        return next((ordinal for ordinal in range(self.num_devices) if self._identity(ordinal) == uuid), None)

    def can_access_peer(self, ordinal: int) -> bool:
        return bool(self._call("hipDeviceCanAccessPeer", self.device, ordinal, more=f"peer device {ordinal}"))

    def enable_peer_access(self, ordinal: int) -> None:
        """For kernels of this device to the memory that this process has on another one. It is never disabled: others
        in the process may count on it."""
        result, _ = self._result("hipDeviceEnablePeerAccess", ordinal, 0)
        if int(result) == _PEER_ACCESS_ALREADY_ENABLED:
            self._clear_error()
        elif int(result) != 0:
            raise self._call_error("hipDeviceEnablePeerAccess", result, {"more": f"peer device {ordinal}"})

    def vmm_refusal(self) -> str:
        """Why there is no uncached memory by handles, "" when there is."""
        if self.version < VMM_VERSION:
            return f"the HIP runtime must be of version {dotted(VMM_VERSION)} or later (got {dotted(self.version)})"
        name = "hipDeviceAttributeVirtualMemoryManagementSupported"
        if not int(
            self._call("hipDeviceGetAttribute", self._enum("hipDeviceAttribute_t", name), self.device, more=name)
        ):
            return f"{self} has no virtual memory management ({name} is 0)"
        return ""

    # ---- current device and stream

    def _entering(self) -> Sequence[Callable[[], Callable[[], Any]]]:
        """Keeps what is done out of graphs, too: by default a call for memory on any thread breaks a capture that is going
        on on another; and garbage collection may come from the middle of one."""

        def exchange(mode: Any) -> Any:
            return self._call("hipThreadExchangeStreamCaptureMode", mode)

        def relax() -> Callable[[], Any]:
            before = exchange(self._enum("hipStreamCaptureMode", "hipStreamCaptureModeRelaxed"))
            return lambda: exchange(before)

        def select() -> Callable[[], Any]:
            before = int(self._call("hipGetDevice"))
            if before == self.device:
                return lambda: None
            self._call("hipSetDevice", self.device)
            return lambda: self._call("hipSetDevice", before)

        return relax, select

    def _take(self) -> None:
        """A device is initialised by its first use, and stays so as long as the process lives."""

    def _give_back(self) -> None:
        pass

    def _new_stream(self) -> Any:
        # Non-blocking: it neither waits for the default stream nor is waited for.
        return self._call("hipStreamCreateWithFlags", int(self._api.hipStreamNonBlocking))

    def _destroy_stream(self, stream: Any) -> None:
        self._call("hipStreamDestroy", stream)

    def wait_idle(self) -> None:
        self._call("hipDeviceSynchronize")

    # ---- memory with its address, and IPC handles of it

    def allocate(self, nbytes: int) -> int:
        """The address of uncached memory on this device: what peers store there while a kernel runs must not be hidden by
        what an L2 of this device holds."""
        with self._telling_free_memory():
            return int(self._call("hipExtMallocWithFlags", nbytes, _UNCACHED, nbytes=nbytes))

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def export_ipc(self, address: int, nbytes: int) -> bytes:
        """64 bytes that mean this memory to the other processes of the host, for as long as it lives."""
        return bytes(self._call("hipIpcGetMemHandle", address, nbytes=nbytes).reserved)

    def open_ipc(self, data: bytes, nbytes: int) -> int:
        """The address of another process' memory, for this device."""
        if len(data) != _IPC_BYTES:  # hip-python reads as many, whatever there is
            raise DcpDeviceError(f"an IPC handle must be of {_IPC_BYTES} bytes (got {len(data)})")
        flags = int(self._api.hipIpcMemLazyEnablePeerAccess)  # the only one there is, and required
        return int(self._call("hipIpcOpenMemHandle", bytes(data), flags, nbytes=nbytes))

    def close_ipc(self, address: int) -> None:
        self._call("hipIpcCloseMemHandle", address)

    # ---- memory by handles, address ranges, mappings

    def granularity(self, kind: str) -> int:
        option = self._enum("hipMemAllocationGranularity_flags", "hipMemAllocationGranularityMinimum")
        return int(self._call("hipMemGetAllocationGranularity", self._memory(kind), option))

    def create_memory(self, nbytes: int, kind: str) -> Any:
        """A handle of new memory on this device, uncached as that of `allocate` (from VMM_VERSION on)."""
        with self._telling_free_memory():
            return self._call("hipMemCreate", nbytes, self._memory(kind), 0, nbytes=nbytes)

    def _memory(self, kind: str) -> _AllocationProp:
        prop = _AllocationProp()
        prop.type = int(self._enum("hipMemAllocationType", "hipMemAllocationTypeUncached"))
        prop.requestedHandleTypes = int(self._handle_type(kind))
        prop.location_type, prop.location_id = self._location_type(), self.device
        return prop

    def _location_type(self) -> int:
        return int(self._enum("hipMemLocationType", "hipMemLocationTypeDevice"))

    def _handle_type(self, kind: str) -> Any:
        names = {NONE: "hipMemHandleTypeNone", FD: "hipMemHandleTypePosixFileDescriptor"}
        return self._enum("hipMemAllocationHandleType", names[kind])

    def export_fd(self, handle: Any) -> int:
        fd = ctypes.c_int(-1)  # the runtime stores an int where it is told to
        self._call("hipMemExportToShareableHandle", fd, handle, self._handle_type(FD), 0)
        return fd.value

    def import_fd(self, fd: int) -> Any:
        # The number itself, in the place of a pointer (runtimes before 7.1 took a pointer to it). 0 would be a null pointer;
        # and 0 stays taken, so the copy has another number.
        other = os.dup(fd) if fd == 0 else fd
        try:
            return self._call("hipMemImportFromShareableHandle", other, self._handle_type(FD))
        finally:
            if other != fd:
                os.close(other)

    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("hipMemAddressReserve", nbytes, alignment, 0, 0, nbytes=nbytes))

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("hipMemMap", address, nbytes, 0, handle, 0, nbytes=nbytes)

    def set_access(self, address: int, nbytes: int, devices: Sequence[int]) -> None:
        flags = int(self._enum("hipMemAccessFlags", "hipMemAccessFlagsProtReadWrite"))
        descs = (_AccessDesc * len(devices))(*(_AccessDesc(self._location_type(), device, flags) for device in devices))
        more = f"for devices {', '.join(map(str, devices))}"
        self._call("hipMemSetAccess", address, nbytes, descs, len(descs), nbytes=nbytes, more=more)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("hipMemUnmap", address, nbytes, nbytes=nbytes)

    def free_address(self, address: int, nbytes: int) -> None:
        self._call("hipMemAddressFree", address, nbytes, nbytes=nbytes)

    def release(self, handle: Any) -> None:
        self._call("hipMemRelease", handle)

    @contextlib.contextmanager
    def _telling_free_memory(self) -> Iterator[None]:
        try:
            yield
        except DcpDeviceError as error:
            raise type(error)(f"{error}{self._free_memory()}") from error

    def _free_memory(self) -> str:
        try:
            result, free, total = self._api.hipMemGetInfo()
        except (RuntimeError, ValueError, KeyError):
            return ""
        return f" ({free} of {total} bytes are free)" if int(result) == 0 else ""

    # ---- host memory, copies

    def host_alloc(self, nbytes: int) -> int:
        # Coherent, which is fine-grained: host and kernels see each other's stores while a kernel runs.
        api = self._api
        flags = int(api.hipHostMallocPortable) | int(api.hipHostMallocMapped) | int(api.hipHostMallocCoherent)
        return int(self._call("hipHostMalloc", nbytes, flags, nbytes=nbytes))

    def host_device_address(self, address: int) -> int:
        return int(self._call("hipHostGetDevicePointer", address, 0))

    def host_free(self, address: int) -> None:
        self._call("hipHostFree", address)

    def copy_to_device(self, address: int, source: int, nbytes: int) -> None:
        self._call("hipMemcpyHtoDAsync", address, source, nbytes, self._stream, nbytes=nbytes)
        self._call("hipStreamSynchronize", self._stream)

    def copy_from_device(self, target: int, address: int, nbytes: int) -> None:
        self._call("hipMemcpyDtoHAsync", target, address, nbytes, self._stream, nbytes=nbytes)
        self._call("hipStreamSynchronize", self._stream)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("hipMemsetD8Async", address, 0, nbytes, self._stream, nbytes=nbytes)
        self._call("hipStreamSynchronize", self._stream)


def dotted(version: int) -> str:
    """70125424 is 7.1.25424."""
    return f"{version // 10_000_000}.{version // 100_000 % 100}" + (
        f".{version % 100_000}" if version % 100_000 else ""
    )
