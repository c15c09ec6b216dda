"""An endless random mix of legal calls, of all three ops, every result of which is checked.

All ranks draw the same calls from the same seed; what a rank may choose for itself (how long to pause, whether its
partial output lies in memory of the workspace) it draws from a seed of its own.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dcpkernels import (
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from tests.gather_calls import Context

CAPACITY, MOST_TOKENS = 4, 9  # a call with more rows than the capacity takes several rounds
LOCAL_HEADS, HEAD_DIM, QUERY_DIM, KV_DIM, CHUNK = 2, 16, 24, 16, 11
NUM_TABLES = 13  # coprime to the two parities and buffers: what is one, two or more calls old has other values
NUM_LANES = 2
VARIANTS: dict[str, dict[str, Any]] = {
    "bulk": {},
    "zero copy": {"zero_copy": True},
    "packets of 8": {"wire": "packet", "packet_bytes": 8},
    "packets of 16": {"wire": "packet", "packet_bytes": 16},
    "packets of 128": {"wire": "packet", "packet_bytes": 128, "num_channels": 2},
    "no multicast": {"multicast": False, "num_channels": 2},
}


def config_for(num_ranks: int, variant: str, **fields: Any) -> WorkspaceConfig:
    return WorkspaceConfig(
        LOCAL_HEADS * num_ranks,
        HEAD_DIM,
        CAPACITY,
        dtype=torch.float32,
        num_lanes=NUM_LANES,
        query_head_dim=QUERY_DIM,
        kv_chunk_rows=CHUNK,
        kv_dim=KV_DIM,
        **VARIANTS[variant] | fields,
    )


@dataclass(frozen=True)
class Tables:
    """What ranks pass, and what has to come out. [NUM_TABLES, ...] each."""

    outs: torch.Tensor  # [N, W, T, H, D]
    lses: torch.Tensor  # [N, W, T, H], whole numbers in base 2
    merged: torch.Tensor  # [N, T, H, D]
    queries: torch.Tensor  # [N, T, H, Dq]
    context: Context


@functools.cache
def tables(num_ranks: int) -> Tables:
    gen = torch.Generator().manual_seed(num_ranks)
    num_heads = num_ranks * LOCAL_HEADS
    shape = (NUM_TABLES, num_ranks, MOST_TOKENS, num_heads)
    outs = torch.randint(1, 1000, (*shape, HEAD_DIM), generator=gen).float()
    lses = torch.randint(-3, 4, shape, generator=gen).float()
    weights = torch.exp2(lses.double())
    merged = (outs * weights[..., None]).sum(1) / weights.sum(1)[..., None]
    queries = torch.randint(-128, 128, (NUM_TABLES, MOST_TOKENS, num_heads, QUERY_DIM), generator=gen)
    context = Context((5, 0, 13, 30), num_ranks, KV_DIM, torch.bfloat16, interleave=2, block_size=4, seed=num_ranks)
    return Tables(outs, lses, merged.float(), queries.bfloat16(), context)


class WrongResult(AssertionError):
    """A call returned, and its result is not right."""


class Mix:
    """One rank's part. `play(lane)` makes calls until one raises, or `most` of them; the next time it goes on there."""

    def __init__(self, workspace: Workspace, seed: int, *, pause_s: float = 0.0) -> None:
        self.workspace, self.seed, self.pause_s = workspace, seed, pause_s
        self.num_calls = 0
        rank, num_ranks = workspace.rank, workspace.num_ranks
        self._tables = tables(num_ranks)
        self._rank, self._heads = rank, slice(rank * LOCAL_HEADS, (rank + 1) * LOCAL_HEADS)
        self._plan = self._tables.context.plan(rank, CHUNK)
        self._cache = self._tables.context.caches[rank]
        self._own_choices = random.Random(f"{seed} of rank {rank}")
        self._streams = [self._calls(lane) for lane in range(NUM_LANES)]

    def warm_up(self) -> None:
        """A first call of every op on every lane."""
        for lane in range(NUM_LANES):
            for call in (self._query_and_merge, self._query_and_release, self._chunk, self._split_chunk):
                call(random.Random(lane), lane)

    def play(self, lane: int = 0, most: int | None = None) -> None:
        for call in itertools.islice(self._streams[lane], most):
            if self.pause_s and self._own_choices.random() < 0.3:
                time.sleep(self._own_choices.random() * self.pause_s)
            call()

    def play_lanes(self, most: int | None = None) -> None:
        """A thread for each lane. Raises when all have ended: what the first lane raised, else the second one."""
        errors: dict[int, BaseException] = {}

        def play(lane: int) -> None:
            try:
                self.play(lane, most)
            except BaseException as error:  # noqa: BLE001  for the thread that waits for this one
                errors[lane] = error

        others = [threading.Thread(target=play, args=(lane,)) for lane in range(1, NUM_LANES)]
        [thread.start() for thread in others]
        play(0)
        [thread.join() for thread in others]
        if errors:
            first = errors[min(errors)]
            for other in errors.values():
                assert type(other) is type(first), errors
                assert getattr(other, "ranks", None) == getattr(first, "ranks", None), errors
            raise first

    def _calls(self, lane: int) -> Iterator[Callable[[], None]]:
        draw = random.Random(f"{self.seed} on lane {lane}")
        kinds = [self._merge, self._query_and_merge, self._query_and_release, self._query_out]
        kinds += [self._chunk, self._split_chunk]
        while True:
            yield functools.partial(draw.choice(kinds), random.Random(draw.random()), lane)

    # -- one call each, or a few that belong together

    def _merge(self, draw: random.Random, lane: int, num_tokens: int | None = None) -> None:
        table, workspace = draw.randrange(NUM_TABLES), self.workspace
        if num_tokens is None:
            num_tokens = draw.choice([0, 1, 2, 3, CAPACITY, MOST_TOKENS])
        partial_out = self._tables.outs[table, self._rank, :num_tokens]
        lse = self._tables.lses[table, self._rank, :num_tokens]
        if num_tokens <= CAPACITY and self._own_choices.random() < 0.7:
            partial_out = workspace.partial_out(num_tokens, lane=lane).copy_(partial_out)
        out = a2a_lse_reduce(partial_out, lse, workspace=workspace, lse_base="2", lane=lane)
        expected = self._tables.merged[table, :num_tokens, self._heads]
        self._check("a2a_lse_reduce", out.sub(expected).abs().lt(1e-2).all(), table, num_tokens)

    def _query(self, draw: random.Random, lane: int, num_tokens: int, out: torch.Tensor | None = None) -> None:
        table = draw.randrange(NUM_TABLES)
        whole = self._tables.queries[table, :num_tokens]
        view = query_gather(whole[:, self._heads], workspace=self.workspace, out=out, lane=lane)
        self._check("query_gather", torch.equal(view, whole), table, num_tokens)

    def _query_and_merge(self, draw: random.Random, lane: int) -> None:
        num_tokens = draw.randint(0, CAPACITY)
        self._query(draw, lane, num_tokens)
        self._merge(draw, lane, num_tokens)

    def _query_and_release(self, draw: random.Random, lane: int) -> None:
        self._query(draw, lane, draw.randint(0, CAPACITY))
        release_query(workspace=self.workspace, lane=lane)

    def _query_out(self, draw: random.Random, lane: int) -> None:
        num_tokens = draw.choice([1, CAPACITY, MOST_TOKENS])
        out = torch.empty(num_tokens, LOCAL_HEADS * self.workspace.num_ranks, QUERY_DIM, dtype=torch.bfloat16)
        self._query(draw, lane, num_tokens, out)

    def _check_chunk(self, chunk: torch.Tensor, chunk_idx: int) -> None:
        expected = self._tables.context.chunk(CHUNK, chunk_idx)
        right = torch.equal(chunk.view(torch.int16), expected.view(torch.int16))
        self._check("kv_gather", right, chunk_idx, len(expected))

    def _chunk(self, draw: random.Random, lane: int) -> None:
        chunk_idx = draw.randrange(self._plan.num_chunks)
        chunk = kv_gather(self._cache, self._plan, chunk_idx, workspace=self.workspace, lane=lane)
        self._check_chunk(chunk, chunk_idx)

    def _split_chunk(self, draw: random.Random, lane: int) -> None:
        """Started; a merge meanwhile; waited for."""
        chunk_idx = draw.randrange(self._plan.num_chunks)
        kv_gather_start(self._cache, self._plan, chunk_idx, workspace=self.workspace, lane=lane)
        if draw.random() < 0.5:
            self._merge(draw, lane)
        chunk = kv_gather_wait(self._plan, chunk_idx, workspace=self.workspace, lane=lane)
        self._check_chunk(chunk, chunk_idx)

    def _check(self, op: str, right: Any, which: int, num_tokens: int) -> None:
        if not right:
            raise WrongResult(
                f"rank {self._rank}: {op} of table or chunk {which}, {num_tokens} rows, after {self.num_calls} calls"
            )
        self.num_calls += 1
