"""bf16: the layer's output with the cache sharded against the one without, within the bound of kimi_k3/mla_error.py.
And that the bound is tight enough to see what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels.kimi_k3.cache import LatentCache, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
from dcpkernels.kimi_k3.mla_error import output_bound
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw
from dcpkernels.testing import max_err_over_bound, run_ranks

CONFIG = KimiK3Config.tiny(hidden_size=512, kv_lora_rank=64, num_heads=16)
LENGTHS = (900, 130, 17, 2)  # with DCP 8 the last one leaves most shards empty
CASES = [(dcp_size, interleave) for dcp_size in (1, 2, 4, 8) for interleave in (1, 16, 64)]


def _layer(
    tp: TensorParallel, dcp_size: int, interleave: int, workspace: Any, attention: Any = None
) -> tuple[MLALayer, Any]:
    """The layer with caches that are filled, and the batch of the newest tokens: one, but three of the first
    request."""
    weights = MLAWeights.random(CONFIG, tp, key="bf16", dtype=torch.bfloat16)
    sharding = {"num_ranks": dcp_size, "rank": tp.rank % dcp_size, "interleave": interleave}
    table = RequestTable(200, 16, len(LENGTHS), **sharding)
    cache = LatentCache(200, 16, CONFIG.latent_dim, torch.bfloat16)
    slots = [table.add() for _ in LENGTHS]
    for i, (slot, length) in enumerate(zip(slots, LENGTHS, strict=True)):
        rows = draw(length, CONFIG.latent_dim, key=("rows", i), dtype=torch.bfloat16, std=1.0)
        places = table.prefill(slot, length)
        mine = dcpkernels.layout.local_positions(length, dcp_size, sharding["rank"], interleave)
        cache.append(rows[mine], places)
    layer = MLALayer(CONFIG, weights, cache, tp, workspace, attention=attention)
    return layer, table.extend(slots, [3, 1, 1, 1])


def _attention_size(layer: MLALayer, query: Any, batch: Any) -> torch.Tensor:
    """sum_j p_j |v_j| over the unsharded cache: the attention of another cache, whose values are magnitudes."""
    both = torch.cat([layer.cache.blocks, layer.cache.blocks[..., : CONFIG.kv_lora_rank].abs()], 2).float()
    q = torch.cat(query, 2).float()
    size = torch.empty(*q.shape[:2], CONFIG.kv_lora_rank)
    starts = batch.query_start_loc.tolist()
    for s, table in enumerate(batch.block_tables):
        for row in range(starts[s], starts[s + 1]):
            rows = both[table.clamp_min(0)].flatten(0, 1)[: batch.local_lens[row]]
            probs = torch.softmax(CONFIG.softmax_scale * q[row] @ rows[:, : CONFIG.latent_dim].T, 1)
            size[row] = probs @ rows[:, CONFIG.latent_dim :]
    return size


def _shares(layer: MLALayer, group: Any, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
    lses = [torch.empty_like(partial_lse) for _ in range(group.size())]
    dist.all_gather(lses, partial_lse, group=group)
    weight = torch.softmax(torch.stack(lses), 0)[group.rank(), ..., None]
    share = torch.where(weight > 0, partial_out.float() * weight, 0.0).square()
    dist.all_reduce(share, group=group)
    num_heads = share.shape[1] // group.size()
    return share[:, group.rank() * num_heads : (group.rank() + 1) * num_heads]


def _measure(group: Any, cases: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """For each case: the output's largest error over the bound, and the same of an output merged with a wrong base."""
    tp = TensorParallel.of(group)
    x = draw(6, CONFIG.hidden_size, key="x", dtype=torch.bfloat16, std=1.0)
    whole, whole_batch = _layer(tp, 1, 1, None)
    expected = whole(x, whole_batch)
    query, _ = whole.project(x)
    size = _attention_size(whole, query, whole_batch)
    results = []
    for dcp_size, interleave in cases:
        groups = [dist.new_group(list(range(i, i + dcp_size))) for i in range(0, tp.size, dcp_size)]
        mine = groups[tp.rank // dcp_size]
        config = workspace_config(CONFIG, tp, dcp_size, max_num_tokens=8, dtype=torch.bfloat16)
        with dcpkernels.Workspace(mine, config=config) as workspace:
            layer, batch = _layer(tp, dcp_size, interleave, workspace)
            out = layer(x, batch)
            partial_out, partial_lse = layer.attend_to_shard(layer.gather_query(query), batch)
            shares = _shares(layer, mine, partial_out, partial_lse)
            latent = layer.merge(partial_out, partial_lse, batch)
            bound = output_bound(layer, x, [whole.attend(query, whole_batch), latent], shares=shares, size=size)
            # The same, were the LSEs in base 2: the shards of a row come in with wrong weights.
            partial_out, partial_lse = layer.attend_to_shard(layer.gather_query(query), batch)
            wrong = layer.finish(x, layer.merge(partial_out, partial_lse / math.log(2), batch))
            results.append((max_err_over_bound(out, expected, bound), max_err_over_bound(wrong, expected, bound)))
    return results


@pytest.fixture(scope="module")
def errors() -> dict[tuple[int, int], tuple[float, float]]:
    by_rank = run_ranks(_measure, 8, CASES, mode="process", timeout_s=300)
    assert by_rank == [by_rank[0]] * 8
    return dict(zip(CASES, by_rank[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharding_changes_no_more_than_rounding_does(
    case: tuple[int, int], errors: dict[Any, tuple[float, float]]
) -> None:
    error, _ = errors[case]
    # One shard is merged with itself: nothing changes.
    assert error == 0 if case[0] == 1 else 0.2 < error <= 1


def test_the_bound_sees_a_wrong_base(errors: dict[Any, tuple[float, float]]) -> None:
    assert all(wrong > 2 for (dcp_size, interleave), (_, wrong) in errors.items() if dcp_size > 1)
