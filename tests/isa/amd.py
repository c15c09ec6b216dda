"""AMD: compiles a source for one architecture with clang, down to the assembly text that carries the instructions, the
source lines and the resources; assembles and links it, which shows that it is complete; and a lint for three hazards."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from tests.isa.compiled import (
    ACQUIRE_LOAD,
    BARRIER,
    COMPARE_EXCHANGE,
    CSRC,
    FETCH_ADD,
    LOAD_AFTER_READS,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    Event,
    Instruction,
    Kernel,
    ToolMissing,
    relative_line,
    run_tool,
    short_names,
)

ARCHS = ("gfx942", "gfx950")
OLDEST_CLANG, NEWEST_CLANG = 20, 29  # 19 does not know gfx950

# HIP's default is to contract freely; here only what the source calls fma is one. Line tables change no instruction.
FLAGS = ("-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", "-std=c++20", "-O3", "-ffp-contract=off",
         "-gline-tables-only", "-Wall", "-Wextra", "-Werror", "-DDCP_TARGET_HIP", "-DDCP_NS=hip", "-I.")  # fmt: skip


def tools() -> tuple[list[str], list[str]]:
    """Commands of the compiler and of the linker: Debian's, or what the `ziglang` wheel carries."""
    for version in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1):
        clang, lld = shutil.which(f"clang++-{version}"), shutil.which(f"ld.lld-{version}")
        if clang and lld:
            return [clang], [lld]
    spec = importlib.util.find_spec("ziglang")
    if spec and spec.origin:
        zig = [sys.executable, "-m", "ziglang"]
        include = Path(spec.origin).parent / "lib" / "include"
        return [*zig, "clang", "-isystem", str(include)], [*zig, "ld.lld"]
    names = f"clang++-N and ld.lld-N with N >= {OLDEST_CLANG}"
    raise ToolMissing(f"{names}: not on PATH, and no ziglang wheel in {sys.prefix}")


def compile_kernels(arch: str, source: Path, folder: Path, csrc: Path = CSRC) -> list[Kernel]:
    clang, lld = tools()
    base = folder / f"{source.stem}.{arch}"
    run_tool([*clang, *FLAGS, f"--offload-arch={arch}", "-S", "-o", f"{base}.s", str(source)], csrc)
    assembler = ["--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler", "-c"]
    run_tool([*clang, *assembler, f"{base}.s", "-o", f"{base}.o"], csrc)
    run_tool([*lld, "-shared", "--no-undefined", f"{base}.o", "-o", f"{base}.hsaco"], csrc)
    assembly = Path(f"{base}.s").read_text()
    kernels = read_resources(arch, assembly, csrc)
    for symbol, instructions in read_assembly(assembly, csrc).items():
        if symbol in kernels:
            kernels[symbol].events = ordered_events(instructions)
            kernels[symbol].findings = lint(instructions, csrc)
            kernels[symbol].lines = frozenset(line for instruction in instructions for line in instruction.lines)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def read_resources(arch: str, assembly: str, csrc: Path = CSRC) -> dict[str, Kernel]:
    """From the metadata that the run-time loader reads too. A scalar register that has no place is kept in a lane of a
    vector register, and costs no memory: `s`. A vector register without a place goes to scratch memory: a spill."""
    metadata = assembly.partition(".amdgpu_metadata")[2]
    entries = [dict(re.findall(r"\.(\w+):\s+(\S+)", entry)) for entry in re.split(r"\n  - \.a", metadata)[1:]]
    names = short_names([entry["name"] for entry in entries], csrc)
    return {
        entry["name"]: Kernel(
            arch,
            names[entry["name"]],
            f"{entry['vgpr_count']}v {entry['sgpr_count']}s+{entry['sgpr_spill_count']}",
            int(entry["vgpr_spill_count"]),
            int(entry["private_segment_fixed_size"]) + (entry["uses_dynamic_stack"] == "true"),
            int(entry["group_segment_fixed_size"]),
        )
        for entry in entries
    }


def read_assembly(text: str, csrc: Path = CSRC) -> dict[str, list[Instruction]]:
    """Per function. The comment of a .loc holds the chain of lines: `; a.h:1:2 @[ b.h:3:4 @[ c.cc:5:6 ] ]`."""
    functions: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    lines: tuple[str, ...] = ()
    is_asm = False
    for row in text.splitlines():
        if symbol := re.match(r"([A-Za-z_]\w*):\s", f"{row} "):
            instructions = functions.setdefault(symbol[1], [])
        elif place := re.match(r"\s+\.loc\s[^;]*;(.*)", row):
            lines = tuple(
                relative_line(path, line, csrc) for path, line in re.findall(r"([^\s\[]+):(\d+):\d+", place[1])
            )
        elif "#ASMSTART" in row or "#ASMEND" in row:
            is_asm = "#ASMSTART" in row
        elif code := re.match(r"\s+([a-z]\w+(?:\s[^;]*)?)", row):
            instructions.append(Instruction(f"{ASM if is_asm else ''}{code[1].strip()}", lines))
    return functions


