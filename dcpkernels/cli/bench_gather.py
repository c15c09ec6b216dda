"""What the gathers have in common in the bench: results are equal to the reference in every byte, or wrong."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from dcpkernels.cli import exact, stamps
from dcpkernels.cli.bench_op import OURS, BenchOp, Subject


@dataclass(frozen=True, kw_only=True)
class Gather(BenchOp):
    ERROR: ClassVar[str] = "wrong_bytes"
    ERROR_COLUMN: ClassVar[str] = "wrong bytes"
    MAX_ERROR: ClassVar[float] = 0.0

    def wrong(self, name: str, error: float, when: str) -> str:
        return f"{name} must be equal to the reference in every byte {when} (got {error:.0f} wrong bytes"


class GatherSubject(Subject):
    """Candidates return their results."""

    candidates: dict[str, Callable[[], torch.Tensor]]

    def __init__(
        self,
        inputs: tuple[torch.Tensor, ...],
        ours: Callable[[], torch.Tensor],
        others: Mapping[str, Callable[[], torch.Tensor]],
    ) -> None:
        self._inputs, self.candidates = inputs, {OURS: ours, **others}
        self._stamp = 0  # of the inputs
        self._stamp_of: dict[str, int] = {}  # of the inputs of a candidate's last call
        self._truth: torch.Tensor | None = None

    @abstractmethod
    def truth(self) -> torch.Tensor:
        """By the reference, of the unstamped inputs of all ranks."""

    def stamp(self, tensor: torch.Tensor, stamp: int) -> None:
        """Of an input."""
        stamps.stamp_bytes(tensor, stamp)

    def stamp_out(self, out: torch.Tensor, stamp: int) -> None:
        """Does to a contiguous result what stamping the inputs has done to it: then it is the truth again."""
        stamps.stamp_bytes(out, stamp)

    def produce(self, name: str) -> None:
        stamp = self._stamp + 1
        for tensor in self._inputs:
            self.stamp(tensor, self._stamp ^ stamp)
        self._stamp = self._stamp_of[name] = stamp

    def check(self) -> dict[str, float]:
        truth = self._truth = self.truth()
        return {name: exact.wrong_bytes(candidate().cpu(), truth) for name, candidate in self.candidates.items()}

    def check_last(self, results: Mapping[str, torch.Tensor]) -> dict[str, float]:
        errors = {}
        for name in self.candidates:
            out = results[name].cpu().clone(memory_format=torch.contiguous_format)
            self.stamp_out(out, self._stamp_of[name])
            errors[name] = exact.wrong_bytes(out, self._truth)
        return errors
