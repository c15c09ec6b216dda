"""What all charts look like. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dcpkernels.cli import output

OURS, OTHER, LIMIT, INK, FAINT = "#0b7a75", "#c9762b", "#b23a48", "#22303c", "#8a97a3"
REST = "#d5dade"


def new_figure(width: float, height: float) -> Figure:
    """In inches. No pyplot: it would look for a display and keep the figure alive."""
    figure = Figure(figsize=(width, height), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)


def heading(axes: Axes, text: str, detail: str) -> None:
    """Above the axes: what they show, and a fainter line about it."""
    axes.text(0, 1.10, text, transform=axes.transAxes, fontsize=11.5, weight="bold", color=INK, va="bottom")
    axes.text(0, 1.035, detail, transform=axes.transAxes, fontsize=9, color=FAINT, va="bottom")


def save(figure: Figure, path: Path) -> None:
    """A PNG by its name: matplotlib would take the format from the suffix, and the path may have another or none."""
    with output.writing(path):
        figure.savefig(path, format="png")
