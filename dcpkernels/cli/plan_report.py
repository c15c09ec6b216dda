"""What `dcpkernels plan` says: the JSON, the table, and sentences below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dcpkernels.cli import table
from dcpkernels.planner.checks import GIB

if TYPE_CHECKING:
    from dcpkernels.cli.plan import Plan

_MIB = 2**20


def report_of(plan: Plan) -> dict[str, Any]:
    """The numbers of the size that was asked for, and of all sizes in `by_dcp`; see Capacity.to_dict. `ratio` is of tokens
    in the same memory, blocks per request against those of DCP 1. `blocks_as_printed`: the fewest and the most, when
    --available-gib is a number rounded to two decimals; the numbers are of the most."""
    unsharded = plan.by_dcp[0].blocks_per_request
    rows = [c.to_dict() | {"ratio": unsharded / c.blocks_per_request} for c in plan.by_dcp]
    for row, budget in zip(rows, plan.budgets, strict=bool(plan.budgets)):
        row["memory"] = budget.to_dict()
    (asked,) = (row for row in rows if row["dcp"] == plan.asked.dcp)
    return {
        "model": plan.model.name,
        **asked,
        "blocks_as_printed": [c.num_blocks for c in plan.as_printed],
        "inputs": plan.inputs,
        "by_dcp": rows,
        "decomposition": None if plan.decomposition is None else plan.decomposition.to_dict(),
    }


def show(plan: Plan) -> None:
    print("\n".join(_head(plan)))
    print()
    table.show(*_table_of(plan))
    print()
    print("\n".join([*_explanation(plan), *_notes(plan), *_warnings(plan)]))


def _head(plan: Plan) -> Iterator[str]:
    inputs, layout = plan.inputs, plan.asked.layout
    caching = "no " if inputs["no_prefix_caching"] else ""
    state = f", {inputs['state_dtype']} state" if layout.state_layers else ""
    drafts = f", {inputs['speculative_tokens']} speculative tokens" if inputs["speculative_tokens"] else ""
    yield (
        f"{plan.model.name} on TP {inputs['tp']}, DCP {plan.asked.dcp}: {inputs['kv_dtype']} KV{state}, {caching}prefix "
        f"caching{drafts}, requests of up to {plan.asked.max_model_len:,} tokens"
    )
    layers = f"{layout.pages_per_block} layers x {layout.block_tokens:,} tokens"
    yield (
        f"{plan.asked.available_bytes / GIB:.2f} GiB a GPU for the KV cache = {plan.asked.num_blocks:,} blocks of "
        f"{layout.block_bytes / _MIB:,.2f} MiB ({layers} of a rank)"
    )
    if plan.budgets:
        (budget,) = (b for b, c in zip(plan.budgets, plan.by_dcp, strict=True) if c.dcp == plan.asked.dcp)
        yield (
            f"  of {budget.hbm_bytes / GIB:.2f} GiB * {float(budget.utilisation):g}: weights "
            f"{budget.weights_bytes / GIB:.2f}, other {budget.other_bytes / GIB:.2f}, our workspace "
            f"{budget.workspace_bytes:,} bytes"
        )


def _table_of(plan: Plan) -> tuple[list[str], list[list[str]]]:
    columns = [
        "DCP",
        "tokens",
        "ratio",
        "blocks a request",
        "of these state",
        "concurrency",
        "short requests",
        "up to tokens",
    ]
    unsharded = plan.by_dcp[0].blocks_per_request
    rows = [
        [
            f"{'* ' if c.dcp == plan.asked.dcp else ''}{c.dcp}",
            f"{c.tokens:,}",
            f"{unsharded / c.blocks_per_request:.3f}",
            f"{c.blocks_per_request:,}",
            f"{c.state_blocks:,}",
            f"{c.concurrency:,.2f}",
            f"{c.short_request_limit:,}",
            f"{c.short_request_tokens:,}",
        ]
        for c in plan.by_dcp
    ]
    return columns, rows


def _explanation(plan: Plan) -> Iterator[str]:
    """Why the asked size holds more than the baseline."""
    parts = plan.decomposition
    if parts is None or (parts.baseline == plan.asked):
        return
    old, new = parts.baseline, plan.asked
    yield (
        f"DCP {new.dcp} with {new.available_bytes / GIB:.2f} GiB against DCP {old.dcp} with "
        f"{old.available_bytes / GIB:.2f} GiB: {new.tokens:,} / {old.tokens:,} tokens = {float(parts.ratio):.3f}x"
    )
    yield (
        f"  = {float(parts.memory_factor):.4f}x memory ({new.num_blocks:,} / {old.num_blocks:,} blocks)"
        f" * {float(parts.dcp_factor):.3f}x DCP ({old.blocks_per_request:,} / {new.blocks_per_request:,} blocks a request)"
    )
    if new.state_blocks and new.dcp > old.dcp:
        yield (
            f"  DCP gives less than {new.dcp // old.dcp}x: the {new.state_blocks} state blocks of a request are on every "
            f"rank; they take the place of {new.state_token_equivalents:,} tokens"
        )


def _notes(plan: Plan) -> Iterator[str]:
    asked, layout = plan.asked, plan.asked.layout
    least, most = plan.as_printed
    if least.num_blocks != most.num_blocks:
        yield (
            f"{plan.inputs['available_gib']} GiB, if rounded, is {least.num_blocks:,} to {most.num_blocks:,} blocks: "
            f"{least.tokens:,} to {most.tokens:,} tokens. "
            "The most is taken above."
        )
    if not layout.state_layers:
        return
    yield (
        f"Short requests: {asked.short_request_limit:,} at most, however short. Up to {asked.short_request_tokens:,} tokens "
        f"each takes {layout.request_blocks(1)} blocks, and {asked.state_blocks} of them hold state."
    )
    yield (
        f"A state is {layout.state_bytes_per_request:,} bytes on each rank; a request holds {layout.state_blocks_per_group}, in "
        f"{layout.state_groups} groups of layers. Padding: {100 * layout.state_page_padding:.2f} % of a state's pages, "
        f"{layout.padding_layers} pages to {layout.state_layers} layers ({100 * layout.padding_layer_share:.2f} %)."
    )


def _warnings(plan: Plan) -> Iterator[str]:
    asked = plan.asked
    if asked.num_blocks < asked.blocks_per_request:
        yield (
            f"warning: not one request of {asked.max_model_len:,} tokens fits: it takes {asked.blocks_per_request:,} blocks, "
            f"there are {asked.num_blocks:,}. An engine would refuse to start."
        )
    if plan.budgets and not plan.budgets[0].other_bytes:
        yield (
            "warning: an upper bound: only weights and our workspace are taken off. Engines also take off activations, "
            "graphs and other buffers (--other-gib)."
        )
