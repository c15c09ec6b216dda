"""The stated lower bound of a collective between GPUs: its bytes at the rate of plain copies to the other GPUs.

Copies of as few bytes as most calls move would be times of launches, and no lower bound. So a block is copied that is
large enough to fill the links, and the floor is the part of its time that the call's bytes are of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ROUNDS = 20
_WARMUP = 2
BLOCK_BYTES = 256 << 20  # half a millisecond or more on today's links: a launch is a few microseconds


class Copies:
    """A block to the other GPUs, in equal shares, all at the same time: where every two GPUs have a link of their own, a
    single share would use one of them. With one GPU, a copy within its memory.

    Every share is of torch's own memory on the peer's device, which costs this process a context there.
    """

    def __init__(self, rank: int, num_ranks: int, num_bytes: int) -> None:
        peers = [(rank + i) % num_ranks for i in range(1, num_ranks)] or [rank]
        share = max(num_bytes // len(peers), 1)
        self.num_bytes = share * len(peers)
        self._source = torch.ones(share, dtype=torch.uint8, device=f"cuda:{rank}")
        self._targets = [torch.zeros(share, dtype=torch.uint8, device=f"cuda:{peer}") for peer in peers]
        self._streams = [torch.cuda.Stream() for _ in peers]

    def __call__(self) -> None:
        """Enqueues them: after what is on the current stream, before what follows there."""
        current = torch.cuda.current_stream()
        for stream, target in zip(self._streams, self._targets, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(self._source, non_blocking=True)
        for stream in self._streams:  # in a loop of its own: else each copy would wait for the one before it
            current.wait_stream(stream)


def samples_us(
    num_bytes: int,
    rank: int,
    num_ranks: int,
    barrier: Callable[[], None],
    time_us: Callable[[Callable[[], object]], float],
) -> list[float]:
    """How long `num_bytes` take at the rate of copies from this rank, in each round, while every other rank copies too.

    Args:
        barrier: of all ranks, on the current stream.
        time_us: runs a function and says how long the device took for what it enqueued.
    """
    if num_bytes == 0:
        return [0.0] * ROUNDS
    copies, times = Copies(rank, num_ranks, BLOCK_BYTES), []
    for round_idx in range(-_WARMUP, ROUNDS):
        barrier()
        elapsed = time_us(copies)
        if round_idx >= 0:
            times.append(elapsed * num_bytes / copies.num_bytes)
    return times


def of_all_ranks_us(samples: Sequence[Sequence[float]]) -> float:
    """Of samples[rank][round]: the slowest rank's, in the best round."""
    return min(max(times) for times in zip(*samples, strict=True))
