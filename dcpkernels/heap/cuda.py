"""The CUDA heap: every rank's region, in the memory of its device, mapped by every rank; and multicast, where it works.

The steps are those of gpu.py. In `map peers` descriptors go over the sockets, on one host. Between hosts a handle is 64 bytes
(fabric) and goes through the group; whether the machines can do that shows when `create region` tries it, for the device
attribute says yes where there is no permission. Behind it comes multicast (cuda_multicast.py), which may fail without harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcpkernels.heap.cuda_setup import CudaHeld, CudaSetup
from dcpkernels.heap.gpu import GpuHeap
from dcpkernels.heap.group import Deadline, Group


class CudaHeap(GpuHeap):
    """On NVIDIA GPUs."""

    _held: CudaHeld

    @classmethod
    def create(
        cls,
        group: Group,
        nbytes: int,
        *,
        device: int,
        control_nbytes: int,
        init: Callable[[int], None],
        payload: dict[str, Any],
        timeout_s: float,
        multicast: bool = True,
        driver_api: Any = None,
        check_links: Callable[[CudaHeap], None] | None = None,
    ) -> CudaHeap:
        """Collective. Every rank gets `nbytes` (the same on all) of zeroed memory of its `device`, an ordinal of this
        process, and everybody's mapping. Ranks may share a device: slow, and without multicast.

        `init(address)` fills a zeroed buffer of the host of `control_nbytes` bytes, which becomes the start of the own
        region before any other rank can see it. `payload` holds what must be equal on all ranks, as plain data.
        `multicast`: whether to try it; a failure there is no error. `check_links(heap)` is called on all ranks with the
        finished heap, the context current: what it raises is an error of all. `timeout_s` bounds the waits for other
        ranks, 0 = for ever. `driver_api` stands in for `cuda.bindings.driver`.

        Raises, the same on every rank: DcpUnsupported (payloads differ; no driver or device; devices that cannot reach
        each other; several hosts without fabric handles), DcpDeviceError (a call of the driver failed, with its error
        and what to do), DcpTimeout (a rank did not come), DcpPeerLost (a rank died). Then nothing is left behind.
        """
        held, deadline = CudaHeld(), Deadline(timeout_s)

        def setup() -> CudaSetup:
            return CudaSetup(
                group,
                held,
                nbytes=nbytes,
                control_nbytes=control_nbytes,
                device=device,
                payload=payload,
                multicast=multicast,
                deadline=deadline,
            )

        return cls._create(group, held, setup, init, driver_api, check_links)

    def _describe(self, steps: CudaSetup) -> None:
        self.multicast, self.multicast_reason = self._held.multicast.address, steps.multicast_reason
