"""A fake driver's memory: handles, addresses, and mappings of the one at the other.

A handle stands for a memfd, and a mapping is one of the memfd: an address is real memory that a test reads and writes, and
another process that imports the handle maps the same pages. The rules are those on which the vendors' manuals agree.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_gpu import pages
from tests.fake_gpu.core import Refusal, require
from tests.fake_gpu.streams import GARBAGE, Streams


@dataclass
class Memory:
    kind: str  # "memory", or the vendor's
    uuid: str  # of the device where it is
    handle_types: int
    fd: int
    nbytes: int
    is_import: bool = False
    users: int = 1  # handles and mappings
    files: list[Path] = field(default_factory=list)  # that go with it

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


class Vmm(Streams):
    granularity: int
    memory_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self.handles: dict[int, Memory] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, Mapping] = {}

    # ---- handles

    def add_handle(self, memory: Memory) -> int:
        number = self.new()
        self.handles[number] = memory
        return number

    def memory_of(self, handle: int, kind: str = "") -> Memory:
        memory = self.handles.get(handle)
        if memory is None or kind not in ("", memory.kind):
            raise Refusal(1)
        return memory

    def create(self, ordinal: int, handle_types: int, nbytes: int) -> int:
        require(nbytes > 0 and nbytes % self.granularity == 0)
        require(self.used() + nbytes <= self.memory_bytes, 2)
        uuid = self.uuid(ordinal)
        fd = pages.create(f"memory {uuid} {handle_types}", nbytes, GARBAGE)
        return self.add_handle(Memory("memory", uuid, handle_types, fd, nbytes))

    def used(self) -> int:
        """Bytes that this process has taken of any device."""
        all_memory = [*self.handles.values(), *(mapping.memory for mapping in self.mapped.values())]
        own = {id(memory): memory for memory in all_memory if memory.kind == "memory" and not memory.is_import}
        return sum(memory.nbytes for memory in own.values())

    def release(self, handle: int) -> None:
        self.memory_of(handle)
        self.handles.pop(handle).drop()

    def export_file(self, handle: int) -> int:
        """A new descriptor, the caller's to close."""
        return fcntl.fcntl(self.memory_of(handle).fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def import_file(self, fd: int) -> int:
        """Takes over `fd`."""
        kind, uuid, handle_types = pages.kind_of(fd).split()
        return self.add_handle(Memory(kind, uuid, int(handle_types), fd, self.size_of(kind, fd), is_import=True))

    def size_of(self, kind: str, fd: int) -> int:
        return os.fstat(fd).st_size

    # ---- addresses and mappings

    def reserve(self, nbytes: int, alignment: int) -> int:
        require(nbytes > 0 and nbytes % self.granularity == 0)
        require(alignment & (alignment - 1) == 0)
        address = pages.reserve(nbytes, max(alignment, self.granularity))
        self.reserved[address] = nbytes
        return address

    def free_address(self, address: int, nbytes: int) -> None:
        require(self.reserved.get(address) == nbytes)
        require(not any(address <= start < address + nbytes for start in self.mapped))
        del self.reserved[address]
        pages.free(address, nbytes)

    def map(self, address: int, nbytes: int, memory: Memory, step: int) -> None:
        """Of the whole or the start of `memory`, which no device may touch yet. `step`: what all must be a multiple of."""
        require(0 < nbytes <= memory.nbytes)
        require(address % step == 0 and nbytes % step == 0)
        require(any(s <= address and address + nbytes <= s + size for s, size in self.reserved.items()))
        require(not any(s < address + nbytes and address < s + m.nbytes for s, m in self.mapped.items()))
        self.place(address, nbytes, memory)
        memory.users += 1
        self.mapped[address] = Mapping(memory, nbytes, set())

    def place(self, address: int, nbytes: int, memory: Memory) -> None:
        pages.place(address, nbytes, memory.fd, 0)

    def mapping(self, address: int, nbytes: int) -> Mapping:
        """The one that is there, from end to end."""
        require(address in self.mapped and self.mapped[address].nbytes == nbytes)
        return self.mapped[address]

    def mapping_at(self, address: int, nbytes: int) -> tuple[int, Mapping]:
        """The one that has all these bytes, and its start."""
        for start, mapping in self.mapped.items():
            if start <= address and address + nbytes <= start + mapping.nbytes:
                return start, mapping
        raise Refusal(1)

    def give_access(self, address: int, nbytes: int, ordinals: Iterable[int]) -> None:
        self.mapping(address, nbytes).ordinals.update(ordinals)
        pages.allow(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self.mapping(address, nbytes)
        pages.take_away(address, nbytes)
        self.mapped.pop(address).memory.drop()
