"""What the tests of query_gather and kv_gather share: payload of any bits, the memory behind the views, and a context that
is dealt out to the paged caches of several ranks."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcpkernels import KVGatherPlan, Workspace, a2a_lse_reduce, reference
from dcpkernels.errors import DcpError
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet

DTYPES = [
    *[torch.bfloat16, torch.float16, torch.float32],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
]
RANKS = [1, 2, 3, 4, 6, 8]
PATTERN = 0xA5  # of bytes that nobody is to write


def any_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit at random: numbers of all sizes, subnormals, infinities, NaNs of all payloads."""
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


class Buffers:
    """The memory of a workspace that the views of one op lie in: that of all ranks, or without multicast the rank's own.

    `fill` and `check` are collective. Nobody may be inside a call, and no view may be in use any more.
    """

    def __init__(self, group: Any, workspace: Workspace, op: str) -> None:
        impl = workspace._impl
        layout, self.group, self.rank = impl._layout, group, workspace.rank
        part = layout.gather_parts[{"query_gather": "query_gather.buffer", "kv_gather": "kv_gather.buffers"}[op]]
        self.shared = layout.multicast
        memory = impl._heap.shared_memory if self.shared else impl._heap.own_memory
        self.bytes = torch.frombuffer(memory(part.offset, part.num_bytes), dtype=torch.uint8)
        self.ours = not self.shared or self.rank == 0  # who fills, and who looks at all of it

    def fill(self) -> None:
        meet(self.group)
        if self.ours:
            self.bytes.fill_(PATTERN)
        meet(self.group)

    def place(self, view: torch.Tensor) -> tuple[int, int]:
        """First byte and end of a contiguous view."""
        first = view.data_ptr() - self.bytes.data_ptr()
        end = first + view.numel() * view.element_size()
        assert view.is_contiguous() and 0 <= first and end <= len(self.bytes), "not in the buffers"
        return first, end

    def check(self, first: int = 0, end: int = 0) -> None:
        """All bytes but first .. end - 1 are the pattern. Returns when every rank has looked."""
        if self.ours:
            for at, part in ((0, self.bytes[:first]), (end, self.bytes[end:])):
                if not part.eq(PATTERN).all():
                    bad = part.ne(PATTERN).nonzero().view(-1)
                    raise AssertionError(
                        f"{len(bad)} bytes outside of {first} .. {end} written, first {at + int(bad[0])}"
                    )
        meet(self.group)

    def check_around(self, view: torch.Tensor) -> None:
        self.check(*self.place(view) if view.numel() else (0, 0))


def release_by_merge(workspace: Workspace, num_tokens: int, lane: int = 0) -> None:
    """Ends the use of a query as engines do."""
    config = workspace.config
    partial_out = torch.ones(num_tokens, config.num_heads, config.head_dim, dtype=config.dtype)
    lse = torch.zeros(num_tokens, config.num_heads)
    out = a2a_lse_reduce(partial_out, lse, workspace=workspace, lse_base="e", lane=lane)
    assert out.eq(1).all()


# -- paged caches


@dataclass(frozen=True)
class CacheLayout:
    """How [num_blocks, block_size, dim] lies in a larger storage: its shape, and the view of it."""

    storage: Callable[[int, int, int], tuple[int, ...]]
    view: Callable[[torch.Tensor, int, int, int], torch.Tensor]


def _plain(storage: torch.Tensor, n: int, b: int, d: int) -> torch.Tensor:
    return storage


CACHES = {
    "contiguous": CacheLayout(lambda n, b, d: (n, b, d), _plain),
    "blocks farther apart": CacheLayout(lambda n, b, d: (n, b + 3, d), lambda s, n, b, d: s[:, 1 : b + 1]),
    "layers inside of blocks": CacheLayout(lambda n, b, d: (n, 3, b, d), lambda s, n, b, d: s[:, 1]),
    "[layers, blocks][2]": CacheLayout(lambda n, b, d: (3, n, b, d), lambda s, n, b, d: s[2]),
    "layers inside of rows": CacheLayout(lambda n, b, d: (n, b, 2, d), lambda s, n, b, d: s[:, :, 1]),
    "a slice of longer rows": CacheLayout(lambda n, b, d: (n, b, d + 16), lambda s, n, b, d: s[..., 16:]),
    "rows an odd pitch apart": CacheLayout(lambda n, b, d: (n, b, d + 3), lambda s, n, b, d: s[..., 1 : d + 1]),
    "[block_size, blocks]": CacheLayout(lambda n, b, d: (b, n, d), lambda s, n, b, d: s.transpose(0, 1)),
}


