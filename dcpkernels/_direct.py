"""The backend over symmetric memory: every rank maps every rank's region, and the kernels do the rest. What depends on
the device is in _cpu_device.py and _gpu_device.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dcpkernels import _check
from dcpkernels._faults import fault_error, lost_error
from dcpkernels._gathers import DirectGathers
from dcpkernels.config import WorkspaceConfig
from dcpkernels.errors import DcpError
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.verdict import agree, attempt
from dcpkernels.region_layout import GATHER_PARTS, RegionLayout

if TYPE_CHECKING:
    from dcpkernels._cpu_device import CpuDevice
    from dcpkernels._gpu_device import GpuDevice


class DirectBackend:
    """One rank's regions and endpoint. It has the methods that `CollectiveBackend` has."""

    name = "direct"

    def __init__(
        self,
        group: Group,
        config: WorkspaceConfig,
        layout: RegionLayout,
        module: Any,
        device: CpuDevice | GpuDevice,
        *,
        isa: str,
        payload: dict[str, Any],
        timeout_s: float,
        first_call_timeout_s: float,
        deadline: Deadline,
    ) -> None:
        """Collective. Raises, the same on every rank, what the device's heap raises."""
        self._config, self._layout, self._module, self._device = config, layout, module, device
        self._timeout_s = timeout_s
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
        num_ranks, start_epoch = group.num_ranks, config.start_epoch
        device.create_heap(
            group, lambda base: module.init_region(base, control, num_ranks, start_epoch), payload, deadline
        )
        self._heap = device.heap
        self.closed = False
        try:
            _, error = attempt(lambda: self._start(group.rank, config, control, timeout_s, first_call_timeout_s, isa))
            # Where there are sockets, all hear of a death at once; of the caller's group, only some ranks might.
            agree(self._heap.mesh or group, "workspace: start", error=error, timeout_s=deadline.for_call())
        except BaseException:
            self._buffers = []
            device.close(timeout_s=0)
            raise

    def _start(
        self, rank: int, config: WorkspaceConfig, control: Any, timeout_s: float, first_call_timeout_s: float, isa: str
    ) -> None:
        """What is made on top of the regions, by this rank alone."""
        module, device = self._module, self._device
        with device.current():  # an endpoint looks whether its device runs the kernels
            self._endpoint = module.Endpoint(
                rank=rank,
                reserved=self._reserved(),
                socket_fds=self._heap.socket_fds,
                control=control,
                timeout_ns=math.ceil(timeout_s * 1e9),
                first_timeout_ns=math.ceil(first_call_timeout_s * 1e9),
                isa=isa,
                **device.endpoint_fields(),
            )
        self._geometries = [self._geometry(lane) for lane in range(config.num_lanes)]
        self._buffers = [[self._buffer(lane, index) for index in (0, 1)] for lane in range(config.num_lanes)]
        self.gathers = DirectGathers(module, self._endpoint, config, self._layout, device)

    def _reserved(self) -> list[tuple[int, int]]:
        """Address and bytes of all buffers that the gathers hand out, in every mapping of them."""
        layout = self._layout
        parts = [layout.gather_parts[name] for name in GATHER_PARTS if name in layout.gather_parts]
        if not parts:
            return []
        first, num_bytes = parts[0].offset, parts[-1].offset + parts[-1].num_bytes - parts[0].offset
        return [(address, num_bytes) for address in self._device.buffer_addresses(first, num_bytes)]

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
        return "no (nothing to broadcast)" if len(self._layout.ops) == 1 else self._device.multicast

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
            wire=config.wire_code,
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
        return self._device.calls(plan, plan.run_in_threads, self._layout.stream_idx("a2a_lse_reduce", lane))

    def _buffer_offset(self, lane: int, index: int) -> int:
        return self._layout.parts["a2a_lse_reduce.partial_out"].offset + (2 * lane + index) * self._layout.buffer_bytes

    def _buffer(self, lane: int, index: int) -> torch.Tensor | None:
        config = self._config
        if not config.zero_copy:
            return None
        shape = (config.max_num_tokens, config.num_heads, config.head_dim)
        num_bytes = math.prod(shape) * config.dtype.itemsize
        memory = self._device.own_tensor(self._buffer_offset(lane, index), num_bytes)
        with torch.inference_mode(False):  # else nobody could write into it outside of that mode
            return memory.view(config.dtype).view(shape)

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
        self._device.refresh(self._endpoint)
        self.check_fault(op)
        lost = self._heap.lost_peers()
        if lost:
            raise lost_error(op, lost)

    def counters(self) -> dict[str, int]:
        self._device.refresh(self._endpoint)
        counters = [self._endpoint.stream_counters(stream_idx) for stream_idx in range(self._layout.num_streams)]
        return {"num_calls": sum(c[1] for c in counters), "nonfinite_lse": sum(c[2] for c in counters)}

    def warmup(self) -> None:
        self._device.warmup()

    def close(self, *, wait: bool) -> None:
        fault = self._endpoint.fault() if self._endpoint.is_poisoned() else None
        if not self._endpoint.close():
            raise DcpError("close: no call may be in flight (another thread is inside an op of this workspace)")
        self._fault, self.closed = fault, True  # the fault: for a thread that comes out of a faulted call only now
        self._buffers = []
        self.gathers.close()
        self._device.close(timeout_s=self._timeout_s if wait and fault is None else 0)
