"""Tests on a module under sanitizers; any report of it, from whatever process, is a failure.

    python -m tests.sanitizers.run address,undefined tests/test_faults.py -k late
    python -m tests.sanitizers.run thread --variants baseline tests/test_lanes.py

What follows the options goes to pytest, which runs in a copy of the checkout. The first run compiles the module.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.sanitizers.sanitized import NOT_DONE, Tree

LAST_LINE = re.compile(r"\bin [0-9.]+s\b")  # of what pytest says
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed)")


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
    return int(bool(outcome.fault))


@dataclass(frozen=True)
class Outcome:
    """Of one pytest. `ended` is its exit code: 5 where no test was left, None where it was not done in time."""

    counts: dict[str, int]
    failed: list[str]
    reports: list[str]
    ended: int | None
    seconds: float
    output: str

    @property
    def fault(self) -> str:
        """ "", or what was wrong: reports first, for a failed test is often one more consequence of them."""
        faults = [f"{len(self.reports)} reports", *[text[:4000] for text in self.reports[:20]]] if self.reports else []
        if self.ended not in (0, 5):
            how = "was not done in time" if self.ended is None else f"ended by {self.ended}"
            faults.append(f"pytest {how}\n{self.output[-8000:]}")
        return "\n\n".join(faults)

    def row(self) -> dict[str, object]:
        return {**asdict(self), "seconds": round(self.seconds, 1), "output": self.output[-8000:] if self.fault else ""}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in self.counts.items()) or "no tests"
        return f"{counts}, {len(self.reports)} reports, {self.seconds:.0f} s" + (self.fault and f"\n{self.fault}")


def run_tests(tree: Tree, *for_pytest: str, timeout_s: float, **env: str) -> Outcome:
    tree.forget_reports()
    start = time.monotonic()
    done = tree.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *for_pytest, timeout_s=timeout_s, **env)
    lines = done.stdout.splitlines()
    last = next((line for line in reversed(lines) if LAST_LINE.search(line)), "")
    return Outcome(
        counts={what: int(count) for count, what in COUNT.findall(last)},
        failed=[line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))],
        reports=[report.text for report in tree.reports() if report.is_ours],
        ended=None if done.returncode == NOT_DONE else done.returncode,
        seconds=time.monotonic() - start,
        output=done.stdout,
    )


if __name__ == "__main__":
    sys.exit(main())
