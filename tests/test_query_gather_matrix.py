"""query_gather over dtypes x ranks x rows x parts x layouts x ways of storing: the bytes of the reference, at one address,
and no byte changed that is no part of the result.

Not the full product: every value of every axis, and every pair that test_the_plan_has_every_pair names. A session is a
workspace; in it the calls of ROWS follow each other, each released by a merge or by release_query, or made with `out`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, query_gather, reference, release_query
from dcpkernels.testing import run_ranks, unchanged
from tests.a2a_calls import same_bits
from tests.a2a_ways import OUTS, PAYLOADS, guarded_output, lay_out
from tests.gather_calls import DTYPES, RANKS, Buffers, any_bits, release_by_merge

CAPACITY = 128
ROWS = (7, 129, 0, 128, 1, 300, 64, 2)
# Dq -> how it is split into parts. None but 576, 512 and 64 is a multiple of 16 bytes in every dtype.
SPLITS = {
    8: [(8,), (5, 3), (1, 2, 5), (2, 1, 4, 1)],
    24: [(24,), (11, 13), (16, 1, 7), (3, 8, 1, 12)],
    33: [(33,), (32, 1), (8, 1, 24), (3, 8, 1, 21)],
    576: [(576,), (512, 64), (256, 256, 64), (1, 511, 63, 1)],
}
ENDS = ("merge", "release_query", "out")


@dataclass(frozen=True)
class Session:
    num_ranks: int
    dtype: torch.dtype
    multicast: bool
    num_channels: int
    head_dim: int
    num_local_heads: int
    cases: tuple[Case, ...]

    @property
    def config(self) -> WorkspaceConfig:
        return WorkspaceConfig(
            self.num_ranks * self.num_local_heads,
            8,
            CAPACITY,
            num_lanes=2,
            num_channels=self.num_channels,
            query_head_dim=self.head_dim,
            query_dtype=self.dtype if self.num_local_heads % 2 else torch.float32,
            multicast=self.multicast,
            timeout_s=20.0,
            first_call_timeout_s=20.0,
        )


@dataclass(frozen=True)
class Case:
    num_tokens: int
    dims: tuple[int, ...]
    layouts: tuple[tuple[str, ...], ...]  # [rank][part]
    end: str
    serial: int

    @property
    def lane(self) -> int:
        return self.serial // 5 % 2


def session(num_ranks: int, dtype: torch.dtype, multicast: bool) -> Session:
    i, j, k = RANKS.index(num_ranks), DTYPES.index(dtype), int(multicast)
    head_dim = list(SPLITS)[(i + j + 2 * k) % 4]
    cases = []
    for n, num_tokens in enumerate(ROWS):
        serial = 7 * i + 3 * j + 5 * k + n
        dims = SPLITS[head_dim][(i // 2 + j + n) % 4]
        layouts = tuple(
            tuple(list(PAYLOADS)[(serial + rank + 4 * part) % len(PAYLOADS)] for part in range(len(dims)))
            for rank in range(num_ranks)
        )
        end = "out" if num_tokens > CAPACITY else ENDS[(i + j + k + n) % 3]
        cases.append(Case(num_tokens, dims, layouts, end, serial))
    return Session(num_ranks, dtype, multicast, (1, 3)[(i + j + k) % 2], head_dim, (1, 2, 3)[(i + j) % 3], tuple(cases))


SESSIONS = [session(*axes) for axes in itertools.product(RANKS, DTYPES, (True, False))]


def test_the_plan_has_every_pair():
    axes = {
        "ranks": (RANKS, lambda s, c: [s.num_ranks]),
        "dtype": (DTYPES, lambda s, c: [s.dtype]),
        "multicast": ((True, False), lambda s, c: [s.multicast]),
        "channels": ((1, 3), lambda s, c: [s.num_channels]),
        "rows": (ROWS, lambda s, c: [c.num_tokens]),
        "head_dim": (SPLITS, lambda s, c: [s.head_dim]),
        "parts": ((1, 2, 3, 4), lambda s, c: [len(c.dims)]),
        "layout": (PAYLOADS, lambda s, c: [name for names in c.layouts for name in names]),
        "end": (ENDS, lambda s, c: [c.end]),
        "lane": ((0, 1), lambda s, c: [c.lane]),
    }
    calls = [(s, c) for s in SESSIONS for c in s.cases]
    for pair in itertools.combinations(axes, 2):
        (a_values, a), (b_values, b) = (axes[name] for name in pair)
        wanted = set(itertools.product(a_values, b_values))
        if pair == ("rows", "end"):
            wanted -= {(n, end) for n, end in wanted if n > CAPACITY and end != "out"}
        missing = wanted - {both for s, c in calls for both in itertools.product(a(s, c), b(s, c))}
        assert not missing, (pair, missing)


def part_on(s: Session, case: Case, rank: int, part: int) -> torch.Tensor:
    """A part of the query as the rank has it, in its layout."""
    shape = (case.num_tokens, s.num_local_heads, case.dims[part])
    return lay_out(
        PAYLOADS[case.layouts[rank][part]], any_bits(shape, s.dtype, seed=100 * case.serial + 10 * rank + part)
    )


def inputs_of(s: Session, case: Case) -> tuple[list[tuple[torch.Tensor, ...]], torch.Tensor]:
    """[rank][part], and what the gather has to give."""
    queries = [tuple(part_on(s, case, rank, part) for part in range(len(case.dims))) for rank in range(s.num_ranks)]
    return queries, reference.query_gather([tuple(part.contiguous() for part in parts) for parts in queries])


def gather(group, s: Session, case: Case, inputs, workspace: Workspace, buffers: Buffers, places: dict) -> None:
    queries, truth = inputs
    query = queries[workspace.rank]
    if len(query) == 1 and case.serial % 2:
        (query,) = query
    lane_bytes = len(buffers.bytes) // 2
    buffers.fill()
    with unchanged(*queries[workspace.rank]):
        if case.end == "out":
            layout = OUTS[(case.serial + workspace.rank) % len(OUTS)]
            out = guarded_output(layout, tuple(truth.shape), s.dtype)
            assert query_gather(query, workspace=workspace, lane=case.lane, out=out.tensor) is out.tensor
            out.check()
            assert same_bits(out.tensor, truth), (s, case)
            buffers.check(case.lane * lane_bytes, (case.lane + 1) * lane_bytes)
            return
        view = query_gather(query, workspace=workspace, lane=case.lane)
    assert view.dtype == s.dtype and tuple(view.shape) == tuple(truth.shape)
    heads = s.num_ranks * s.num_local_heads
    assert view.stride() == (heads * s.head_dim, s.head_dim, 1) and not view.requires_grad
    assert same_bits(view, truth), (s, case)
    if case.num_tokens:
        assert buffers.place(view)[0] == case.lane * lane_bytes
        assert places.setdefault(case.lane, view.data_ptr()) == view.data_ptr()
    buffers.check_around(view)
    if case.end == "merge":
        release_by_merge(workspace, case.num_tokens, case.lane)
    else:
        release_query(workspace=workspace, lane=case.lane)


def run_session(group, s: Session, inputs=None) -> None:
    inputs = inputs or [inputs_of(s, case) for case in s.cases]
    with Workspace(group, config=s.config, backend="direct") as workspace:
        buffers, places = Buffers(group, workspace, "query_gather"), {}
        for case, given in zip(s.cases, inputs, strict=True):
            gather(group, s, case, given, workspace, buffers, places)


@pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_matrix(num_ranks, dtype, multicast):
    s = session(num_ranks, dtype, multicast)
    run_ranks(run_session, num_ranks, s, [inputs_of(s, case) for case in s.cases])


@pytest.mark.parametrize(
    "num_ranks, dtype, multicast",
    [
        (2, torch.bfloat16, True),
        (2, torch.float8_e4m3fn, False),
        (3, torch.float32, True),
        (3, torch.float16, False),
        (8, torch.float8_e5m2, True),
    ],
    ids=str,
)
def test_between_processes(num_ranks, dtype, multicast):
    run_ranks(run_session, num_ranks, session(num_ranks, dtype, multicast), mode="process")
