"""The module _C_hip as it was built here, and a ROCm runtime for it without a device (stub_hip.cpp)."""

import ctypes
import importlib
import json
import subprocess
from pathlib import Path

from tests.cuda.built import ROOT, need

SONAME = "libamdhip64.so.7"


def module_file():
    found = sorted((ROOT / "dcpkernels").glob("_C_hip.*.so"))
    need(found, "_C_hip was not built here: no clang for AMD GPUs (setup.py says why)")
    return found[0]


def code_objects():
    """By architecture, all that the module was linked from."""
    stamps = sorted((ROOT / "build").glob(f"temp*/hip/{module_file().name}.json"))
    need(stamps, "no objects of _C_hip in build/")
    folder, found = stamps[0].parent, {}
    for path in sorted(folder.glob("hip/*.hsaco")):
        found.setdefault(path.suffixes[-2][1:], []).append(path)
    return found


def stub_library(folder):
    """The runtime that takes kernels and runs none. A library of that name that is loaded already is what _C_hip takes."""
    library = Path(folder, SONAME)
    source = Path(__file__).with_name("stub_hip.cpp")
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{ROOT}/csrc", f"-Wl,-soname,{SONAME}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    return library


def counting_module(folder):
    """(the module, the shim): as tests/cuda/built.py: counting_build."""
    module_file()
    shim = ctypes.CDLL(str(stub_library(folder)))
    shim.shim_name.restype = shim.shim_names.restype = ctypes.c_char_p
    return importlib.import_module("dcpkernels._C_hip"), shim


def dynamic_symbols(path):
    shown = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in shown.splitlines()}


def compile_command(source):
    """The last command that made an object of an op."""
    (stamp,) = sorted((ROOT / "build").glob(f"temp*/hip/hip/{source}.o.json"))[:1]
    return json.loads(stamp.read_text())["key"]
