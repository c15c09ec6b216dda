"""kv_gather and its baselines under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, RANKS, op_of, replay
from dcpkernels.cli.bench_kv_gather import KvGather


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_rows", KvGather().sizes)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_kv_gather(benchmark: pytest.FixtureRequest, num_ranks: int, num_rows: int, candidate: str) -> None:
    replay(benchmark, op_of(KvGather, num_ranks, num_rows), candidate)
