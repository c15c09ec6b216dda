"""All that one GPU can show, in one run: python3 tests/gpu/one_card.py [--json FILE]. Needs python3 with torch, numpy
and pybind11, nvcc and a C++ compiler; no installed dcpkernels, no network.

Compiles csrc's kernels with a small harness (tests/gpu/card) in which W virtual ranks are regions of one device.
Sections run in a child process: one that crashes or hangs ends that child, is recorded, and the next child goes on
behind it. The JSON is written after every section. Exit code 0: all passed. 1: something failed. 2: there is no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# name -> seconds after which it is ended. In the order of what is worth most, should time run out.
SECTIONS = {
    "build": 240,
    "facts": 30,
    "streams": 90,
    "one_grid": 60,
    "replay": 60,
    "latency": 100,
    "merge_bandwidth": 40,
    "public": 90,
    "pattern": 90,
    "sanitizers": 130,
}
LOST_DEVICE = 3  # exit code of a child whose section ended, and for which the device is lost: the next one has it again
# Kernels of different ranks run at the same time only when each stream has a queue of its own, and when no kernel has
# to be loaded, which may wait for the device, while others wait for it.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", "GPU_MAX_HW_QUEUES": "32"}


def main() -> int:
    args = arguments()
    if args.sanitize_child:
        return sanitize_child(args)
    if args.sections:
        return run_sections(args)
    return supervise(args)


def arguments() -> argparse.Namespace:
    out = os.environ.get("OUT")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path(out or ".", "one_card.json"))
    parser.add_argument("--limit-s", type=float, default=420, help="the whole run ends then (420)")
    parser.add_argument("--pattern-s", type=float, default=60, help="of the pattern test (60)")
    parser.add_argument("--only", default="", help="sections, a,b,...; build is always made")
    parser.add_argument("--arch", default="90a", help="of the card: 90a, 100a, ...")
    parser.add_argument("--build-dir", type=Path, help="where the module is built, or lies already")
    parser.add_argument(
        "--dry-run", action="store_true", help="no device: ranks are threads of the host, cases are few"
    )
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--sections", default="", help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--sanitize-child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the supervisor: it never touches the device


class Report:
    """The JSON. Only one process writes at a time: the supervisor while there is no child."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"passed": False, "running": None, "sections": {}}
        with contextlib.suppress(OSError, ValueError):
            self.data = json.loads(path.read_text())

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(self.path.name + ".new")
        draft.write_text(json.dumps(self.data, indent=1, default=str))
        draft.replace(self.path)

    def start(self, section: str) -> None:
        self.data["running"] = {"section": section, "since": time.time()}
        self.write()

    def end(self, section: str, result: dict[str, Any], seconds: float) -> None:
        self.data["sections"][section] = {"passed": False, "seconds": round(seconds, 2), **result}
        self.data["running"] = None
        self.write()


