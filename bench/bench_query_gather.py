"""query_gather and its baselines under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, RANKS, op_of, replay
from dcpkernels.cli.bench_query_gather import QueryGather


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_tokens", QueryGather().sizes)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_query_gather(benchmark: pytest.FixtureRequest, num_ranks: int, num_tokens: int, candidate: str) -> None:
    replay(benchmark, op_of(QueryGather, num_ranks, num_tokens), candidate)
