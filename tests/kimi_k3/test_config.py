"""Kimi-K3 in numbers: against what is published of its checkpoint and of its memory, and against the weights that are
drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attn_res import AttnResWeights
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.kda import KDALayer, KDAWeights
from dcpkernels.kimi_k3.layer import LayerWeights
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights
from dcpkernels.kimi_k3.model import KimiK3Model
from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights
from dcpkernels.kimi_k3.parallel import TensorParallel

K3 = KimiK3Config()

# What other people read in the checkpoint: shapes [out, in] of one layer.
PUBLISHED_MLA = {
    "q_a_proj": (1536, 7168), "q_a_norm": (1536,), "q_b_proj": (96 * 192, 1536), "kv_a_proj": (576, 7168),
    "kv_a_norm": (512,), "kv_b_proj": (24576, 512), "g_proj": (12288, 7168), "o_proj": (7168, 12288),
}  # fmt: skip
PUBLISHED_EXPERT = {"w1": (3072, 3584), "w3": (3072, 3584), "w2": (3584, 3072)}
PUBLISHED_BYTES = 1_560_860_324_864


# -- the published model


def test_layer_kinds() -> None:
    assert K3.num_layers == 93
    assert K3.mla_layers == (*range(3, 92, 4), 92)
    assert (len(K3.mla_layers), len(K3.kda_layers)) == (24, 69)
    assert sorted((*K3.mla_layers, *K3.kda_layers)) == list(range(93))
    assert K3.mla_layers[-2:] == (91, 92)
    assert [layer for layer in range(93) if K3.is_dense(layer)] == [0]
    assert K3.num_attn_res_blocks == 8


def test_dims() -> None:
    numbers = {
        "hidden_size": 7168, "vocab_size": 163_840, "max_position": 1_048_576, "num_heads": 96, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5,
        "latent_norm_eps": 1e-6, "attn_res_block_size": 12, "kda_num_heads": 96, "kda_head_dim": 128,
        "kda_conv_width": 4, "kda_gate_lower_bound": -5.0, "kda_l2_eps": 1e-6, "dense_intermediate_size": 33_792,
        "num_experts": 896, "num_experts_per_token": 16, "moe_latent_size": 3584, "moe_intermediate_size": 3072,
        "num_shared_experts": 2, "routed_scaling_factor": 1.0, "situ_beta": 4.0, "situ_linear_beta": 25.0,
    }  # fmt: skip
    assert {name: getattr(K3, name) for name in numbers} == numbers
    assert (K3.qk_head_dim, K3.latent_dim, K3.kda_dim, K3.shared_intermediate_size) == (192, 576, 12_288, 6144)
    assert K3.softmax_scale == pytest.approx(0.0721688, rel=1e-6)


def test_parameters() -> None:
    # Published as 2.78T and 104B.
    assert K3.num_parameters() == pytest.approx(2.7795e12, rel=1e-4)
    assert K3.num_parameters(active=True) == pytest.approx(104.19e9, rel=1e-4)


def test_parameters_of_an_mla_layer() -> None:
    assert K3.mla_parameters() == {name: prod(shape) for name, shape in PUBLISHED_MLA.items()}
    assert sum(K3.mla_parameters().values()) == 232_196_096


def test_parameters_of_experts() -> None:
    expert = sum(prod(shape) for shape in PUBLISHED_EXPERT.values())
    assert K3.moe_parameters()["experts"] == 896 * expert
    assert K3.moe_parameters(16)["experts"] == 16 * expert
    assert K3.moe_parameters()["shared"] == 3 * 7168 * 6144
    assert K3.dense_parameters() == {"mlp": 3 * 7168 * 33_792}
    # 16 of 896 are read for a token; whoever chooses them is read whole.
    apart = {name for name, count in K3.moe_parameters().items() if count != K3.moe_parameters(16)[name]}
    assert apart == {"experts"}


def test_active_parameters_by_hand() -> None:
    layers = sum(sum(K3.layer_parameters(layer, 16).values()) for layer in range(93))
    assert K3.num_parameters(active=True) == layers + 163_840 * 7168 + 3 * 7168
    assert K3.num_parameters() - K3.num_parameters(active=True) == 163_840 * 7168 + 92 * 880 * 3 * 3584 * 3072


def test_bytes_of_the_checkpoint() -> None:
    vision = 0.40e9 * 2
    assert K3.num_bytes() + vision == pytest.approx(PUBLISHED_BYTES, rel=2e-4)
    # By another way: every expert as its stored shapes, packed two a byte and a scale for 32.
    stored = sum(rows * (columns // 2 + columns // 32) for rows, columns in PUBLISHED_EXPERT.values())
    experts = 92 * K3.moe_parameters()["experts"]
    in_fp32 = 92 * 896 + 69 * (96 + 12_288)
    assert K3.num_bytes() == 92 * 896 * stored + 2 * (K3.num_parameters() - experts - in_fp32) + 4 * in_fp32


def test_bytes_of_a_request() -> None:
    assert K3.state_bytes_per_request(8) == 56_171_520 == 69 * 814_080
    # Drafts lengthen the convolution's inputs only; in bf16 the matrices are half as large.
    assert K3.state_bytes_per_request(8, num_draft_tokens=7) == 69 * (3 * 12 * 128 * (3 + 7) * 2 + 786_432)
    assert K3.state_bytes_per_request(8, state_bytes=2) == 69 * (27_648 + 786_432 // 2)
    assert K3.state_bytes_per_request(1) == 8 * 56_171_520


def test_bytes_of_a_token() -> None:
    assert K3.kv_bytes_per_token() == 13_824
    assert K3.kv_bytes_per_token(2) == 27_648


# -- and the weights that are drawn


def _elements(weights: Any) -> dict[str, int]:
    return {f.name: getattr(weights, f.name).numel() for f in fields(weights)}


TINY = KimiK3Config.tiny()
ONE = TensorParallel()


def test_mla_weights_have_as_many_elements() -> None:
    elements = _elements(MLAWeights.random(TINY, ONE, key=0, dtype=torch.float32))
    elements["kv_b_proj"] = elements.pop("w_uk") + elements.pop("w_uv")
    assert elements == TINY.mla_parameters()


def test_kda_weights_have_as_many_elements() -> None:
    assert _elements(KDAWeights.random(TINY, ONE, key=(0,), dtype=torch.float32)) == TINY.kda_parameters()


@pytest.mark.parametrize("num_experts", [None, 5])
def test_moe_weights_have_as_many_elements(num_experts: int | None) -> None:
    weights = MoEWeights.random(TINY, ONE, key=(0,), dtype=torch.float32, num_experts=num_experts)
    elements = {f.name: getattr(weights, f.name) for f in fields(weights)}
    shared = sum(_elements(elements.pop("shared")).values())
    counts = {name: weight.numel() for name, weight in elements.items()}
    counts["experts"] = sum(counts.pop(name) for name in ("w1", "w2", "w3"))
    expected = TINY.moe_parameters(num_experts)
    if num_experts is not None:  # the config's router chooses among all of its experts
        expected |= {"router": TINY.hidden_size * num_experts, "router_bias": num_experts}
    assert {**counts, "shared": shared} == expected


def test_dense_weights_have_as_many_elements() -> None:
    weights = MLPWeights.random(64, TINY.dense_intermediate_size, ONE, key=(0,), dtype=torch.float32)
    assert sum(_elements(weights).values()) == TINY.dense_parameters()["mlp"]


def _all_tensors(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [tensor for f in fields(thing) for tensor in _all_tensors(getattr(thing, f.name))]


def test_a_model_has_as_many_elements() -> None:
    model = KimiK3Model(TINY, ONE, seed=0, dtype=torch.float32, num_blocks=1, block_size=1, max_requests=1)
    kinds = [type(layer.attention) for layer in model.layers]
    assert kinds == [MLALayer if layer in (3, 7) else KDALayer for layer in range(8)]
    assert [isinstance(layer.mlp, MLPWeights) for layer in model.layers] == [True] + [False] * 7
    total = 0
    for index, layer in enumerate(model.layers):
        count = sum(
            t.numel() for part in (layer.weights, layer.attention.weights, layer.mlp) for t in _all_tensors(part)
        )
        assert count == sum(TINY.layer_parameters(index).values()), index
        total += count
    rest = [model.embedding, model.head, model.norm, *_all_tensors(model.output_res)]
    assert total + sum(t.numel() for t in rest) == TINY.num_parameters()


def test_weights_of_layers_and_mixes() -> None:
    layer = sum(t.numel() for t in _all_tensors(LayerWeights.random(TINY, key=(0,), dtype=torch.float32)))
    assert layer == TINY.layer_parameters(0)["norms"] + TINY.layer_parameters(0)["attn_res"]
    assert sum(_elements(AttnResWeights.random(TINY, key=(0,), dtype=torch.float32)).values()) == 2 * TINY.hidden_size


# -- the config itself


def test_tiny_has_all_kinds_of_layers() -> None:
    assert TINY.mla_layers == (3, 7)
    assert TINY.num_attn_res_blocks == 4
    assert KimiK3Config.tiny(num_layers=6).mla_layers == (3, 5)
    assert (TINY.rms_norm_eps, TINY.latent_norm_eps) == (K3.rms_norm_eps, K3.latent_norm_eps)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"num_experts_per_token": 897}, r"num_experts_per_token must be in 1 .. num_experts=896 \(got 897\)"),
        ({"num_experts_per_token": 0}, "num_experts_per_token must be at least 1"),
        ({"full_attention_interval": 0}, "must be at least 1"),
        ({"attn_res_block_size": 0}, r"attn_res_block_size must be at least 1 \(got 0\)"),
    ],
)
def test_numbers_that_do_not_fit(numbers: dict[str, int], text: str) -> None:
    with pytest.raises(DcpInvalidArgument, match=text):
        KimiK3Config(**numbers)


def test_config_imports_no_torch() -> None:
    program = (
        "import sys; from dcpkernels.kimi_k3.config import KimiK3Config; KimiK3Config().num_bytes(); "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_numbers_that_do_not_fit_together() -> None:
    for wrong, text in (
        ({"num_heads": 0}, "num_heads must be at least 1 (got 0)"),
    ):
        with pytest.raises(DcpInvalidArgument) as caught:
            KimiK3Config.tiny(**wrong)
        assert text in str(caught.value)
    with pytest.raises(DcpInvalidArgument, match="tp_size must divide kda_num_heads=96"):
        KimiK3Config().state_bytes_per_request(7)
    KimiK3Config.tiny(num_dense_layers=0)


def test_experts_as_published() -> None:
    shapes = KimiK3Config().stored_expert_shapes()
    assert shapes["w1"] == shapes["w3"] == ((3072, 1792), (3072, 112)) and shapes["w2"] == ((3584, 1536), (3584, 96))


def test_the_page_says_what_the_numbers_say() -> None:
    page = (Path(__file__).parents[2] / "docs/kimi_k3.md").read_text()
    config = KimiK3Config()
    for text in (
        f"{config.num_layers} layers of width {config.hidden_size}: {len(config.mla_layers)} MLA",
        f"{len(config.kda_layers)} KDA",
        f"dense MLP ({config.dense_intermediate_size:,})",
        f"{config.num_experts} experts of which {config.num_experts_per_token} work",
        f"{config.num_parameters() / 1e12:.4f}e12 parameters",
        f"{config.num_parameters(active=True) / 1e9:.1f}e9",
        f"{config.kv_bytes_per_token():,} bytes in fp8, {config.kv_bytes_per_token(2):,} in bf16",
        f"{config.state_bytes_per_request(8) / 1e6:.1f} MB of KDA state",
        f"scale is {config.qk_head_dim}^-0.5",
    ):
        assert text in page, text
