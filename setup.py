"""Builds the compiled modules: one `Target` is one module, dcpkernels/_C_<name>. The rest is in pyproject.toml.

    python setup.py build_ext --inplace                                        what `make build` runs
    python setup.py build_ext --build-lib DIR --build-temp DIR --define NAME   a test build, somewhere else

Each op source is compiled once per variant of a target (own flags, own namespace DCP_NS), each binding once (DCP_NS is
then `host`). For HIP, clang compiles an op for each device and then for the host, with the devices' code inside.
An object is reused while its command, its compiler and all the headers that it read are unchanged.

Environment
    DCPKERNELS_TARGETS=cpu,...  build exactly these; the default is all that this machine has a compiler for
    DCPKERNELS_CUDA_ARCHS=...   code for these only, 90a,100a,...; the default is all, and PTX for later ones
    DCPKERNELS_NVCC             the CUDA compiler; else nvcc of PATH, CUDA_HOME, /usr/local/cuda or wheels
    DCPKERNELS_HIP_ARCHS=...    code for these only, gfx942,...; the default is gfx942 and gfx950
    DCPKERNELS_HIPCC            the HIP compiler; else ROCm's, or any clang++ of PATH, or the one of the ziglang wheel
    DCPKERNELS_CXX or CXX       the C++ compiler
    DCPKERNELS_SANITIZE=...     address,undefined or thread or ...: the CPU target under sanitizers, build/sanitize-...
    DCPKERNELS_WERROR=1         warnings are errors (set in CI)
    DCPKERNELS_LISTINGS=1       for CUDA, keep what tests/isa would compile once more: code with line numbers (set in CI)
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

# No -march here: a wheel must run on any machine of its architecture; faster instructions come by variants.
# No -ffast-math: the merge promises the same bits on every path, and it has to see NaN and infinity.
COMMON_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# The same for nvcc. --fmad=false: only what the source calls fma is one.
CUDA_FLAGS = ("-x", "cu", "-std=c++20", "-O3", "--fmad=false", "--threads=2",
              "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra")  # fmt: skip
# What the ops use is in sm_90: PTX of it serves every later architecture, for which there is no code here.
CUDA_ARCHS, CUDA_PTX = ("90a", "100a", "103a", "120"), "90"
# No header and no library of ROCm. What starts kernels with <<<>>> is left out: csrc/arch/hip_runtime.cpp does that.
HIP_FLAGS = ("-x", "hip", "-nogpuinc", "-nogpulib", "--no-offload-new-driver", "-fno-hip-new-launch-api",
             "-mcode-object-version=5",  # ROCm 6.2 loads no later one
             "-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra")  # fmt: skip
HIP_ARCHS = ("gfx942", "gfx950")
OLDEST_CLANG, NEWEST_CLANG = 17, 29  # whose names are looked for
# Not optimised: checks in what is always inlined take a compiler minutes else. Frame pointers, for whole stacks. Also the
# checks of the library's own containers. What a report does, stop or go on, is said at run time.
SANITIZE_FLAGS = ("-O0", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS")
SANITIZERS = {"address": ("address",), "undefined": ("undefined", "float-cast-overflow"), "thread": ("thread",)}


class Missing(Exception):
    """Why a target cannot be built on this machine."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # of --version; part of what decides whether an object is still good
    linker: tuple[str, ...] = ()  # of device code, where that is a program of its own

    @property
    def label(self) -> str:
        number = re.search(r"\d+\.\d+(\.\d+)?", self.version)
        name = "ziglang" if "ziglang" in self.command else Path(self.command[0]).name
        return f"{name} {number.group() if number else self.version}"


