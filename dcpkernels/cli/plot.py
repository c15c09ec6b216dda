"""The demo's chart: what sharding saves, what the merge costs, and that the result is right. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dcpkernels.testing.timing import summarize

_OURS, _OTHER, _LIMIT, _INK, _FAINT = "#0b7a75", "#c9762b", "#b23a48", "#22303c", "#8a97a3"
_MIB = 2**20


def draw(report: Mapping[str, Any], times_us: Mapping[str, Sequence[float]], path: Path) -> None:
    """Writes the chart. No pyplot: it would look for a display and keep the figure alive."""
    figure = Figure(figsize=(13, 5.6), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    cache, latency, error = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))
    figure.subplots_adjust(left=0.055, right=0.98, top=0.755, bottom=0.105, wspace=0.28)
    _titles(figure, report)
    _draw_cache(cache, report)
    _draw_latency(latency, times_us)
    _draw_error(error, report)
    for axes in (cache, latency, error):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_FAINT)
        axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    # By its name: matplotlib would take the format from the suffix, and --png may have another or none.
    figure.savefig(path, format="png")


def _titles(figure: Figure, report: Mapping[str, Any]) -> None:
    options, num_ranks = report["options"], report["options"]["num_ranks"]
    passed = report["passed"]
    verdict = "matches" if passed else "does NOT match"
    title = (
        f"Contexts of up to {options['context']:,} tokens over {num_ranks} ranks: "
        f"the merge {verdict} unsharded attention"
    )
    figure.text(0.02, 0.945, title, fontsize=15, weight="bold", color=_INK if passed else _LIMIT, va="center")
    machine = report["machine"]
    about = (
        f"a2a_lse_reduce · {options['batch']} decode rows, 96 heads, latent 512, bf16, "
        f"interleave {options['interleave']} · target cpu ({report['isa']}), {machine['cpu']}, "
        f"{num_ranks} processes on {machine['cpus']} CPUs · "
        f"dcpkernels {machine['dcpkernels']}, torch {machine['torch']}"
    )
    figure.text(0.02, 0.89, about, fontsize=9, color=_FAINT, va="center")


def _heading(axes: Axes, text: str, detail: str) -> None:
    axes.text(0, 1.10, text, transform=axes.transAxes, fontsize=11.5, weight="bold", color=_INK, va="bottom")
    axes.text(0, 1.035, detail, transform=axes.transAxes, fontsize=9, color=_FAINT, va="bottom")


def _draw_cache(axes: Axes, report: Mapping[str, Any]) -> None:
    sizes = [rank["kv_bytes"] / _MIB for rank in report["ranks"]]
    whole = report["kv_bytes_unsharded"] / _MIB
    largest = max(sizes)
    _heading(
        axes, "KV cache a rank holds", f"MiB of one layer; {whole / largest:.1f}x less than all of it on every rank"
    )
    axes.bar(range(len(sizes)), sizes, color=_OURS, width=0.72)
    axes.axhline(whole, color=_OTHER, linewidth=1.5, linestyle=(0, (4, 3)))
    axes.text(len(sizes) - 0.6, whole, f"unsharded {whole:,.1f}", color=_OTHER, fontsize=9, va="bottom", ha="right")
    if len(sizes) <= 12:
        for rank, size in enumerate(sizes):
            axes.text(rank, size, f"{size:,.1f}", ha="center", va="bottom", fontsize=8, color=_INK)
        axes.set_xticks(range(len(sizes)))
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.set_ylim(0, whole * 1.12)
    axes.set_xlabel("rank", fontsize=9, color=_INK)


def _draw_latency(axes: Axes, times_us: Mapping[str, Sequence[float]]) -> None:
    medians = [summarize(times).median_us for times in times_us.values()]
    _heading(
        axes,
        "Merge latency",
        f"us a call, slowest rank, calls in turns; median {max(medians) / min(medians):.1f}x apart",
    )
    for y, ((name, times), median) in enumerate(zip(times_us.items(), medians, strict=True)):
        color = _OURS if y == 0 else _OTHER
        # Spread by a fixed pattern, not by chance: the same numbers give the same chart.
        offsets = [0.26 * math.sin(2.4 * i) for i in range(len(times))]
        axes.scatter(times, [y + offset for offset in offsets], s=14, color=color, alpha=0.45, linewidths=0)
        axes.plot([median, median], [y - 0.33, y + 0.33], color=color, linewidth=2.5, solid_capstyle="butt")
        label = "a2a_lse_reduce" if y == 0 else f"{name} all-to-all + torch merge"
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom"}
        axes.text(0.02, y - 0.36, f"{label}, median {median:,.0f}", color=color, fontsize=9.5, weight="bold", **where)
    axes.set_xscale("log")
    axes.set_xlim(min(map(min, times_us.values())) / 2, max(map(max, times_us.values())) * 2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([])
    axes.set_ylim(len(medians) - 0.5, -0.65)
    axes.set_xlabel("us, logarithmic", fontsize=9, color=_INK)
    axes.grid(axis="x", color="#e6eaed", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_error(axes: Axes, report: Mapping[str, Any]) -> None:
    errors, lengths = report["row_error_over_tolerance"], report["sequence_lengths"]
    _heading(axes, "Error against unsharded fp32", "largest of each row / tolerance (bf16 roundings)")
    shown = [min(error, 1e6) for error in errors]  # a NaN in the output counts as infinite
    colors = [_OURS if error <= 1 else _LIMIT for error in errors]
    rows = range(len(shown))
    axes.hlines(rows, 0, shown, color=colors, linewidth=2)
    axes.scatter(shown, rows, s=34, color=colors, zorder=3, clip_on=False)
    axes.axvline(1, color=_LIMIT, linewidth=1.5, linestyle=(0, (4, 3)))
    axes.text(1, -0.62, "tolerance ", color=_LIMIT, fontsize=9, ha="right", va="bottom")
    if len(lengths) <= 24:
        axes.set_yticks(rows, [f"{length:,}" for length in lengths])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    if max(shown) > 2:
        axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, max(1.1, *shown) * 1.02)
    axes.set_ylabel("tokens of the row's sequence" if len(lengths) <= 24 else "row", fontsize=9, color=_INK)
