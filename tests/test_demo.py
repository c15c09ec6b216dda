"""`dcpkernels demo`: what it measures is right, and what is wrong makes it fail. With a small layer of the same
shape."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcpkernels.cli import DEFAULT_PNG, context, demo, demo_check, main
from dcpkernels.cli.attention import attend_to_all
from dcpkernels.kimi_k3 import mla
from dcpkernels.kimi_k3.config import KimiK3Config

SMALL = KimiK3Config.tiny(hidden_size=256, kv_lora_rank=64, qk_rope_head_dim=16)
TINY = demo.DemoOptions(num_ranks=2, context=300, batch=3, iters=3, config=SMALL)
TINY_ARGS = ["--ranks", "2", "--context", "300", "--batch", "3", "--iters", "2"]


@pytest.fixture(scope="module")
def outcome() -> demo.Outcome:
    return demo.perform(TINY)


# -- the whole


def test_the_full_layer_passes_and_says_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "demo.json", tmp_path / "demo.png"
    assert main(["demo", *TINY_ARGS, "--json", str(out), "--png", str(png)]) == 0
    printed, progress = capsys.readouterr()
    # The rows but the newest: all on each of two ranks, and once over both.
    assert progress.splitlines() == [
        "caches of all ranks, rows: 945 of 945",
        "steps and collectives in turns, calls: 24 of 24",
    ]
    assert "PASS: one MLA layer of Kimi-K3 (232M parameters, bf16) on 2 ranks" in printed
    assert "attention section us" in printed and f"wrote {png}" in printed
    assert png.read_bytes().startswith(b"\x89PNG")

    report = json.loads(out.read_text())
    assert report["passed"] is True and report["isa"] in printed and report["device"] == "cpu"
    assert report["sequence_lengths"] == [300, 17, 1] and report["empty_rows"] == [0, 1]
    assert report["kv_bytes_per_rank"] == {"tp2": 318 * 576 * 2, "dcp2": 160 * 576 * 2}
    assert 0 < report["max_err_over_bound"] == max(report["row_err_over_bound"]) <= 1
    assert all(0 < error <= 1 for error in report["attention_error_over_tolerance"].values())
    for what, ratio in (("attention_us", "ratio"), ("step_us", "step_ratio")):
        assert report[ratio] == report[what]["tp2"] / report[what]["dcp2"] > 0
    for part in report["collectives"].values():
        assert 0 < part["us"] <= part["p99_us"] and part["share_of_step"] == part["us"] / report["step_us"]["dcp2"]
    assert list(report["collectives"]) == ["query_gather", "a2a_lse_reduce"]
    assert report["machine"]["torch"] == torch.__version__
    threads = report["threads_per_rank"]
    assert threads["tp2"] == threads["dcp2"] >= 1


def test_json_without_a_file_is_all_that_stdout_has(
    outcome: demo.Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "perform", lambda options: outcome)
    assert main(["demo", *TINY_ARGS, "--no-png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == outcome.report["ratio"]


def test_quick_is_a_shorter_context(monkeypatch: pytest.MonkeyPatch, outcome: demo.Outcome) -> None:
    asked = []
    monkeypatch.setattr(demo, "perform", lambda options: asked.append(options) or outcome)
    main(["demo", "--no-png"])
    main(["demo", "--quick", "--no-png"])
    main(["demo", "--quick", "--context", "77", "--iters", "5", "--no-png"])
    assert [(o.num_ranks, o.context, o.iters) for o in asked] == [(8, 120_000, 9), (8, 4096, 3), (8, 77, 5)]


def test_a_ratio_that_was_asked_for_is_held_against_the_result(tmp_path: Path) -> None:
    options = replace(TINY, iters=1, min_ratio=1e6)
    out = tmp_path / "demo.json"
    assert demo.run(options, json_path=out, png_path=None) == 1
    report = json.loads(out.read_text())
    assert report["passed"] is False and report["is_right"] is True and report["max_err_over_bound"] <= 1


def test_it_fails_when_attention_returns_another_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "demo.json", tmp_path / "demo.png"
    assert demo.run(replace(TINY, iters=1, lse_base="2"), json_path=out, png_path=png) == 1
    assert "FAIL" in capsys.readouterr().out and png.exists()
    report = json.loads(out.read_text())
    assert report["passed"] is False and report["max_err_over_bound"] > 1
    # The arm without shards merges nothing, and so is right.
    errors = report["attention_error_over_tolerance"]
    assert errors["tp2"] <= 1 < errors["dcp2"]


@pytest.mark.parametrize(("interleave", "rows"), [(16, 156 + 16 + 1), (400, 318)])
def test_with_interleaved_runs_of_tokens(interleave: int, rows: int) -> None:
    report = demo.perform(replace(TINY, iters=1, interleave=interleave)).report
    assert report["passed"] and report["kv_bytes_per_rank"]["dcp2"] == rows * SMALL.latent_dim * 2


def test_without_matplotlib(
    outcome: demo.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "perform", lambda options: outcome)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *TINY_ARGS]) == 0
    assert "no chart: matplotlib is not installed" in capsys.readouterr().err and not (tmp_path / DEFAULT_PNG).exists()
    assert main(["demo", *TINY_ARGS, "--png", "x.png"]) == 2
    assert "matplotlib must be installed" in capsys.readouterr().err


def test_a_gpu_for_each_rank_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    for device, text in (
        ("cuda", "there must be a GPU for each of the 2 ranks (found 0)"),
        ("cuda:0", "must be cpu or cuda"),
        ("foo", "must be cpu or cuda"),
    ):
        assert main(["demo", *TINY_ARGS, "--device", device]) == 2
        assert text in capsys.readouterr().err


# -- its check


def test_a_verdict_is_that_of_its_worst_element() -> None:
    good = demo_check.Errors({"tp": [0.4], "dcp": [0.9]}, [0.2, 1.0], 0.1)
    assert good.passed
    for wrong in (1.01, math.inf):
        assert not good._replace(output=[0.2, wrong]).passed
        assert not good._replace(attention={"tp": [wrong], "dcp": [0.1]}).passed


def test_the_bound_is_no_wider_than_it_has_to_be(outcome: demo.Outcome) -> None:
    """The largest of some hundred differences comes near it: what is wrong by more than roundings is beyond."""
    assert 0.2 < outcome.report["max_err_over_bound"] <= 1


# -- its input and its attention


def test_a_latent_row_depends_on_seed_sequence_and_position_alone() -> None:
    def rows(positions: torch.Tensor, seq: int, seed: int) -> torch.Tensor:
        return context.latent_rows(positions, seq, seed, 576, torch.bfloat16)

    everything = rows(torch.arange(1000), 3, 5)
    mine = torch.arange(7, 1000, 13)
    assert torch.equal(rows(mine, 3, 5), everything[mine])
    for other in (rows(torch.arange(1000), 4, 5), rows(torch.arange(1000), 3, 6)):
        assert abs((everything.double() * other.double()).mean()) < 0.01
    assert abs(everything.double().mean()) < 0.01 and abs(everything.double().var() - 1) < 0.01
    correlation = torch.corrcoef(everything.double())
    assert (correlation - torch.eye(1000)).abs().max() < 0.3  # 7 sigma of 576 independent columns


def test_sequence_lengths_end_below_the_number_of_ranks() -> None:
    assert context.sequence_lengths(120_000, 8, 8) == [120_000, 28_408, 6_725, 1_592, 377, 89, 21, 5]
    assert context.sequence_lengths(50, 1, 8) == [50]
    assert context.sequence_lengths(3, 3, 8) == [3, 3, 3] and context.sequence_lengths(9, 2, 1) == [9, 1]
    for num_ranks in (2, 3, 12):
        assert 1 <= context.sequence_lengths(1000, 5, num_ranks)[-1] < num_ranks


def test_the_truth_is_attention() -> None:
    query = torch.randn(6, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = context.latent_rows(torch.arange(5000), 0, 0, 576, torch.bfloat16)  # more than one chunk
    probs = torch.softmax(query.double() @ rows.double().T * 0.07, 1)
    out, size = attend_to_all(query, rows, scale=0.07, value_dim=512)
    assert (out - probs @ rows[:, :512].double()).abs().max() < 1e-5
    assert (size - probs @ rows[:, :512].double().abs()).abs().max() < 1e-5


def test_the_layer_is_the_one_that_is_counted() -> None:
    """Random weights have as many elements as the configuration says."""
    from dcpkernels.kimi_k3.parallel import TensorParallel

    weights = mla.MLAWeights.random(SMALL, TensorParallel(), key=0, dtype=torch.float32)
    assert sum(value.numel() for value in vars(weights).values()) == sum(SMALL.mla_parameters().values())
