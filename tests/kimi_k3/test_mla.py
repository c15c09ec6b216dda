"""The MLA layer: against the un-absorbed layer of transformers (Kimi-Linear's, the same but for the gate), and with its
cache sharded over rank processes against itself with a cache that is not.

How the sharded layer differs in bf16 is in test_mla_error.py; here is fp32, where it is a matter of rounding alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attention import local_attention
from dcpkernels.kimi_k3.cache import LatentCache, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.kimi_k3.conftest import oracle
from tests.kimi_k3.mla_ranks import Case, Step, hidden_states, run_cases, run_lengths, run_steps

FP32 = 1e-5  # of each row's largest element
WHOLE = TensorParallel()
TINY = KimiK3Config.tiny()
SIX_HEADS = KimiK3Config.tiny(num_heads=6)
# The model's own dims, but for the number of heads, and layers and experts that are not used here.
REAL_DIMS = KimiK3Config(num_heads=4)

# Requests that grow to 494, 77, 3 and 6 tokens: a prompt in two steps, so that runs of 64 reach all of 8 ranks; drafts;
# a request whose tokens fit on fewer ranks than there are; steps that leave requests out; padding, once alone.
STEPS = [
    Step((180, 70, 1, 0)),
    Step((220, 1, 0, 2), 3),
    Step((1, 1, 1, 1), 2),
    Step((0, 0, 0, 0), 2),
    Step((90, 4, 0, 1), 1),
    Step((3, 1, 1, 2), 5),
]


class Unabsorbed:
    """KimiLinearAttention in eager mode under a causal mask, with the layer's weights; then the gate and o_proj."""

    def __init__(self, config: KimiK3Config, dtype: torch.dtype = torch.float32) -> None:
        kimi = oracle("transformers.models.kimi_linear.modeling_kimi_linear")
        options = kimi.KimiLinearConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
        )
        options._attn_implementation = "eager"
        self.weights = w = MLAWeights.random(config, WHOLE, key="layer", dtype=dtype)
        self.attention = kimi.KimiLinearAttention(options, 0)
        # Its weights are [out, in]; a head's keys and values are neighbours in kv_b_proj.
        given = {
            "q_a_proj": w.q_a_proj,
            "q_a_layernorm": w.q_a_norm,
            "q_b_proj": w.q_b_proj.flatten(0, 1),
            "kv_a_proj_with_mqa": w.kv_a_proj,
            "kv_a_layernorm": w.kv_a_norm,
            "kv_b_proj": torch.cat([w.w_uk, w.w_uv], 1).flatten(0, 1),
        }
        for name, weight in given.items():
            module = getattr(self.attention, name)
            assert module.weight.shape == weight.shape, name
            module.weight = torch.nn.Parameter(weight)
        self.attention.o_proj = torch.nn.Identity()  # the gate comes before it

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """All positions of one request, [n, hidden] -> [n, hidden]."""
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        heads = self.attention(x[None], mask)[0][0]
        return (heads * torch.sigmoid(x @ self.weights.g_proj.T)) @ self.weights.o_proj.T

    def steps(self, config: KimiK3Config, steps: Sequence[Step]) -> list[torch.Tensor]:
        """What `run_steps` returns: whole requests, and their rows picked out step by step."""
        tokens: list[list[torch.Tensor]] = [[] for _ in steps[0].num_tokens]
        places = []
        for i, step in enumerate(steps):
            rows = iter(hidden_states(config, i, sum(step.num_tokens), 0, torch.float32))
            places.append([])
            for request, count in enumerate(step.num_tokens):
                for _ in range(count):
                    places[-1].append((request, len(tokens[request])))
                    tokens[request].append(next(rows))
        whole = [self(torch.stack(x)) for x in tokens]
        empty = torch.empty(0, config.hidden_size)
        return [torch.stack([whole[request][p] for request, p in place]) if place else empty for place in places]


def error_of(outs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest error of any row of any step, relative to the largest element of the row. NaN counts as infinite."""
    assert [out.shape for out in outs] == [ref.shape for ref in expected]
    errors = [relative(out, ref).max() for out, ref in zip(outs, expected, strict=True) if len(ref)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


def relative(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[T]: of each row."""
    return (out.double() - expected.double()).abs().amax(1) / expected.double().abs().amax(1)


def run_request(config: KimiK3Config, x: torch.Tensor) -> torch.Tensor:
    """One request, all of whose tokens come in one step: [n, hidden] -> [n, hidden]."""
    table = RequestTable(40, 16, 1)
    cache = LatentCache(40, 16, config.latent_dim, x.dtype)
    layer = MLALayer(config, MLAWeights.random(config, WHOLE, key="layer", dtype=x.dtype), cache, WHOLE)
    return layer(x, table.extend([table.add()], [len(x)]))


# -- one rank, against transformers


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_one_rank_is_the_unabsorbed_layer(block_size: int) -> None:
    outs = run_steps(TINY, WHOLE, None, Case(1, block_size=block_size), STEPS)
    assert error_of(outs, Unabsorbed(TINY).steps(TINY, STEPS)) < FP32


def test_the_models_own_dims() -> None:
    """Heads of 128 + 64 and 128 over latents of 1536 and 512."""
    assert (REAL_DIMS.qk_head_dim, REAL_DIMS.latent_dim, REAL_DIMS.hidden_size) == (192, 576, 7168)
    steps = [Step((20, 3)), Step((1, 2), 1), Step((1, 1))]
    outs = run_steps(REAL_DIMS, WHOLE, None, Case(1), steps)
    assert error_of(outs, Unabsorbed(REAL_DIMS).steps(REAL_DIMS, steps)) < FP32


def test_the_scale_is_that_of_heads_before_absorption() -> None:
    """1 / sqrt(192), not of the 576 that are multiplied. The oracle has it from its own dims."""
    assert KimiK3Config().softmax_scale == pytest.approx(0.0721688, rel=1e-6)
    reference = Unabsorbed(TINY)
    assert reference.attention.scaling == pytest.approx(TINY.softmax_scale)


def test_the_epsilon_of_the_latent_norms() -> None:
    """1e-6 in the publisher's code and in transformers, while the model's config says 1e-5. Latents of unit variance
    hardly tell the two apart; small ones do."""
    x = hidden_states(TINY, 0, 30, 0, torch.float32)
    with_1e5 = dataclasses.replace(TINY, latent_norm_eps=1e-5)
    reference = Unabsorbed(TINY)
    assert KimiK3Config().latent_norm_eps == 1e-6
    for size, least in ((1.0, 0.0), (1e-3, 0.05)):
        expected = [reference(x * size)]
        assert error_of([run_request(TINY, x * size)], expected) < FP32
        assert error_of([run_request(with_1e5, x * size)], expected) > least


def test_no_rotation() -> None:
    """The last row does not know in which order the tokens before it came."""
    x = hidden_states(TINY, 0, 60, 0, torch.float32)
    order = torch.cat([torch.randperm(59, generator=torch.Generator().manual_seed(0)), torch.tensor([59])])
    out, permuted = run_request(TINY, x), run_request(TINY, x[order])
    assert error_of([permuted[-1:]], [out[-1:]]) < FP32
    assert error_of([permuted[30:31]], [out[30:31]]) > 0.1  # rows before it see other tokens now


def test_rejected_drafts_are_forgotten() -> None:
    """Rows of drafts stay in the cache until later ones overwrite them. Nobody sees them."""
    table, cache = RequestTable(40, 4, 1), LatentCache(40, 4, TINY.latent_dim, torch.float32)
    layer = MLALayer(TINY, MLAWeights.random(TINY, WHOLE, key="layer", dtype=torch.float32), cache, WHOLE)
    x = hidden_states(TINY, 0, 40, 0, torch.float32)
    slot = table.add()
    kept, outs = [], []
    for first, count, rejected in ((0, 10, 0), (10, 7, 6), (20, 2, 1), (30, 5, 5), (35, 1, 0)):
        out = layer(x[first : first + count], table.extend([slot], [count]))
        table.rewind(slot, rejected)
        kept.append(x[first : first + count - rejected])
        outs.append(out[: count - rejected])
    assert error_of([torch.cat(outs)], [Unabsorbed(TINY)(torch.cat(kept))]) < FP32


@pytest.mark.parametrize("with_workspace", [False, True])
def test_padding_gives_zeros(with_workspace: bool) -> None:
    """Of a finite input, whatever attention left in rows that see nothing. So both ways of DCP size 1 agree."""

    def attention(query: torch.Tensor, blocks: torch.Tensor, batch: Any, **options: Any) -> Any:
        out, lse = local_attention(query, blocks, batch, **options)
        out[lse == -torch.inf] = torch.nan
        return out, lse

    table, cache = RequestTable(4, 4, 1), LatentCache(4, 4, TINY.latent_dim, torch.float32)
    weights = MLAWeights.random(TINY, WHOLE, key="layer", dtype=torch.float32)
    workspace = None
    if with_workspace:
        (group,) = ThreadGroup.create(1)
        config = workspace_config(TINY, WHOLE, 1, max_num_tokens=5, dtype=torch.float32)
        workspace = Workspace(group, config=config)
    layer = MLALayer(TINY, weights, cache, WHOLE, workspace, attention=attention)
    out = layer(hidden_states(TINY, 0, 5, 0, torch.float32), table.extend([table.add()], [2], num_rows=5))
    assert out[:2].abs().amin() > 0 and (out[2:] == 0).all()
    if workspace is not None:
        workspace.close()


def test_a_step_leaves_its_input_and_older_rows_alone() -> None:
    weights = MLAWeights.random(TINY, WHOLE, key="layer", dtype=torch.float32)
    table, cache = RequestTable(40, 4, 2), LatentCache(40, 4, TINY.latent_dim, torch.float32)
    layer = MLALayer(TINY, weights, cache, WHOLE)
    slots = [table.add(), table.add()]
    layer(hidden_states(TINY, 0, 50, 0, torch.float32), table.extend(slots, [20, 30]))
    before = cache.blocks.clone()
    x = hidden_states(TINY, 1, 4, 2, torch.float32)
    was = x.clone()
    batch = table.extend(slots, [1, 3], num_rows=6)
    layer(x, batch)
    assert torch.equal(x.view(torch.int32), was.view(torch.int32))
    new = torch.zeros(40 * 4, dtype=torch.bool)
    new[batch.slot_mapping[:4]] = True
    changed = (cache.blocks.view(torch.int32) != before.view(torch.int32)).flatten(0, 1).any(1)
    assert torch.equal(changed, new)
    # 54 tokens are written; the cache began as NaN.
    assert (~cache.blocks.flatten(0, 1).isnan().any(1)).sum() == 54
    assert cache.blocks.flatten(0, 1).isnan().all(1).sum() == 40 * 4 - 54


# -- rank processes

NO_WORKSPACE = Case(1, workspace=False)
SHARDED = [Case(dcp_size, interleave) for dcp_size in (1, 2, 4, 8) for interleave in (1, 16, 64)]
# Runs that do not divide a block; an attention that leaves garbage where a shard is empty.
MORE = [Case(8, 16, block_size=24), Case(4, 64, block_size=5), Case(8, 1, rude=True), Case(2, 64, rude=True)]
BF16 = [Case(1, dtype=torch.bfloat16), Case(8, dtype=torch.bfloat16)]
ALL = [NO_WORKSPACE, *SHARDED, *MORE, *BF16]
OF_SIX = [NO_WORKSPACE, *(Case(dcp_size, interleave) for dcp_size in (2, 3, 6) for interleave in (1, 16))]


def name_of(case: Case) -> str:
    what = f"dcp{case.dcp_size}-i{case.interleave}-b{case.block_size}" if case.workspace else "no workspace"
    return what + "-rude" * case.rude


Results = dict[Case, list[list[torch.Tensor]]]  # of each case: of each rank, of each step


def on_ranks(num_ranks: int, config: KimiK3Config, cases: list[Case]) -> Results:
    by_rank = run_ranks(run_cases, num_ranks, config, cases, STEPS, mode="process", timeout_s=200)
    return {case: [outs[i] for outs in by_rank] for i, case in enumerate(cases)}


@pytest.fixture(scope="module")
def eight() -> Results:
    return on_ranks(8, TINY, ALL)


@pytest.fixture(scope="module")
def six() -> Results:
    return on_ranks(6, SIX_HEADS, OF_SIX)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[torch.Tensor]]:
    """By number of heads: the un-absorbed layer's outputs."""
    return {config.num_heads: Unabsorbed(config).steps(config, STEPS) for config in (TINY, SIX_HEADS)}


def assert_the_same_on_all_ranks(by_rank: list[list[torch.Tensor]]) -> None:
    for rank, outs in enumerate(by_rank):
        assert all(map(torch.equal, outs, by_rank[0])), f"rank {rank}"


@pytest.mark.parametrize("case", [*SHARDED, *MORE], ids=name_of)
def test_sharding_changes_nothing(case: Case, eight: Results) -> None:
    assert_the_same_on_all_ranks(eight[case])
    error = error_of(eight[case][0], eight[NO_WORKSPACE][0])
    # One shard is merged with itself: no bit changes.
    assert error == 0 if case.dcp_size == 1 else error < FP32


@pytest.mark.parametrize("case", [NO_WORKSPACE, *SHARDED, *MORE], ids=name_of)
def test_sharded_is_the_unabsorbed_layer(case: Case, eight: Results, expected: dict[int, list[torch.Tensor]]) -> None:
    assert error_of(eight[case][0], expected[8]) < FP32


@pytest.mark.parametrize("case", OF_SIX, ids=name_of)
def test_six_ranks(case: Case, six: Results, expected: dict[int, list[torch.Tensor]]) -> None:
    """DCP groups of 2, 3 and all of them: no power of two."""
    assert_the_same_on_all_ranks(six[case])
    assert error_of(six[case][0], six[NO_WORKSPACE][0]) < FP32
    assert error_of(six[case][0], expected[6]) < FP32


