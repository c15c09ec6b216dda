"""The tests of the CPU target on a module under sanitizers, file by file: each is a pytest of its own, with a time limit.

    python -m tests.sanitizers.suite address,undefined --variants baseline --record out.jsonl
    python -m tests.sanitizers.suite thread --record out.jsonl tests/test_lanes.py tests/kimi_k3

A line of the record is one file. What has a line in it is not run again: so a run that was stopped goes on. Exit code 1:
a report, a failed test, or a file that was not done in time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.sanitizers.run import Outcome, run_tests
from tests.sanitizers.sanitized import ROOT, Tree

# What a run under sanitizers says nothing about, or what cannot be true there.
LEFT_OUT = {
    "tests/test_packaging.py": "builds of small projects, and instructions of the module as it is shipped",
    "tests/test_packaging_gpu.py": "the same for GPUs",
    "tests/test_overhead.py": "how long a call takes",
    "tests/test_a2a_memory.py::test_no_copy_of_a_strided_input": "resident memory, to which a sanitizer adds its own",
    "tests/test_kv_gather_memory.py::test_no_temporary_where_the_reader_dequantises": "the same: AddressSanitizer adds 1/8",
    "tests/torture/test_faults_system.py::test_a_small_cgroup_of_one_rank": "4 MiB for a rank: a sanitizer takes more",
}
# Of what is about GPUs only that which runs the kernels of the CPU. No use of the module: models (tests/protocol), what
# compiles programs of its own (tests/core, under sanitizers of their own; tests/explorer), and instructions (tests/isa).
PLACES = (
    "tests",
    "tests/kimi_k3",
    "tests/torture",
    "tests/cuda/test_ops_on_cuda_heap.py",
    "tests/hip/test_ops_on_hip_heap.py",
)
LIMIT_S = 3600.0


def files_of(path: str) -> list[str]:
    """`path` itself, or the test files of that folder, without those of which nothing runs here."""
    whole = ROOT / path
    found = sorted(whole.glob("test_*.py")) if whole.is_dir() else [whole]
    return [name for file in found if (name := file.relative_to(ROOT).as_posix()) not in LEFT_OUT]


def whole_suite() -> list[str]:
    return [file for place in PLACES for file in files_of(place)]


def run_file(tree: Tree, file: str, *more: str, timeout_s: float = LIMIT_S) -> Outcome:
    left_out = [word for name in LEFT_OUT for word in ("--deselect", name)]
    return run_tests(tree, "-m", "not gpu", file, *left_out, *more, timeout_s=timeout_s)


def recorded(record: Path | None, key: dict[str, str]) -> set[str]:
    lines = record.read_text().splitlines() if record and record.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["file"] for row in rows if all(row[name] == value for name, value in key.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", help="address,undefined or thread or ..., as for DCPKERNELS_SANITIZE")
    parser.add_argument("paths", nargs="*", help="test files, or folders of them; the default is the whole suite")
    parser.add_argument("--variants", default="", help="build these kernel variants only; the default is all")
    parser.add_argument("--record", type=Path, help="a file to which each file adds a line of JSON")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each file")
    arguments = parser.parse_intermixed_args()  # paths may come last
    # A shell has what it starts in the background ignore Ctrl-C, and all tests would inherit that: some send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    files = [file for path in arguments.paths for file in files_of(path)] or whole_suite()
    key = {"sanitizers": arguments.sanitizers, "variants": arguments.variants}
    done, bad = recorded(arguments.record, key), 0
    folder = Path(tempfile.mkdtemp(prefix="dcpkernels-sanitized-"))
    try:
        tree = Tree.make(folder, arguments.sanitizers)
        tree.add_module(arguments.variants)
        for file in files:
            if file in done:
                continue
            outcome = run_file(tree, file, timeout_s=arguments.limit_s)
            bad += bool(outcome.fault)
            print(f"{file}: {outcome}", flush=True)
            if arguments.record:
                with arguments.record.open("a") as out:
                    out.write(json.dumps({**key, "file": file, **outcome.row()}) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