def lay_cache(name: str, cache: torch.Tensor) -> torch.Tensor:
    """The same values in this layout, with other bits wherever the layout leaves room."""
    layout, shape = CACHES[name], tuple(cache.shape)
    view = layout.view(any_bits(layout.storage(*shape), cache.dtype, seed=len(name)), *shape)
    assert tuple(view.shape) == shape
    return view.copy_(cache)


@dataclass
class Context:
    """The tokens of several requests, [rows, dim] one request after the other, and where they lie on each rank."""

    lens: tuple[int, ...]
    num_ranks: int
    dim: int
    dtype: torch.dtype
    interleave: int = 1
    block_size: int = 16
    cache: str = "contiguous"
    seed: int = 0
    rows: torch.Tensor = field(init=False)
    caches: list[torch.Tensor] = field(init=False)
    tables: list[list[np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        """Runs of `interleave` tokens are dealt out to the ranks in turn. Blocks are handed out at random; what is no
        token of the context has any bits, and each rank has some blocks that belong to nobody."""
        self.rows = any_bits((sum(self.lens), self.dim), self.dtype, self.seed)
        self.caches, self.tables = [], []
        for rank in range(self.num_ranks):
            mine = [
                torch.arange(n)[torch.arange(n).div(self.interleave, rounding_mode="floor") % self.num_ranks == rank]
                for n in self.lens
            ]
            counts = [-(-len(positions) // self.block_size) for positions in mine]
            num_blocks = sum(counts) + 2
            order = np.random.default_rng(self.seed + rank).permutation(num_blocks)
            flat = any_bits((num_blocks * self.block_size, self.dim), self.dtype, 1000 + self.seed + rank)
            table, used, before = [], 0, 0
            for n, positions, count in zip(self.lens, mine, counts, strict=True):
                blocks = order[used : used + count]
                places = (torch.from_numpy(blocks)[:, None] * self.block_size + torch.arange(self.block_size)).view(-1)
                flat.view(torch.uint8)[places[: len(positions)]] = self.rows.view(torch.uint8)[before + positions]
                table.append(blocks)
                used, before = used + count, before + n
            self.caches.append(lay_cache(self.cache, flat.view(num_blocks, self.block_size, self.dim)))
            self.tables.append(table)

    def plan(self, rank: int, chunk_size: int) -> KVGatherPlan:
        return KVGatherPlan(
            self.lens,
            self.tables[rank],
            block_size=self.block_size,
            num_ranks=self.num_ranks,
            rank=rank,
            chunk_size=chunk_size,
            interleave=self.interleave,
        )

    def chunk(self, chunk_size: int, chunk_idx: int) -> torch.Tensor:
        """What the gather has to give."""
        return self.rows[chunk_idx * chunk_size : (chunk_idx + 1) * chunk_size]

    def owners(self) -> torch.Tensor:
        """[rows]: the rank that has each of `rows`."""
        positions = torch.cat([torch.arange(n) for n in self.lens])
        return positions.div(self.interleave, rounding_mode="floor") % self.num_ranks

    def reference_chunk(self, chunk_size: int, chunk_idx: int, scale: float | None = None) -> torch.Tensor:
        tables = [[row.tolist() for row in table] for table in self.tables]
        return reference.kv_gather(
            self.caches,
            self.lens,
            tables,
            interleave=self.interleave,
            chunk_size=chunk_size,
            chunk_idx=chunk_idx,
            scale=scale,
        )


def interrupted(group, rank_class):
    """For two rank processes: the first gets Ctrl-C in its first call, the second says what it hears of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = rank_class(group, timeout_s=20.0)
    if rank.workspace.rank == 1:
        meet(group)
        return attempt(rank.workspace.check).error
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    error = rank().error
    meet(group)
    return error


def check_ctrl_c(rank_class):
    error, other = run_ranks(interrupted, 2, rank_class, mode="process")
    assert type(error) is KeyboardInterrupt
    assert isinstance(other, DcpError) and other.ranks == (0,), other
