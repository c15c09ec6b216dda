"""The bench's chart: latency by size, ours beside its baselines and the floor. Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from dcpkernels.cli import bench_rows, chart
from dcpkernels.cli.baselines import is_exchange
from dcpkernels.cli.bench_op import OURS
from dcpkernels.cli.bench_rows import SIZES, Row, in_words, value_of

# Of a baseline and of its bare exchange, which is dashed; by the first word of the name, later ones in order.
_COLORS = {"gloo": chart.OTHER, "openmpi": "#5b5ea6"}
_MORE_COLORS = ("#a23b72", "#7a6a2f", "#3c6e9f", "#6b4f4f")
_MAX_COLUMNS = 4
_PANEL_WIDTH, _PANEL_HEIGHT = 3.0, 2.6  # inches, of the frame that the lines are in
_LEFT, _BELOW, _ABOVE = 0.75, 0.55, 0.35  # around it: ticks, title
_LETTER = 0.082  # inches, of a label
_MAX_RATIOS = 6  # points of a line that have theirs written
_KEY = (
    "points: medians; thin lines: up to the 99th percentile; dashes: bare exchanges; floor: a copy of as many bytes, in the "
    "same run; ratios: times of baselines / that of dcpkernels"
)


class Panel(NamedTuple):
    """Rows that differ in one number alone, in its order."""

    title: str
    x_key: str
    rows: list[Row]


class Label(NamedTuple):
    y: float
    text: str
    color: str


def draw(rows: Sequence[Row], about: Sequence[str], path: Path) -> None:
    """Writes the chart. `about`: lines that say where the numbers come from and how they were taken."""
    chart.save(figure_of(rows, about), path)


def figure_of(rows: Sequence[Row], about: Sequence[str]) -> Figure:
    panels = panels_of(rows)
    names = [name for row in rows for name in row.get("baselines", {})]
    room = 0.2 + _LETTER * max(len(f"{name} 000x") for name in (f"{OURS} ", *names))
    pitch = (_LEFT + _PANEL_WIDTH + room, _ABOVE + _PANEL_HEIGHT + _BELOW)
    num_columns = min(len(panels), _MAX_COLUMNS)
    num_columns = -(-len(panels) // -(-len(panels) // num_columns))  # as many lines, but full ones
    width = max(num_columns * pitch[0] + 0.1, 7.2)
    lines = [part for line in dict.fromkeys((*about, _KEY)) for part in textwrap.wrap(line, int(width * 15))]
    head = 0.65 + 0.18 * len(lines)
    height = head + -(-len(panels) // num_columns) * pitch[1]
    figure = chart.new_figure(width, height)
    figure.text(
        0.3 / width, 1 - 0.33 / height, title_of(rows), fontsize=13, weight="bold", color=chart.INK, va="center"
    )
    for place, line in enumerate(lines):
        figure.text(0.3 / width, 1 - (0.65 + 0.18 * place) / height, line, fontsize=8, color=chart.FAINT, va="center")
    colors = _colors(rows)
    for place, panel in enumerate(panels):
        left = _LEFT + place % num_columns * pitch[0]
        bottom = height - head - place // num_columns * pitch[1] - _ABOVE - _PANEL_HEIGHT
        frame = (left / width, bottom / height, _PANEL_WIDTH / width, _PANEL_HEIGHT / height)
        alike = [row for row in rows if row["op"] == panel.rows[0]["op"]]
        _draw_panel(figure.add_axes(frame), panel, colors, _limits(alike))
    return figure


def title_of(rows: Sequence[Row]) -> str:
    ops = list(dict.fromkeys(str(row["op"]) for row in rows))
    speedups = [row["speedup"] for row in rows if row.get("speedup")]
    if not speedups:
        return f"{', '.join(ops)}: time of a call"
    least, most = (f"{speedup:.1f}x" for speedup in (min(speedups), max(speedups)))
    return f"{', '.join(ops)}: {least if least == most else f'{least} to {most}'} as fast as the fastest baseline"


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Small multiples: by op, then by all that differs besides what the x axis has, which is the size where there are
    several, else the number of ranks, else the skew."""
    panels = []
    ops = list(dict.fromkeys(row["op"] for row in rows))
    for op in ops:
        of_op = [row for row in rows if row["op"] == op]
        size = bench_rows.size_key(of_op[0]) or "num_ranks"
        differ = bench_rows.varying(of_op, bench_rows.parameters(of_op))
        x_key = next((key for key in (size, "num_ranks", "skew_us") if key in differ), size)
        by_rest: dict[tuple, list[Row]] = {}
        rest = [key for key in differ if key != x_key]
        for row in of_op:
            by_rest.setdefault(tuple(value_of(row, key) for key in rest), []).append(row)
        for values, group in by_rest.items():
            words = [_title_word(key, value) for key, value in zip(rest, values, strict=True)]
            words = [str(op), *filter(None, words)]
            title = ", ".join(words[1:] if len(ops) == 1 and len(words) > 1 else words)
            panels.append(Panel(title, x_key, sorted(group, key=lambda row: value_of(row, x_key))))
    return panels


