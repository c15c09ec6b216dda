"""What `bench` has to know of an op. Each op has its class in `bench_<op>.py`; the fields are its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import dcpkernels

OURS = "dcpkernels"
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}


class Subject(ABC):
    """In a rank process, for one row: the op and the baselines on this rank's part of one input."""

    candidates: dict[str, Callable[[], object]]  # the op is the first one

    @abstractmethod
    def produce(self, name: str) -> None:
        """Writes the input of that candidate anew, and does what a decode step does between two calls. Not timed."""

    @abstractmethod
    def check(self) -> dict[str, float]:
        """Runs every candidate: how wrong its result is on this rank, as `BenchOp.ERROR` counts it. Collective."""


@dataclass(frozen=True, kw_only=True)
class BenchOp(ABC):
    """An op, and how it is to be timed. `sizes` are its calls' tokens or rows, of which each makes a row of the bench."""

    device: str = "cpu"
    ranks: tuple[int, ...] = (2,)
    dtype: str = "bf16"
    baselines: tuple[str, ...] = ("gloo",)
    isa: str | None = None
    iters: int = 200
    warmup: int = 3
    turn: int = 8
    burst: int = 1
    seed: int = 0

    NAME: ClassVar[str]
    BASELINES: ClassVar[tuple[str, ...]]
    SIZES: ClassVar[str]  # field and option with the sizes
    SIZE: ClassVar[str]  # one of them, in the JSON
    ERROR: ClassVar[str]  # what is wrong with a result, in the JSON
    ERROR_COLUMN: ClassVar[str]
    MAX_ERROR: ClassVar[float]

    @property
    def sizes(self) -> tuple[int, ...]:
        return getattr(self, self.SIZES)

    @abstractmethod
    def describe(self) -> str:
        """The options in words, for the line above the table."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The options as the JSON has them."""

    @abstractmethod
    def config(self, num_ranks: int, size: int) -> dcpkernels.WorkspaceConfig:
        """Of the workspace that is timed. The barrier has its last lane for merges without tokens."""

    @abstractmethod
    def num_bytes(self, num_ranks: int, size: int) -> int:
        """What one rank has to store in one call."""

    @abstractmethod
    def wrong(self, name: str, error: float) -> str:
        """What must hold of the result of a candidate, and what was found."""

    @abstractmethod
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> AbstractContextManager[Subject]:
        """In a rank process, collective. `mpi_job` is of `openmpi.job`, where a baseline needs one."""

    def require(self) -> None:
        """Raises DcpInvalidArgument or DcpUnsupported for options that do not fit together."""
