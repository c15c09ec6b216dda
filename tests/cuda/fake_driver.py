"""A CUDA driver without a GPU: the functions of cuda.bindings.driver that the heap uses, over memfds and mmap.

Device memory is a memfd, mapped where it is asked for: an address is real memory that a test reads and writes, and another
process that imports the handle maps the same pages. The rules of the driver are kept strictly, and a broken one is an
error as in the manual: sizes and alignments, the order of calls, objects that are not there, what needs a context. What the
manual leaves open is refused. Work on a stream is done when the stream is synchronised, and not before. New memory holds
garbage. Enums and structs are those of cuda-python.

    fake = FakeDriver(num_devices=4)
    fake.fail("cuMemMap", 2)     # the second call from now on
    fake.live()                  # how many objects there are, by kind; all 0 after a clean end

It knows of no kernels, no time, and no hardware: that a sequence of calls passes here says that it keeps the rules in the
manual, not that it works on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.cuda.bindings import real
from tests.cuda.fake_vmm import FakeVmm
from tests.fake_gpu.core import call, require


class FakeDriver(FakeVmm):
    def __init__(
        self,
        num_devices: int = 8,
        *,
        devices: Iterable[int] | None = None,
        name: str = "Fake H100",
        cut: Iterable[tuple[int, int]] = (),
        multicast: bool = True,
        fabric: Path | None = None,
        no_fabric: int = 800,
        version: int = 13000,
        memory_bytes: int = 1 << 40,
        unified: bool = True,
        granularity: int = 64 << 10,
        multicast_granularity: int = 128 << 10,
    ) -> None:
        """The driver of one process. `devices`: the machine's numbers of those that this process sees, in its order; what
        has the same number in two processes is the same device. `cut`: pairs of such numbers, one way, without peer
        access. `fabric`: a folder that stands for the NVLink domain; None: `no_fabric` is the error. `unified`: pinned
        memory of the host has one address."""
        super().__init__()
        self.devices = list(range(num_devices) if devices is None else devices)
        self.name, self.cut, self.multicast, self.fabric = name, set(cut), multicast, fabric
        self.no_fabric, self.version, self.memory_bytes, self.unified = no_fabric, version, memory_bytes, unified
        self.granularity, self.multicast_granularity = granularity, multicast_granularity

    def live(self) -> dict[str, int]:
        """Objects that there are, by kind."""
        with self.lock:
            return {
                "contexts": sum(self.contexts.values()),
                "streams": len(self._streams),
                "handles": len(self.handles),
                "reserved": len(self.reserved),
                "mapped": len(self.mapped),
                "bound": len(self.bound),
                "host": len(self._host),
            }

    # ---- devices

    @call("nothing")
    def cuInit(self, flags: int) -> tuple[()]:
        require(flags == 0)
        require(self.devices, 100)
        self.is_init = True
        return ()

    @call("nothing")
    def cuDriverGetVersion(self) -> int:
        return self.version

    @call()
    def cuDeviceGetCount(self) -> int:
        return len(self.devices)

    @call()
    def cuDeviceGet(self, ordinal: int) -> Any:
        return real.CUdevice(self.ordinal(ordinal))

    @call()
    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return f"{self.name} {self.devices[self.ordinal(device)]}".encode().ljust(length, b"\0")

    @call()
    def cuDeviceGetUuid(self, device: Any) -> Any:
        uuid = real.CUuuid()
        ctypes.memmove(uuid.getPtr(), bytes.fromhex(self.uuid(self.ordinal(device))), 16)  # cuda-python only reads it
        return uuid

    @call()
    def cuDeviceGetPCIBusId(self, length: int, device: Any) -> bytes:
        return f"0000:{self.devices[self.ordinal(device)]:02X}:00.0".encode().ljust(length, b"\0")

    @call()
    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        self.ordinal(device)
        require(attribute == real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)
        return int(self.multicast)

    @call()
    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> int:
        from_, to = self.ordinal(device), self.ordinal(peer)
        return int(from_ != to and self.reaches(from_, self.uuid(to)))  # no device is a peer of itself

    # ---- contexts: that of ordinal n is the number n + 1

    @call()
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        self.contexts[self.ordinal(device)] += 1
        return real.CUcontext(self.ordinal(device) + 1)

    @call()
    def cuDevicePrimaryCtxRelease(self, device: Any) -> tuple[()]:
        require(self.contexts[self.ordinal(device)] > 0, 201)
        self.contexts[self.ordinal(device)] -= 1
        return ()

    @call()
    def cuCtxPushCurrent(self, context: Any) -> tuple[()]:
        require(context is not None and self.contexts[int(context) - 1] > 0, 201)
        self.stack().append(int(context) - 1)
        return ()

    @call("context")
    def cuCtxPopCurrent(self) -> Any:
        return real.CUcontext(self.stack().pop() + 1)

    # ---- streams, and copies on them

    @call("context", breaks_capture=True)
    def cuStreamCreate(self, flags: int) -> Any:
        require(flags == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING))
        return real.CUstream(self.new_stream())

    @call("context", breaks_capture=True)
    def cuStreamDestroy(self, stream: Any) -> tuple[()]:
        self.end_stream(int(stream))
        return ()

    @call("context", waits_for_all=True)
    def cuCtxSynchronize(self) -> tuple[()]:
        return ()  # there are no kernels; copies are their streams' business

    @call("context")
    def cuStreamSynchronize(self, stream: Any) -> tuple[()]:
        self.wait_stream(int(stream))
        return ()

    def _enqueue(self, stream: Any, address: int, nbytes: int, work: Callable[[], Any]) -> tuple[()]:
        require(nbytes > 0)
        _, mapping = self.mapping_at(int(address), nbytes)
        require(mapping.memory.kind == "memory" and self.stack()[-1] in mapping.ordinals, 700)
        self.enqueue(int(stream), work)
        return ()

    @call("context")
    def cuMemcpyHtoDAsync(self, address: int, source: int, nbytes: int, stream: Any) -> tuple[()]:
        return self._enqueue(stream, address, nbytes, lambda: ctypes.memmove(address, source, nbytes))

    @call("context")
    def cuMemcpyDtoHAsync(self, target: int, address: int, nbytes: int, stream: Any) -> tuple[()]:
        return self._enqueue(stream, address, nbytes, lambda: ctypes.memmove(target, address, nbytes))

    @call("context")
    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[()]:
        return self._enqueue(stream, address, nbytes, lambda: ctypes.memset(address, value, nbytes))

    @call("context")
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.memory_bytes - self.used(), self.memory_bytes

    # ---- memory of the host

    @call("context", breaks_capture=True)
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        require(flags == real.CU_MEMHOSTALLOC_PORTABLE | real.CU_MEMHOSTALLOC_DEVICEMAP)
        return self.new_host(nbytes)

    @call("context")
    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> Any:
        require(address in self._host and flags == 0)
        return real.CUdeviceptr(address if self.unified else address + (1 << 40))

    @call("context", breaks_capture=True)
    def cuMemFreeHost(self, address: int) -> tuple[()]:
        self.end_host(address)
        return ()
