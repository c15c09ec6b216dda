"""The planner's charts: what a mix of requests holds over time, and where DCP breaks even. They draw on axes of the
caller's; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dcpkernels.cli.chart import INK, OTHER, OURS, heading, plain_frame
from dcpkernels.planner.replay import Replay
from dcpkernels.planner.step_time import PUBLISHED_CROSSINGS, StepTimeModel

_NEITHER = "#e4e7ea"  # zone
# DCP sizes, from the other arm's colour to ours and beyond.
_SIZES = ("#c9762b", "#93802f", "#4f8a4f", "#0b7a75", "#14597f", "#3b3a72")
_EDGE = 200  # places along a zone's edge


def draw_tokens_in_use(
    axes: Axes, replays: Mapping[int, Replay], capacity_tokens: Mapping[int, float] | None = None
) -> None:
    """Tokens that the requests of a trace hold over time, and lines at what the pool can hold.

    Args:
        axes: to draw on.
        replays: of one trace at one load, by DCP size. Sizes whose requests never waited hold the same: one line.
        capacity_tokens: by DCP size. None: tokens of this very mix, held at the peak over the share of the pool they
            took.
    """
    sizes = sorted(replays)
    capacities = capacity_tokens or {
        dcp: replays[dcp].peak_tokens / replays[dcp].peak_share for dcp in sizes if replays[dcp].peak_tokens
    }
    colors = {dcp: _SIZES[min(i, len(_SIZES) - 1)] for i, dcp in enumerate(sizes)}
    any_play = replays[sizes[0]]
    load = "" if any_play.load == 1 else f", played {any_play.load:g} times as fast"
    heading(axes, "Tokens in use", f"{any_play.num_requests:,} requests{load}; lines: what the pool holds of this mix")
    minutes = max(play.end_s for play in replays.values()) > 600
    together: dict[tuple, list[int]] = {}
    for dcp in sizes:
        together.setdefault((replays[dcp].series.seconds, replays[dcp].series.tokens), []).append(dcp)
    for (seconds, tokens), same in together.items():
        color = INK if len(same) > 1 else colors[same[0]]
        times = [second / (60 if minutes else 1) for second in seconds]
        axes.plot(times, tokens, color=color, linewidth=1.1, drawstyle="steps-pre", zorder=3)
        if 1 < len(same) < len(sizes):
            axes.text(0.5, 0.03, f"dark: DCP {', '.join(map(str, same))} alike", transform=axes.transAxes, fontsize=9,
                      color=INK, ha="center")  # fmt: skip
    top = max([*capacities.values(), *(play.peak_tokens for play in replays.values())])
    axes.set_ylim(0, top * 1.12)
    axes.set_xlim(0, max(play.end_s for play in replays.values()) / (60 if minutes else 1))
    for dcp, place in zip(capacities, _apart([capacities[dcp] for dcp in capacities], top * 0.075), strict=True):
        axes.axhline(capacities[dcp], color=colors[dcp], linewidth=1.5, linestyle=(0, (4, 3)))
        label = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": colors[dcp]}
        axes.annotate(f"DCP {dcp}: {_short(capacities[dcp])}", (1, place), xytext=(4, 0), fontsize=9.5, weight="bold",
                      va="center", annotation_clip=False, **label)  # fmt: skip
        counts = {"wait": replays[dcp].num_waited, "never fit": len(replays[dcp].never_fit)}
        if text := ", ".join(f"{count:,} {what}" for what, count in counts.items() if count):
            axes.annotate(text, (1, place), xytext=(4, -13), fontsize=8.5, va="center", annotation_clip=False, **label)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_xlabel("minutes" if minutes else "seconds", fontsize=9, color=INK)
    plain_frame(axes)


def draw_break_even(
    axes: Axes,
    model: StepTimeModel,
    dcp: int,
    *,
    contexts: tuple[int, int] = (1024, 2**20),
    tokens: tuple[int, int] = (1, 512),
    marks: Sequence[tuple[int, int, str]] = (),
    with_published: bool = True,
) -> None:
    """The plane of context and batch in three zones: TP wins, too close to call, DCP wins.

    Args:
        axes: to draw on; both become logarithmic.
        model, dcp: the machine and layer, and the size of the group.
        contexts, tokens: ends of the axes, tokens of context and tokens of a step.
        marks: (context, tokens, text) of points to show, such as what was asked for.
        with_published: show where others have seen DCP overtake (`PUBLISHED_CROSSINGS`: another machine
            and model, a group of 8). Nothing for other sizes.
    """
    heading(
        axes, f"Where DCP {dcp} breaks even", f"{model.hardware.name}, TP {model.tp}; one layer's attention section"
    )
    places = [tokens[0] * (tokens[1] / tokens[0]) ** (i / _EDGE) for i in range(_EDGE + 1)]
    counts = sorted({max(1, round(place)) for place in places})  # of a few tokens there are only a few
    edges = [model.break_even(count, dcp) for count in counts]
    lows, highs = [edge.low for edge in edges], [edge.high for edge in edges]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(contexts)
    axes.set_ylim(tokens[0] * 0.8, tokens[1])  # so that one token is not on the axis
    # Down to the axis.
    counts, lows, highs = [0.8 * counts[0], *counts], [lows[0], *lows], [highs[0], *highs]
    axes.fill_betweenx(counts, contexts[0], lows, color=OTHER, alpha=0.28, linewidth=0)
    axes.fill_betweenx(counts, lows, highs, color=_NEITHER, linewidth=0)
    axes.fill_betweenx(counts, highs, max(contexts[1], *highs), color=OURS, alpha=0.28, linewidth=0)
    axes.plot(lows, counts, color=OTHER, linewidth=1.6)
    axes.plot(highs, counts, color=OURS, linewidth=1.6)
    # Labels where the zones are wide and nothing is marked: TP low and to the left, DCP high and to the right.
    for text, color, left, right, height in (
        ("TP wins", OTHER, [contexts[0]] * len(counts), lows, 0.25),
        ("too close\nto call", INK, lows, highs, 0.66),
        (f"DCP {dcp} wins", OURS, highs, [contexts[1]] * len(counts), 0.85),
    ):
        count = tokens[0] * (tokens[1] / tokens[0]) ** height
        i = min(range(len(counts)), key=lambda place: abs(counts[place] - count))
        begin, end = max(left[i], contexts[0]), min(right[i], contexts[1])
        if end > 2 * begin:
            axes.text(
                (begin * end) ** 0.5, count, text, color=color, fontsize=11, weight="bold", ha="center", va="center"
            )
    if with_published and dcp == 8:
        _draw_published(axes, contexts, tokens)
    for context, count, text in marks:
        if contexts[0] <= context <= contexts[1] and tokens[0] <= count <= tokens[1]:
            axes.plot([context], [count], marker="o", markersize=7, color=INK, markeredgecolor="white", clip_on=False)
            axes.annotate(text, (context, count), xytext=(7, 5), textcoords="offset points", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(FixedLocator(_powers(*contexts, step=4)))
    axes.yaxis.set_major_locator(FixedLocator(_powers(*tokens, step=2)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 2**20:g}M" if value >= 2**20 else f"{value / 1024:g}k")
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("tokens of context", fontsize=9, color=INK)
    axes.set_ylabel("tokens of a step", fontsize=9, color=INK)
    plain_frame(axes)


def _draw_published(axes: Axes, contexts: tuple[int, int], tokens: tuple[int, int]) -> None:
    inside = [
        (context, max(below, 0.8 * tokens[0]), above)
        for context, below, above in PUBLISHED_CROSSINGS
        if contexts[0] <= context <= contexts[1] and tokens[0] <= above <= tokens[1]
    ]
    for context, below, above in inside:
        axes.plot([context] * 2, [below, above], color=INK, linewidth=5, solid_capstyle="round")
    if inside:
        context, below, _ = inside[0]
        axes.annotate("seen to overtake\nhere (SGLang)", (context, below), xytext=(0, -50), fontsize=8.5, color=INK,
                      textcoords="offset points", va="center", ha="center")  # fmt: skip


def _apart(values: Sequence[float], distance: float) -> list[float]:
    """Places for labels at `values`, which rise: each at least `distance` above the one before."""
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + distance) if places else value)
    return places


def _powers(low: int, high: int, step: int) -> list[int]:
    values = [1]
    while values[-1] * step <= high:
        values.append(values[-1] * step)
    return [value for value in values if value >= low]


def _short(value: float) -> str:
    """1.2M, 350k, 40."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"
