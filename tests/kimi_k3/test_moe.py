"""The feed-forward parts: routing against transformers, SiTU and whole layers against fp64 sums over all experts that
are written out here, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3 import mxfp4
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights, dense_mlp, moe, route, situ
from dcpkernels.kimi_k3.mxfp4 import MXFP4Tensor
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.testing import run_ranks
from tests.kimi_k3.conftest import oracle, random, rel_err

TOL = 1e-5
CONFIG = KimiK3Config.tiny()
ONE = TensorParallel()


def _x(num_tokens: int = 9, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random(num_tokens, CONFIG.hidden_size, seed=seed, dtype=dtype)


# -- routing


def _as_matrix(shares: torch.Tensor, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, E]: each expert's share, 0 where it is not chosen."""
    return torch.zeros(len(shares), num_experts).scatter(1, experts, shares)


@pytest.mark.parametrize("factor", [1.0, 2.446])
@pytest.mark.parametrize(("num_experts", "top"), [(16, 4), (896, 16), (5, 5), (7, 1)])
@pytest.mark.parametrize("router", ["kimi_linear.modeling_kimi_linear", "deepseek_v3.modeling_deepseek_v3"])
def test_route_against_transformers(router: str, num_experts: int, top: int, factor: float) -> None:
    modeling = oracle(f"transformers.models.{router}")
    theirs = (modeling.KimiLinearTopkRouter if "kimi" in router else modeling.DeepseekV3TopkRouter)(
        SimpleNamespace(
            num_experts_per_tok=top, num_local_experts=num_experts, n_routed_experts=num_experts, hidden_size=64,
            routed_scaling_factor=factor, n_group=1, topk_group=1, norm_topk_prob=True,
        )
    )  # fmt: skip
    x, weight, bias = _x(40), random(num_experts, 64, seed=2, std=0.2), random(num_experts, seed=3, std=0.5)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        theirs.e_score_correction_bias.copy_(bias)
        _, shares, experts = theirs(x)
    config = KimiK3Config.tiny(num_experts=num_experts, num_experts_per_token=top, routed_scaling_factor=factor)
    out, chosen = route(x, weight, bias, config)
    assert out.dtype == torch.float32
    assert torch.equal(chosen.sort(1).values, experts.sort(1).values)
    assert rel_err(_as_matrix(out, chosen, num_experts), _as_matrix(shares, experts, num_experts)) < TOL
    assert (out.sum(1) - factor).abs().max() < 1e-5 * factor


def test_bias_chooses_and_does_not_weigh() -> None:
    """Experts 3 and 5 are pushed in, 0 out: the shares are those of the scores all the same."""
    x, weight = _x(), random(16, 64, seed=2, std=0.1)
    bias = torch.zeros(16)
    bias[[3, 5]], bias[0] = 10.0, -10.0
    shares, experts = route(x, weight, bias, CONFIG)
    for row, (some, share) in enumerate(zip(experts.tolist(), shares, strict=True)):
        assert {3, 5} < set(some)
        assert 0 not in some
        scores = torch.sigmoid((weight.double() @ x[row].double())[some])
        torch.testing.assert_close(share.double(), scores / scores.sum(), rtol=1e-5, atol=0)


def test_route_computes_in_fp32() -> None:
    """bf16 scores are too coarse to choose by: 200 experts, of which many would tie."""
    config = KimiK3Config.tiny(num_experts=200)
    x, weight, bias = _x(dtype=torch.bfloat16), random(200, 64, seed=4, dtype=torch.bfloat16), torch.zeros(200)
    shares, experts = route(x, weight, bias, config)
    expected = route(x.float(), weight.float(), bias, config)
    assert shares.dtype == torch.float32
    assert torch.equal(experts, expected[1])
    assert torch.equal(shares, expected[0])


def test_scores_that_are_all_zero() -> None:
    x = torch.ones(2, 64)
    shares, _ = route(x, torch.full((16, 64), -5.0), torch.zeros(16), CONFIG)  # sigmoid(-320)
    assert torch.equal(shares, torch.zeros(2, 4))


# -- SiTU


def _situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g, u = gate.double(), up.double()
    return 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25)


def test_situ() -> None:
    gate, up = torch.meshgrid(torch.linspace(-40, 40, 161), torch.linspace(-200, 200, 81), indexing="ij")
    assert rel_err(situ(gate, up, CONFIG), _situ(gate, up)) < 1e-6
    small = (random(100, seed=5, std=0.01), random(100, seed=6, std=0.01))
    assert rel_err(situ(*small, CONFIG), _situ(*small)) < 1e-6
    # Close to SwiGLU where both are small.
    assert rel_err(situ(*small, CONFIG), torch.nn.functional.silu(small[0]) * small[1]) < 1e-4


def test_situ_is_bounded() -> None:
    far = torch.tensor([3e38, float("inf")])
    assert torch.equal(situ(far, far, CONFIG), torch.tensor([100.0, 100.0]))
    assert torch.equal(situ(far, -far, CONFIG), torch.tensor([-100.0, -100.0]))
    assert torch.equal(situ(-far, far, CONFIG), torch.tensor([0.0, 0.0]))  # sigmoid, not tanh alone


