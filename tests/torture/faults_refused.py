"""System calls that the kernel refuses to one thread, by a seccomp filter, as a sandbox would. For good: it cannot be
taken back, so the process is to be spent."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

HERE = platform.machine() == "x86_64"
# Number, and where only some calls are refused: which argument, and the value of its low 32 bits.
CALLS: dict[str, tuple[int, int | None, int]] = {
    "memfd_create": (319, None, 0),
    "ftruncate": (77, None, 0),
    "fallocate": (285, None, 0),
    "fcntl(F_ADD_SEALS)": (72, 1, 1033),
    "socket(AF_UNIX)": (41, 0, 1),
    "bind": (49, None, 0),
    "listen": (50, None, 0),
    "connect": (42, None, 0),
    "getsockopt(SO_PEERCRED)": (55, 2, 17),
    "sendmsg": (46, None, 0),
    "recvmsg": (47, None, 0),
    "mmap(MAP_SHARED | MAP_POPULATE)": (9, 3, 0x8001),
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2


def refuse(call: str, error: int = errno.EPERM) -> None:
    """From now on in this thread, and in those that it starts."""
    number, argument, value = CALLS[call]
    code = [(_LOAD, 0, 0, 0)]  # the number
    if argument is None:
        code += [(_JUMP_IF_EQUAL, 0, 1, number)]
    else:
        code += [(_JUMP_IF_EQUAL, 0, 3, number), (_LOAD, 0, 0, 16 + 8 * argument), (_JUMP_IF_EQUAL, 0, 1, value)]
    code += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    instructions = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")
