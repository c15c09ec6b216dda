"""A HIP runtime without a GPU: the functions of hip-python's `hip.hip` that the heap uses, over memfds and mmap.

Device memory is a memfd, mapped where it is asked for: an address is real memory that a test reads and writes, and another
process that opens or imports the handle maps the same pages. The rules are kept strictly, and a broken one is an error as
in the manual (the comments of hip_runtime_api.h); what the manual leaves open is refused. What is wrong, but no call
reports, is in `broken`: memory that was freed while others had it open or unmapped under a kernel (`busy`), memory for
others that is cached. Work on a stream is done when the stream is synchronised, and not before. New memory holds garbage.
Arguments are taken, and results come, as with hip-python: its enums and structs are the real ones.

    fake = FakeHip(num_devices=4)
    fake.fail("hipMemMap", 2)    # the second call from now on
    fake.live()                  # how many objects there are, by kind; all 0 after a clean end

It knows of no kernels, no time, and no hardware: that a sequence of calls passes here says that it keeps the rules in the
manual, not that it works on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from tests.fake_gpu.core import call, require
from tests.hip.bindings import real, types
from tests.hip.fake_core import address_of
from tests.hip.fake_vmm import FakeVmm

_HOST_FLAGS = real.hipHostMallocPortable | real.hipHostMallocMapped | real.hipHostMallocCoherent


class FakeHip(FakeVmm):
    def __init__(
        self,
        num_devices: int = 8,
        *,
        devices: Iterable[int] | None = None,
        name: str = "Fake MI300X",
        cut: Iterable[tuple[int, int]] = (),
        no_uuids: bool = False,
        version: int = 71560940,
        memory_bytes: int = 1 << 40,
        unified: bool = True,
        has_vmm: bool = True,
        no_export: int = 0,
        no_open: int = 0,
        granularity: int = 64 << 10,
        ipc_granularity: int = 64 << 10,
    ) -> None:
        """The runtime of one process. `devices`: the machine's numbers of those that this process sees, in its order; what
        has the same number in two processes is the same device. `cut`: pairs of such numbers, one way, without peer
        access. `no_uuids`: they are all zeros. `has_vmm`: there are handles of virtual memory. `no_export`, `no_open`: the
        error of calls for IPC handles. `unified`: pinned memory of the host has one address."""
        super().__init__()
        self.devices = list(range(num_devices) if devices is None else devices)
        self.name, self.cut, self.no_uuids, self.version = name, set(cut), no_uuids, version
        self.memory_bytes, self.unified, self.has_vmm = memory_bytes, unified, has_vmm
        self.no_export, self.no_open = no_export, no_open
        self.granularity, self.ipc_granularity = granularity, ipc_granularity
        self._device_of: dict[int, int] = {}  # of a stream

    def live(self) -> dict[str, int]:
        """Objects that there are, by kind; and rules broken so far."""
        with self.lock:
            return {
                "streams": len(self._streams),
                "allocations": len(self.allocations),
                "opened": len(self.opened),
                "handles": len(self.handles),
                "reserved": len(self.reserved),
                "mapped": len(self.mapped),
                "host": len(self._host),
                "broken": len(self.broken),
            }

    # ---- streams, and copies on them

    @call(breaks_capture=True)
    def hipStreamCreateWithFlags(self, flags: int) -> Any:
        require(flags == real.hipStreamNonBlocking)
        stream = self.new_stream()
        self._device_of[stream] = self.current()
        return real.ihipStream_t.fromObj(stream)

    @call(breaks_capture=True, results=0)
    def hipStreamDestroy(self, stream: Any) -> tuple[()]:
        self.end_stream(_stream(stream))
        return ()

    @call(results=0)
    def hipStreamSynchronize(self, stream: Any) -> tuple[()]:
        self.wait_stream(_stream(stream))
        return ()

    @call(waits_for_all=True, results=0)
    def hipDeviceSynchronize(self) -> tuple[()]:
        self.wait_device(self.current())
        return ()

    def wait_device(self, ordinal: int) -> None:
        self.busy.discard(ordinal)  # copies are their streams' business

    def _on_device(self, stream: Any, address: int, nbytes: int, work: Callable[[], Any]) -> tuple[()]:
        number = _stream(stream)
        require(nbytes > 0)
        require(number in self._streams, 400)
        require(self.can_touch(self._device_of[number], address, nbytes), 700)
        self.enqueue(number, work)
        return ()

    @call(results=0)
    def hipMemcpyHtoDAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> tuple[()]:
        to, from_ = address_of(target), address_of(source)
        return self._on_device(stream, to, nbytes, lambda: ctypes.memmove(to, from_, nbytes))

    @call(results=0)
    def hipMemcpyDtoHAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> tuple[()]:
        to, from_ = address_of(target), address_of(source)
        return self._on_device(stream, from_, nbytes, lambda: ctypes.memmove(to, from_, nbytes))

    @call(results=0)
    def hipMemsetD8Async(self, target: Any, value: int, nbytes: int, stream: Any) -> tuple[()]:
        to = address_of(target)
        return self._on_device(stream, to, nbytes, lambda: ctypes.memset(to, value, nbytes))

    @call(results=2)
    def hipMemGetInfo(self) -> tuple[int, int]:
        return self.memory_bytes - self.used(), self.memory_bytes

    # ---- memory of the host

    @call(breaks_capture=True)
    def hipHostMalloc(self, nbytes: int, flags: int) -> Any:
        require(flags == _HOST_FLAGS)
        return types.Pointer(self.new_host(nbytes))

    @call()
    def hipHostGetDevicePointer(self, pointer: Any, flags: int) -> Any:
        address = address_of(pointer)
        require(address in self._host and flags == 0)
        return types.Pointer(address if self.unified else address + (1 << 40))

    @call(breaks_capture=True, results=0)
    def hipHostFree(self, pointer: Any) -> tuple[()]:
        self.end_host(address_of(pointer))
        return ()


def _stream(stream: Any) -> int:
    return int(real.ihipStream_t.fromObj(stream))
