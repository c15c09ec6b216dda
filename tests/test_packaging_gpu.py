"""setup.py's GPU targets, on a small project and with compilers that note what they are asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging_project import CXX, MINI_PROJECT, MODULE_OBJECT, OP_OBJECTS, OTHER_OBJECT, Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


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


def test_listings_are_kept_when_asked(project: Project) -> None:
    env = give_nvcc(project)
    project.build(**env)
    assert project.build(**env, DCPKERNELS_LISTINGS="1")[0] == ["csrc/ops/op.cc [cuda]"]
    plain, listed = [
        line for line in project.record.read_text().splitlines() if "-c csrc/ops" in line and "-x cu" in line
    ]
    (text,) = (project.folder / "build").glob("temp*/cuda/cuda/op.cc.o.listings/ptxas.txt")
    more = ["-lineinfo", "-Xptxas=-v", "--keep", f"--keep-dir={text.parent.relative_to(project.folder)}"]
    assert [word for word in listed.split() if word not in plain.split()] == more


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


# Stands in for ROCm's clang: says where it lies; what it compiles for a device or the host is noted.
HIPCC = """#!/bin/sh
echo "$@" >> "$RECORD_TO"
case "$*" in
  --version) printf 'AMD clang version VERSION\\nTarget: x86_64\\nInstalledDir: FOLDER\\n'; exit;;
  *-fsyntax-only*) case "$*" in *-arch=gfx950*) exit UNKNOWN;; esac; exit;;
esac
mode=host
for word; do
  [ "$last" = -o ] && output=$word
  case "$word" in --cuda-device-only) mode=$word;; *.gfx9*.o.d) echo "device: csrc/ops/op.cc" > "$word";; esac
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