def _title_word(key: str, value: object) -> str:
    return "no skew" if key == "skew_us" and not value else in_words(key, value)


def _colors(rows: Iterable[Row]) -> dict[str, str]:
    """By the name of a baseline's library."""
    found = dict.fromkeys(_library(name) for row in rows for name in row.get("baselines", {}))
    more = iter(_MORE_COLORS * (1 + len(found) // len(_MORE_COLORS)))
    return {name: _COLORS.get(name) or next(more) for name in found}


def _library(name: str) -> str:
    return name.removesuffix("-exchange")


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Of the y axis, the same in all panels of an op."""
    times = [t for row in rows for entry in (row, *row.get("baselines", {}).values()) for t in (entry["median_us"], entry["p99_us"])]  # fmt: skip
    floors = [row["floor_us"] for row in rows if row.get("floor_us")]
    return min(times + floors) / 1.3, max(times) * 1.3


def _draw_panel(axes: Axes, panel: Panel, colors: dict[str, str], limits: tuple[float, float]) -> None:
    rows = panel.rows
    chart.plain_frame(axes)
    axes.set_title(panel.title, fontsize=10, weight="bold", color=chart.INK, loc="left")
    _set_up_y(axes, limits)
    names = list(dict.fromkeys(name for row in rows for name in row.get("baselines", {})))
    place_of = _set_up_x(axes, panel, len(names) + 1)

    labels = []
    floors = [row.get("floor_us") for row in rows]
    if all(floors):
        xs = [place_of(row, len(names) / 2) for row in rows] if len(rows) > 1 else axes.get_xlim()
        ys = floors if len(rows) > 1 else floors * 2
        axes.plot(xs, ys, color=chart.FAINT, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2, gid="floor")
        labels.append(Label(floors[-1], f"floor {duration(floors[-1])}", chart.FAINT))
    for series, name in enumerate(names, start=1):
        of_name = [row for row in rows if name in row.get("baselines", {})]
        entries = [row["baselines"][name] for row in of_name]
        ratios = [entry["median_us"] / row["median_us"] for entry, row in zip(entries, of_name, strict=True)]
        color, xs = colors[_library(name)], [place_of(row, series) for row in of_name]
        _draw_line(axes, xs, entries, color, name, 20 - series)
        labels.append(Label(entries[-1]["median_us"], f"{name} {factor(ratios[-1])}", color))
        if len(names) <= 2 and len(rows) <= _MAX_RATIOS and not is_exchange(name):
            for x, entry, ratio in list(zip(xs, entries, ratios, strict=True))[:-1]:
                axes.annotate(factor(ratio), (x, entry["median_us"]), (4, -4), textcoords="offset points", fontsize=7.5,
                              color=color, va="top", zorder=40,
                              bbox={"color": "white", "alpha": 0.75, "pad": 0.5, "linewidth": 0})  # fmt: skip
    _draw_line(axes, [place_of(row, 0) for row in rows], rows, chart.OURS, OURS, 30)
    labels.append(Label(rows[-1]["median_us"], f"{OURS} {duration(rows[-1]['median_us'])}", chart.OURS))
    _write_labels(axes, labels)


def _set_up_y(axes: Axes, limits: tuple[float, float]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(limits)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if limits[1] / limits[0] > 30 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: duration(us)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color=chart.REST, linewidth=0.5, zorder=0)


def _set_up_x(axes: Axes, panel: Panel, num_series: int) -> Callable[[Row, float], float]:
    """Where a row's point of a series belongs: those of one row stand beside each other, so that the thin lines do."""
    values = list(dict.fromkeys(value_of(row, panel.x_key) for row in panel.rows))
    is_log = all(value > 0 for value in values)
    places = [math.log(value) for value in values] if is_log else list(range(len(values)))  # a skew may be 0
    span = places[-1] - places[0] or 1.0
    step = span * (0.018 if len(values) > 1 else 0.7 / num_series)
    at = dict(zip(values, places, strict=True))
    axes.set_xlim(places[0] - 0.07 * span - 0.5 * num_series * step, places[-1] + 0.07 * span + 0.5 * num_series * step)
    ticks: list[tuple[float, str]] = []
    for place, value in zip(places, values, strict=True):
        room = span * 0.025 * (len(f"{value:,g}") + 2)
        if not ticks or place - ticks[-1][0] > room:
            ticks.append((place, f"{value:,g}"))
    axes.xaxis.set_major_locator(FixedLocator([place for place, _ in ticks]))
    axes.set_xticklabels([text for _, text in ticks])
    words = {"num_ranks": "ranks", "skew_us": "skew, us"} | SIZES
    axes.set_xlabel(words.get(panel.x_key, panel.x_key), fontsize=9, color=chart.INK, labelpad=1)
    return lambda row, series: at[value_of(row, panel.x_key)] + (series - (num_series - 1) / 2) * step


def _draw_line(axes: Axes, xs: Sequence[float], entries: Sequence[Row], color: str, name: str, zorder: int) -> None:
    medians, p99s = ([entry[key] for entry in entries] for key in ("median_us", "p99_us"))
    axes.vlines(xs, medians, p99s, color=color, linewidth=1, alpha=0.5, zorder=zorder)
    style = (0, (2, 1.5)) if is_exchange(name) else "-"
    axes.plot(xs, medians, linestyle=style, linewidth=2.2 if name == OURS else 1.5, marker="o", markersize=4.5,
              color=color, zorder=zorder, gid=name)  # fmt: skip


def _write_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Right of the last points, moved apart where they would lie on each other."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    gap = 0.068  # of the panel's height: a line of this size
    heights: list[float] = []
    ordered = sorted(labels, key=lambda label: label.y)
    for label in ordered:
        height = (math.log(label.y) - low) / (high - low)
        heights.append(max(height, heights[-1] + gap) if heights else max(height, 0.0))
    for place in reversed(range(len(heights))):  # and down again, where they have left the panel
        limit = 1.02 if place == len(heights) - 1 else heights[place + 1] - gap
        heights[place] = min(heights[place], limit)
    for label, height in zip(ordered, heights, strict=True):
        axes.text(1.025, height, label.text, transform=axes.transAxes, fontsize=8.5, color=label.color, va="center",
                  weight="bold" if label.text.startswith(OURS) else "normal")  # fmt: skip


def duration(us: float) -> str:
    """With three digits, in the unit that suits."""
    for limit, unit in ((1e3, "us"), (1e6, "ms"), (math.inf, "s")):
        if us < limit * 0.9995:
            value = us / (limit / 1e3 if limit != math.inf else 1e6)
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    raise AssertionError(us)


def factor(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"
