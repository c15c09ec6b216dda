"""What every function of the fake HIP runtime needs: its arguments as hip-python takes them, devices, the thread's current
one, the thread's last error."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.fake_gpu.core import Core, call, require
from tests.hip.bindings import real, types

_MODES = real.hipStreamCaptureMode


def address_of(pointer: Any) -> int:
    """What hip-python makes of an argument for a pointer."""
    return int(types.Pointer.fromObj(pointer))


def text(content: str, length: int) -> Any:
    """A C string in a buffer of that length."""
    result = types.CStr(None)
    result.malloc(length)
    require(len(content) < length)
    ctypes.memmove(int(result), content.encode() + b"\0", len(content) + 1)
    return result


class FakeCore(Core):
    """`call` needs "nothing", or "init": the runtime initialises itself in any call, which needs a device."""

    code = staticmethod(real.hipError_t)
    name: str
    version: int
    no_uuids: bool
    has_vmm: bool

    def __init__(self) -> None:
        super().__init__()
        self.peer_access: set[tuple[int, int]] = set()  # ordinals: from, to
        self.broken: list[str] = []  # rules that no call reports, but that were broken
        self.busy: set[int] = set()  # ordinals of devices that a kernel runs on, until somebody waits for them

    def __getattr__(self, name: str) -> Any:
        value = None if name.startswith("_") else getattr(real, name)
        if isinstance(value, (int, type)):
            return value
        raise AttributeError(name)  # a function that is not faked must not reach the real runtime

    def failed(self, number: int, results: int) -> tuple[Any, ...]:
        self._thread.last_error = number
        return (self.code(number), *[None] * results)

    def allow(self, needs: str) -> None:
        require(needs == "nothing" or self.devices, 100)

    def heal(self) -> bool:
        """And makes the first device the current one of this thread, and forgets its last error."""
        with self.lock:
            self._thread.device = self._thread.last_error = 0
            self._thread.mode = _MODES.hipStreamCaptureModeGlobal
            return super().heal()

    def last_error(self) -> int:
        """What PyTorch would find after its next launch, and blame it for."""
        return int(getattr(self._thread, "last_error", 0))

    def current(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def capture_mode(self) -> Any:
        return getattr(self._thread, "mode", _MODES.hipStreamCaptureModeGlobal)

    def minds_capture(self) -> bool:
        return bool(self.capture_mode() != _MODES.hipStreamCaptureModeRelaxed)

    def hipGetLastError(self) -> tuple[Any]:
        """Whose result is no failure of its own."""
        with self.lock:
            self.calls.append("hipGetLastError")
            number, self._thread.last_error = self.last_error(), 0
            return (self.code(number),)

    @call("nothing")
    def hipThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        """As dcpkernels.heap.hip_library has it: hip-python's own takes no mode."""
        before, self._thread.mode = self.capture_mode(), _MODES(mode)
        return before

    # ---- devices

    @call("nothing")
    def hipRuntimeGetVersion(self) -> int:
        return self.version

    @call("nothing")
    def hipGetDeviceCount(self) -> int:
        require(self.devices, 100)
        return len(self.devices)

    @call(results=0)
    def hipSetDevice(self, device: int) -> tuple[()]:
        self._thread.device = self.ordinal(device)
        return ()

    @call()
    def hipGetDevice(self) -> int:
        return self.current()

    @call()
    def hipDeviceGetName(self, length: int, device: int) -> Any:
        return text(f"{self.name} {self.devices[self.ordinal(device)]}", length)

    @call()
    def hipDeviceGetUuid(self, device: int) -> Any:
        result, uuid = real.hipUUID_t(), self.uuid(self.ordinal(device))
        if not self.no_uuids:
            ctypes.memmove(int(result), bytes.fromhex(uuid), 16)
        return result

    @call()
    def hipDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        return text(f"0000:{self.devices[self.ordinal(device)]:02x}:00.0", length)

    @call()
    def hipDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        self.ordinal(device)
        require(attribute == real.hipDeviceAttribute_t.hipDeviceAttributeVirtualMemoryManagementSupported)
        return int(self.has_vmm)

    @call()
    def hipDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        from_, to = self.ordinal(device), self.ordinal(peer)
        return int(from_ != to and self.reaches(from_, self.uuid(to)))  # no device is a peer of itself

    @call(results=0)
    def hipDeviceEnablePeerAccess(self, peer: int, flags: int) -> tuple[()]:
        """Of the current device to all memory of `peer`, also what is allocated later."""
        from_, to = self.current(), self.ordinal(peer)
        require(flags == 0)
        require(from_ != to and self.reaches(from_, self.uuid(to)), 101)
        require((from_, to) not in self.peer_access, 704)
        self.peer_access.add((from_, to))
        return ()
