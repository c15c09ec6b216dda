"""`dcpkernels bench query_gather`: every rank's heads of the query, in one buffer, by the op or by an all-gather."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

import dcpkernels
from dcpkernels import reference
from dcpkernels.cli import baselines_gather, baselines_query_gather, exact, measure, stamps
from dcpkernels.cli.bench_gather import Gather, GatherSubject
from dcpkernels.cli.bench_op import DTYPES, OURS, Subject
from dcpkernels.errors import DcpInvalidArgument

_SCALE = 0.01  # of random normal queries: a few of them are clamped


@dataclass(frozen=True, kw_only=True)
class QueryGather(Gather):
    tokens: tuple[int, ...] = (1, 8, 64)
    num_heads: int = 96
    head_dim: int = 576
    parts: tuple[int, ...] = ()
    quantise: bool = False

    NAME: ClassVar[str] = "query_gather"
    BASELINES: ClassVar[tuple[str, ...]] = baselines_gather.NAMES
    SIZES: ClassVar[str] = "tokens"
    SIZE: ClassVar[str] = "num_tokens"

    @property
    def scale(self) -> float | None:
        return _SCALE if self.quantise else None

    @property
    def releases(self) -> bool:
        """Whether a call is timed with the release of its query: there is nothing else between the calls of a sample, nor
        between those that come before a capture."""
        return self.num_calls > 1 or self.mode == "graph"

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.quantise else DTYPES[self.dtype]

    def require(self) -> None:
        if self.parts and sum(self.parts) != self.head_dim:
            given = ",".join(map(str, self.parts))
            raise DcpInvalidArgument(f"bench: parts must sum to head_dim={self.head_dim} (got {given})")
        if self.quantise and DTYPES[self.dtype] not in reference.SCALABLE:
            raise DcpInvalidArgument(f"bench: dtype must be bf16, fp16 or fp32 with quantise (got {self.dtype})")

    def describe(self) -> str:
        parts = f" in parts {' + '.join(map(str, self.parts))}" if self.parts else ""
        return f"{self.num_heads} heads, head_dim {self.head_dim}{parts}{', to e4m3' if self.quantise else ''}{', with its release' if self.releases else ''}"

    def fields(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "parts": list(self.parts),
            "quantise": self.quantise,
        }

    def config(self, num_ranks: int, size: int) -> dcpkernels.WorkspaceConfig:
        return dcpkernels.WorkspaceConfig(
            num_heads=self.num_heads,
            head_dim=1,  # only the barrier merges
            max_num_tokens=size,
            num_lanes=measure.NUM_LANES,  # what is gathered on a lane is open until a merge there
            query_head_dim=self.head_dim,
            query_dtype=self.out_dtype,
            cpu_isa=self.isa,
        )

    def num_bytes(self, num_ranks: int, size: int) -> int:
        num_local_heads = self.num_heads // num_ranks
        return self.copies(num_ranks) * size * num_local_heads * self.head_dim * self.out_dtype.itemsize

    def input_bytes(self, num_ranks: int, size: int) -> int:
        return size * self.num_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def query_of(self, rank: int, num_ranks: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """The parts of one rank's query."""
        generator, dtype = exact.generator_of(rank, self.seed), DTYPES[self.dtype]
        shapes = [(num_tokens, self.num_heads // num_ranks, dim) for dim in self.parts or (self.head_dim,)]
        if self.quantise:
            return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        return tuple(exact.random_bytes(shape, dtype, generator) for shape in shapes)

    @contextmanager
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> Iterator[Subject]:
        with baselines_gather.exchanges(self.baselines, group, mpi_job, torch.device(workspace.device)) as exchanges:
            yield _Subject(self, workspace, exchanges, size)


class _Subject(GatherSubject):
    def __init__(
        self,
        op: QueryGather,
        workspace: dcpkernels.Workspace,
        exchanges: Mapping[str, baselines_gather.Exchange],
        num_tokens: int,
    ) -> None:
        self._op, self._workspace, self._num_tokens = op, workspace, num_tokens
        query_parts = op.query_of(workspace.rank, workspace.num_ranks, num_tokens)
        parts = tuple(part.to(workspace.device) for part in query_parts)
        query = parts if op.parts else parts[0]
        gather = partial(dcpkernels.query_gather, query, workspace=workspace, scale=op.scale)

        def gather_and_release() -> torch.Tensor:
            out = gather()
            dcpkernels.release_query(workspace=workspace)
            return out

        ours = gather_and_release if op.releases else gather
        with torch.device(workspace.device):
            others = {
                name: baselines_query_gather.AllGatherHeads(workspace.num_ranks, all_gather, parts, op.scale)
                for name, all_gather in exchanges.items()
            }
        super().__init__(parts, ours, others)

    def produce(self, name: str) -> None:
        super().produce(name)
        if name == OURS:  # instead of the merge behind which the next query is gathered
            dcpkernels.release_query(workspace=self._workspace)

    def stamp(self, tensor: torch.Tensor, stamp: int) -> None:
        if self._op.quantise:  # what is rounded has to stay a number
            stamps.stamp_signs(tensor, stamp)
        else:
            super().stamp(tensor, stamp)

    def stamp_out(self, out: torch.Tensor, stamp: int) -> None:
        if not self._op.quantise:
            super().stamp_out(out, stamp)
            return
        for part in out.view(torch.uint8).split(self._op.parts or (self._op.head_dim,), -1):
            part.bitwise_xor_((stamps.signs(stamp, part.shape[-1], torch.int32) < 0).to(torch.uint8) << 7)

    def truth(self) -> torch.Tensor:
        num_ranks = self._workspace.num_ranks
        queries = [self._op.query_of(rank, num_ranks, self._num_tokens) for rank in range(num_ranks)]
        return reference.query_gather(queries, scale=self._op.scale)
