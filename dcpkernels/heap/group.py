"""Who takes part: the one interface through which a heap and its verdicts talk to the other ranks.

Two kinds of group exist. `TorchGroup` wraps a torch.distributed process group: ranks are processes. A thread
group (`dcpkernels.testing`) has all ranks in one process. The heap asks `exchange_regions` which kind it has.
"""

from __future__ import annotations

import pickle
import secrets
import time
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from dcpkernels.errors import DcpInvalidArgument, DcpTimeout

SLICE_S = 0.05


class Deadline:
    """A point in time that several waits share. `Deadline(0)` never comes."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s if timeout_s > 0 else None

    def remaining_s(self) -> float:
        """Seconds left, 0.0 when it has passed, infinity when it never comes."""
        return float("inf") if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining_s() == 0.0

    def for_call(self) -> float:
        """What is left, as a `timeout_s` for one more call: 0 only when there is no deadline."""
        return 0.0 if self._at is None else max(self.remaining_s(), 1e-3)


@runtime_checkable
class Group(Protocol):
    """What a heap needs of a group. Both methods are collective: every rank calls them, in the same order."""

    rank: int
    num_ranks: int

    def all_gather_object(self, obj: Any, *, timeout_s: float = 0.0) -> list[Any]:
        """Every rank's `obj`, in rank order.

        `timeout_s` bounds the wait where the transport can (0 = the transport's own limit). On expiry the
        call raises DcpTimeout, with the missing ranks in `.ranks` where they are known; when a rank is known
        to be dead, DcpPeerLost. `obj` is small and picklable; a thread group may hand over the object itself.
        """
        ...

    def exchange_regions(self, region: Any, *, timeout_s: float = 0.0) -> list[Any] | None:
        """Hands this rank's region to the others, where that is possible without the operating system.

        Thread group: collective; returns every rank's region *object* (the very same objects, in rank order,
        never a copy and never a second mapping), so that an address means the same to every rank and
        ThreadSanitizer sees one location, not two. Raises as `all_gather_object` does.
        Process group: returns None at once, without talking to anybody; the heap then passes descriptors over
        sockets.
        Either way the answer (None or a list) is the same on every rank. `region` may be None, from a rank that
        has none to hand over; a heap asks with None on all ranks only to learn the kind.
        """
        ...

    def duplicate(self, *, timeout_s: float = 0.0, beside: Exchange | None = None) -> Exchange:
        """Collective. The same ranks in the same order, for exchanges that mix with nobody else's messages.

        `beside`: an earlier one, which the same ranks use at the same time: a lost rank is lost to both."""
        ...


class Exchange(Protocol):
    """What `Group.duplicate` makes. One thread of a rank uses it at a time."""

    rank: int
    num_ranks: int

    def all_to_all(
        self,
        receive: Any,
        send: Any,
        receive_sizes: list[int],
        send_sizes: list[int],
        *,
        timeout_s: float = 0.0,
        note: int = 0,
    ) -> None:
        """Collective. Moves bytes between tensors: `send` holds a chunk for each rank, one after the other, of
        `send_sizes` bytes; `receive` gets one from each. `note` says what it is for, to those who ask `awaited_by`.

        `timeout_s` bounds the wait (0 = for ever). Raises DcpTimeout or DcpPeerLost, with the missing ranks in
        `.ranks` where they are known. After that no exchange succeeds any more, on any rank.
        """
        ...

    def all_gather(self, buffer: Any, sizes: list[int], *, timeout_s: float = 0.0, note: int = 0) -> None:
        """Collective. `buffer` holds a chunk of each rank, one after the other, of `sizes` bytes, which are the same on
        all ranks. The own chunk is there, the others come. Otherwise as `all_to_all`."""
        ...

    def awaited_by(self, rank: int) -> tuple[int, int] | None:
        """(number, note) of the exchange in which `rank` waits for this one, which has not come to it; or None."""
        ...

    def close(self) -> None:
        """Local, does not wait."""
        ...


class TorchGroup:
    """A torch.distributed process group; `None` is the default group.

    Ranks are ranks inside the group, in the group's own order, also where that is not the order of the global
    ranks.
    """

    def __init__(self, process_group: Any = None) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise DcpInvalidArgument("group: torch.distributed must be initialised (init_process_group not called)")
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.num_ranks: int = dist.get_world_size(process_group)
        if self.rank < 0:
            raise DcpInvalidArgument(f"group: must have this process in it (global rank {dist.get_rank()} is not)")
        try:
            backends = dist.get_backend_config(process_group)
        except (ValueError, AssertionError, RuntimeError):  # a group that did not come out of new_group
            backends = ""
        # Only gloo's wait honours a deadline on host tensors. Without one, a rank that dies is noticed by its
        # two neighbours in gloo's ring, and by everybody else only when those exit or after the group's 30
        # minutes.
        self._has_deadline = "cpu:gloo" in backends

    def all_gather_object(self, obj: Any, *, timeout_s: float = 0.0) -> list[Any]:
        import torch.distributed as dist

        if not self._has_deadline or timeout_s <= 0:
            gathered: list[Any] = [None] * self.num_ranks
            dist.all_gather_object(gathered, obj, group=self.process_group)
            return gathered
        import torch

        deadline = Deadline(timeout_s)
        message = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = [int(size) for size in self._gather(torch.tensor([message.numel()]), deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: message.numel()] = message
        parts = self._gather(padded, deadline)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, tensor: Any, deadline: Deadline) -> list[Any]:
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._finish(dist.all_gather(parts, tensor, group=self.process_group, async_op=True), deadline)
        return parts

    def _finish(self, work: Any, deadline: Deadline) -> None:
        """Waits for `work` in slices, because Ctrl-C is not seen inside a wait."""
        while True:
            try:
                # Never 0, which is the group's default to torch.
                work.wait(timedelta(seconds=max(min(deadline.remaining_s(), SLICE_S), 1e-3)))
                return
            except RuntimeError as error:
                if work.is_completed():  # it has failed; or it has ended just after the slice
                    work.wait()
                    return
                if deadline.expired:
                    text = f"not all ranks answered within {deadline.timeout_s:.3g} s"
                    raise DcpTimeout(text) from error

    def duplicate(self, *, timeout_s: float = 0.0, beside: Exchange | None = None) -> Exchange:
        import torch.distributed as dist

        from dcpkernels.heap.gloo import GlooGroup  # it needs what is in this file

        deadline = Deadline(timeout_s)
        name = self.all_gather_object(secrets.token_hex(16), timeout_s=deadline.for_call())[0]
        # torch has no public name for it.
        store = dist.PrefixStore(f"dcpkernels/{name}", dist.distributed_c10d._get_default_store())
        # Half of the time is kept for the verdict on this step; a store may take a second longer than it was told.
        earlier = beside if isinstance(beside, GlooGroup) else None
        return GlooGroup(store, self.rank, self.num_ranks, timeout_s=deadline.for_call() / 2, beside=earlier)

    def exchange_regions(self, region: Any, *, timeout_s: float = 0.0) -> None:
        return None


def as_group(obj: Any = None) -> Group:
    """`obj` itself when it is a Group already; otherwise a TorchGroup around it, a process group or None = WORLD."""
    if isinstance(obj, Group):
        return obj
    if obj is not None and not all(callable(getattr(obj, name, None)) for name in ("rank", "size")):
        got = type(obj).__name__
        raise DcpInvalidArgument(f"group: must be a torch ProcessGroup, None or a Group (got {got})")
    return TorchGroup(obj)
