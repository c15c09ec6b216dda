"""A copy of this checkout whose module for CPUs is built under sanitizers, and a `python` that can import it.

The copy keeps the module of the checkout as it is. The launcher preloads the sanitizer's library into Python alone, and sets
all options itself: so every Python that a test starts by `sys.executable`, in whatever environment, is one that reports, and
no compiler or shell is. Reports are files, one a process: a rank that nobody looks at reports too.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Not part of a copy: what is built, environments, what is another tool's.
LEFT_OUT = shutil.ignore_patterns("build", ".venv*", ".git", "*.so", "__pycache__", ".*_cache", "*.egg-info", "dist")
# Deaths by SIGSEGV stay what they are: tests expect some, and see the others. A size that no memory holds is an error of
# Python's, as without. Leaks change no exit code: those of other libraries are many (see `Report.is_ours`).
ASAN = {
    "abort_on_error": 1,
    "exitcode": 0,
    "handle_segv": 0,
    "handle_sigbus": 0,
    "handle_sigfpe": 0,
    "allocator_may_return_null": 1,
    "detect_stack_use_after_return": 1,
    "strict_string_checks": 1,
}
UBSAN = {"print_stacktrace": 1, "halt_on_error": 1, "abort_on_error": 1}
# A rank is a fork of a process with threads. Python and torch are not instrumented: what they do inside libc's functions is
# no access of ours, while their locks are seen as locks.
TSAN = {
    "halt_on_error": 0,
    "exitcode": 0,
    "die_after_fork": 0,
    "allocator_may_return_null": 1,
    "ignore_noninstrumented_modules": 1,
    "report_signal_unsafe": 0,
    "handle_segv": 0,
    "history_size": 4,
}
BEGINS_REPORT = re.compile(
    r"==\d+==\s*(?:ERROR|FATAL): (?!LeakSanitizer: detected)|(?:WARNING|FATAL): ThreadSanitizer"
    r"|(?:Direct|Indirect) leak of|\S+: runtime error: "
)
# What `allocator_may_return_null` says instead of an error.
NO_REPORT = re.compile(
    r"^==\d+==WARNING: (?:Address|Thread)Sanitizer failed to allocate 0x[0-9a-f]+ bytes$\n?", re.MULTILINE
)
NOT_DONE = 124  # as of timeout(1)
OURS = re.compile(r"\bcsrc/|/tests/sanitizers/|/_C_\w+\.|\bdcp::")


@dataclass(frozen=True)
class Report:
    text: str

    @property
    def is_leak(self) -> bool:
        return bool(re.match(r"(Direct|Indirect) leak of", self.text))

    @property
    def is_ours(self) -> bool:
        """Of a leak, only a stack tells: Python and torch leave much behind when they end. All else is an error."""
        return not self.is_leak or bool(OURS.search(self.text))


def split_reports(text: str) -> list[Report]:
    lines = text.splitlines()
    begins = [i for i, line in enumerate(lines) if BEGINS_REPORT.match(line.strip())]
    ends = [*begins[1:], len(lines)] if begins else []
    return [Report("\n".join(lines[begin:end]).strip()) for begin, end in zip(begins, ends, strict=True)]


def libraries(sanitizers: str, cxx: str = "") -> list[str]:
    """Paths of the run-time libraries, in the order of their loading."""
    cxx = cxx or os.environ.get("DCPKERNELS_CXX") or os.environ.get("CXX") or "g++"
    short = {"address": "asan", "undefined": "ubsan", "thread": "tsan"}
    names = [f"lib{short[name]}.so" for name in sorted(sanitizers.split(","))]
    asked = [[*shlex.split(cxx), f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in asked]
    missing = [path for path in found if not Path(path).is_absolute()]
    if missing:
        raise FileNotFoundError(f"{cxx} has no {' and no '.join(missing)}")
    return found


def build(sanitizers: str, variants: str = "") -> Path:
    """The folder of a built module, build/sanitize-<sanitizers>[-<variants>]; nothing is compiled that is fresh."""
    folder = ROOT / "build" / "-".join(["sanitize", *sorted(sanitizers.split(",")), *variants.split(",")]).rstrip("-")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "temp"), *(["--variants", variants] if variants else [])]
    env = {**os.environ, "DCPKERNELS_SANITIZE": sanitizers, "DCPKERNELS_TARGETS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed\n{done.stdout[-6000:]}")
    return folder


@dataclass
class Tree:
    """The copy and its launcher."""

    folder: Path
    sanitizers: str

    @classmethod
    def make(cls, folder: Path, sanitizers: str, *, leaks: bool = False) -> Tree:
        tree = cls(folder, sanitizers)
        shutil.copytree(ROOT, tree.root, ignore=LEFT_OUT, symlinks=True, dirs_exist_ok=True)
        tree.logs.mkdir(exist_ok=True)
        tree.write_launcher(leaks)
        return tree

    def add_module(self, variants: str = "") -> None:
        for module in (build(self.sanitizers, variants) / "dcpkernels").glob("_C_cpu.*"):
            shutil.copy2(module, self.root / "dcpkernels")

    @property
    def root(self) -> Path:
        return self.folder / "tree"

    @property
    def logs(self) -> Path:
        return self.folder / "reports"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def write_launcher(self, leaks: bool) -> None:
        def options(prefix: str, values: dict[str, int], suppressions: str = "") -> str:
            text = ":".join(f"{name}={value}" for name, value in values.items())
            text += f":suppressions='{HERE / suppressions}'" if suppressions else ""
            return f"{text}:log_path='{self.logs / prefix}'"  # which may have a comma in it

        first = self.folder / "first"  # on the path
        env = {
            "ASAN_OPTIONS": options("asan", {**ASAN, "detect_leaks": int(leaks)}),
            "UBSAN_OPTIONS": options("ubsan", UBSAN),
            "TSAN_OPTIONS": options("tsan", TSAN, "tsan.supp"),
            "LSAN_OPTIONS": "print_suppressions=0",
        }
        # Objects that only Python's own arenas point to would look lost: to LeakSanitizer these are no memory of interest.
        env |= {"PYTHONMALLOC": "malloc"} if leaks else {}
        # UCX (of Open MPI) puts a lock into madvise, which a thread calls once more when ThreadSanitizer has forgotten it.
        env |= {"UCX_MEM_EVENTS": "no"} if "thread" in self.sanitizers else {}
        words = shlex.join(f"{name}={value}" for name, value in env.items())

        def before(name: str, *values: str) -> str:
            """`values` and then what the variable has: the tests have libraries and modules of their own."""
            return f'{name}={shlex.quote(":".join(values))}"${{{name}:+:${name}}}"'

        more = f"{before('LD_PRELOAD', *libraries(self.sanitizers))} {before('PYTHONPATH', str(first), str(self.root))}"
        # Where addresses are too random, ThreadSanitizer does not start.
        fixed = f"{shutil.which('setarch')} -R " if "thread" in self.sanitizers and can_fix_addresses() else ""
        start = f"exec {fixed}{shutil.which('env')} {words} {more}"  # by whole paths: a test may have no PATH
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.write_text(f'#!/bin/sh\n{start} {shlex.quote(sys.executable)} "$@"\n')
        self.python.chmod(0o755)
        first.mkdir(exist_ok=True)
        lines = [
            "import ctypes, os, sys",
            "# What this process starts is not to be preloaded, unless it is Python, by the launcher.",
            "os.environ.pop('LD_PRELOAD', None)",
            f"sys.executable = {str(self.python)!r}",
        ]
        if "undefined" in self.sanitizers:
            # Beside AddressSanitizer's library, that of UBSan sets the other one's path, and its own reports go to stderr.
            (library,) = [path for path in libraries(self.sanitizers) if "ubsan" in path]
            report_path = str(self.logs / "ubsan").encode()
            lines.append(f"ctypes.CDLL({library!r}).__sanitizer_set_report_path({report_path!r})")
        (first / "sitecustomize.py").write_text("\n".join(lines) + "\n")

    def run(self, *arguments: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
        """Python under the sanitizers, in the root of the copy. What is not done in time ends by NOT_DONE, with all that it
        has started, and with what it had said."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=self.root,
                env={**os.environ, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = NOT_DONE
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return subprocess.CompletedProcess(process.args, code, output.read().decode(errors="replace"))

    def reports(self) -> list[Report]:
        """Of all processes so far. A report file that cannot be read apart is one report."""
        found: list[Report] = []
        for path in sorted(self.logs.iterdir()):
            text = NO_REPORT.sub("", path.read_text(errors="replace"))
            found += split_reports(text) or ([Report(text)] if text.strip() else [])
        return found

    def forget_reports(self) -> None:
        for path in self.logs.iterdir():
            path.unlink()


def can_fix_addresses() -> bool:
    if not shutil.which("setarch"):
        return False
    return subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False).returncode == 0
