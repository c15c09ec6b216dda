"""What `bench` has to know of an op. Each op has its class in `bench_<op>.py`; the fields are its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import dcpkernels
from dcpkernels.cli import baselines_gpu
from dcpkernels.cli.bench_device import for_device

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
        """Writes the input of that candidate anew, with another stamp (`stamps`), and does what a decode step does
        between two calls. Not timed. All ranks make the same calls of it."""

    @abstractmethod
    def check(self) -> dict[str, float]:
        """Runs every candidate: how wrong its result is on this rank, as `BenchOp.ERROR` counts it. Collective."""

    @abstractmethod
    def check_last(self, results: Mapping[str, Any]) -> dict[str, float]:
        """As `check`, of what the last call of each candidate has left behind, or returned: `results`."""


class Kept:
    """A candidate whose last result can still be had."""

    __slots__ = ("_candidate", "result")

    def __init__(self, candidate: Callable[[], object]) -> None:
        self._candidate, self.result = candidate, None

    def __call__(self) -> None:
        self.result = self._candidate()


@dataclass(frozen=True, kw_only=True)
class BenchOp(ABC):
    """An op, and how it is to be timed. Each of `ranks` with each of `sizes`, its calls' tokens or rows, makes a row.

    Of the fields in SWEEPS the command line takes lists: each combination is an object of its own.
    """

    device: str = "cpu"
    mode: str | None = None  # of the device's; None is its default
    ranks: tuple[int, ...] = (2,)
    dtype: str = "bf16"
    baselines: tuple[str, ...] = ("gloo",)
    isa: str | None = None
    iters: int = 200
    warmup: int = 3
    turn: int = 8
    burst: int | None = None  # calls of a sample; None is what the device has for its mode
    skew_us: float = 0.0
    seed: int = 0

    NAME: ClassVar[str]
    BASELINES: ClassVar[tuple[str, ...]]  # on a CPU
    SIZES: ClassVar[str]  # field and option with the sizes
    SIZE: ClassVar[str]  # one of them, in the JSON
    ERROR: ClassVar[str]  # what is wrong with a result, in the JSON
    ERROR_COLUMN: ClassVar[str]
    MAX_ERROR: ClassVar[float]
    SWEEPS: ClassVar[tuple[str, ...]] = ("dtype", "mode", "skew_us")

    @classmethod
    def sweeps_unasked(cls, device: str, asked: Container[str]) -> dict[str, tuple[Any, ...]]:
        """Of the fields in SWEEPS, what the command line sweeps over where it is not told, with the options `asked` for."""
        return {}

    @property
    def sizes(self) -> tuple[int, ...]:
        return getattr(self, self.SIZES)

    @property
    def num_calls(self) -> int:
        """Of a sample."""
        return self.burst or for_device(self.device, self.mode).calls_per_sample(self.skew_us)

    @property
    def known_baselines(self) -> tuple[str, ...]:
        return self.BASELINES if self.device == "cpu" else baselines_gpu.BASELINES

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
    def input_bytes(self, num_ranks: int, size: int) -> int:
        """Of one call, of all ranks together."""

    @abstractmethod
    def wrong(self, name: str, error: float, when: str) -> str:
        """What must hold of the result of a candidate then, for example "before it is timed", and what was found."""

    @abstractmethod
    def opened(
        self, workspace: dcpkernels.Workspace, group: torch.distributed.ProcessGroup, size: int, mpi_job: str | None
    ) -> AbstractContextManager[Subject]:
        """In a rank process, collective. `mpi_job` is of `openmpi.job`, where a baseline needs one."""

    def require(self) -> None:
        """Raises DcpInvalidArgument or DcpUnsupported for options that do not fit together."""

    def canonical(self) -> BenchOp:
        """The same rows, with defaults for options that have no effect beside the others."""
        return self
