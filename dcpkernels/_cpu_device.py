"""What the direct backend needs of a CPU: regions in shared memory, and threads for the channels of a call."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from dcpkernels import _backend
from dcpkernels._channels import EachOnce, ParallelFor, ThreadPool
from dcpkernels.config import WorkspaceConfig
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.region_layout import RegionLayout


class CpuDevice:
    """Of one rank. It refers to nothing that refers to it: a workspace that is dropped goes at once, and its peers see
    that."""

    heap: CpuHeap
    gathers_at_once = False  # channels may share a thread, where one that waits for all would wait for itself
    reach = "all ranks share one host's memory"

    def __init__(
        self,
        config: WorkspaceConfig,
        layout: RegionLayout,
        *,
        num_cpus: int,
        parallel_for: ParallelFor | None,
        read_only_views: bool,
    ) -> None:
        self._layout, self._multicast = layout, config.multicast
        self._num_cpus, self._parallel_for, self._read_only_views = num_cpus, parallel_for, read_only_views
        self._pools: list[ThreadPool] = []

    def create_heap(
        self, group: Group, init: Callable[[int], None], payload: dict[str, Any], deadline: Deadline
    ) -> None:
        """Collective. Raises, the same on every rank, what CpuHeap.create raises."""
        self.heap = CpuHeap.create(
            group,
            self._layout.num_bytes,
            init=init,
            payload=payload,
            timeout_s=deadline.for_call(),
            shared_nbytes=self._layout.shared_num_bytes,
            read_only_views=self._read_only_views,
        )

    def endpoint_fields(self) -> dict[str, Any]:
        """How kernels and host reach the regions, and how patient a wait is."""
        # A pool for each stream: calls of two streams that shared one would keep each other's channels from running, and
        # ranks that start them in different orders would wait for each other.
        if self._parallel_for is None and self._layout.num_channels > 1:
            self._pools = [ThreadPool(self._layout.num_channels) for _ in range(self._layout.num_streams)]
        num_spins, num_yields = _backend.wait_budget(self.heap.num_ranks, self._num_cpus)
        return {
            "bases": self.heap.bases,
            # A store into the shared region is the multicast.
            "gather_bases": [self.heap.shared_base] * self.heap.num_ranks if self._multicast else self.heap.bases,
            "multicast": self.heap.shared_base if self._multicast else 0,
            "num_spins": num_spins,
            "num_yields": num_yields,
        }

    # -- memory

    def own_tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of this rank's region, which stay mapped as long as the tensor is referred to."""
        return _tensor_of(self.heap.own_memory(offset, num_bytes))

    def buffer_tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The same of the region that the buffers of the gathers lie in."""
        return _tensor_of(self._buffer_memory(offset, num_bytes))

    def buffer_addresses(self, offset: int, num_bytes: int) -> list[int]:
        """Where these bytes are, in every mapping of them."""
        writable = self.heap.shared_base if self._multicast else self.heap.bases[self.heap.rank]
        return [writable + offset, ctypes.addressof(self._buffer_memory(offset, num_bytes))]

    def _buffer_memory(self, offset: int, num_bytes: int) -> Any:
        memory = self.heap.shared_memory if self._multicast else self.heap.own_memory
        return memory(offset, num_bytes)

    def rows(self, rows: Any) -> tuple[int, Any]:
        """Where kernels find an array of a plan, and what else has to live until then."""
        return rows.ctypes.data, None

    def uses(self, copies: tuple[Any, ...]) -> None:
        """Of `rows`, which makes no copies here."""

    # -- calls

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Nothing has to be done for this thread to use it."""
        return contextlib.nullcontext()

    def calls(
        self, run: Callable[..., int], run_in_threads: Callable[..., int], stream_idx: int
    ) -> Callable[..., int]:
        """What runs the calls of a plan on an epoch stream: addresses in, a status out."""
        parallel_for = self._pools[stream_idx] if self._pools else self._parallel_for
        return run if parallel_for is None else functools.partial(run_in_threads, EachOnce(parallel_for))

    def warmup(self) -> None:
        """Regions are mapped with their pages; what is left is to have the threads of the pools started."""
        for pool in self._pools:
            pool.start()

    # -- health

    @property
    def multicast(self) -> str:
        if not self._multicast:
            return "no (not asked for)"
        return f"yes (one region of {self._layout.shared_num_bytes / 2**20:.1f} MiB for all ranks)"

    def refresh(self, endpoint: Any) -> None:
        """Has what the host reads of the region, faults and counters, brought up to date. Here it reads the region."""

    def close(self, *, timeout_s: float) -> None:
        for pool in self._pools:
            pool.close()
        self.heap.close(timeout_s=timeout_s)


def _tensor_of(memory: Any) -> torch.Tensor:
    with torch.inference_mode(False):  # else nobody could write into it, or into a view, outside of that mode
        return torch.frombuffer(memory, dtype=torch.uint8)
