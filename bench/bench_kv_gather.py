"""kv_gather and its baseline under pytest-benchmark; `replay` says how."""

from __future__ import annotations

import pytest

from bench.replay import CANDIDATES, CLOCK, replay
from dcpkernels.cli.bench_kv_gather import KvGather


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("num_rows", [4_096, 66_048])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_kv_gather(benchmark: pytest.FixtureRequest, num_ranks: int, num_rows: int, candidate: str) -> None:
    replay(benchmark, KvGather(ranks=(num_ranks,), rows=(num_rows,)), candidate)
