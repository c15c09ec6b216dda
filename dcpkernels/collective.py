"""The backend over torch.distributed: the same calls, the same merge, without shared memory.

It serves groups that span several hosts, and machines where memory cannot be shared. A call is two exchanges: what each
rank is about to do (so that ranks which make different calls find out), then the rows. Those of a2a_lse_reduce are
packed by the same core code that publishes them in symmetric memory, and merged by the same `reduce`; gathers move bytes.
So results are equal to those of the direct backend in every bit, and either is the other's oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from dcpkernels import _check
from dcpkernels._collective_gathers import CollectiveGathers
from dcpkernels._faults import A2A_LSE_REDUCE
from dcpkernels._streams import Stream, Streams
from dcpkernels.config import WorkspaceConfig
from dcpkernels.errors import DcpError
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.region_layout import RegionLayout


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
        self._streams = Streams(
            group,
            layout,
            module,
            timeout_s=timeout_s,
            first_call_timeout_s=first_call_timeout_s,
            deadline=deadline,
        )
        self._closed_num_bytes: int | None = None
        try:
            self.gathers = CollectiveGathers(self._streams, module, config, layout)
            self._reduces = [_Reduce(self._streams["a2a_lse_reduce", lane]) for lane in range(config.num_lanes)]
            self._geometry = self._make_geometry()
        except BaseException:
            self._streams.close()
            raise

    def _make_geometry(self) -> Any:
        layout, config, module = self._layout, self._config, self._module
        staging = module.StagingLayout(offset=0, row_bytes=layout.plain_row_bytes, num_rows=layout.max_num_tokens)
        return module.A2aLseReduceGeometry(
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
            query_stream_idx=-1,  # what is open is known here: CollectiveGathers
        )

    @property
    def num_bytes(self) -> int:
        """Of the buffers of the gathers, of which callers see views; and of those that rows are packed into, of all
        ops: they grow with the largest call, up to max_num_tokens rows or a chunk. gloo's own are not counted."""
        if self._closed_num_bytes is not None:
            return self._closed_num_bytes
        return self.gathers.num_bytes + sum(reduce.send.numel() + reduce.receive.numel() for reduce in self._reduces)

    def a2a_lse_reduce_plan(self, lane: int, *, num_tokens: int, lse_base: int, **call: Any) -> Callable[..., int]:
        reduce = self._reduces[lane]
        exchange = self._module.A2aLseReduceExchange(
            isa=self.isa,
            rank=reduce.stream.group.rank,
            geometry=self._geometry,
            num_tokens=num_tokens,
            lse_base=lse_base,
            **call,
        )
        descriptor = self._module.call_descriptor(
            op=A2A_LSE_REDUCE,
            lane=lane,
            dtype=_check.DTYPE_CODES[self._config.dtype],
            lse_base=lse_base,
            num_tokens=num_tokens,
        )
        has_lengths = call["num_seqs"] >= 0

        def move() -> None:
            self.gathers.require_query_rows(lane, num_tokens)
            self._exchange_rows(reduce, exchange, num_tokens)
            self.gathers.close_query(lane)
            if has_lengths:
                reduce.nonfinite_lse += exchange.num_nonfinite_lse

        spans = self._output_bytes(num_tokens, *call["strides"][4:])

        def prepare(addresses: tuple[int, ...]) -> int:
            outputs = zip(addresses[2:4], spans, strict=True)
            if any(self.gathers.reserves(range(first, first + size)) for first, size in outputs if first != 0):
                return self._module.STATUS_OVERLAP
            return exchange.begin(*addresses)

        return lambda *addresses: self._streams.run(
            reduce.stream, descriptor, prepare=lambda: prepare(addresses), move=move, discard=exchange.discard
        )

    def _output_bytes(self, num_tokens: int, *strides: int) -> tuple[int, int]:
        """From the first to the last byte of out and of lse_out, whose token and head strides these are."""
        if num_tokens == 0:
            return 0, 0
        last_head, config = self._layout.num_local_heads - 1, self._config
        out, lse = ((num_tokens - 1) * token + last_head * head for token, head in (strides[:2], strides[2:]))
        return (out + config.head_dim) * config.dtype.itemsize, (lse + 1) * 4

    def _exchange_rows(self, reduce: _Reduce, exchange: Any, num_tokens: int) -> None:
        group, row_bytes = reduce.stream.group, self._layout.plain_row_bytes
        for first_row in range(0, num_tokens, self._layout.max_num_tokens):
            num_rows = min(self._layout.max_num_tokens, num_tokens - first_row)
            send, receive = reduce.buffers((group.num_ranks - 1) * num_rows * row_bytes)
            sizes = [0 if rank == group.rank else num_rows * row_bytes for rank in range(group.num_ranks)]
            exchange.pack(send.data_ptr(), first_row, num_rows)
            group.all_to_all(receive, send, sizes, sizes, timeout_s=self._streams.deadline_s(reduce.stream))
            exchange.merge(receive.data_ptr(), first_row, num_rows)

    def hand_out_partial_out(self, lane: int, num_tokens: int) -> tuple[int, torch.Tensor]:
        """An ordinary tensor: rows are packed anyway."""
        config = self._config
        if self._streams.fault is not None:
            return self._module.STATUS_FAULTED, torch.empty(0)
        return 0, torch.empty((num_tokens, config.num_heads, config.head_dim), dtype=config.dtype)

    # -- health

    def fault_error(self, op: str) -> DcpError:
        return self._streams.fault_error(op)

    def check_fault(self, op: str) -> None:
        if self._streams.fault is not None:
            raise self.fault_error(op)

    check = check_fault  # a lost rank shows in the next call only

    def counters(self) -> dict[str, int]:
        return {
            "num_calls": self._streams.num_calls,
            "nonfinite_lse": sum(reduce.nonfinite_lse for reduce in self._reduces),
        }

    def warmup(self) -> None:
        """Nothing to load: torch.distributed connects when the groups are made."""

    @property
    def closed(self) -> bool:
        return self._streams.closed

    def close(self, *, wait: bool) -> None:
        """Local."""
        self._streams.close()
        if self._closed_num_bytes is None:
            self._closed_num_bytes = self.num_bytes
            self.gathers.close()
            self._reduces = []


class _Reduce:
    """What a2a_lse_reduce has on one lane."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.nonfinite_lse = 0
        self.send = self.receive = torch.empty(0, dtype=torch.uint8)

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.send.numel() < num_bytes:
            with torch.inference_mode(False):  # else thread ranks could not write there outside of that mode
                self.send, self.receive = (torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
        return self.send[:num_bytes], self.receive[:num_bytes]
