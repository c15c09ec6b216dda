"""What `dcpkernels bench` shows and writes of its rows: what a chart says and that it can be read, markdown, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcpkernels.cli import bench, bench_plot, bench_report, bench_rows, machine, main, output, table
from tests.bench_run_rows import ABOUT, MACHINE, WHERE, row_of, timed

SIZES = (1, 8, 64)
EXCHANGES = {"gloo": 120.0, "openmpi": 45.0, "gloo-exchange": 90.0, "openmpi-exchange": 7.0}


def figure_of(rows: list[dict[str, Any]]) -> Figure:
    return bench_plot.figure_of(rows, [WHERE, ABOUT])


def line_of(axes: Axes, name: str) -> Any:
    (line,) = [line for line in axes.lines if line.get_gid() == name]
    return line


def labels_of(axes: Axes) -> list[str]:
    """Those right of the lines, from the lowest up."""
    texts = [text for text in axes.texts if text.get_transform() == axes.transAxes]
    return [text.get_text() for text in sorted(texts, key=lambda text: text.get_position()[1])]


def ticks_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


# -- the chart: what it says


def test_a_panel_has_each_latency_its_p99_and_the_floor() -> None:
    medians = (5.0, 10.0, 400.0)
    rows = [row_of(us, size=size, spread=3, floor_us=us / 2) for us, size in zip(medians, SIZES, strict=True)]
    (axes,) = figure_of(rows).axes
    assert (axes.get_xlabel(), ticks_of(axes)) == ("tokens", ["1", "8", "64"])
    for name, expected in (
        ("dcpkernels", medians),
        ("gloo", (120, 120, 120)),
        ("openmpi", (45, 45, 45)),
        ("floor", (2.5, 5, 200)),
    ):
        assert list(line_of(axes, name).get_ydata()) == pytest.approx(expected)
    tops = {round(segment[1][1]) for lines in axes.collections for segment in lines.get_segments()}
    assert tops == {15, 30, 1200, 360, 135}
    assert labels_of(axes) == ["openmpi 0.1x", "gloo 0.3x", "floor 200 us", "dcpkernels 400 us"]
    ratios = {text.get_text() for text in axes.texts} - set(labels_of(axes))
    assert ratios == {"24x", "12x", "9.0x", "4.5x"}  # of the first two sizes; labels have the third
    assert axes.get_yscale() == "log" and axes.get_ylim()[0] < 2.5 and axes.get_ylim()[1] > 1200


def test_points_of_one_row_stand_beside_each_other_in_the_order_of_the_sizes() -> None:
    rows = [row_of(us, size=size) for us, size in ((400.0, 64), (5.0, 1), (10.0, 8))]
    (axes,) = figure_of(rows).axes
    assert list(line_of(axes, "dcpkernels").get_ydata()) == [5, 10, 400]
    places = [line_of(axes, name).get_xdata() for name in ("dcpkernels", "gloo", "openmpi")]
    for ours, gloo, openmpi in zip(*places, strict=True):
        assert ours < gloo < openmpi < ours + 0.2  # of log 64, about 4
    steps = [b - a for a, b in zip(places[0], places[0][1:], strict=False)]
    assert steps[0] == pytest.approx(steps[1])  # 1, 8, 64 on a logarithmic axis


@pytest.mark.parametrize(
    ("rows", "titles", "x_label", "ticks"),
    [
        ([row_of(size=size, num_ranks=w) for w in (2, 8) for size in SIZES], ["2 ranks", "8 ranks"], "tokens", ["1", "8", "64"]),
        ([row_of(op="kv_gather", size=66_048)], ["kv_gather"], "rows", ["66,048"]),
        ([row_of(num_ranks=w) for w in (2, 4, 8)], ["query_gather"], "ranks", ["2", "4", "8"]),
        ([row_of(skew_us=us, timed_from="x" if us else "y") for us in (0.0, 5.0, 50.0)], ["query_gather"], "skew, us", ["0", "5", "50"]),
        ([row_of(size=size, skew_us=us) for us in (0, 5.0) for size in SIZES], ["no skew", "skew 5 us"], "tokens", ["1", "8", "64"]),
        ([row_of(size=size, dtype=dtype) for dtype in ("bf16", "e4m3") for size in SIZES], ["bf16", "e4m3"], "tokens", ["1", "8", "64"]),
        ([row_of(op="a2a_lse_reduce"), row_of(num_ranks=8), row_of()], ["a2a_lse_reduce", "query_gather"], "tokens", ["8"]),
        ([row_of(), row_of(parts=[512, 64])], ["query_gather", "parts 512+64"], "tokens", ["8"]),
    ],
    ids=["ranks", "kv", "along ranks", "along skews", "skews", "dtypes", "ops", "parts"],
)  # fmt: skip
def test_panels_are_of_what_differs(rows: list[dict], titles: list[str], x_label: str, ticks: list[str]) -> None:
    panels = figure_of(rows).axes
    assert [axes.get_title(loc="left") for axes in panels] == titles
    assert panels[0].get_xlabel() == x_label and ticks_of(panels[0]) == ticks


def test_panels_of_one_op_have_one_scale() -> None:
    rows = [row_of(3.0, num_ranks=2, size=size) for size in (1, 8)] + [row_of(3000.0, num_ranks=8, size=1)]
    one, other, kv = figure_of([*rows, row_of(7.0, op="kv_gather")]).axes
    assert one.get_ylim() == other.get_ylim() != kv.get_ylim()


def test_bare_exchanges_are_dashed_in_the_color_of_their_library() -> None:
    (axes,) = figure_of([row_of(size=size, peers=EXCHANGES) for size in SIZES]).axes
    gloo, exchange, openmpi = (line_of(axes, name) for name in ("gloo", "gloo-exchange", "openmpi"))
    assert gloo.get_linestyle() == "-" and exchange.get_linestyle() != "-"
    assert gloo.get_color() == exchange.get_color() != openmpi.get_color()


def test_libraries_that_nobody_has_thought_of_have_colors_of_their_own() -> None:
    peers = {f"peer{i}": 20.0 + i for i in range(4)}
    (axes,) = figure_of([row_of(peers=peers)]).axes
    assert len({line.get_color() for line in axes.lines}) == 6  # ours and the floor, too


def test_rows_that_lack_keys_and_baselines() -> None:
    least = {"op": "a2a_lse_reduce", "num_ranks": 1, "num_tokens": 3, **timed(3.0)}
    (axes,) = figure_of([least]).axes
    assert labels_of(axes) == ["dcpkernels 3 us"]
    rows = [row_of(size=1, peers={"gloo": 20.0}), row_of(size=8, floor_us=None, peers={"openmpi": 30.0}), row_of(size=64, peers={})]  # fmt: skip
    (axes,) = figure_of(rows).axes
    assert sorted(labels_of(axes)) == ["dcpkernels 10 us", "gloo 2.0x", "openmpi 3.0x"]
    assert len(line_of(axes, "gloo").get_xdata()) == 1


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([row_of(5.0), row_of(20.0, size=1)], "query_gather: 2.2x to 9.0x as fast as the fastest baseline"),
        ([row_of(90.0)], "query_gather: 0.5x as fast as the fastest baseline"),
        ([row_of(peers={"gloo-exchange": 70.0})], "query_gather: time of a call"),
        ([row_of(), row_of(op="kv_gather", peers={})], "query_gather, kv_gather: 4.5x as fast as the fastest baseline"),
    ],
)
def test_the_title_is_what_the_rows_say(rows: list[dict[str, Any]], title: str) -> None:
    texts = [text.get_text() for text in figure_of(rows).texts]
    assert texts[0] == title and WHERE in texts and ABOUT in texts


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.25, "0.25 us"), (3.14159, "3.14 us"), (99.96, "100 us"), (999.4, "999 us"), (999.6, "1 ms"), (12_345, "12.3 ms"), (2.5e6, "2.5 s")],
)  # fmt: skip
def test_durations(us: float, text: str) -> None:
    assert bench_plot.duration(us) == text


# -- the chart: that it can be read


MANY = [row_of(3.0 * 1.2**i, size=2**i, peers={"gloo": 50 * 1.2**i, "openmpi": 9 * 1.2**i}) for i in range(30)]
ALIKE = {"gloo": 10.1, "openmpi": 10.2, "gloo-exchange": 10.3, "openmpi-exchange": 9.9}


@pytest.mark.parametrize(
    "rows",
    [
        [row_of()],
        MANY,
        [row_of(size=s, num_ranks=w, skew_us=us, peers=ALIKE, floor_us=10) for s in SIZES for w in (2, 8) for us in (0.0, 5, 50)],
        [row_of(num_ranks=w, dtype=t, skew_us=u) for w in (2, 3, 4, 6, 8) for t in ("bf16", "fp16") for u in (0.0, 5, 50)],
        [row_of(4e5, peers=ALIKE), row_of(4e5, size=9, num_ranks=128, peers=ALIKE)],
        [row_of(peers={name: 4e5 * us for name, us in ALIKE.items()})],
    ],
    ids=["one row", "30 sizes", "18 rows, peers alike", "30 rows of 30 kinds", "labels at the lower edge", "labels at the upper edge"],
)  # fmt: skip
def test_no_text_lies_on_another_one_or_leaves_the_page(rows: list[dict[str, Any]]) -> None:
    figure = figure_of(rows)
    figure.canvas.draw()
    texts = [(text.get_text(), text.get_window_extent()) for text in figure.texts]
    for axes in figure.axes:
        in_axes = [text for text in axes.texts if text.get_transform() == axes.transAxes]
        assert all(0 <= text.get_position()[1] <= 1.03 for text in in_axes), labels_of(axes)
        low, high = axes.get_ylim()  # matplotlib has texts for ticks beyond them, too, and draws none
        in_axes += [tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        in_axes += [*axes.get_xticklabels(), axes._left_title, axes.xaxis.label]
        texts += [(text.get_text(), text.get_window_extent()) for text in in_axes if text.get_text()]
    page = figure.bbox
    for text, box in texts:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, text
    boxes = [(text, box.padded(-1)) for text, box in texts]
    overlaps = [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[:i] if one.overlaps(other)]
    assert overlaps == []


def test_a_png_by_any_name(tmp_path: Path) -> None:
    bench_plot.draw([row_of()], [WHERE], tmp_path / "chart")
    assert (tmp_path / "chart").read_bytes().startswith(b"\x89PNG")


# -- markdown


def cells_of(line: str) -> list[str]:
    assert line.startswith("| ") and line.endswith(" |")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_has_the_cells_of_the_table() -> None:
    columns, rows = ["ranks", "median us", "a|b"], [["2", "1,234.5", "x|y"], ["16", "7.0", "-"]]
    head, rule, *lines = table.markdown(columns, rows).splitlines()
    assert [cells_of(line) for line in (head, *lines)] == [columns, *rows]
    assert all(re.fullmatch("-+:", cell) for cell in cells_of(rule)) and len(cells_of(rule)) == 3
    assert len({len(line) for line in (head, rule, *lines)}) == 1


def test_markdown_of_two_sections() -> None:
    sections = [bench_report.Section("one: *2* <b> `x`", ["a"], [["1"]]), bench_report.Section("two", ["b"], [["2"]])]
    assert bench_report.markdown("AMD | EPYC, x86_64", sections).split("\n\n") == [
        "AMD \\| EPYC, x86_64",
        "one: \\*2\\* \\<b> \\`x\\`",
        "|  a |\n| -: |\n|  1 |",
        "two",
        "|  b |\n| -: |\n|  2 |\n",
    ]


# -- the command


BENCH = ["bench", "query_gather", "--tokens", "1,8", "--iters", "3", "--baselines", "gloo"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is measured: what asked for a row, by its size."""
    sizes: list[int] = []

    def measure_row(op: Any, num_ranks: int, size: int, *args: Any, **options: Any) -> tuple[dict, dict]:
        sizes.append(size)
        return row_of(num_ranks=num_ranks, size=size, peers={"gloo": 120.0}), {}

    monkeypatch.setattr(bench, "measure_row", measure_row)
    return sizes


