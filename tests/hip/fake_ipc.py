"""The fake HIP runtime's ordinary memory, and how other processes open it.

An allocation is a memfd. A handle is the 64 bytes by which another process finds that file (this process' number, the
descriptor, a number that nothing has had). Who has it open holds a shared lock on it, which ends with the process; so who
frees it sees whether anybody does, and what they read then is garbage.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Any

from tests.fake_gpu import pages
from tests.fake_gpu.core import Refusal, call, require
from tests.fake_gpu.streams import GARBAGE
from tests.fake_gpu.vmm import Vmm
from tests.hip.bindings import real, types
from tests.hip.fake_core import FakeCore, address_of

UNCACHED = 3  # hipDeviceMallocUncached, which hip-python does not have
FREED = 0xDD  # what memory is full of that was freed while others had it open
_HANDLE = struct.Struct("<8sIIQ16s24x")
_MAGIC = b"fake ipc"


@dataclass
class Allocation:
    fd: int
    nbytes: int
    ordinal: int
    flags: int
    nonce: bytes


@dataclass
class Opened:
    fd: int
    nbytes: int
    uuid: str
    ordinal: int  # the device that was current


class FakeIpc(FakeCore, Vmm):
    no_export: int  # the error of every hipIpcGetMemHandle, 0 = none
    no_open: int
    ipc_granularity: int

    def __init__(self) -> None:
        super().__init__()
        self.allocations: dict[int, Allocation] = {}
        self.opened: dict[int, Opened] = {}

    def used(self) -> int:
        return super().used() + sum(allocation.nbytes for allocation in self.allocations.values())

    @call(breaks_capture=True)
    def hipExtMallocWithFlags(self, nbytes: int, flags: int) -> Any:
        require(nbytes > 0 and flags in (0, 1, UNCACHED))
        require(self.used() + nbytes <= self.memory_bytes, 2)
        nonce, ordinal = secrets.token_bytes(16), self.current()
        fd = pages.create(f"malloc {self.uuid(ordinal)} {flags} {nonce.hex()}", nbytes, GARBAGE)
        address = pages.shared(nbytes, fd)
        self.allocations[address] = Allocation(fd, nbytes, ordinal, flags, nonce)
        return types.DeviceArray(address)

    @call(breaks_capture=True, results=0)
    def hipFree(self, pointer: Any) -> tuple[()]:
        address = address_of(pointer)
        require(address in self.allocations, 17)
        self.wait_device(self.allocations[address].ordinal)
        allocation = self.allocations.pop(address)
        try:
            fcntl.flock(allocation.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the manual: undefined behaviour
            self.broken.append("hipFree of memory that others have open")
            os.pwrite(allocation.fd, bytes([FREED]) * allocation.nbytes, 0)
        pages.free(address, pages.whole(allocation.nbytes))
        os.close(allocation.fd)
        return ()

    @call()
    def hipIpcGetMemHandle(self, pointer: Any) -> Any:
        address = address_of(pointer)
        require(not self.no_export, self.no_export)
        require(address in self.allocations)  # not inside one, and not what the calls for virtual memory make
        allocation = self.allocations[address]
        if allocation.flags != UNCACHED:
            self.broken.append("memory for others must be uncached")
        if allocation.nbytes % self.ipc_granularity != 0:
            self.broken.append("memory for others must be whole granules")
        result = real.hipIpcMemHandle_t()
        data = _HANDLE.pack(_MAGIC, os.getpid(), allocation.fd, allocation.nbytes, allocation.nonce)
        ctypes.memmove(int(result), data, _HANDLE.size)
        return result

    @call(breaks_capture=True)
    def hipIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        data = real.hipIpcMemHandle_t.fromObj(handle).reserved
        require(flags == real.hipIpcMemLazyEnablePeerAccess)
        require(not self.no_open, self.no_open)
        magic, pid, number, nbytes, nonce = _HANDLE.unpack(data)
        require(magic == _MAGIC)
        require(pid != os.getpid(), 201)  # a process does not open its own
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Refusal(17) from error
        try:
            kind, uuid, *rest = pages.kind_of(fd).split() or ["", ""]
            require(kind == "malloc" and rest[1] == nonce.hex(), 17)
            require(all(os.fstat(fd).st_ino != os.fstat(other.fd).st_ino for other in self.opened.values()), 201)
            require(self.reaches(self.current(), uuid), 17)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except Refusal:
            os.close(fd)
            raise
        address = pages.shared(nbytes, fd)
        self.opened[address] = Opened(fd, nbytes, uuid, self.current())
        return types.Pointer(address)

    @call(breaks_capture=True, results=0)
    def hipIpcCloseMemHandle(self, pointer: Any) -> tuple[()]:
        address = address_of(pointer)
        require(address in self.opened, 400)
        opened = self.opened.pop(address)
        self.taken_from({opened.ordinal})
        pages.free(address, pages.whole(opened.nbytes))
        os.close(opened.fd)
        return ()

    # ---- who may touch what

    def can_touch(self, ordinal: int, address: int, nbytes: int) -> bool:
        """Whether kernels of a device can load and store there without a fault."""
        for start, allocation in self.allocations.items():
            if start <= address and address + nbytes <= start + allocation.nbytes:
                return ordinal == allocation.ordinal or (ordinal, allocation.ordinal) in self.peer_access
        for start, opened in self.opened.items():
            if start <= address and address + nbytes <= start + opened.nbytes:
                return ordinal == opened.ordinal
        try:
            return ordinal in self.mapping_at(address, nbytes)[1].ordinals
        except Refusal:
            return False

    def taken_from(self, ordinals: set[int]) -> None:
        """What kernels of these devices could touch is unmapped."""
        if ordinals & self.busy:
            self.broken.append("unmapped under a kernel")

    def wait_device(self, ordinal: int) -> None:
        """Until all streams of it are empty."""
        raise NotImplementedError