def find_cxx() -> Compiler:
    asked = [(var, os.environ[var]) for var in ("DCPKERNELS_CXX", "CXX") if os.environ.get(var)]
    for var, text in asked:
        if not shutil.which(shlex.split(text)[0]):
            raise Missing(f"{var}={text} is not a program on this machine")
    found = [text for _, text in asked] or [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if not found:
        raise Missing("no C++ compiler (install g++ 11 or newer, or set CXX)")
    command = tuple(shlex.split(found[0]))
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return Compiler(command, shown.stdout.partition("\n")[0])


def find_nvcc() -> Compiler:
    asked = os.environ.get("DCPKERNELS_NVCC")
    wheels = [str(Path(folder, "nvidia", "cu13")) for folder in sys.path]  # of nvidia-cuda-nvcc and its like
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *wheels) if home]
    candidates = [asked] if asked else ["nvcc", *(str(Path(home, "bin", "nvcc")) for home in homes)]
    found = next((path for path in map(shutil.which, candidates) if path), None)
    if found is None:
        raise Missing(f"DCPKERNELS_NVCC={asked} is not a program on this machine" if asked else
                      "no nvcc (install CUDA 13 or set DCPKERNELS_NVCC)")  # fmt: skip
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+).*", shown)
    if release is None or int(release[1]) < 13:  # 12.x has no code for sm_103a, or trips over C++20
        raise Missing(f"nvcc must be of CUDA 13 or later (got {release[0] if release else shown.strip()!r})")
    return Compiler((found, f"-ccbin={find_cxx().command[0]}"), f"nvcc {release[0]}")


def cudart(nvcc: Compiler) -> list[str]:
    """The run-time library. Linked statically, so that the module imports on a machine without CUDA."""
    shown = subprocess.run([*nvcc.command, "--dryrun", "-shared", "x.o"], capture_output=True, text=True, check=False)
    folders = re.findall(r'-L([^"\s]+)', "".join(re.findall(r"LIBRARIES=(.*)", shown.stderr)))
    for folder in map(os.path.normpath, folders):
        if Path(folder, "libcudart_static.a").exists():
            return [f"{folder}/libcudart_static.a", "-ldl", "-lrt"]
    raise Missing(
        f"no libcudart_static.a in {' '.join(folders) or 'any folder of nvcc'} (install the CUDA run-time library)"
    )


def cuda_codes() -> tuple[str, ...]:
    asked = os.environ.get("DCPKERNELS_CUDA_ARCHS", "")
    archs = [arch.strip() for arch in asked.split(",") if arch.strip()] or CUDA_ARCHS
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return (*codes, *([] if asked else [f"-gencode=arch=compute_{CUDA_PTX},code=compute_{CUDA_PTX}"]))


def hip_archs() -> list[str]:
    asked = [arch.strip() for arch in os.environ.get("DCPKERNELS_HIP_ARCHS", "").split(",") if arch.strip()]
    return asked or list(HIP_ARCHS)


def find_hipcc() -> Compiler:
    """A clang for AMD GPUs, with its linker: the one that hipcc calls, or any other."""
    asked = os.environ.get("DCPKERNELS_HIPCC")
    homes = [home for home in (os.environ.get("ROCM_PATH"), "/opt/rocm") if home]
    names = ["hipcc", *(f"{home}/bin/hipcc" for home in homes), "clang++"]
    names += [f"clang++-{version}" for version in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1)]
    candidates = [[path] for path in map(shutil.which, [asked] if asked else names) if path]
    if asked and not candidates:
        raise Missing(f"DCPKERNELS_HIPCC={asked} is not a program on this machine")
    wheel = next((folder for folder in sys.path if Path(folder, "ziglang").is_dir()), None)
    if wheel and not asked:
        candidates.append([sys.executable, "-m", "ziglang", "clang", "-isystem", f"{wheel}/ziglang/lib/include"])
    faults = []
    for command in candidates:
        name = "ziglang" if "ziglang" in command else Path(command[0]).name
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
        version, folder = re.search(r".*clang version .*", shown), re.search(r"InstalledDir: (.*)", shown)
        if version is None or (folder is None and name != "ziglang"):
            faults.append(f"{name} is no clang")
            continue
        linker = (sys.executable, "-m", "ziglang", "ld.lld")
        if name != "ziglang":
            command, linker = [f"{folder[1]}/clang++"], (f"{folder[1]}/ld.lld",)
        if not all(map(shutil.which, (command[0], linker[0]))):
            faults.append(f"{name} has no clang++ or no ld.lld in {folder[1]}")
        elif unknown := [arch for arch in hip_archs() if not compiles_for(command, arch)]:
            faults.append(f"{name} ({version[0].strip()}) does not know {' and '.join(unknown)}")
        else:
            shown = subprocess.run([*linker, "--version"], capture_output=True, text=True, check=False).stdout
            return Compiler(tuple(command), f"{version[0]}; {shown.strip()}", linker)
    raise Missing(f"no clang++ with ld.lld for {' and '.join(hip_archs())} ({'; '.join(faults) or 'none in PATH'}; "
                  "install ROCm, or clang and lld 20, or the wheel ziglang, or set DCPKERNELS_HIPCC)")  # fmt: skip


