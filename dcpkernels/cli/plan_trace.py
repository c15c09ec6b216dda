"""`dcpkernels plan --trace`: plays a real mix of requests against the planned cache, for each size of DCP group."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpkernels.cli import table
from dcpkernels.cli.plan_section import Section
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.checks import whole
from dcpkernels.planner.replay import Replay, max_load, replay
from dcpkernels.planner.trace import Request, read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from dcpkernels.cli.plan import Plan
    from dcpkernels.planner import Capacity

# What Kimi-K3's server took, rounded: a prompt of 8k in 0.4 s (B300), and tokens at a batch of some dozens.
_PREFILL_TOKENS_PER_S, _TPOT_MS = 20_000.0, 20.0


def add_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE",
        help="JSON lines with timestamp (ms), input_length and output_length, or CSV with these columns")  # fmt: skip
    add("--load", type=float, metavar="X", help="play it X times as fast (default 1)")
    add("--prefill-tokens-per-s", type=float, metavar="N",
        help=f"rate at which a prompt is read (default {_PREFILL_TOKENS_PER_S:g})")  # fmt: skip
    add("--tpot-ms", type=float, metavar="MS", help=f"time per output token (default {_TPOT_MS:g})")
    add("--p99-wait-s", type=float, metavar="S",
        help="a mix fits when 99 of 100 requests wait no longer (default: when none waits)")  # fmt: skip


def section_of(args: argparse.Namespace, plan: Plan) -> Section | None:
    """None where no --trace was given. Raises DcpInvalidArgument with the rule that is broken."""
    if args.trace is None:
        for name in ("load", "prefill_tokens_per_s", "tpot_ms", "p99_wait_s"):
            if getattr(args, name) is not None:
                raise DcpInvalidArgument(f"plan: --{name.replace('_', '-')} must come with --trace (got none)")
        return None
    requests = read_trace(args.trace)
    rates: dict[str, Any] = {
        "prefill_tokens_per_s": _PREFILL_TOKENS_PER_S
        if args.prefill_tokens_per_s is None
        else args.prefill_tokens_per_s,
        "tpot_s": (_TPOT_MS if args.tpot_ms is None else args.tpot_ms) / 1e3,
        "max_num_seqs": args.max_num_seqs,
    }
    plays, loads = {}, {}
    with table.Bar("trace, replays", len(plan.by_dcp)) as bar:
        for done, capacity in enumerate(plan.by_dcp, 1):
            pool = _pool(capacity)
            plays[capacity.dcp] = replay(requests, **pool, **rates, load=1.0 if args.load is None else args.load)
            loads[capacity.dcp] = max_load(requests, **pool, **rates, p99_wait_s=args.p99_wait_s)
            bar.update(done)
    return Section(
        key="trace",
        report={
            "num_requests": len(requests),
            "input_tokens": sum(request.input_tokens for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            **rates,
            "p99_wait_s": args.p99_wait_s,
            "by_dcp": [
                # JSON has no infinity: the whole trace fits at once.
                play.to_dict()
                | {"max_load": None if loads[dcp] == math.inf else loads[dcp], "fits_at_once": loads[dcp] == math.inf}
                for dcp, play in plays.items()
            ],
        },
        about=_about(requests, rates, args),
        tables=[(_COLUMNS, [_row(play, loads[dcp], plan) for dcp, play in plays.items()])],
        notes=_notes(args),
        panels=[partial(_draw, plays=plays)],
    )


def _pool(capacity: Capacity) -> dict[str, int]:
    whole("blocks of the KV cache, for --trace,", capacity.num_blocks, 1)
    return {
        "num_blocks": capacity.num_blocks,
        "block_tokens": capacity.block_tokens,
        "state_blocks": capacity.state_blocks,
        "dcp": capacity.dcp,
        "attention_groups": capacity.layout.attention_groups,
    }


def _about(requests: list[Request], rates: dict[str, Any], args: argparse.Namespace) -> str:
    span_s = max(request.arrival_s for request in requests) - min(request.arrival_s for request in requests)
    load = "" if args.load in (None, 1) else f", played {args.load:g} times as fast"
    return (
        f"{len(requests):,} requests of {args.trace.name} in {span_s / 60:,.0f} minutes{load}; prompts at "
        f"{rates['prefill_tokens_per_s']:,g} tokens/s, {1e3 * rates['tpot_s']:g} ms an output token"
    )


_COLUMNS = [
    "DCP", "peak tokens", "peak of pool", "peak requests", "waited", "p99 wait s", "never fit", "fits up to load",
]  # fmt: skip


def _row(play: Replay, most: float, plan: Plan) -> list[str]:
    dcp = play.pool.dcp
    return [
        f"{'* ' if dcp == plan.asked.dcp else ''}{dcp}",
        f"{play.peak_tokens:,}",
        f"{100 * play.peak_share:.1f} %",
        f"{play.peak_requests:,}",
        f"{play.num_waited:,}",
        f"{play.p99_wait_s:,.1f}",
        f"{len(play.never_fit):,}",
        "all at once" if most == math.inf else f"{_rounded_down(most):,}",
    ]


def _rounded_down(value: float) -> float:
    """Three digits, never more than it is."""
    if value <= 0:
        return 0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    rounded = float(f"{math.floor(value / unit) * unit:.3g}")
    return int(rounded) if rounded >= 100 else rounded


def _notes(args: argparse.Namespace) -> list[str]:
    when = "no request waits" if args.p99_wait_s is None else f"99 of 100 requests wait at most {args.p99_wait_s:g} s"
    return [
        f"Fits up to load: how many times as fast the same requests may arrive while {when}.",
        "Not modelled: shared prefixes, and steps that take longer in a full batch (docs/trace_replay.md).",
    ]


def _draw(axes: Axes, *, plays: Mapping[int, Replay]) -> None:
    from dcpkernels.cli.plan_plots import draw_tokens_in_use

    draw_tokens_in_use(axes, plays)
