"""a2a_lse_reduce and its baselines under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, RANKS, op_of, replay
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_tokens", A2aLseReduce().sizes)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a2a_lse_reduce(benchmark: pytest.FixtureRequest, num_ranks: int, num_tokens: int, candidate: str) -> None:
    replay(benchmark, op_of(A2aLseReduce, num_ranks, num_tokens), candidate)
