"""What one rank process of the demo does: its shard of the cache, attention over it, the merge, and its time."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

import torch

import dcpkernels
from dcpkernels import layout
from dcpkernels.cli import context, measure
from dcpkernels.cli.attention import attend_to_shard
from dcpkernels.cli.baselines import PackedAllToAll

OURS, GLOO = "dcpkernels", "gloo"
WARMUP = 5

_EMPTY_LSE = 7.0  # what stands in a buffer that no kernel has written; the lengths have to win over it


class RankTask(NamedTuple):
    lengths: list[int]  # tokens of each sequence
    interleave: int
    seed: int
    iters: int
    lse_base: str  # what the op is told
    progress_path: str


class RankResult(NamedTuple):
    local_lengths: list[int]
    partial_out: torch.Tensor  # [T, H, D] bf16; rows without local tokens hold NaN
    partial_lse: torch.Tensor  # [T, H] fp32, natural log
    outs: dict[str, torch.Tensor]  # [T, Hr, D] bf16 by candidate
    times_us: dict[str, list[float]]
    workspace_bytes: int
    isa: str


def run_rank(group: torch.distributed.ProcessGroup, task: RankTask) -> RankResult:
    rank, num_ranks, batch = group.rank(), group.size(), len(task.lengths)
    progress = Progress(task.progress_path, rank)
    measure.use_spare_cpus(num_ranks)
    local_lengths = [layout.local_length(n, num_ranks, rank, task.interleave) for n in task.lengths]

    # 1. This rank's rows of every sequence, and nothing else.
    caches = []
    for seq, length in enumerate(task.lengths):
        positions = torch.tensor(layout.local_positions(length, num_ranks, rank, task.interleave), dtype=torch.int64)
        caches.append(context.latent_rows(positions, seq, task.seed))

    # 2. Attention of all heads over those.
    query = context.queries(batch, task.seed)
    partial_out = torch.full((batch, context.NUM_HEADS, context.LATENT_DIM), float("nan"), dtype=context.DTYPE)
    partial_lse = torch.full((batch, context.NUM_HEADS), _EMPTY_LSE)
    for row, cache in enumerate(caches):
        attend_to_shard(query[row], cache, partial_out[row], partial_lse[row], progress.add_tokens)

    # 3. The merge: once with each, then both in turns for the time.
    seq_lens = torch.tensor(local_lengths, dtype=torch.int32)
    query_start_loc = torch.arange(batch + 1, dtype=torch.int32)
    empty_rows = (seq_lens == 0).nonzero().flatten()
    shape = (batch, context.NUM_HEADS, context.LATENT_DIM)
    outs = {
        name: torch.empty(batch, context.NUM_HEADS // num_ranks, context.LATENT_DIM, dtype=context.DTYPE)
        for name in (OURS, GLOO)
    }
    gloo = PackedAllToAll(group, *shape, context.DTYPE, empty_rows=empty_rows)
    with dcpkernels.Workspace(group, config=workspace_config(batch)) as workspace:
        measure.bind_to_own_cpus(rank, num_ranks)
        candidates = {
            OURS: lambda: dcpkernels.a2a_lse_reduce(
                partial_out,
                partial_lse,
                workspace=workspace,
                lse_base=task.lse_base,
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                out=outs[OURS],
            ),
            GLOO: lambda: gloo(partial_out, partial_lse, outs[GLOO]),
        }
        times = measure.take_turns(
            candidates,
            measure.Barrier(workspace),
            iters=task.iters,
            warmup=WARMUP,
            produce=lambda name: partial_out.add_(0),
            progress=progress.add_call,
        )
        return RankResult(local_lengths, partial_out, partial_lse, outs, times, workspace.num_bytes, workspace.isa)


def workspace_config(batch: int) -> dcpkernels.WorkspaceConfig:
    return dcpkernels.WorkspaceConfig(
        num_heads=context.NUM_HEADS,
        head_dim=context.LATENT_DIM,
        max_num_tokens=batch,
        dtype=context.DTYPE,
        num_lanes=measure.NUM_LANES,
    )


class Progress:
    """How far each rank is, in a file that all map: two counters a rank, written by that rank alone."""

    _COUNTERS = struct.Struct("qq")

    @classmethod
    def create(cls, path: str, num_ranks: int) -> None:
        with open(path, "wb") as file:
            file.write(bytes(cls._COUNTERS.size * num_ranks))

    def __init__(self, path: str, rank: int = 0) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._offset = rank * self._COUNTERS.size
        self._tokens = self._calls = 0

    def add_tokens(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        self._write()

    def add_call(self) -> None:
        self._calls += 1
        self._write()

    def _write(self) -> None:
        self._COUNTERS.pack_into(self._map, self._offset, self._tokens, self._calls)

    def read(self) -> tuple[int, int]:
        """(tokens of all ranks together, calls of the slowest rank)."""
        tokens, calls = zip(*self._COUNTERS.iter_unpack(self._map), strict=True)
        return sum(tokens), min(calls)
