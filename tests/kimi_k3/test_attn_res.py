"""AttnRes: the mix against flash-linear-attention's naive one, and which sources each sublayer of Kimi-K3's 93 layers
reads against the rules, written out a second time."""

from __future__ import annotations

import math

import pytest
import torch

from dcpkernels.kimi_k3.attn_res import AttnResState, AttnResWeights, attn_res
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.norms import rms_norm
from tests.kimi_k3.conftest import oracle, random, rel_err

EPS = 1e-5
TOL = 1e-5


def _weights(size: int, *, scale: float = 1.0) -> AttnResWeights:
    # proj of 1 / sqrt(size), as trained ones are about: a normalised source then scores about 1, and softmax mixes.
    return AttnResWeights(norm=1 + random(size, seed=1, std=0.3), proj=random(size, seed=2, std=scale * size**-0.5))


def _sources(number: int, size: int, magnitudes: str) -> list[torch.Tensor]:
    scale = {"even": lambda i: 1.0, "growing": lambda i: 4.0**i, "apart": lambda i: 10.0 ** (3 * (-1) ** i)}[magnitudes]
    return [random(5, size, seed=10 + i, std=scale(i)) for i in range(number)]


@pytest.mark.parametrize("magnitudes", ["even", "growing", "apart"])
@pytest.mark.parametrize("size", [24, 7168])
@pytest.mark.parametrize("number", range(1, 10))
def test_mix_against_fla(number: int, size: int, magnitudes: str) -> None:
    naive = oracle("fla.ops.attnres.naive").naive_attnres
    weights, sources = _weights(size, scale=2.0), _sources(number, size, magnitudes)
    expected = naive(weights.proj, sources, weights.norm, rms_eps=EPS)
    assert rel_err(attn_res(sources, weights, EPS), expected) < TOL


def test_mix_against_fla_behind_the_norm_that_follows() -> None:
    naive = oracle("fla.ops.attnres.naive").naive_attnres
    weights, sources, norm = _weights(7168), _sources(9, 7168, "even"), 1 + random(7168, seed=3, std=0.3)
    expected = naive(weights.proj, sources, weights.norm, norm, rms_eps=EPS)
    assert rel_err(rms_norm(attn_res(sources, weights, EPS), norm, EPS), expected) < TOL


def test_scores_are_not_divided_and_values_are_as_they_come() -> None:
    """By hand: sources 2 and 2/3 along one axis, D = 4. Their norms make both (2, 0, 0, 0) but for the sign."""
    size, log3 = 4, math.log(3.0)
    weights = AttnResWeights(norm=torch.tensor([0.5, 1.0, 1.0, 1.0]), proj=torch.tensor([log3 / 2, 0.0, 0.0, 0.0]))
    sources = [torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([[-2 / 3, 0, 0, 0]])]
    # Scores are +- 2 * 0.5 * log(3) / 2, so that the weights are 3 / 4 and 1 / 4; with 1 / sqrt(D), 0.63 and 0.37.
    expected = torch.zeros(1, size)
    expected[0, 0] = 0.75 * 2 - 0.25 * 2 / 3
    torch.testing.assert_close(attn_res(sources, weights, 0.0), expected, rtol=1e-6, atol=0)


