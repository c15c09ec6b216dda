"""The build and what it ships: setup.py on a small project of its own, the Makefile, this checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IS_X86_64 = platform.machine() == "x86_64"
VARIANTS = ["v4_bf16", "v4", "v3", "baseline"] if IS_X86_64 else ["baseline"]
CXX = os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++"

# ---- setup.py, on a project with one op and two bindings, small enough to be built many times

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


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


OP_OBJECTS = sorted(f"csrc/ops/op.cc [{variant}]" for variant in VARIANTS)
MODULE_OBJECT, OTHER_OBJECT = "csrc/bindings/module.cpp", "csrc/bindings/other.cpp"


def test_first_build_compiles_all_and_says_what_was_built(project: Project) -> None:
    compiled, last_line = project.build()
    assert compiled == sorted([*OP_OBJECTS, MODULE_OBJECT, OTHER_OBJECT])
    assert re.fullmatch(
        rf"dcpkernels: built cpu \[{' '.join(VARIANTS)}\] \(\S+ \d+\.\d+\S*\); cuda: .+; hip: .+", last_line
    )
    assert project.load()["is_stub"] == 0


def test_second_build_touches_nothing(project: Project) -> None:
    project.build()
    before = project.module().stat()
    assert project.build()[0] == []
    after = project.module().stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("mtime_ns", [None, 10**9], ids=["edited", "older file, as after a checkout"])
def test_header_change_rebuilds_what_reads_it(project: Project, mtime_ns: int | None) -> None:
    project.build()
    build_id = project.load()["build_id"]
    project.write("csrc/core/used.h", "#pragma once\n#define USED 2\n")
    if mtime_ns:
        os.utime(project.folder / "csrc/core/used.h", ns=(mtime_ns, mtime_ns))
    # The module reads no header, but the identity of the build in it is of all sources.
    assert project.build()[0] == sorted([*OP_OBJECTS, MODULE_OBJECT])
    assert project.load()["build_id"] != build_id


def test_running_process_keeps_its_module(project: Project) -> None:
    project.build()
    old_file = project.module().open("rb")
    old_bytes = old_file.read()
    project.write("csrc/core/used.h", "#pragma once\n#define USED 2\n")
    project.build()
    old_file.seek(0)
    assert old_file.read() == old_bytes and project.module().read_bytes() != old_bytes


def test_build_id_is_of_sources_and_flags_and_of_no_path(project: Project, tmp_path: Path) -> None:
    project.build()
    elsewhere = Project(tmp_path / "elsewhere with a space")
    elsewhere.build()
    assert elsewhere.load() == project.load()
    elsewhere.build("--inplace", "--cxxflags=-fno-inline")
    assert elsewhere.load() != project.load()
    elsewhere.build("--inplace", DCPKERNELS_WERROR="1")
    assert elsewhere.load() == project.load()


def test_test_build_goes_elsewhere(project: Project) -> None:
    project.build()
    compiled, _ = project.build("--build-lib", "out", "--build-temp", "temp", "--define", "DCP_STUB_KERNEL")
    assert compiled == sorted([*OP_OBJECTS, MODULE_OBJECT, OTHER_OBJECT])
    assert project.load("out")["is_stub"] == 1 and project.load()["is_stub"] == 0
    assert project.load("out")["build_id"] != project.load()["build_id"]
    assert project.build()[0] == []


def test_flags(project: Project) -> None:
    project.build(DCPKERNELS_CXX=str(project.folder / "recorder"))
    lines = [line for line in project.record.read_text().splitlines() if "-c csrc" in line]
    ops, bindings = ([line for line in lines if f"/{kind}/" in line] for kind in ("ops", "bindings"))
    assert len(lines) == len(VARIANTS) + 2
    for line in lines:
        assert "-std=c++20" in line and "-ffp-contract=off" in line and "-fvisibility=hidden" in line
        assert "-DDCP_TARGET_CPU" in line and "-Werror" not in line
        assert not re.search(r"-march=native|-mtune=native|-ffast-math|-Ofast|-funsafe-math", line)
        assert "torch" not in line
    expected = {
        "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
        "v4": ["-march=x86-64-v4"],
        "v3": ["-march=x86-64-v3"],
        "baseline": [],
    }
    march = {re.search(r"-DDCP_NS=(\w+)", line)[1]: re.findall(r"-march=\S+|-mavx\S+", line) for line in ops}
    assert march == {variant: expected[variant] for variant in VARIANTS}
    for line in bindings:
        assert "-march" not in line
        listed = re.findall(r"X\((\w+)\)", line.partition("-DDCP_VARIANTS(X)=")[2])
        assert listed == (VARIANTS if "module.cpp" in line else [])


# Stands in for nvcc: what it is asked for is noted, and done by the C++ compiler.
NVCC = """#!/bin/sh
echo "$@" >> "$RECORD_TO"
case "$*" in
  --version) echo "Cuda compilation tools, release RELEASE, V0"; exit;;
  *--dryrun*) echo '#$ LIBRARIES=  "-LFOLDER"' >&2; exit;;
