"""The backend over symmetric memory: every rank maps every rank's region, and the kernels do the rest."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from dcpkernels import _backend, _check
from dcpkernels._channels import EachOnce, ParallelFor, ThreadPool
from dcpkernels._faults import fault_error, lost_error
from dcpkernels._gathers import DirectGathers
from dcpkernels.config import WorkspaceConfig
from dcpkernels.errors import DcpError
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.verdict import agree
from dcpkernels.region_layout import GATHER_PARTS, RegionLayout

# csrc/core/types.h: Wire.
_PUSH, _PULL = 0, 1
_PACKET = {8: 2, 16: 3, 128: 4}


class DirectBackend:
    """One rank's regions, endpoint and threads. It has the methods that `CollectiveBackend` has."""

    name = "direct"

    def __init__(
        self,
        group: Group,
        config: WorkspaceConfig,
        layout: RegionLayout,
        module: Any,
        *,
        isa: str,
        payload: dict[str, Any],
        num_cpus: int,
        timeout_s: float,
        first_call_timeout_s: float,
        deadline: Deadline,
        parallel_for: ParallelFor | None,
        read_only_views: bool,
    ) -> None:
        """Collective. Raises, the same on every rank, what CpuHeap.create raises."""
        self._config, self._layout, self._module = config, layout, module
        self._rank, self._num_ranks, self._timeout_s = group.rank, group.num_ranks, timeout_s
        self._fault: dict[str, Any] | None = None
        parts = layout.parts
        control = module.ControlLayout(
            fault_offset=parts["fault"].offset,
            streams_offset=parts["streams"].offset,
            stream_bytes=layout.stream_bytes,
            flags_offset=parts["flags"].offset,
            flags_bytes=layout.flags_bytes,
            num_streams=layout.num_streams,
            num_channels=layout.num_channels,
        )
        self._heap = CpuHeap.create(
            group,
            layout.num_bytes,
            init=lambda base: module.init_region(base, control, group.num_ranks, config.start_epoch),
            payload=payload,
            timeout_s=deadline.for_call(),
            shared_nbytes=layout.shared_num_bytes,
            read_only_views=read_only_views,
        )
        self.closed = False
        error = None
        try:
            self._start(group, control, isa, num_cpus, timeout_s, first_call_timeout_s, parallel_for)
        except Exception as failure:
            error = failure
        try:
            agree(group, "workspace: start", error=error, timeout_s=deadline.for_call())
        except BaseException:
            self._buffers = []
            self._heap.close(timeout_s=0)
            raise

    def _start(
        self,
        group: Group,
        control: Any,
        isa: str,
        num_cpus: int,
        timeout_s: float,
        first_call_timeout_s: float,
        parallel_for: ParallelFor | None,
    ) -> None:
        """Local: what the ops of this rank run on."""
        config, module = self._config, self._module
        num_spins, num_yields = _backend.wait_budget(group.num_ranks, num_cpus)
        self._endpoint = module.Endpoint(
            rank=group.rank,
            bases=self._heap.bases,
            # On a CPU a store into the shared region is the multicast.
            gather_bases=[self._heap.shared_base] * group.num_ranks if config.multicast else self._heap.bases,
            multicast=self._heap.shared_base if config.multicast else 0,
            reserved=self._reserved(),
            socket_fds=self._heap.socket_fds,
            control=control,
            timeout_ns=math.ceil(timeout_s * 1e9),
            first_timeout_ns=math.ceil(first_call_timeout_s * 1e9),
            num_spins=num_spins,
            num_yields=num_yields,
            isa=isa,
        )
        # A pool for each stream: calls of two streams that shared one would keep each other's channels from running, and
        # ranks that start them in different orders would wait for each other.
        self._pools: list[ThreadPool] = []
        if parallel_for is None and config.num_channels > 1:
            self._pools = [ThreadPool(config.num_channels) for _ in range(self._layout.num_streams)]
        self._parallel_for = parallel_for
        self._geometries = [self._geometry(lane) for lane in range(config.num_lanes)]
        self._buffers = [[self._buffer(lane, index) for index in (0, 1)] for lane in range(config.num_lanes)]
        memory = self._heap.shared_memory if config.multicast else self._heap.own_memory
        # No bound method: a cycle would keep a workspace that is dropped alive, and its peers waiting for it.
        parallel_fors = [self._parallel_for_stream(stream_idx) for stream_idx in range(self._layout.num_streams)]
        self.gathers = DirectGathers(module, self._endpoint, config, self._layout, memory, parallel_fors)

    def _reserved(self) -> list[tuple[int, int]]:
        """Address and bytes of all buffers that the gathers hand out, in every mapping of them."""
        layout = self._layout
        parts = [layout.gather_parts[name] for name in GATHER_PARTS if name in layout.gather_parts]
        if not parts:
            return []
        first, end = parts[0].offset, parts[-1].offset + parts[-1].num_bytes
        memory = self._heap.shared_memory if self._config.multicast else self._heap.own_memory
        writable = (self._heap.shared_base if self._config.multicast else self._heap.bases[self._rank]) + first
        return [(writable, end - first), (ctypes.addressof(memory(first, end - first)), end - first)]

    def _parallel_for_stream(self, stream_idx: int) -> ParallelFor | None:
        parallel_for = self._pools[stream_idx] if self._pools else self._parallel_for
        return None if parallel_for is None else EachOnce(parallel_for)

    @property
    def isa(self) -> str:
        return self._endpoint.isa

    @property
    def wire(self) -> str:
        if self._config.zero_copy:
            return "bulk, zero copy"
        return f"packet ({self._config.packet_bytes} bytes)" if self._config.wire == "packet" else "bulk"

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes

    @property
    def multicast(self) -> str:
        """Whether a gathered byte is stored once for all ranks, in words."""
        layout = self._layout
        if len(layout.ops) == 1:
            return "no (nothing to broadcast)"
        if not self._config.multicast:
            return "no (not asked for)"
        return f"yes (one region of {layout.shared_num_bytes / 2**20:.1f} MiB for all ranks)"

    # -- for the ops

    def _geometry(self, lane: int) -> Any:
        layout, config, parts = self._layout, self._config, self._layout.parts
        staging = self._module.StagingLayout(
            offset=parts["a2a_lse_reduce.staging"].offset + lane * layout.staging_bytes,
            row_bytes=layout.staging_row_bytes,
            num_rows=layout.max_round_rows,
        )
        unpacked = self._module.StagingLayout(
            offset=parts["a2a_lse_reduce.unpacked"].offset + lane * layout.unpacked_bytes,
            row_bytes=layout.plain_row_bytes,
            num_rows=layout.max_round_rows,
        )
        return self._module.A2aLseReduceGeometry(
            wire=_PULL if config.zero_copy else _PACKET[config.packet_bytes] if config.wire == "packet" else _PUSH,
            dtype=_check.DTYPE_CODES[config.dtype],
            lane=lane,
            stream_idx=layout.stream_idx("a2a_lse_reduce", lane),
            num_ranks=layout.num_ranks,
            num_local_heads=layout.num_local_heads,
            head_dim=config.head_dim,
            max_round_rows=layout.max_round_rows,
            staging=staging,
            lse_in_row=layout.lse_in_row,
            unpacked=unpacked if layout.packet_bytes else staging,
            buffer_offset=self._buffer_offset(lane, 0),
            buffer_bytes=layout.buffer_bytes,
            all_buffers_offset=parts["a2a_lse_reduce.partial_out"].offset,
            all_buffers_bytes=parts["a2a_lse_reduce.partial_out"].num_bytes,
            query_stream_idx=layout.stream_idx("query_gather", lane) if "query_gather" in layout.ops else -1,
        )

    def a2a_lse_reduce_plan(self, lane: int, **call: Any) -> Callable[..., int]:
        """Runs calls of one shape: six addresses in, a status out."""
        plan = self._module.A2aLseReducePlan(endpoint=self._endpoint, geometry=self._geometries[lane], **call)
        parallel_for = self._parallel_for_stream(self._layout.stream_idx("a2a_lse_reduce", lane))
        return plan if parallel_for is None else functools.partial(plan.run_in_threads, parallel_for)

    def _buffer_offset(self, lane: int, index: int) -> int:
        return self._layout.parts["a2a_lse_reduce.partial_out"].offset + (2 * lane + index) * self._layout.buffer_bytes

    def _buffer(self, lane: int, index: int) -> torch.Tensor | None:
        config = self._config
        if not config.zero_copy:
            return None
        shape = (config.max_num_tokens, config.num_heads, config.head_dim)
        num_bytes = math.prod(shape) * config.dtype.itemsize
        memory = self._heap.own_memory(self._buffer_offset(lane, index), num_bytes)
        with torch.inference_mode(False):  # else nobody could write into it outside of that mode
            return torch.frombuffer(memory, dtype=config.dtype).view(shape)

    def hand_out_partial_out(self, lane: int, num_tokens: int) -> tuple[int, torch.Tensor | None]:
        """(status, the buffer): waits until all peers have read what was in it."""
        buffers = self._buffers  # `close` in another thread may replace them
        status, index = self._endpoint.hand_out_buffer(self._layout.stream_idx("a2a_lse_reduce", lane))
        # Detached: what a caller writes there with gradients must not stay in the buffer's own graph for ever.
        return status, buffers[lane][index][:num_tokens].detach() if status == 0 else None

    # -- health

    def fault_error(self, op: str) -> DcpError:
        return fault_error(op, self._fault or self._endpoint.fault())

    def check_fault(self, op: str) -> None:
        if self._endpoint.is_poisoned():
            raise self.fault_error(op)

    def check(self, op: str) -> None:
        self.check_fault(op)
        lost = self._heap.lost_peers()
        if lost:
            raise lost_error(op, lost)

    def counters(self) -> dict[str, int]:
        counters = [self._endpoint.stream_counters(stream_idx) for stream_idx in range(self._layout.num_streams)]
        return {"num_calls": sum(c[1] for c in counters), "nonfinite_lse": sum(c[2] for c in counters)}

    def warmup(self) -> None:
        """Regions are mapped with their pages; what is left is to have the threads of the pool started."""
        for pool in self._pools:
            pool.start()

    def close(self, *, wait: bool) -> None:
        fault = self._endpoint.fault() if self._endpoint.is_poisoned() else None
        if not self._endpoint.close():
            raise DcpError("close: no call may be in flight (another thread is inside an op of this workspace)")
        self._fault, self.closed = fault, True  # the fault: for a thread that comes out of a faulted call only now
        self._buffers = []
        self.gathers.close()
        for pool in self._pools:
            pool.close()
        self._heap.close(timeout_s=self._timeout_s if wait and fault is None else 0)