def test_eps_is_added_to_the_mean() -> None:
    """A source whose mean square *is* eps scores 1 / sqrt(2) of its full score."""
    size, eps = 16, 1e-5
    weights = AttnResWeights(norm=torch.ones(size), proj=torch.full((size,), math.log(9.0) / size))
    small = torch.full((1, size), eps**0.5)
    score = math.log(9.0) / math.sqrt(2)
    alpha = 1 / (1 + math.exp(score))  # of the other source, 0, which scores 0
    expected = small * (1 - alpha)
    torch.testing.assert_close(attn_res([small, torch.zeros(1, size)], weights, eps), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_source_is_its_own_mix(dtype: torch.dtype) -> None:
    source = random(3, 64, seed=4, std=50.0, dtype=dtype)
    out = attn_res([source], _weights(64), EPS)
    assert out.dtype == torch.float32
    assert torch.equal(out, source.float())


def test_bf16_sources_are_mixed_in_fp32() -> None:
    weights = _weights(512)
    low = AttnResWeights(weights.norm.bfloat16(), weights.proj.bfloat16())
    sources = [source.bfloat16() for source in _sources(9, 512, "even")]
    wide = AttnResWeights(low.norm.float(), low.proj.float())
    assert rel_err(attn_res(sources, low, EPS), attn_res([source.float() for source in sources], wide, EPS)) < 1e-6


def test_weights_of_random_are_vectors_that_differ() -> None:
    config = KimiK3Config.tiny()
    some, others = (AttnResWeights.random(config, key=(0, name), dtype=torch.float32) for name in ("a", "b"))
    assert some.norm.shape == some.proj.shape == (config.hidden_size,)
    assert not torch.equal(some.proj, others.proj)


# -- which sources there are


class ByTheRules:
    """The bookkeeping as engines do it: b, p and delta, n sources counted by formula. All values are kept as sets of
    what was added up, so that what is compared does not depend on the order of sums."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.b: dict[int, frozenset[str]] = {}
        self.p: frozenset[str] = frozenset(["embedding"])
        self.delta: frozenset[str] = frozenset()

    def attention_sources(self, layer: int) -> list[frozenset[str]]:
        self.p, self.delta = self.p | self.delta, frozenset()
        n = math.ceil(layer / self.block_size)
        return [self.b[i] for i in range(n)] + [self.p]

    def attention_out(self, layer: int, out: str) -> None:
        if layer % self.block_size == 0:
            self.b[layer // self.block_size] = self.p
            self.p = frozenset([out])
        else:
            self.delta = frozenset([out])

    def mlp_sources(self, layer: int) -> list[frozenset[str]]:
        self.p, self.delta = self.p | self.delta, frozenset()
        n = math.ceil(layer / self.block_size) + (layer % self.block_size == 0)
        return [self.b[i] for i in range(n)] + [self.p]

    def mlp_out(self, out: str) -> None:
        self.delta = frozenset([out])

    def end_sources(self, num_layers: int) -> list[frozenset[str]]:
        self.p, self.delta = self.p | self.delta, frozenset()
        return [self.b[i] for i in range(math.ceil(num_layers / self.block_size))] + [self.p]


def _run(config: KimiK3Config) -> list[tuple[str, list[frozenset[str]], list[frozenset[str]]]]:
    """Through all layers: each place that mixes, its sources, and those by the rules. Each of the outputs (and the
    embedding) is a unit vector of its own, so that a sum shows what was added up, and how often."""
    names = ["embedding"] + [f"{kind}{layer}" for layer in range(config.num_layers) for kind in ("attention", "mlp")]
    unit = dict(zip(names, torch.eye(len(names))[:, None], strict=True))

    def parts(source: torch.Tensor) -> frozenset[str]:
        assert set(source.unique().tolist()) <= {0.0, 1.0}  # nothing twice
        return frozenset(name for name, share in zip(names, source[0].tolist(), strict=True) if share)

    state, rules = AttnResState(config, unit["embedding"]), ByTheRules(config.attn_res_block_size)
    places = []
    for layer in range(config.num_layers):
        sources = [parts(source) for source in state.before_attention(layer)]
        places.append((f"attention{layer}", sources, rules.attention_sources(layer)))
        state.after_attention(layer, unit[f"attention{layer}"])
        rules.attention_out(layer, f"attention{layer}")
        sources = [parts(source) for source in state.before_mlp(layer)]
        places.append((f"mlp{layer}", sources, rules.mlp_sources(layer)))
        state.after_mlp(layer, unit[f"mlp{layer}"])
        rules.mlp_out(f"mlp{layer}")
    places.append(("end", [parts(source) for source in state.at_end()], rules.end_sources(config.num_layers)))
    return places


@pytest.mark.parametrize(("num_layers", "block_size"), [(93, 12), (8, 2), (7, 3), (5, 1), (3, 12)])
def test_sources_of_all_layers(num_layers: int, block_size: int) -> None:
    for place, sources, expected in _run(KimiK3Config.tiny(num_layers=num_layers, attn_res_block_size=block_size)):
        assert sources == expected, place


def test_kimi_k3_has_at_most_nine_sources() -> None:
    places = {place: sources for place, sources, _ in _run(KimiK3Config.tiny(num_layers=93, attn_res_block_size=12))}
    assert places["attention0"] == [{"embedding"}]
    assert places["mlp0"] == [{"embedding"}, {"attention0"}]
    assert places["attention1"] == [{"embedding"}, {"attention0", "mlp0"}]
    # The first layer of a block reads the whole block before as the running sum, and writes it.
    first = {f"{kind}{layer}" for layer in range(12) for kind in ("attention", "mlp")}
    assert places["attention12"] == [{"embedding"}, first]
    assert places["mlp12"] == [{"embedding"}, first, {"attention12"}]
    # A block is written where the feed-forward part has a source more than the attention before it.
    written = [layer for layer in range(93) if len(places[f"mlp{layer}"]) > len(places[f"attention{layer}"])]
    assert written == [0, 12, 24, 36, 48, 60, 72, 84]
    assert not set(written) & set(KimiK3Config().mla_layers)
    assert len(places["end"]) == max(len(sources) for sources in places.values()) == 9
    # At the end the sources together are all there is, once.
    assert sum(len(source) for source in places["end"]) == len(frozenset().union(*places["end"])) == 1 + 2 * 93


def test_running_sum_is_rounded_in_the_dtype_of_the_embedding() -> None:
    """p <- bf16(p + delta)."""
    state = AttnResState(KimiK3Config.tiny(), torch.full((1, 4), 256.0, dtype=torch.bfloat16))
    state.after_attention(1, torch.full((1, 4), 0.5, dtype=torch.bfloat16))
    state.after_mlp(1, torch.full((1, 4), 0.5, dtype=torch.bfloat16))
    (source,) = state.before_attention(2)
    assert source.dtype == torch.bfloat16
    assert torch.equal(source, torch.full((1, 4), 256.0, dtype=torch.bfloat16))


def test_outputs_and_embedding_are_not_written_to() -> None:
    config = KimiK3Config.tiny()
    given = [random(2, 8, seed=i) for i in range(1 + 2 * config.num_layers)]
    kept = [tensor.clone() for tensor in given]
    state = AttnResState(config, given[0])
    for layer in range(config.num_layers):
        state.after_attention(layer, given[1 + 2 * layer])
        state.after_mlp(layer, given[2 + 2 * layer])
    assert all(torch.equal(now, before) for now, before in zip(given, kept, strict=True))
