"""Compiles the kernels ahead of time, for GPUs that need not be there, in the shapes of Kimi-K3; and what they take there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcpkernels.kimi_k3.triton.kda_step import BLOCK_V, kda_kernel
from dcpkernels.kimi_k3.triton.mla_decode import BLOCK_H, BLOCK_N, combine_kernel, split_kernel

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class Build(NamedTuple):
    """A kernel, with the types of its arguments and the values of those that are compiled in."""

    kernel: Any
    types: str  # of its run-time arguments, in order
    constants: dict[str, int]
    options: dict[str, int]


_MLA = {"VALUE": 512, "NUM_SPLITS": 32, "TILE_V": 512}
BUILDS = {
    "mla_decode.split": Build(
        split_kernel,
        "*bf16 *bf16 *i32 *i32 *i32 *fp32 *fp32 fp32 i32 i32 i64 i64 i64 i64 i64",
        {**_MLA, "REST": 64, "CACHE_BLOCK": 64, "SEQS": 64, "TILE_R": 64, "TILE_H": BLOCK_H, "TILE_N": BLOCK_N, "WIDE": False},
        {"num_warps": 4, "num_stages": 1},
    ),
    "mla_decode.combine": Build(combine_kernel, "*fp32 *fp32 *bf16 *fp32 i32 i64 i64 i64 i64", _MLA, {"num_warps": 4}),
    "kda_step": Build(
        kda_kernel,
        "*bf16 *bf16 *bf16 *bf16 *bf16 *fp32 *fp32 *fp32 *i64 *i64 *i32 *bf16 i32 i32 i32 i64 i64 i64 i64 i64 fp32 fp32 fp32",
        {"K": 128, "V": 128, "TILE_K": 128, "TILE_V": BLOCK_V},
        {"num_warps": 4},
    ),
}


class Resources(NamedTuple):
    """Of one kernel on one target."""

    registers: int  # of a thread
    spilled: int  # bytes of memory that a thread has for what found no register, and registers that went there
    shared_bytes: int  # of a program
    matrix: list[str]  # kinds of matrix instructions in it


def compile_for(build: Build, target: GPUTarget) -> Resources:
    """Compiles a kernel and reads what it takes out of the result."""
    names = [name for name in build.kernel.arg_names if name not in build.constants]
    types = build.types.split()
    # What a launch finds out by itself: addresses and strides here are multiples of 16.
    aligned = {
        (build.kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in zip(names, types, strict=True)
        if kind[0] == "*" or "stride" in name
    }
    source = ASTSource(
        fn=build.kernel,
        signature={**dict(zip(names, types, strict=True)), **dict.fromkeys(build.constants, "constexpr")},
        constexprs=build.constants,
        attrs=aligned,
    )
    compiled = triton.compile(source, target=target, options=build.options)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = {
            name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")
        }
        spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"] + found["private_segment_fixed_size"]
        return Resources(found["vgpr_count"], spilled, compiled.metadata.shared, _matrix_instructions(text))
    text = _resource_usage(compiled.asm["cubin"])
    matrix = _matrix_instructions(compiled.asm["ptx"])
    found = {name: int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared, matrix)


def _matrix_instructions(text: str) -> list[str]:
    return sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_\w+", text)))


def _resource_usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return done.stdout
