"""What the gathers have in common in the bench: results are equal to the reference in every byte, or wrong."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from dcpkernels.cli import exact
from dcpkernels.cli.bench_op import OURS, BenchOp, Subject


@dataclass(frozen=True, kw_only=True)
class Gather(BenchOp):
    ERROR: ClassVar[str] = "wrong_bytes"
    ERROR_COLUMN: ClassVar[str] = "wrong bytes"
    MAX_ERROR: ClassVar[float] = 0.0

    def wrong(self, name: str, error: float) -> str:
        return f"{name} must be equal to the reference in every byte before it is timed (got {error:.0f} wrong bytes"


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

    @abstractmethod
    def truth(self) -> torch.Tensor:
        """By the reference, of the inputs of all ranks."""

    def produce(self, name: str) -> None:
        for tensor in self._inputs:
            exact.rewrite(tensor)

    def check(self) -> dict[str, float]:
        truth = self.truth()
        return {name: exact.wrong_bytes(candidate(), truth) for name, candidate in self.candidates.items()}
