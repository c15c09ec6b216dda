"""The planner's charts say what the numbers say."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dcpkernels.cli.plan_plots import draw_break_even, draw_tokens_in_use
from dcpkernels.planner.hardware import preset
from dcpkernels.planner.replay import replay
from dcpkernels.planner.step_time import StepTimeModel
from dcpkernels.planner.trace import Request

MODEL = StepTimeModel(preset("b300"), 8, 96, 576, 512, 576, 24)
REQUESTS = [Request(0.0, 100, 20), Request(3.0, 5000, 100), Request(3.5, 900, 400)]


@pytest.fixture
def axes():
    figure = Figure(figsize=(6, 5), dpi=60)
    FigureCanvasAgg(figure)
    made = figure.subplots()
    yield made
    figure.savefig(io.BytesIO(), format="png")  # all of it can be drawn


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_tokens_in_use(axes) -> None:
    plays = {
        dcp: replay(
            REQUESTS, num_blocks=10, block_tokens=64, state_blocks=2, dcp=dcp, prefill_tokens_per_s=1000, tpot_s=0.05
        )
        for dcp in (8, 16, 64)
    }
    draw_tokens_in_use(axes, plays)
    found = texts(axes)
    assert found[:2] == ["Tokens in use", "3 requests; lines: what the pool holds of this mix"]
    assert {"DCP 8: 2.6k", "1 never fit", "DCP 16: 7.3k", "1 wait"} < set(found)
    assert len(axes.lines) == 3 + 3  # what is held, what can be
    assert sorted(max(line.get_ydata()) for line in axes.lines[:3]) == sorted(p.peak_tokens for p in plays.values())


def test_sizes_that_hold_the_same_are_one_line(axes) -> None:
    plays = {
        dcp: replay(
            REQUESTS, num_blocks=30, block_tokens=64, state_blocks=2, dcp=dcp, prefill_tokens_per_s=1000, tpot_s=0.05
        )
        for dcp in (2, 8, 16)
    }
    draw_tokens_in_use(axes, plays, {dcp: 5000.0 * dcp for dcp in plays})
    assert len(axes.lines) == 2 + 3
    assert {"dark: DCP 8, 16 alike", "DCP 2: 10k", "DCP 8: 40k"} < set(texts(axes))


def test_break_even(axes) -> None:
    draw_break_even(axes, MODEL, 8, marks=[(120_000, 1, "asked for"), (5, 1, "outside")])
    assert {"Where DCP 8 breaks even", "TP wins", "too close\nto call", "DCP 8 wins", "asked for"} < set(texts(axes))
    assert "outside" not in texts(axes) and any("SGLang" in text for text in texts(axes))
    low, high = axes.lines[:2]
    for line, end in ((low, "low"), (high, "high")):
        for context, count in list(zip(line.get_xdata(), line.get_ydata(), strict=True))[1::20]:
            assert context == pytest.approx(getattr(MODEL.break_even(int(count), 8), end))


def test_zones_that_are_not_there_have_no_label(axes) -> None:
    draw_break_even(axes, MODEL, 2, contexts=(16_384, 65_536), tokens=(64, 512))
    found = texts(axes)
    assert "DCP 2 wins" in found and "TP wins" not in found and not any("SGLang" in text for text in found)
