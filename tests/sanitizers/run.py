"""Tests on a module under sanitizers; any report of it, from whatever process, is a failure.

    python -m tests.sanitizers.run address,undefined tests/test_faults.py -k late
    python -m tests.sanitizers.run thread --variants baseline tests/test_lanes.py

What follows the options goes to pytest, which runs in a copy of the checkout. The first run compiles the module.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.sanitizers.sanitized import Tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", help="address,undefined or thread or ..., as for DCPKERNELS_SANITIZE")
    parser.add_argument("--variants", default="", help="build these kernel variants only; the default is all")
    parser.add_argument("--leaks", action="store_true", help="look for leaks when pytest itself ends (with address)")
    parser.add_argument("--timeout-s", type=float, default=6 * 3600.0)
    arguments, for_pytest = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="dcpkernels-sanitized-"))
    start = time.monotonic()
    try:
        tree = Tree.make(folder, arguments.sanitizers, leaks=arguments.leaks)
        tree.add_module(arguments.variants)
        print(f"built in {time.monotonic() - start:.0f} s", flush=True)
        outcome = run_tests(tree, *for_pytest, timeout_s=arguments.timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(outcome)
    return int(bool(outcome))


def run_tests(tree: Tree, *for_pytest: str, timeout_s: float, **env: str) -> str:
    """ "", or what was wrong: reports first, for a failed test is often one more consequence of them."""
    done = tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *for_pytest, timeout_s=timeout_s, **env)
    reports = [report.text for report in tree.reports() if report.is_ours]
    faults = [f"{len(reports)} reports", *[text[:4000] for text in reports[:20]]] if reports else []
    if done.returncode != 0:
        faults.append(f"pytest ended by {done.returncode}\n{done.stdout[-8000:]}")
    return "\n\n".join(faults)


if __name__ == "__main__":
    sys.exit(main())
