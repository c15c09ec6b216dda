"""What the gathers have in common in the bench: results are equal to the reference in every byte, or wrong."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dcpkernels.cli import exact, stamps
from dcpkernels.cli.baselines import is_exchange
from dcpkernels.cli.baselines_gather import AllGather
from dcpkernels.cli.bench_op import OURS, BenchOp, Subject


@dataclass(frozen=True, kw_only=True)
class Gather(BenchOp):
    ERROR: ClassVar[str] = "wrong_bytes"
    ERROR_COLUMN: ClassVar[str] = "wrong bytes"
    MAX_ERROR: ClassVar[float] = 0.0

    def copies(self, num_ranks: int) -> int:
        """Of a rank's part, which it stores: on a CPU all ranks map one buffer; to the other GPUs each byte goes, and
        from each of them as much comes, by multicast too."""
        return 1 if self.device == "cpu" else max(num_ranks - 1, 1)

    def wrong(self, name: str, error: float, when: str) -> str:
        return f"{name} must be equal to the reference in every byte {when} (got {error:.0f} wrong bytes"


class GatherSubject(Subject):
    """Candidates return their results, but for bare exchanges, which are steps of the baselines of these names."""

    def __init__(
        self,
        inputs: tuple[torch.Tensor, ...],
        ours: Callable[[], torch.Tensor],
        others: Mapping[str, AllGather],
    ) -> None:
        self._inputs, self.candidates = inputs, {OURS: ours, **others}
        self.bare = {name: other for name, other in others.items() if is_exchange(name)}
        self.candidates |= {name: other.exchange for name, other in self.bare.items()}
        self._stamp = 0
        self._stamp_of: dict[str, int] = {}  # of what the last call of a candidate has read
        self._stamp_in: dict[int, int] = {}  # of what lies at an address: a packed buffer may be the input itself
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
        self._stamp += 1
        self._stamp_of[name] = self._stamp
        if name in self.bare:
            stamps.stamp_bytes(*self._restamped(self.bare[name].packed))
        else:
            for tensor in self._inputs:
                self.stamp(*self._restamped(tensor))

    def _restamped(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A tensor, and what it has to be stamped with to have the current stamp."""
        before = self._stamp_in.get(tensor.data_ptr(), 0)
        self._stamp_in[tensor.data_ptr()] = self._stamp
        return tensor, before ^ self._stamp

    def check(self) -> dict[str, float]:
        truth = self._truth = self.truth()
        return {name: exact.wrong_bytes(self._result(name).cpu(), truth) for name in self.candidates}

    def _result(self, name: str) -> torch.Tensor:
        """Of a bare exchange too: what is timed runs between the other steps of the baseline that it belongs to."""
        if name not in self.bare:
            return self.candidates[name]()
        self.bare[name].pack()
        self.candidates[name]()
        return self.bare[name].unpack()

    def check_last(self, results: Mapping[str, Any]) -> dict[str, float]:
        errors = {}
        for name in self.candidates:
            result = self.bare[name].unpack() if name in self.bare else results[name]
            out = result.cpu().clone(memory_format=torch.contiguous_format)
            # What is packed has the stamp in its bytes, however the input would have it.
            stamp_out = stamps.stamp_bytes if name in self.bare else self.stamp_out
            stamp_out(out, self._stamp_of[name])
            errors[name] = exact.wrong_bytes(out, self._truth)
        return errors
