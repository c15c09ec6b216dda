"""What all ops of the collective backend share: a stream for each op and lane, on which calls come one after the other,
and the fault that ends them all.

Every stream has a group of its own: what the caller sends over his group, or other ops in whatever thread, does not mix
with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dcpkernels._faults import INTERRUPTED, MISMATCH, PEER_LOST, TIMEOUT, fault_error
from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap.group import Deadline, Exchange, Group
from dcpkernels.region_layout import RegionLayout

# Between two looks at whether a late rank waits in another stream: streams in several threads do so for moments all the
# time.
_SECOND_LOOK_S = 0.15


class Stream:
    """The calls of one op on one lane."""

    def __init__(self, group: Exchange, lane: int) -> None:
        self.group, self.lane = group, lane
        self.busy = threading.Lock()
        self.num_calls = 0  # that were completed
        self.started_s = 0.0


class Refused(Exception):
    """All ranks make this call, and it may not be made now: `kind` as in dcpkernels._faults; `other_call` is in its way."""

    def __init__(self, kind: int, other_call: int) -> None:
        self.kind, self.other_call = kind, other_call


class Streams:
    """Those of one rank."""

    def __init__(
        self,
        group: Group,
        layout: RegionLayout,
        module: Any,
        *,
        timeout_s: float,
        first_call_timeout_s: float,
        deadline: Deadline,
    ) -> None:
        """Collective: makes the groups."""
        self._module = module
        self._timeout_s, self._first_call_timeout_s = timeout_s, first_call_timeout_s
        self.fault: dict[str, Any] | None = None
        self.closed = False
        self._streams: dict[tuple[str, int], Stream] = {}
        try:
            first = None
            for op in layout.ops:
                for lane in range(layout.num_lanes):
                    exchange = group.duplicate(timeout_s=deadline.for_call(), beside=first)
                    first = first or exchange
                    self._streams[op, lane] = Stream(exchange, lane)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, op_and_lane: tuple[str, int]) -> Stream:
        return self._streams[op_and_lane]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def deadline_s(self, stream: Stream) -> float:
        return self._timeout_s if stream.num_calls else self._first_call_timeout_s

    # -- calls

    def run_local(self, stream: Stream, step: Callable[[], int]) -> int:
        """A step that no other rank takes part in. `step()` gives a status; it is not run while a call is in flight."""
        if not stream.busy.acquire(blocking=False):
            return self._module.STATUS_CLOSED if self.closed else self._module.STATUS_BUSY
        try:
            return step()
        finally:
            stream.busy.release()

    def run(
        self,
        stream: Stream,
        descriptor: int,
        *,
        prepare: Callable[[], int],
        move: Callable[[], None],
        discard: Callable[[], None] = lambda: None,
    ) -> int:
        """A call of all ranks. `prepare()` takes the arguments: 0, or a status, and then nothing is sent. When all ranks
        are known to make this call, `move()` does it, or raises `Refused`. `discard()` follows a fault."""
        return self.run_local(stream, lambda: prepare() or self._run_claimed(stream, descriptor, move, discard))

    def _run_claimed(
        self, stream: Stream, descriptor: int, move: Callable[[], None], discard: Callable[[], None]
    ) -> int:
        try:
            if self.fault is None:
                self._exchange_calls(stream, descriptor)
                move()
        except (DcpTimeout, Refused, _Mismatch) as error:
            self._note(self._call_elsewhere(stream, descriptor, error) or error, stream, descriptor)
        except BaseException:  # an interrupt: what the peers get is not known any more
            self._note(DcpError("interrupted"), stream, descriptor)
            discard()
            raise
        if self.fault is not None:
            discard()
            return self._module.STATUS_FAULTED
        stream.num_calls += 1
        return 0

    def _exchange_calls(self, stream: Stream, descriptor: int) -> None:
        """Every rank learns every rank's call, before any row is sent."""
        num_ranks = stream.group.num_ranks
        send = torch.full((num_ranks,), descriptor)
        receive = torch.empty_like(send)
        stream.started_s = time.monotonic()
        size = [send.element_size()] * num_ranks
        stream.group.all_to_all(
            receive.view(torch.uint8),
            send.view(torch.uint8),
            size,
            size,
            timeout_s=self.deadline_s(stream),
            note=descriptor,
        )
        calls = receive.tolist()
        for rank, call in enumerate(calls):
            if call != calls[0]:  # every rank has the same list, and says the same of it
                raise _Mismatch(rank, call, reporter=0, reporters_call=calls[0])

    def _call_elsewhere(self, stream: Stream, descriptor: int, error: Exception) -> _Mismatch | None:
        """Why a rank did not come, if it waits in another stream for this one: the two made different calls. Of all ranks
        that wait somewhere, the first one and the first that is in another stream than it: so all name the same two."""
        if not isinstance(error, DcpTimeout) or isinstance(error, DcpPeerLost):
            return None
        waits = [
            (other, rank, waited)
            for other in self
            if other is not stream
            for rank in error.ranks
            if rank != stream.group.rank and (waited := other.group.awaited_by(rank)) is not None
        ]
        if waits:
            time.sleep(_SECOND_LOOK_S)
        here = (stream, descriptor)
        calls = {rank: here for rank in range(stream.group.num_ranks) if rank not in error.ranks}
        calls |= {rank: (other, waited[1]) for other, rank, waited in waits if other.group.awaited_by(rank) == waited}
        first = min(calls, default=0)
        for rank in sorted(calls):
            if calls[rank][0] is not calls[first][0]:
                return _Mismatch(rank, calls[rank][1], reporter=first, reporters_call=calls[first][1])
        return None

    # -- health

    def _note(self, error: Exception, stream: Stream, descriptor: int) -> None:
        my_rank = stream.group.rank
        kind, ranks, theirs, reporter = INTERRUPTED, (my_rank,), 0, my_rank
        if isinstance(error, _Mismatch):
            kind, ranks, theirs = MISMATCH, (error.rank,), error.call
            if error.reporter is not None:
                reporter, descriptor = error.reporter, error.reporters_call
        elif isinstance(error, Refused):  # on all ranks alike: they say the same
            kind, ranks, theirs, reporter = error.kind, (0,), error.other_call, 0
        elif isinstance(error, DcpTimeout):
            kind, ranks = PEER_LOST if isinstance(error, DcpPeerLost) else TIMEOUT, error.ranks
        self.fault = self.fault or {  # of two threads, the first one's: the other may have met what came of it
            "kind": kind,
            "reporter": reporter,
            "op": descriptor >> 56,
            "has_record": True,
            "ranks": sum(1 << rank for rank in ranks),
            "lane": stream.lane,
            "epoch": stream.num_calls + 1,
            "my_call": descriptor,
            "peer_call": theirs,
            "waited_ns": int((time.monotonic() - stream.started_s) * 1e9) if isinstance(error, DcpTimeout) else 0,
        }

    def fault_error(self, op: str) -> DcpError:
        return fault_error(op, self.fault)

    @property
    def num_calls(self) -> int:
        return sum(stream.num_calls for stream in self)

    def close(self) -> None:
        """Local: a peer that makes another call finds this rank gone."""
        claimed = []
        for stream in self:
            if not stream.busy.acquire(blocking=False):
                for other in claimed:
                    other.busy.release()
                raise DcpError("close: no call may be in flight (another thread is inside an op of this workspace)")
            claimed.append(stream)
        self.closed = True  # and the streams stay claimed: no call starts any more
        for stream in self:
            stream.group.close()


class _Mismatch(Exception):
    """`rank` makes another call than `reporter`, which is this rank when it is None."""

    def __init__(self, rank: int, call: int, *, reporter: int | None = None, reporters_call: int = 0) -> None:
        self.rank, self.call, self.reporter, self.reporters_call = rank, call, reporter, reporters_call
