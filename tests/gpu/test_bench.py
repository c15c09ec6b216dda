"""`dcpkernels bench --device cuda` on real GPUs: rows of one GPU, and of all that there are, with what they are held against.
No time is asserted. Nobody has run this yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcpkernels.cli import main

pytestmark = pytest.mark.gpu
FEW = ["--device", "cuda", "--iters", "20", "--warmup", "1"]


def rows_of(folder: Path, *args: str) -> list[dict[str, Any]]:
    out = folder / "rows.json"
    assert main(["bench", *args, *FEW, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    for row in rows:
        print(json.dumps(row))
        assert row["device"] == "cuda" and row["machine"]["gpu"] and 0 < row["median_us"] <= row["p99_us"]
        assert 0 < row["host_us"] and (row["floor_us"] > 0) == (row["bytes"] > 0)
    return rows


def test_rows_of_one_gpu(one_gpu: None, tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, "a2a_lse_reduce", "--ranks", "1", "--tokens", "1,64", "--mode", "eager,graph", "--baselines", "nccl"
    )
    assert [(row["mode"], row["num_tokens"], row["calls_per_sample"]) for row in rows] == [
        ("eager", 1, 1), ("eager", 64, 1), ("graph", 1, 50), ("graph", 64, 50),
    ]  # fmt: skip
    assert all(row["baselines"]["nccl"]["median_us"] > 0 for row in rows)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_gathers_of_one_gpu(one_gpu: None, mode: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "query_gather", "--ranks", "1", "--tokens", "8", "--mode", mode, "--baselines", "none")
    if mode == "eager":
        rows += rows_of(tmp_path, "kv_gather", "--ranks", "1", "--rows", "8192", "--baselines", "none")
    assert all(row["wrong_bytes"] == 0 and row["bytes"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["a2a_lse_reduce", "query_gather", "kv_gather"])
def test_rows_of_all_gpus(num_gpus: int, op: str, tmp_path: Path) -> None:
    num_ranks = max(n for n in (2, 3, 4, 6, 8) if n <= num_gpus)
    modes = "eager" if op == "kv_gather" else "eager,graph"
    rows = rows_of(tmp_path, op, "--ranks", f"2,{num_ranks}", "--mode", modes, "--baselines", "nccl,symm_mem")
    assert all(set(row["baselines"]) == {"nccl", "symm_mem"} for row in rows)


def test_late_ranks(num_gpus: int, tmp_path: Path) -> None:
    args = ["a2a_lse_reduce", "--ranks", "2", "--tokens", "8", "--mode", "eager,graph", "--skew-us", "0,50"]
    rows = rows_of(tmp_path, *args)
    assert [row["timed_from"] for row in rows] == ["own entry", "last entry"] * 2
