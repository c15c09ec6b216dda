"""Kimi Delta Attention: each formula, and the whole layer in decode, against flash-linear-attention and transformers;
then what a step keeps: several tokens, drafts, padding, ranks.

transformers has no kimi_k3. Its kimi_linear has the same layer but for two gates: the decay's is glm5_next's, bounded
below, and the output's has full rank in K3."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.cache import DecodeBatch, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.kda import (
    KDALayer,
    KDAState,
    KDAWeights,
    causal_conv_step,
    kda_gate,
    kda_recurrent_step,
    l2_norm,
)
from dcpkernels.kimi_k3.parallel import TensorParallel
from tests.kimi_k3.conftest import in_torch, oracle, random, rel_err

TOL = 1e-5
CONFIG = KimiK3Config.tiny(kda_num_heads=4)
WIDE = KimiK3Config.tiny(kda_num_heads=2, kda_head_dim=128, hidden_size=96)  # heads as K3's
KIMI_LINEAR, GLM = (
    "transformers.models.kimi_linear.modeling_kimi_linear",
    "transformers.models.glm5_next.modeling_glm5_next",
)


# -- formulas


def _gate_inputs(head_dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f, A_log, dt_bias: large enough that both ends of the sigmoid are reached."""
    return random(3, 7, 4, head_dim, seed=1, std=3.0), random(4, seed=2), random(4, head_dim, seed=3, std=2.0)


def test_gate_against_fla() -> None:
    naive = oracle("fla.ops.kda.gate").naive_kda_lowerbound_gate
    f, A_log, dt_bias = _gate_inputs()
    out = kda_gate(f, A_log, dt_bias, -5.0)
    assert rel_err(out, naive(f, A_log, dt_bias.flatten(), lower_bound=-5.0)) < TOL
    assert -5 <= out.min() < -4.9
    assert -0.1 < out.max() <= 0


def _forget_gate(hidden_size: int, num_heads: int, head_dim: int) -> torch.nn.Module:
    """glm5_next's, of which the config is read for these four."""
    numbers = {"hidden_size": hidden_size, "linear_num_heads": num_heads, "linear_head_dim": head_dim}
    return oracle(GLM).Glm5NextTextForgetGate(SimpleNamespace(**numbers, linear_lower_bound=-5.0))


def test_gate_against_transformers() -> None:
    gate = _forget_gate(64, 4, 16)
    _, A_log, dt_bias = _gate_inputs()
    x, a, b = random(2, 6, 64, seed=4), random(16, 64, seed=5, std=0.3), random(64, 16, seed=6, std=0.5)
    with torch.no_grad():
        for parameter, value in ((gate.f_a_proj.weight, a), (gate.f_b_proj.weight, b), (gate.A_log, A_log)):
            parameter.copy_(value)
        gate.dt_bias.copy_(dt_bias.flatten())
        expected = gate(x)
    assert rel_err(kda_gate((x @ a.T @ b.T).unflatten(-1, (4, 16)), A_log, dt_bias, -5.0), expected) < TOL


def test_gate_in_bf16_is_computed_in_fp32() -> None:
    f, A_log, dt_bias = _gate_inputs()
    out = kda_gate(f.bfloat16(), A_log, dt_bias, -5.0)
    assert out.dtype == torch.float32
    assert torch.equal(out, kda_gate(f.bfloat16().float(), A_log, dt_bias, -5.0))


def test_l2_norm_against_transformers() -> None:
    x = random(50, 16, seed=7) * torch.logspace(-5, 3, 50)[:, None]  # eps counts in the small ones
    assert rel_err(l2_norm(x, 1e-6), oracle(KIMI_LINEAR).l2norm(x, eps=1e-6)) < TOL
    # Row by row too: by hand, a row whose sum of squares is eps comes out with length 1 / sqrt(2).
    row = torch.full((16,), (1e-6 / 16) ** 0.5)
    assert float(l2_norm(row, 1e-6).norm()) == pytest.approx(0.5**0.5, rel=1e-6)