esac
for word; do case "$word" in -MD|-MF|-c|-o|-D*|-Icsrc|csrc/*|build/*) set -- "$@" "$word";; esac; shift; done
exec $REAL_CXX -fPIC -x c++ "$@"
"""


def give_nvcc(project: Project, release: str = "13.0", library: bool = True) -> dict[str, str]:
    text = NVCC.replace("RELEASE", release).replace("FOLDER", str(project.folder / "lib"))
    project.write("nvcc", text)
    (project.folder / "nvcc").chmod(0o755)
    if library:
        project.write("lib/libcudart_static.a", "!<arch>\n")  # an archive of nothing
    module = project.folder / "csrc/bindings/module.cpp"
    module.write_text(module.read_text().replace('"_C_cpu"', '"_C_any"') + MODULE_OF_EITHER_NAME)
    return {"DCPKERNELS_TARGETS": "", "DCPKERNELS_NVCC": str(project.folder / "nvcc")}


MODULE_OF_EITHER_NAME = """
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda() { return PyInit__C_cpu(); }
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_hip() { return PyInit__C_cpu(); }
"""


def test_cuda_target(project: Project) -> None:
    compiled, last_line = project.build(**give_nvcc(project))
    assert compiled == sorted([*OP_OBJECTS, "csrc/ops/op.cc [cuda]", *2 * [MODULE_OBJECT], OTHER_OBJECT])
    assert re.fullmatch(r"dcpkernels: built cpu \[.*\] \(.*\), cuda \[cuda\] \(nvcc 13.0\); hip: .+", last_line)
    (line,) = [line for line in project.record.read_text().splitlines() if "-c csrc/ops" in line]
    codes = re.findall(r"-gencode=(\S+)", line)
    archs = [f"arch=compute_{arch},code=sm_{arch}" for arch in ("90a", "100a", "103a", "120")]
    assert codes == [*archs, "arch=compute_90,code=compute_90"]
    for flag in ("-x cu", "-std=c++20", "--fmad=false", "-DDCP_TARGET_CUDA", "-DDCP_NS=cuda", f"-ccbin={CXX}"):
        assert flag in line
    assert not re.search(r"-march|-ffast-math|--use_fast_math|-Werror", line)
    (module,) = (project.folder / "dcpkernels").glob("_C_cuda.*.so")
    assert project.load()["build_id"].encode() not in module.read_bytes()  # ranks of two targets must not meet


def test_one_architecture_for_a_quick_build(project: Project) -> None:
    project.build(**give_nvcc(project), DCPKERNELS_CUDA_ARCHS="100a", DCPKERNELS_WERROR="1")
    (line,) = [line for line in project.record.read_text().splitlines() if "-c csrc/ops" in line]
    assert re.findall(r"-gencode=(\S+)", line) == ["arch=compute_100a,code=sm_100a"] and "-Werror all-warnings" in line


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"release": "12.8"}, "nvcc must be of CUDA 13 or later (got 'release 12.8, V0')"),
        ({"library": False}, "no libcudart_static.a in "),
        (None, "DCPKERNELS_NVCC=no-such-nvcc is not a program on this machine"),
    ],
)
def test_a_cuda_compiler_of_no_use(project: Project, given: dict[str, object] | None, reason: str) -> None:
    env = {"DCPKERNELS_TARGETS": ""} if given is None else give_nvcc(project, **given)
    compiled, last_line = project.build(**env)
    assert "csrc/ops/op.cc [cuda]" not in compiled and f"; cuda: {reason}" in last_line
    code, output = project.setup("build_ext", "--inplace", **env | {"DCPKERNELS_TARGETS": "cpu,cuda"})
    assert code != 0 and f"target cuda: {reason}" in output and "Traceback" not in output


# Stands in for ROCm's clang: says where it lies; what it compiles for a device, an assembler or the host is noted.
HIPCC = """#!/bin/sh
echo "$@" >> "$RECORD_TO"
case "$*" in
  --version) printf 'AMD clang version VERSION\\nTarget: x86_64\\nInstalledDir: FOLDER\\n'; exit;;
  *-fsyntax-only*) case "$*" in *-arch=gfx950*) exit UNKNOWN;; esac; exit;;
esac
mode=host
for word; do
  [ "$last" = -o ] && output=$word
  case "$word" in --cuda-device-only|assembler) mode=$word;; *.s.d) echo "device: csrc/ops/op.cc" > "$word";; esac
  last=$word
done
[ "$mode" = host ] || { echo "$mode" > "$output"; exit; }
for word; do case "$word" in -MD|-MF|-c|-o|-D*|-Icsrc|csrc/*|build/*.o*) set -- "$@" "$word";; esac; shift; done
exec $REAL_CXX -fPIC -x c++ "$@"
"""
LLD = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo linked > "$2"
"""


def give_hipcc(project: Project, version: str = "20.0.0git", linker: bool = True) -> dict[str, str]:
    for name, text in {"llvm/clang++": HIPCC, "hipcc": HIPCC, **({"llvm/ld.lld": LLD} if linker else {})}.items():
        text = text.replace("VERSION", version).replace("FOLDER", str(project.folder / "llvm"))
        project.write(name, text.replace("UNKNOWN", str(int(version < "20"))))
        (project.folder / name).chmod(0o755)
    project.write("csrc/arch/hip_runtime.cpp", "")
    module = project.folder / "csrc/bindings/module.cpp"
    module.write_text(module.read_text().replace('"_C_cpu"', '"_C_any"') + MODULE_OF_EITHER_NAME)
    return {"DCPKERNELS_TARGETS": "cpu,hip", "DCPKERNELS_HIPCC": str(project.folder / "hipcc")}


def test_hip_target(project: Project) -> None:
    env = give_hipcc(project)
    compiled, last_line = project.build(**env)
    op = "csrc/ops/op.cc [hip]"
    assert compiled == sorted([*OP_OBJECTS, *3 * [op], "csrc/arch/hip_runtime.cpp", *2 * [MODULE_OBJECT], OTHER_OBJECT])
    assert re.fullmatch(r"dcpkernels: built cpu \[.*\] \(.*\), hip \[hip\] \(clang\+\+ 20.0.0\); cuda: .+", last_line)
    lines = [line for line in project.record.read_text().splitlines() if "csrc/ops/op.cc" in line and "-x hip" in line]
    assert [re.findall(r"--offload-arch=(\w+)", line) for line in lines] == [
        ["gfx942"],
        ["gfx950"],
        ["gfx942", "gfx950"],
    ]
    for line in lines:
        for flag in (
            "-nogpuinc",
            "-nogpulib",
            "-std=c++20",
            "-ffp-contract=off",
            "-DDCP_TARGET_HIP",
            "-DDCP_NS=hip",
            "-cuid=op.cc",
        ):
            assert f"{flag} " in line
        assert not re.search(r"-march|-ffast-math|-Werror|rocm", line)
    (fat_binary,) = (project.folder / "build").glob("temp*/hip/hip/op.cc.hipfb")
    data = fat_binary.read_bytes()
    assert (
        data.startswith(b"__CLANG_OFFLOAD_BUNDLE__")
        and data.count(b"linked\n") == 2
        and f"{fat_binary.name}" in lines[2]
    )
    assert project.build(**env)[0] == []
    project.write("csrc/ops/op.cc", MINI_PROJECT["csrc/ops/op.cc"] + "// more\n")
    assert sorted(set(project.build(**env)[0])) == sorted([*OP_OBJECTS, op, MODULE_OBJECT])


