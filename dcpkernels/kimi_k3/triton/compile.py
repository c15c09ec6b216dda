"""Compiles the kernels for GPUs that need not be there, as a launch in the shapes of Kimi-K3 would, and reads what they
take: `resources(launches("cuda")[name], "sm_90")`. Needs TRITON_INTERPRET unset."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.triton import kda_step, mla_decode
from dcpkernels.kimi_k3.triton.launch import Launch, require

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Shared memory (LDS) that a program may have, in bytes.
SHARED_LIMITS = {"sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
_MANY_BLOCKS = 1 << 16  # of 64 tokens: 4.8 GB of bf16 in one layer
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


class Resources(NamedTuple):
    """Of a kernel on one architecture."""

    registers: int  # of a thread; AMD: vector registers
    spills: int  # NVIDIA: bytes of stack, of a thread; AMD: vector and scalar registers
    local_bytes: int  # of a thread, otherwise; AMD: of scratch
    shared_bytes: int  # of a program
    num_warps: int
    matrix_units: tuple[str, ...]  # matrix instructions in it


def _mla(num_heads: int, dtype: torch.dtype, backend: str, num_blocks: int = _MANY_BLOCKS) -> list[Launch]:
    config = KimiK3Config()
    num_rows, num_seqs, max_blocks = 8, 4, 240
    query = torch.empty(num_rows, num_heads, config.latent_dim, dtype=dtype, device="meta")
    ints = {"dtype": torch.int32, "device": "meta"}
    return mla_decode.launches(
        query, query.new_empty(num_blocks, 64, config.latent_dim), torch.empty(num_seqs, max_blocks, **ints),
        torch.empty(num_seqs + 1, **ints), torch.empty(num_rows, **ints), config.softmax_scale, config.kv_lora_rank,
        None,
        query.new_empty(num_rows, num_heads, config.kv_lora_rank),
        query.new_empty(num_rows, num_heads, dtype=torch.float32),
        mla_decode.choose_tile(num_heads, query.element_size(), backend),
    )  # fmt: skip


def _kda(num_heads: int, dtype: torch.dtype) -> Launch:
    config = KimiK3Config()
    num_rows, num_seqs, dim = 8, 4, config.kda_head_dim
    # q, k and v as the convolution leaves them, side by side in a row.
    qkv = torch.empty(num_rows, 3, num_heads, dim, dtype=dtype, device="meta")
    wide, longs = {"dtype": torch.float32}, {"dtype": torch.int64}
    return kda_step.launch(
        qkv[:, 0], qkv[:, 1], qkv[:, 2], qkv.new_empty(num_rows, num_heads, dim), qkv.new_empty(num_rows, num_heads),
        qkv.new_empty(num_heads, **wide), qkv.new_empty(num_heads, dim, **wide),
        qkv.new_empty(64, num_heads, dim, dim, **wide), qkv.new_empty(num_seqs, **longs),
        qkv.new_empty(num_rows, **longs), qkv.new_empty(num_seqs + 1, dtype=torch.int32),
        qkv.new_empty(num_rows, num_heads, dim), config.kda_gate_lower_bound, config.kda_l2_eps,
    )  # fmt: skip


def launches(backend: str) -> dict[str, Launch]:
    """By name, for "cuda" or "hip": 96 heads as with DCP8, 12 as without DCP at TP8."""
    found = {}
    for num_heads, dtype in ((96, torch.bfloat16), (12, torch.bfloat16), (96, torch.float32)):
        split, combine = _mla(num_heads, dtype, backend)
        found[f"mla_decode.split H{num_heads} {_TYPES[dtype]}"] = split
        if num_heads == 96 and dtype == torch.bfloat16:  # nothing in it depends on H
            found["mla_decode.combine bf16"] = combine
    found["kda_step H12 bf16"] = _kda(12, torch.bfloat16)
    return found


def compile_for(launch: Launch, arch: str) -> Any:
    """Triton's compiled kernel. Arguments are specialized on as a launch does it: multiples of 16, the integer 1, small
    tensors."""
    require("compile", not triton.knobs.runtime.interpret, "TRITON_INTERPRET must not be set", "1")
    signature, attributes, constants = {}, {}, dict(launch.constants)
    is_hip = TARGETS[arch].backend == "hip"
    by_run_time = [p for p in launch.kernel.params if p.name not in launch.constants]
    for parameter, value in zip(by_run_time, launch.args, strict=True):
        special = not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif special and value == 1:
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        # Of a pointer: torch aligns what it allocates. AMD: a tensor below 2 GiB is accessed by 32-bit offsets.
        known = []
        if special and (isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0):
            known.append(["tt.divisibility", 16])
        if is_hip and isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() < 2**31:
            known.append(["tt.pointer_range", 32])
        if known:
            attributes[(parameter.num,)] = known
    signature |= dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in launch.kernel.arg_names}
    source = ASTSource(launch.kernel, ordered, constants, attributes)
    return triton.compile(source, target=TARGETS[arch], options=launch.options)


def resources(launch: Launch, arch: str) -> Resources:
    """Compiles, and reads the result."""
    compiled = compile_for(launch, arch)
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    if TARGETS[arch].backend == "hip":
        text = compiled.asm["amdgcn"]

        def count(name: str) -> int:
            (found,) = re.findall(rf"^\s*\.{name}:\s+(\d+)", text, re.MULTILINE)
            return int(found)

        spills = count("vgpr_spill_count") + count("sgpr_spill_count")
        shared = max(shared, count("group_segment_fixed_size"))
        units = tuple(sorted(set(re.findall(r"\bv_mfma_\w+", text))))
        return Resources(count("vgpr_count"), spills, count("private_segment_fixed_size"), shared, num_warps, units)
    usage = _resource_usage(compiled.asm["cubin"])

    def used(name: str) -> int:
        (found,) = re.findall(rf"\b{name}:(\d+)", usage)
        return int(found)

    # A register that is spilled has a place on the stack.
    units = tuple(sorted(set(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", compiled.asm["ptx"]))))
    return Resources(used("REG"), used("STACK"), used("LOCAL"), shared, num_warps, units)


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
