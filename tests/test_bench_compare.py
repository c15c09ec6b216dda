"""`dcpkernels bench --compare`: rows find their like, what the machine does is told from what the op does, bad files end
in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from dcpkernels.cli import main
from dcpkernels.cli.bench_compare import compare, differences_of, drift_of
from dcpkernels.errors import DcpInvalidArgument
from tests.bench_run_rows import MACHINE, row_of

SIZES = (1, 8, 64, 512)
QUIET = 1.02  # p99 / median


def run_of(
    ours: float = 1.0, gloo: float = 1.0, openmpi: float = 1.0, *, spread: float = QUIET, **more: Any
) -> list[dict]:
    """Four rows, times of all of them by these factors."""
    peers = {"gloo": 120.0 * gloo, "openmpi": 45.0 * openmpi}
    return [row_of(10.0 * ours, size=size, peers=peers, spread=spread, **more) for size in SIZES]


def judged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> set[str]:
    comparison = compare(old, new)
    assert len(comparison.pairs) == len(old) and not comparison.only_old and not comparison.only_new
    return {comparison.verdict(pair) for pair in comparison.pairs}


# -- what is more than noise


def test_a_run_and_itself() -> None:
    comparison = compare(run_of(), run_of())
    assert {comparison.verdict(pair) for pair in comparison.pairs} == {"noise"}
    for pair in comparison.pairs:
        assert pair.ratio == pair.peer_ratio == pair.ratio_by_peer == pair.ratio_by_floor == 1
        assert comparison.noise(pair) == 1.05  # never less


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (run_of(1.5), {"slower"}),
        (run_of(0.7), {"faster"}),
        (run_of(1.04), {"noise"}),
        (run_of(2.0, 2.0, 2.0), {"noise"}),  # a slower machine
        (run_of(3.0, 2.0, 2.0), {"slower"}),  # and a slower op on it
        (run_of(0.5, 0.9, 0.9), {"faster"}),
        (run_of(1.2, 2.4, 2.4), {"noise"}),  # only relative to its peers is it faster
        (run_of(0.9, 0.5, 0.5), {"noise"}),
        (run_of(1.5, spread=40), {"noise"}),
        (run_of(1.04, 0.5, 0.5), {"noise"}),
    ],
    ids=["slower", "faster", "less than is called a change", "machine", "machine and op", "both faster", "peers slower",
         "peers faster", "samples scatter", "a peer that is faster alone"],
)  # fmt: skip
def test_what_is_judged(new: list[dict[str, Any]], expected: set[str]) -> None:
    assert judged(run_of(), new) == expected


def test_peers_that_go_either_way_make_noise() -> None:
    old = run_of()
    shaken = [run_of(1.5, factor, factor)[i] for i, factor in enumerate((1.0, 1.8, 0.6, 1.0))]
    assert judged(old, shaken) == {"noise"}
    steady = [run_of(1.5, factor, factor)[i] for i, factor in enumerate((1.0, 1.01, 0.99, 1.0))]
    assert judged(old, steady) == {"slower"}


def test_noise_in_numbers() -> None:
    old, new = run_of(spread=1.3), run_of(2.0, spread=1.5)
    (pair, *_) = comparison = compare(old, new).pairs
    # 50 turns of 4 timed samples each in 200; op and peer, old and new.
    own = 2.5 / 2.33 * math.sqrt((2 * math.log(1.3) ** 2 + 2 * math.log(1.5) ** 2) / 50)
    assert pair.own_noise() == pytest.approx(own) and drift_of(comparison) == 0
    assert compare(old, new).noise(pair) == pytest.approx(math.exp(own))
    more_samples = [row | {"num_iters": 800} for row in old], [row | {"num_iters": 800} for row in new]
    assert compare(*more_samples).pairs[0].own_noise() == pytest.approx(own / 2)

    def halves(run: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
        """With the middle half of the samples in so wide a range, as a share of the median."""
        gloo = {"gloo": run[0]["baselines"]["gloo"] | {"iqr_us": 0.0}}
        return [row | {"iqr_us": share * row["median_us"], "baselines": gloo} for row in run]

    by_halves = compare(halves(old, 0.03), halves(new, 0.04)).pairs[0].own_noise()
    assert by_halves == pytest.approx(2.5 * 0.05 / 1.349 / math.sqrt(50))

    shaken = [run_of(1.0, factor, factor)[i] for i, factor in enumerate((1.1, 1.2, 1.3, 1.4))]
    logs = [math.log(factor) for factor in (1.1, 1.2, 1.3, 1.4)]
    mean = sum(logs) / 4
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 3)
    comparison = compare(run_of(), shaken)
    assert comparison.drift == pytest.approx(deviation)
    own = comparison.pairs[0].own_noise()
    assert comparison.noise(comparison.pairs[0]) == pytest.approx(math.exp(math.hypot(own, 2 * deviation)))
    assert compare(run_of()[:2], shaken[:2]).drift == pytest.approx(math.sqrt((logs[0] ** 2 + logs[1] ** 2) / 2))


def test_the_peer_is_the_one_that_scatters_least_and_does_all_of_the_op() -> None:
    def row(**spreads: float) -> dict[str, Any]:
        made = row_of(peers=dict.fromkeys(spreads, 50.0))
        for name, spread in spreads.items():
            made["baselines"][name]["p99_us"] = 50 * spread
        return made

    def peer(old: dict[str, Any], new: dict[str, Any]) -> str | None:
        return compare([old], [new]).pairs[0].peer

    assert peer(row(gloo=1.5, openmpi=1.2), row(gloo=1.5, openmpi=1.2)) == "openmpi"
    assert peer(row(gloo=1.2, openmpi=1.5), row(gloo=1.2, openmpi=1.5)) == "gloo"
    assert peer(row(gloo=9, **{"gloo-exchange": 1.01}), row(gloo=9, **{"gloo-exchange": 1.01})) == "gloo"
    assert peer(row(gloo=1.2, **{"gloo-exchange": 2}), row(**{"gloo-exchange": 2})) == "gloo-exchange"
    assert peer(row(gloo=1.2), row(openmpi=1.2)) is None


def test_without_a_peer_the_ratio_is_judged_and_the_floor_tells_the_noise() -> None:
    old = [row_of(10.0, size=size, spread=QUIET, peers={}) for size in SIZES]
    assert judged(old, [row | {"median_us": 15.0, "p99_us": 15.3} for row in old]) == {"slower"}
    moved = [row | {"median_us": 15.0, "p99_us": 15.3, "floor_us": 6.0} for row in old]
    assert judged(old, moved) == {"noise"} and compare(old, moved).pairs[0].ratio_by_floor == pytest.approx(1)
    bare = [row | {"floor_us": 0.0} for row in old]
    assert compare(bare, bare).pairs[0].ratio_by_floor is None and judged(bare, bare) == {"noise"}


# -- which rows are of the same case


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"skew_us": 0.0, "timed_from": "own entry", "mode": "eager", "zero_copy": False}),
        ({}, {"skew_us": 0}),
        ({"wire": "packet"}, {"wire": "packet", "packet_bytes": 8}),
        ({"wire": "bulk", "packet_bytes": None}, {"wire": "bulk"}),
        ({"op": "a2a_lse_reduce"}, {"op": "a2a_lse_reduce", "wire": "auto", "zero_copy": False}),
        ({}, {"comment": "tried again"}),
        ({}, {"shape": [[1, 2], [3]]}),
        ({"load": 0.5}, {"load": 0.7}),
        ({"load": None}, {"load": 0.7}),
        ({"counters": {"a": 1}}, {"counters": {"a": 2}}),
        ({"isa": "v4"}, {"isa": "v3", "num_iters": 7, "seed": 3, "warmup_turns": 9}),
    ],
)
def test_rows_of_the_same_case(old: dict[str, Any], new: dict[str, Any]) -> None:
    for one, other in ((old, new), (new, old)):
        assert len(compare([row_of(**one)], [row_of(**other)]).pairs) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"skew_us": 5.0}),
        ({}, {"mode": "graph"}),
        ({}, {"zero_copy": True}),
        ({}, {"num_ranks": 3}),
        ({}, {"size": 9}),
        ({}, {"dtype": "fp16"}),
        ({}, {"device": "cuda"}),
        ({}, {"parts": [512, 64]}),
        ({}, {"calls_per_sample": 8}),
        ({}, {"samples_per_turn": 1}),
        ({"flavour": "a"}, {"flavour": "b"}),
        ({"shape": [[1, 2], [3]]}, {"shape": [[1, 2], [4]]}),
        ({"op": "a2a_lse_reduce"}, {"op": "a2a_lse_reduce", "wire": "packet"}),
        ({"op": "a2a_lse_reduce", "wire": "packet"}, {"op": "a2a_lse_reduce", "wire": "packet", "packet_bytes": 128}),
        ({"op": "kv_gather", "block_size": 64}, {"op": "kv_gather", "block_size": 16}),
        ({"op": "a2a_lse_reduce"}, {"op": "query_gather"}),
    ],
)
def test_rows_of_other_cases(old: dict[str, Any], new: dict[str, Any]) -> None:
    comparison = compare([row_of(**old)], [row_of(**new)])
    assert not comparison.pairs and len(comparison.only_old) == len(comparison.only_new) == 1


def test_rows_are_found_in_any_order_and_the_rest_is_listed() -> None:
    old = [row_of(us, size=size) for us, size in ((10.0, 1), (20.0, 8), (30.0, 64))]
    new = [row_of(us, size=size) for us, size in ((62.0, 64), (21.0, 8), (1.0, 2))]
    comparison = compare(old, new)
    assert [(pair.old["median_us"], pair.new["median_us"]) for pair in comparison.pairs] == [(20, 21), (30, 62)]
    assert [dict(case)["num_tokens"] for case in (*comparison.only_old, *comparison.only_new)] == [1, 2]


def test_rows_of_one_file_that_are_alike() -> None:
    with pytest.raises(
        DcpInvalidArgument, match=r"rows 0 and 2 alike in the new one: query_gather, cpu, 2 ranks, 8 tokens"
    ):
        compare([row_of()], [row_of(), row_of(size=9), row_of(11.0)])


# -- machines


def test_other_machines_and_other_circumstances() -> None:
    def other(**more: Any) -> list[dict[str, Any]]:
        return [row_of(machine=MACHINE | more)]

    assert differences_of([row_of()], [row_of()]) == {}
    assert differences_of([row_of()], other(cpu="B")) == {"cpu": [["A processor"], ["B"]]}
    assert differences_of([row_of()], [row_of(machine=None, num_iters=9)])["torch"] == [["2.13.0"], []]
    assert differences_of([row_of(isa="v3")], [row_of()]) == {"isa": [["v3"], ["v4"]]}
    assert differences_of([row_of(), *other(cpu="B")], [*other(cpu="B"), row_of()]) == {}


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ({"cpu": "Another"}, "THE MACHINES DIFFER (cpu A processor against Another)"),
        ({"cpus": 4}, "THE MACHINES DIFFER (cpus 2 against 4)"),
        ({"gpu": "One"}, "THE MACHINES DIFFER (gpu unknown against One)"),
        ({"nccl": "2.28"}, "not the same in both: nccl unknown against 2.28"),
        ({"torch": "2.14"}, "not the same in both: torch 2.13.0 against 2.14"),
    ],
)
def test_other_machines_are_said(
    machine: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--compare", *files(tmp_path, run_of(), run_of(machine=MACHINE | machine))]) == 0
    out = capsys.readouterr().out
    assert text in out and ("DIFFER" in out) == ("DIFFER" in text)


# -- the command


def files(folder: Path, *runs: Any) -> list[str]:
    paths = [folder / f"{name}.json" for name in ("old", "new")]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(run if isinstance(run, str) else json.dumps(run))
    return [str(path) for path in paths]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = [*run_of(), row_of(num_ranks=8)], [*run_of(1.5, 1.1, 1.1, floor_us=5.0), row_of(op="kv_gather")]
    out, text = tmp_path / "out.json", tmp_path / "out.md"
    old_path, new_path = files(tmp_path, old, new)
    assert main(["bench", "--compare", old_path, new_path, "--json", str(out), "--markdown", str(text)]) == 0
    printed = capsys.readouterr().out
    assert f"old: {old_path}, new: {new_path}" in printed and "96 heads, bf16" in printed
    lines = [re.split(r"  +", line.strip()) for line in printed.splitlines() if line.strip().startswith("query_gather")]
    noise = lines[0][10]
    assert lines == [
        [f"query_gather, 2 ranks, {size} tokens", "10.0", "15.0", "1.50", "10.2", "15.3", "gloo", "1.10", "1.36", "1.20", noise, "slower"]
        for size in SIZES
    ]  # fmt: skip
    assert 1 < float(noise) < 1.36
    assert f"only in {old_path}: query_gather, cpu, 8 ranks, 8 tokens" in printed
    assert f"only in {new_path}: kv_gather, cpu, 2 ranks, 8 rows" in printed
    rows = json.loads(out.read_text())
    assert [row.get("only_in") for row in rows] == [None] * 4 + ["old", "new"]
    assert rows[0]["case"]["num_tokens"] == 1 and rows[0]["ratio_by_peer"] == pytest.approx(1.5 / 1.1)
    assert (rows[0]["judged"], rows[0]["peer"]) == ("slower", "gloo")
    markdown = text.read_text()
    assert markdown.count("| slower |") == 4 and "only in" in markdown and f"old: {old_path}" in markdown


def test_markdown_on_stdout_is_alone_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", *files(tmp_path, run_of(), run_of()), "--markdown"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("old: ") and out.count("| ") > 40 and "query_gather, 2 ranks" not in err


def test_a_gate_needs_a_case_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(tmp_path, run_of(), run_of(9.0, num_heads=12))
    assert main(["bench", "--compare", *paths]) == 0
    assert main(["bench", "--compare", *paths, "--fail-above", "1.1"]) == 2
    assert "with --fail-above, files must have a case in common (got none)" in capsys.readouterr().err


def test_files_without_a_common_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", *files(tmp_path, [], [row_of()]), "--markdown", str(tmp_path / "md")]) == 0
    out = capsys.readouterr().out
    assert "no row is of the same case in both" in out and "only in" in out and "noise" not in out


@pytest.mark.parametrize(
    ("new", "limit", "exit_code"),
    [(1.5, "1.1", 1), (1.5, "1.6", 0), (1.04, "1.01", 0), (0.5, "0.4", 0)],
    ids=["slower", "not that much", "within the noise", "faster"],
)
def test_fail_above(new: float, limit: str, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    paths = files(tmp_path, run_of(), run_of(new))
    assert main(["bench", "--compare", *paths, "--fail-above", limit, "--json", str(out)]) == exit_code
    assert len(json.loads(out.read_text())) == 4
    if exit_code:
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(
            r"ratios must be at most 1.1 or within the noise \(got 1.50, noise 1.\d\d, for query_gather", line
        )


def without(key: str) -> str:
    return json.dumps([row_of(), {name: value for name, value in row_of().items() if name != key}])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("{ not json", "must be JSON (got Expecting property name"),
        ('{"rows": []}', "must have a list of rows, as bench --json writes it (got dict)"),
        ("[3]", "must have objects in its list (got int at index 0)"),
        (without("op"), "must have op in every row (got none at index 1)"),
        (without("num_ranks"), "must have num_ranks in every row (got none at index 1)"),
        (without("median_us"), "must have median_us in every row (got none at index 1)"),
        (without("p99_us"), "must have p99_us in every row (got none at index 1)"),
        (json.dumps([row_of(op=["x"])]), "an op's name and a number of ranks in every row (got others at index 0)"),
        (json.dumps([row_of() | {"median_us": None}]), "a time above 0 for median_us (got None at index 0)"),
        (json.dumps([row_of() | {"median_us": math.nan}]), "a time above 0 for median_us (got nan at index 0)"),
        (json.dumps([row_of() | {"median_us": 0}]), "a time above 0 for median_us (got 0 at index 0)"),
        (json.dumps([row_of(floor_us="7")]), "a number for floor_us (got '7' at index 0)"),
        (json.dumps([row_of(num_iters=-1)]), "a number for num_iters (got -1 at index 0)"),
        (json.dumps([row_of(iqr_us=-1)]), "must have a time for iqr_us (got -1 at index 0)"),
        (json.dumps([row_of(baselines=["gloo"])]), "must have baselines by name in every row (got ['gloo'] at index 0)"),
        (json.dumps([row_of(baselines={"gloo": {"median_us": 1.0}})]), "for p99_us (got None at index 0, gloo)"),
        (json.dumps([row_of(), row_of()]), "each row of a file must be another case (got rows 0 and 1 alike in the new one"),
        ("[" * 100_000, "must be JSON (got maximum recursion depth exceeded"),
        (json.dumps([row_of() | {"median_us": 10**400}]), "a time above 0 for median_us (got 1000"),
    ],
)  # fmt: skip
def test_bad_files(bad: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", *files(tmp_path, run_of(), bad)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dcpkernels: error: bench: ") and text in line


def test_objects_among_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that today's bench writes, and told apart all the same."""
    for kind, same in (("a", True), ("b", False)):
        old, new = ([row_of(wire={"kind": of}, parts=[{"size": 8}])] for of in ("a", kind))
        assert main(["bench", "--compare", *files(tmp_path, old, new)]) == 0
        assert ("no row is of the same case" in capsys.readouterr().out) != same


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, _ = files(tmp_path, run_of(), run_of())
    (tmp_path / "latin").write_bytes(b"[\xff]")
    for path, text in ((tmp_path / "none", "got No such file"), (tmp_path, "got Is a directory"), (tmp_path / "latin", "got other than UTF-8")):  # fmt: skip
        assert main(["bench", "--compare", good, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} must be a file that can be read ({text}" in line
    assert main(["bench", "--compare", good, good, "--json", "/nowhere/x"]) == 2
    assert "--json: must be a file in a writable folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--compare", "a"], "expected 2 arguments"),
        (["--compare", "a", "b", "query_gather"], "--compare takes two files and no OP"),
        (["--json", "x", "query_gather"], "--json before the OP is of --compare"),
        (["--markdown", "x", "query_gather"], "--markdown before the OP is of --compare"),
        (["--fail-above", "2", "query_gather"], "--fail-above before the OP is of --compare"),
        (["--json", "x"], "the following arguments are required: OP, or --compare OLD NEW"),
        (["--compare", "a", "b", "--fail-above", "-1"], "must be a finite number of at least 0"),
    ],
)
def test_what_argparse_answers(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *args])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_a_file_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", "/dev/zero", "/dev/zero"]) == 2
    assert "/dev/zero must have at most 67,108,864 characters (got more)" in capsys.readouterr().err
