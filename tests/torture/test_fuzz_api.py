"""Calls of the whole public API with one to three arguments broken, in processes of their own. Each call is right after all,
or is refused by a typed error in the documented form, before a byte of any tensor, of the workspace or its state has changed;
and the workspace goes on working. No process ends by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT, LONG = 2_000, 40_000  # tries of a part
PARTS = 5
BATCH = 10_000  # tries of one process
MAX_CRASHES = 5


def run_batch(first: int, count: int, file: Path, timeout_s: float) -> tuple[dict | None, str]:
    """(what the process says, or None where it ended otherwise; how it ended)."""
    file.write_bytes(b" " * 12)
    command = [sys.executable, "-m", "tests.torture.fuzz_worker", str(first), str(count), str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, errors="replace"
        )
    except subprocess.TimeoutExpired as expired:
        return None, f"still running after {timeout_s:g} s; {expired.stderr}"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return None, f"{how}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_broken_calls(part, torture, tmp_path, capsys):
    first = part * LONG
    end = first + (LONG if torture else SHORT)
    counts, problems, crashes, start = Counter(), [], [], time.monotonic()
    file, tries = tmp_path / "try", end - first
    while first < end and len(crashes) < MAX_CRASHES and not problems:
        count = min(BATCH, end - first)
        report, how = run_batch(first, count, file, timeout_s=600 if torture else 120)
        if report is None:
            number = file.read_text().strip()
            crashes.append(f"try {number}: {how}")
            first = int(number or first) + 1
            continue
        counts.update(report["counts"])
        problems += report["problems"]
        first += count
    assert not crashes, "\n\n".join(crashes)
    assert not problems, "\n\n".join(problems)
    assert counts["refused"] > tries / 2 and counts["taken"] > tries / 20, counts
    with capsys.disabled():
        text = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        print(f"\n[{tries} broken calls in {time.monotonic() - start:.0f} s: {text}]")