def test_one_hip_architecture(project: Project) -> None:
    project.build(**give_hipcc(project, "17.0.6"), DCPKERNELS_HIP_ARCHS="gfx942", DCPKERNELS_WERROR="1")
    lines = [line for line in project.record.read_text().splitlines() if "csrc/ops/op.cc" in line and "-x hip" in line]
    assert [re.findall(r"--offload-arch=(\w+)", line) for line in lines] == [["gfx942"], ["gfx942"]]
    assert all("-Werror" in line for line in lines)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"version": "19.1.7"},
            "no clang++ with ld.lld for gfx942 and gfx950 (hipcc (AMD clang version 19.1.7) does not know gfx950; install",
        ),
        ({"linker": False}, "no clang++ with ld.lld for gfx942 and gfx950 (hipcc has no clang++ or no ld.lld in "),
        (None, "DCPKERNELS_HIPCC=no-such-hipcc is not a program on this machine"),
    ],
)
def test_a_hip_compiler_of_no_use(project: Project, given: dict[str, object] | None, reason: str) -> None:
    env = {} if given is None else give_hipcc(project, **given)
    compiled, last_line = project.build(**env | {"DCPKERNELS_TARGETS": ""})
    assert "csrc/ops/op.cc [hip]" not in compiled and f"; hip: {reason}" in last_line
    code, output = project.setup("build_ext", "--inplace", **env | {"DCPKERNELS_TARGETS": "cpu,hip"})
    assert code != 0 and f"target hip: {reason}" in output and "Traceback" not in output


