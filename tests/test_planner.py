"""The capacity planner: published numbers, to the token; the rules of blocks against a count of single tokens; what cannot
be is refused, with the rule. Server logs are quoted where they print a number."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dcpkernels import layout as ownership
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.planner import (
    Capacity,
    ModelSpec,
    cache_layout,
    decompose,
    find_model,
    gib,
    gib_as_printed,
    plan_capacity,
)

ROOT = Path(__file__).parents[1]
VECTORS = json.loads((ROOT / "tests/data/kv_capacity.json").read_text())
K3 = find_model("kimi-k3")
V3 = find_model("deepseek-v3")
GQA = find_model("qwen3-235b")
M = 2**20


def k3(**options: Any) -> Capacity:
    """Kimi-K3 at TP8 with requests of 1M tokens in 34.28 GiB, unless `options` say otherwise."""
    defaults = {"tp": 8, "dcp": 8, "max_model_len": M}
    if not {"num_blocks", "available_bytes"} & set(options):
        defaults["available_bytes"] = gib(options.pop("available_gib", "34.28"))
    return plan_capacity(options.pop("model", K3), **{**defaults, **options})


# -- published


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    options = {name: case[name] for name in ("tp", "dcp", "kv_dtype", "state_dtype", "prefix_caching", "max_model_len")}
    plan = k3(available_bytes=gib_as_printed(case["available_gib"])[1], **options)  # GiB are rounded at the source
    assert (plan.block_tokens, plan.num_blocks) == (case["block_tokens"], case["num_blocks"])
    assert (plan.blocks_per_request, plan.tokens) == (case["blocks_per_request"], case["tokens"])
    published = case["published"]
    shown = f"{plan.tokens / 1e6:.3f}M" if published.endswith("M") else f"{plan.tokens:,}"
    assert shown == published
    assert plan.to_dict().items() >= {"tokens": case["tokens"], "blocks": case["num_blocks"]}.items()


def test_ratios_in_the_same_memory() -> None:
    (case,) = VECTORS["same_memory_ratio"]
    plans = [
        k3(dcp=dcp, available_gib=case["available_gib"], max_model_len=case["max_model_len"]) for dcp in case["dcp"]
    ]
    assert [plan.blocks_per_request for plan in plans] == case["blocks_per_request"]
    assert [round(float(decompose(plans[0], plan).ratio), 3) for plan in plans] == case["ratio"]


PP2 = replace(K3, num_attention_layers=12, num_state_layers=35)  # the larger of two stages
MNM = {"tp": 16, "dcp": 1, "kv_dtype": "bf16", "prefix_caching": False, "max_model_len": 8192}
AGENTX = {"model": PP2, "dcp": 1, "kv_dtype": "bf16", "max_model_len": 262_144}
# DSpark's five layers join the group; this engine holds 4 states a group, whatever the drafts.
ATOM = {"dcp": 1, "draft_layers": 5, "num_speculative_tokens": 7, "state_blocks": 4, "max_model_len": 65_536}


@pytest.mark.parametrize(
    ("options", "blocks", "block_tokens", "need", "tokens", "concurrency"),
    [
        ({**MNM, "available_gib": "1.66"}, 168, 384, 25, 55_050, "6.72"),
        ({**MNM, "available_gib": "1.68"}, 169, 384, 25, 55_377, "6.76"),
        ({**MNM, "available_gib": "1.64"}, 165, 384, 25, 54_067, "6.60"),
        ({**MNM, "available_gib": "1.58"}, 160, 384, 25, 52_428, "6.40"),
        ({**AGENTX, "num_blocks": 2380}, 2380, 768, 348, 1_792_823, "6.84"),
        ({**AGENTX, "num_blocks": 2321}, 2321, 768, 348, 1_748_379, "6.67"),
        ({**ATOM, "available_gib": "37.85"}, 1584, 1536, 55, 1_887_436, "28.80"),
    ],
)
def test_server_logs(
    options: dict[str, Any], blocks: int, block_tokens: int, need: int, tokens: int, concurrency: str
) -> None:
    options = dict(options)
    if "available_gib" in options:
        fewest, most = (
            k3(available_bytes=n, **options).num_blocks for n in gib_as_printed(options.pop("available_gib"))
        )
        assert fewest <= blocks <= most <= fewest + 2
    plan = k3(**{"num_blocks": blocks, **options})
    assert (plan.block_tokens, plan.blocks_per_request) == (block_tokens, need)
    assert (plan.tokens, f"{plan.concurrency:.2f}") == (tokens, concurrency)


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ({"state_dtype": "bf16"}, "20.53"),
        ({"kv_dtype": "bf16"}, "10.27"),
        ({"state_blocks": 3}, "19.13"),
        ({"num_speculative_tokens": 7}, "16.08"),
        ({"max_model_len": 131_072}, "13.36"),
    ],
)
def test_other_levers(options: dict[str, Any], millions: str) -> None:
    assert f"{k3(**options).tokens / 1e6:.2f}" == millions


def test_usage_of_one_request_as_the_server_shows_it() -> None:
    """Of a sequence of 120.4k tokens; a server divides by the blocks that it gives out, all but one."""
    for dcp, available, blocks, percent in ((1, "25.12", 85, "6.70"), (8, "34.28", 16, "0.92")):
        plan = k3(dcp=dcp, available_gib=available)
        assert plan.layout.request_blocks(120_400) == blocks
        assert f"{100 * blocks / (plan.num_blocks - 1):.2f}" == percent


def test_why_ten_times_and_not_eight() -> None:
    parts = decompose(k3(dcp=1, available_gib="25.12"), k3())
    assert parts.ratio == parts.memory_factor * parts.dcp_factor == Fraction(1733 * 689, 1270 * 92)
    assert (round(float(parts.memory_factor), 4), round(float(parts.dcp_factor), 3)) == (1.3646, 7.489)
    assert round(float(parts.ratio), 3) == 10.219 and parts.to_dict()["ratio"] == float(parts.ratio)
    assert float(parts.ratio) == pytest.approx(parts.plan.tokens / parts.baseline.tokens, rel=1e-6)
    # It tends to 8 with the length of the requests, and is gone for short ones.
    long, short = (decompose(k3(dcp=1, max_model_len=n), k3(max_model_len=n)).dcp_factor for n in (2**40, 1000))
    assert 7.99 < long < 8 and short == 1


def test_state_sets_a_limit_for_short_requests() -> None:
    plan = k3()
    assert (plan.state_blocks, plan.state_token_equivalents) == (6, 73_728)
    assert (plan.short_request_limit, plan.short_request_tokens) == (247, 12_288)
    assert k3(dcp=1).state_token_equivalents == 9216 and k3(dcp=1).short_request_limit == 247
    for num_tokens, fit in ((1, 247), (12_288, 247), (12_289, 1733 // 8)):
        assert plan.num_blocks // plan.layout.request_blocks(num_tokens) == fit
    no_state = plan_capacity(V3, tp=8, dcp=8, max_model_len=1000, num_blocks=5)
    assert (no_state.state_blocks, no_state.short_request_limit, no_state.state_token_equivalents) == (0, 5, 0)


# -- blocks


@pytest.mark.parametrize(
    ("options", "block_tokens"),
    [
        ({}, 1536),
        ({"kv_dtype": "bf16"}, 768),
        ({"kv_dtype": "bf16", "tp": 16}, 384),
        ({"kv_dtype": "fp8_ds_mla"}, 1280),
        ({"state_dtype": "bf16"}, 768),
        ({"num_speculative_tokens": 7}, 1536),
        ({"num_speculative_tokens": 8}, 1664),  # 887,808 bytes of state: four blocks of 128 tokens would do for 7 alone
        ({"block_alignment": 64}, 1472),
        ({"block_size": 2048}, 2048),
    ],
)
def test_a_page_holds_a_state(options: dict[str, Any], block_tokens: int) -> None:
    layout = cache_layout(K3, **{"tp": 8, "dcp": 1, **options})
    assert layout.block_tokens == block_tokens
    row, step = layout.page_bytes // block_tokens, options.get("block_alignment", 128)
    assert layout.page_bytes >= layout.state_bytes and block_tokens % step == 0
    if "block_size" not in options:
        assert (block_tokens - step) * row < layout.state_bytes


def test_bytes_and_padding() -> None:
    layout = cache_layout(K3, tp=8, dcp=8)
    assert (layout.state_bytes, layout.page_bytes, layout.block_bytes) == (814_080, 884_736, 21_233_664)
    assert f"{100 * layout.state_page_padding:.2f}" == "8.68"  # as servers log it, and the next line
    assert (layout.padding_layers, f"{100 * layout.padding_layer_share:.2f}") == (3, "4.35")
    assert layout.state_bytes_per_request == 56_171_520
    assert cache_layout(K3, tp=8, draft_layers=5).block_bytes == 25_657_344
    assert [K3.kv_row_bytes(8, kv_dtype) for kv_dtype in ("fp8", "bf16", "fp8_ds_mla")] == [576, 1152, 656]
    plain = cache_layout(V3, tp=8)
    assert (plain.block_tokens, plain.block_bytes, plain.state_page_padding) == (64, 61 * 64 * 576, 0)
    assert (plain.padding_layers, plain.padding_layer_share, plain.state_bytes_per_request) == (0, 0, 0)


@pytest.mark.parametrize(
    ("layers", "groups", "pages"),
    [
        ((24, 69), (1, 3), 24),
        ((29, 69), (1, 3), 29),
        ((12, 34), (1, 3), 12),
        ((13, 12), (1, 1), 13),  # less than half as many again: one group each, of the larger size
        ((20, 30), (1, 2), 20),  # exactly half as many again
        ((21, 30), (1, 1), 30),
        ((30, 10), (3, 1), 10),
        ((7, 15), (1, 3), 7),
    ],
)
def test_groups_of_layers(layers: tuple[int, int], groups: tuple[int, int], pages: int) -> None:
    layout = cache_layout(replace(K3, num_attention_layers=layers[0], num_state_layers=layers[1]), tp=8)
    assert (layout.attention_groups, layout.state_groups) == groups and layout.pages_per_block == pages
    assert layout.request_blocks(1) == groups[0] + 2 * groups[1]
    assert layout.padding_layers == groups[1] * pages - layers[1]


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_blocks_of_a_request_by_counting_its_tokens(dcp: int, interleave: int) -> None:
    """Every token is put where its owner keeps it; the interleave changes owners and no number of blocks."""
    layout = cache_layout(V3, tp=8, dcp=dcp, block_size=16, interleave=interleave)
    for num_tokens in [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000]:
        most = 0
        for rank in range(dcp):
            positions = ownership.local_positions(num_tokens, dcp, rank, interleave)
            most = max(most, len({ownership.local_slot(p, dcp, interleave) // 16 for p in positions}))
        assert layout.request_blocks(num_tokens) == most
        # A manager that counts blocks of all ranks together gets the same.
        assert layout.request_blocks(num_tokens) == len({p // layout.span_tokens for p in range(num_tokens)})


@pytest.mark.parametrize(
    ("options", "per_group"),
    [
        ({}, 2),
        ({"prefix_caching": False}, 1),
        ({"num_speculative_tokens": 3}, 5),
        ({"num_speculative_tokens": 3, "prefix_caching": False}, 4),
        ({"num_speculative_tokens": 3, "state_blocks": 6}, 6),
    ],
)
def test_states_of_a_request(options: dict[str, Any], per_group: int) -> None:
    layout = cache_layout(K3, tp=8, dcp=8, **options)
    assert (layout.state_blocks_per_group, layout.state_blocks) == (per_group, 3 * per_group)
    assert cache_layout(V3, tp=8, **{**options, "state_blocks": None}).state_blocks == 0


def test_counts_are_exact() -> None:
    """Where floating point would be off by one."""
    for num_blocks, need_tokens in ((1, 49 * 64), (3, 49 * 64), (1733, 10**9 + 7), (10**7, 3 * 10**8)):
        plan = plan_capacity(V3, tp=8, max_model_len=need_tokens, num_blocks=num_blocks)
        need = -(-need_tokens // 64)
        assert plan.tokens == int(Fraction(num_blocks * need_tokens, need))
        assert plan.tokens * need <= num_blocks * need_tokens < (plan.tokens + 1) * need
    assert gib("25.12") == gib(25.12) == 2512 * 2**30 // 100
    # 1.1 as a float is a little more than 1.1, and 0.1 + 0.2 is not 0.3.
    assert gib("1.1") == 11 * 2**30 // 10 and gib("0.3") == 3 * 2**30 // 10 and gib(0) == 0
    assert gib("123456789.01") == 12_345_678_901 * 2**30 // 100
    block = cache_layout(K3, tp=8).block_bytes
    for extra, blocks in ((-1, 1269), (0, 1270), (1, 1270)):
        options = {"tp": 8, "max_model_len": M, "available_bytes": 1270 * block + extra}
        assert plan_capacity(K3, **options).num_blocks == blocks


def test_memory_as_a_log_prints_it() -> None:
    least, most = gib_as_printed("1.66")
    assert (f"{least / 2**30:.2f}", f"{most / 2**30:.2f}") == ("1.66", "1.66")
    assert (f"{(least - 9) / 2**30:.2f}", f"{(most + 9) / 2**30:.2f}") == ("1.65", "1.67")
    assert gib_as_printed("0.00")[0] == 0
    for exact in ("34", "34.", "34.2", "34.281", "1e3"):
        assert gib_as_printed(exact) == (gib(exact), gib(exact))


def test_too_little_memory_for_one_request_is_no_error() -> None:
    plan = k3(num_blocks=91)
    assert plan.concurrency < 1 and plan.tokens < plan.max_model_len
    assert k3(available_gib="0.01").tokens == 0


# -- models and ranks


def test_kimi_k3_is_that_of_the_reference_layer() -> None:
    config = KimiK3Config()
    assert (K3.num_attention_layers, K3.num_state_layers) == (len(config.mla_layers), len(config.kda_layers))
    assert (K3.num_heads, K3.kv_lora_rank, K3.qk_rope_head_dim) == (96, config.kv_lora_rank, config.qk_rope_head_dim)
    assert (K3.state_heads, K3.state_head_dim, K3.conv_width) == (96, config.kda_head_dim, config.kda_conv_width)
    assert K3.max_position == config.max_position
    for tp, drafts, item, state_dtype in ((8, 0, 4, "fp32"), (16, 7, 2, "bf16")):
        expected = config.state_bytes_per_request(tp, num_draft_tokens=drafts, state_bytes=item)
        assert K3.num_state_layers * K3.state_bytes(tp, state_dtype, drafts) == expected
    assert K3.num_attention_layers * K3.kv_row_bytes(8, "fp8") == config.kv_bytes_per_token(1)


@pytest.mark.parametrize(
    ("model", "tp", "sizes", "row_bytes"),
    [
        (K3, 8, [1, 2, 4, 8], 576),
        (V3, 6, None, None),
        (V3, 16, [1, 2, 4, 8, 16], 576),
        (GQA, 2, [1], 2 * 128 * 2),
        (GQA, 4, [1], 2 * 128),
        (GQA, 8, [1, 2], 2 * 128),
        (GQA, 32, [1, 2, 4, 8], 2 * 128),  # 16 query heads to a KV head, 8 ranks with a copy of it
        (replace(GQA, num_heads=None), 24, [1, 2, 3, 6], 2 * 128),  # not 4, which divides 24 and not the 6 copies
        (replace(GQA, num_heads=24), 24, [1, 2, 3, 6], 2 * 128),
        (replace(GQA, num_heads=12), 12, [1, 3], 2 * 128),
    ],
)
def test_which_ranks_can_share_tokens(model: ModelSpec, tp: int, sizes: list[int] | None, row_bytes: int) -> None:
    if sizes is None:
        with pytest.raises(DcpInvalidArgument, match="tp must divide num_heads=128"):
            model.dcp_sizes(tp)
        return
    assert model.dcp_sizes(tp) == sizes and model.kv_row_bytes(tp, "fp8") == row_bytes
    assert model.kv_row_bytes(tp, "bf16") == 2 * row_bytes


# -- what cannot be


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"dcp": 3}, "dcp must divide tp=8 (got 3)"),
        ({"dcp": 16}, "dcp must divide tp=8 (got 16)"),
        ({"dcp": 0}, "dcp must be a whole number of at least 1"),
        ({"tp": 0}, "tp must be a whole number of at least 1"),
        ({"tp": 2.0}, "tp must be a whole number (got 2.0)"),
        ({"tp": True}, "tp must be a whole number of at least 1"),
        ({"tp": 5, "dcp": 1}, "tp must divide num_heads=96 (got 5)"),
        ({"model": replace(K3, num_heads=None), "tp": 5, "dcp": 1}, "tp must divide state_heads=96 (got 5)"),
        ({"model": GQA, "tp": 64, "dcp": 64}, "dcp must divide tp / num_kv_heads=64/4"),
        ({"model": GQA, "tp": 4, "dcp": 2}, "dcp must divide tp / num_kv_heads=4/4"),
        ({"model": replace(GQA, num_heads=None), "tp": 6, "dcp": 1}, "tp must divide num_kv_heads=4 or be a multiple"),
        ({"model": replace(GQA, num_heads=8), "tp": 8, "dcp": 2, "kv_dtype": "x"}, "kv_dtype must be one of fp8, bf16"),
        ({"model": replace(GQA, num_heads=12), "tp": 12, "dcp": 2}, "dcp must divide tp / num_kv_heads=12/4"),
        ({"model": replace(GQA, num_heads=8, num_kv_heads=4), "tp": 16, "dcp": 1}, "tp must divide num_heads=8"),
        ({"model": replace(GQA, num_heads=48), "tp": 48, "dcp": 12, "kv_dtype": "fp8_ds_mla"}, "(got GQA)"),
        ({"model": replace(V3, kv_lora_rank=256), "kv_dtype": "fp8_ds_mla"}, "must be of MLA with 512 + 64 elements"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of fp8, bf16, fp8_ds_mla (got 'int4')"),
        ({"state_dtype": "fp8"}, "state_dtype must be one of fp32, bf16 (got 'fp8')"),
        ({"model": V3, "state_dtype": "fp8"}, "state_dtype must be one of fp32, bf16 (got 'fp8')"),
        ({"max_model_len": 0}, "max_model_len must be a whole number of at least 1"),
        ({"max_model_len": 2**63}, "max_model_len must be a whole number of at least 1 (and at most 2**62)"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be a whole number of at least 0"),
        ({"draft_layers": -1}, "draft_layers must be a whole number of at least 0"),
        ({"state_blocks": 0}, "state_blocks must be a whole number of at least 1"),
        ({"model": V3, "state_blocks": 2}, "state_blocks must not be given for a model without state layers"),
        ({"interleave": 0}, "interleave must be a whole number of at least 1"),
        ({"interleave": 1000}, "interleave must divide the tokens of a block=1536 (got 1000)"),
        ({"model": V3, "interleave": 128}, "interleave must divide the tokens of a block=64 (got 128)"),
        ({"block_size": 1408}, "block_size must be a multiple of 128 and at least 1536: its page holds a state"),
        ({"block_size": 1600}, "block_size must be a multiple of 128"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1"),
        ({"block_alignment": 0}, "block_alignment must be a whole number of at least 1"),
        ({"available_gib": -1}, "memory must be at least 0 GiB"),
        ({"available_gib": 0}, "available_bytes must be a whole number of at least 1"),
        ({"available_gib": "nan"}, "memory must be a finite number (got 'nan')"),
        ({"available_gib": float("inf")}, "memory must be a finite number (got inf)"),
        ({"available_gib": "1e999999999"}, "memory must be a finite number"),
        ({"available_gib": "1e12"}, "memory must be at least 0 GiB (and at most 2**30)"),
        ({"available_gib": None}, "memory must be a number (got None)"),
        ({"available_gib": "much"}, "memory must be a number (got 'much')"),
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1"),
        ({"num_blocks": 5, "available_bytes": 5}, "one of available_bytes and num_blocks must be given"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(DcpInvalidArgument) as caught:
        k3(**options)
    assert str(caught.value).startswith("plan: ") and rule in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"num_attention_layers": 0}, "num_attention_layers must be a whole number of at least 1"),
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1"),
        ({"kv_lora_rank": -1}, "kv_lora_rank must be a whole number of at least 0"),
        ({"kv_lora_rank": 0}, "either kv_lora_rank (MLA) or num_kv_heads (GQA) (got 0 and 0)"),
        ({"num_kv_heads": 4}, "either kv_lora_rank (MLA) or num_kv_heads (GQA) (got 512 and 4)"),
        ({"kv_lora_rank": 0, "num_kv_heads": 4}, "head_dim must be a whole number of at least 1"),
        ({"kv_lora_rank": 0, "num_kv_heads": 5, "head_dim": 8}, "num_kv_heads must divide num_heads=96 (got 5)"),
        ({"state_heads": 0}, "state_heads must be a whole number of at least 1"),
        ({"conv_width": 0}, "conv_width must be a whole number of at least 1"),
    ],
)
def test_models_that_cannot_be(fields: dict[str, int], rule: str) -> None:
    with pytest.raises(DcpInvalidArgument) as caught:
        replace(K3, **fields)
    assert rule in str(caught.value)


def test_only_like_is_compared() -> None:
    for other in (k3(max_model_len=1000), k3(kv_dtype="bf16"), k3(state_blocks=3), k3(draft_layers=5)):
        with pytest.raises(DcpInvalidArgument, match="decompose must be given capacities"):
            decompose(other, k3())
    assert decompose(k3(interleave=2), k3(interleave=3)).ratio == 1
    with pytest.raises(DcpInvalidArgument, match="the baseline must have memory for at least one block"):
        decompose(k3(available_gib="0.01"), k3())
    with pytest.raises(DcpInvalidArgument, match="model must be one of kimi-k3"):
        find_model("gpt-2")


def test_the_planner_needs_no_torch() -> None:
    """Nor numpy: a module that is None in sys.modules cannot be imported."""
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None)\n"
        "from dcpkernels.planner import *\n"
        "layout = cache_layout(find_model('kimi-k3'), tp=8, dcp=8)\n"
        "print(workspace_region(find_model('kimi-k3'), layout, tp=8, kv_dtype='fp8').num_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


def test_numbers_of_numpy_count_as_python_ints() -> None:
    np = pytest.importorskip("numpy")
    small = {"tp": np.int32(8), "dcp": np.int32(8), "max_model_len": np.int32(2**20), "interleave": np.int16(1)}
    plan = plan_capacity(K3, available_bytes=np.int64(gib("34.28")), **small)
    assert plan == plan_capacity(K3, tp=8, dcp=8, max_model_len=2**20, available_bytes=gib("34.28"))
    assert type(plan.tokens) is int
    with pytest.raises(DcpInvalidArgument, match="dcp must divide tp"):
        plan_capacity(K3, tp=np.int32(1), dcp=2**31 + 8, max_model_len=2**20, available_bytes=2**40)
