"""A compiled kernel, as both vendors' readers (nvidia.py, amd.py) describe it, and the table of all of them.

Compilers keep, for every instruction, the source line it comes from and the calls that were inlined around it. That is
what makes it possible to ask whether *this* line of csrc became the instruction that it stands for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

# Kinds of ordered instructions: what a line of the contract (csrc/arch/contract.h) is to become.
RELEASE_STORE = "release store"  # all earlier stores are visible to the system before it
ACQUIRE_LOAD = "acquire load"  # no later load is served from what was cached before it
LOAD_AFTER_READS = "load after reads"  # waits for earlier loads
STORE_BEHIND = "store behind what came before"  # earlier loads, and stores that went past the caches
COMPARE_EXCHANGE = "compare-exchange"  # of the system, release and acquire
FETCH_ADD = "fetch-add"  # of the device
BARRIER = "barrier"
PUBLISH_BARRIER = "publish barrier"  # a barrier after which one thread's release covers the stores of all
MULTICAST_STORE = "multicast store"  # reaches all ranks
ALIAS_FENCE = "fence between aliases"  # orders accesses of one location by two addresses
LOAD_128, STORE_128 = "load of 16 bytes", "store of 16 bytes"  # in one instruction


@dataclass(frozen=True)
class Instruction:
    text: str
    # "core/channel.h:112" of the instruction, then of each call around it, from the inside out.
    lines: tuple[str, ...]

    @property
    def site(self) -> tuple[str, ...]:
        """The lines outside of arch/: instructions of one call into arch/ have this in common."""
        first = next((i for i, line in enumerate(self.lines) if not line.startswith("arch/")), len(self.lines))
        return self.lines[first:]


@dataclass(frozen=True)
class Event:
    """An ordered instruction."""

    kind: str
    lines: tuple[str, ...]


@dataclass
class Kernel:
    arch: str
    name: str
    registers: str
    spills: int  # bytes (NVIDIA), registers (AMD), to memory
    local_bytes: int  # stack or scratch, per thread
    shared_bytes: int
    events: list[Event] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)  # of the lint
    lines: frozenset[str] = frozenset()  # all that has become code
    ordered: list[Instruction] = field(default_factory=list)  # all that tests/isa/ordered.py asks about
    counts: dict[str, int] = field(default_factory=dict)  # AMD: of registers by kind, and of instructions
    # What an intermediate language says that instructions do not: NVIDIA, how often each PTX instruction is there.
    ptx: Counter[str] = field(default_factory=Counter)

    def count(self, *kinds: str) -> int:
        return sum(event.kind in kinds for event in self.events)


class ToolMissing(Exception):
    """A tool that this machine lacks; the text says which, and where it was looked for."""


def find_tool(name: str, *more: Path) -> str:
    for candidate in (shutil.which(name), *(path / name for path in more)):
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    raise ToolMissing(f"{name}: not on PATH" + "".join(f", not in {path}" for path in more))


def wheel_folder(package: str, *below: str) -> Path | None:
    """The folder of an installed wheel that brings a tool and no code."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *below) if spec else None


def run_tool(command: list[str], cwd: Path) -> tuple[str, str]:
    """Standard output and error. A compiler that fails is an AssertionError with its message."""
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    return done.stdout, done.stderr


@functools.cache  # the same few thousand lines come back for every instruction
def relative_line(path: str, line: str, csrc: Path) -> str:
    """A line below csrc as core/channel.h:112, one elsewhere as probe.cc:7."""
    absolute = Path(os.path.normpath(csrc / path))
    name = absolute.relative_to(csrc).as_posix() if absolute.is_relative_to(csrc) else absolute.name
    return f"{name}:{line}"


def short_names(mangled: list[str], csrc: Path = CSRC) -> dict[str, str]:
    """Kernel<float, kPush> for each kernel_entry<dcp::cuda::(anonymous namespace)::Kernel<float, (dcp::Wire)0>>."""
    text = (csrc / "core/types.h").read_text()
    wires = {number: name for name, number in re.findall(r"\b(k(?:Push|Pull|Packet\d+)) = (\d+)", text)}
    demangled = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = {}
    for symbol, full in zip(mangled, demangled.splitlines(), strict=True):
        name = re.search(r"kernel_entry<(.*)>\s*\(", full)
        short = re.sub(r"dcp::\w+::(\(anonymous namespace\)::)?(?=\w)", "", name[1] if name else full).strip()
        short = re.sub(r"\(dcp::Wire\)(\d+)", lambda wire: wires.get(wire[1], wire[0]), short)
        names[symbol] = short.replace("dcp::", "").replace("> >", ">>")
    return names


def places(path: str, text: str, what: str, csrc: Path) -> set[str]:
    """The lines of a file that hold `text`."""
    source = (csrc / path).read_text().splitlines()
    found = {f"{path}:{number}" for number, line in enumerate(source, 1) if text in line}
    assert found, f"{path} has no line with `{text}`; where is {what} now?"
    return found


COLUMNS = ("arch", "kernel", "registers", "spills", "local", "shared", "release", "acquire", "atomics", "barriers",
           "multicast", "aliases", "loads 128", "stores 128")  # fmt: skip


def rows_of(kernels: list[Kernel]) -> list[tuple[object, ...]]:
    """Of the table, in the order of COLUMNS."""
    return [
        (
            k.arch, k.name, k.registers, k.spills, k.local_bytes, k.shared_bytes, k.count(RELEASE_STORE),
            k.count(ACQUIRE_LOAD, LOAD_AFTER_READS), k.count(COMPARE_EXCHANGE, FETCH_ADD),
            k.count(BARRIER, PUBLISH_BARRIER), k.count(MULTICAST_STORE), k.count(ALIAS_FENCE), k.count(LOAD_128),
            k.count(STORE_128),
        )
        for k in kernels
    ]  # fmt: skip


AMD_COLUMNS = ("arch", "kernel", "VGPR", "AGPR", "SGPR", "in lanes", "LDS", "scratch", "waves", "waits", "write-backs",
               "invalidations", "release", "behind", "acquire", "atomics", "barriers", "loads 128", "stores 128")  # fmt: skip


def amd_rows_of(kernels: list[Kernel]) -> list[tuple[object, ...]]:
    """The same for AMD_COLUMNS."""
    return [
        (
            k.arch, k.name, *(k.counts[what] for what in ("VGPR", "AGPR", "SGPR", "in lanes")), k.shared_bytes,
            k.local_bytes, *(k.counts[what] for what in ("waves", "waits", "write-backs", "invalidations")),
            k.count(RELEASE_STORE), k.count(STORE_BEHIND), k.count(ACQUIRE_LOAD, LOAD_AFTER_READS),
            k.count(COMPARE_EXCHANGE, FETCH_ADD), k.count(BARRIER, PUBLISH_BARRIER), k.count(LOAD_128),
            k.count(STORE_128),
        )
        for k in kernels
    ]  # fmt: skip


def table(kernels: list[Kernel]) -> str:
    rows = [COLUMNS, *rows_of(kernels)]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
