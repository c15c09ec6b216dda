"""What the ranks of the MLA tests run: decode steps of one layer, with any DCP size over the same tensor-parallel ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels.kimi_k3.cache import LatentCache, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw

MAX_ROWS = 64


class Step(NamedTuple):
    """One decode step: tokens of each request (0: not in this step), and rows of padding behind them."""

    num_tokens: tuple[int, ...]
    padding: int = 0


class Case(NamedTuple):
    dcp_size: int
    interleave: int = 1
    block_size: int = 16
    dtype: torch.dtype = torch.float32


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


def run_steps(
    config: KimiK3Config,
    tp: TensorParallel,
    group: Any,
    case: Case,
    steps: list[Step],
) -> list[torch.Tensor]:
    """The outputs [T, hidden] of all steps, without the padding rows. `group` None: no workspace, DCP size 1."""
    weights = MLAWeights.random(config, tp, key="layer", dtype=case.dtype)
    num_requests = len(steps[0].num_tokens)
    rank = tp.rank % case.dcp_size
    table = RequestTable(
        256, case.block_size, num_requests, num_ranks=case.dcp_size, rank=rank, interleave=case.interleave
    )
    cache = LatentCache(256, case.block_size, config.latent_dim, case.dtype)
    workspace = None
    if group is not None:
        workspace = dcpkernels.Workspace(
            group, config=workspace_config(config, tp, case.dcp_size, max_num_tokens=MAX_ROWS, dtype=case.dtype)
        )
    layer = MLALayer(config, weights, cache, tp, workspace)
    slots = [table.add() for _ in range(num_requests)]
    outs = []
    for i, step in enumerate(steps):
        chosen = [(slot, count) for slot, count in zip(slots, step.num_tokens, strict=True) if count]
        total = sum(step.num_tokens)
        batch = table.extend(*zip(*chosen, strict=True), num_rows=total + step.padding)
        out = layer(hidden_states(config, i, total, step.padding, case.dtype), batch)
        outs.append(out[:total])
    if workspace is not None:
        assert workspace.stats()["nonfinite_lse"] == 0
        workspace.close()
    return outs
