"""NVIDIA: compiles a source for one architecture with nvcc, and reads registers from ptxas and instructions from SASS."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

from tests.isa import ordered
from tests.isa.compiled import (
    ACQUIRE_LOAD,
    ALIAS_FENCE,
    BARRIER,
    COMPARE_EXCHANGE,
    CSRC,
    FETCH_ADD,
    LOAD_128,
    LOAD_AFTER_READS,
    MULTICAST_STORE,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    STORE_128,
    Event,
    Instruction,
    Kernel,
    find_tool,
    relative_line,
    run_tool,
    short_names,
    wheel_folder,
)

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120")

# --fmad=false: only what the source calls fma is one. -lineinfo changes no instruction.
FLAGS = ("-x", "cu", "-cubin", "-std=c++20", "-O3", "--fmad=false", "-lineinfo", "-Werror", "all-warnings", "-Xptxas", "-v",
         "-DDCP_TARGET_CUDA", "-DDCP_NS=cuda", "-I.")  # fmt: skip


def tools() -> tuple[str, str]:
    """nvcc and nvdisasm: an installed toolkit's, or those of the nvidia-cuda-* wheels."""
    homes = [Path(home, "bin") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    wheels = wheel_folder("nvidia.cu13", "bin")
    folders = [*homes, *([wheels] if wheels else [])]
    return find_tool("nvcc", *folders), find_tool("nvdisasm", *folders)


def compile_kernels(arch: str, source: Path, folder: Path, csrc: Path = CSRC) -> list[Kernel]:
    nvcc, nvdisasm = tools()
    built = listings(source, csrc)
    if built:
        base = built / f"{source.stem}.{arch.replace('sm', 'compute')}"
        cubin, ptx, log = f"{base}.cubin", Path(f"{base}.ptx"), (built / "ptxas.txt").read_text()
    else:
        cubin = folder / f"{source.stem}.{arch}.cubin"
        keep = folder / f"{source.stem}.{arch}"  # the PTX too, on its way
        keep.mkdir()
        command = [nvcc, *FLAGS, f"-arch={arch}", str(source), "-o", str(cubin), "--keep", "--keep-dir", str(keep)]
        _, log = run_tool(command, csrc)
        ptx = keep / f"{source.stem}.ptx"
    sass, _ = run_tool([nvdisasm, "--print-code", "--print-line-info-inline", str(cubin)], csrc)
    kernels = read_resources(arch, log, csrc)
    for symbol, count in read_ptx(ptx.read_text()).items():
        kernels[symbol].ptx = count
    for symbol, instructions in read_sass(sass, csrc).items():
        kernels[symbol].lines = frozenset(line for instruction in instructions for line in instruction.lines)
        has_multicast = any(name.startswith("multimem.") for name in kernels[symbol].ptx)
        kernels[symbol].events = [*ordered_events(instructions, has_multicast), *wide_events(instructions)]
        kernels[symbol].ordered = [instruction for instruction in instructions if ordered.kind_on_nvidia(instruction)]
        kernels[symbol].findings = lint(instructions)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def listings(source: Path, csrc: Path) -> Path | None:
    """What a build with DCPKERNELS_LISTINGS=1 left of this source of csrc, for all ARCHS, if it asked for the same code and
    warnings and read the files that are here now."""
    for stamp in (csrc.parent / "build").glob(f"temp*/cuda/cuda/{source.name}.o.json") if csrc == CSRC else ():
        made = json.loads(stamp.read_text())
        folder = stamp.with_name(f"{source.name}.o.listings")
        # The build compiles for all at once, and words two options otherwise.
        asked = {*FLAGS, *(f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in ARCHS)}
        asked = asked - {"-cubin", "-Xptxas", "-v", "-I."} | {"-Xptxas=-v", "-Icsrc"}
        is_same = source == csrc / "ops" / source.name and asked <= set(made["key"])
        if is_same and all(mtime_ns(csrc.parent / path) == was for path, was in made["deps"].items()):
            return folder
    return None


def mtime_ns(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def read_resources(arch: str, ptxas_log: str, csrc: Path = CSRC) -> dict[str, Kernel]:
    entries = re.split(rf"Compiling entry function '(\w+)' for '(?:{arch})'", ptxas_log)[1:]
    names = short_names(entries[::2], csrc)
    kernels = {}
    for symbol, text in zip(entries[::2], entries[1::2], strict=True):
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
        ).groups()
        registers = re.search(r"Used (\d+) registers", text)[1]
        shared = re.search(r"(\d+) bytes smem", text)
        kernels[symbol] = Kernel(arch, names[symbol], registers, int(stores) + int(loads), int(stack),
                                 int(shared[1]) if shared else 0)  # fmt: skip
    return kernels


def read_ptx(text: str) -> dict[str, Counter[str]]:
    """Of the instructions that SASS does not tell from others: a store to all ranks is a store there."""
    parts = re.split(r"\.entry (\w+)\(", text)[1:]
    return {
        symbol: Counter(re.findall(r"^\s+(multimem\.[\w.]+|fence\.proxy\.[\w.]+)", body, re.MULTILINE))
        for symbol, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read_sass(text: str, csrc: Path = CSRC) -> dict[str, list[Instruction]]:
    """Per kernel. nvdisasm prints the chain of lines before the first instruction that it holds for:
    `//## File "a", line 1 inlined at "b", line 2`, and so on, and last one without `inlined`. Two calls that were inlined into one line of a caller get mixed up there: a line
    that a site names makes one call."""
    kernels: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    lines: tuple[str, ...] = ()
    is_complete = True
    for row in text.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", row):
            instructions = kernels.setdefault(section[1], [])
        elif place := re.search(r'//## File "(.*?)", line (\d+)(.*)', row):
            line = relative_line(place[1], place[2], csrc)
            lines = (line,) if is_complete else (*lines, line)
            is_complete = "inlined at" not in place[3]
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", row):
            instructions.append(Instruction(code[1], lines))
    return kernels


def wide_events(instructions: list[Instruction]) -> list[Event]:
    """Loads and stores of 16 bytes, ordered or not."""
    kinds = {"L": LOAD_128, "S": STORE_128}
    found = [(re.search(r"\b(L|S)(?:D|DG|T|TG)\.E\S*\.128\b", now.text), now.lines) for now in instructions]
    return [Event(kinds[wide[1]], lines) for wide, lines in found if wide]


def ordered_events(instructions: list[Instruction], has_multicast: bool = False) -> list[Event]:
    """A release is a MEMBAR and a STRONG store of one PTX instruction; an acquire is a STRONG load and the CCTL.IVALL
    that empties the L1 behind it. A fence between aliases is the strongest MEMBAR, and empties the L1. A store to all ranks
    looks like any store of the system, and like that of a packet; only the PTX tells (`has_multicast`, Site.ptx)."""
    events = []
    fence: Instruction | None = None  # the last MEMBAR of the system with no store or atomic behind it
    has_loaded = False  # a load since then
    is_alias_fence = False  # it is the first half of a fence between aliases
    load: Event | None = None  # a STRONG load that no CCTL.IVALL has made an acquire yet
    load_site: tuple[str, ...] = ()
    for now in instructions:
        op = now.text.split()[1 if now.text.startswith("@") else 0]
        if re.fullmatch(r"MEMBAR\.\w+\.SYS", op):
            fence, has_loaded = now, False
            is_alias_fence = op == "MEMBAR.SC.SYS"
        elif re.match(r"(ST|STG)\.E.*STRONG\.SYS", op):
            if fence and fence.lines == now.lines:
                events.append(Event(RELEASE_STORE, now.lines))
            elif ".128." in op and has_multicast:
                events.append(Event(MULTICAST_STORE, now.lines))
            fence = None
        elif re.match(r"(ATOM|ATOMG)\.E\.CAS\.64\.STRONG\.SYS", op):
            if fence and fence.lines == now.lines:
                events.append(Event(COMPARE_EXCHANGE, now.lines))
            fence = None
        elif re.match(r"(ATOMG?|REDG?)\.E\.ADD.*STRONG\.GPU", op):
            events.append(Event(FETCH_ADD, now.lines))
        elif re.match(r"(LD|LDG)\.E.*STRONG\.SYS", op):
            is_ordered = fence is not None and not has_loaded and fence.site == now.site
            load = Event(LOAD_AFTER_READS if is_ordered else ACQUIRE_LOAD, now.lines)
            load_site = now.site
            has_loaded = True
        elif op == "CCTL.IVALL" and is_alias_fence and fence and fence.lines == now.lines:
            events.append(Event(ALIAS_FENCE, now.lines))
            is_alias_fence = False
        elif op == "CCTL.IVALL":
            if load and load_site == now.site:
                events.append(load)
            load = None
        elif re.match(r"(LD|LDG)\.E", op):
            has_loaded = True
        elif re.match(r"(ST|STG)\.E", op):
            fence = None
        elif op.startswith("BAR.SYNC"):
            # Release is cumulative over a barrier (PTX memory model): any barrier will do.
            is_publish = any(line.startswith("arch/") for line in now.lines)
            events.append(Event(PUBLISH_BARRIER if is_publish else BARRIER, now.lines))
    return events


def lint(instructions: list[Instruction]) -> list[str]:
    findings = []
    for now in instructions:
        if re.search(r"\bLDG?\.E\S*\.CONSTANT", now.text):
            findings.append(f"a load past coherence (ld.global.nc) at {now.lines}: {now.text}")
        if re.search(r"\b(LDL|STL)\b", now.text):
            findings.append(f"local memory at {now.lines}: {now.text}")
    return findings