def compiles_for(command: list[str], arch: str) -> bool:
    asked = [*command, *HIP_FLAGS, "--cuda-device-only", f"--offload-arch={arch}", "-fsyntax-only", os.devnull]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Variant:
    """One compilation of every op source, in a namespace of this name; host/dispatch.h sees all in -DDCP_VARIANTS."""

    name: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    name: str  # the module is dcpkernels._C_<name>, and all its sources see -DDCP_TARGET_<NAME>
    compiler: Callable[[], Compiler]  # finds the compiler of the op sources, or raises Missing
    flags: tuple[str, ...]  # for the op sources, before the variant's
    variants: tuple[Variant, ...]
    strict: tuple[str, ...] = ("-Werror",)
    libraries: Callable[[Compiler], list[str]] = lambda compiler: []  # for the linker
    # The steps from an op source to its object: (compiler, flags, source, output, title).
    compile: Callable[..., list[Step]] = lambda *args: one_step(*args)
    ops: tuple[str, ...] = ("csrc/ops/*.cc", "csrc/host/*.cc")
    bindings: tuple[str, ...] = ("csrc/bindings/*.cpp",)  # compiled by the C++ compiler

    def sources(self, patterns: tuple[str, ...]) -> list[str]:
        return sorted(path.as_posix() for pattern in patterns for path in Path().glob(pattern))


# GCC 12 warns of uninitialised values inside its own AVX-512 header; the other variants still have that warning.
V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512", "-Wno-uninitialized")
CPU_VARIANTS = (
    Variant("v4_bf16", (*V4_FLAGS, "-mavx512bf16")),
    Variant("v4", V4_FLAGS),
    Variant("v3", ("-march=x86-64-v3",)),
    Variant("baseline"),
)

TARGETS = (
    Target(
        name="cpu",
        compiler=find_cxx,
        flags=(*COMMON_FLAGS, *HOST_FLAGS),
        variants=CPU_VARIANTS if platform.machine() in ("x86_64", "AMD64") else CPU_VARIANTS[-1:],
    ),
    Target(
        name="cuda",
        compiler=find_nvcc,
        flags=(*CUDA_FLAGS, *cuda_codes()),
        variants=(Variant("cuda"),),
        strict=("-Werror", "all-warnings"),
        libraries=cudart,
        compile=lambda *args: cuda_step(*args),
    ),
    Target(
        name="hip",
        compiler=find_hipcc,
        flags=(*HIP_FLAGS, *(f"--offload-arch={arch}" for arch in hip_archs())),
        variants=(Variant("hip"),),
        libraries=lambda compiler: ["-ldl"],
        compile=lambda *args: devices_then_host(*args),
        bindings=("csrc/bindings/*.cpp", "csrc/arch/hip_runtime.cpp"),
    ),
)


def sanitizers() -> list[str]:
    text = os.environ.get("DCPKERNELS_SANITIZE", "")
    names = sorted({name.strip() for name in text.split(",") if name.strip()})
    if unknown := [name for name in names if name not in SANITIZERS]:
        known = ", ".join(SANITIZERS)
        raise SystemExit(f"error: DCPKERNELS_SANITIZE={text}: names must be among {known} (got {unknown[0]})")
    if "thread" in names and len(names) > 1:
        raise SystemExit(f"error: DCPKERNELS_SANITIZE={text}: thread must be alone (got {len(names)} names)")
    return names


