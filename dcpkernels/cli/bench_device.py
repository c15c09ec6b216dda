"""What `bench` has to know of a device: where tensors lie, how ranks take their places, how calls are timed.

One object in each rank process, for one row. The command itself, which runs no op, only asks it for `modes` and
`require`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from dcpkernels.errors import DcpUnsupported
from dcpkernels.testing.timing import max_over_ranks


class Times(NamedTuple):
    """One rank's samples of one candidate, in the order in which they were taken. All ranks have as many.

    `entered_ns` and `returned_ns` are readings of a clock that all ranks have in common, at the entry to a sample's
    first call and the return from its last one. Empty where there is no such clock.
    """

    own_us: list[float]  # from this rank's entry to its own return, of one call: a sample is the mean of its calls
    entered_ns: Sequence[int] = ()
    returned_ns: Sequence[int] = ()
    host_us: Sequence[float] = ()  # what a call keeps the host, where calls only enqueue


class BenchDevice(ABC):
    """Subclasses: `measure.CpuBench`; for GPUs `measure_gpu.GpuBench`, imported when it is asked for.

    In a rank: `open_rank`, then the workspace and the baselines are made, then `bind_rank`, then calls.
    """

    name: ClassVar[str]  # the value of --device
    modes: ClassVar[tuple[str, ...]]  # how calls can be issued, the default one first
    rank: int
    num_ranks: int

    def __init__(self, mode: str) -> None:
        self.mode = mode

    @abstractmethod
    def require(self, isa: str | None, num_ranks: Sequence[int]) -> str:
        """In the command, before any rank is started: the kernel variant that rows will have run.

        Raises DcpUnsupported for what would fail in every rank: no such device, no built target, no such variant.
        """

    def calls_per_sample(self, skew_us: float) -> int:
        """Where nobody asks for a number."""
        return 1

    def require_samples(self, num_calls: int, skew_us: float) -> None:
        """Raises DcpUnsupported for samples that cannot be timed here."""

    def describe(self) -> dict[str, Any]:
        """What a row's `machine` has to say besides the host: the accelerators' name and number, their driver."""
        return {}

    def open_rank(self, rank: int, num_ranks: int) -> None:
        """Takes this rank's place, before the workspace is made."""
        self.rank, self.num_ranks = rank, num_ranks

    def bind_rank(self) -> None:
        """What may only be done when the workspace and all baselines are there."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Of this rank's workspace and tensors."""

    @abstractmethod
    def take_turns(
        self,
        candidates: Mapping[str, Callable[[], object]],
        barrier: Callable[[], None],
        *,
        iters: int,
        warmup: int,
        num_calls: int,
        turn: int,
        produce: Callable[[str], object],
        skew_us: float,
        progress: Callable[[], object] = lambda: None,
    ) -> dict[str, Times]:
        """`iters` samples of each candidate on this rank, as `measure.take_turns` says. Collective: all ranks call it
        with the same arguments. When it returns, this rank's last calls are done, also on the device.

        Args:
            produce: writes a candidate's input anew, untimed, before each sample.
            skew_us: how far the entries of the first and the last rank into a sample are apart; `skew.Skew` says who
                is late.
            progress: to be called once a sample, untimed.
        """

    @abstractmethod
    def floor_samples_us(self, num_bytes: int, barrier: Callable[[], None]) -> list[float]:
        """Times on this rank, in microseconds, of the stated lower bound: `num_bytes` copied once. Collective."""

    @abstractmethod
    def floor_us(self, samples_us: Sequence[Sequence[float]]) -> float:
        """The floor of the row, of samples_us[rank][round]. In the command's process."""

    def collective_us(self, per_rank: Sequence[Times], *, num_calls: int, skew_us: float) -> list[float]:
        """Microseconds of one call of the collective, by sample, of all ranks' times.

        Without skew: from each rank's own entry, the slowest rank's. With skew, where early ranks wait for late ones:
        from the entry of the last rank to the return of the last.
        """
        if not skew_us:
            return max_over_ranks([times.own_us for times in per_rank])
        entered = [max(sample) for sample in zip(*(times.entered_ns for times in per_rank), strict=True)]
        returned = [max(sample) for sample in zip(*(times.returned_ns for times in per_rank), strict=True)]
        return [(end - start) / 1e3 / num_calls for start, end in zip(entered, returned, strict=True)]

    def entry_spread_us(self, per_rank: Sequence[Times]) -> list[float]:
        """By sample: how far the entries of the first and the last rank were apart. Empty without a common clock."""
        entered = zip(*(times.entered_ns for times in per_rank), strict=True)
        return [(max(sample) - min(sample)) / 1e3 for sample in entered]


DEVICES = ("cpu", "cuda")  # "cuda" is torch's name for the GPUs of both vendors


def for_device(name: str, mode: str | None = None) -> BenchDevice:
    """Of --device and --mode; None is the device's default. Raises DcpUnsupported for what there is not."""
    kind = _kind(name)
    if mode is not None and mode not in kind.modes:
        raise DcpUnsupported(f"bench: mode must be of {', '.join(kind.modes)} with device {name} (got {mode})")
    return kind(mode or kind.modes[0])


def _kind(name: str) -> type[BenchDevice]:
    if name == "cpu":
        from dcpkernels.cli.measure import CpuBench

        return CpuBench
    if name == "cuda":
        from dcpkernels.cli.measure_gpu import GpuBench

        return GpuBench
    raise DcpUnsupported(f"bench: device must be of {', '.join(DEVICES)} (got {name!r})")
