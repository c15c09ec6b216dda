"""What the direct backend needs of a GPU: regions in device memory, and the caller's current stream. What the vendors do
in different ways is in _cuda_device.py and _hip_device.py; PyTorch calls both `cuda`.

A call enqueues one kernel and returns. What a kernel finds wrong it leaves in memory that the host reads at the next
call (csrc/bindings/plan.h); nothing here waits for the device but `refresh` and `close`."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dcpkernels import _check
from dcpkernels._link_check import NUM_RESULT_WORDS, require_links
from dcpkernels.config import WorkspaceConfig
from dcpkernels.errors import DcpDeviceError, DcpUnsupported
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.verdict import agree, attempt
from dcpkernels.region_layout import FAULT_BYTES, RegionLayout

_log = logging.getLogger("dcpkernels")

# Looks at a flag before the first pause: about what a flag takes from GPU to GPU.
_NUM_SPINS = 1000
_LINK_TIMEOUT_S = 30.0  # all ranks come from a verdict: they differ by milliseconds


class GpuDevice:
    """Of one rank. It refers to nothing that refers to it, as CpuDevice."""

    heap: Any  # dcpkernels.heap.gpu.GpuHeap, or what has all of it
    gathers_at_once = True
    reach = "all ranks map each other's memory"
    link_advice = ""  # for links over which a flag did not arrive
    driver_api: Any = None  # what stands in for the vendor's Python bindings; None: the real ones

    def __init__(self, config: WorkspaceConfig, layout: RegionLayout, module: Any, index: int) -> None:
        """`index`: of the device in this process."""
        self._config, self._layout, self._module, self.index = config, layout, module, index

    def create_heap(
        self, group: Group, init: Callable[[int], None], payload: dict[str, Any], deadline: Deadline
    ) -> None:
        """Collective. Raises, the same on every rank, what the heap's `create` raises."""
        layout = self._layout
        # First, for it may take a rank seconds more than another one, and needs no memory.
        _, error = attempt(self._load_kernels)
        agree(group, "workspace: load kernels", error=error, timeout_s=deadline.for_call())

        def check_links(heap: Any) -> None:
            self._check_links(heap, group, deadline)

        self.heap = self.make_heap(
            group,
            layout.num_bytes,
            device=self.index,
            control_nbytes=layout.control_num_bytes,
            init=init,
            payload=payload,
            timeout_s=deadline.for_call(),
            multicast=self._config.multicast and len(layout.ops) > 1,  # else there is nothing to broadcast
            check_links=check_links,
        )

    def make_heap(self, group: Group, nbytes: int, **options: Any) -> Any:
        """The vendor's, by its `create`."""
        raise NotImplementedError

    def _load_kernels(self) -> None:
        wire, dtype = self._config.wire_code, _check.DTYPE_CODES[self._config.dtype]
        with self.current():
            is_loaded = self._module.load_kernels(wire=wire, dtype=dtype, device=self.index)
        if not is_loaded:
            raise DcpDeviceError(
                f"device cuda:{self.index} must load the kernels (it did not: {self._module.launch_fault()})"
            )

    def _check_links(self, heap: Any, group: Group, deadline: Deadline) -> None:
        offset = self._layout.parts["flags"].offset  # nobody reads flags in the host's copy of the control words
        words = (ctypes.c_uint64 * NUM_RESULT_WORDS).from_address(heap.host_control + offset)
        # A stream of its own: thread ranks on one device share the default one, and would wait for each other there.
        stream = self._new_stream()

        def read() -> list[int]:
            stream.synchronize()
            return list(words)

        with self.current():
            require_links(
                group,
                self._module,
                bases=heap.bases,
                bases_table=heap.bases_table,
                multicast=heap.multicast,
                offset=self._layout.parts["link_check"].offset,
                nonce=1,
                # Half of what is left: the verdict needs some of it. A wait here always ends.
                timeout_s=min(deadline.remaining_s() / 2, _LINK_TIMEOUT_S),
                wait_budget=(_NUM_SPINS, 0),
                device=self.index,
                stream=stream.cuda_stream,
                result=(heap.host_control + offset, read),
                agree_timeout_s=deadline.for_call(),
                advice=self.link_advice,
            )

    def _new_stream(self) -> Any:
        return torch.cuda.Stream(self.index)

    def _wait(self) -> None:
        """Until all kernels of the device have ended."""
        torch.cuda.synchronize(self.index)

    def endpoint_fields(self) -> dict[str, Any]:
        """How kernels and host reach the regions, and how patient a wait is."""
        return {
            "bases": self.heap.bases,
            "gather_bases": self.heap.bases,
            "multicast": self.heap.multicast,
            "bases_table": self.heap.bases_table,
            "host_control": self.heap.host_control,
            "device": self.index,
            "num_spins": _NUM_SPINS,
            "num_yields": 0,
        }

    # -- memory

    def own_tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of this rank's region, which stay mapped as long as the tensor is referred to."""
        memory = self.heap.own_memory(offset, num_bytes)
        with torch.inference_mode(False):  # else nobody could write into a view outside of that mode
            tensor = torch.as_tensor(memory, device=f"cuda:{self.index}")
        address, _ = memory.__cuda_array_interface__["data"]
        if num_bytes > 0 and tensor.data_ptr() != address:
            # as_tensor copies, and does not say so, where it takes the memory for another device's.
            text = f"a tensor on cuda:{self.index} must be the region's own memory at {address:#x}"
            raise DcpDeviceError(f"{text} (got a copy at {tensor.data_ptr():#x}: torch takes it for another device's)")
        return tensor

    buffer_tensor = own_tensor  # every rank has the buffers of the gathers in its own region

    def buffer_addresses(self, offset: int, num_bytes: int) -> list[int]:
        """Where these bytes are. (The address for multicast stores is in nobody's tensor.)"""
        return [self.heap.bases[self.heap.rank] + offset]

    def rows(self, rows: Any) -> tuple[int, Any]:
        """Where kernels find an array of a plan, and what else has to live until then: a copy on the device."""
        with torch.inference_mode(False):
            copy = torch.from_numpy(rows.copy()).pin_memory().to(f"cuda:{self.index}", non_blocking=True)
        return copy.data_ptr(), copy

    def uses(self, copies: tuple[Any, ...]) -> None:
        """A kernel on the caller's stream is about to read these `rows`: their memory is not to be given away before."""
        for copy in copies:
            copy.record_stream(torch.cuda.current_stream(self.index))

    # -- calls

    def calls(self, run: Callable[..., int], run_in_threads: Callable[..., int], stream_idx: int) -> Callable[..., int]:
        """What runs the calls of a plan: addresses in, a status out. On the stream that is the caller's then."""
        index, current_stream = self.index, self.current_stream
        exchange, give_back = self.exchange_device, self.give_back_device

        def call(*args: Any) -> int:
            before = exchange(index)
            try:
                return run(*args, current_stream())
            finally:
                if before != index:
                    give_back(before)

        return call

    # torch's own, which make no context on a device that has none: a new thread is on device 0.
    exchange_device = staticmethod(torch.cuda._exchange_device)
    give_back_device = staticmethod(torch.cuda._maybe_exchange_device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device current on this thread for a while."""
        before = self.exchange_device(self.index)
        try:
            yield
        finally:
            self.give_back_device(before)

    def current_stream(self) -> int:
        """The caller's: its handle in the CUDA runtime."""
        return torch._C._cuda_getCurrentRawStream(self.index)

    def warmup(self) -> None:
        """Every kernel was loaded when the workspace was made."""

    # -- health

    @property
    def multicast(self) -> str:
        return "yes" if self.heap.multicast else f"no ({self.heap.multicast_reason})"

    def refresh(self, endpoint: Any) -> None:
        """Has what the host reads of the region, faults and counters, brought up to date: a copy, for which it waits (and
        with it, where they share a hardware queue, for a kernel: GpuHeap.read)."""
        words = self.heap.read(0, self._layout.control_num_bytes)
        at = self._layout.parts["fault"].offset
        poison = int.from_bytes(words[at : at + 8], "little")
        reporter = poison >> 48 & 0xFF  # csrc/core/types.h: FaultRecord; only the reporter's own record is whole
        record = self.heap.read(at, FAULT_BYTES, reporter) if poison and reporter < self.heap.num_ranks else b""
        # A reporter that has gone since may have left its memory to somebody else.
        endpoint.refresh(words, record if record[:8] == words[at : at + 8] else b"")

    def close(self, *, timeout_s: float) -> None:
        if timeout_s == 0:
            self.heap.hang_up()  # peers that wait for this rank need not wait for its kernels too
        try:
            self._wait()  # kernels of ours may still run
        except RuntimeError as error:  # the device is lost, and nothing runs on it
            _log.debug("close: %s", error)
        self.heap.close(timeout_s=timeout_s)


def require_room(config: WorkspaceConfig, layout: RegionLayout, index: int) -> None:
    """All channels that may wait at the same time must find a place on the device: one that did not run could not signal.

    Raises DcpUnsupported.
    """
    num_blocks = torch.cuda.get_device_properties(index).multi_processor_count
    if layout.num_channels * layout.num_streams > num_blocks:
        raise DcpUnsupported(
            f"workspace: num_channels * num_lanes * ops must be at most the {num_blocks} multiprocessors of cuda:{index} "
            f"(got {layout.num_channels} * {config.num_lanes} * {len(layout.ops)}; "
            f"num_channels={num_blocks // layout.num_streams} would do)"
        )