def selected_targets() -> list[Target]:
    # Sanitizers are those of the host's compiler.
    text = os.environ.get("DCPKERNELS_TARGETS", "cpu" if sanitizers() else "")
    if not text:
        return list(TARGETS)
    by_name = {target.name: target for target in TARGETS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in by_name:
            known = ", ".join(by_name)
            raise SystemExit(f"error: DCPKERNELS_TARGETS={text}: names must be among {known} (got {name})")
        if sanitizers() and name != "cpu":
            raise SystemExit(f"error: DCPKERNELS_TARGETS={text}: must be cpu with DCPKERNELS_SANITIZE (got {name})")
    return [by_name[name] for name in dict.fromkeys(names)]


def build_id(target: Target, extra: list[str]) -> str:
    """What ranks compare: the text of csrc and the flags. No path is in it: same sources, same id."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, HOST_FLAGS, target.flags, target.variants, extra)).encode())
    for path in sorted(Path("csrc").rglob("*")):
        if path.is_file() and path.suffix != ".md":
            text = path.read_bytes()
            digest.update(f"\0{path.as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


class Step:
    """A command that makes one file, and a stamp beside the file that says whether it has to run again."""

    def __init__(self, title: str, command: list[str], output: Path, compiler: Compiler, inputs=(), lists_more=None):
        # `inputs`: files that the command reads; `lists_more`: how a compiler is asked to list the others in a file.
        # Without a title it says nothing.
        self.title, self.output, self.inputs, self.lists_more = title, output, inputs, lists_more
        self.key = [*command, compiler.version]
        self.draft = output.with_name(output.name + ".new")
        self.depfile = output.with_name(output.name + ".d")
        self.stamp = output.with_name(output.name + ".json")
        self.command = [*command, "-o", str(self.draft)]
        if lists_more:
            self.command += lists_more(self.depfile)

    def is_fresh(self) -> bool:
        try:
            stamp = json.loads(self.stamp.read_text())
            times = all(os.stat(path).st_mtime_ns == mtime for path, mtime in stamp["deps"].items())
            return times and stamp["key"] == self.key and self.output.exists()
        except (OSError, ValueError, KeyError):
            return False

    def dependencies(self) -> list[str]:
        inputs = [str(path) for path in self.inputs]
        if self.lists_more:
            rule = self.depfile.read_text().replace("\\\n", " ")
            inputs += shlex.split(rule.partition(": ")[2])
        return inputs

    def run(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.unlink(missing_ok=True)
        start, started_ns = time.monotonic(), time.time_ns()
        said = self.make()
        # A rename, so that a process which has the old module mapped keeps the old file.
        self.draft.replace(self.output)
        seconds = time.monotonic() - start
        if self.title or said:
            print(f"dcpkernels: {self.title} ({seconds:.1f} s)\n{said}".rstrip(), flush=True)
        deps = {path: os.stat(path).st_mtime_ns for path in self.dependencies()}
        if max(deps.values()) < started_ns:  # else one was saved as it was being read: build again
            self.stamp.write_text(json.dumps({"key": self.key, "deps": deps}))

    def make(self) -> str:
        """Makes the draft; returns what was said."""
        done = subprocess.run(self.command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            title = self.title or Path(self.command[0]).name
            raise CompileError(f"{title} failed\n{shlex.join(self.command)}\n{done.stdout}")
        return done.stdout


class FatBinary(Step):
    """Puts code objects, by architecture, into one file: clang's offload bundle, as clang-offload-bundler writes it and
    as every HIP runtime reads it. (https://clang.llvm.org/docs/ClangOffloadBundler.html#bundled-binary-file-layout)"""

    def __init__(self, code_objects: dict[str, Path], output: Path, compiler: Compiler):
        super().__init__("", ["fat binary", *code_objects], output, compiler, inputs=[*code_objects.values()])
        self.code_objects = code_objects

    def make(self) -> str:
        page = 4096  # code objects are loaded from where they lie
        images = {"host-x86_64-unknown-linux-gnu-": b""}
        images |= {f"hipv4-amdgcn-amd-amdhsa--{arch}": path.read_bytes() for arch, path in self.code_objects.items()}
        entries, body, offset = b"", b"", page
        for triple, image in images.items():
            entries += struct.pack("<QQQ", offset, len(image), len(triple)) + triple.encode()
            padded = image.ljust(-(-len(image) // page) * page, b"\0")
            body += padded
            offset += len(padded)
        head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(images)) + entries
        self.draft.write_bytes(head.ljust(page, b"\0") + body)
        return ""


def depfile_flags(path: Path) -> list[str]:
    return ["-MD", "-MF", str(path)]


def clang_depfile_flags(path: Path) -> list[str]:
    """The same where clang compiles for a GPU: its driver passes on no -MF then."""
    asked = ["-dependency-file", str(path), "-MT", "device", "-sys-header-deps"]
    return [word for flag in asked for word in ("-Xclang", flag)]


def one_step(compiler: Compiler, flags: list[str], source: str, output: Path, title: str) -> list[Step]:
    return [Step(title, [*compiler.command, *flags, "-c", source], output, compiler, lists_more=depfile_flags)]


class ListingStep(Step):
    """nvcc that leaves PTX, machine code and what ptxas says of it in a folder beside the object."""

    def __init__(self, title: str, command: list[str], output: Path, compiler: Compiler):
        self.listings = output.with_name(output.name + ".listings")
        # Line numbers change no instruction.
        more = ["-lineinfo", "-Xptxas=-v", "--keep", f"--keep-dir={self.listings}"]
        super().__init__(title, [*command, *more], output, compiler, lists_more=depfile_flags)

    def make(self) -> str:
        shutil.rmtree(self.listings, ignore_errors=True)
        self.listings.mkdir()
        said = super().make()
        (self.listings / "ptxas.txt").write_text(said)
        return "\n".join(line for line in said.splitlines() if not re.match(r"ptxas info|\s+\d+ bytes stack", line))


def cuda_step(compiler: Compiler, flags: list[str], source: str, output: Path, title: str) -> list[Step]:
    if os.environ.get("DCPKERNELS_LISTINGS") != "1":
        return one_step(compiler, flags, source, output, title)
    return [ListingStep(title, [*compiler.command, *flags, "-c", source], output, compiler)]


def devices_then_host(compiler: Compiler, flags: list[str], source: str, output: Path, title: str) -> list[Step]:
    """Device code is linked by a command of its own, for not every clang knows where its linker is; and one that compiles
    for several devices at once wants clang-offload-bundler, which Debian has in a package of its own."""
    flags = [*flags, f"-cuid={Path(source).name}"]  # else made of the folder's name
    steps, code_objects = [], {}
    for arch in [flag.partition("=")[2] for flag in flags if flag.startswith("--offload-arch=")]:
        code, linked = (output.with_name(f"{output.stem}.{arch}.{kind}") for kind in ("o", "hsaco"))
        one_arch = [flag for flag in flags if not flag.startswith("--offload-arch=")] + [f"--offload-arch={arch}"]
        # With -c the driver would link too. Not through assembly: LLVM 17 and 18 refuse some of what they write.
        to_object = ["--cuda-device-only", "-S", "-Xclang", "-emit-obj"]
        command = [*compiler.command, *one_arch, *to_object, source]
        steps.append(Step(f"{title} {arch}", command, code, compiler, lists_more=clang_depfile_flags))
        link = [*compiler.linker, "-shared", "--no-undefined", str(code)]
        steps.append(Step("", link, linked, compiler, inputs=[code]))
        code_objects[arch] = linked
    fat_binary = output.with_suffix(".hipfb")
    steps.append(FatBinary(code_objects, fat_binary, compiler))
    embed = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(fat_binary)]
    command = [*compiler.command, *flags, *HOST_FLAGS, "--cuda-host-only", *embed, "-c", source]
    steps.append(Step(f"{title} host", command, output, compiler, inputs=[fat_binary], lists_more=depfile_flags))
    return steps


def place(built: Path, destination: Path) -> None:
    """Copies `built` unless it is there already, by rename for the same reason as in Step.run."""
    was, now = (path.stat() if path.exists() else None for path in (destination, built))
    if was and (was.st_size, was.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = destination.with_name(destination.name + ".new")
    shutil.copy2(built, draft)
    draft.replace(destination)


class BuildTargets(build_ext):
    user_options = [
        *build_ext.user_options,
        ("cxxflags=", None, "more flags for compiler and linker, for test builds"),
        ("variants=", None, "build these variants only, a,b,..., for test builds"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.cxxflags = self.variants = ""

    def finalize_options(self) -> None:
        if names := sanitizers():
            # Python by itself cannot import the module: so it is never where Python, or a wheel, would look for it.
            if self.inplace or self.editable_mode:
                raise SystemExit("error: DCPKERNELS_SANITIZE: the build must not be in place (leave out --inplace)")
            self.build_lib = self.build_lib or f"build/sanitize-{'-'.join(names)}"
            self.build_temp = self.build_temp or f"{self.build_lib}/temp"
            checks = ",".join(check for name in names for check in SANITIZERS[name])
            self.cxxflags = shlex.join([*SANITIZE_FLAGS, f"-fsanitize={checks}", *shlex.split(self.cxxflags)])
        super().finalize_options()
        if self.editable_mode:
            # An editable install hands in a temporary folder; keep the objects where the next build looks.
            default = build(self.distribution)
            default.ensure_finalized()
            self.build_temp = default.build_temp

    def run(self) -> None:
        if sys.platform != "linux":
            raise PlatformError(f"dcpkernels builds on Linux (this is {sys.platform})")
        required, self.compilers, missing = bool(os.environ.get("DCPKERNELS_TARGETS")), {}, {}
        for ext in self.extensions:
            try:
                compiler = ext.target.compiler()
                ext.target.libraries(compiler)  # or Missing
                self.compilers[ext.name] = compiler
            except Missing as reason:
                if required or ext.target.name == "cpu":
                    raise PlatformError(f"target {ext.target.name}: {reason}") from None
                missing[ext.target.name] = str(reason)
        self.extensions = [ext for ext in self.extensions if ext.name in self.compilers]
        super().run()
        self.say_what_was_built(missing)

    def say_what_was_built(self, missing: dict[str, str]) -> None:
        built = {}
        for ext in self.extensions:
            variants = " ".join(variant.name for variant in ext.target.variants)
            built[ext.target.name] = f"{ext.target.name} [{variants}] ({self.compilers[ext.name].label})"
        rest = dict.fromkeys((target.name for target in TARGETS if target.name not in built), "not asked for")
        rest |= missing
        reasons = "".join(f"; {name}: {reason}" for name, reason in rest.items())
        print(f"dcpkernels: built {', '.join(built.values()) or 'nothing'}{reasons}", flush=True)

    def build_extensions(self) -> None:
        # The steps of all targets in one heap, so that no processor waits at the end of each; those of GPUs first, which
        # take longest. What two targets share is made once.
        plans = [(ext, *self.plan(ext)) for ext in reversed(self.extensions)]
        self.run_all(list({steps[-1].output: steps for _, chains, _ in plans for steps in chains}.values()))
        for ext, _, link in plans:
            self.run_in_order([link])
            place(link.output, Path(self.get_ext_fullpath(ext.name)))

    def copy_extensions_to_source(self) -> None:
        # Called for --inplace and for editable installs; get_ext_fullpath then means the source folder.
        for ext in self.extensions:
            place(self.module_file(ext), Path(self.get_ext_fullpath(ext.name)))

    def module_file(self, ext: Extension) -> Path:
        filename = self.get_ext_filename(self.get_ext_fullname(ext.name))
        return Path(self.build_temp, ext.target.name, Path(filename).name)

    def plan(self, ext: Extension) -> tuple[list[list[Step]], Step]:
        """Chains of steps that build on each other, to an object each; and the step that links these."""
        target, compiler, host = ext.target, self.compilers[ext.name], find_cxx()
        more = [f"-D{name}={value}" for name, value in self.define or ()]
        cxxflags = shlex.split(self.cxxflags)
        is_strict = os.environ.get("DCPKERNELS_WERROR") == "1"
        common = ["-Icsrc", f"-DDCP_TARGET_{target.name.upper()}", *(target.strict if is_strict else ())]
        if target.compiler is find_cxx:
            more += cxxflags
        folder = Path(self.build_temp, target.name)
        asked = self.variants.split(",") if self.variants else [variant.name for variant in target.variants]
        variants = [variant for variant in target.variants if variant.name in asked]

        chains = []
        for source in target.sources(target.ops):
            for variant in variants:
                flags = [*common, *target.flags, *variant.flags, f"-DDCP_NS={variant.name}", *more]
                output = folder / variant.name / (Path(source).name + ".o")
                title = f"compile {source} [{variant.name}]"
                chains.append(target.compile(compiler, flags, source, output, title))

        # What bindings do with control words, a host does: in the words of the CPU target.
        common = ["-Icsrc", "-DDCP_TARGET_CPU", "-DDCP_NS=host", *(["-Werror"] if is_strict else [])]
        # A source gets what it speaks of, and those that speak of nothing have one object for all targets.
        own = {
            "DCP_BUILD_ID": [f'-DDCP_BUILD_ID="{build_id(target, more)}"'],
            "DCP_MODULE": [f"-DDCP_MODULE=_C_{target.name}"],
            "DCP_SANITIZERS": [f'-DDCP_SANITIZERS="{",".join(sanitizers())}"'],
            "host/dispatch.h": ["-DDCP_VARIANTS(X)=" + " ".join(f"X({variant.name})" for variant in variants)],
        }
        for source in target.sources(target.bindings):
            text = Path(source).read_text()
            mine = [flag for name, flags in own.items() if name in text for flag in flags]
            flags = [*COMMON_FLAGS, *HOST_FLAGS, *common, *mine, *more, *python_includes()]
            output = (folder if mine else folder.parent) / "bindings" / (Path(source).name + ".o")
            chains.append(one_step(host, flags, source, output, f"compile {source}"))

        objects = [steps[-1].output for steps in chains]
        command = [*host.command, "-shared", "-pthread", *cxxflags, *map(str, objects), *target.libraries(compiler)]
        return chains, Step(f"link _C_{target.name}", command, self.module_file(ext), host, inputs=objects)

    def run_all(self, chains: list[list[Step]]) -> None:
        jobs = self.parallel or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(max(1, min(jobs, len(chains)))) as pool:
            for result in [pool.submit(self.run_in_order, steps) for steps in chains]:
                result.result()

    def run_in_order(self, steps: list[Step]) -> None:
        for step in steps:
            if self.force or not step.is_fresh():
                step.run()


def python_includes() -> list[str]:
    """As system folders: their warnings are not ours to mend."""
    try:
        import pybind11
    except ImportError:
        raise PlatformError("pybind11 is missing (pip install pybind11, or let pip build)") from None
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        raise PlatformError(f"no Python.h in {include} (install python3-dev, on Fedora python3-devel)")
    return ["-isystem", pybind11.get_include(), "-isystem", include]


def extension(target: Target) -> Extension:
    sources = target.sources(target.ops) + target.sources(target.bindings)
    ext = Extension(f"dcpkernels._C_{target.name}", sources)
    ext.target = target
    return ext


setup(ext_modules=[extension(target) for target in selected_targets()], cmdclass={"build_ext": BuildTargets})
