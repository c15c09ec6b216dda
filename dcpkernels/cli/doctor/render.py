"""What the doctor has found, as lines for people and as an object for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcpkernels import __version__
from dcpkernels.cli import table
from dcpkernels.cli.doctor.check import FAIL, OK, WARN, Result


def exit_code(results: Sequence[Result]) -> int:
    return int(any(result.status == FAIL for result in results))


def text(
    labels: Mapping[str, str],
    states: Mapping[str, tuple[bool, str]],
    results: Sequence[Result],
    peers: Mapping[str, Sequence[Sequence[str]]],
) -> str:
    """`labels` and `states` by target; `peers`: the matrix of each target that has devices."""
    head = " ".join(f"{labels[target]} target: {state}." for target, (_, state) in states.items())
    lines = [head, "", *map(line, results)]
    for target, matrix in peers.items():
        columns = ["", *map(str, range(len(matrix)))]
        rows = [[str(i), *row] for i, row in enumerate(matrix)]
        lines += ["", f"{labels[target]} devices, from row to column (--: cannot reach)", table.plain(columns, rows)]
    return "\n".join([*lines, "", summary(results)])


def line(result: Result) -> str:
    fix = f" -> {result.fix}" if result.fix else ""
    return f"{result.status:<4}  {result.name}: {result.text}{fix}"


def summary(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in (OK, WARN, FAIL)}
    listed = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{listed}: exit code {exit_code(results)}"


def as_object(
    states: Mapping[str, tuple[bool, str]],
    results: Sequence[Result],
    peers: Mapping[str, Sequence[Sequence[str]]],
) -> dict[str, Any]:
    return {
        "dcpkernels": __version__,
        "targets": {target: {"ready": is_ready, "text": state} for target, (is_ready, state) in states.items()},
        "checks": [result._asdict() for result in results],
        "peers": {target: [list(row) for row in matrix] for target, matrix in peers.items()},
        "exit_code": exit_code(results),
    }
