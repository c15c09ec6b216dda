"""`dcpkernels bench kv_gather`: a chunk of context out of sharded paged caches, by the op or by an all-gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

import dcpkernels
from dcpkernels import layout, reference
from dcpkernels.cli import baselines_gather, baselines_kv_gather, exact
from dcpkernels.cli.bench_gather import Gather, GatherSubject
from dcpkernels.cli.bench_op import DTYPES, Subject
from dcpkernels.errors import DcpUnsupported

_OTHER_BLOCKS = 3  # of the cache, which are not the request's


@dataclass(frozen=True, kw_only=True)
class KvGather(Gather):
    rows: tuple[int, ...] = (66_048,)
    kv_dim: int = 576
    block_size: int = 64
    interleave: int = 1
    iters: int = 24

    NAME: ClassVar[str] = "kv_gather"
    BASELINES: ClassVar[tuple[str, ...]] = baselines_gather.NAMES
    SIZES: ClassVar[str] = "rows"
    SIZE: ClassVar[str] = "num_rows"

    def require(self) -> None:
        if self.mode == "graph":  # the host counts the turns of a lane's two buffers
            raise DcpUnsupported("bench: kv_gather must be timed with mode eager (got graph)")

    def describe(self) -> str:
        return f"rows of {self.kv_dim}, blocks of {self.block_size}, interleave {self.interleave}"

    def fields(self) -> dict[str, Any]:
        return {"kv_dim": self.kv_dim, "block_size": self.block_size, "interleave": self.interleave}

    def config(self, num_ranks: int, size: int) -> dcpkernels.WorkspaceConfig:
        return dcpkernels.WorkspaceConfig(
            num_heads=num_ranks,  # only the barrier merges
            head_dim=1,
            max_num_tokens=1,
            kv_chunk_rows=size,
            kv_dim=self.kv_dim,
            kv_dtype=DTYPES[self.dtype],
            cpu_isa=self.isa,
        )

    def num_bytes(self, num_ranks: int, size: int) -> int:
        """Of rank 0, which holds the most."""
        row_bytes = self.kv_dim * DTYPES[self.dtype].itemsize
        return self.copies(num_ranks) * self._local_rows(0, num_ranks, size) * row_bytes

    def input_bytes(self, num_ranks: int, size: int) -> int:
        rows = (self._num_blocks(rank, num_ranks, size) + _OTHER_BLOCKS for rank in range(num_ranks))
        return sum(rows) * self.block_size * self.kv_dim * DTYPES[self.dtype].itemsize

    def cache_of(self, rank: int, num_ranks: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One rank's paged cache [num_blocks, block_size, kv_dim], and int64 [n]: its blocks with the request, in order."""
        generator = exact.generator_of(rank, self.seed)
        num_blocks = self._num_blocks(rank, num_ranks, num_rows)
        shape = (num_blocks + _OTHER_BLOCKS, self.block_size, self.kv_dim)
        cache = exact.random_bytes(shape, DTYPES[self.dtype], generator)
        return cache, torch.randperm(len(cache), generator=generator)[:num_blocks]

    def _num_blocks(self, rank: int, num_ranks: int, num_rows: int) -> int:
        """With the request."""
        return -(-self._local_rows(rank, num_ranks, num_rows) // self.block_size)

    def _local_rows(self, rank: int, num_ranks: int, num_rows: int) -> int:
        return layout.local_length(num_rows, num_ranks, rank, self.interleave)

    @contextmanager
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> Iterator[Subject]:
        with baselines_gather.exchanges(self.baselines, group, mpi_job, torch.device(workspace.device)) as exchanges:
            yield _Subject(self, workspace, exchanges, size)


class _Subject(GatherSubject):
    def __init__(
        self,
        op: KvGather,
        workspace: dcpkernels.Workspace,
        exchanges: Mapping[str, baselines_gather.Exchange],
        num_rows: int,
    ) -> None:
        self._op, self._num_ranks, self._num_rows = op, workspace.num_ranks, num_rows
        cache, blocks = op.cache_of(workspace.rank, workspace.num_ranks, num_rows)
        cache = cache.to(workspace.device)
        plan = dcpkernels.KVGatherPlan(
            [num_rows],
            [blocks],
            block_size=op.block_size,
            num_ranks=workspace.num_ranks,
            rank=workspace.rank,
            chunk_size=num_rows,
            interleave=op.interleave,
        )
        ours = partial(dcpkernels.kv_gather, cache, plan, 0, workspace=workspace)
        blocks = blocks.to(workspace.device)
        with torch.device(workspace.device):
            others = {
                name: baselines_kv_gather.AllGatherRows(
                    workspace.num_ranks, all_gather, cache, blocks, num_rows, op.interleave
                )
                for name, all_gather in exchanges.items()
            }
        super().__init__((cache,), ours, others)

    def truth(self) -> torch.Tensor:
        op, num_ranks, num_rows = self._op, self._num_ranks, self._num_rows
        caches, blocks = zip(*(op.cache_of(rank, num_ranks, num_rows) for rank in range(num_ranks)), strict=True)
        tables = [[table] for table in blocks]
        return reference.kv_gather(
            caches, [num_rows], tables, chunk_size=num_rows, chunk_idx=0, interleave=op.interleave
        )
