"""The whole stack: logits of requests that are decoded, some tokens a step, against the same model written out a second
time over whole sequences: attention un-absorbed under a causal mask, KDA and AttnRes by flash-linear-attention's naive
forms, every expert computed for every token, in fp64 wherever those do not go down to fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d, pad, silu

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.cache import RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.kda import KDALayer, KDAWeights
from dcpkernels.kimi_k3.mla import MLAWeights
from dcpkernels.kimi_k3.model import KimiK3Model
from dcpkernels.kimi_k3.moe import MLPWeights, MoEWeights
from dcpkernels.kimi_k3.mxfp4 import MXFP4Tensor
from dcpkernels.kimi_k3.parallel import TensorParallel
from tests.kimi_k3.conftest import oracle, rel_err

TOL = 1e-4
CONFIGS = {
    "tiny": KimiK3Config.tiny(),
    # The last layer is MLA beside another one, and blocks begin with an MLA layer (3) and in the middle of an interval.
    "odd": KimiK3Config.tiny(num_layers=5, attn_res_block_size=3),
}


# -- written out a second time: one sequence, fp64


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _mla(x: torch.Tensor, w: MLAWeights, config: KimiK3Config) -> torch.Tensor:
    num_tokens, heads = len(x), config.num_heads
    w = MLAWeights(**{name: value.double() for name, value in vars(w).items()})
    q = torch.einsum("tr,hdr->htd", _rms(x @ w.q_a_proj.T, w.q_a_norm, 1e-6), w.q_b_proj)
    latent, shared_key = (x @ w.kv_a_proj.T).split([config.kv_lora_rank, config.qk_rope_head_dim], 1)
    latent = _rms(latent, w.kv_a_norm, 1e-6)
    k = torch.cat([torch.einsum("tr,hdr->htd", latent, w.w_uk), shared_key.expand(heads, -1, -1)], 2)
    v = torch.einsum("tr,hdr->htd", latent, w.w_uv)
    scores = q @ k.mT / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ v
    return (out.transpose(0, 1).flatten(1) * torch.sigmoid(x @ w.g_proj.T)) @ w.o_proj.T


def _kda(x: torch.Tensor, w: KDAWeights, config: KimiK3Config) -> torch.Tensor:
    gate = oracle("fla.ops.kda.gate").naive_kda_lowerbound_gate
    recurrence = oracle("fla.ops.kda.naive").naive_recurrent_kda
    heads, dim = config.kda_num_heads, config.kda_head_dim
    w = KDAWeights(**{name: value.double() for name, value in vars(w).items()})
    before = pad((x @ w.qkv_proj.T).T, (config.kda_conv_width - 1, 0))
    q, k, v = silu(conv1d(before, w.conv[:, None], groups=len(w.conv))).T.unflatten(1, (3, heads, dim)).unbind(1)
    q, k = (each / torch.sqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    g = gate((x @ w.f_a_proj.T @ w.f_b_proj.T).unflatten(1, (heads, dim)), w.A_log, w.dt_bias.flatten(), -5.0)
    out, _ = recurrence(q[None], k[None], v[None], g[None], torch.sigmoid(x @ w.b_proj.T)[None])
    gated = _rms(out[0], w.o_norm, 1e-5) * torch.sigmoid(x @ w.g_proj.T).unflatten(1, (heads, dim))
    return gated.flatten(1) @ w.o_proj.T


def _mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    g, u = x @ gate.double().mT, x @ up.double().mT
    return (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)) @ down.double().mT


def _feed_forward(x: torch.Tensor, w: MLPWeights | MoEWeights, config: KimiK3Config) -> torch.Tensor:
    if isinstance(w, MLPWeights):
        return _mlp(x, w.gate_proj, w.up_proj, w.down_proj)
    w1, w3, w2 = (e.dequantise(torch.float64) if isinstance(e, MXFP4Tensor) else e for e in (w.w1, w.w3, w.w2))
    scores = torch.sigmoid(x @ w.router.double().T)
    # An expert is chosen if fewer than k are before it.
    ranked = (scores + w.router_bias).argsort(1, descending=True).argsort(1)
    chosen = scores * (ranked < config.num_experts_per_token)
    shares = chosen / chosen.sum(1, keepdim=True)
    routed = torch.einsum("te,etd->td", shares, _mlp(x @ w.down_proj.double().T, w1, w3, w2))  # all experts
    shared = _mlp(x, w.shared.gate_proj, w.shared.up_proj, w.shared.down_proj)
    return _rms(routed, w.latent_norm, 1e-5) @ w.up_proj.double().T + shared


def _logits(model: KimiK3Model, tokens: torch.Tensor) -> torch.Tensor:
    """[L, vocab] of one sequence, blocks and sources counted by formula."""
    naive, config = oracle("fla.ops.attnres.naive").naive_attnres, model.config

    def mix(sources: list[torch.Tensor], res: Any, norm: torch.Tensor) -> torch.Tensor:
        return _rms(naive(res.proj, sources, res.norm, rms_eps=1e-5), norm, 1e-5)

    size = config.attn_res_block_size
    blocks: list[torch.Tensor] = []
    p = model.embedding.double()[tokens]
    for index, layer in enumerate(model.layers):
        w = layer.weights
        x = mix([*blocks[: math.ceil(index / size)], p], w.attention_res, w.attention_norm)
        attention = _mla if config.is_mla(index) else _kda
        out = attention(x, layer.attention.weights, config)
        if index % size == 0:
            blocks.append(p)
            p = out
        else:
            p = p + out
        x = mix([*blocks[: math.ceil(index / size) + (index % size == 0)], p], w.mlp_res, w.mlp_norm)
        p = p + _feed_forward(x, layer.mlp, config)
    assert len(blocks) == math.ceil(config.num_layers / size)
    return mix([*blocks, p], model.output_res, model.norm) @ model.head.double().T


# -- and decoded


def _model(config: KimiK3Config, *, dtype: torch.dtype = torch.float32, **options: Any) -> KimiK3Model:
    return KimiK3Model(
        config, TensorParallel(), seed=3, dtype=dtype, num_blocks=32, block_size=4, max_requests=3, max_query_len=4,
        **options,
    )  # fmt: skip


class Decode:
    """Requests of a model that are fed tokens; `logits` has what came out at each position."""

    def __init__(self, model: KimiK3Model, num_requests: int) -> None:
        self.model, self.table = model, RequestTable(32, 4, 3)
        self.slots = [self.table.add() for _ in range(num_requests)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(num_requests)]

    def step(self, tokens: dict[int, list[int]], padding: int = 0) -> None:
        counts = [len(some) for some in tokens.values()]
        batch = self.table.extend([self.slots[r] for r in tokens], counts, num_rows=sum(counts) + padding)
        flat = [token for some in tokens.values() for token in some] + [0] * padding
        out = self.model(torch.tensor(flat), batch)
        assert torch.isfinite(out).all()
        for r, some in zip(tokens, out[: sum(counts)].split(counts), strict=True):
            self.logits[r].extend(some)

    def reject(self, request: int, num_tokens: int, of: int) -> None:
        self.table.rewind(self.slots[request], num_tokens)
        self.model.keep(self.slots[request], of - num_tokens)
        del self.logits[request][len(self.logits[request]) - num_tokens :]


def _sequences(config: KimiK3Config, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _decode(model: KimiK3Model, sequences: list[list[int]], counts: tuple[int, ...], *, drafts: bool = False) -> Decode:
    """Each request counts[r] tokens a step until it is through; padding rows in every other step. `drafts`: before each
    step another one, of which nothing, or (in every other) the first token is kept."""
    decode, done, round_ = Decode(model, len(sequences)), [0] * len(sequences), 0
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        left = [r for r, tokens in enumerate(sequences) if done[r] < len(tokens)]
        if drafts:
            kept = round_ % 2
            wrong = {r: sequences[r][done[r] : done[r] + kept] + [7, 9, 11][: 4 - kept] for r in left}
            decode.step(wrong)
            for r in left:
                decode.reject(r, len(wrong[r]) - kept, len(wrong[r]))
                done[r] += kept
            left = [r for r in left if done[r] < len(sequences[r])]
        if left:
            tokens = {r: sequences[r][done[r] : done[r] + counts[r]] for r in left}
            decode.step(tokens, padding=round_ % 2 * 2)
            for r, some in tokens.items():
                done[r] += len(some)
        round_ += 1
    return decode


def _errors(model: KimiK3Model, decode: Decode, sequences: list[list[int]]) -> list[float]:
    """Of each request and position."""
    errors = []
    for outs, tokens in zip(decode.logits, sequences, strict=True):
        expected = _logits(model, torch.tensor(tokens))
        assert len(outs) == len(expected) == len(tokens)
        errors += [rel_err(out, row) for out, row in zip(outs, expected, strict=True)]
    return errors


@pytest.mark.parametrize(("quantised", "counts"), [(False, (1, 1, 1)), (False, (4, 1, 3)), (True, (4, 2, 3))], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_decoded_logits_are_those_of_the_whole_sequence(name: str, quantised: bool, counts: tuple[int, ...]) -> None:
    model = _model(CONFIGS[name], quantised=quantised)
    sequences = _sequences(CONFIGS[name], 21, 6, 13)
    assert max(_errors(model, _decode(model, sequences, counts), sequences)) < TOL


@pytest.mark.parametrize("name", CONFIGS)
def test_rejected_drafts_change_no_logits(name: str) -> None:
    model = _model(CONFIGS[name])
    sequences = _sequences(CONFIGS[name], 14, 5, 9)
    assert max(_errors(model, _decode(model, sequences, (2, 1, 3), drafts=True), sequences)) < TOL


def test_a_slot_is_used_again() -> None:
    """After reset the request that had the slot before is forgotten."""
    config = CONFIGS["tiny"]
    model = _model(config)
    first, second = _sequences(config, 9, 12)
    _decode(model, [first], (2,))
    model.reset(0)
    assert max(_errors(model, _decode(model, [second], (3,)), [second])) < TOL


def test_every_layer_counts() -> None:
    """A layer whose output comes to nothing would pass unseen: without any one the logits are others."""
    config = CONFIGS["tiny"]
    model = _model(config)
    (tokens,) = _sequences(config, 8)
    expected = _logits(model, torch.tensor(tokens))
    for layer in model.layers:
        attention = layer.attention.weights.o_proj
        kept = attention.clone()
        attention.zero_()
        assert rel_err(_logits(model, torch.tensor(tokens)), expected) > 1e-2, layer.index
        attention.copy_(kept)


def test_bf16_is_near() -> None:
    config = CONFIGS["tiny"]
    model = _model(config, dtype=torch.bfloat16)
    sequences = _sequences(config, 9, 4, 6)
    errors = sorted(_errors(model, _decode(model, sequences, (2, 1, 3)), sequences))
    # A token whose experts are chosen otherwise in bf16 is far off; most are not.
    assert errors[len(errors) // 2] < 0.05


def test_tokens_that_are_not_one_a_row() -> None:
    model = _model(CONFIGS["odd"])
    table = RequestTable(32, 4, 3)
    batch = table.extend([table.add()], [2], num_rows=3)
    with pytest.raises(DcpInvalidArgument, match=r"one for each of the 3 rows \(got \[2\]\)"):
        model(torch.tensor([1, 2]), batch)
    assert all(
        not layer.attention.state.current.any() for layer in model.layers if isinstance(layer.attention, KDALayer)
    )
