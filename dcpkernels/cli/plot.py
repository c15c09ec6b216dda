"""The demo's chart: what sharding the cache saves in memory and in time, and that the result is right. Needs
matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcpkernels.cli import chart
from dcpkernels.cli.chart import FAINT, INK, LIMIT, OTHER, OURS, REST, heading

_MIB = 2**20


def draw(report: Mapping[str, Any], times_us: Mapping[str, Sequence[float]], path: Path) -> None:
    """Writes the chart."""
    figure = chart.new_figure(13, 5.6)
    cache, latency, error = figure.subplots(1, 3, width_ratios=(0.7, 1.4, 1))
    figure.subplots_adjust(left=0.055, right=0.98, top=0.755, bottom=0.105, wspace=0.28)
    _titles(figure, report)
    _draw_cache(cache, report)
    _draw_latency(latency, report, times_us)
    _draw_error(error, report)
    for axes in (cache, latency, error):
        chart.plain_frame(axes)
    chart.save(figure, path)


def _titles(figure: Figure, report: Mapping[str, Any]) -> None:
    options, is_right = report["options"], report["is_right"]
    tp, dcp = report["step_us"]
    title = (
        f"Kimi-K3's MLA layer, contexts of up to {options['context']:,} tokens: {dcp} "
        f"{'gives the output of' if is_right else 'FAILS against'} {tp}"
    )
    figure.text(0.02, 0.945, title, fontsize=15, weight="bold", color=INK if is_right else LIMIT, va="center")
    machine = report["machine"]
    about = (
        f"{report['num_parameters'] / 1e6:,.0f}M random parameters, {options['config']['num_heads']} heads, bf16 · "
        f"{options['batch']} requests, one token each · interleave {options['interleave']} · target {report['device']} "
        f"({report['isa']}), {machine['cpu']}, {options['num_ranks']} processes on {machine['cpus']} CPUs · "
        f"dcpkernels {machine['dcpkernels']}, torch {machine['torch']}"
    )
    figure.text(0.02, 0.89, about, fontsize=9, color=FAINT, va="center")


def _draw_cache(axes: Axes, report: Mapping[str, Any]) -> None:
    sizes = {arm: num_bytes / _MIB for arm, num_bytes in report["kv_bytes_per_rank"].items()}
    most, least = sizes.values()
    heading(axes, "KV cache a rank holds", f"MiB of this layer; {most / least:.2f}x less")
    axes.bar(list(sizes), list(sizes.values()), color=[OTHER, OURS], width=0.6)
    for place, size in enumerate(sizes.values()):
        axes.text(place, size, f"{size:,.1f}", ha="center", va="bottom", fontsize=9.5, weight="bold", color=INK)
    axes.set_ylim(0, most * 1.1)


def _draw_latency(axes: Axes, report: Mapping[str, Any], times_us: Mapping[str, Sequence[float]]) -> None:
    arms = list(report["step_us"])
    heading(
        axes,
        "One decode step",
        f"ms, slowest rank; speed-up of the attention section {report['ratio']:.2f}x, of all {report['step_ratio']:.2f}x",
    )
    for y, (arm, color) in enumerate(zip(arms, (OTHER, OURS), strict=True)):
        attention, step = report["attention_us"][arm] / 1e3, report["step_us"][arm] / 1e3
        axes.barh(y, step, color=REST, height=0.5)
        axes.barh(y, attention, color=color, height=0.5)
        samples = [sample / 1e3 for sample in times_us[f"{arm.rstrip('0123456789')}_step"]]
        axes.scatter(samples, [y] * len(samples), s=14, color=INK, alpha=0.4, linewidths=0, zorder=3)
        text = f"{arm}: attention {attention:,.0f}, step {step:,.0f}"
        axes.text(0, y - 0.28, text, color=color, fontsize=9.5, weight="bold", va="bottom")
    collectives = ", ".join(
        f"{op} {part['us']:,.0f} us ({100 * part['share_of_step']:.1f} %)" for op, part in report["collectives"].items()
    )
    axes.text(0, 1.31, f"by itself, {collectives} of the step", color=INK, fontsize=9, va="top")
    axes.set_yticks([])
    axes.set_ylim(1.6, -0.6)
    axes.set_xlabel("ms", fontsize=9, color=INK)


def _draw_error(axes: Axes, report: Mapping[str, Any]) -> None:
    errors, lengths = report["row_err_over_bound"], report["sequence_lengths"]
    heading(axes, "Output of the one against the other", "largest difference of each row / its bound")
    shown = [min(error, 1e6) for error in errors]  # a NaN in the output counts as infinite
    colors = [OURS if error <= 1 else LIMIT for error in errors]
    rows = range(len(shown))
    axes.hlines(rows, 0, shown, color=colors, linewidth=2)
    axes.scatter(shown, rows, s=34, color=colors, zorder=3, clip_on=False)
    axes.axvline(1, color=LIMIT, linewidth=1.5, linestyle=(0, (4, 3)))
    axes.text(1, -0.62, "bound ", color=LIMIT, fontsize=9, ha="right", va="bottom")
    if len(lengths) <= 24:
        axes.set_yticks(rows, [f"{length:,}" for length in lengths])
    axes.set_ylim(len(shown) - 0.4, -0.7)
    if max(shown) > 2:
        axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, max(1.1, *shown) * 1.02)
    axes.set_ylabel("tokens of the row's sequence" if len(lengths) <= 24 else "row", fontsize=9, color=INK)
