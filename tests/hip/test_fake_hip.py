"""The fake runtime keeps the rules, and hip-python's shapes."""

import ctypes
import os

from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.fake_gpu import pages
from tests.fake_gpu.heap_calls import meet, read
from tests.hip.bindings import real, types
from tests.hip.fake_hip import FakeHip
from tests.hip.fake_ipc import FREED, UNCACHED

SIZE = 2 << 20
FD = real.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
MINIMUM = real.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum


def done(result):
    """The value of a call that must succeed."""
    assert result[0] == real.hipError_t.hipSuccess, result
    return result[1] if len(result) > 1 else None


def prop(device=0, handle_type=1, kind=real.hipMemAllocationType.hipMemAllocationTypeUncached):
    result = real.hipMemAllocationProp(type=kind)
    result.location.type, result.location.id = real.hipMemLocationType.hipMemLocationTypeDevice, device
    ctypes.c_int.from_address(int(result) + 4).value = handle_type
    return result


def access(device=0):
    result = real.hipMemAccessDesc(flags=real.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite)
    result.location.type, result.location.id = real.hipMemLocationType.hipMemLocationTypeDevice, device
    return result


def gather(group, value):
    return as_group(group).all_gather_object(value, timeout_s=20.0)


def _rules(fake):
    """Calls that break one rule each, with the error."""
    yield 101, lambda: fake.hipSetDevice(8)
    yield 101, lambda: fake.hipDeviceEnablePeerAccess(0, 0)  # of itself
    done(fake.hipDeviceEnablePeerAccess(1, 0))
    yield 704, lambda: fake.hipDeviceEnablePeerAccess(1, 0)
    yield 1, lambda: fake.hipExtMallocWithFlags(0, UNCACHED)
    yield 1, lambda: fake.hipExtMallocWithFlags(SIZE, 7)
    memory = done(fake.hipExtMallocWithFlags(SIZE, UNCACHED))
    yield 1, lambda: fake.hipIpcGetMemHandle(int(memory) + 4096)  # not its base
    handle = done(fake.hipIpcGetMemHandle(memory))
    yield 201, lambda: fake.hipIpcOpenMemHandle(handle, 1)  # its own
    yield 1, lambda: fake.hipIpcOpenMemHandle(handle, 0)
    yield 1, lambda: fake.hipIpcOpenMemHandle(bytes(64), 1)
    yield 400, lambda: fake.hipIpcCloseMemHandle(memory)
    yield 17, lambda: fake.hipFree(int(memory) + 4096)
    stream = done(fake.hipStreamCreateWithFlags(1))
    yield 1, lambda: fake.hipStreamCreateWithFlags(0)
    yield 400, lambda: fake.hipMemsetD8Async(memory, 0, SIZE, 5)
    yield 700, lambda: fake.hipMemsetD8Async(memory, 0, SIZE + 1, stream)
    yield 700, lambda: fake.hipMemcpyDtoHAsync(memory, 4096, 8, stream)
    done(fake.hipSetDevice(2))
    far = done(fake.hipStreamCreateWithFlags(1))
    yield 700, lambda: fake.hipMemsetD8Async(memory, 0, SIZE, far)  # of a device without access
    done(fake.hipSetDevice(0))
    done(fake.hipStreamDestroy(far))
    yield 400, lambda: fake.hipStreamDestroy(far)
    yield 1, lambda: fake.hipHostMalloc(100, 0)
    yield 1, lambda: fake.hipHostFree(memory)
    done(fake.hipFree(memory))
    yield 17, lambda: fake.hipFree(memory)
    yield 1, lambda: fake.hipMemCreate(1000, prop(), 0)
    yield 1, lambda: fake.hipMemCreate(SIZE, prop(kind=real.hipMemAllocationType.hipMemAllocationTypeManaged), 0)
    yield 101, lambda: fake.hipMemCreate(SIZE, prop(device=9), 0)
    handle = done(fake.hipMemCreate(SIZE, prop(), 0))
    private = done(fake.hipMemCreate(SIZE, prop(handle_type=0), 0))
    number = ctypes.c_int()
    yield 1, lambda: fake.hipMemExportToShareableHandle(ctypes.addressof(number), private, FD, 0)
    done(fake.hipMemRelease(private))
    yield 1, lambda: fake.hipMemRelease(private)
    address = done(fake.hipMemAddressReserve(SIZE, 0, None, 0))
    yield 1, lambda: fake.hipMemMap(int(address) + 4096, 64 << 10, 0, handle, 0)
    yield 1, lambda: fake.hipMemMap(1 << 40, SIZE, 0, handle, 0)
    yield 1, lambda: fake.hipMemMap(address, 2 * SIZE, 0, handle, 0)
    yield 1, lambda: fake.hipMemSetAccess(address, SIZE, access(), 1)  # not mapped
    yield 1, lambda: fake.hipMemUnmap(address, SIZE)
    yield 1, lambda: fake.hipMemAddressFree(address, 64 << 10)
    done(fake.hipMemMap(address, SIZE, 0, handle, 0))
    yield 1, lambda: fake.hipMemMap(address, SIZE, 0, handle, 0)  # again
    yield 700, lambda: fake.hipMemsetD8Async(address, 0, 1, stream)  # no access yet
    yield 101, lambda: fake.hipMemSetAccess(address, SIZE, access(9), 1)
    yield 1, lambda: fake.hipMemAddressFree(address, SIZE)  # still mapped
    yield 1, lambda: fake.hipIpcGetMemHandle(address)  # aiter#4174: as with expandable segments
    yield 17, lambda: fake.hipFree(address)
    done(fake.hipMemUnmap(address, SIZE))
    done(fake.hipMemAddressFree(address, SIZE))
    done(fake.hipMemRelease(handle))
    done(fake.hipStreamDestroy(stream))


