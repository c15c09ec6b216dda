"""The planner's memory: our workspace to the byte, the weights that it knows, and what is left for the cache."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.planner import ModelSpec, cache_layout, find_model, gib, memory_budget, workspace_region
from dcpkernels.planner.memory import KNOWN_WEIGHTS_GIB, MemoryBudget

K3, V3, GQA = (find_model(name) for name in ("kimi-k3", "deepseek-v3", "qwen3-235b"))


@pytest.mark.parametrize(
    ("model", "tp", "dcp", "kv_dtype", "options"),
    [
        (K3, 8, 8, "fp8", {}),
        (K3, 8, 2, "bf16", {"max_num_seqs": 1, "draft_tokens": 7, "num_lanes": 3}),
        (K3, 16, 4, "fp8_ds_mla", {"chunk_tokens": 0, "max_num_seqs": 512}),
        (V3, 8, 8, "fp8", {"chunk_tokens": 1000, "num_lanes": 30}),
        (GQA, 16, 4, "bf16", {"draft_tokens": 1}),
    ],
)
def test_the_workspace_is_that_of_the_workspace(
    model: ModelSpec, tp: int, dcp: int, kv_dtype: str, options: dict[str, int]
) -> None:
    layout = cache_layout(model, tp=tp, dcp=dcp, kv_dtype=kv_dtype)
    region = workspace_region(model, layout, tp=tp, kv_dtype=kv_dtype, **options)
    chunk = options.get("chunk_tokens", 65_536)
    rows = -(-chunk // (layout.block_tokens * dcp)) * layout.block_tokens * dcp  # dcp * interleave divides that here
    row_dim, row_dtype = {
        "fp8": (model.kv_row_bytes(tp, "fp8"), torch.float8_e4m3fn),
        "bf16": (model.kv_row_bytes(tp, "fp8"), torch.bfloat16),
        "fp8_ds_mla": (656, torch.float8_e4m3fn),
    }[kv_dtype]
    if chunk:
        least = min(n for n in range(chunk, chunk + layout.span_tokens + 1)
                    if n % layout.block_tokens == 0 and n % dcp == 0)  # fmt: skip
        assert region.kv_chunk_rows == least <= rows
    config = dcpkernels.WorkspaceConfig.for_engine(
        options.get("max_num_seqs", 128),
        options.get("draft_tokens", 0),
        num_heads=model.num_heads // tp * dcp,
        head_dim=512 if model.is_mla else 128,
        query_head_dim=576 if model.is_mla else 128,
        query_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else torch.bfloat16,
        kv_chunk_rows=region.kv_chunk_rows,
        kv_dim=row_dim if chunk else 0,
        kv_dtype=row_dtype,
        num_lanes=options.get("num_lanes", 1),
    )
    size = dcpkernels.Workspace.size(config, dcp, "cuda")
    assert region.num_bytes == size.total > 2**20 and region.shared_num_bytes == size.shared_total == 0
    assert {name: part.num_bytes for name, part in region.parts.items()} == size.parts


def test_the_memory_of_a_gpu_is_shared_out() -> None:
    layout = cache_layout(K3, tp=8, dcp=8)
    region = workspace_region(K3, layout, tp=8, kv_dtype="fp8")
    assert region.kv_chunk_rows == 66_048
    budget = memory_budget(K3, layout, tp=8, kv_dtype="fp8", hbm_gib="268.6", utilisation="0.95", other_gib=29)
    assert budget.usable_bytes == 2686 * 2**30 // 10 * 95 // 100
    assert budget.workspace_bytes == region.num_bytes
    taken = gib("191.7") + 29 * 2**30 + region.num_bytes
    assert budget.available_bytes == budget.usable_bytes - taken == budget.to_dict()["available_bytes"]
    # A float is what it prints as, here too: 0.95 as a float is less, and would lose a byte.
    floats = memory_budget(K3, layout, tp=8, kv_dtype="fp8", hbm_gib=100.0, utilisation=0.95, weights_gib=0)
    assert floats.usable_bytes == 95 * 2**30
    turns = workspace_region(K3, cache_layout(K3, tp=8, dcp=8, interleave=1536), tp=8, kv_dtype="fp8")
    assert turns.kv_chunk_rows == 73_728  # whole turns of 8 * 1536
    unsharded = memory_budget(K3, cache_layout(K3, tp=8), tp=8, kv_dtype="fp8", hbm_gib=200, weights_gib=100)
    assert (unsharded.workspace_bytes, unsharded.available_bytes) == (0, 80 * 2**30)  # 0.9 of it by default


def test_the_known_weights_add_up() -> None:
    """As vLLM shards them at TP8: latent projections, router and the first projections of MLA are on every rank."""
    config = KimiK3Config()
    mla, kda, moe = config.mla_parameters(), config.kda_parameters(), config.moe_parameters()
    mla_first = mla["q_a_proj"] + mla["kv_a_proj"]
    absorbed = mla["kv_b_proj"]  # a second copy, for the absorbed query
    sharded = 24 * (sum(mla.values()) - mla_first + absorbed) + 69 * sum(kda.values()) + 92 * moe["shared"]
    sharded += config.dense_parameters()["mlp"] + 2 * config.vocab_size * config.hidden_size
    everywhere = 24 * mla_first + 92 * (moe["down_proj"] + moe["up_proj"] + moe["router"])
    vision = 0.75 * 2**30
    total = 92 * moe["experts"] * 4.25 / 8 / 8 + 2 * (sharded / 8 + everywhere) + vision
    assert total / 2**30 == pytest.approx(float(KNOWN_WEIGHTS_GIB["kimi-k3", 8]), abs=0.1)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"utilisation": 0}, "utilisation must be above 0 and at most 1 (got 0.0)"),
        ({"utilisation": "1.01"}, "utilisation must be above 0 and at most 1 (got 1.01)"),
        ({"utilisation": "nan"}, "utilisation must be a finite number"),
        ({"hbm_gib": 0}, "the GPU's memory must be above 0 GiB"),
        (
            {"hbm_gib": 212},
            "must leave something of the GPU's memory * utilisation = 190.80 GiB (got 191.80 GiB: 191.70",
        ),
        ({"weights_gib": -1}, "weights must be at least 0 GiB"),
        ({"other_gib": "x"}, "other memory must be a number"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number >= 1"),
        ({"draft_tokens": -1}, "draft_tokens must be a whole number >= 0"),
        ({"num_lanes": 0}, "num_lanes must be a whole number of at least 1"),
        ({"chunk_tokens": -1}, "chunk_tokens must be a whole number of at least 0"),
        ({"model": V3}, "the weights of a rank must be given"),
        (
            {"model": replace(V3, num_heads=None), "weights_gib": 1},
            "num_heads must be given for the size of the workspace",
        ),
    ],
)
def test_budgets_that_cannot_be(options: dict[str, Any], rule: str) -> None:
    model = options.pop("model", K3)
    with pytest.raises(DcpInvalidArgument) as caught:
        memory_budget(model, cache_layout(model, tp=8, dcp=8), tp=8, kv_dtype="fp8", **{"hbm_gib": 268.6, **options})
    assert rule in str(caught.value)


def test_a_budget_that_is_just_enough() -> None:
    assert MemoryBudget(101, Fraction(1), 100, 0, 0).available_bytes == 1
    with pytest.raises(DcpInvalidArgument, match="must leave something"):
        MemoryBudget(100, Fraction(1), 100, 0, 0)