ASM = "asm: "  # in front of an instruction that was written as inline assembly
STORE = re.compile(r"(global|flat|buffer)_store|(global|flat|buffer)_atomic")
LOAD = re.compile(r"(global|flat|buffer)_load")


def is_drain(instruction: Instruction) -> bool:
    """Waits for everything in flight of this wave."""
    return bool(re.match(r"(asm: )?s_waitcnt\b.*\bvmcnt\(0\)", instruction.text))


def ordered_events(instructions: list[Instruction]) -> list[Event]:
    """A release is buffer_wbl2 (to the system: sc0 sc1), a wait for it, and the store; an acquire is the load, a wait,
    and buffer_inv. All parts come from one call into arch/."""
    events = []
    write_back: Instruction | None = None  # the last one with no store behind it
    has_drained = False  # a wait since then
    drains: set[tuple[str, ...]] = set()  # the sites of waits with no load or store behind them
    load: Event | None = None  # an ordered load that no buffer_inv has made an acquire yet
    load_site: tuple[str, ...] = ()
    for now in instructions:
        text = now.text
        is_system = text.endswith("sc0 sc1")
        is_released = write_back is not None and has_drained and write_back.site == now.site
        is_drained = now.site in drains
        if STORE.match(text) or LOAD.match(text):
            drains = set()
        if STORE.match(text):
            write_back = None

        if text == "buffer_wbl2 sc0 sc1":
            write_back, has_drained = now, False
        elif is_drain(now):
            drains.add(now.site)
            has_drained = True
        elif re.match(r"global_store_dword(x2)? ", text) and is_system:
            if is_released:
                events.append(Event(RELEASE_STORE, now.lines))
        elif re.match(r"global_atomic_cmpswap_x2 .*\bsc1", text):
            if is_released:
                events.append(Event(COMPARE_EXCHANGE, now.lines))
        elif re.match(r"global_atomic_add", text):
            events.append(Event(FETCH_ADD, now.lines))
        elif re.match(r"global_load_dword(x2)? ", text) and is_system:
            load = Event(LOAD_AFTER_READS if is_drained else ACQUIRE_LOAD, now.lines)
            load_site = now.site
        elif text == "buffer_inv sc0 sc1":
            if load and load_site == now.site:
                events.append(load)
            load = None
        elif text == "s_barrier":
            events.append(Event(PUBLISH_BARRIER if is_drained else BARRIER, now.lines))
    return events


def lint(instructions: list[Instruction], csrc: Path = CSRC) -> list[str]:
    """The three hazards in the head of csrc/arch/hip.h, and scratch memory. It reads from top to bottom and follows no
    branch: a clean result is necessary, not sufficient."""
    findings = []
    write_back: Instruction | None = None
    store: Instruction | None = None
    for now in instructions:
        text = now.text.removeprefix(ASM)
        if is_drain(now):
            write_back = store = None
        elif text == "buffer_wbl2 sc0 sc1":
            write_back = now
        elif STORE.match(text):
            if now.text.startswith(ASM):
                findings.append(
                    f"hazard 2: a store in inline assembly, which no compiler waits for, at {now.lines}: {text}"
                )
            if write_back and re.search(r"\bsc1\b", text):
                findings.append(
                    f"hazard 1: a flag is stored before the write-back has completed, at {now.lines}: {text}"
                )
            store = now
        elif text == "s_barrier" and store and is_publish_done(now, csrc):
            findings.append(
                f"hazard 3: stores are in flight at the barrier of publish_done, at {now.lines}: {store.text}"
            )
        elif re.match(r"scratch_|buffer_(load|store)", text):
            findings.append(f"scratch memory at {now.lines}: {text}")
    return findings


def is_publish_done(instruction: Instruction, csrc: Path) -> bool:
    source = (csrc / "arch/hip.h").read_text().splitlines()
    first = next(i for i, line in enumerate(source, 1) if "void publish_done(" in line)
    last = next(i for i, line in enumerate(source[first:], first + 1) if line.startswith("}"))
    numbers = [int(line.partition(":")[2]) for line in instruction.lines if line.startswith("arch/hip.h:")]
    return any(first <= number <= last for number in numbers)
