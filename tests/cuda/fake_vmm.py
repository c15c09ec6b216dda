"""The fake CUDA driver's memory: the calls for handles, addresses and mappings (tests/fake_gpu/vmm.py), and multicast.

A multicast object is a memfd too, with a table in it of who is in the team and where each has bound its memory; so all
processes that import it see the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cuda.bindings import real
from tests.cuda.fake_core import FakeCore
from tests.fake_gpu import pages
from tests.fake_gpu.core import call, require
from tests.fake_gpu.vmm import Memory, Vmm

_FD = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_FABRIC = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)


class FakeVmm(FakeCore, Vmm):
    multicast: bool
    fabric: Path | None
    no_fabric: int
    multicast_granularity: int

    def __init__(self) -> None:
        super().__init__()
        self.bound: dict[tuple[int, str], int] = {}  # (inode of the object, uuid) -> descriptor of the memory

    def _step(self, memory: Memory) -> int:
        return self.granularity if memory.kind == "memory" else self.multicast_granularity

    # ---- handles

    def _prop(self, prop: Any) -> tuple[int, int]:
        require(prop.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        require(prop.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        handle_types = int(prop.requestedHandleTypes)
        require(handle_types in (0, _FD, _FABRIC))
        return self.ordinal(prop.location.id), handle_types

    @call()
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._prop(prop)
        minimum = real.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self.granularity * (1 if option == minimum else 16)

    @call(breaks_capture=True)
    def cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> Any:
        ordinal, handle_types = self._prop(prop)
        require(flags == 0)
        require(handle_types != _FABRIC or self.fabric is not None, self.no_fabric)
        return real.CUmemGenericAllocationHandle(self.create(ordinal, handle_types, nbytes))

    @call(breaks_capture=True)
    def cuMemRelease(self, handle: Any) -> tuple[()]:
        memory = self.memory_of(int(handle))
        # The manual does not say what becomes of a binding then.
        require(memory.fd not in self.bound.values())
        require(memory.kind != "multicast" or all(inode != _inode(memory.fd) for inode, _ in self.bound))
        self.release(int(handle))
        return ()

    @call()
    def cuMemExportToShareableHandle(self, handle: Any, handle_type: Any, flags: int) -> Any:
        memory = self.memory_of(int(handle))
        require(flags == 0 and memory.handle_types & int(handle_type))
        if int(handle_type) == _FD:
            return self.export_file(int(handle))
        require(self.fabric is not None, self.no_fabric)
        result = real.CUmemFabricHandle()
        result.data = secrets.token_hex(32).encode()
        memory.files.append(self.fabric / result.data.decode())
        memory.files[-1].write_text(f"/proc/{os.getpid()}/fd/{memory.fd}")
        return result

    @call(breaks_capture=True)
    def cuMemImportFromShareableHandle(self, os_handle: Any, handle_type: Any) -> Any:
        if int(handle_type) == _FD:
            require(isinstance(os_handle, int), 1)
            fd = fcntl.fcntl(os_handle, fcntl.F_DUPFD_CLOEXEC, 0)
        else:
            require(self.fabric is not None, self.no_fabric)
            require(isinstance(os_handle, bytes) and len(os_handle) == 64)
            file = self.fabric / os_handle.decode()
            require(file.exists())
            fd = os.open(file.read_text(), os.O_RDWR | os.O_CLOEXEC)
        return real.CUmemGenericAllocationHandle(self.import_file(fd))

    def size_of(self, kind: str, fd: int) -> int:
        if kind != "multicast":
            return super().size_of(kind, fd)
        with _table(fd) as table:
            nbytes: int = table["nbytes"]
            return nbytes

    # ---- addresses and mappings

    @call(breaks_capture=True)
    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: int, flags: int) -> Any:
        require(hint == 0 and flags == 0)
        return real.CUdeviceptr(self.reserve(nbytes, alignment))

    @call(breaks_capture=True)
    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[()]:
        self.free_address(int(address), nbytes)
        return ()

    @call(breaks_capture=True)
    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> tuple[()]:
        memory = self.memory_of(int(handle))
        require(offset == 0 and flags == 0)
        self.map(int(address), nbytes, memory, self._step(memory))
        return ()

    def place(self, address: int, nbytes: int, memory: Memory) -> None:
        if memory.kind == "memory":
            super().place(address, nbytes, memory)
        else:
            with _table(memory.fd) as table:
                require(len(table["team"]) == table["num_devices"])  # the driver would wait

    @call(breaks_capture=True)
    def cuMemSetAccess(self, address: int, nbytes: int, descs: list[Any], count: int) -> tuple[()]:
        require(count == len(descs) > 0)
        mapping = self.mapping(int(address), nbytes)
        for desc in descs:
            require(desc.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
            require(desc.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            ordinal = self.ordinal(desc.location.id)
            if mapping.memory.kind == "multicast":
                with _table(mapping.memory.fd) as table:
                    require(self.uuid(ordinal) in table["team"])
            else:
                require(self.reaches(ordinal, mapping.memory.uuid), 217)
        ordinals = [int(desc.location.id) for desc in descs]
        if mapping.memory.kind == "memory":
            self.give_access(int(address), nbytes, ordinals)
        else:  # ordinary loads and stores to a multicast address stay a fault
            mapping.ordinals.update(ordinals)
        return ()

    @call(breaks_capture=True)
    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[()]:
        self.unmap(int(address), nbytes)
        return ()

    # ---- multicast

    @call()
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        require(self.multicast, 801)
        require(prop.numDevices > 0 and prop.size > 0 and prop.flags == 0)
        minimum = real.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        return self.multicast_granularity * (1 if option == minimum else 256)

    @call(breaks_capture=True)
    def cuMulticastCreate(self, prop: Any) -> Any:
        require(self.multicast, 801)
        require(prop.numDevices > 1 and prop.size > 0 and prop.size % self.multicast_granularity == 0)
        require(prop.handleTypes != _FABRIC or self.fabric is not None, self.no_fabric)
        fd = pages.create(f"multicast - {prop.handleTypes}", 0, 0)
        table = {"num_devices": prop.numDevices, "nbytes": prop.size, "team": [], "bound": {}}
        os.pwrite(fd, json.dumps(table).encode(), 0)
        memory = Memory("multicast", "-", int(prop.handleTypes), fd, prop.size)
        return real.CUmemGenericAllocationHandle(self.add_handle(memory))

    @call(breaks_capture=True)
    def cuMulticastAddDevice(self, handle: Any, device: Any) -> tuple[()]:
        with _table(self.memory_of(int(handle), "multicast").fd) as table:
            uuid = self.uuid(self.ordinal(device))
            require(uuid not in table["team"] and len(table["team"]) < table["num_devices"])
            table["team"].append(uuid)
        return ()

    @call(breaks_capture=True)
    def cuMulticastBindMem(self, handle: Any, at: int, memory: Any, offset: int, nbytes: int, flags: int) -> tuple[()]:
        team, bound = self.memory_of(int(handle), "multicast"), self.memory_of(int(memory), "memory")
        require(at == 0 and offset == 0 and flags == 0 and 0 < nbytes <= min(team.nbytes, bound.nbytes))
        require(nbytes % self.multicast_granularity == 0)
        require(bound.handle_types != 0 or (team.handle_types == 0 and not team.is_import))
        with _table(team.fd) as table:
            require(len(table["team"]) == table["num_devices"])  # the driver would wait
            require(bound.uuid in table["team"] and bound.uuid not in table["bound"])
            table["bound"][bound.uuid] = [os.getpid(), bound.fd]
        self.bound[_inode(team.fd), bound.uuid] = bound.fd
        return ()

    @call(breaks_capture=True)
    def cuMulticastUnbind(self, handle: Any, device: Any, at: int, nbytes: int) -> tuple[()]:
        team, uuid = self.memory_of(int(handle), "multicast"), self.uuid(self.ordinal(device))
        require((_inode(team.fd), uuid) in self.bound and at == 0 and nbytes == team.nbytes)
        with _table(team.fd) as table:
            del table["bound"][uuid]
        del self.bound[_inode(team.fd), uuid]
        return ()

    def multimem_store(self, address: int, data: bytes) -> None:
        """What multimem.st of a kernel does: the bytes reach the same offset of all bound memory, of all processes."""
        with self.lock:
            start, mapping = self.mapping_at(address, len(data))
            assert mapping.memory.kind == "multicast" and mapping.ordinals, "must be a multicast address, with access"
            with _table(mapping.memory.fd) as table:
                assert len(table["bound"]) == table["num_devices"], "every device of the team must have bound memory"
                for pid, fd in table["bound"].values():
                    target = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
                    try:
                        os.pwrite(target, data, address - start)
                    finally:
                        os.close(target)


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino


@contextmanager
def _table(fd: int) -> Iterator[Any]:
    """A multicast object's table, to read and change, by one process at a time."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        before = os.pread(fd, 1 << 20, 0)
        table = json.loads(before)
        yield table
        after = json.dumps(table).encode()
        if after != before:
            os.ftruncate(fd, 0)
            os.pwrite(fd, after, 0)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
