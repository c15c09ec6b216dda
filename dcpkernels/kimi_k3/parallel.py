"""Tensor parallelism as the layers need it: which part of a weight is this rank's, and sums over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dcpkernels.errors import DcpInvalidArgument


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group.

    Args:
        rank, size: of this rank, and of all.
        group: the torch.distributed group of these ranks; None = the default group. Not used when size is 1.

    Raises DcpInvalidArgument for a rank outside of 0 .. size - 1.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DcpInvalidArgument(f"kimi_k3: rank must be in 0 .. size-1={self.size - 1} (got {self.rank})")

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorParallel:
        """This process's place in `group`."""
        return cls(group.rank(), group.size(), group)

    def share(self, name: str, count: int) -> int:
        """How many of `count` are each rank's. Raises DcpInvalidArgument if they do not divide."""
        if count % self.size:
            raise DcpInvalidArgument(f"kimi_k3: {name} must be divisible by num_ranks={self.size} (got {count})")
        return count // self.size

    def range(self, name: str, count: int) -> range:
        """Which of `count` are this rank's."""
        share = self.share(name, count)
        return range(self.rank * share, (self.rank + 1) * share)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place. The same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial
