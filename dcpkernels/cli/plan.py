"""`dcpkernels plan`: from options to capacities, and where the result goes. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcpkernels.cli import output, plan_report, plan_step_time, plan_trace
from dcpkernels.cli.plan_parser import BUDGET_OPTIONS
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner import (
    MODELS,
    CacheLayout,
    Capacity,
    Decomposition,
    MemoryBudget,
    ModelSpec,
    cache_layout,
    decompose,
    find_model,
    gib,
    gib_as_printed,
    memory_budget,
)
from dcpkernels.planner.checks import whole

_DIMS = {"mla": ("kv_lora_rank", "qk_rope_head_dim"), "gqa": ("num_kv_heads", "head_dim")}


@dataclass(frozen=True)
class Plan:
    """`by_dcp` has all sizes of DCP groups, ascending, and `asked` is one of them. `as_printed`: the asked capacity for the
    least and the most memory that is printed as --available-gib. `budgets` are in the order of `by_dcp`, none where the
    memory of the cache was given. `decomposition` is None where the baseline has no block."""

    model: ModelSpec
    inputs: dict[str, Any]
    asked: Capacity
    as_printed: tuple[Capacity, Capacity]
    by_dcp: list[Capacity]
    budgets: list[MemoryBudget]
    decomposition: Decomposition | None


def run(args: argparse.Namespace) -> int:
    """The command. --json -: the JSON goes to stdout and nothing else does."""
    to_stdout = args.json == output.STDOUT
    output.require_writable("--json", None if to_stdout else args.json)
    output.require_writable("--plot", args.plot)
    if args.plot is not None:
        output.require_matplotlib("--plot")
    plan = perform(args)
    made = (make(args, plan) for make in (plan_step_time.section_of, plan_trace.section_of))
    sections = [section for section in made if section is not None]
    report = plan_report.report_of(plan) | {section.key: section.report for section in sections}
    if args.plot is not None:
        from dcpkernels.cli.plan_figure import draw

        draw(plan, args.plot, [panel for section in sections for panel in section.panels])
    if to_stdout:
        print(output.to_json(report))
        return 0
    plan_report.show(plan)
    for section in sections:
        section.show()
    if args.json is not None:
        output.write_json(args.json, report)
    written = ", ".join(str(path) for path in (args.plot, args.json) if path is not None)
    if written:
        print(f"wrote {written}")
    return 0


def perform(args: argparse.Namespace) -> Plan:
    """Raises DcpInvalidArgument with the rule that is broken."""
    model = model_of(args)
    max_model_len = model.max_position if args.max_model_len is None else args.max_model_len
    if max_model_len is None:
        raise DcpInvalidArgument(f"plan: --max-model-len must be given for --model {model.name} (got none)")

    def layout_of(dcp: int) -> CacheLayout:
        return cache_layout(
            model,
            tp=args.tp,
            dcp=dcp,
            kv_dtype=args.kv_dtype,
            state_dtype=args.state_dtype,
            prefix_caching=not args.no_prefix_caching,
            num_speculative_tokens=args.speculative_tokens,
            draft_layers=args.draft_layers,
            state_blocks=args.state_blocks,
            block_size=args.block_size,
            block_alignment=args.block_alignment,
            interleave=args.interleave,
        )

    layouts = [layout_of(dcp) for dcp in model.dcp_sizes(args.tp)]
    budget_of = _budget_of(args, model)
    budgets = [budget_of(layout) for layout in layouts] if budget_of else []
    available = [budget.available_bytes for budget in budgets] or [_available(args, layout) for layout in layouts]
    by_dcp = [Capacity(layout, max_model_len, num_bytes) for layout, num_bytes in zip(layouts, available, strict=True)]
    baseline = _of_size(by_dcp, args.baseline_dcp, layout_of)
    if args.baseline_gib is not None:
        baseline = replace(baseline, available_bytes=_as_printed(args.baseline_gib, "--baseline-gib"))
    asked = _of_size(by_dcp, args.dcp, layout_of)
    ends = (asked.available_bytes,) * 2 if args.available_gib is None else gib_as_printed(args.available_gib)
    inputs = {name: value for name, value in vars(args).items() if name not in ("run", "json", "plot")}
    return Plan(
        model,
        {name: str(value) if isinstance(value, Path) else value for name, value in inputs.items()}
        | {"max_model_len": max_model_len},
        asked,
        tuple(replace(asked, available_bytes=max(1, num_bytes)) for num_bytes in ends),
        by_dcp,
        budgets,
        decompose(baseline, asked) if baseline.num_blocks else None,
    )


def _of_size(by_dcp: list[Capacity], dcp: int, layout_of: Callable[[int], CacheLayout]) -> Capacity:
    found = [capacity for capacity in by_dcp if capacity.dcp == dcp]
    return found[0] if found else replace(by_dcp[0], layout=layout_of(dcp))  # which raises, and says why


def model_of(args: argparse.Namespace) -> ModelSpec:
    """The built-in model, or the one that --model mla or gqa and its numbers describe."""
    kind = args.model if args.model in _DIMS else None
    if kind is None and args.model not in MODELS:
        raise DcpInvalidArgument(f"plan: --model must be one of {', '.join([*MODELS, *_DIMS])} (got {args.model!r})")
    for owner, names in (*_DIMS.items(), ("mla or gqa", ("num_heads",))):
        given = [name for name in names if getattr(args, name) is not None]
        if given and (kind is None or owner not in (kind, "mla or gqa")):
            raise DcpInvalidArgument(f"plan: {_option(given[0])} must come with --model {owner} (got {args.model})")
    if kind is None:
        layers = {"num_attention_layers": args.num_layers, "num_state_layers": args.state_layers}
        return replace(find_model(args.model), **{name: n for name, n in layers.items() if n is not None})
    if args.state_layers is not None:
        raise DcpInvalidArgument(f"plan: --state-layers must come with a model that has some (got --model {kind})")
    for name in ("num_layers", *_DIMS[kind]):
        if getattr(args, name) is None:
            raise DcpInvalidArgument(f"plan: {_option(name)} must be given for --model {kind} (got none)")
    dims = {name: getattr(args, name) for name in _DIMS[kind]}
    return ModelSpec(kind, args.num_layers, args.num_heads, **dims)


def _option(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _available(args: argparse.Namespace, layout: CacheLayout) -> int:
    if args.num_blocks is not None:
        return whole("--num-blocks", args.num_blocks, 1) * layout.block_bytes
    if args.available_bytes is not None:
        return args.available_bytes
    return _as_printed(args.available_gib, "--available-gib")


def _as_printed(text: str, option: str) -> int:
    """The most that is printed so: then the blocks are those of the log, or one more, and never fewer."""
    gib(text, option, above_zero=True)
    return gib_as_printed(text)[1]


def _budget_of(args: argparse.Namespace, model: ModelSpec) -> Callable[[CacheLayout], MemoryBudget] | None:
    given = {name: getattr(args, name) for name in BUDGET_OPTIONS if getattr(args, name) is not None}
    if args.hbm_gib is None:
        if args.trace is not None:
            given.pop("max_num_seqs", None)  # which it takes, too
        if given:
            raise DcpInvalidArgument(f"plan: {_option(next(iter(given)))} must come with --hbm-gib (got none)")
        return None
    return lambda layout: memory_budget(
        model,
        layout,
        tp=args.tp,
        kv_dtype=args.kv_dtype,
        hbm_gib=args.hbm_gib,
        draft_tokens=args.speculative_tokens,
        **given,
    )
