"""A process that strikes itself n instructions after its first access to symmetric memory, n drawn at random.

Its own region is made inaccessible; the first access, which is inside a call, ends in a handler in C that gives the region
back and sets the processor's trap flag. From then on the handler runs after every instruction, and counts. So a rank can
die or be stopped between any two stores of a protocol; no debugger is needed, which some machines forbid. x86-64 only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import tempfile
from pathlib import Path

CXX = os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++"
HERE = platform.machine() == "x86_64"
MOST = 4000  # about as many run from the first access to the end of a call, without waits

_SOURCE = r"""
#include <csignal>
#include <cstdint>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static constexpr int64_t kTrap = 0x100;
static volatile uint64_t first, num_bytes, seen, limit;
static volatile int signum;

static int64_t& flags_of(void* context) {
  return reinterpret_cast<int64_t&>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL]);
}
static void on_access(int, siginfo_t* info, void* context) {
  if (uint64_t(info->si_addr) - first >= num_bytes) {
    signal(SIGSEGV, SIG_DFL);  // a real one, which comes again at once
    return;
  }
  mprotect(reinterpret_cast<void*>(first), num_bytes, PROT_READ | PROT_WRITE);
  flags_of(context) |= kTrap;
}
static void on_step(int, siginfo_t*, void* context) {
  if (++seen < limit) return;
  flags_of(context) &= ~kTrap;  // one who is resumed goes on at full speed
  if (seen == limit) syscall(SYS_kill, getpid(), signum);
}

extern "C" void arm(uint64_t first_, uint64_t num_bytes_, uint64_t limit_, int signum_) {
  struct sigaction action = {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = on_access;
  sigaction(SIGSEGV, &action, nullptr);
  action.sa_sigaction = on_step;
  sigaction(SIGTRAP, &action, nullptr);
  first = first_, num_bytes = num_bytes_, limit = limit_, signum = signum_, seen = 0;
  mprotect(reinterpret_cast<void*>(first), num_bytes, PROT_NONE);
}
extern "C" void disarm() { limit = 0; }
extern "C" uint64_t num_steps() { return seen; }
"""


@functools.cache
def build() -> bytes:
    """The compiled helper; its bytes travel to the processes that use it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stepper.cpp"), Path(folder, "stepper.so")
        source.write_text(_SOURCE)
        subprocess.run([CXX, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        return library.read_bytes()


class Stepper:
    """Of one process."""

    def __init__(self, library: bytes) -> None:
        fd = os.memfd_create("stepper")
        os.write(fd, library)
        self._library = ctypes.CDLL(f"/proc/self/fd/{fd}")
        os.close(fd)
        self._library.arm.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_int]
        self._library.num_steps.restype = ctypes.c_uint64

    def arm(self, address: int, nbytes: int, signum: int, num_instructions: int) -> None:
        """Strikes with `signum` that many instructions after the next access to this memory."""
        self._library.arm(address, nbytes, num_instructions, signum)

    def disarm(self) -> int:
        """How many instructions were counted."""
        self._library.disarm()
        return int(self._library.num_steps())
