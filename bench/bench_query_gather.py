"""query_gather and its baseline under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, replay
from dcpkernels.cli.bench_query_gather import QueryGather


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_query_gather(benchmark: pytest.FixtureRequest, num_ranks: int, num_tokens: int, candidate: str) -> None:
    replay(benchmark, QueryGather(ranks=(num_ranks,), tokens=(num_tokens,), iters=100), candidate)