def test_bf16_is_in_the_right_place(eight: Results) -> None:
    """No more than that: a bound is in test_mla_error.py."""
    whole, sharded = (eight[case] for case in BF16)
    assert_the_same_on_all_ranks(sharded)
    assert 0 < error_of(sharded[0], whole[0]) < 5e-2


LENGTHS = (1, 10, 100, 1_000, 10_000, 120_000)


def test_the_error_does_not_grow_with_the_length() -> None:
    """Contexts of 1 .. 120,000 tokens, whole and in eight shards: within the same few units of fp32 at all lengths."""
    cases = [NO_WORKSPACE, Case(8, 1), Case(8, 64)]
    by_rank = run_ranks(run_lengths, 8, TINY, LENGTHS, cases, mode="process", timeout_s=200)
    assert_the_same_on_all_ranks(by_rank)
    whole, *sharded = by_rank[0]
    for case, out in zip(cases[1:], sharded, strict=True):
        errors = dict(zip(LENGTHS, relative(out, whole).tolist(), strict=True))
        assert all(error < 2e-6 for error in errors.values()), (case, errors)


# -- what is refused


def layer_of(workspace: Any, tp: TensorParallel = WHOLE, config: KimiK3Config = TINY) -> MLALayer:
    weights = MLAWeights.random(config, tp, key="layer", dtype=torch.float32)
    return MLALayer(config, weights, LatentCache(4, 4, config.latent_dim, torch.float32), tp, workspace)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"num_heads": 16}, r"num_heads must be 8 \(got 16\)"),
        ({"head_dim": 40}, r"head_dim must be 32 \(got 40\)"),
        ({"query_head_dim": 32}, r"query_head_dim must be 40 \(got 32\)"),
        ({"dtype": torch.bfloat16}, r"dtype must be torch\.float32 \(got torch\.bfloat16\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_workspace_that_does_not_fit(wrong: dict[str, Any], text: str) -> None:
    (group,) = ThreadGroup.create(1)
    config: WorkspaceConfig = workspace_config(TINY, WHOLE, 1, max_num_tokens=4, dtype=torch.float32)
    with Workspace(group, config=config) as workspace:
        layer_of(workspace)  # this one does
    with (
        Workspace(group, config=dataclasses.replace(config, **wrong)) as workspace,
        pytest.raises(DcpInvalidArgument, match=rf"^kimi_k3: workspace\.config\.{text}$"),
    ):
        layer_of(workspace)


def three_of_eight(group: ThreadGroup) -> None:
    with (
        Workspace(group, config=WorkspaceConfig(3, 32, 4, dtype=torch.float32, query_head_dim=40)) as workspace,
        pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: dcp_size must divide the 8 ranks \(got 3\)$"),
    ):
        layer_of(workspace, TensorParallel(group.rank, 8))


def test_a_workspace_of_ranks_that_do_not_divide() -> None:
    run_ranks(three_of_eight, 3)


@pytest.mark.parametrize("dcp_size", [0, -8, 3, 16])
def test_dcp_sizes_that_do_not_divide(dcp_size: int) -> None:
    with pytest.raises(DcpInvalidArgument, match=rf"^kimi_k3: dcp_size must divide the 8 ranks \(got {dcp_size}\)$"):
        workspace_config(TINY, TensorParallel(0, 8), dcp_size, max_num_tokens=4, dtype=torch.float32)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: num_heads .*\(got 8\)$"):
        workspace_config(TINY, TensorParallel(0, 3), 3, max_num_tokens=4, dtype=torch.float32)


@pytest.mark.parametrize("required", [False, True])
def test_an_oracle_that_is_missing(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPKERNELS_REQUIRE_ORACLES", "1" if required else "0")
    with pytest.raises(pytest.fail.Exception if required else pytest.skip.Exception, match="no_such_package"):
        oracle("no_such_package.of_layers")


def test_a_call_that_is_refused_leaves_the_cache_as_it_was() -> None:
    """Rows that are not the batch's; a batch that is sharded otherwise; more rows than the workspace is made for."""
    weights = MLAWeights.random(TINY, WHOLE, key="layer", dtype=torch.float32)
    cache = LatentCache(16, 8, TINY.latent_dim, torch.float32)
    config = workspace_config(TINY, WHOLE, 1, max_num_tokens=2, dtype=torch.float32)
    with Workspace(ThreadGroup.create(1)[0], config=config) as workspace:
        layer = MLALayer(TINY, weights, cache, WHOLE, workspace)
        for num_ranks, tokens, rows, text in (
            (1, 2, 3, "x must have the batch's 2 rows (got 3)"),
            (4, 1, 1, "batch must be of a RequestTable with num_ranks=1, the DCP size (got 4)"),
            (1, 3, 3, "batch must have at most max_num_tokens=2 rows (got 3)"),
        ):
            table = RequestTable(16, 8, 1, num_ranks=num_ranks)
            batch = table.extend([table.add()], [tokens])
            with pytest.raises(DcpInvalidArgument) as caught:
                layer(torch.zeros(rows, TINY.hidden_size), batch)
            assert text in str(caught.value)
        assert cache.blocks.isnan().all()
        with pytest.raises(DcpInvalidArgument, match="kimi_k3: lane must be in 0 .. 0"):
            MLALayer(TINY, weights, cache, WHOLE, workspace, lane=1)
        with pytest.raises(DcpInvalidArgument, match="kimi_k3: cache must have rows of 40"):
            MLALayer(TINY, weights, LatentCache(16, 8, 41, torch.float32), WHOLE, workspace)
