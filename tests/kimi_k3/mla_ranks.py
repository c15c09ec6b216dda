"""What the ranks of the MLA tests run: decode steps of one layer, with any DCP size over the same ranks.

Rank processes import this module, so it imports no oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels import layout
from dcpkernels.kimi_k3.attention import local_attention
from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw

MAX_ROWS = 256


class Step(NamedTuple):
    """One decode step: tokens of each request (0: not in this step), and rows of padding behind them."""

    num_tokens: tuple[int, ...]
    padding: int = 0


class Case(NamedTuple):
    """`workspace` False: none, which is DCP size 1. `rude`: an attention whose rows that see nothing hold garbage, in
    the LSE too, as kernels leave it."""

    dcp_size: int
    interleave: int = 1
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    workspace: bool = True
    rude: bool = False


def hidden_states(config: KimiK3Config, step: int, num_rows: int, padding: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, hidden]; padding rows hold NaN, which must reach nothing."""
    x = draw(num_rows, config.hidden_size, key=("x", step), dtype=dtype, std=1.0)
    return torch.cat([x, x.new_full((padding, config.hidden_size), float("nan"))])


def make_dcp_groups(tp: TensorParallel, sizes: set[int]) -> dict[int, dist.ProcessGroup]:
    """By DCP size, the group of consecutive ranks that this rank is in. Every rank makes all groups, as torch asks."""
    mine = {}
    for size in sorted(sizes):
        for first in range(0, tp.size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= tp.rank < first + size:
                mine[size] = group
    return mine


def rude_attention(
    query: torch.Tensor, blocks: torch.Tensor, batch: DecodeBatch, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = local_attention(query, blocks, batch, **options)
    empty = batch.local_lens == 0
    out[empty], lse[empty] = float("nan"), 30.0
    return out, lse


def run_steps(
    config: KimiK3Config,
    tp: TensorParallel,
    group: Any,
    case: Case,
    steps: Sequence[Step],
) -> list[torch.Tensor]:
    """The outputs [T, hidden] of all steps, without the padding rows. `group` None: no workspace, DCP size 1."""
    weights = MLAWeights.random(config, tp, key="layer", dtype=case.dtype)
    num_requests = len(steps[0].num_tokens)
    rank = tp.rank % case.dcp_size
    num_blocks = sum(sum(step.num_tokens) for step in steps) // case.block_size + num_requests * case.interleave + 1
    sharding = {"num_ranks": case.dcp_size, "rank": rank, "interleave": case.interleave}
    table = RequestTable(num_blocks, case.block_size, num_requests, **sharding)
    cache = LatentCache(num_blocks, case.block_size, config.latent_dim, case.dtype)
    workspace = None
    if group is not None:
        workspace = dcpkernels.Workspace(
            group, config=workspace_config(config, tp, case.dcp_size, max_num_tokens=MAX_ROWS, dtype=case.dtype)
        )
    attention = rude_attention if case.rude else None
    layer = MLALayer(config, weights, cache, tp, workspace, attention=attention)
    slots = [table.add() for _ in range(num_requests)]
    outs = []
    for i, step in enumerate(steps):
        chosen = [slot for slot, count in zip(slots, step.num_tokens, strict=True) if count]
        counts = [count for count in step.num_tokens if count]
        total = sum(counts)
        batch = table.extend(chosen, counts, num_rows=total + step.padding)
        out = layer(hidden_states(config, i, total, step.padding, case.dtype), batch)
        assert out.shape == (total + step.padding, config.hidden_size) and out.dtype == case.dtype
        outs.append(out[:total].clone())
    if workspace is not None:
        assert workspace.stats()["nonfinite_lse"] == 0
        workspace.close()
    return outs


def run_cases(
    group: dist.ProcessGroup, config: KimiK3Config, cases: Sequence[Case], steps: Sequence[Step]
) -> list[list[torch.Tensor]]:
    """run_steps of each case, on one of all ranks of `group`."""
    tp = TensorParallel.of(group)
    groups = make_dcp_groups(tp, {case.dcp_size for case in cases if case.workspace})
    return [run_steps(config, tp, groups[case.dcp_size] if case.workspace else None, case, steps) for case in cases]


def run_lengths(
    group: dist.ProcessGroup, config: KimiK3Config, lengths: Sequence[int], cases: Sequence[Case]
) -> list[torch.Tensor]:
    """[len(lengths), hidden] of each case: the next token of contexts of so many tokens, whose rows are put straight
    into the caches, the same ones whatever the sharding."""
    tp = TensorParallel.of(group)
    groups = make_dcp_groups(tp, {case.dcp_size for case in cases if case.workspace})
    weights = MLAWeights.random(config, tp, key="layer", dtype=torch.float32)
    context = draw(max(lengths), config.latent_dim, key=("context",), dtype=torch.float32, std=1.0)
    x = draw(len(lengths), config.hidden_size, key=("x",), dtype=torch.float32, std=1.0)
    outs = []
    for case in cases:
        sharding = {"num_ranks": case.dcp_size, "rank": tp.rank % case.dcp_size, "interleave": case.interleave}
        num_blocks = sum(n // case.dcp_size + case.interleave for n in lengths) // case.block_size + 2 * len(lengths)
        table = RequestTable(num_blocks, case.block_size, len(lengths), **sharding)
        cache = LatentCache(num_blocks, case.block_size, config.latent_dim, torch.float32)
        slots = [table.add() for _ in lengths]
        for slot, n in zip(slots, lengths, strict=True):
            mine = layout.local_positions(n - 1, case.dcp_size, tp.rank % case.dcp_size, case.interleave)
            cache.append(context[mine], table.prefill(slot, n - 1))  # the step adds the last one
        workspace = None
        if case.workspace:
            options = workspace_config(config, tp, case.dcp_size, max_num_tokens=len(lengths), dtype=torch.float32)
            workspace = dcpkernels.Workspace(groups[case.dcp_size], config=options)
        layer = MLALayer(config, weights, cache, tp, workspace)
        outs.append(layer(x, table.extend(slots, [1] * len(lengths))).clone())
        if workspace is not None:
            workspace.close()
    return outs
