"""10,000 calls in a row between processes: random numbers of tokens, random delays, every result checked exactly."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import run_ranks

NUM_CALLS = 10_000
CAPACITY, LOCAL_HEADS, HEAD_DIM = 8, 2, 64
NUM_TABLES = 61  # coprime to the two parities: a row that is one, two or many calls old has other values


def tables(num_ranks: int) -> torch.Tensor:
    """[NUM_TABLES, W, tokens, H, D]: small integers, so that their mean over 2, 4 or 8 ranks is exact in fp32."""
    shape = (NUM_TABLES, num_ranks, 2 * CAPACITY, num_ranks * LOCAL_HEADS, HEAD_DIM)
    return torch.randint(1, 1000, shape, generator=torch.Generator().manual_seed(num_ranks)).float()


def many_calls(group):
    group_config = {"dtype": torch.float32, "timeout_s": 20.0}
    num_ranks = torch.distributed.get_world_size(group)
    num_heads = num_ranks * LOCAL_HEADS
    payloads = tables(num_ranks)
    with Workspace(group, config=WorkspaceConfig(num_heads, HEAD_DIM, CAPACITY, **group_config)) as workspace:
        rank = workspace.rank
        heads = slice(rank * LOCAL_HEADS, (rank + 1) * LOCAL_HEADS)
        expected = payloads.mean(1)[:, :, heads].contiguous()
        own = payloads[:, rank].contiguous()
        sizes, delays = random.Random(0), random.Random(rank + 1)
        lse, lse_out = torch.empty(2 * CAPACITY, num_heads), torch.empty(2 * CAPACITY, LOCAL_HEADS)
        out = torch.empty(2 * CAPACITY, LOCAL_HEADS, HEAD_DIM)
        for i in range(NUM_CALLS):
            # One call in 50 is larger than the workspace and takes two rounds.
            num_tokens = sizes.randint(0, CAPACITY) if sizes.random() < 0.98 else CAPACITY + 3
            if delays.random() < 0.03:
                time.sleep(delays.random() * 3e-4)
            lse.fill_(i % 13)
            a2a_lse_reduce(
                own[i % NUM_TABLES, :num_tokens], lse[:num_tokens], workspace=workspace, lse_base="2",
                out=out[:num_tokens], lse_out=lse_out[:num_tokens],
            )  # fmt: skip
            right = torch.equal(out[:num_tokens], expected[i % NUM_TABLES, :num_tokens])
            # log2 of W equal weights is a whole number, so this too is exact.
            if not right or not lse_out[:num_tokens].eq(i % 13 + math.log2(num_ranks)).all():
                raise AssertionError(describe(i, num_tokens, out, expected, lse_out))
        return workspace.stats()["num_calls"]


def describe(i: int, num_tokens: int, out, expected, lse_out) -> str:
    wrong = (out[:num_tokens] != expected[i % NUM_TABLES, :num_tokens]).nonzero()
    older = [k for k in range(1, 5) if torch.equal(out[:num_tokens], expected[(i - k) % NUM_TABLES, :num_tokens])]
    return (
        f"call {i} with {num_tokens} tokens: {len(wrong)} wrong elements, the first at {wrong[:1].tolist()}; "
        f"it is the result of {older or 'no'} calls before; LSEs {lse_out[:num_tokens].unique().tolist()[:5]}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_many_calls(num_ranks):
    """No result is late, torn, or another call's, in output and LSE."""
    counts = run_ranks(many_calls, num_ranks, mode="process", timeout_s=120)
    assert counts == [NUM_CALLS] * num_ranks
