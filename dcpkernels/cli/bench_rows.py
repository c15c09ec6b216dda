"""Rows of the bench, as `--json` writes them: which of their keys say what was measured, and which what came out.

A row may come from an older or a newer bench: keys may be missing, and there may be others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpkernels.errors import DcpInvalidArgument

Row = Mapping[str, Any]

SIZES = {"num_tokens": "tokens", "num_rows": "rows"}  # a call's size, by op; in words
# What came out, or follows from what was asked for.
RESULTS = frozenset(
    {
        "median_us",
        "p99_us",
        "iqr_us",
        "bytes",
        "floor_us",
        "pct_of_floor",
        "baselines",
        "speedup",
        "timed_from",
        "host_us",
    }
    | {"max_err_over_bound", "wrong_bytes"}
)
# Who measured, and for how long: not another case, but to be told when it differs.
CIRCUMSTANCES = frozenset({"machine", "isa", "num_iters", "warmup_turns", "seed"})
# What rows of a bench that did not have the key yet were.
DEFAULTS: Row = {
    "device": "cpu",
    "wire": "auto",
    "packet_bytes": None,
    "zero_copy": False,
    "skew_us": 0.0,
    "mode": "eager",
    "calls_per_sample": 1,
}
_MOST = 1e15  # of a time in us or a number of samples: 30 years; ratios and logarithms of more may be no numbers
_REQUIRED = ("op", "num_ranks", "median_us", "p99_us")


def parameters(rows: Iterable[Row]) -> list[str]:
    """Keys that say what was measured, in the order in which they appear.

    Of keys that are not known, those with fractions or objects are taken for results: a new result is no new case.
    """
    found: dict[str, bool] = {}
    for row in rows:
        for key, value in row.items():
            is_result = key in RESULTS or (isinstance(value, (float, dict)) and key not in DEFAULTS)
            found[key] = found.get(key, True) and not is_result and key not in CIRCUMSTANCES
    return [key for key, is_parameter in found.items() if is_parameter]


def value_of(row: Row, key: str) -> Any:
    """Of a parameter, such that it can be compared and looked up."""
    if key == "packet_bytes" and key not in row and row.get("wire") == "packet":
        return 8
    return _frozen(row.get(key, DEFAULTS.get(key)))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def size_key(row: Row) -> str | None:
    return next((key for key in SIZES if key in row), None)


def in_words(key: str, value: Any) -> str:
    """For example "2 ranks"; nothing for what does not apply."""
    if value is None or value is False or value == () or (key == "skew_us" and not value):
        return ""
    if value is True:
        return key.replace("_", " ")
    if key in ("op", "device", "dtype", "mode"):
        return str(value)
    if isinstance(value, tuple):
        return f"{key} {'+'.join(map(str, value))}"
    text = f"{value:,g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    if key in SIZES or key in ("num_ranks", "num_heads"):
        return f"{text} {SIZES.get(key, key.removeprefix('num_'))}"
    if key.endswith("_us"):
        return f"{key.removesuffix('_us')} {text} us"
    return f"{key.replace('_', ' ')} {text}"


_MAX_CHARACTERS = 2**26  # some ten thousand rows


def varying(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    return [key for key in keys if len({value_of(row, key) for row in rows}) > 1]


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. Raises DcpInvalidArgument for one that is none of the bench's."""

    def wrong(must: str, got: str) -> DcpInvalidArgument:
        return DcpInvalidArgument(f"bench: {path} must {must} (got {got})")

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:  # /dev/zero has no end
            raise wrong(f"have at most {_MAX_CHARACTERS:,} characters", "more")
        rows = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise wrong("be a file that can be read", getattr(error, "strerror", None) or "other than UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise wrong("be JSON", str(error)) from None
    if not isinstance(rows, list):
        raise wrong("have a list of rows, as bench --json writes it", type(rows).__name__)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise wrong("have objects in its list", f"{type(row).__name__} at index {index}")
        for key in _REQUIRED:
            if key not in row:
                raise wrong(f"have {key} in every row", f"none at index {index}")
        if not isinstance(row["op"], str) or not isinstance(row["num_ranks"], int):
            raise wrong("have an op's name and a number of ranks in every row", f"others at index {index}")
        for key in ("floor_us", "num_iters", "samples_per_turn"):
            if row.get(key) and not _is_positive(row[key]):
                raise wrong(f"have a number for {key}", f"{row[key]!r} at index {index}")
        entries = row.get("baselines", {})
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise wrong("have baselines by name in every row", f"{entries!r} at index {index}")
        for where, entry in ((f"index {index}", row), *((f"index {index}, {name}", e) for name, e in entries.items())):
            for key in ("median_us", "p99_us"):
                if not _is_positive(entry.get(key)):
                    raise wrong(f"have a time above 0 for {key}", f"{entry.get(key)!r} at {where}")
            if entry.get("iqr_us") not in (None, 0) and not _is_positive(entry["iqr_us"]):
                raise wrong("have a time for iqr_us", f"{entry['iqr_us']!r} at {where}")
    return rows


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST
