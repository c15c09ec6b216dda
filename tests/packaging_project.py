"""A project of one op and two bindings for setup.py, small enough to be built many times."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IS_X86_64 = platform.machine() == "x86_64"
VARIANTS = ["v4_bf16", "v4", "v3", "baseline"] if IS_X86_64 else ["baseline"]
CXX = os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++"

MINI_PROJECT = {
    "csrc/core/used.h": "#pragma once\n#define USED 1\n",
    "csrc/ops/op.cc": '#include "core/used.h"\nnamespace DCP_NS { int op() { return USED; } }\n',
    "csrc/bindings/other.cpp": "int other() { return 0; }\n",
    "csrc/bindings/module.cpp": """
// Speaks of host/dispatch.h: so it is told which variants there are.
#include <Python.h>
#ifdef DCP_STUB_KERNEL
#define STUB 1
#else
#define STUB 0
#endif
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C_cpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cpu() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddStringConstant(module, "build_id", DCP_BUILD_ID);
  PyModule_AddIntConstant(module, "is_stub", STUB);
  return module;
}
""",
    "dcpkernels/__init__.py": "",
    "README.md": "A small project.\n",
    "CONTRIBUTING.md": "",
}

# Stands in for the compiler: notes its arguments, then runs the real one.
RECORDER = """#!/bin/sh
echo "$@" >> "$RECORD_TO"
exec $REAL_CXX "$@"
"""


def run(command: list[str], **options: object) -> str:
    """Its output; a failure is the test's failure."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Project:
    def __init__(self, folder: Path):
        self.folder, self.record = folder, folder / "record.txt"
        for name, text in MINI_PROJECT.items():
            self.write(name, text)
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
            shutil.copy(ROOT / name, folder / name)
        self.write("recorder", RECORDER)
        (folder / "recorder").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def setup(self, *args: str, **env: str) -> tuple[int, str]:
        base = {"RECORD_TO": str(self.record), "REAL_CXX": CXX, "DCPKERNELS_CXX": "", "CXX": CXX}
        base["DCPKERNELS_TARGETS"] = "cpu"  # all targets are built alike
        base |= {"DCPKERNELS_NVCC": "no-such-nvcc", "DCPKERNELS_HIPCC": "no-such-hipcc"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DCPKERNELS_")}
        done = subprocess.run(
            [sys.executable, "setup.py", "-q", *args],
            cwd=self.folder,
            env=inherited | base | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def build(self, *args: str, **env: str) -> tuple[list[str], str]:
        """The sources that were compiled, and the last line of the output."""
        code, output = self.setup("build_ext", *(args or ["--inplace"]), **env)
        assert code == 0, output
        return sorted(re.findall(r"compile (\S+(?: \[\w+\])?)", output)), output.splitlines()[-1]

    def module(self, folder: str = ".") -> Path:
        (path,) = (self.folder / folder / "dcpkernels").glob("_C_cpu.*.so")
        return path

    def load(self, folder: str = ".") -> dict[str, object]:
        code = "import _C_cpu as m; print({'build_id': m.build_id, 'is_stub': m.is_stub})"
        return ast.literal_eval(run([sys.executable, "-c", code], cwd=self.module(folder).parent))


OP_OBJECTS = sorted(f"csrc/ops/op.cc [{variant}]" for variant in VARIANTS)
MODULE_OBJECT, OTHER_OBJECT = "csrc/bindings/module.cpp", "csrc/bindings/other.cpp"