def has_device() -> str:
    """ "" or why there is none. Not by torch: this process shall hold nothing of the device, and start at once."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no device: there is no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "no device: the CUDA driver finds none"
    return ""


def supervise(args: argparse.Namespace) -> int:
    args.json.unlink(missing_ok=True)
    report = Report(args.json)
    reason = "" if args.dry_run else has_device()
    if reason:
        report.data["error"] = reason
        report.write()
        print(f"one_card: {reason}")
        return 2
    start = time.monotonic()
    names = [name for name in SECTIONS if not args.only or name in ("build", *args.only.split(","))]
    if args.dry_run:
        names = [name for name in names if name not in ("facts", "one_grid", "public", "sanitizers")]
    with tempfile.TemporaryDirectory() as folder:
        build_dir = args.build_dir or Path(folder)
        left = names
        while left:
            run_child(args, report, left, build_dir, start)
            left = [name for name in left if name not in report.data["sections"]]
            if report.data["sections"].get("build", {}).get("passed") is False:
                break
    report.data["seconds"] = round(time.monotonic() - start, 1)
    sections = report.data["sections"]
    report.data["passed"] = bool(sections) and all(sections.get(name, {}).get("passed") for name in names)
    report.write()
    for name in names:
        print(line_of(name, sections.get(name)))
    print(f"one_card: {'passed' if report.data['passed'] else 'FAILED'} in {report.data['seconds']} s, {args.json}")
    return 0 if report.data["passed"] else 1


def line_of(name: str, section: dict[str, Any] | None) -> str:
    if section is None:
        return f"{name:16} not run"
    word = "skipped" if section.get("skipped") else "passed" if section["passed"] else "FAILED"
    details = {
        key: value for key, value in section.items() if isinstance(value, (int, float, str)) and key != "traceback"
    }
    return f"{name:16} {word:8} {json.dumps(details)[:300]}"


def run_child(args: argparse.Namespace, report: Report, names: list[str], build_dir: Path, start: float) -> None:
    """Runs sections in a child until it ends, by itself or because its time is up. One more is in the report then."""
    command = [sys.executable, __file__, "--sections", ",".join(names), "--build-dir", str(build_dir),
               "--json", str(args.json), "--arch", args.arch, "--pattern-s", str(args.pattern_s)]  # fmt: skip
    command += ["--dry-run"] * args.dry_run + ["--quick"] * args.quick
    log = build_dir / "child.log"
    build_dir.mkdir(parents=True, exist_ok=True)
    report.data["running"] = None
    report.write()
    with log.open("w") as output:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        why = ""
        while child.poll() is None and not why:
            time.sleep(0.1)
            running = Report(args.json).data["running"]
            if time.monotonic() - start > args.limit_s:
                why = f"the limit of {args.limit_s:g} s for all sections was over"
            elif running and time.time() - running["since"] > SECTIONS[running["section"]]:
                why = f"it took more than {SECTIONS[running['section']]} s"
        if child.poll() is None:
            child.kill()
        code = child.wait()
    report.data = Report(args.json).data
    text = log.read_text()[-4000:]
    print(text)
    running = report.data["running"]
    left = [name for name in names if name not in report.data["sections"]]
    if running:
        seconds = time.time() - running["since"]
        report.end(running["section"], {"error": why or f"the process ended with {code}", "output": text}, seconds)
        left.remove(running["section"])
    elif left and not why and code != LOST_DEVICE:
        report.end(left.pop(0), {"error": f"the process ended with {code} before it", "output": text}, 0)
    if why.startswith("the limit"):
        for name in left:
            report.end(name, {"error": f"not run: {why}"}, 0)


# -- a child


def import_card() -> types.ModuleType:
    """tests.gpu.card. `tests` has no __init__.py, and a package of that name elsewhere would be found instead of it."""
    sys.path.insert(0, str(ROOT))
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
    from tests.gpu.card import build as card

    return card


def run_sections(args: argparse.Namespace) -> int:
    report, names = Report(args.json), args.sections.split(",")
    for name in names:
        report.start(name)
        start = time.monotonic()
        fatal = False
        try:
            result = body_of(name)(args)
        except Exception as error:  # noqa: BLE001  it is in the report, and the next section goes on
            result = {
                "error": f"{type(error).__name__}: {str(error)[:2000]}",
                "traceback": traceback.format_exc()[-4000:],
            }
            fatal = name != "build" and is_fatal(error)
        report.end(name, result, time.monotonic() - start)
        print(line_of(name, report.data["sections"][name]), flush=True)
        if fatal:
            return LOST_DEVICE
    return 0


def is_fatal(error: Exception) -> bool:
    from tests.gpu.card.cases import is_fatal

    return is_fatal(error)


def body_of(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return {"build": build, "facts": facts, "sanitizers": sanitizers}.get(name) or (lambda args: on_card(name, args))


def target_of(args: argparse.Namespace) -> str:
    return "cpu" if args.dry_run else "cuda"


def build(args: argparse.Namespace) -> dict[str, Any]:
    card = import_card()
    log = ""
    if not card.module_file(args.build_dir, target_of(args)).exists():
        _, log = card.build(args.build_dir, target_of(args), args.arch)
    kernels = card.resources(log)
    package = build_package(args) if target_of(args) == "cuda" else "not needed"
    spilling = [name for name, use in kernels.items() if use["spills"] or use["stack"]]
    most = max((use["registers"] for use in kernels.values()), default=0)
    return {
        "passed": not spilling, "kernels": len(kernels), "most_registers": most, "spilling": spilling,
        "_C_cuda": package,
    }  # fmt: skip


def build_package(args: argparse.Namespace) -> str:
    """dcpkernels' own module, in place, where there is none. What becomes of it is for the section `public`."""
    if list((ROOT / "dcpkernels").glob("_C_cuda.*.so")):
        return "was there"
    environment = {**os.environ, "DCPKERNELS_TARGETS": "cuda", "DCPKERNELS_CUDA_ARCHS": args.arch}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        return "not built within 100 s"
    return "built" if done.returncode == 0 else f"not built: {(done.stdout + done.stderr)[-1000:]}"


