"""Compiles the harness of one_card.py together with csrc's own op sources: for the card by nvcc, or for a dry run, in
which ranks are threads of the host, by the C++ compiler. Needs pybind11 and the headers of this Python, no more."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
OPS = ("a2a_lse_reduce", "query_gather", "kv_gather")

# Those of tests/isa: the kernels are the ones that its gate has seen.
NVCC_FLAGS = ("-x", "cu", "-std=c++20", "-O3", "--fmad=false", "-Xptxas", "-v", "-Xcompiler", "-fPIC",
              "-Xcompiler", "-fvisibility=hidden", "-DDCP_TARGET_CUDA", "-DDCP_NS=cuda")  # fmt: skip
HOST_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-ffp-contract=off", "-fno-math-errno",
              "-fno-trapping-math")  # fmt: skip


class ToolMissing(Exception):
    """A compiler that this machine lacks."""


def find_nvcc() -> str:
    wheels = [f"{folder}/nvidia/cu13" for folder in sys.path]
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *wheels) if home]
    for candidate in map(shutil.which, ("nvcc", *(f"{home}/bin/nvcc" for home in homes))):
        if candidate:
            return candidate
    raise ToolMissing("nvcc: not on PATH, not in CUDA_HOME, /usr/local/cuda or a wheel")


def cudart(nvcc: str) -> list[str]:
    """The run-time library, statically: what nvcc itself would link."""
    command = [nvcc, "--dryrun", "-shared", "x.o"]
    shown = subprocess.run(command, check=False, capture_output=True, text=True).stderr
    folders = re.findall(r'-L([^"\s]+)', "".join(re.findall(r"LIBRARIES=(.*)", shown)))
    for folder in map(os.path.normpath, folders):
        if Path(folder, "libcudart_static.a").exists():
            return [f"{folder}/libcudart_static.a", "-ldl", "-lrt"]
    raise ToolMissing(f"libcudart_static.a: not in {' '.join(folders) or 'any folder of nvcc'}")


def module_file(folder: Path, target: str) -> Path:
    return folder / f"one_card_{target}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(folder: Path, target: str, arch: str = "90a", jobs: int = 0) -> tuple[Path, str]:
    """The module's file, and what the compilers said: for CUDA the registers of each kernel. target: "cuda", "cpu"."""
    import pybind11

    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{CSRC}", f"-I{HERE}", "-isystem", pybind11.get_include(),
                "-isystem", sysconfig.get_path("include")]  # fmt: skip
    host = [os.environ.get("CXX") or "g++", *HOST_FLAGS]
    libraries = []
    if target == "cuda":
        nvcc = find_nvcc()
        gencode = ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        command = [nvcc, *NVCC_FLAGS, *gencode, "--split-compile", str(jobs)]
        libraries = cudart(nvcc)
        sources = [HERE / f"{stem}.cu" for stem in (*OPS, "steps", "graph")]
    else:
        command = [*host, "-x", "c++", "-DDCP_TARGET_CPU", "-DDCP_NS=baseline"]
        sources = [*(CSRC / "ops" / f"{op}.cc" for op in OPS), HERE / "steps.cu", HERE / "graph.cu"]

    def compile_one(source: Path) -> tuple[str, str]:
        output = folder / f"{source.stem}.{target}.o"
        return str(output), run([*command, *includes, "-c", str(source), "-o", str(output)])

    def compile_bindings() -> tuple[str, str]:  # the same for both targets, and slow to compile
        output = folder / "module.o"
        if output.exists():
            return str(output), ""
        return str(output), run([*host, "-O0", *includes, "-c", str(HERE / "module.cpp"), "-o", str(output)])

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        bindings = pool.submit(compile_bindings)
        results = [*pool.map(compile_one, sources), bindings.result()]
    module = module_file(folder, target)
    objects = [output for output, _ in results]
    log = run([host[0], "-shared", "-pthread", *objects, *libraries, "-o", str(module)])
    return module, "\n".join([*(text for _, text in results), log])


def run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stderr


def load(module: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_card_module", module)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def resources(log: str) -> dict[str, dict[str, int]]:
    """Of each kernel, by its mangled name, what ptxas says: registers, and bytes of stack and of spills."""
    entries = re.split(r"Compiling entry function '(\w+)' for '\w+'", log)[1:]
    kernels = {}
    for symbol, text in zip(entries[::2], entries[1::2], strict=True):
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
        ).groups()
        registers = int(re.search(r"Used (\d+) registers", text)[1])
        kernels[symbol] = {"registers": registers, "stack": int(stack), "spills": int(stores) + int(loads)}
    return kernels
