"""`dcpkernels bench a2a_lse_reduce`: attention's partial outputs, merged by the op or by a packed all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

import dcpkernels
from dcpkernels.cli import baselines, measure
from dcpkernels.cli.bench_op import DTYPES, OURS, BenchOp, Subject
from dcpkernels.cli.verify import rank_inputs, verify_hard_inputs, verify_timed_inputs


@dataclass(frozen=True, kw_only=True)
class A2aLseReduce(BenchOp):
    """`lse_base` is what the op is told; the LSEs are natural. Tests tell it a wrong one, to see the check fail."""

    tokens: tuple[int, ...] = (1, 8, 64)
    num_heads: int = 96
    head_dim: int = 512
    wire: str = "auto"
    packet_bytes: int = 8
    zero_copy: bool = False
    lse_base: str = "e"

    NAME: ClassVar[str] = "a2a_lse_reduce"
    BASELINES: ClassVar[tuple[str, ...]] = baselines.BASELINES
    SIZES: ClassVar[str] = "tokens"
    SIZE: ClassVar[str] = "num_tokens"
    ERROR: ClassVar[str] = "max_err_over_bound"
    ERROR_COLUMN: ClassVar[str] = "err / bound"
    MAX_ERROR: ClassVar[float] = 1.0

    def describe(self) -> str:
        wire = "zero copy" if self.zero_copy else f"wire {self.wire}"
        return f"{wire}, {self.num_heads} heads, head_dim {self.head_dim}"

    def fields(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "wire": self.wire,
            "zero_copy": self.zero_copy,
        }

    def config(self, num_ranks: int, size: int) -> dcpkernels.WorkspaceConfig:
        return dcpkernels.WorkspaceConfig(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            max_num_tokens=size,
            dtype=DTYPES[self.dtype],
            num_lanes=measure.NUM_LANES,
            cpu_isa=self.isa,
            wire=self.wire,
            packet_bytes=self.packet_bytes,
            zero_copy=self.zero_copy,
        )

    def num_bytes(self, num_ranks: int, size: int) -> int:
        """What goes to the other ranks: their heads' payload, an fp32 LSE per row and head."""
        head_bytes = self.head_dim * DTYPES[self.dtype].itemsize + 4
        return (num_ranks - 1) * size * (self.num_heads // num_ranks) * head_bytes

    def wrong(self, name: str, error: float) -> str:
        return f"{name} must be within the error bound before it is timed (got {error:.3g} times the bound"

    @contextmanager
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> Iterator[Subject]:
        shape, dtype = (size, self.num_heads, self.head_dim), DTYPES[self.dtype]
        with baselines.opened(self.baselines, group, *shape, dtype, mpi_job=mpi_job) as others:
            yield _Merge(self, workspace, others, shape)


class _Merge(Subject):
    def __init__(
        self,
        op: A2aLseReduce,
        workspace: dcpkernels.Workspace,
        others: dict[str, baselines.PackedAllToAll],
        shape: tuple[int, int, int],
    ) -> None:
        self._op, self._workspace, self._others, self._shape = op, workspace, others, shape
        num_tokens, _, head_dim = shape
        dtype = DTYPES[op.dtype]
        self._partial_out, self._partial_lse = rank_inputs(workspace.rank, *shape, dtype, seed=op.seed)
        self._outs = {
            name: torch.empty(num_tokens, workspace.num_local_heads, head_dim, dtype=dtype) for name in (OURS, *others)
        }
        self._ours = _Ours(workspace, self._partial_out, self._partial_lse, self._outs[OURS], op.lse_base)
        self.candidates = {OURS: self._ours}
        self._inputs = {}
        for name, other in others.items():
            if baselines.is_exchange(name):
                self.candidates[name], self._inputs[name] = other.exchange, other.packed
            else:
                self.candidates[name] = partial(other, self._partial_out, self._partial_lse, self._outs[name])
                self._inputs[name] = self._partial_out

    def produce(self, name: str) -> None:
        if name == OURS:
            self._ours.produce()
        else:
            self._inputs[name].add_(0)

    def check(self) -> dict[str, float]:
        op, workspace = self._op, self._workspace
        self._ours.produce()
        self._ours()
        for name, other in self._others.items():  # all of it, also of one of which less is timed
            other(self._partial_out, self._partial_lse, self._outs[name])
        rank, num_ranks, dtype = workspace.rank, workspace.num_ranks, DTYPES[op.dtype]
        errors = verify_timed_inputs(self._outs, rank, num_ranks, *self._shape, dtype, seed=op.seed)
        hard = verify_hard_inputs(workspace, self._shape[0], lse_base=op.lse_base, seed=op.seed)
        return errors | {OURS: max(errors[OURS], hard)}


class _Ours:
    """The op on one rank's input, which lies where the configuration wants it."""

    def __init__(self, workspace: dcpkernels.Workspace, attention: torch.Tensor, lse: torch.Tensor,
                 out: torch.Tensor, lse_base: str) -> None:  # fmt: skip
        self._workspace, self._attention, self._lse, self._out, self._lse_base = (
            workspace,
            attention,
            lse,
            out,
            lse_base,
        )
        self._zero_copy = workspace.config.zero_copy
        self._partial_out: torch.Tensor | None = attention
        self._filled = {attention.data_ptr()}  # buffers that hold the values already

    def _next(self) -> torch.Tensor:
        partial_out = self._workspace.partial_out(len(self._attention)) if self._zero_copy else self._attention
        if partial_out.data_ptr() not in self._filled:
            self._filled.add(partial_out.copy_(self._attention).data_ptr())
        return partial_out

    def produce(self) -> None:
        self._partial_out = self._next().add_(0)

    def __call__(self) -> None:
        # In a burst only the first call's tensor is written anew.
        partial_out = self._next() if self._partial_out is None else self._partial_out
        self._partial_out = None
        dcpkernels.a2a_lse_reduce(
            partial_out, self._lse, workspace=self._workspace, lse_base=self._lse_base, out=self._out
        )
