"""kv_gather over ranks x interleave x dtypes x context lengths x chunks x block sizes x caches: the bytes of the context in
sequence order, and no byte changed that is no part of the chunk.

Not the full product: every value of every axis, and every pair that test_the_plan_has_every_pair names. A session is a
workspace; its cases are gathered one after the other, of each the chunks that `some_chunks` picks.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, kv_gather
from dcpkernels.testing import run_ranks, unchanged
from tests.a2a_calls import same_bits
from tests.gather_calls import CACHES, DTYPES, RANKS, Buffers, Context

INTERLEAVES = [1, 2, 16, 64]
LENGTHS = [
    (0, 1, 7),
    (114_000,),
    (8191,),
    (7,),
    (66_048, 0, 7),
    (1, 8191, 7, 0, 300),
    (1,),
    (66_048,),
    (0, 8191, 114_000, 1),
]
CHUNKS = [64, 4096, 66_048]
BLOCK_SIZES = [16, 64, 48, 1536, 128]
ROW_BYTES = [16, 64, 32]  # narrow, for the sake of the large ones; test_kv_gather.py has others
CASES_PER_SESSION = 4


@dataclass(frozen=True)
class Session:
    num_ranks: int
    interleave: int
    multicast: bool
    num_channels: int

    @property
    def config(self) -> WorkspaceConfig:
        return WorkspaceConfig(
            self.num_ranks,
            8,
            4,
            num_lanes=2,
            num_channels=self.num_channels,
            kv_chunk_rows=max(CHUNKS),
            kv_dim=max(ROW_BYTES) // 4,
            kv_dtype=torch.float32,
            multicast=self.multicast,
            timeout_s=20.0,
            first_call_timeout_s=20.0,
        )


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    lens: tuple[int, ...]
    chunk_size: int
    block_size: int
    cache: str
    row_bytes: int
    lane: int

    def context(self, s: Session) -> Context:
        dim = self.row_bytes // self.dtype.itemsize
        return Context(self.lens, s.num_ranks, dim, self.dtype, s.interleave, self.block_size, self.cache)


AXES = {  # of a session, then of a case
    "num_ranks": RANKS,
    "interleave": INTERLEAVES,
    "multicast": [True, False],
    "num_channels": [1, 3],
    "dtype": DTYPES,
    "lens": LENGTHS,
    "chunk_size": CHUNKS,
    "block_size": BLOCK_SIZES,
    "cache": list(CACHES),
    "row_bytes": ROW_BYTES,
    "lane": [0, 1],
}


def pairs_of(s: Session, case: Case) -> set:
    """Every two values of two axes that meet in this case."""
    return set(itertools.combinations((vars(s) | vars(case)).items(), 2))


def make_plan() -> dict[Session, list[Case]]:
    """Greedily: each case is the one, of many drawn at random, that brings the most pairs which are new."""
    draw, met, plan = random.Random(5), set(), {}
    for i, (num_ranks, interleave) in enumerate(itertools.product(RANKS, INTERLEAVES)):
        s = Session(num_ranks, interleave, (i + i // 4) % 2 == 0, (1, 3)[(i + i // 8) % 2])
        plan[s] = []
        for _ in range(CASES_PER_SESSION):
            drawn = [Case(*map(draw.choice, list(AXES.values())[4:])) for _ in range(50)]
            plan[s].append(max(drawn, key=lambda case: len(pairs_of(s, case) - met)))
            met |= pairs_of(s, plan[s][-1])
    return plan


PLAN = make_plan()


def test_the_plan_has_every_pair():
    met = set().union(*(pairs_of(s, case) for s, cases in PLAN.items() for case in cases))
    missing = []
    for (a, a_values), (b, b_values) in itertools.combinations(AXES.items(), 2):
        pairs = itertools.product([(a, value) for value in a_values], [(b, value) for value in b_values])
        missing += [pair for pair in pairs if pair not in met]
    assert not missing


def some_chunks(num_chunks: int) -> list[int]:
    """The first, one from the middle, and the last, which may have fewer rows."""
    return sorted({0, num_chunks // 2, num_chunks - 1} & set(range(num_chunks)))


def gather(group, s: Session, case: Case, context: Context, workspace: Workspace, buffers: Buffers) -> None:
    rank = workspace.rank
    plan, cache = context.plan(rank, case.chunk_size), context.caches[rank]
    for chunk_idx in some_chunks(plan.num_chunks):
        truth = context.chunk(case.chunk_size, chunk_idx)
        buffers.fill()
        with unchanged(*[cache] * (chunk_idx == 0)):
            chunk = kv_gather(cache, plan, chunk_idx, workspace=workspace, lane=case.lane)
        assert chunk.dtype == case.dtype and chunk.shape == truth.shape == (plan.num_rows(chunk_idx), context.dim)
        assert same_bits(chunk, truth), (s, case, chunk_idx)
        lane_bytes = len(buffers.bytes) // 2
        assert buffers.place(chunk)[0] // lane_bytes == case.lane
        buffers.check_around(chunk)
        if rank == 0 and len(truth) <= 64:
            assert same_bits(context.reference_chunk(case.chunk_size, chunk_idx), truth)


def run_session(group, s: Session, contexts=None) -> None:
    contexts = contexts or [case.context(s) for case in PLAN[s]]
    with Workspace(group, config=s.config, backend="direct") as workspace:
        buffers = Buffers(group, workspace, "kv_gather")
        for case, context in zip(PLAN[s], contexts, strict=True):
            gather(group, s, case, context, workspace, buffers)


def session_id(s: Session) -> str:
    return f"W={s.num_ranks}, I={s.interleave}"


@pytest.mark.parametrize("s", PLAN, ids=session_id)
def test_matrix(s):
    run_ranks(run_session, s.num_ranks, s, [case.context(s) for case in PLAN[s]])


@pytest.mark.parametrize("s", [list(PLAN)[i] for i in (6, 9, 20)], ids=session_id)
def test_between_processes(s):
    run_ranks(run_session, s.num_ranks, s, mode="process")


@pytest.mark.parametrize("num_ranks, interleave", [(2, 1), (3, 16), (8, 64)])
def test_a_large_chunk_is_the_reference_s(num_ranks, interleave):
    """That what the cases are compared with is the truth for a whole chunk of 4,096 rows."""
    context = Context((1, 8191, 7, 0, 300), num_ranks, 8, torch.bfloat16, interleave, 48)
    for chunk_idx in (0, 1, 2):
        assert same_bits(context.reference_chunk(4096, chunk_idx), context.chunk(4096, chunk_idx))
