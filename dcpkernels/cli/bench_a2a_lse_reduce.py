"""`dcpkernels bench a2a_lse_reduce`: attention's partial outputs, merged by the op or by a packed all-to-all."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

import dcpkernels
from dcpkernels.cli import baselines, measure, stamps
from dcpkernels.cli.bench_op import DTYPES, OURS, BenchOp, Subject
from dcpkernels.cli.verify import Truth, rank_inputs, truth_of_timed_inputs, verify_hard_inputs
from dcpkernels.errors import DcpUnsupported


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
    SWEEPS: ClassVar[tuple[str, ...]] = (*BenchOp.SWEEPS, "wire", "packet_bytes", "zero_copy")

    @classmethod
    def sweeps_unasked(cls, device: str, asked: Container[str]) -> dict[str, tuple[Any, ...]]:
        """A caller on a CPU has the choice of both. Who names a wire means what travels over it."""
        return {"zero_copy": (False, True)} if device == "cpu" and "wire" not in asked else {}

    def canonical(self) -> A2aLseReduce:
        return self if self.wire == "packet" else replace(self, packet_bytes=A2aLseReduce.packet_bytes)

    def require(self) -> None:
        if self.zero_copy and self.device != "cpu":
            raise DcpUnsupported(f"bench: zero_copy must come with device cpu (got {self.device})")

    def describe(self) -> str:
        wire = f"wire {self.wire}" + (f" of {self.packet_bytes} bytes" if self.wire == "packet" else "")
        wire = "zero copy" if self.zero_copy else wire
        return f"{wire}, {self.num_heads} heads, head_dim {self.head_dim}"

    def fields(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "wire": self.wire,
            "packet_bytes": self.packet_bytes if self.wire == "packet" else None,
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

    def input_bytes(self, num_ranks: int, size: int) -> int:
        return num_ranks * size * self.num_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def wrong(self, name: str, error: float, when: str) -> str:
        return f"{name} must be within the error bound {when} (got {error:.3g} times the bound"

    @contextmanager
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> Iterator[Subject]:
        shape, dtype = (size, self.num_heads, self.head_dim), DTYPES[self.dtype]
        device = torch.device(workspace.device)
        with baselines.opened(self.baselines, group, *shape, dtype, mpi_job=mpi_job, device=device) as others:
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
        self._partial_out, self._partial_lse = (
            tensor.to(workspace.device) for tensor in rank_inputs(workspace.rank, *shape, dtype, seed=op.seed)
        )
        out_shape = (num_tokens, workspace.num_local_heads, head_dim)
        self._outs = {name: torch.empty(out_shape, dtype=dtype, device=workspace.device) for name in (OURS, *others)}
        self._ours = _Ours(workspace, self._partial_out, self._partial_lse, self._outs[OURS], op.lse_base)
        self.candidates = {OURS: self._ours}
        for name, other in others.items():
            self.candidates[name] = (
                other.exchange
                if baselines.is_exchange(name)
                else partial(other, self._partial_out, self._partial_lse, self._outs[name])
            )
        self._stamp = self._lse_stamp = 0
        self._stamp_of: dict[str, int] = {}  # of what the last call of a candidate has read
        self._stamp_in = {self._partial_out.data_ptr(): 0}  # of what lies at an address
        # In a burst a zero-copy call may get either of two buffers, and there is no time to write it anew.
        self._stamps_step = 0 if op.zero_copy and op.num_calls > 1 else 1
        self._truth: Truth | None = None

    def produce(self, name: str) -> None:
        self._stamp += self._stamps_step
        self._stamp_of[name] = self._stamp
        if baselines.is_exchange(name):
            stamps.stamp_bytes(*self._restamped(self._others[name].packed))
            return
        stamps.stamp_signs(*self._restamped(self._ours.take_input() if name == OURS else self._partial_out))
        stamps.shift_lse(self._partial_lse, self._lse_stamp, self._stamp)
        self._lse_stamp = self._stamp

    def _restamped(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A tensor, and what it has to be stamped with to have the current stamp."""
        # One that is new is a copy, just made.
        before = self._stamp_in.get(tensor.data_ptr(), self._stamp_in[self._partial_out.data_ptr()])
        self._stamp_in[tensor.data_ptr()] = self._stamp
        return tensor, before ^ self._stamp

    def check(self) -> dict[str, float]:
        op, workspace = self._op, self._workspace
        # First, because with zero copy these inputs are copied into the buffers that the timed ones are to lie in.
        hard = verify_hard_inputs(workspace, self._shape[0], lse_base=op.lse_base, seed=op.seed)
        self._restamped(self._ours.take_input())
        self._ours()
        for name, other in self._others.items():  # all of it, also of one of which less is timed
            other(self._partial_out, self._partial_lse, self._outs[name])
            self._restamped(other.packed)
        rank, num_ranks, dtype = workspace.rank, workspace.num_ranks, DTYPES[op.dtype]
        self._truth = truth_of_timed_inputs(rank, num_ranks, *self._shape, dtype, seed=op.seed)
        errors = {name: self._truth.max_err_over_bound(out) for name, out in self._outs.items()}
        return errors | {OURS: max(errors[OURS], hard)}

    def check_last(self, results: Mapping[str, Any]) -> dict[str, float]:
        errors = {}
        for name, out in self._outs.items():
            if baselines.is_exchange(name):  # what it has received is the truth once it is merged
                stamps.stamp_bytes(self._others[name].received, self._stamp_of[name])
                self._others[name].merge(out)
            else:
                stamps.stamp_signs(out, self._stamp_of[name])
            errors[name] = self._truth.max_err_over_bound(out)
        return errors


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

    def take_input(self) -> torch.Tensor:
        """Where the next call's input is to be written."""
        self._partial_out = self._next()
        return self._partial_out

    def __call__(self) -> None:
        # In a burst only the first call's tensor is written anew.
        partial_out = self._next() if self._partial_out is None else self._partial_out
        self._partial_out = None
        dcpkernels.a2a_lse_reduce(
            partial_out, self._lse, workspace=self._workspace, lse_base=self._lse_base, out=self._out
        )
