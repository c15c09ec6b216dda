"""`dcpkernels plan --hardware` and `--trace`: the models of the planner, fed with what the plan is of."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpkernels.cli import chart, main
from dcpkernels.planner import find_model, gib, plan_capacity
from dcpkernels.planner.hardware import preset
from dcpkernels.planner.ranges import Range
from dcpkernels.planner.replay import max_load, replay
from dcpkernels.planner.step_time import StepTimeModel
from dcpkernels.planner.trace import read_trace
from dcpkernels.planner.wire import advise

K3 = "plan --model kimi-k3 --tp 8 --dcp 8 --available-gib 34.28"
K3_MODEL = StepTimeModel(preset("b300"), tp=8, num_heads=96, query_dim=576, value_dim=512, row_bytes=576, num_layers=24)
GQA = "plan --model gqa --num-layers 94 --num-heads 64 --num-kv-heads 4 --head-dim 128 --tp 8 --max-model-len 40960"


def result(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    assert main(shlex.split(f"{command} --json -")) == 0
    return json.loads(capsys.readouterr().out)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A request a second, of 1,000 to 100,000 tokens, and one that no cache holds."""
    lines = [
        {"timestamp": 1000 * i, "input_length": 1000 * (1 + i % 100), "output_length": 100 + i % 7} for i in range(300)
    ]
    lines.append({"timestamp": 500, "input_length": 10**9, "output_length": 1, "hash_ids": [1]})
    path = tmp_path / "mix.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# -- where DCP is faster


def test_step_time_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    report = result(capsys, f"{K3} --hardware b300 --step-tokens 1,64 --contexts 8192,131072")["step_time"]
    pairs = [(1, 8192), (1, 131072), (64, 8192), (64, 131072)]
    for row, (num_tokens, context) in zip(report["comparisons"], pairs, strict=True):
        fastest = row.pop("fastest")
        assert row == as_json(K3_MODEL.compare(num_tokens, context, 8).to_dict())
        assert fastest == as_json(K3_MODEL.best_dcp(num_tokens, context).to_dict())
    assert report["dcp"] == 8 and report["hardware"] == as_json(K3_MODEL.hardware.to_dict())
    edges = [{"num_tokens": n, **K3_MODEL.break_even(n, 8).to_dict()} for n in (1, 64)]
    assert report["break_even_context"] == as_json(edges)
    assert report["wire"] == as_json([advise(K3_MODEL, "a2a_lse_reduce", n, 8).to_dict() for n in (1, 64)])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        # In bf16 rows and queries are twice as long; a step of 1 + 3 tokens is of one sequence.
        (
            f"{K3} --kv-dtype bf16 --speculative-tokens 3 --draft-layers 5",
            {"rank_row_bytes": 1152, "query_row_bytes": 12 * 1152, "num_layers": 29, "tokens_per_sequence": 4},
        ),
        # The rows of this layout are in fp8, the queries in bf16.
        (f"{K3} --kv-dtype fp8_ds_mla", {"rank_row_bytes": 656, "query_row_bytes": 12 * 1152, "num_layers": 24}),
        # Keys and values of one of 4 KV heads, which two ranks would hold alike.
        (
            f"{GQA} --available-gib 20",
            {"rank_row_bytes": 256, "query_row_bytes": 8 * 128, "merge_row_bytes": 8 * (128 * 2 + 4), "dcp": 2},
        ),
        ("plan --model deepseek-v3 --tp 16 --available-gib 20", {"query_row_bytes": 8 * 576, "dcp": 16, "num_layers": 61}),
    ],
)  # fmt: skip
def test_each_model_arrives(capsys: pytest.CaptureFixture[str], command: str, expected: dict[str, int]) -> None:
    """And without a size of groups the largest is compared."""
    report = result(capsys, f"{command} --hardware b300")["step_time"]
    assert {name: report[name] for name in expected} == expected


def test_contexts_stop_at_the_longest_request(capsys: pytest.CaptureFixture[str]) -> None:
    def contexts(length: int) -> set[int]:
        report = result(capsys, f"{K3} --hardware b300 --max-model-len {length}")["step_time"]
        return {row["context"] for row in report["comparisons"]}

    assert contexts(262_144) == {8192, 65_536, 262_144}
    assert contexts(4000) == {4000}


