"""The backend over torch.distributed: the same calls, the same merge, without shared memory.

It serves groups that span several hosts, and machines where memory cannot be shared. A call is two exchanges: what each
rank is about to do (so that ranks which make different calls find out), then the rows, packed by the same core code
that publishes them in symmetric memory, and merged by the same `reduce`. So results are equal to those of the direct
backend in every bit, and either is the other's oracle.

Every lane has a group of its own: what the caller sends over his group, in whatever thread, does not mix with it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dcpkernels import _check
from dcpkernels._faults import INTERRUPTED, MISMATCH, PEER_LOST, TIMEOUT, fault_error
from dcpkernels.config import WorkspaceConfig
from dcpkernels.errors import DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.heap.group import Deadline, Exchange, Group
from dcpkernels.region_layout import RegionLayout

_OP_CODE = 1  # csrc/core/types.h: Op::kA2aLseReduce
# Between two looks at whether a late rank waits in another lane: lanes in several threads do so for moments all the time.
_SECOND_LOOK_S = 0.15


class CollectiveBackend:
    """One rank's groups and buffers. It has the methods that `DirectBackend` has.

    gloo does not say which rank is late or gone: heap/gloo.py finds out by notes in torch's store.
    """

    name = "collective"
    wire = "torch.distributed"
    multicast = "no (torch.distributed)"

    def __init__(
        self,
        group: Group,
        config: WorkspaceConfig,
        layout: RegionLayout,
        module: Any,
        *,
        isa: str,
        timeout_s: float,
        first_call_timeout_s: float,
        deadline: Deadline,
    ) -> None:
        """Collective: makes the groups."""
        self.isa = module.runnable_variants[0] if isa == "auto" else isa
        # Plain rows, whatever the configuration says: torch.distributed does the sending.
        layout = dataclasses.replace(layout, zero_copy=False, packet_bytes=0)
        self._config, self._layout, self._module = config, layout, module
        self._timeout_s, self._first_call_timeout_s = timeout_s, first_call_timeout_s
        self._fault: dict[str, Any] | None = None
        self.closed = False
        self._lanes: list[_Lane] = []
        try:
            for lane in range(config.num_lanes):
                self._lanes.append(_Lane(group.duplicate(timeout_s=deadline.for_call()), lane))
        except BaseException:
            self.close(wait=False)
            raise
        staging = module.StagingLayout(offset=0, row_bytes=layout.plain_row_bytes, num_rows=layout.max_num_tokens)
        self._geometry = module.A2aLseReduceGeometry(
            wire=0,
            dtype=_check.DTYPE_CODES[config.dtype],
            lane=0,
            stream_idx=0,
            num_ranks=layout.num_ranks,
            num_local_heads=layout.num_local_heads,
            head_dim=config.head_dim,
            max_round_rows=layout.max_num_tokens,
            staging=staging,
            lse_in_row=layout.lse_in_row,
            unpacked=staging,
            buffer_offset=0,
            buffer_bytes=0,
            all_buffers_offset=0,
            all_buffers_bytes=0,
            query_stream_idx=-1,
        )

    @property
    def num_bytes(self) -> int:
        """Of the buffers that rows are packed into; they grow with the largest call, up to max_num_tokens rows."""
        return sum(lane.send.numel() + lane.receive.numel() for lane in self._lanes)

    def a2a_lse_reduce_plan(self, lane: int, *, num_tokens: int, lse_base: int, **call: Any) -> Callable[..., int]:
        exchange = self._module.A2aLseReduceExchange(
            isa=self.isa,
            rank=self._lanes[lane].group.rank,
            geometry=self._geometry,
            num_tokens=num_tokens,
            lse_base=lse_base,
            **call,
        )
        descriptor = self._module.call_descriptor(
            op=_OP_CODE,
            lane=lane,
            dtype=_check.DTYPE_CODES[self._config.dtype],
            lse_base=lse_base,
            num_tokens=num_tokens,
        )
        has_lengths = call["num_seqs"] >= 0
        return lambda *addresses: self._run(self._lanes[lane], exchange, descriptor, num_tokens, has_lengths, addresses)

    def _run(
        self, lane: _Lane, exchange: Any, descriptor: int, num_tokens: int, has_lengths: bool, addresses: tuple[int, ...]
    ) -> int:
        module = self._module
        if not lane.busy.acquire(blocking=False):
            return module.STATUS_CLOSED if self.closed else module.STATUS_BUSY
        try:
            code = exchange.begin(*addresses)
            if code != 0:
                return code
            try:
                if self._fault is None:
                    self._exchange_calls(lane, descriptor)
                    self._exchange_rows(lane, exchange, num_tokens)
            except (DcpTimeout, _Mismatch) as error:
                self._note(self._call_elsewhere(lane, error) or error, lane, descriptor)
            except BaseException:  # an interrupt: what the peers get is not known any more
                self._note(DcpError("interrupted"), lane, descriptor)
                exchange.discard()
                raise
            if self._fault is not None:
                exchange.discard()
                return module.STATUS_FAULTED
            lane.num_calls += 1
            if has_lengths:
                lane.nonfinite_lse += exchange.num_nonfinite_lse
            return 0
        finally:
            lane.busy.release()

    def _deadline_s(self, lane: _Lane) -> float:
        return self._timeout_s if lane.num_calls else self._first_call_timeout_s

    def _exchange_calls(self, lane: _Lane, descriptor: int) -> None:
        """Every rank learns every rank's call, before any row is sent."""
        num_ranks = lane.group.num_ranks
        send = torch.full((num_ranks,), descriptor)
        receive = torch.empty_like(send)
        lane.started_s = time.monotonic()
        size = [send.element_size()] * num_ranks
        lane.group.all_to_all(
            receive.view(torch.uint8),
            send.view(torch.uint8),
            size,
            size,
            timeout_s=self._deadline_s(lane),
            note=descriptor,
        )
        calls = receive.tolist()
        for rank, call in enumerate(calls):
            if call != calls[0]:  # every rank has the same list, and says the same of it
                raise _Mismatch(rank, call, reporter=0, reporters_call=calls[0])

    def _call_elsewhere(self, lane: _Lane, error: Exception) -> _Mismatch | None:
        """Why a rank did not come, if it waits in another lane for this one: the two made different calls."""
        if not isinstance(error, DcpTimeout) or isinstance(error, DcpPeerLost):
            return None
        others = [other for other in self._lanes if other is not lane]
        waits = [
            (other, rank, waited)
            for other in others
            for rank in error.ranks
            if rank != lane.group.rank and (waited := other.group.awaited_by(rank)) is not None
        ]
        if waits:
            time.sleep(_SECOND_LOOK_S)
        for other, rank, waited in waits:
            if other.group.awaited_by(rank) == waited:
                return _Mismatch(rank, waited[1])
        return None

    def _exchange_rows(self, lane: _Lane, exchange: Any, num_tokens: int) -> None:
        group, row_bytes = lane.group, self._layout.plain_row_bytes
        for first_row in range(0, num_tokens, self._layout.max_num_tokens):
            num_rows = min(self._layout.max_num_tokens, num_tokens - first_row)
            send, receive = lane.buffers((group.num_ranks - 1) * num_rows * row_bytes)
            sizes = [0 if rank == group.rank else num_rows * row_bytes for rank in range(group.num_ranks)]
            exchange.pack(send.data_ptr(), first_row, num_rows)
            group.all_to_all(receive, send, sizes, sizes, timeout_s=self._deadline_s(lane))
            exchange.merge(receive.data_ptr(), first_row, num_rows)

    def hand_out_partial_out(self, lane: int, num_tokens: int) -> tuple[int, torch.Tensor]:
        """An ordinary tensor: rows are packed anyway."""
        config = self._config
        if self._fault is not None:
            return self._module.STATUS_FAULTED, torch.empty(0)
        return 0, torch.empty((num_tokens, config.num_heads, config.head_dim), dtype=config.dtype)

    # -- health

    def _note(self, error: DcpError | _Mismatch, lane: _Lane, descriptor: int) -> None:
        kind, ranks, theirs, reporter = INTERRUPTED, (lane.group.rank,), 0, lane.group.rank
        if isinstance(error, _Mismatch):
            kind, ranks, theirs = MISMATCH, (error.rank,), error.call
            if error.reporter is not None:
                reporter, descriptor = error.reporter, error.reporters_call
        elif isinstance(error, DcpTimeout):
            kind, ranks = PEER_LOST if isinstance(error, DcpPeerLost) else TIMEOUT, error.ranks
        self._fault = {
            "kind": kind,
            "reporter": reporter,
            "op": _OP_CODE,
            "has_record": True,
            "ranks": sum(1 << rank for rank in ranks),
            "lane": lane.index,
            "epoch": lane.num_calls + 1,
            "my_call": descriptor,
            "peer_call": theirs,
            "waited_ns": int((time.monotonic() - lane.started_s) * 1e9) if isinstance(error, DcpTimeout) else 0,
        }

    def fault_error(self, op: str) -> DcpError:
        return fault_error(op, self._fault)

    def check_fault(self, op: str) -> None:
        if self._fault is not None:
            raise self.fault_error(op)

    check = check_fault  # a lost rank shows in the next call only

    def counters(self) -> dict[str, int]:
        return {
            "num_calls": sum(lane.num_calls for lane in self._lanes),
            "nonfinite_lse": sum(lane.nonfinite_lse for lane in self._lanes),
        }

    def warmup(self) -> None:
        """Nothing to load: torch.distributed connects when the groups are made."""

    def close(self, *, wait: bool) -> None:
        """Local: a peer that makes another call finds this rank gone."""
        claimed = []
        for lane in self._lanes:
            if not lane.busy.acquire(blocking=False):
                for other in claimed:
                    other.busy.release()
                raise DcpError("close: no call may be in flight (another thread is inside an op of this workspace)")
            claimed.append(lane)
        self.closed = True  # and the lanes stay claimed: no call starts any more
        for lane in self._lanes:
            lane.group.close()


class _Mismatch(Exception):
    """`rank` makes another call than `reporter`, which is this rank when it is None."""

    def __init__(self, rank: int, call: int, *, reporter: int | None = None, reporters_call: int = 0) -> None:
        self.rank, self.call, self.reporter, self.reporters_call = rank, call, reporter, reporters_call


class _Lane:
    def __init__(self, group: Exchange, index: int) -> None:
        self.group, self.index = group, index
        self.busy = threading.Lock()
        self.num_calls = self.nonfinite_lse = 0
        self.started_s = 0.0
        self.send = self.receive = torch.empty(0, dtype=torch.uint8)

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.send.numel() < num_bytes:
            self.send, self.receive = (torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
        return self.send[:num_bytes], self.receive[:num_bytes]