def _sequence(length: int, heads: int, dim: int, seed: int) -> dict[str, torch.Tensor]:
    """Inputs of the recurrence [2, length, heads, ...]; keys and queries raw, gates slow and fast."""
    return {
        "q": random(2, length, heads, dim, seed=seed),
        "k": random(2, length, heads, dim, seed=seed + 1),
        "v": random(2, length, heads, dim, seed=seed + 2),
        "g": -5 * torch.sigmoid(random(2, length, heads, dim, seed=seed + 3, std=2.0) - 3),
        "beta": torch.sigmoid(random(2, length, heads, seed=seed + 4)),
    }


def _recurrence(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """By kda_recurrent_step, token by token, from zero: outputs [2, T, H, V] and the last state [2, H, V, K]."""
    q, k, v, g, beta = inputs.values()
    q, k = l2_norm(q, 1e-6) * q.shape[-1] ** -0.5, l2_norm(k, 1e-6)
    state, outs = torch.zeros(*v[:, 0].shape, k.shape[-1]), []
    for t in range(q.shape[1]):
        out, state = kda_recurrent_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outs.append(out)
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("which", ["naive_recurrent_kda", "naive_chunk_kda"])
def test_recurrence_against_fla(which: str, dim: int) -> None:
    naive = getattr(oracle("fla.ops.kda.naive"), which)
    inputs = _sequence(64, 3, dim, seed=10)
    q, k, v, g, beta = inputs.values()
    normed = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))  # eps counts for nothing here
    expected, last = naive(*normed, v, g, beta, output_final_state=True)
    out, state = _recurrence(inputs)
    assert rel_err(out, expected) < TOL
    assert rel_err(state.mT, last) < TOL  # theirs is [K, V]


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("which", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
def test_recurrence_against_transformers(which: str, dim: int) -> None:
    function = in_torch(oracle(KIMI_LINEAR), which)
    inputs = _sequence(20, 3, dim, seed=20)
    expected, last = function(
        *inputs.values(), initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    out, state = _recurrence(inputs)
    assert rel_err(out, expected) < TOL
    assert rel_err(state.mT, last) < TOL


def test_conv_step_against_transformers() -> None:
    update = in_torch(oracle(KIMI_LINEAR), "causal_conv1d_update")
    channels, weight, kept = 12, random(12, 4, seed=30), random(2, 12, 3, seed=31)
    window = kept.transpose(1, 2).clone()
    for t in range(6):
        new = random(2, channels, seed=32 + t)
        expected = update(new[:, :, None], kept, weight, activation="silu")[:, :, 0]  # kept is updated
        window = torch.cat([window, new[:, None]], 1)
        assert rel_err(causal_conv_step(window, weight), expected) < TOL
        window = window[:, 1:]


# -- the layer


class Decode:
    """A KDALayer with requests in slots, fed through a RequestTable."""

    def __init__(
        self,
        config: KimiK3Config = CONFIG,
        *,
        num_requests: int = 3,
        max_query_len: int = 4,
        dtype: torch.dtype = torch.float32,
        tp: TensorParallel | None = None,
    ) -> None:
        tp = tp or TensorParallel()
        self.table = RequestTable(64, 8, num_requests)
        self.slots = [self.table.add() for _ in range(num_requests)]
        self.state = KDAState(config, tp, num_requests, max_query_len, dtype)
        self.layer = KDALayer(config, KDAWeights.random(config, tp, key=("kda",), dtype=dtype), self.state, tp)

    def batch(self, counts: dict[int, int], padding: int = 0) -> DecodeBatch:
        total = sum(counts.values()) + padding
        return self.table.extend([self.slots[r] for r in counts], list(counts.values()), num_rows=total)

    def step(self, tokens: dict[int, torch.Tensor], padding: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
        """Feeds rows to requests; their outputs. `padding`: more rows, whose output must be 0."""
        counts = {r: len(x) for r, x in tokens.items()}
        rows = [*tokens.values()] + ([] if padding is None else [padding])
        batch = self.batch(counts, 0 if padding is None else len(padding))
        out = self.layer(torch.cat(rows), batch)
        total = sum(counts.values())
        assert torch.equal(out[total:], torch.zeros_like(out[total:]))  # NaN is not equal
        return dict(zip(tokens, out[:total].split(list(counts.values())), strict=True))

    def kept(self) -> list[torch.Tensor]:
        """What the next step starts from: of each request, recurrent and conv."""
        rows = torch.arange(len(self.slots))
        return [
            self.state.recurrent[rows, self.state.current].clone(),
            self.state.conv[rows, self.state.current].clone(),
        ]


def _inputs(length: int, request: int, config: KimiK3Config = CONFIG) -> torch.Tensor:
    return random(length, config.hidden_size, seed=100 + request)


def _in_transformers(config: KimiK3Config, w: KDAWeights, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Their layer with our weights."""
    modeling = oracle(KIMI_LINEAR)
    for name in (
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        in_torch(modeling, name, monkeypatch)
    theirs = oracle("transformers.models.kimi_linear.configuration_kimi_linear").KimiLinearConfig(
        hidden_size=config.hidden_size, linear_head_dim=config.kda_head_dim, linear_num_heads=config.kda_num_heads,
        linear_conv_kernel_dim=config.kda_conv_width, num_hidden_layers=1, layer_types=["linear_attention"],
        mlp_layer_types=["dense"], rms_norm_eps=1e-5, hidden_act="silu",
    )  # fmt: skip
    layer = modeling.KimiLinearDeltaAttention(theirs, 0)
    layer.forget_gate = _forget_gate(config.hidden_size, config.kda_num_heads, config.kda_head_dim)
    layer.g_a_proj = torch.nn.Identity()
    layer.g_b_proj = torch.nn.Linear(config.hidden_size, config.kda_dim, bias=False)
    assert layer.o_norm.variance_epsilon == 1e-5
    q, k, v = w.qkv_proj.chunk(3)
    weights = {
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "conv1d.weight": w.conv[:, None],
        "forget_gate.f_a_proj.weight": w.f_a_proj, "forget_gate.f_b_proj.weight": w.f_b_proj,
        "forget_gate.dt_bias": w.dt_bias.flatten(), "forget_gate.A_log": w.A_log, "b_proj.weight": w.b_proj,
        "g_b_proj.weight": w.g_proj, "o_norm.weight": w.o_norm, "o_proj.weight": w.o_proj,
    }  # fmt: skip
    layer.load_state_dict(weights, strict=True)
    return layer.eval()


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 3), (2, 4, 4)], ids=str)
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["16", "128"])
def test_layer_in_decode_against_transformers_over_the_whole_sequence(
    config: KimiK3Config, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests of different lengths, each `counts` tokens a step until it is through."""
    lengths = (23, 9, 17)
    ours = Decode(config)
    theirs = _in_transformers(config, ours.layer.weights, monkeypatch)
    xs = [_inputs(length, r, config) for r, length in enumerate(lengths)]
    outs: list[list[torch.Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        tokens = {r: xs[r][done[r] : done[r] + counts[r]] for r in range(3) if done[r] < lengths[r]}
        for r, out in ours.step(tokens).items():
            outs[r].append(out)
            done[r] += len(out)
    for r, x in enumerate(xs):
        with torch.no_grad():
            expected = theirs(x[None])[0]
        assert rel_err(torch.cat(outs[r]), expected) < TOL, r


def test_what_came_before_counts() -> None:
    """The same token again is answered otherwise: a layer without state would pass where two are compared."""
    decode, x = Decode(num_requests=1), _inputs(1, 0)
    first, second = (decode.step({0: x})[0] for _ in range(2))
    assert rel_err(second, first) > 0.05


def test_random_weights_have_slow_and_fast_channels() -> None:
    """Of a token without input: where all decayed alike, or at once, a state that is mixed up would pass."""
    w = KDAWeights.random(KimiK3Config.tiny(), TensorParallel(), key=("decay",), dtype=torch.float32)
    kept = kda_gate(torch.zeros_like(w.dt_bias), w.A_log, w.dt_bias, -5.0).exp()
    assert kept.min() < 0.4
    assert kept.max() > 0.95
    # Between heads, and between the channels of a head.
    assert kept.mean(1).std() > 0.05
    assert kept.std(1).mean() > 0.05


# -- what is kept


def test_several_tokens_a_step_are_as_one_at_a_time() -> None:
    at_once, one_by_one = Decode(), Decode()
    xs = {r: _inputs(4, r) for r in range(3)}
    lens = {0: 4, 1: 2, 2: 3}
    outs = at_once.step({r: xs[r][:n] for r, n in lens.items()})
    for t in range(4):
        for r, out in one_by_one.step({r: xs[r][t : t + 1] for r, n in lens.items() if t < n}).items():
            assert rel_err(out, outs[r][t : t + 1]) < TOL
    for kept, expected in zip(at_once.kept(), one_by_one.kept(), strict=True):
        assert rel_err(kept, expected) < TOL


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_rejected_drafts_were_never_seen(kept: int) -> None:
    """Request 0 keeps `kept` of four tokens, request 1 all of three, request 2 is not in the step. Then they go on,
    with several tokens again, and once more."""
    with_drafts, without = Decode(), Decode()
    xs = {r: _inputs(12, r) for r in range(3)}
    for decode in (with_drafts, without):
        decode.step({r: xs[r][:2] for r in range(3)})
    drafts = random(4 - kept, CONFIG.hidden_size, seed=7)
    with_drafts.step({0: torch.cat([xs[0][2 : 2 + kept], drafts]), 1: xs[1][2:5]})
    with_drafts.table.rewind(with_drafts.slots[0], 4 - kept)
    with_drafts.state.keep(with_drafts.slots[0], kept)
    without.step({0: xs[0][2 : 2 + kept], 1: xs[1][2:5]} if kept else {1: xs[1][2:5]})
    # The two steps have different numbers of rows, so that products may come in another order.
    for some, others in zip(with_drafts.kept(), without.kept(), strict=True):
        assert rel_err(some, others) < TOL
    at = {0: 2 + kept, 1: 5, 2: 2}
    for count in (3, 1):
        outs = [decode.step({r: xs[r][at[r] : at[r] + count] for r in range(3)}) for decode in (with_drafts, without)]
        for r in range(3):
            assert rel_err(outs[0][r], outs[1][r]) < TOL, (r, count)
            at[r] += count


def test_all_drafts_rejected_leaves_the_same_bits() -> None:
    """Of a request of which a step keeps nothing, again and again; and of one that is not in the steps."""
    decode = Decode()
    decode.step({r: _inputs(2, r) for r in range(3)})
    before = decode.kept()
    for count in (4, 1, 3):
        decode.step({0: random(count, CONFIG.hidden_size, seed=count), 1: random(1, CONFIG.hidden_size, seed=9)})
        decode.state.keep(decode.slots[0], 0)
    unchanged = [decode.slots[0], decode.slots[2]]
    for now, then in zip(decode.kept(), before, strict=True):
        assert torch.equal(now[unchanged], then[unchanged])
        assert not torch.equal(now[decode.slots[1]], then[decode.slots[1]])


def test_keep_twice_keeps_the_fewer() -> None:
    decode, alone = Decode(num_requests=1), Decode(num_requests=1)
    x = _inputs(5, 0)
    decode.step({0: x[:4]})
    for num_tokens in (3, 1):
        decode.state.keep(0, num_tokens)
    alone.step({0: x[:1]})
    assert rel_err(decode.step({0: x[4:]})[0], alone.step({0: x[4:]})[0]) < TOL


def test_keep_refuses_more_than_the_step_had() -> None:
    decode = Decode(num_requests=1)
    decode.step({0: _inputs(2, 0)})
    for num_tokens in (3, -1):
        with pytest.raises(DcpInvalidArgument, match="num_tokens must be in 0 .. 2"):
            decode.state.keep(0, num_tokens)
    decode.state.keep(0, 2)  # and nothing was changed


def test_reset_begins_anew_and_leaves_the_others() -> None:
    decode, fresh = Decode(), Decode()
    xs = {r: _inputs(6, r) for r in range(3)}
    for some in (xs, {r: xs[r][3:5] for r in range(3)}):  # the second step does not begin from zero
        decode.step({r: x[:3] for r, x in some.items()})
    before = decode.kept()
    decode.state.reset(decode.slots[1])
    for kept, expected in zip(decode.kept(), before, strict=True):
        others = [slot for r, slot in enumerate(decode.slots) if r != 1]
        assert torch.equal(kept[others], expected[others])
        assert not kept[decode.slots[1]].any()
    with pytest.raises(DcpInvalidArgument, match=r"num_tokens must be in 0 .. 0"):
        decode.state.keep(decode.slots[1], 1)
    out = decode.step({1: xs[1][3:]})[1]
    assert torch.equal(out, fresh.step({1: xs[1][3:]})[1])


def test_requests_in_any_order_and_in_some_steps_only() -> None:
    mixed, alone = Decode(), [Decode() for _ in range(3)]
    xs = {r: _inputs(8, r) for r in range(3)}
    at = [0, 0, 0]
    for requests in ((2, 0), (1,), (0, 1, 2), (1, 2), (0,)):
        outs = mixed.step({r: xs[r][at[r] : at[r] + 1] for r in requests})
        for r in requests:
            assert rel_err(outs[r], alone[r].step({r: xs[r][at[r] : at[r] + 1]})[r]) < TOL
            at[r] += 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_reach_nothing(dtype: torch.dtype, value: float) -> None:
    padded, plain = Decode(dtype=dtype), Decode(dtype=dtype)
    xs = {r: _inputs(4, r).to(dtype) for r in range(3)}
    rubbish = torch.full((3, CONFIG.hidden_size), value, dtype=dtype)
    for counts in ({0: 1, 2: 1}, {0: 3, 1: 2}):
        tokens = {r: xs[r][:n] for r, n in counts.items()}
        outs, expected = padded.step(tokens, rubbish), plain.step(tokens)
        # Products with more rows may come in another order.
        assert all(rel_err(outs[r], expected[r]) < (1e-6 if dtype == torch.float32 else 1e-2) for r in tokens)
    assert torch.isfinite(padded.state.recurrent).all()
    assert torch.isfinite(padded.state.conv).all()


def test_a_batch_of_padding_alone() -> None:
    decode = Decode()
    before = decode.kept()
    assert decode.step({}, torch.full((4, CONFIG.hidden_size), float("nan"))) == {}
    assert all(torch.equal(now, then) for now, then in zip(decode.kept(), before, strict=True))


def test_too_many_tokens_are_refused_before_anything_changes() -> None:
    decode, other = Decode(max_query_len=2), Decode(max_query_len=2)
    xs = {r: _inputs(8, r) for r in range(3)}
    for each in (decode, other):
        each.step({r: xs[r][:2] for r in range(3)})
    batch = decode.batch({0: 1, 1: 3})
    state = [decode.state.recurrent.clone(), decode.state.conv.clone(), decode.state.current.clone()]
    with pytest.raises(DcpInvalidArgument, match=r"must be at most max_query_len=2 \(got 3\)"):
        decode.layer(torch.cat([xs[0][2:3], xs[1][2:5]]), batch)
    for now, then in zip((decode.state.recurrent, decode.state.conv, decode.state.current), state, strict=True):
        assert torch.equal(now, then)
    assert torch.equal(decode.step({0: xs[0][2:4]})[0], other.step({0: xs[0][2:4]})[0])


def test_bf16_is_near_fp32() -> None:
    low, wide = Decode(WIDE, dtype=torch.bfloat16), Decode(WIDE)
    fields = {name: value.float() for name, value in vars(low.layer.weights).items()}
    wide.layer.weights = replace(wide.layer.weights, **fields)
    for t in range(6):
        tokens = {r: _inputs(8, r, WIDE)[t : t + 1].bfloat16() for r in range(3)}
        outs, expected = low.step(tokens), wide.step({r: x.float() for r, x in tokens.items()})
        for r, out in outs.items():
            assert out.dtype == torch.bfloat16
            assert 0 < rel_err(out, expected[r]) < 0.03
    assert low.state.recurrent.dtype == torch.float32
    assert low.state.conv.dtype == torch.bfloat16


# -- ranks


class OnePart(TensorParallel):
    """A rank whose sums over ranks are left to the test."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


@pytest.mark.parametrize("size", [2, 4])
def test_sum_over_ranks_is_the_layer_on_one(size: int) -> None:
    whole, ranks = Decode(), [Decode(tp=OnePart(rank, size)) for rank in range(size)]
    for counts in ({0: 1, 1: 1, 2: 1}, {0: 4, 2: 2}, {1: 3, 2: 1}):
        tokens: dict[int, torch.Tensor] = {r: _inputs(n, r) for r, n in counts.items()}
        parts: list[dict[int, Any]] = [rank.step(tokens) for rank in ranks]
        for r, expected in whole.step(tokens).items():
            assert rel_err(sum(part[r] for part in parts), expected) < TOL
    # A rank has its heads' state, and that of no others.
    recurrent = torch.cat([rank.state.recurrent for rank in ranks], 2)
    assert rel_err(recurrent, whole.state.recurrent) < TOL
    assert ranks[0].state.recurrent.shape[2] * size == CONFIG.kda_num_heads


def test_heads_that_ranks_do_not_divide() -> None:
    with pytest.raises(DcpInvalidArgument, match="kda_num_heads must be divisible by num_ranks=3"):
        KDAState(CONFIG, TensorParallel(0, 3), 1, 1, torch.float32)


def test_state_of_kimi_k3_has_the_published_size() -> None:
    """27,648 B and 786,432 B a layer and request at TP8, for the place where a request is."""
    with torch.device("meta"):
        state = KDAState(KimiK3Config(), TensorParallel(0, 8), 1, 1, torch.bfloat16)
    assert state.conv[0, 0].nbytes == 27_648
    assert state.recurrent[0, 0].nbytes == 786_432
    assert state.recurrent.dtype == torch.float32


def test_rows_that_are_not_the_batch_s_change_nothing() -> None:
    config = KimiK3Config.tiny()
    tp = TensorParallel()
    state = KDAState(config, tp, 2, 2, torch.float32)
    layer = KDALayer(config, KDAWeights.random(config, tp, key=("k",), dtype=torch.float32), state, tp)
    table = RequestTable(8, 4, 2)
    slots = [table.add(), table.add()]
    layer(torch.randn(2, config.hidden_size), table.extend(slots, [1, 1]))
    before = [kept.clone() for kept in (state.recurrent, state.conv, state.current)]
    batch = table.extend(slots, [1, 1])
    for rows in (1, 3):
        with pytest.raises(DcpInvalidArgument, match="kimi_k3: x must have the batch's 2 rows"):
            layer(torch.randn(rows, config.hidden_size), batch)
    assert all(torch.equal(a, b) for a, b in zip(before, (state.recurrent, state.conv, state.current), strict=True))
    for slot in (-1, 2):
        with pytest.raises(DcpInvalidArgument, match="kda: slot must be in 0 .. 1"):
            state.reset(slot)
        with pytest.raises(DcpInvalidArgument, match="kda: slot must be in 0 .. 1"):
            state.keep(slot, 0)