def test_all_that_is_written(measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: tmp_path / name for name in ("json", "plot", "markdown")}
    assert main(BENCH + [part for name, path in paths.items() for part in (f"--{name}", str(path))]) == 0
    printed = capsys.readouterr().out
    assert len(json.loads(paths["json"].read_text())) == 2 and paths["plot"].read_bytes().startswith(b"\x89PNG")
    where, about, shown = paths["markdown"].read_text().split("\n\n")
    assert machine.describe()["cpu"] in where and about.startswith("query_gather: 96 heads")
    (columns, _, *lines) = map(cells_of, shown.splitlines())
    assert "gloo median us" in columns and [line[:2] for line in lines] == [["2", "1"], ["2", "8"]]
    for line in (columns, *lines):
        assert re.search(r"  +".join(map(re.escape, line)), printed)  # the table's cells, one for one
    assert all(f"wrote {path}" in printed for path in paths.values())


def test_markdown_on_stdout_is_alone_there(
    measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, "--json", str(tmp_path / "json"), "--markdown"]) == 0
    out, err = capsys.readouterr()
    where, about, shown = out.split("\n\n")
    assert len(where.splitlines()) == len(about.splitlines()) == 1 and len(shown.splitlines()) == 4
    assert where in err and f"wrote {tmp_path / 'json'}" in err


