"""Rows of `dcpkernels bench` as tables for people: one for each op, made of the rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# What may be swept over besides ranks and sizes, with the heading of its column.
_SWEPT = {"mode": "mode", "dtype": "dtype", "wire": "wire", "packet_bytes": "packet", "zero_copy": "zero copy",
          "skew_us": "skew us"}  # fmt: skip
_SIZES = {"num_tokens": "tokens", "num_rows": "rows"}
_ERRORS = {"max_err_over_bound": "err / bound", "wrong_bytes": "wrong bytes"}


class RowTable(NamedTuple):
    op: str
    columns: list[str]
    lines: list[list[str]]


def tables_of(rows: Sequence[dict[str, Any]]) -> list[RowTable]:
    """One for each op, in the order of their first rows."""
    return [_table_of(op, [row for row in rows if row["op"] == op]) for op in dict.fromkeys(row["op"] for row in rows)]


def _table_of(op: str, rows: Sequence[dict[str, Any]]) -> RowTable:
    """What is the same in all rows has no column."""
    first = rows[0]
    size = next(name for name in _SIZES if name in first)
    error = next(name for name in _ERRORS if name in first)
    swept = [name for name in _SWEPT if len({row.get(name) for row in rows}) > 1]
    baselines = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    columns = ["ranks", _SIZES[size], *(_SWEPT[name] for name in swept)]
    columns += ["median us", "p99 us", "MiB moved", "floor us", "% of floor", _ERRORS[error]]
    for name in baselines:
        columns += [f"{name} median us", f"{name} p99 us", "speedup"]
    lines = []
    for row in rows:
        line = [str(row["num_ranks"]), f"{row[size]:,}", *(_value(row.get(name)) for name in swept)]
        line += [
            f"{row['median_us']:,.1f}",
            f"{row['p99_us']:,.1f}",
            f"{row['bytes'] / 2**20:.3f}",
            f"{row['floor_us']:,.1f}",
            "-" if row["pct_of_floor"] is None else f"{row['pct_of_floor']:.0f}",
            _value(row[error]),
        ]
        for name in baselines:
            line += _baseline_cells(row, name)
        lines.append(line)
    return RowTable(op, columns, lines)


def _baseline_cells(row: dict[str, Any], name: str) -> list[str]:
    entry = row["baselines"].get(name)
    if entry is None:
        return ["-", "-", "-"]
    return [
        f"{entry['median_us']:,.1f}",
        f"{entry['p99_us']:,.1f}",
        f"{entry['median_us'] / row['median_us']:.1f}x",
    ]


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
