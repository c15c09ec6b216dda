"""A region's memory: a sealed memfd, and a mapping of it in this process."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import threading
import weakref

from dcpkernels.errors import DcpError

# Linux numbers; Python has the names only where the headers that it was built with had them.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_NOEXEC_SEAL = 0x1, 0x2, 0x8
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW: the size that a receiver checks is the size for ever
_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0x0, 0x1, 0x3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_POPULATE = 0x8000
_MREMAP_MAYMOVE = 1
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_PAGE = 2 << 20
_COLLAPSE_CHUNK = 64 << 20
# fallocate starts over, and gives back what it had, when a signal comes; a profiler's timer could keep it
# from ever finishing a large region in one call.
_FALLOCATE_CHUNK = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def create_file(nbytes: int) -> int:
    """A descriptor of a new file of `nbytes` zeros: every page exists, the size is sealed, it has no name."""
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("dcpkernels-heap", flags | _MFD_NOEXEC_SEAL)  # hosts may refuse executable memfds
    except OSError:
        fd = os.memfd_create("dcpkernels-heap", flags)  # before Linux 6.3 there is no such flag
    try:
        os.ftruncate(fd, nbytes)
        for start in range(0, nbytes, _FALLOCATE_CHUNK):
            os.posix_fallocate(fd, start, min(_FALLOCATE_CHUNK, nbytes - start))
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_file(fd: int, nbytes: int, owner: int, what: str = "region") -> None:
    """Raises DcpError unless a received descriptor is a file of `nbytes` that nobody can resize any more."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        text = f"the {what} of rank {owner} must have {nbytes} bytes (got {status.st_size})"
        raise DcpError(text, ranks=(owner,))
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:  # a file that cannot have seals
        seals = 0
    if seals & _SEALS != _SEALS:
        text = f"the {what} of rank {owner} must be sealed against resizing (got {seals:#x})"
        raise DcpError(text, ranks=(owner,))


def collapse(address: int, nbytes: int) -> None:
    """Asks for huge pages under a whole mapping, where the kernel can; the same for all who map the file.

    A call walks through megabytes once, so with small pages it pays for a page walk (two-dimensional on a virtual
    machine) every 4 KiB.
    """
    end = address + nbytes - nbytes % _HUGE_PAGE
    for start in range(address, end, _COLLAPSE_CHUNK):  # seconds for gigabytes: Ctrl-C comes through in between
        if _libc.madvise(start, min(_COLLAPSE_CHUNK, end - start), _MADV_COLLAPSE) != 0:
            return  # no is an answer


class Region:
    """A shared mapping, counted: thread ranks use one mapping, and the last of them to let go unmaps it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`; the caller may close it afterwards."""
        self._take_over(_map_file(fd, nbytes), nbytes)

    def _take_over(self, address: int, nbytes: int) -> None:
        self.address: int = address
        self.nbytes = nbytes
        self._users = 1
        self._lock = threading.RLock()  # a finalizer may release while its thread retains

    def read_only(self) -> Region:
        """A mapping more of the same memory, through which nothing can be written. Only for a user of this one."""
        # An old size of 0 leaves the first mapping as it is. Unlike mmap this needs no descriptor, which a thread rank
        # would have to borrow from a rank that may close it meanwhile.
        address = _mapped(_libc.mremap(self.address, 0, self.nbytes, _MREMAP_MAYMOVE), f"mremap of {self.nbytes} bytes")
        if _libc.mprotect(address, self.nbytes, _PROT_READ) != 0:
            code = ctypes.get_errno()
            _libc.munmap(address, self.nbytes)
            raise OSError(code, f"mprotect of {self.nbytes} bytes: {os.strerror(code)}")
        region = Region.__new__(Region)
        region._take_over(address, self.nbytes)
        return region

    def retain(self) -> None:
        """One more user. Raises DcpError when the region is already unmapped."""
        with self._lock:
            if self._users == 0:
                raise DcpError("a region must still be mapped (its owner has closed it)")
            self._users += 1

    def memory(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """`nbytes` at `offset` as a buffer, to write as far as the mapping allows. It keeps the region mapped for as
        long as anything refers to it."""
        self.retain()
        try:
            memory = (ctypes.c_char * nbytes).from_address(self.address + offset)
            finalizer = weakref.finalize(memory, self.release)
        except BaseException:
            self.release()
            raise
        finalizer.atexit = False
        return memory

    def release(self) -> None:
        """One user fewer; to be called once per user. The last one unmaps."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _libc.munmap(self.address, self.nbytes)


def _map_file(fd: int, nbytes: int) -> int:
    # Populated, so that no page table is filled during the first calls.
    flags = _MAP_SHARED | _MAP_POPULATE
    if nbytes < _HUGE_PAGE:
        return _mmap(None, nbytes, _PROT_READ_WRITE, flags, fd)
    # A huge page needs an address of its own alignment: map into a larger hole, and cut the rest off.
    hole = _mmap(None, nbytes + _HUGE_PAGE, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    hole_end, address = hole + nbytes + _HUGE_PAGE, -(-hole // _HUGE_PAGE) * _HUGE_PAGE
    try:
        _mmap(address, nbytes, _PROT_READ_WRITE, flags | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(hole, nbytes + _HUGE_PAGE)
        raise
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((hole, address), (end, hole_end)):
        if last > first:
            _libc.munmap(first, last - first)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    return _mapped(_libc.mmap(address, nbytes, protection, flags, fd, 0), f"mmap of {nbytes} bytes")


def _mapped(address: int | None, what: str) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return address
