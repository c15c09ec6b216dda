"""The chart of `dcpkernels plan`: what fits, by size of DCP group and by length of the requests. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcpkernels.cli import chart
from dcpkernels.cli.chart import FAINT, INK, OTHER, OURS, REST, heading
from dcpkernels.planner import Capacity
from dcpkernels.planner.checks import GIB

if TYPE_CHECKING:
    from dcpkernels.cli.plan import Plan

_PANEL_INCHES = (6.4, 4.85)
_LENGTHS = 400  # points of a line

Panel = Callable[[Axes], None]


def draw(plan: Plan, path: Path, more: Sequence[Panel] = ()) -> None:
    """Writes the chart: two panels of capacity, and `more` below them."""
    panels: list[Panel] = [lambda axes: draw_capacity(axes, plan), lambda axes: draw_requests(axes, plan), *more]
    num_rows = -(-len(panels) // 2)
    height = 0.55 + _PANEL_INCHES[1] * num_rows
    figure = chart.new_figure(2 * _PANEL_INCHES[0], height)
    figure.subplots_adjust(left=0.06, right=0.92, top=1 - 1.32 / height, bottom=0.62 / height, wspace=0.24, hspace=0.42)
    _titles(figure, plan, 0.02, height)
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(num_rows, 2, place)
        axes.tick_params(labelsize=9)  # a panel may measure its labels
        panel(axes)
        chart.plain_frame(axes)
    chart.save(figure, path)


def amount(tokens: float) -> str:
    """1,932,788 as 1.933M: four digits, as engines' notes have it."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{suffix}" if tokens < 1e4 * unit else f"{tokens / unit:,.0f}{suffix}"
    return f"{tokens:,.0f}"


def _titles(figure: Figure, plan: Plan, left: float, height: float) -> None:
    inputs, asked = plan.inputs, plan.asked
    title = (
        f"{plan.model.name}, TP {inputs['tp']}, DCP {asked.dcp}: {amount(asked.tokens)} tokens, "
        f"{asked.concurrency:,.2f} requests of {asked.max_model_len:,}"
    )
    figure.text(left, 1 - 0.3 / height, title, fontsize=15, weight="bold", color=INK, va="center")
    state = f" · {inputs['state_dtype']} state" if asked.state_blocks else ""
    about = (
        f"{asked.available_bytes / GIB:.2f} GiB a GPU for the KV cache · {inputs['kv_dtype']} KV{state} · prefix caching "
        f"{'off' if inputs['no_prefix_caching'] else 'on'} · blocks of {asked.block_tokens:,} tokens a rank · computed, "
        "not measured"
    )
    figure.text(left, 1 - 0.6 / height, about, fontsize=9, color=FAINT, va="center")


def draw_capacity(axes: Axes, plan: Plan) -> None:
    """Tokens that fit, a bar for each size; a run that is compared with, and had other memory, has a bar of its own."""
    unsharded = plan.by_dcp[0].blocks_per_request
    bars = [
        (
            f"DCP {c.dcp}",
            c.tokens,
            OURS if c.dcp == plan.asked.dcp else REST,
            f"{unsharded / c.blocks_per_request:.3f}x",
        )
        for c in plan.by_dcp
    ]
    detail = f"in requests of {plan.asked.max_model_len:,}; ratios are of equal memory"
    parts = plan.decomposition
    if parts is not None and parts.baseline not in plan.by_dcp:
        old = parts.baseline
        bars.insert(0, (f"DCP {old.dcp}\n{old.available_bytes / GIB:.2f} GiB", old.tokens, OTHER, "baseline"))
        detail = (
            f"{float(parts.ratio):.2f}x the baseline = {float(parts.memory_factor):.3f}x memory * "
            f"{float(parts.dcp_factor):.3f}x DCP; ratios: equal memory"
        )
    heading(axes, "Tokens in the KV cache", detail)
    names, tokens, colors, notes = zip(*bars, strict=True)
    axes.bar(range(len(bars)), tokens, color=colors, width=0.66)
    size = 9 if len(bars) <= 7 else 6
    axes.set_xticks(range(len(bars)), names, fontsize=size)
    for place, (count, note) in enumerate(zip(tokens, notes, strict=True)):
        axes.text(place, count, f"{amount(count)}\n{note}", ha="center", va="bottom", fontsize=size, color=INK)
    axes.set_ylim(0, max(*tokens, 1) * 1.14)
    axes.yaxis.set_major_formatter(lambda tick, _: amount(tick))


def draw_requests(axes: Axes, plan: Plan) -> None:
    """Requests that fit at a time by their length, a line for each size. State blocks bend them to one level."""
    longest, asked = plan.asked.max_model_len, plan.asked
    detail = "of equal length"
    if asked.state_blocks:
        detail = (
            f"DCP {asked.dcp}: {asked.short_request_limit:,} however short, since {asked.state_blocks} of "
            f"{asked.layout.request_blocks(1)} blocks hold state"
        )
    heading(axes, "Requests that fit at a time, by their length", detail)
    shortest = max(1, min(1024, longest // 2))
    lengths = sorted({round(shortest * (longest / shortest) ** (i / _LENGTHS)) for i in range(_LENGTHS + 1)})
    for capacity in plan.by_dcp:
        is_asked = capacity.dcp == asked.dcp
        color = OURS if is_asked else FAINT
        axes.plot(lengths, [_fit(capacity, n) for n in lengths], color=color, linewidth=2.4 if is_asked else 1.2,
                  drawstyle="steps-post")  # fmt: skip
        text = f" DCP {capacity.dcp}: {capacity.concurrency:,.2f}"
        axes.text(longest, capacity.concurrency, text, color=OURS if is_asked else INK, fontsize=9, va="center")
    axes.set_xscale("log")
    if asked.num_blocks:
        axes.set_yscale("log")
    axes.set_xlim(shortest, longest * max(1.3, (longest / shortest) ** 0.27))
    axes.set_xlabel("tokens of a request", fontsize=9, color=INK)
    axes.xaxis.set_major_formatter(lambda tick, _: amount(tick))
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:,g}")
    axes.minorticks_off()


def _fit(capacity: Capacity, num_tokens: int) -> float:
    return capacity.num_blocks / capacity.layout.request_blocks(num_tokens)
