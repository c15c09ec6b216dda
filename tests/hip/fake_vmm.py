"""The fake HIP runtime's virtual memory: the calls for handles, addresses and mappings (tests/fake_gpu/vmm.py)."""

from __future__ import annotations

import ctypes
import fcntl
from typing import Any

from tests.fake_gpu.core import call, require
from tests.hip.bindings import real, types
from tests.hip.fake_core import address_of
from tests.hip.fake_ipc import FakeIpc

_FD = int(real.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor)
_MAX_FD = 1 << 16
_UNCACHED = 1 << 16  # among the handle types, which the file carries


class _Prop(ctypes.Structure):
    """hipMemAllocationProp, with the member that hip-python leaves out (it is in a union without a name)."""

    _fields_ = [(name, ctypes.c_int) for name in ("type", "handle_type", "location_type", "location_id")]


def _handle(handle: Any) -> int:
    return int(real.ihipMemGenericAllocationHandle.fromObj(handle))


class FakeVmm(FakeIpc):
    def allow(self, needs: str) -> None:
        super().allow(needs)
        require(needs != "vmm" or self.has_vmm, 801)

    def _prop(self, prop: Any) -> tuple[int, int]:
        raw = _Prop.from_address(int(real.hipMemAllocationProp.fromObj(prop)))
        kinds = real.hipMemAllocationType
        require(raw.type in (kinds.hipMemAllocationTypePinned, kinds.hipMemAllocationTypeUncached))
        require(raw.location_type == real.hipMemLocationType.hipMemLocationTypeDevice)
        require(raw.handle_type in (0, _FD))
        is_uncached = raw.type == kinds.hipMemAllocationTypeUncached
        return self.ordinal(raw.location_id), raw.handle_type | (_UNCACHED if is_uncached else 0)

    @call("vmm")
    def hipMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._prop(prop)
        options = real.hipMemAllocationGranularity_flags
        require(isinstance(option, options))
        return self.granularity * (1 if option == options.hipMemAllocationGranularityMinimum else 16)

    @call("vmm", breaks_capture=True)
    def hipMemCreate(self, nbytes: int, prop: Any, flags: int) -> Any:
        require(flags == 0)
        ordinal, handle_types = self._prop(prop)
        return real.ihipMemGenericAllocationHandle.fromObj(self.create(ordinal, handle_types, nbytes))

    @call("vmm", breaks_capture=True, results=0)
    def hipMemRelease(self, handle: Any) -> tuple[()]:
        self.release(_handle(handle))
        return ()

    @call("vmm", results=0)
    def hipMemExportToShareableHandle(self, out: Any, handle: Any, handle_type: Any, flags: int) -> tuple[()]:
        memory = self.memory_of(_handle(handle))
        _require_type(handle_type)
        require(flags == 0 and int(handle_type) == _FD and memory.handle_types & _FD)
        if not memory.handle_types & _UNCACHED:
            self.broken.append("memory for others must be uncached")
        ctypes.c_int.from_address(address_of(out)).value = self.export_file(_handle(handle))
        return ()

    @call("vmm", breaks_capture=True)
    def hipMemImportFromShareableHandle(self, os_handle: Any, handle_type: Any) -> Any:
        """`os_handle`: the number itself, in the place of a pointer."""
        _require_type(handle_type)
        require(int(handle_type) == _FD)
        number = address_of(os_handle)
        require(0 < number < _MAX_FD)
        fd = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0)
        return real.ihipMemGenericAllocationHandle.fromObj(self.import_file(fd))

    @call("vmm", breaks_capture=True)
    def hipMemAddressReserve(self, nbytes: int, alignment: int, hint: Any, flags: int) -> Any:
        require(address_of(hint) == 0 and flags == 0)
        return types.Pointer(self.reserve(nbytes, alignment))

    @call("vmm", breaks_capture=True, results=0)
    def hipMemAddressFree(self, pointer: Any, nbytes: int) -> tuple[()]:
        self.free_address(address_of(pointer), nbytes)
        return ()

    @call("vmm", breaks_capture=True, results=0)
    def hipMemMap(self, pointer: Any, nbytes: int, offset: int, handle: Any, flags: int) -> tuple[()]:
        require(offset == 0 and flags == 0)
        self.map(address_of(pointer), nbytes, self.memory_of(_handle(handle)), self.granularity)
        return ()

    @call("vmm", breaks_capture=True, results=0)
    def hipMemSetAccess(self, pointer: Any, nbytes: int, descs: Any, count: int) -> tuple[()]:
        require(count > 0)
        mapping = self.mapping(address_of(pointer), nbytes)
        start, ordinals = int(real.hipMemAccessDesc.fromObj(descs)), []
        for idx in range(count):
            location_type, location_id, access = (ctypes.c_int * 3).from_address(start + 12 * idx)
            require(location_type == real.hipMemLocationType.hipMemLocationTypeDevice)
            require(access == real.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite)
            ordinals.append(self.ordinal(location_id))
            require(self.reaches(ordinals[-1], mapping.memory.uuid), 101)
        self.give_access(address_of(pointer), nbytes, ordinals)
        return ()

    @call("vmm", breaks_capture=True, results=0)
    def hipMemUnmap(self, pointer: Any, nbytes: int) -> tuple[()]:
        self.taken_from(self.mapping(address_of(pointer), nbytes).ordinals)
        self.unmap(address_of(pointer), nbytes)
        return ()


def _require_type(handle_type: Any) -> None:
    if not isinstance(handle_type, real.hipMemAllocationHandleType):
        raise TypeError("argument must be of type '_hipMemAllocationHandleType__Base'")  # as hip-python does
