"""Pages under a fake driver: memfds, and ranges of addresses with them, in the hands of mmap and mprotect."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def create(kind: str, nbytes: int, fill: int) -> int:
    """A memfd that says by its name what it is, full of `fill`."""
    fd = os.memfd_create(f"fake-gpu-{kind}", os.MFD_CLOEXEC)
    os.pwrite(fd, bytes([fill]) * nbytes, 0)
    return fd


def kind_of(fd: int) -> str:
    """What `create` was told, "" for any other file."""
    name = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    return name.partition("/memfd:fake-gpu-")[2]


def mappings() -> int:
    """How many mappings of such files this process has."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:fake-gpu-" in line for line in lines)


def files() -> int:
    """How many such files are open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += "memfd:fake-gpu-" in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # another thread's, or the one of listdir
            pass
    return count


def reserve(nbytes: int, alignment: int) -> int:
    """Addresses that nobody may touch."""
    hole = _map(None, nbytes + alignment, _PROT_NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1)
    address = -(-hole // alignment) * alignment
    for first, last in ((hole, address), (address + nbytes, hole + nbytes + alignment)):
        if last > first:
            _libc.munmap(first, last - first)
    return address


def place(address: int, nbytes: int, fd: int, offset: int) -> None:
    """The file's pages at a reserved place, still not to be touched."""
    _map(address, nbytes, _PROT_NONE, _SHARED | _FIXED, fd, offset)


def whole(nbytes: int) -> int:
    """In pages."""
    return -(-nbytes // PAGE) * PAGE


def shared(nbytes: int, fd: int) -> int:
    """The file's pages at a free place, to be read and written."""
    return _map(None, nbytes, _PROT_READ_WRITE, _SHARED, fd)


def allow(address: int, nbytes: int) -> None:
    assert _libc.mprotect(address, nbytes, _PROT_READ_WRITE) == 0


def take_away(address: int, nbytes: int) -> None:
    """Back to a reserved range."""
    _map(address, nbytes, _PROT_NONE, _PRIVATE | _ANONYMOUS | _FIXED | _NORESERVE, -1)


def free(address: int, nbytes: int) -> None:
    assert _libc.munmap(address, nbytes) == 0


def host(nbytes: int, fill: int) -> tuple[int, int]:
    """Pages of the process itself, full of `fill`: address and size."""
    size = whole(nbytes)
    address = _map(None, size, _PROT_READ_WRITE, _PRIVATE | _ANONYMOUS, -1)
    ctypes.memset(address, fill, size)
    return address, size


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    assert result not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return result