def test_situ_in_bf16_rounds_once() -> None:
    gate, up = (random(1000, seed=seed, std=8.0, dtype=torch.bfloat16) for seed in (7, 8))
    out = situ(gate, up, CONFIG)
    assert torch.equal(out, situ(gate.float(), up.float(), CONFIG).bfloat16())


def test_situ_takes_its_numbers_from_the_config() -> None:
    config = KimiK3Config.tiny(situ_beta=2.0, situ_linear_beta=3.0)
    assert float(situ(torch.tensor(1e9), torch.tensor(1e9), config)) == 6.0


# -- whole layers, by brute force


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return _situ(x @ gate.double().T, x @ up.double().T) @ down.double().T


def _dense(weight: Any) -> torch.Tensor:
    return weight.dequantise(torch.float64) if isinstance(weight, MXFP4Tensor) else weight.double()


def _moe(x: torch.Tensor, w: MoEWeights, factor: float = 1.0) -> torch.Tensor:
    """Token by token, in fp64, all experts with shares that are mostly 0."""
    outs = []
    w1, w3, w2 = (_dense(each) for each in (w.w1, w.w3, w.w2))
    for row in x.double():
        scores = [float(1 / (1 + torch.exp(-(row @ r.double())))) for r in w.router]
        by_bias = sorted(range(len(scores)), key=lambda e: -(scores[e] + float(w.router_bias[e])))
        chosen = by_bias[: CONFIG.num_experts_per_token]
        total = sum(scores[e] for e in chosen)
        latent = w.down_proj.double() @ row
        share = [factor * scores[e] / total if e in chosen else 0.0 for e in range(len(scores))]
        y = sum(share[e] * _mlp(latent, w1[e], w3[e], w2[e]) for e in range(len(scores)))
        y = w.latent_norm.double() * y / torch.sqrt((y * y).mean() + 1e-5)
        outs.append(w.up_proj.double() @ y + _mlp(row, *vars(w.shared).values()))
    return torch.stack(outs)


def _weights(tp: TensorParallel = ONE, *, dtype: torch.dtype = torch.float32, **options: Any) -> MoEWeights:
    return MoEWeights.random(CONFIG, tp, key=("moe",), dtype=dtype, **options)


def test_dense_mlp_against_brute_force() -> None:
    weights = MLPWeights.random(64, 256, ONE, key=("dense",), dtype=torch.float32)
    x = _x() * 3
    expected = _mlp(x.double(), weights.gate_proj, weights.up_proj, weights.down_proj)
    assert rel_err(dense_mlp(x, weights, CONFIG, ONE), expected) < TOL


@pytest.mark.parametrize("quantised", [False, True])
def test_moe_against_brute_force(quantised: bool) -> None:
    weights, x = _weights(quantised=quantised), _x()
    assert isinstance(weights.w2, MXFP4Tensor) == quantised
    assert rel_err(moe(x, weights, CONFIG, ONE), _moe(x, weights)) < TOL


def test_latents_that_are_small() -> None:
    """Where eps of the latent norm counts, and with it the scaling factor in front of it."""
    weights, x = _weights(), _x()
    weights = replace(weights, w2=weights.w2 * 3e-3)
    for factor in (1.0, 2.446):
        out = moe(x, weights, KimiK3Config.tiny(routed_scaling_factor=factor), ONE)
        assert rel_err(out, _moe(x, weights, factor)) < TOL


def test_fewer_experts() -> None:
    weights = _weights(num_experts=6)
    assert len(weights.router) == len(weights.router_bias) == len(weights.w1) == 6
    assert rel_err(moe(_x(), weights, CONFIG, ONE), _moe(_x(), weights)) < TOL


def test_quantised_experts_are_as_their_values() -> None:
    quantised = _weights(quantised=True)
    named = {name: getattr(quantised, name) for name in ("w1", "w3", "w2")}
    dense = replace(quantised, **{name: weight.dequantise(torch.float32) for name, weight in named.items()})
    assert torch.equal(moe(_x(), quantised, CONFIG, ONE), moe(_x(), dense, CONFIG, ONE))
    # They are the plain weights, rounded.
    for name, weight in named.items():
        assert 0.01 < rel_err(weight.dequantise(torch.float32), getattr(_weights(), name)) < 0.3


