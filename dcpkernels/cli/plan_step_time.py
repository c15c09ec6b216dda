"""`dcpkernels plan --hardware`: where DCP is faster and where it is not, on a machine whose numbers are known as ranges."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dcpkernels.cli.parsing import count, list_of
from dcpkernels.cli.plan_section import Section, Table
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.hardware import PRESETS, Hardware, preset
from dcpkernels.planner.models import KV_DTYPES
from dcpkernels.planner.ranges import Range
from dcpkernels.planner.step_time import CAVEATS, StepTimeModel
from dcpkernels.planner.wire import AUTO_NOTE, WireAdvice, advise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dcpkernels.cli.plan import Plan

_TOKENS, _CONTEXTS = (1, 8, 64), (8192, 65_536, 262_144, 1_048_576)
# Options in place of a preset's ranges: what each is, and how many of its unit make the field's.
_RANGES = {
    "attention": ("us", 1e-6, "attention_s", "least time of one call of attention, however short the context"),
    "gather": ("us", 1e-6, "gather_s", "least time of a query gather, however few the bytes"),
    "merge": ("us", 1e-6, "merge_s", "least time of a merge of partial outputs, however few the bytes"),
    "memory_share": ("share", 1.0, "memory_share", "of the memory's peak, at which a large batch is read"),
    "sequence_share": ("share", 1.0, "sequence_share", "the same for one sequence alone"),
    "link_share": ("share", 1.0, "link_share", "of the links' peak, at which collectives move bytes"),
}


def add_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hardware", metavar="NAME", help=f"say where DCP is faster on this machine: {', '.join(PRESETS)}")
    add("--step-tokens", type=list_of(count), metavar="T[,T...]", help=f"tokens of a step (default {_text(_TOKENS)})")
    add("--contexts", type=list_of(count), metavar="N[,N...]",
        help=f"tokens that each sequence has in the cache (default {_text(_CONTEXTS)}, as far as --max-model-len)")  # fmt: skip
    for name, (unit, _, _, text) in _RANGES.items():
        flag, metavar = _flag(name), "LOW[-HIGH]"
        add(flag, dest=_dest(name), metavar=metavar, help=f"{text}, {_UNITS[unit]}, measured on your machine (default: the preset's)")  # fmt: skip


_UNITS = {"us": "in microseconds", "share": "in 0 .. 1"}


def _dest(name: str) -> str:
    return f"{name}_us" if _RANGES[name][0] == "us" else name


def _flag(name: str) -> str:
    return "--" + _dest(name).replace("_", "-")


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def section_of(args: argparse.Namespace, plan: Plan) -> Section | None:
    """None where no --hardware was given. Raises DcpInvalidArgument with the rule that is broken."""
    given = [_flag(name) for name in _RANGES if getattr(args, _dest(name)) is not None]
    given += [
        flag
        for flag, value in (("--step-tokens", args.step_tokens), ("--contexts", args.contexts))
        if value is not None
    ]
    if args.hardware is None:
        if given:
            raise DcpInvalidArgument(f"plan: {given[0]} must come with --hardware (got none)")
        return None
    model = _model(args, plan)
    dcp = _group(plan, model)
    tokens = args.step_tokens if args.step_tokens is not None else _TOKENS
    contexts = (
        args.contexts
        if args.contexts is not None
        else tuple(n for n in _CONTEXTS if n <= plan.asked.max_model_len) or (plan.asked.max_model_len,)
    )
    for flag, values in (("--step-tokens", tokens), ("--contexts", contexts)):
        if not values:
            raise DcpInvalidArgument(f"plan: {flag} must name at least one number (got none)")
    comparisons = [model.compare(num_tokens, context, dcp) for num_tokens in tokens for context in contexts]
    advices = [advise(model, "a2a_lse_reduce", num_tokens, dcp) for num_tokens in tokens]
    fastest = {(c.num_tokens, c.context): model.best_dcp(c.num_tokens, c.context) for c in comparisons}
    edges = {num_tokens: model.break_even(num_tokens, dcp) for num_tokens in tokens}
    rows = [
        [
            f"{c.num_tokens:,}",
            f"{c.context:,}",
            c.tp_us.text(),
            c.dcp_us.text(),
            c.saving_us.text(),
            c.verdict,
            "/".join(map(str, fastest[c.num_tokens, c.context].sizes)),
        ]
        for c in comparisons
    ]
    columns = ["T", "context", "TP us", f"DCP {dcp} us", "saved us", "verdict", "fastest DCP may be"]
    return Section(
        key="step_time",
        report={
            **model.to_dict(),
            "dcp": dcp,
            "comparisons": [c.to_dict() | {"fastest": fastest[c.num_tokens, c.context].to_dict()} for c in comparisons],
            "break_even_context": [{"num_tokens": n, **edge.to_dict()} for n, edge in edges.items()],
            "wire": [advice.to_dict() for advice in advices],
        },
        about=(
            f"Time of one layer's attention section, DCP {dcp} against TP alone, {model.hardware.name}: a model of ranges "
            f"({model.num_layers} such layers a step; docs/step_time.md has the sources)"
        ),
        tables=[(columns, rows), _edges_table(edges, advices)],
        notes=[*CAVEATS, f"Wire: a thing to try. {AUTO_NOTE[0].upper()}{AUTO_NOTE[1:]}."],
        panels=[partial(_draw, model=model, dcp=dcp)],
    )


def _edges_table(edges: dict[int, Range], advices: list[WireAdvice]) -> Table:
    columns = ["T", "break-even, tokens of context", "wire of a2a_lse_reduce", "packets save us"]
    rows = [
        [
            f"{advice.num_tokens:,}",
            edges[advice.num_tokens].text(),
            f"packet, {advice.packet_bytes} bytes" if advice.wire == "packet" else advice.wire,
            advice.gain_us.text(),
        ]
        for advice in advices
    ]
    return columns, rows


def _draw(axes: Axes, *, model: StepTimeModel, dcp: int) -> None:
    from dcpkernels.cli.plan_plots import draw_break_even

    draw_break_even(axes, model, dcp)


def _group(plan: Plan, model: StepTimeModel) -> int:
    """The size that was asked for; of DCP 1, which is TP alone, the largest there is."""
    dcp = plan.asked.dcp if plan.asked.dcp > 1 else model.dcp_sizes()[-1]
    if dcp == 1:
        raise DcpInvalidArgument(f"plan: --hardware must come with a model and --tp that allow DCP (got tp={model.tp})")
    return dcp


def _model(args: argparse.Namespace, plan: Plan) -> StepTimeModel:
    spec = plan.model
    if spec.num_heads is None:
        raise DcpInvalidArgument(f"plan: --num-heads must be given for --model {spec.name} with --hardware (got none)")
    item_bytes = KV_DTYPES[args.kv_dtype]
    return StepTimeModel(
        _hardware(args),
        tp=args.tp,
        num_heads=spec.num_heads,
        query_dim=spec.kv_lora_rank + spec.qk_rope_head_dim if spec.is_mla else spec.head_dim,
        value_dim=spec.kv_lora_rank if spec.is_mla else spec.head_dim,
        row_bytes=spec.kv_row_bytes(1, args.kv_dtype) if spec.is_mla else 2 * spec.head_dim * item_bytes,
        num_layers=plan.asked.layout.attention_layers,
        num_kv_heads=1 if spec.is_mla else spec.num_kv_heads,
        # fp8_ds_mla has scales within its rows: attention reads it with queries in bf16.
        query_item_bytes=2 if args.kv_dtype == "fp8_ds_mla" else item_bytes,
        tokens_per_sequence=1 + args.speculative_tokens,
    )


def _hardware(args: argparse.Namespace) -> Hardware:
    measured = {}
    for name, (_, unit, field, _) in _RANGES.items():
        text = getattr(args, _dest(name))
        if text is not None:
            measured[field] = _range(_flag(name), text).scaled(unit)
    return replace(preset(args.hardware), **measured)


def _range(flag: str, text: str) -> Range:
    """ "9-11" or "10"."""
    try:
        ends = [float(part) for part in text.split("-")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise DcpInvalidArgument(f"plan: {flag} must be a number, or two as LOW-HIGH (got {text!r})")
    return Range(ends[0], ends[-1])
