"""`dcpkernels plan`: the published example, what goes where, and one line for what cannot be."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcpkernels.cli import main, output, plan, plan_parser

ROOT = Path(__file__).parents[1]
K3 = "plan --model kimi-k3 --tp 8"
PUBLISHED = f"{K3} --dcp 8 --available-gib 34.28 --max-model-len 1048576"


def run(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


def result(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    return json.loads(run(capsys, f"{command} --json -"))


# -- the published example


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = result(capsys, PUBLISHED)
    expected = {
        "tokens": 19_751_980,
        "blocks": 1733,
        "block_tokens": 1536,
        "blocks_per_request": 92,
        "model": "kimi-k3",
    }
    assert expected.items() <= report.items()
    assert report["concurrency"] == pytest.approx(18.837, abs=1e-3) and report["blocks_as_printed"] == [1733, 1733]
    assert report["inputs"].items() >= {"tp": 8, "available_gib": "34.28", "max_model_len": 2**20}.items()
    assert "run" not in report["inputs"] and "json" not in report["inputs"]
    rows = report["by_dcp"]
    assert [row["dcp"] for row in rows] == [1, 2, 4, 8] and report["ratio"] == rows[3]["ratio"]
    assert [round(row["ratio"], 3) for row in rows] == [1, 1.98, 3.893, 7.489]
    assert all("memory" not in row for row in rows)
    parts = report["decomposition"]  # without a baseline: DCP 1 in the same memory
    assert (parts["memory_factor"], parts["baseline"]["tokens"]) == (1, 2_637_419)
    assert parts["ratio"] == parts["dcp_factor"] == report["ratio"]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, f"{PUBLISHED} --baseline-gib 25.12")
    rows = [line.split() for line in printed.splitlines() if re.match(r"[* ]+\d", line)]
    assert [row[:3] for row in rows[:3]] == [
        ["1", "2,637,419", "1.000"], ["2", "5,221,787", "1.980"], ["4", "10,266,566", "3.893"]
    ]  # fmt: skip
    assert rows[3] == ["*", "8", "19,751,980", "7.489", "92", "6", "18.84", "247", "12,288"]
    for text in (
        "19,751,980 / 1,932,788 tokens = 10.219x",
        "= 1.3646x memory (1,733 / 1,270 blocks) * 7.489x DCP (689 / 92 blocks a request)",
        "less than 8x: the 6 state blocks of a request are on every rank; they take the place of 73,728 tokens",
        "Short requests: 247 at most, however short. Up to 12,288 tokens each takes 7 blocks",
        "a request holds 2, in 3 groups of layers. Padding: 8.68 % of a state's pages, 3 pages to 69 layers (4.35 %).",
    ):
        assert text in printed
    assert "warning" not in printed and "if rounded" not in printed


def test_a_baseline_of_another_size(capsys: pytest.CaptureFixture[str]) -> None:
    parts = result(capsys, f"{PUBLISHED} --baseline-dcp 4 --baseline-gib 17.14")["decomposition"]
    assert (parts["baseline"]["dcp"], parts["baseline"]["blocks"]) == (4, 866)
    assert parts["dcp_factor"] == 177 / 92 and parts["memory_factor"] == 1733 / 866


def test_where_the_result_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    printed = run(capsys, f"{PUBLISHED} --json {file}")
    assert printed.endswith(f"wrote {file}\n") and "19,751,980" in printed
    assert json.loads(file.read_text())["tokens"] == 19_751_980
    assert json.loads(run(capsys, f"{PUBLISHED} --json"))["tokens"] == 19_751_980  # as with -


# -- other inputs


@pytest.mark.parametrize(
    ("command", "same_as"),
    [
        ("--model mla --num-layers 61 --kv-lora-rank 512 --qk-rope-head-dim 64 --num-heads 128", "--model deepseek-v3"),
        ("--model gqa --num-layers 94 --num-kv-heads 4 --head-dim 128", "--model qwen3-235b"),
        ("--model deepseek-v3 --num-layers 9", "--model mla --num-layers 9 --kv-lora-rank 576 --qk-rope-head-dim 0"),
        ("--model kimi-k3 --speculative-tokens 1 --no-prefix-caching", "--model kimi-k3 --state-blocks 2"),
    ],
)
def test_models_by_their_numbers(capsys: pytest.CaptureFixture[str], command: str, same_as: str) -> None:
    rest = "--tp 8 --dcp 2 --available-bytes 20000000000 --max-model-len 100000"
    one, other = (result(capsys, f"plan {options} {rest}") for options in (command, same_as))
    ignored = ("model", "inputs", "by_dcp", "decomposition", "state_bytes_per_request", "state_page_padding")
    assert {k: v for k, v in one.items() if k not in ignored} == {k: v for k, v in other.items() if k not in ignored}


def test_every_option_of_the_cache_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "plan --model kimi-k3 --num-layers 12 --state-layers 35 --draft-layers 1 --tp 16 --dcp 4 --interleave 64 "
        "--max-model-len 262144 --kv-dtype bf16 --state-dtype bf16 --no-prefix-caching --speculative-tokens 2 "
        "--state-blocks 4 --block-alignment 64 --block-size 512 --num-blocks 100 --baseline-dcp 2"
    )
    report = result(capsys, command)
    assert (report["block_tokens"], report["page_bytes"], report["pages_per_block"]) == (512, 512 * 1152, 13)
    assert (report["state_groups"], report["state_blocks"], report["blocks"]) == (3, 12, 100)
    assert report["blocks_per_request"] == 262_144 // 4 // 512 + 12
    assert report["state_bytes_per_request"] == 35 * (3 * 768 * 5 * 2 + 768 * 128 * 2)
    assert report["decomposition"]["baseline"]["dcp"] == 2


def test_memory_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{K3} --dcp 8 --hbm-gib 268.6 --utilisation 0.95"
    printed = run(capsys, f"{command} --other-gib 29")
    workspace = int(re.search(r"our workspace ([\d,]+) bytes", printed)[1].replace(",", ""))
    assert "of 268.60 GiB * 0.95: weights 191.70, other 29.00" in printed and "warning" not in printed
    report = result(capsys, f"{command} --other-gib 29")
    memory = report["memory"]
    assert memory["workspace_bytes"] == workspace and report["by_dcp"][0]["memory"]["workspace_bytes"] == 0
    assert report["available_bytes"] == memory["available_bytes"] < report["by_dcp"][0]["available_bytes"]
    assert "warning: an upper bound" in run(capsys, command)
    options = "--weights-gib 100 --max-num-seqs 1 --num-lanes 2 --chunk-tokens 0 --speculative-tokens 3"
    other = result(capsys, f"{command} {options}")["memory"]
    assert other["weights_bytes"] == 100 * 2**30 and 0 < other["workspace_bytes"] < workspace
    more = result(capsys, f"{command} {options.replace('tokens 3', 'tokens 7')}")["memory"]
    assert more["workspace_bytes"] > other["workspace_bytes"]


def test_a_number_from_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "plan --model kimi-k3 --tp 16 --kv-dtype bf16 --no-prefix-caching --max-model-len 8192 --available-gib 1.66"
    )
    assert "1.66 GiB, if rounded, is 167 to 168 blocks: 54,722 to 55,050 tokens. The most is taken above." in run(
        capsys, command
    )
    assert result(capsys, command)["blocks_as_printed"] == [167, 168]


def test_too_little_memory_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    few = run(capsys, f"{K3} --dcp 8 --num-blocks 91")
    assert "warning: not one request of 1,048,576 tokens fits: it takes 92 blocks, there are 91" in few
    assert "warning" not in run(capsys, f"{K3} --dcp 8 --num-blocks 92")
    report = result(capsys, f"{K3} --dcp 8 --available-bytes 1")
    assert (report["tokens"], report["concurrency"], report["decomposition"]) == (0, 0, None)
    assert "0 blocks" in run(capsys, f"{K3} --dcp 8 --available-bytes 1")


# -- what cannot be


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--dcp 3 --available-gib 1", "plan: dcp must divide tp=8 (got 3)"),
        ("--tp 7 --available-gib 1", "plan: tp must divide num_heads=96 (got 7)"),
        ("--model mla --num-layers 3 --kv-lora-rank 8 --qk-rope-head-dim 8 --tp 1000000000000 --max-model-len 9 --available-gib 1",
         "tp must be at most 65536 (got 1000000000000)"),
        ("--available-gib -3", "--available-gib must be above 0 GiB"),
        ("--available-gib 0", "--available-gib must be above 0 GiB"),
        ("--available-gib nan", "--available-gib must be a finite number"),
        ("--available-gib x", "--available-gib must be a number (got 'x')"),
        ("--available-bytes -1", "available_bytes must be a whole number of at least 1"),
        ("--num-blocks -1", "--num-blocks must be a whole number of at least 1"),
        ("--available-gib 1 --kv-dtype int4", "kv_dtype must be one of fp8, bf16, fp8_ds_mla (got 'int4')"),
        ("--available-gib 1 --state-dtype x", "state_dtype must be one of fp32, bf16 (got 'x')"),
        ("--available-gib 1 --max-model-len 0", "max_model_len must be a whole number of at least 1"),
        ("--available-gib 1 --interleave 7", "interleave must divide the tokens of a block=1536 (got 7)"),
        ("--available-gib 1 --speculative-tokens -1", "num_speculative_tokens must be a whole number of at least 0"),
        ("--available-gib 1 --baseline-dcp 5", "dcp must divide tp=8 (got 5)"),
        ("--available-gib 1 --baseline-gib 0", "--baseline-gib must be above 0 GiB"),
        ("--available-gib 1 --weights-gib 5", "--weights-gib must come with --hbm-gib (got none)"),
        ("--hbm-gib 100", "must leave something of the GPU's memory"),
        ("--hbm-gib 300 --utilisation 1.5", "utilisation must be above 0 and at most 1 (got 1.5)"),
        ("--hbm-gib 300 --tp 16", "the weights of a rank must be given (--weights-gib)"),
        ("--hbm-gib 300 --num-layers 12 --state-layers 35", "the weights of a rank must be given (--weights-gib)"),
        ("--hbm-gib 300 --draft-layers 5", "(got 24 + 69 layers of kimi-k3 and 5 draft layers at tp=8, whose are not known)"),
        ("--model gpt-2 --available-gib 1", "--model must be one of kimi-k3, deepseek-v3, kimi-k2, qwen3-235b, mla, gqa"),
        ("--model mla --available-gib 1", "--num-layers must be given for --model mla (got none)"),
        ("--model mla --num-layers 3 --available-gib 1", "--kv-lora-rank must be given for --model mla"),
        ("--model gqa --num-layers 3 --kv-lora-rank 3 --available-gib 1", "--kv-lora-rank must come with --model mla"),
        ("--head-dim 3 --available-gib 1", "--head-dim must come with --model gqa (got kimi-k3)"),
        ("--num-heads 3 --available-gib 1", "--num-heads must come with --model mla or gqa (got kimi-k3)"),
        ("--model gqa --num-layers 3 --num-kv-heads 3 --head-dim 8 --state-layers 2 --available-gib 1",
         "--state-layers must come with a model that has some"),
        ("--model mla --num-layers 3 --kv-lora-rank 8 --qk-rope-head-dim 8 --available-gib 1",
         "--max-model-len must be given for --model mla (got none)"),
        ("--available-gib 1 --json /no/such/folder/x", "--json: must be a file in a writable folder"),
        ("--available-gib 1 --plot /no/such/folder/x", "--plot: must be a file in a writable folder"),
    ],
)  # fmt: skip
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], options: str, text: str) -> None:
    assert main(shlex.split(f"{K3} {options}")) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err
    assert captured.err.startswith("dcpkernels: error: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("options", ["", "--available-gib 1 --num-blocks 2", "--available-gib 1 --tp x"])
def test_options_that_argparse_refuses(capsys: pytest.CaptureFixture[str], options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(f"{K3} {options}"))
    assert ended.value.code == 2 and "usage: dcpkernels plan" in capsys.readouterr().err


def test_options_of_the_budget_are_those_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for name in plan_parser.BUDGET_OPTIONS:
        assert main(shlex.split(f"{K3} --num-blocks 5 --{name.replace('_', '-')} 1")) == 2
        assert "must come with --hbm-gib" in capsys.readouterr().err


# -- around it


def test_it_needs_no_torch() -> None:
    """And there is `python -m dcpkernels`, which this is."""
    argv = ["dcpkernels", *shlex.split(PUBLISHED), "--json", "-"]
    code = (
        f"import runpy, sys; sys.modules.update(torch=None, numpy=None); sys.argv = {argv!r}\n"
        "runpy.run_module('dcpkernels', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] == 19_751_980, done.stderr


def test_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(shlex.split(f"{PUBLISHED} --plot {tmp_path / 'x.png'}")) == 2
    assert "--plot: matplotlib must be installed, by `pip install 'dcpkernels[cli]'`" in capsys.readouterr().err
    assert not output.has_matplotlib()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", ["--dcp 8 --available-gib 34.28 --baseline-gib 25.12", "--num-blocks 0x"])
def test_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    pytest.importorskip("matplotlib")
    options = options.replace("--num-blocks 0x", "--available-bytes 1 --max-model-len 1")  # nothing fits, shortest axis
    file = tmp_path / "chart"
    assert f"wrote {file}" in run(capsys, f"{K3} {options} --plot {file}")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 10_000


def test_what_the_chart_shows() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from dcpkernels.cli import parser, plan_figure

    args = parser().parse_args(shlex.split(f"{PUBLISHED} --baseline-gib 25.12"))
    shown = plan.perform(args)
    tokens, requests = Figure().subplots(1, 2)
    plan_figure.draw_capacity(tokens, shown)
    assert [bar.get_height() for bar in tokens.patches] == [1_932_788, 2_637_419, 5_221_787, 10_266_566, 19_751_980]
    texts = [text.get_text() for text in tokens.texts]
    assert "1.933M\nbaseline" in texts and "19.75M\n7.489x" in texts
    assert any("10.22x the baseline = 1.365x memory * 7.489x DCP" in text for text in texts)
    plan_figure.draw_requests(requests, shown)
    for line, end in zip(requests.lines, ("2.52", "4.98", "9.79", "18.84"), strict=True):
        assert line.get_ydata()[0] == 1733 / 7 and f"{line.get_ydata()[-1]:.2f}" == end
    assert [plan_figure.amount(n) for n in (999, 1000, 1_932_788, 12_345_678_901)] == ["999", "1k", "1.933M", "12.35G"]


# -- the page


def examples() -> list[tuple[str, str]]:
    """Commands of docs/planner.md, and what the page says that they print."""
    page = (ROOT / "docs/planner.md").read_text()
    blocks = re.findall(r"^```console\n\$ (.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    joined = [block.replace("\\\n", " ") for block in blocks]
    return [(command, printed) for command, _, printed in (block.partition("\n") for block in joined)]


def test_the_page_has_examples() -> None:
    assert len(examples()) == 4


@pytest.mark.parametrize(("command", "printed"), examples())
def test_the_examples_of_the_page(capsys: pytest.CaptureFixture[str], command: str, printed: str) -> None:
    words = shlex.split(command)
    assert words[0] == "dcpkernels"
    shown = run(capsys, shlex.join(words[1:])).rstrip("\n").splitlines()
    if "..." in printed:  # the page leaves out lines where it says so
        shown = [line for line in shown if line in printed.splitlines()]
        printed = "\n".join(line for line in printed.splitlines() if line.strip() != "...")
    assert shown == printed.splitlines()
