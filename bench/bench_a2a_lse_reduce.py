"""a2a_lse_reduce and its baseline under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, replay
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a2a_lse_reduce(benchmark: pytest.FixtureRequest, num_ranks: int, num_tokens: int, candidate: str) -> None:
    replay(benchmark, A2aLseReduce(ranks=(num_ranks,), tokens=(num_tokens,), iters=100), candidate)
