"""The module _C_cuda as it was built here, and a test build of it: the same objects with launch_shim.cpp in front of the
CUDA runtime."""

import ctypes
import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_WRAPPED = (
    "__cudaLaunchKernel", "cudaDriverGetVersion", "cudaFuncGetAttributes", "cudaGetDevice", "cudaGetDeviceCount",
    "cudaGetLastError", "cudaLaunchKernelExC", "cudaSetDevice",
)  # fmt: skip


def need(condition, reason):
    if not condition:
        assert os.environ.get("DCPKERNELS_REQUIRE_ISA") != "1", reason
        pytest.skip(reason)


def module_file():
    found = sorted((ROOT / "dcpkernels").glob("_C_cuda.*.so"))
    need(found, "_C_cuda was not built here: no nvcc (setup.py says why)")
    return found[0]


def link_command():
    """The command that linked the module, without its output."""
    stamps = sorted((ROOT / "build").glob(f"temp*/cuda/{module_file().name}.json"))
    need(stamps, "no objects of _C_cuda in build/")
    *command, _ = json.loads(stamps[0].read_text())["key"]  # the last one is the compiler's version
    return command


def objects():
    """Of the op sources."""
    return [ROOT / word for word in link_command() if "/cuda/cuda/" in word]


def counting_build(folder):
    """(the module, the shim): calls of the module's ops come to launches that the shim counts."""
    shim = folder / "launch_shim.o"
    include = next(Path(word).parents[1] / "include" for word in link_command() if word.endswith("libcudart_static.a"))
    source = Path(__file__).with_name("launch_shim.cpp")
    compiled = ["g++", "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-isystem{include}", f"-I{ROOT}/csrc"]
    subprocess.run([*compiled, "-c", str(source), "-o", str(shim)], check=True)
    module = folder / module_file().name
    wraps = [f"-Wl,--wrap={name}" for name in _WRAPPED]
    subprocess.run([*link_command(), str(shim), *wraps, "-o", str(module)], check=True, cwd=ROOT)
    spec = importlib.util.spec_from_file_location("_C_cuda", module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded, ctypes.CDLL(str(module))


def undefined_symbols(path):
    shown = subprocess.run(["nm", "-u", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in shown.splitlines() if line.strip().startswith("U ")}
