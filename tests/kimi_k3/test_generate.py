"""A tiny model of eight layers generates the same tokens with its cache on every rank and sharded over eight, with and
without drafts. fp32: one different token in the argmax of a row would change all that follow."""

from __future__ import annotations

import random

import pytest
import torch

from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.testing import run_ranks
from tests.kimi_k3.generate_ranks import NUM_DRAFTED, Engine, generate, greedy

CONFIG = KimiK3Config.tiny(num_experts=8, num_experts_per_token=2)
NUM_PROMPTS, NUM_TOKENS = 200, 64


def make_prompts(number: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    # Shorter than the ranks too: some shards are empty for a while.
    return [[numbers.randrange(CONFIG.vocab_size) for _ in range(numbers.randint(1, 20))] for _ in range(number)]


@pytest.fixture(scope="module")
def outs() -> dict[str, list[list[int]]]:
    by_rank = run_ranks(generate, 8, CONFIG, make_prompts(NUM_PROMPTS), NUM_TOKENS, mode="process", timeout_s=500)
    assert all(outs == by_rank[0] for outs in by_rank)
    return by_rank[0]


@pytest.mark.slow
def test_the_same_tokens_with_the_cache_sharded(outs: dict[str, list[list[int]]]) -> None:
    assert [len(out) for out in outs["dcp1"]] == [NUM_TOKENS] * NUM_PROMPTS
    assert outs["dcp"] == outs["dcp1"]
    # A model that says one thing whatever it reads would pass.
    assert len({tuple(out) for out in outs["dcp1"]}) == NUM_PROMPTS
    assert sum(len(set(out)) for out in outs["dcp1"]) / NUM_PROMPTS > 16


@pytest.mark.slow
def test_the_same_tokens_with_drafts(outs: dict[str, list[list[int]]]) -> None:
    assert outs["drafts"] == [out[:NUM_DRAFTED] for out in outs["dcp1"][: len(outs["drafts"])]]


@pytest.mark.slow
def test_the_same_tokens_on_one_rank(outs: dict[str, list[list[int]]]) -> None:
    """Sums over ranks come in another order than over one, so that a token may differ; but not many."""
    prompts = make_prompts(NUM_PROMPTS)[:20]
    alone = greedy(Engine(TensorParallel(), None, CONFIG, len(prompts), seed=0, dtype=torch.float32), prompts, 16)
    assert alone == [out[:16] for out in outs["dcp1"][:20]]