def test_what_breaks_a_rule_is_refused():
    fake = FakeHip()
    for idx, (number, step) in enumerate(_rules(fake)):
        assert (step()[0], fake.last_error()) == (number, number), idx
    assert idx == 36
    assert set(fake.live().values()) == {0}
    assert fake.hipGetLastError() == (number,) and fake.hipGetLastError() == (0,)


def test_without_a_device_there_is_only_a_version():
    fake = FakeHip(devices=[])
    assert fake.hipGetDeviceCount() == (100, None) and fake.hipSetDevice(0) == (100,)
    assert done(fake.hipRuntimeGetVersion()) == 71560940
    assert FakeHip(has_vmm=False).hipMemCreate(SIZE, prop(), 0) == (801, None)


def test_what_peers_map_must_be_uncached():
    fake = FakeHip()
    for flags in (0, 1):
        memory = done(fake.hipExtMallocWithFlags(SIZE, flags))
        done(fake.hipIpcGetMemHandle(memory))
        done(fake.hipFree(memory))
    handle = done(fake.hipMemCreate(SIZE, prop(kind=real.hipMemAllocationType.hipMemAllocationTypePinned), 0))
    number = ctypes.c_int()
    done(fake.hipMemExportToShareableHandle(ctypes.addressof(number), handle, FD, 0))
    os.close(number.value)
    done(fake.hipMemRelease(handle))
    assert fake.broken == ["memory for others must be uncached"] * 3 and fake.live()["broken"] == 3


def test_work_is_done_when_it_is_waited_for():
    fake = FakeHip()
    memory, stream = done(fake.hipExtMallocWithFlags(SIZE, 1)), done(fake.hipStreamCreateWithFlags(1))
    source = ctypes.create_string_buffer(b"abc", 3)
    done(fake.hipMemsetD8Async(memory, 7, SIZE, stream))
    done(fake.hipMemcpyHtoDAsync(memory, ctypes.addressof(source), 3, stream))
    assert read(int(memory), 4) == b"\xcd" * 4
    done(fake.hipStreamSynchronize(stream))
    assert read(int(memory), 4) == b"abc\7"
    assert done(fake.hipMemGetAllocationGranularity(prop(), MINIMUM)) == 64 << 10


def test_results_are_hip_pythons():
    fake = FakeHip()
    shapes = {
        "hipDeviceGetName": ((256, 3), types.CStr),
        "hipDeviceGetPCIBusId": ((32, 3), types.CStr),
        "hipDeviceGetUuid": ((3,), real.hipUUID_t),
        "hipExtMallocWithFlags": ((SIZE, 3), types.DeviceArray),
        "hipHostMalloc": ((100, 0x40000003), types.Pointer),
        "hipMemAddressReserve": ((SIZE, 0, 0, 0), types.Pointer),
        "hipMemCreate": ((SIZE, prop(), 0), real.ihipMemGenericAllocationHandle),
        "hipStreamCreateWithFlags": ((1,), real.ihipStream_t),
    }
    for name, (args, cls) in shapes.items():
        code, value = getattr(fake, name)(*args)
        assert type(code) is real.hipError_t and type(value) is cls, name
    assert str(done(fake.hipDeviceGetPCIBusId(32, 3))) == "0000:03:00.0"


def _open_and_free(group):
    rank, fake = group.rank(), FakeHip()
    handle = b""
    if rank == 0:
        memory = done(fake.hipExtMallocWithFlags(SIZE, UNCACHED))
        done(fake.hipSetDevice(1))  # the memory is where it was made
        handle = bytes(done(fake.hipIpcGetMemHandle(memory)).reserved)
    handle, _ = gather(group, handle)
    if rank == 1:
        done(fake.hipSetDevice(1))
        seen = done(fake.hipIpcOpenMemHandle(handle, 1))
        assert fake.hipIpcOpenMemHandle(handle, 1)[0] == 201  # twice
        assert fake.can_touch(1, int(seen), SIZE) and not fake.can_touch(0, int(seen), SIZE)
        ctypes.memmove(int(seen), b"hello", 5)
    meet(group)
    if rank == 0:
        assert read(int(memory), 5) == b"hello"
        done(fake.hipFree(memory))
        assert fake.broken == ["hipFree of memory that others have open"]
    meet(group)
    if rank == 1:
        assert read(int(seen), 5) == bytes([FREED]) * 5
        done(fake.hipIpcCloseMemHandle(seen))
        assert fake.hipIpcCloseMemHandle(seen)[0] == 400  # twice
        assert fake.hipIpcOpenMemHandle(handle, 1)[0] == 17  # it is gone
    assert pages.files() == 0 and pages.mappings() == 0


def test_memory_that_is_freed_while_others_have_it_open_is_seen():
    run_ranks(_open_and_free, 2, mode="process")


def _cut(group):
    fake = FakeHip(cut=[(1, 0)])
    memory = done(fake.hipExtMallocWithFlags(SIZE, UNCACHED))
    handles = gather(group, bytes(done(fake.hipIpcGetMemHandle(memory)).reserved))
    done(fake.hipSetDevice(group.rank()))
    result = int(fake.hipIpcOpenMemHandle(handles[1 - group.rank()], 1)[0])
    meet(group)
    return result


def test_a_device_opens_only_what_it_reaches():
    assert run_ranks(_cut, 2, mode="process") == [0, 17]
