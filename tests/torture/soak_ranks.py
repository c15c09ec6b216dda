"""A soak, on one rank: calls of every op at random, on several workspaces of several groups in one process, the same on all
ranks and each at its own pace. Every result is checked in every bit, and every view again before its end."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from dataclasses import dataclass, field
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
from dcpkernels.heap.group import as_group
from tests.torture import soak_tables
from tests.torture.soak_tables import KV_SCALE, NUM_TABLES, QUERY_SCALE

CAPACITY = 8
NUM_ROWS = 2 * CAPACITY + 3  # of a table: the largest calls take three rounds
LOCAL_HEADS = 2
REOPEN_EVERY = 4_000  # calls
PROGRESS_S = 10.0
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUERY = {"query_head_dim": 24, "padded_num_heads": 0}
KV = {"kv_chunk_rows": 16, "kv_dim": 32}
# Which ranks, how often, backend, and fields of the configuration.
SITES = [
    ("all", 30, "direct", {"num_lanes": 2, **QUERY, **KV}),
    ("all", 20, "direct", {"dtype": FP32, "wire": "packet", "packet_bytes": 16, "multicast": False, **QUERY}),
    ("left", 25, "direct", {"zero_copy": True, "num_channels": 2, "num_lanes": 2, **QUERY, "query_dtype": FP32}),
    ("right", 25, "direct", {"dtype": FP16, "wire": "packet", **KV, "kv_dtype": torch.float8_e4m3fn}),
    ("right", 10, "direct", {"wire": "packet", "packet_bytes": 128, "start_epoch": 2**32 - 50, **QUERY, **KV}),
    ("all", 3, "collective", {"num_lanes": 2, **QUERY, **KV, "kv_dtype": torch.float8_e4m3fnuz}),
]


def members(which: str, num_ranks: int) -> list[int]:
    """Two groups that overlap in one rank, or with two ranks in both."""
    middle = num_ranks // 2
    if which == "all" or num_ranks == 2:
        return list(range(num_ranks))
    return list(range(middle + 1)) if which == "left" else list(range(middle, num_ranks))


def in_turn(num_channels: int, body: Any) -> None:
    """A `parallel_for`: the calling thread, channel after channel, on every rank."""
    body(0, num_channels)


@dataclass
class Lane:
    """What is open on a lane: the query (table, first row, rows, view, scaled), the chunk that was started, the one in use."""

    query: tuple[int, int, int, torch.Tensor, bool] | None = None
    table: int = 0
    started: int | None = None
    next_chunk: int = 0
    in_use: tuple[torch.Tensor, torch.Tensor] | None = None  # the view, and what it has to hold


@dataclass
class Site:
    """One workspace, its tables, and the state of its lanes."""

    idx: int
    group: Any
    backend: str
    config: WorkspaceConfig
    workspace: Workspace = field(init=False)
    lanes: list[Lane] = field(init=False)
    num_calls: int = 0  # since the workspace was made
    num_reopened: int = -1

    def __post_init__(self) -> None:
        group = as_group(self.group)
        self.rank, self.num_ranks = group.rank, group.num_ranks
        where = (self.config, self.num_ranks)
        self.merges = soak_tables.merge_tables(*where, self.rank, NUM_ROWS, self.idx)
        self.queries = soak_tables.query_tables(*where, NUM_ROWS, self.idx) if self.config.query_head_dim else []
        self.kvs = soak_tables.kv_tables(*where, self.rank, self.idx) if self.config.kv_dim else []
        self.memory = torch.empty(NUM_ROWS, LOCAL_HEADS + 1, self.config.head_dim, dtype=self.config.dtype)
        self.lse_memory = torch.empty(LOCAL_HEADS, NUM_ROWS)
        self.open()

    def open(self) -> None:
        self.workspace = Workspace(self.group, config=self.config, backend=self.backend, parallel_for=in_turn)
        self.lanes = [Lane() for _ in range(self.config.num_lanes)]
        self.num_calls = 0
        self.num_reopened += 1

    def close(self) -> None:
        counted = self.workspace.stats()["num_calls"]
        assert counted == self.num_calls, f"site {self.idx}: {counted} calls were counted, {self.num_calls} were made"
        self.workspace.close()

    # -- one call, of which `dice` says everything: it rolls the same on all ranks

    def step(self, dice: random.Random) -> None:
        if self.num_calls >= REOPEN_EVERY:
            self.close()
            self.open()
        lane = dice.randrange(len(self.lanes))
        state = self.lanes[lane]
        if self.kvs and dice.random() < 0.3:
            self.kv_step(dice, lane, state)
        elif state.query is not None:
            self.end_query(dice, lane, state)
        elif self.queries and dice.random() < 0.4:
            self.gather(dice, lane, state)
        elif self.queries and dice.random() < 0.05:
            release_query(workspace=self.workspace, lane=lane)
            self.num_calls += 1
        else:
            self.merge(dice, lane, *rows_of(dice))

    def merge(self, dice: random.Random, lane: int, table: int, first: int, num_tokens: int) -> None:
        this = self.merges[table]
        rows = slice(first, first + num_tokens)
        partial_out = this.outs[self.rank, rows]
        arguments: dict[str, Any] = {
            "lse_base": this.lse_base,
            "lane": lane,
            **this.masks(self.rank, first, num_tokens),
        }
        choice = dice.random()
        if num_tokens <= CAPACITY and dice.random() < 0.8:
            partial_out = self.workspace.partial_out(num_tokens, lane=lane).copy_(partial_out)
        if choice < 0.5:
            arguments |= {"out": self.memory[:num_tokens, :LOCAL_HEADS], "lse_out": self.lse_memory.t()[:num_tokens]}
            self.memory.fill_(3.0), self.lse_memory.fill_(3.0)
        result = a2a_lse_reduce(
            partial_out, this.lses[self.rank, rows], workspace=self.workspace, return_lse=choice < 0.8, **arguments
        )
        self.num_calls += 1
        out, lse = result if isinstance(result, tuple) else (result, this.lse[rows])
        self.check(out, this.out[rows], "a2a_lse_reduce", table, num_tokens)
        self.check(lse, this.lse[rows], "LSE of a2a_lse_reduce", table, num_tokens)

    def gather(self, dice: random.Random, lane: int, state: Lane) -> None:
        table, first, num_tokens = rows_of(dice)
        scaled, has_parts, has_out = dice.random() < 0.3, dice.random() < 0.5, dice.random() < 0.3
        this, rows = self.queries[table], slice(first, first + num_tokens)
        expected = (this.scaled if scaled else this.out)[rows]
        query = this.queries[self.rank, rows]
        out = torch.empty_like(expected) if has_out or num_tokens > CAPACITY else None
        result = query_gather(
            (query[..., :16], query[..., 16:]) if has_parts else query,
            workspace=self.workspace,
            scale=QUERY_SCALE if scaled else None,
            out=out,
            lane=lane,
        )
        self.num_calls += 1
        if scaled:  # NaN is compared as NaN: its sign is not promised
            assert torch.equal(result.float().isnan(), expected.float().isnan())
            result, expected = (torch.where(x.float().isnan(), 0.0, x.float()) for x in (result, expected))
        self.check(result, expected, "query_gather", table, num_tokens)
        if out is None and not scaled:
            state.query = table, first, num_tokens, result, scaled
        elif out is None:
            state.query = table, first, num_tokens, torch.empty(0), scaled

    def end_query(self, dice: random.Random, lane: int, state: Lane) -> None:
        """Peers may be far ahead; until this call none of them has written here."""
        assert state.query is not None
        table, first, num_tokens, view, scaled = state.query
        if not scaled:
            rows = slice(first, first + num_tokens)
            self.check(view, self.queries[table].out[rows], "an open query", table, num_tokens)
        state.query = None
        if dice.random() < 0.3:
            release_query(workspace=self.workspace, lane=lane)
            self.num_calls += 1
        else:
            self.merge(dice, lane, dice.randrange(NUM_TABLES), dice.randint(0, NUM_ROWS - num_tokens), num_tokens)

    def kv_step(self, dice: random.Random, lane: int, state: Lane) -> None:
        this = self.kvs[state.table]
        cache = this.context.caches[self.rank]
        if state.started is None and state.next_chunk >= this.plan.num_chunks:
            state.table, state.next_chunk = dice.randrange(len(self.kvs)), 0
            this = self.kvs[state.table]
            cache = this.context.caches[self.rank]
        scale = KV_SCALE if this.scaled and dice.random() < 0.5 else None
        if state.started is None and dice.random() < 0.6:
            kv_gather_start(cache, this.plan, state.next_chunk, workspace=self.workspace, lane=lane)
            state.started = state.next_chunk
            state.next_chunk += 1
            return
        if state.in_use is not None:  # until the wait that is to come
            self.check(*state.in_use, "a chunk in use", state.table, 0)
        if state.started is None:
            idx = state.next_chunk
            state.next_chunk += 1
            chunk = kv_gather(cache, this.plan, idx, workspace=self.workspace, scale=scale, lane=lane)
        else:
            idx, state.started = state.started, None
            chunk = kv_gather_wait(this.plan, idx, workspace=self.workspace, scale=scale, lane=lane)
        self.num_calls += 1
        expected = this.chunks[idx] if scale is None else this.scaled[idx]
        if scale is None:
            self.check(chunk, expected, "kv_gather", state.table, idx)
            state.in_use = chunk, expected
        else:
            assert torch.equal(chunk.isnan(), expected.isnan())
            self.check(chunk.nan_to_num(0.0), expected.nan_to_num(0.0), "kv_gather with scale", state.table, idx)
            state.in_use = None

    def check(self, got: torch.Tensor, expected: torch.Tensor, what: str, table: int, num_tokens: int) -> None:
        integer = _INTEGERS[expected.element_size()]
        assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, got.shape, expected.shape)
        wrong = got.view(integer).ne(expected.view(integer))
        if wrong.any():
            raise AssertionError(
                f"site {self.idx}, call {self.num_calls} ({self.num_reopened} times reopened): {what}, table {table}, "
                f"{num_tokens}: {int(wrong.sum())} of {wrong.numel()} elements differ, first {wrong.nonzero()[0].tolist()}"
            )


def rows_of(dice: random.Random) -> tuple[int, int, int]:
    """Table, first row and number of rows of a call: none at times, and more than the capacity at times."""
    luck = dice.random()
    num_tokens = (
        0 if luck < 0.05 else dice.randint(CAPACITY + 1, NUM_ROWS) if luck > 0.96 else dice.randint(1, CAPACITY)
    )
    return dice.randrange(NUM_TABLES), dice.randint(0, NUM_ROWS - num_tokens), num_tokens


def soak(group: Any, num_calls: int, seed: int, progress: bool = False) -> dict[str, Any]:
    """Makes at least `num_calls` calls, of all sites together, and says how many of each site this rank has made."""
    world = as_group(group)
    sites: list[Site | None] = []
    for idx, (which, _, backend, fields) in enumerate(SITES):
        ranks = members(which, world.num_ranks)
        theirs = subgroup(group, ranks)
        config = WorkspaceConfig(LOCAL_HEADS * len(ranks), 32, CAPACITY, timeout_s=60.0, **fields)
        sites.append(Site(idx, theirs, backend, config) if world.rank in ranks else None)
    descriptors = len(os.listdir("/proc/self/fd"))
    dice, delays = random.Random(seed), random.Random(1000 * seed + world.rank)
    weights = list(itertools.accumulate(weight for _, weight, _, _ in SITES))
    counts, start, told = [0] * len(SITES), time.monotonic(), 0.0
    for call in range(num_calls):
        idx = dice.choices(range(len(SITES)), cum_weights=weights)[0]
        its_dice = random.Random(dice.getrandbits(32))
        site = sites[idx]
        if site is not None:
            if delays.random() < 0.01:
                time.sleep(delays.random() * 5e-4)
            site.step(its_dice)
            counts[idx] += 1
        seconds = time.monotonic() - start
        if progress and world.rank == 0 and seconds - told > PROGRESS_S:
            told = seconds
            print(f"soak: {call} of {num_calls} calls, {call / seconds:.0f} a second", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    for site in sites:
        if site is not None:
            site.close()
            site.open()
    opened = len(os.listdir("/proc/self/fd"))
    for site in sites:
        if site is not None:
            site.workspace.close()
    return {"calls": counts, "seconds": seconds, "descriptors": (descriptors, opened)}


def subgroup(group: Any, ranks: list[int]) -> Any:
    if hasattr(group, "subgroup"):
        return group.subgroup(ranks) if group.rank in ranks else None
    return torch.distributed.new_group(ranks)
