"""Rows as a run of the bench leaves them, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MACHINE = {"cpu": "A processor", "cpus": 2, "system": "Linux x86_64", "python": "3.11.1", "torch": "2.13.0",
           "dcpkernels": "0.1.0"}  # fmt: skip
WHERE = "A processor, 2 CPUs, Linux x86_64"
ABOUT = "query_gather: 96 heads"


def timed(median_us: float, spread: float = 1.1) -> dict[str, float]:
    return {"median_us": median_us, "p99_us": median_us * spread}


def row_of(
    median_us: float = 10.0,
    *,
    op: str = "query_gather",
    num_ranks: int = 2,
    size: int = 8,
    spread: float = 1.1,
    peers: Mapping[str, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """`peers`: medians of baselines by name. `more` comes on top, also in place of keys; None takes one away."""
    peers = {"gloo": 120.0, "openmpi": 45.0} if peers is None else peers
    whole = [median for name, median in peers.items() if not name.endswith("-exchange")]
    row = {
        "op": op,
        "device": "cpu",
        "isa": "v4",
        "num_ranks": num_ranks,
        "num_rows" if op == "kv_gather" else "num_tokens": size,
        "num_heads": 96,
        "parts": [],
        "dtype": "bf16",
        "num_iters": 200,
        "calls_per_sample": 1,
        "samples_per_turn": 8,
        **timed(median_us, spread),
        "bytes": 1000 * size,
        "floor_us": 4.0,
        "pct_of_floor": 40.0,
        "wrong_bytes": 0.0,
        "baselines": {name: timed(median, spread) | {"wrong_bytes": 0.0} for name, median in peers.items()},
        "speedup": round(min(whole) / median_us, 2) if whole else None,
        "machine": dict(MACHINE),
    }
    return {key: value for key, value in (row | more).items() if value is not None or key == "speedup"}