def open_card(args: argparse.Namespace, device: str) -> Any:
    card = import_card()
    module = card.module_file(args.build_dir, target_of(args))
    from tests.gpu.card.cases import Card

    return Card(card.load(module), device, quick=args.quick or args.dry_run)


def on_card(name: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(8 if not args.dry_run else 1)
    card = open_card(args, "cpu" if args.dry_run else "cuda")
    card.num_sms = 8 if args.dry_run else torch.cuda.get_device_properties(0).multi_processor_count
    from tests.gpu.card import correct, pattern, replay, speed

    if name == "public":
        from tests.gpu.card import public

        return public.run(card)
    card.one_grid = name == "one_grid"
    card.seconds = {"pattern": args.pattern_s, "latency": 70}.get(name, 60)
    bodies = {
        "streams": correct.everything,
        "one_grid": correct.everything,
        "replay": replay.run,
        "latency": speed.latency,
        "merge_bandwidth": speed.merge_bandwidth,
        "pattern": pattern.run,
    }
    return bodies[name](card)


def facts(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,mig.mode.current"
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={asked}", "--format=csv,noheader"]
    shown = ""
    if shutil.which(query[0]):
        shown = subprocess.run(query, check=False, capture_output=True, text=True).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "passed": True, "name": properties.name, "sms": properties.multi_processor_count,
        "l2_MB": properties.L2_cache_size / 2**20, "GiB": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}", "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "nvidia_smi": dict(zip(asked.split(","), shown.split(", "), strict=False)),
        "devices": torch.cuda.device_count(),
    }  # fmt: skip


# -- memcheck and synccheck, which let one kernel run at a time: all ranks in one grid


def sanitizers(args: argparse.Namespace) -> dict[str, Any]:
    tool = shutil.which("compute-sanitizer") or next(
        (str(path) for path in Path("/usr/local/cuda").glob("**/compute-sanitizer") if os.access(path, os.X_OK)), ""
    )
    if not tool:
        return {"passed": True, "skipped": "compute-sanitizer: not on PATH, not below /usr/local/cuda"}
    results = {}
    for check in ("memcheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "77", "--print-limit", "5", sys.executable, __file__,
                   "--sanitize-child", "--build-dir", str(args.build_dir)]  # fmt: skip
        # Lazily: else every kernel of torch would be instrumented. No cache: each tensor has bounds of its own.
        changes = {"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        environment = {**os.environ, **ENVIRONMENT, **changes}
        start = time.monotonic()
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            code, text = -1, f"not done after 60 s\n{(late.stdout or b'').decode(errors='replace')}"
        passed = code == 0 and "ERROR SUMMARY: 0 errors" in text
        results[check] = {"passed": passed, "code": code, "seconds": round(time.monotonic() - start, 1),
                          "output": text[-2000:]}  # fmt: skip
    return {"passed": all(result["passed"] for result in results.values()), **results}


def sanitize_child(args: argparse.Namespace) -> int:
    # The tool ends what it started only when it ends itself; this makes sure of it.
    threading.Timer(55, os._exit, (9,)).start()
    card = open_card(args, "cuda")
    card.quick = card.one_grid = True
    card.timeout_s = 30.0
    from tests.gpu.card import correct

    result = correct.everything(card)
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    sys.exit(main())
