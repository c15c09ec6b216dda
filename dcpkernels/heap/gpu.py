"""A heap on GPUs: every rank's region, in the memory of its device, mapped by every rank. cuda.py and hip.py are the two.

Setting up takes these steps. Each ends in a group verdict, so that it succeeds on all ranks or raises the same on all:

1. `check` over the caller's group: same payload and sizes, a device and a driver for each. Nothing is allocated before.
2. `connect`: on one host, a socket between every two processes, as for the CPU heap. Later verdicts go over these.
3. `measure`: how regions are to be rounded up, who cannot reach whom, what else a vendor has to know.
4. `create region`: memory, an address, access, zeros, and what `init` wants at its start; and memory of the host.
5. `map peers`: how handles go from process to process is the vendor's. Thread ranks hand over the mapping itself.
6. What else a vendor has, and last `check links`: the caller's look at whether bytes really arrive.

Calls of the driver have no deadline. Nothing has a name anywhere: the driver frees what a killed process leaves.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.heap import gpu_later
from dcpkernels.heap.gpu_held import Held
from dcpkernels.heap.gpu_region import DeviceMemory, Region
from dcpkernels.heap.gpu_setup import Made, Setup
from dcpkernels.heap.group import Group
from dcpkernels.heap.mesh import Mesh, gave_up


class GpuHeap:
    """One region per rank. `bases[r]` is where kernels of this rank's device see rank r's region; `nbytes` is the size of
    each. Host code cannot load or store there.

    `multicast`: where a multicast store at +offset reaches `offset` of every rank's region; 0 when there is none, and
    `multicast_reason` says "yes" or why not. `bases_table`: address, on the device, of uint64[num_ranks] with `bases`.
    `host_control`: `control_nbytes` of zeroed memory of the host, pinned, at the same address for host code and kernels.
    `socket_fds` as in CpuHeap; all -1 for thread ranks, and between hosts.

    Once closed, `bases` is empty, the other addresses are 0 and `socket_fds` is all -1.
    """

    rank: int
    num_ranks: int
    nbytes: int
    control_nbytes: int
    device: int
    device_name: str
    bases: list[int]
    bases_table: int
    multicast: int
    multicast_reason: str
    host_control: int
    socket_fds: list[int]

    def __init__(self, rank: int, made: Made, held: Held) -> None:
        """For `create` only."""
        self.rank, self.num_ranks, self.bases, self.bases_table = rank, len(made.bases), made.bases, made.bases_table
        self.nbytes, self.control_nbytes = made.nbytes, made.control_nbytes
        self.device, self.device_name = made.device, made.device_name
        self.multicast = 0
        self.host_control = held.host
        self.socket_fds = held.mesh.socket_fds if held.mesh is not None else [-1] * self.num_ranks
        self._held = held
        self._finalizer = weakref.finalize(self, held.release)
        # At exit the driver releases everything, also while kernels still use the memory.
        self._finalizer.atexit = False

    @classmethod
    def _create(
        cls,
        group: Group,
        held: Held,
        setup: Callable[[], Setup],
        init: Callable[[int], None],
        driver_api: Any,
        check_links: Callable[[Any], None] | None,
    ) -> Any:
        """Collective. Returns the heap. On failure nothing is left behind."""
        heap = None
        try:
            steps = setup()
            heap = cls(group.rank, steps.make(init, driver_api), held)
            heap._describe(steps)
            if check_links is not None:
                steps.check_links(check_links, heap)
            return heap
        except BaseException as error:
            if heap is not None:
                heap._forget()
                heap._finalizer.detach()  # done below
            held.give_up(gave_up(group.rank, error))
            held.release()
            raise

    def _describe(self, steps: Any) -> None:
        """Takes over what a vendor's `steps` have made besides."""

    @property
    def mesh(self) -> Mesh | None:
        """As of CpuHeap; None between hosts, too."""
        return self._held.mesh

    def own_memory(self, offset: int, nbytes: int) -> DeviceMemory:
        """A part of this rank's region, by `__cuda_array_interface__` (uint8). The region stays mapped as long as
        anything refers to it, also after `close`."""
        return self._own("own_memory", offset, nbytes).memory(offset, nbytes)

    def read(self, offset: int, nbytes: int, rank: int | None = None) -> bytes:
        """A part of this rank's region, or of another one's, as it is now. Waits for no kernel, unless the device runs the
        copy behind one, in the hardware queue that their streams share: then until that kernel ends."""
        self._own("read", offset, nbytes)
        driver, base = self._held.driver, self.bases[self.rank if rank is None else rank]
        buffer = ctypes.create_string_buffer(nbytes)
        if nbytes > 0 and driver is not None:
            with driver.current():
                driver.copy_from_device(ctypes.addressof(buffer), base + offset, nbytes)
        return buffer.raw

    def _own(self, op: str, offset: int, nbytes: int) -> Region:
        if self._held.own is None:
            raise DcpError(f"{op}: the heap must be open (it is closed)")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            text = f"{op}: must be inside the region of {self.nbytes} bytes (got {nbytes} bytes at {offset})"
            raise DcpInvalidArgument(text)
        return self._held.own

    def lost_peers(self) -> tuple[int, ...]:
        """Ranks whose process ended, or dropped its heap, without `close`. Never blocks. Never names thread ranks, nor
        ranks of other hosts."""
        return self._held.mesh.lost_peers() if self._held.mesh is not None else ()

    def hang_up(self) -> None:
        """Closes the sockets without a goodbye, which peers take for this rank's death; the memory stays."""
        self._held.close_sockets()

    def close(self, *, timeout_s: float) -> None:
        """Says goodbye, waits up to `timeout_s` for the peers' goodbyes (0 = not at all), and releases everything. No
        kernel may use the heap any more. May be called again; a peer that is dead is not waited for. During a capture the
        device cannot tell that it is idle: the capture is broken, and memory is released when the process makes or closes
        a heap next."""
        self._forget()
        try:
            self._held.before_goodbye()
            if self._held.mesh is not None:
                self._held.mesh.part(timeout_s)
        finally:
            gpu_later.try_again()
            self._finalizer()

    def _forget(self) -> None:
        """Nobody can find an address that is about to be unmapped."""
        self.multicast = self.bases_table = self.host_control = 0
        self.bases.clear()
