"""Sums over rank processes of one machine through memory, for tests of many small ones. gloo's go through sockets: eight
ranks spend half of their processor time there, on what is not under test."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from dcpkernels.kimi_k3.parallel import TensorParallel


@dataclass
class _Room:
    slots: torch.Tensor  # [2, size, elements]: one for each rank, in turns
    pipes: list[int]  # one for each rank; it reads its own
    num_sums: int = 0


@dataclass(frozen=True)
class SharedSum(TensorParallel):
    """Like TensorParallel, with an all_reduce of up to `room.slots.shape[2]` float32 elements."""

    room: _Room | None = field(default=None, compare=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup, max_elements: int = 1 << 17) -> SharedSum:
        """Collective."""
        rank, size = group.rank(), group.size()
        with tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder, src=0, group=group)
            pipe = Path(folder[0], f"pipe{rank}")
            os.mkfifo(pipe)
            dist.barrier(group)
            # For reading too, even where it is written only: then nobody waits for the other end.
            pipes = [os.open(Path(folder[0], f"pipe{peer}"), os.O_RDWR) for peer in range(size)]
            shape = (2, size, max_elements)
            file = str(Path(folder[0], "slots"))
            slots = torch.from_file(file, shared=True, size=2 * size * max_elements, dtype=torch.float32).view(shape)
            dist.barrier(group)  # the folder may go
        return cls(rank, size, group, _Room(slots, pipes))

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum in rank order, in place."""
        # Who comes to the next sum has read this one, so that its slots are free for the one after that.
        slots = self.room.slots[self.room.num_sums % 2, :, : partial.numel()]
        self.room.num_sums += 1
        slots[self.rank] = partial.reshape(-1)
        self._meet()
        total = slots[0].clone()
        for other in slots[1:]:
            total += other
        return partial.copy_(total.view_as(partial))

    def _meet(self) -> None:
        """Returns when all ranks have come."""
        pipes, others = self.room.pipes, self.size - 1
        if self.rank == 0:
            came = 0
            while came < others:
                came += len(os.read(pipes[0], others - came))
            for pipe in pipes[1:]:
                os.write(pipe, b".")
        else:
            os.write(pipes[0], b".")
            os.read(pipes[self.rank], 1)