def test_what_was_measured_replaces_the_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    measured = (
        "--attention-us 14 --gather-us 9-11 --merge-us 8.5 --memory-share 0.5 --sequence-share 0.3-0.5 --link-share 1"
    )
    report = result(capsys, f"{K3} --hardware B300 --step-tokens 2 --contexts 100000 {measured}")["step_time"]
    hardware = replace(
        K3_MODEL.hardware,
        attention_s=Range.exact(14e-6),
        gather_s=Range(9e-6, 11e-6),
        merge_s=Range.exact(8.5e-6),
        memory_share=Range.exact(0.5),
        sequence_share=Range(0.3, 0.5),
        link_share=Range.exact(1.0),
    )
    (row,) = report["comparisons"]
    row.pop("fastest")
    assert row == as_json(replace(K3_MODEL, hardware=hardware).compare(2, 100_000, 8).to_dict())


def test_step_time_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{K3} --hardware b300 --step-tokens 64 --contexts 8192,1048576")) == 0
    printed = capsys.readouterr().out
    near, far = (K3_MODEL.compare(64, context, 8) for context in (8192, 2**20))
    rows = [line.split() for line in printed.splitlines() if line.lstrip().startswith("64 ")]
    assert rows[0][:5] == ["64", "8,192", near.tp_us.text(), near.dcp_us.text(), near.saving_us.text().split()[0]]
    assert rows[1][-3:] == ["dcp", "wins", "8"] and far.saving_us.text() in rows[1]
    assert rows[2][1] == K3_MODEL.break_even(64, 8).text() and rows[2][2:5] == ["packet,", "128", "bytes"]
    assert "not an inherent gain of DCP" in printed and "is bulk on every device today" in printed


# -- a real mix of requests


def test_replay_is_of_the_planned_cache(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    rates = {"prefill_tokens_per_s": 5000.0, "tpot_s": 0.05, "max_num_seqs": 40}
    options = "--prefill-tokens-per-s 5000 --tpot-ms 50 --max-num-seqs 40 --load 3 --p99-wait-s 2"
    report = result(capsys, f"{K3} --trace {trace} {options}")["trace"]
    requests = read_trace(trace)
    rows = report.pop("by_dcp")
    assert report == {
        "num_requests": 301,
        "input_tokens": sum(request.input_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
        "p99_wait_s": 2.0,
        **rates,
    }
    for row, dcp in zip(rows, (1, 2, 4, 8), strict=True):
        plan = plan_capacity(find_model("kimi-k3"), tp=8, dcp=dcp, max_model_len=2**20, available_bytes=gib("34.28"))
        pool = {"num_blocks": 1733, "block_tokens": 1536, "state_blocks": 6, "dcp": dcp}
        assert plan.num_blocks == 1733 and row["num_never_fit"] == 1
        most = max_load(requests, **pool, **rates, p99_wait_s=2.0)
        expected = replay(requests, **pool, **rates, load=3.0).to_dict()
        assert row == as_json(expected | {"max_load": most, "fits_at_once": False})


def test_a_mix_that_fits_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("timestamp_ms,input_tokens,output_tokens\n0,100,5\n10,2000,1\n")
    (*_, row) = result(capsys, f"{K3} --trace {path}")["trace"]["by_dcp"]
    assert row["max_load"] is None and row["fits_at_once"] and row["peak_requests"] == 2
    assert main(shlex.split(f"{K3} --trace {path}")) == 0
    captured = capsys.readouterr()
    assert "2 requests of few.csv in 0 minutes; prompts at 20,000 tokens/s, 20 ms an output token" in captured.out
    (line,) = [line for line in captured.out.splitlines() if line.startswith("* 8") and "all at once" in line]
    assert line.split()[2:6] == ["2,105", "0.8", "%", "2"]
    assert "trace, replays: 4 of 4" in captured.err


def test_each_group_of_attention_layers_takes_its_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """24 attention layers to 8 with state: three groups of 8, and a request has blocks in each."""
    path = tmp_path / "one.csv"
    path.write_text("timestamp_ms,input_tokens,output_tokens\n0,1000,3000\n")
    report = result(capsys, f"{K3} --state-layers 8 --max-model-len 4000 --trace {path}")
    assert (
        report["state_groups"] == 1
        and report["blocks_per_request"] == report["trace"]["by_dcp"][-1]["peak_blocks"] == 5
    )
    first = report["by_dcp"][0]["blocks_per_request"], report["trace"]["by_dcp"][0]["peak_blocks"]
    assert first == (3 * 3 + 2,) * 2


def test_a_load_is_never_rounded_up(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    assert main(shlex.split(f"{K3} --trace {trace}")) == 0
    shown = [
        float(line.split()[-1])
        for line in capsys.readouterr().out.splitlines()
        if line[:3].strip("* ").isdigit() and "%" in line
    ]
    exact = [row["max_load"] for row in result(capsys, f"{K3} --trace {trace}")["trace"]["by_dcp"]]
    assert len(shown) == 4
    assert all(0.99 * most < text <= most for text, most in zip(shown, exact, strict=True))


# -- what cannot be


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--step-tokens 4", "plan: --step-tokens must come with --hardware (got none)"),
        ("--gather-us 4", "plan: --gather-us must come with --hardware (got none)"),
        ("--hardware b301", "hardware: name must be one of b200, "),
        ("--hardware b300 --gather-us fast", "plan: --gather-us must be a number, or two as LOW-HIGH (got 'fast')"),
        ("--hardware b300 --merge-us 1-2-3", "plan: --merge-us must be a number, or two as LOW-HIGH (got '1-2-3')"),
        ("--hardware b300 --merge-us 3-2", "range: low must be at most high (got 3.0 .. 2.0)"),
        ("--hardware b300 --merge-us nan", "range: both ends must be finite numbers (got nan .. nan)"),
        ("--hardware b300 --link-share 2", "hardware: link_share must be in 0 .. 1, and not 0 (got 2.0 .. 2.0)"),
        ("--hardware b300 --contexts ,", "plan: --contexts must name at least one number (got none)"),
        ("--load 2", "plan: --load must come with --trace (got none)"),
        ("--p99-wait-s 2", "plan: --p99-wait-s must come with --trace (got none)"),
        ("--max-num-seqs 2", "plan: --max-num-seqs must come with --hbm-gib (got none)"),
        ("--trace nowhere.jsonl", "trace: a file must be readable (got nowhere.jsonl: No such file"),
        ("--trace TRACE --load 0", "replay: load must be a number in"),
        ("--trace TRACE --tpot-ms -1", "replay: tpot_s must be a number in"),
        ("--trace TRACE --max-num-seqs 0", "replay: max_num_seqs must be a whole number in 1 .. "),
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], trace: Path, options: str, text: str) -> None:
    assert main(shlex.split(f"{K3} {options}".replace("TRACE", str(trace)))) == 2
    printed = capsys.readouterr()
    assert text in printed.err and printed.out == "" and "Traceback" not in printed.err


def test_what_cannot_be_for_some_models(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    mla = "plan --model mla --num-layers 3 --kv-lora-rank 8 --qk-rope-head-dim 8 --tp 8 --max-model-len 99 --available-gib 1"
    for command, text in (
        (f"{mla} --hardware b300", "plan: --num-heads must be given for --model mla with --hardware (got none)"),
        (f"{GQA.replace('--tp 8', '--tp 4')} --available-gib 1 --hardware b300", "--tp that allow DCP (got tp=4)"),
        ("plan --model deepseek-v3 --tp 16 --dcp 16 --available-gib 1 --hardware mi300x", "step_time: dcp must be one of 1, 2, 4, 8"),
        (f"{K3.replace('34.28', '0.01')} --trace {trace}", "plan: blocks of the KV cache, for --trace, must be a whole number of at least 1"),
    ):  # fmt: skip
        assert main(shlex.split(command)) == 2
        assert text in capsys.readouterr().err


# -- the chart


def test_all_of_the_chart_is_on_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path, tmp_path: Path
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(chart, "save", lambda figure, path: figures.append(figure))
    options = f"--baseline-gib 25.12 --plot {tmp_path / 'x.png'}"
    result(capsys, f"{K3} {options}")
    result(capsys, f"{K3} {options} --hardware b300 --trace {trace}")
    assert [len(figure.axes) for figure in figures] == [2, 4]
    for figure in figures:
        renderer = figure.canvas.get_renderer()
        width, height = figure.canvas.get_width_height()
        texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
        assert len(texts) > 8
        for text in texts:
            box = text.get_window_extent(renderer)
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
            assert inside and math.isfinite(box.x0), text.get_text()
