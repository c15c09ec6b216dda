"""AMD: compiles a source for one architecture with clang, down to the assembly text that carries the instructions, the
source lines and the resources; assembles and links it, which shows that it is complete; and a lint for three hazards."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from tests.isa.amd_flow import ASM, Function
from tests.isa.amd_lint import INVALIDATE, WRITE_BACK, is_drain, lint, ordered_events
from tests.isa.compiled import (
    CSRC,
    LOAD_128,
    STORE_128,
    Event,
    Instruction,
    Kernel,
    ToolMissing,
    relative_line,
    run_tool,
    short_names,
)
from tests.isa.ordered import kind_on_amd

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
    return read_kernels(arch, Path(f"{base}.s").read_text(), csrc)


# LLVM as Triton has it, newer than that of a clang. In a process of its own: LLVM ends it where it gives up.
BY_TRITON = """
import sys
from triton.backends.amd import compiler
arch, source, to = sys.argv[1:]
triple = compiler.get_amd_codegen_target_triple(arch)
text = open(source).read().replace("amdgcn-amd-amdhsa", triple)
made = compiler.compile_amdgpu(text, triple, arch, "", flags=compiler.get_llvm_flags(arch), enable_fp_fusion=False,
                               disable_optimization=False, canonicalize_gep=False, disabled_passes="", dump_ir=False,
                               enable_timing=False)
open(to, "w").write(made)
"""


def require_triton() -> None:
    if not importlib.util.find_spec("triton"):
        raise ToolMissing(f"triton: no wheel in {sys.prefix}")


def compile_kernels_by_triton(arch: str, source: Path, folder: Path, csrc: Path = CSRC) -> list[Kernel]:
    """clang up to its intermediate language, and from there on Triton's LLVM."""
    require_triton()
    clang, _ = tools()
    base = folder / f"{source.stem}.{arch}"
    emit = ["--no-gpu-bundle-output", "-emit-llvm", "-S", "-o", f"{base}.ll"]
    run_tool([*clang, *FLAGS, f"--offload-arch={arch}", *emit, str(source)], csrc)
    run_tool([sys.executable, "-c", BY_TRITON, arch, f"{base}.ll", f"{base}.triton.s"], csrc)
    return read_kernels(arch, Path(f"{base}.triton.s").read_text(), csrc)


def read_kernels(arch: str, assembly: str, csrc: Path = CSRC) -> list[Kernel]:
    kernels = read_resources(arch, assembly, csrc)
    for symbol, function in read_assembly(assembly, csrc).items():
        if kernel := kernels.get(symbol):
            code = function.instructions
            kernel.events = ordered_events(function) + wide_accesses(code)
            kernel.findings = lint(function, csrc)
            kernel.lines = frozenset(line for instruction in code for line in instruction.lines)
            kernel.ordered = [instruction for instruction in code if kind_on_amd(instruction)]
            kernel.counts["waits"] = sum(map(is_drain, code))
            kernel.counts["write-backs"] = sum(i.text.startswith(WRITE_BACK) for i in code)
            kernel.counts["invalidations"] = sum(i.text.startswith(INVALIDATE) for i in code)
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def wide_accesses(code: list[Instruction]) -> list[Event]:
    kinds = {"global_load_dwordx4": LOAD_128, "global_store_dwordx4": STORE_128}
    return [Event(kinds[op], i.lines) for i in code if (op := i.text.split()[0]) in kinds]


def read_resources(arch: str, assembly: str, csrc: Path = CSRC) -> dict[str, Kernel]:
    """From the metadata that the run-time loader reads too. A scalar register that has no place is kept in a lane of a
    vector register, and costs no memory. A vector register without a place goes to scratch memory: a spill."""
    metadata = assembly.partition(".amdgpu_metadata")[2]
    entries = [dict(re.findall(r"\.(\w+):\s+(\S+)", entry)) for entry in re.split(r"\n  - \.a", metadata)[1:]]
    names = short_names([entry["name"] for entry in entries], csrc)
    kernels = {}
    for entry in entries:
        symbol, scalars, in_lanes = entry["name"], int(entry["sgpr_count"]), int(entry["sgpr_spill_count"])
        vectors, accumulators = int(entry["vgpr_count"]), int(entry.get("gpr_count", 0))  # `.agpr_count`: its `- .a`
        kernels[symbol] = Kernel(
            arch,
            names[symbol],
            f"{vectors}v {scalars}s+{in_lanes}",
            int(entry["vgpr_spill_count"]),
            int(entry["private_segment_fixed_size"]) + (entry.get("uses_dynamic_stack") == "true"),
            int(entry["group_segment_fixed_size"]),
            counts={
                "VGPR": vectors - accumulators,
                "AGPR": accumulators,
                "SGPR": scalars,
                "in lanes": in_lanes,
                "waves": waves_per_simd(vectors, scalars),
            },
        )
    return kernels


def waves_per_simd(vectors: int, scalars: int) -> int:
    """As many as registers allow: of 512 vector registers (those of matrix accumulators are of the same file), dealt
    out by 8, and 800 scalar ones, by 16; 8 at most. A block of 512 threads needs two."""
    return min(8, 512 // (-(-max(vectors, 1) // 8) * 8), 800 // (-(-max(scalars, 1) // 16) * 16))


def read_assembly(text: str, csrc: Path = CSRC) -> dict[str, Function]:
    """Per function. The comment of a .loc holds the chain of lines: `; a.h:1:2 @[ b.h:3:4 @[ c.cc:5:6 ] ]`."""
    functions: dict[str, Function] = {}
    function = Function()
    lines: tuple[str, ...] = ()
    is_asm = False
    for row in text.splitlines():
        if symbol := re.match(r"([A-Za-z_]\w*):\s", f"{row} "):
            function = functions.setdefault(symbol[1], Function())
        elif label := re.match(r"(\.LBB\w+):", row):
            function.labels[label[1]] = len(function.instructions)
        elif place := re.match(r"\s+\.loc\s[^;]*;(.*)", row):
            lines = tuple(
                relative_line(path, line, csrc) for path, line in re.findall(r"([^\s\[]+):(\d+):\d+", place[1])
            )
        elif "#ASMSTART" in row or "#ASMEND" in row:
            is_asm = "#ASMSTART" in row
        elif code := re.match(r"\s+([a-z]\w+(?:\s[^;]*)?)", row):
            function.instructions.append(Instruction(f"{ASM if is_asm else ''}{code[1].strip()}", lines))
    return functions
