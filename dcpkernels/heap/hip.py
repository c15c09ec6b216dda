"""The HIP heap: every rank's region, in uncached memory of its device, mapped by every rank.

The steps are those of gpu.py. In `map peers` IPC handles go through the group, on one host; where a rank cannot make or open
one, all ranks together take descriptors of virtual memory management, over the sockets (hip_setup.py). There is no multicast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcpkernels.heap.gpu import GpuHeap
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.hip_setup import GOODBYE_S, HipHeld, HipSetup


class HipHeap(GpuHeap):
    """On AMD GPUs. `handles`: "ipc", "vmm" or "none", how regions went from process to process, and `handles_reason` why.

    Close it on all ranks: HIP leaves open what happens to a rank whose peer frees memory that it still has open, and an
    orderly `close` has every rank wait for that. A heap that is dropped does not.
    """

    _held: HipHeld
    handles: str
    handles_reason: str

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
        handles: str = "auto",
        driver_api: Any = None,
        check_links: Callable[[HipHeap], None] | None = None,
    ) -> HipHeap:
        """Collective. Every rank gets `nbytes` (the same on all) of zeroed memory of its `device`, an ordinal of this
        process, and everybody's mapping. Ranks may share a device, which is slow.

        `init(address)` fills a zeroed buffer of the host of `control_nbytes` bytes, which becomes the start of the own
        region before any other rank can see it. `payload` holds what must be equal on all ranks, as plain data.
        `multicast`: there is none, whatever it is. `handles`, the same on all ranks: "ipc" and "vmm" have no other way
        tried. `check_links(heap)` is called on all ranks with the finished heap, the device current: what it raises is an
        error of all. `timeout_s` bounds the waits for other ranks, 0 = for ever. `driver_api` stands in for what
        hip_library.load_api returns.

        Raises, the same on every rank: DcpInvalidArgument (handles), DcpUnsupported (payloads differ; no runtime or device;
        devices that cannot reach each other; several hosts), DcpDeviceError (a call of the runtime failed, with its error
        and what to do), DcpTimeout (a rank did not come), DcpPeerLost (a rank died). Then nothing is left behind.
        """
        held, deadline = HipHeld(), Deadline(timeout_s)

        def setup() -> HipSetup:
            return HipSetup(
                group,
                held,
                nbytes=nbytes,
                control_nbytes=control_nbytes,
                device=device,
                payload=payload,
                handles=handles,
                deadline=deadline,
            )

        return cls._create(group, held, setup, init, driver_api, check_links)

    def hang_up(self) -> None:
        """Nothing: peers hear of it in `close`, when this rank has closed what is theirs."""

    def close(self, *, timeout_s: float) -> None:
        """As of any heap. Waits a second for goodbyes also where `timeout_s` is less: peers that know of the fault close
        then, and before they have, they may look at this rank's record of it."""
        super().close(timeout_s=max(timeout_s, GOODBYE_S))

    def _describe(self, steps: HipSetup) -> None:
        self.multicast_reason = "these GPUs have none"
        self.handles, self.handles_reason = steps.handles, steps.handles_reason
