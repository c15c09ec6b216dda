"""What the gathers' baselines have in common: a part of every rank, exchanged by one all-gather of gloo or of Open MPI, or of
what GPUs have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from dcpkernels.cli import baselines_gpu, openmpi
from dcpkernels.cli.baselines import BASELINES as NAMES  # noqa: F401  the same peers, and with them the same names
from dcpkernels.cli.baselines import uses_openmpi
from dcpkernels.cli.exact import all_gather

# Makes, of the tensors (recv, send), what gathers them: send [n, ...] of each rank to recv [W * n, ...], rank-major.
Exchange = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]


@contextmanager
def exchanges(
    names: Sequence[str], group: dist.ProcessGroup, mpi_job: str | None, device: torch.device
) -> Iterator[Mapping[str, Exchange]]:
    """In a rank process: how the baselines of these names exchange, which are to be made with `device` as torch's default
    device. `mpi_job` is of `openmpi.job`."""
    if device.type != "cpu":
        with baselines_gpu.exchanges(names, group) as on_gpu:
            yield on_gpu
        return
    by_gloo = partial(_by_gloo, group)
    with openmpi.joined(mpi_job, group.rank(), group.size()) if mpi_job is not None else nullcontext() as comm:
        yield {name: partial(openmpi.all_gather, comm) if uses_openmpi([name]) else by_gloo for name in names}


def _by_gloo(group: dist.ProcessGroup, recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
    return partial(all_gather, recv, send, group=group)


class AllGather(ABC):
    """A gather in three steps, of which the bare baselines time the second one: the first puts this rank's part into
    `packed`, the last one makes the result of what has arrived."""

    packed: torch.Tensor
    exchange: Callable[[], object]

    @abstractmethod
    def pack(self) -> None: ...

    @abstractmethod
    def unpack(self) -> torch.Tensor: ...

    def __call__(self) -> torch.Tensor:
        self.pack()
        self.exchange()
        return self.unpack()