@pytest.mark.parametrize("option", [["--json"], ["--json", "-"]])
def test_json_on_stdout_is_alone_there(
    option: list[str], measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, *option, "--markdown", str(tmp_path / "table.md")]) == 0
    out, err = capsys.readouterr()
    assert [row["num_tokens"] for row in json.loads(out)] == [1, 8]
    assert machine.describe()["cpu"] in err and f"wrote {tmp_path / 'table.md'}" in err


def test_stdout_is_for_one(measured: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--json", "-", "--markdown", "-"]) == 2
    assert "--json: must be a file where --markdown goes to stdout" in capsys.readouterr().err and measured == []


@pytest.mark.parametrize("option", ["--plot", "--markdown", "--json"])
def test_a_place_where_nothing_can_be_written(
    option: str, measured: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, option, "/nowhere/file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option}: must be a file in a writable folder (got '/nowhere/file')" in line and measured == []


def test_a_chart_without_matplotlib(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    assert main([*BENCH, "--plot", str(tmp_path / "x.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--plot: matplotlib must be installed, by `pip install 'dcpkernels[cli]'`" in line and measured == []


# -- what is known of rows


def test_rows_of_all_ops_are_understood() -> None:
    for kind in bench.OPS.values():
        assert kind.SIZE in bench_rows.SIZES and bench_rows.SIZES[kind.SIZE] == kind.SIZES
        assert kind.ERROR in bench_rows.RESULTS
        options = {"op": kind.NAME, **kind().fields()}
        assert bench_rows.parameters([options]) == list(options)


def test_what_is_a_parameter_of_a_row() -> None:
    row = row_of(skew_us=5.0, mode="graph", timed_from="last entry", seed=3, new_us=1.5, new_words="x", often=None)
    assert bench_rows.parameters([row]) == ["op", "device", "num_ranks", "num_tokens", "num_heads", "parts", "dtype",
                                            "calls_per_sample", "samples_per_turn", "skew_us", "mode", "new_words"]  # fmt: skip
    assert "often" not in bench_rows.parameters([row | {"often": None}, row | {"often": 1.5}])
    assert row["machine"] == MACHINE


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("num_ranks", 8, "8 ranks"), ("num_rows", 66_048, "66,048 rows"), ("num_tokens", 1, "1 tokens"), ("dtype", "bf16", "bf16"),
        ("wire", "packet", "wire packet"), ("packet_bytes", 16, "packet bytes 16"), ("zero_copy", True, "zero copy"),
        ("zero_copy", False, ""), ("skew_us", 5.0, "skew 5 us"), ("skew_us", 0.0, ""), ("parts", (512, 64), "parts 512+64"), ("parts", (), ""),
    ],
)  # fmt: skip
def test_parameters_in_words(key: str, value: Any, text: str) -> None:
    assert bench_rows.in_words(key, value) == text


@pytest.mark.parametrize(
    "op",
    [
        ["a2a_lse_reduce", "--heads", "4", "--head-dim", "64", "--tokens", "2", "--zero-copy", "no"],
        ["query_gather", "--heads", "4", "--head-dim", "16", "--tokens", "2"],
        ["kv_gather", "--kv-dim", "16", "--rows", "9"],
    ],
    ids=lambda op: op[0],
)
def test_a_real_row(op: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of its keys are described, it is of its own case, and it can be drawn."""
    json_path, plot = tmp_path / "rows.json", tmp_path / "plot"
    assert main(["bench", *op, "--iters", "2", "--warmup", "1", "--turn", "1", "--json", str(json_path), "--plot", str(plot)]) == 0  # fmt: skip
    (row,) = json.loads(json_path.read_text())
    page = (Path(__file__).parents[1] / "docs/benchmarking.md").read_text()
    table = page[page.index("## What a row has") :].split("\n## ")[0]
    described = {key for line in table.splitlines() if line.startswith("|") for key in re.findall(r"`(\w+)`", line.split("|")[1])}  # fmt: skip
    assert set(row) <= described
    measured = {"entry_spread_us", "host_us"} | bench_rows.RESULTS | bench_rows.CIRCUMSTANCES
    assert set(row) - set(bench_rows.parameters([row])) <= measured
    assert main(["bench", "--compare", str(json_path), str(json_path)]) == 0
    assert "1.00" in capsys.readouterr().out and plot.read_bytes().startswith(b"\x89PNG")
