"""The fake driver's memory: handles, addresses, mappings, and multicast objects.

A handle stands for a memfd. A multicast object is one as well, with a table in it of who is in the team and where each has
bound its memory; so all processes that import it see the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda import fake_memory
from tests.cuda.bindings import real
from tests.cuda.fake_core import FakeCore, Refusal, call, require

GARBAGE = 0xCD
_FD = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_FABRIC = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)


@dataclass
class Memory:
    kind: str  # "memory" or "multicast"
    uuid: str  # of the device where it is; "-" for multicast
    handle_types: int
    fd: int
    nbytes: int
    is_import: bool = False
    users: int = 1  # handles and mappings
    files: list[Path] = field(default_factory=list)  # of fabric handles

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            os.close(self.fd)
            for file in self.files:
                file.unlink()


@dataclass
class Mapping:
    memory: Memory
    nbytes: int
    ordinals: set[int]  # that may access it


class FakeVmm(FakeCore):
    multicast: bool
    fabric: Path | None
    no_fabric: int
    memory_bytes: int
    granularity: int
    multicast_granularity: int

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[int, Memory] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, Mapping] = {}
        self.bound: dict[tuple[int, str], int] = {}  # (inode of the object, uuid) -> descriptor of the memory

    def memory_of(self, handle: Any, kind: str = "") -> Memory:
        memory = self.handles.get(int(handle))
        if memory is None or kind not in ("", memory.kind):
            raise Refusal(1)
        return memory

    def mapping_at(self, address: int, nbytes: int) -> tuple[int, Mapping]:
        for start, mapping in self.mapped.items():
            if start <= address and address + nbytes <= start + mapping.nbytes:
                return start, mapping
        raise Refusal(1)

    def _add(self, memory: Memory) -> Any:
        number = self.new()
        self.handles[number] = memory
        return real.CUmemGenericAllocationHandle(number)

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
        require(flags == 0 and nbytes > 0 and nbytes % self.granularity == 0)
        require(handle_types != _FABRIC or self.fabric is not None, self.no_fabric)
        require(self.used() + nbytes <= self.memory_bytes, 2)
        uuid = self.uuid(ordinal)
        fd = fake_memory.create(f"memory {uuid} {handle_types}", nbytes, GARBAGE)
        return self._add(Memory("memory", uuid, handle_types, fd, nbytes))

    def used(self) -> int:
        """Bytes that this process has taken of any device."""
        all_memory = [*self.handles.values(), *(mapping.memory for mapping in self.mapped.values())]
        own = {id(memory): memory for memory in all_memory if memory.kind == "memory" and not memory.is_import}
        return sum(memory.nbytes for memory in own.values())

    @call(breaks_capture=True)
    def cuMemRelease(self, handle: Any) -> tuple[()]:
        memory = self.memory_of(handle)
        # The manual does not say what becomes of a binding then.
        require(memory.fd not in self.bound.values())
        require(memory.kind != "multicast" or all(inode != _inode(memory.fd) for inode, _ in self.bound))
        del self.handles[int(handle)]
        memory.drop()
        return ()

    @call()
    def cuMemExportToShareableHandle(self, handle: Any, handle_type: Any, flags: int) -> Any:
        memory = self.memory_of(handle)
        require(flags == 0 and memory.handle_types & int(handle_type))
        if int(handle_type) == _FD:
            return fcntl.fcntl(memory.fd, fcntl.F_DUPFD_CLOEXEC, 0)
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
        kind, uuid, handle_types = fake_memory.kind_of(fd).split()
        nbytes = os.fstat(fd).st_size
        if kind == "multicast":
            with _table(fd) as table:
                nbytes = table["nbytes"]
        return self._add(Memory(kind, uuid, int(handle_types), fd, nbytes, is_import=True))

    # ---- addresses and mappings

    @call(breaks_capture=True)
    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: int, flags: int) -> Any:
        require(nbytes > 0 and nbytes % self.granularity == 0 and hint == 0 and flags == 0)
        require(alignment & (alignment - 1) == 0)
        address = fake_memory.reserve(nbytes, max(alignment, self.granularity))
        self.reserved[address] = nbytes
        return real.CUdeviceptr(address)

    @call(breaks_capture=True)
    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[()]:
        require(self.reserved.get(int(address)) == nbytes)
        require(not any(address <= start < address + nbytes for start in self.mapped))
        del self.reserved[address]
        fake_memory.free(address, nbytes)
        return ()

    @call(breaks_capture=True)
    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> tuple[()]:
        memory = self.memory_of(handle)
        require(offset == 0 and flags == 0 and 0 < nbytes <= memory.nbytes)
        require(address % self._step(memory) == 0 and nbytes % self._step(memory) == 0)
        require(any(s <= address and address + nbytes <= s + size for s, size in self.reserved.items()))
        require(not any(s < address + nbytes and address < s + m.nbytes for s, m in self.mapped.items()))
        if memory.kind == "multicast":
            with _table(memory.fd) as table:
                require(len(table["team"]) == table["num_devices"])  # the driver would wait
        else:
            fake_memory.place(address, nbytes, memory.fd, offset)
        memory.users += 1
        self.mapped[address] = Mapping(memory, nbytes, set())
        return ()

    @call(breaks_capture=True)
    def cuMemSetAccess(self, address: int, nbytes: int, descs: list[Any], count: int) -> tuple[()]:
        require(address in self.mapped and self.mapped[address].nbytes == nbytes and count == len(descs) > 0)
        mapping = self.mapped[address]
        for desc in descs:
            require(desc.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
            require(desc.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            ordinal = self.ordinal(desc.location.id)
            if mapping.memory.kind == "multicast":
                with _table(mapping.memory.fd) as table:
                    require(self.uuid(ordinal) in table["team"])
            else:
                require(self.reaches(ordinal, mapping.memory.uuid), 217)
        mapping.ordinals.update(int(desc.location.id) for desc in descs)
        if mapping.memory.kind == "memory":  # ordinary loads and stores to a multicast address stay a fault
            fake_memory.allow(address, nbytes)
        return ()

    @call(breaks_capture=True)
    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[()]:
        require(address in self.mapped and self.mapped[address].nbytes == nbytes)
        fake_memory.take_away(address, nbytes)
        self.mapped.pop(address).memory.drop()
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
        fd = fake_memory.create(f"multicast - {prop.handleTypes}", 0, 0)
        table = {"num_devices": prop.numDevices, "nbytes": prop.size, "team": [], "bound": {}}
        os.pwrite(fd, json.dumps(table).encode(), 0)
        return self._add(Memory("multicast", "-", int(prop.handleTypes), fd, prop.size))

    @call(breaks_capture=True)
    def cuMulticastAddDevice(self, handle: Any, device: Any) -> tuple[()]:
        with _table(self.memory_of(handle, "multicast").fd) as table:
            uuid = self.uuid(self.ordinal(device))
            require(uuid not in table["team"] and len(table["team"]) < table["num_devices"])
            table["team"].append(uuid)
        return ()

    @call(breaks_capture=True)
    def cuMulticastBindMem(self, handle: Any, at: int, memory: Any, offset: int, nbytes: int, flags: int) -> tuple[()]:
        team, bound = self.memory_of(handle, "multicast"), self.memory_of(memory, "memory")
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
        team, uuid = self.memory_of(handle, "multicast"), self.uuid(self.ordinal(device))
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