@pytest.mark.parametrize("quantised", [False, True])
def test_experts_that_nobody_chose_are_not_read(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = _weights(quantised=quantised), _x(2)
    expected = moe(x, weights, CONFIG, ONE)
    chosen = set(route(x, weights.router, weights.router_bias, CONFIG)[1].flatten().tolist())
    others = [expert for expert in range(16) if expert not in chosen]
    assert others
    for each in (weights.w1, weights.w3, weights.w2):
        if isinstance(each, MXFP4Tensor):
            each.scales[others] = 255
        else:
            each[others] = float("nan")
    # Nor unpacked, for no rows: nearly all of the 896 in a step of one token.
    read: list[int] = []
    item = MXFP4Tensor.__getitem__
    monkeypatch.setattr(MXFP4Tensor, "__getitem__", lambda self, index: (read.append(index), item(self, index))[1])
    assert torch.equal(moe(x, weights, CONFIG, ONE), expected)
    assert set(read) == (chosen if quantised else set())


def test_rows_do_not_reach_each_other() -> None:
    """A row of NaN (padding) changes no other, and a row alone is as among others."""
    weights, x = _weights(), _x()
    out = moe(x, weights, CONFIG, ONE)
    spoilt = x.clone()
    spoilt[4] = float("nan")
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert rel_err(moe(spoilt, weights, CONFIG, ONE)[others], out[others]) < 1e-6
    assert rel_err(moe(x[7:8], weights, CONFIG, ONE), out[7:8]) < TOL


def test_no_rows() -> None:
    assert moe(_x(0), _weights(), CONFIG, ONE).shape == (0, 64)


def test_bf16_is_near_fp64() -> None:
    x = _x(dtype=torch.bfloat16)
    for quantised in (False, True):
        weights = _weights(dtype=torch.bfloat16, quantised=quantised)
        out = moe(x, weights, CONFIG, ONE)
        assert out.dtype == torch.bfloat16
        assert 0 < rel_err(out, _moe(x, weights)) < 0.02
    dense = MLPWeights.random(64, 256, ONE, key=("dense",), dtype=torch.bfloat16)
    expected = _mlp(x.double(), dense.gate_proj, dense.up_proj, dense.down_proj)
    assert 0 < rel_err(dense_mlp(x, dense, CONFIG, ONE), expected) < 0.02


def test_inputs_are_not_written_to() -> None:
    x, weights = _x(), _weights()
    before = [x.clone(), weights.down_proj.clone(), weights.router_bias.clone()]
    moe(x, weights, CONFIG, ONE)
    assert all(torch.equal(*pair) for pair in zip((x, weights.down_proj, weights.router_bias), before, strict=True))


# -- ranks


class ThreadParallel(TensorParallel):
    """Sums over threads, in place, as the real one does."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.copy_(sum(self.group.all_gather_object(partial.clone())))


def _both(group: Any, tp: TensorParallel, options: dict[str, Any]) -> list[torch.Tensor]:
    dense = MLPWeights.random(64, 256, tp, key=("dense",), dtype=torch.float32)
    return [moe(_x(), _weights(tp, **options), CONFIG, tp), dense_mlp(_x(), dense, CONFIG, tp)]


def _on_threads(group: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    return _both(group, ThreadParallel(group.rank, group.num_ranks, group), options)


def _on_processes(group: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    return _both(group, TensorParallel.of(group), options)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_agree_with_one(size: int, quantised: bool) -> None:
    """The partial latents are summed before their norm: sums of normalised ones were far off."""
    options = {"quantised": quantised}
    expected = _both(None, ONE, options)
    for outs in run_ranks(_on_threads, size, options):
        for out, whole in zip(outs, expected, strict=True):
            assert rel_err(out, whole) < TOL


def test_rank_processes_agree_with_one() -> None:
    expected = _both(None, ONE, {})
    by_rank = run_ranks(_on_processes, 2, {}, mode="process")
    for i, whole in enumerate(expected):
        assert rel_err(by_rank[0][i], whole) < TOL
        assert torch.equal(by_rank[0][i], by_rank[1][i])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_parts_of_the_same_weights(size: int) -> None:
    whole, parts = _weights(), [_weights(TensorParallel(rank, size)) for rank in range(size)]
    for name, dim in (("w1", 1), ("w3", 1), ("w2", 2)):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim), getattr(whole, name))
    for name in ("router", "router_bias", "down_proj", "latent_norm", "up_proj"):
        assert all(torch.equal(getattr(part, name), getattr(whole, name)) for part in parts)
    assert torch.equal(torch.cat([part.shared.down_proj for part in parts], 1), whole.shared.down_proj)
    # Quantised blocks do not cross from one rank to the next.
    w2 = torch.cat([_weights(TensorParallel(rank, size), quantised=True).w2.packed for rank in range(size)], 2)
    assert torch.equal(w2, mxfp4.quantise(whole.w2).packed)


# -- errors


@pytest.mark.parametrize("num_experts", [3, 17, 0])
def test_a_number_of_experts_that_is_none(num_experts: int) -> None:
    with pytest.raises(DcpInvalidArgument, match=rf"num_experts must be in 4 .. 16 \(got {num_experts}\)"):
        _weights(num_experts=num_experts)


def test_intermediate_channels_that_ranks_do_not_divide() -> None:
    with pytest.raises(DcpInvalidArgument, match="intermediate size must be divisible by num_ranks=3"):
        MLPWeights.random(64, 256, TensorParallel(0, 3), key=("x",), dtype=torch.float32)
    with pytest.raises(DcpInvalidArgument, match=r"multiple of 32 intermediate channels \(got 16\)"):
        MLPWeights.random(64, 64, TensorParallel(0, 4), key=("x",), dtype=torch.float32)
    assert MLPWeights.random(64, 48, ONE, key=("x",), dtype=torch.float32).gate_proj.shape == (48, 64)