def test_warning_is_an_error_only_when_asked(project: Project) -> None:
    project.write("csrc/bindings/other.cpp", "static int unused() { return 0; }\n")
    code, output = project.setup("build_ext", "--inplace", DCPKERNELS_WERROR="1")
    assert code != 0 and "unused" in output
    code, output = project.setup("build_ext", "--inplace")
    assert code == 0 and "unused" in output


@pytest.mark.parametrize(
    "env, text",
    [
        ({"DCPKERNELS_TARGETS": "gpu"}, "names must be among cpu, cuda, hip (got gpu)"),
        ({"CXX": "no-such-compiler"}, "CXX=no-such-compiler is not a program"),
        ({"DCPKERNELS_CXX": "no-such-compiler"}, "DCPKERNELS_CXX=no-such-compiler is not a program"),
    ],
)
def test_wrong_request_fails_by_name(project: Project, env: dict[str, str], text: str) -> None:
    code, output = project.setup("build_ext", "--inplace", **env)
    assert code != 0 and text in output and "Traceback" not in output


def test_sdist_has_all_that_a_build_needs(project: Project) -> None:
    code, output = project.setup("egg_info", "--egg-base", ".", "sdist", "--dist-dir", "sdist")
    assert code == 0, output
    (archive,) = (project.folder / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= {*MINI_PROJECT, "setup.py", "pyproject.toml", "LICENSE"}


def test_setup_imports_no_torch() -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == {"setuptools", "pybind11"}


# ---- the project: metadata, Makefile, tracked files


def test_metadata() -> None:
    about = importlib.metadata.metadata("dcpkernels")
    assert set(about.get_all("Provides-Extra")) == {"cli", "cuda", "hip", "mpi", "triton", "oracles", "test"}
    needed = [text for text in about.get_all("Requires-Dist") if "extra ==" not in text]
    assert {re.match(r"[\w-]+", text)[0] for text in needed} == {"torch", "numpy"}
    (script,) = importlib.metadata.distribution("dcpkernels").entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("dcpkernels", "dcpkernels.cli:main")


@pytest.mark.parametrize(
    "target, command",
    [
        ("demo", "dcpkernels demo"),
        ("test", "pytest -q tests"),
        ("bench", "dcpkernels bench"),
        ("build", "build_ext"),
    ],
)
def test_make_target(target: str, command: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "VENV"}
    # An environment that does not exist yet: every step is still to be done, so every step is printed.
    make = ["make", "--dry-run", target, f"VENV={tmp_path / 'none'}"]
    printed = run(make, cwd=ROOT, env=env)
    assert command in printed and "torch==2.13.0" in printed


def tracked_files() -> list[Path]:
    """Also those that are about to be tracked."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    return [ROOT / name for name in run(git, cwd=ROOT).split("\0") if name and (ROOT / name).is_file()]


def test_tracked_files_name_no_machine() -> None:
    # Put together here, so that this file does not match.
    folders = "|".join(["work", "farm", "root", "home", "tmp"])
    hosts = "|".join(["pypi", "pythonhosted", "npmjs", "crates", "download[.]pytorch", "deb[.]debian"])
    pattern = re.compile(rf"(?<![\w.])/(?:{folders})/[\w.]|(?:{hosts})[.](?:org|io|com)\b".encode())
    files = tracked_files()
    assert ROOT / "setup.py" in files and Path(__file__).resolve() in files
    found = []
    for path in files:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line[:120]!r}")
    assert not found, "\n".join(found)


# ---- the package of this checkout


def test_import_loads_no_extension_and_is_quick() -> None:
    code = """
import sys, time, torch
def maps():
    return {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
before, start = maps(), time.perf_counter()
import dcpkernels
elapsed_ms = (time.perf_counter() - start) * 1e3
added = sorted(maps() - before)
modules = sorted(name for name in sys.modules if name.startswith("dcpkernels._C_"))
print(repr((elapsed_ms, added, modules)))
"""
    best_ms = float("inf")
    for _ in range(3):
        elapsed_ms, added, modules = ast.literal_eval(run([sys.executable, "-c", code]))
        assert modules == []
        assert not [path for path in added if re.search(r"libcuda|libamdhip|libhsa|dcpkernels", path)]
        best_ms = min(best_ms, elapsed_ms)
    assert best_ms < 50


# What a plain x86-64 lacks: all that is VEX or EVEX coded, and the bit manipulation of v3.
NEEDS_V3 = re.compile(r"v(?!err|erw)\w+|mulx|rorx|s[ah][lr]x|andn|bextr|bls\w+|bzhi|pdep|pext|lzcnt|movbe")
NEEDS_V4_BF16 = re.compile(r"v\w*bf16\w*")
NEEDS_V4 = re.compile(r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b")


@pytest.mark.skipif(not IS_X86_64, reason="only x86-64 has variants")
def test_vector_instructions_stay_in_their_variant() -> None:
    """A function that variants share would be taken from the first one linked, and kill older machines."""
    module = importlib.util.find_spec("dcpkernels._C_cpu").origin
    listing = run(["objdump", "--disassemble", "--no-show-raw-insn", module])
    # Who may have what: `v4` stands for its own name and for that of v4_bf16.
    allowed = {"v4_bf16": ("v4_bf16",), "v4": ("v4",), "v3": ("v4", "v3")}
    symbol, seen, strays = "", dict.fromkeys(allowed, 0), {}
    for line in listing.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            symbol = header[1]
        elif "\t" in line:
            instruction = line.split("\t", 1)[1]
            mnemonic = instruction.split(maxsplit=1)[0]
            if NEEDS_V4_BF16.fullmatch(mnemonic):
                needs = "v4_bf16"
            elif NEEDS_V4.search(instruction):
                needs = "v4"
            elif NEEDS_V3.fullmatch(mnemonic):
                needs = "v3"
            else:
                continue
            seen[needs] += 1
            if not any(name in symbol for name in allowed[needs]):
                strays[symbol] = instruction
    assert all(seen.values()), f"the module lacks a variant: {seen}"
    assert not strays
