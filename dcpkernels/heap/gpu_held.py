"""What a rank holds of a heap on GPUs, from the first step of its setup on, and the order in which it is given back."""

from __future__ import annotations

import os
import threading

from dcpkernels.errors import DcpPeerLost
from dcpkernels.heap import gpu_later, sockets
from dcpkernels.heap.gpu_driver import GpuDriver
from dcpkernels.heap.gpu_region import Region
from dcpkernels.heap.mesh import Mesh


class Held:
    """What a rank holds. Apart from the heap, so that its finaliser can release it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # another thread may try a release again that was put off
        self.listener: sockets.Listener | None = None
        self.mesh: Mesh | None = None
        self.driver: GpuDriver | None = None
        self.is_open = False
        self.files: list[int] = []
        self.own: Region | None = None
        self.peers: list[Region] = []
        self.host = 0

    def close_sockets(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.mesh is not None:
            self.mesh.close()

    def close_files(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def release(self) -> None:
        """Local, may be called again. Waits for no rank, but for kernels of this process, which end at their deadlines. In
        the order in which one rests on the other, with the driver last. Where the device cannot tell whether it is idle,
        what a kernel may use is put off."""
        with self._lock:
            self.close_sockets()
            self.close_files()
            driver = self.driver
            if self.own is not None and self.is_open and driver is not None and not driver.becomes_idle():
                gpu_later.put_off(self.release)
                return
            self._release_more()
            self.release_peers()
            own, self.own = self.own, None
            if own is not None:
                own.release()
            host, self.host = self.host, 0
            if host and driver is not None:
                driver.quietly(driver.host_free, host)
            is_open, self.is_open = self.is_open, False
            if is_open and driver is not None:
                driver.close()

    def release_peers(self) -> None:
        """What is mapped of other ranks' regions."""
        while self.peers:
            self.peers.pop().release()

    def _release_more(self) -> None:
        """What rests on the regions."""

    # For drivers to whom memory is gone with its owner. Elsewhere a rank takes nothing from its peers.

    def before_goodbye(self) -> None:
        """On the way to `close`: the last that is done before peers hear that this rank leaves."""

    def give_up(self, cause: DcpPeerLost) -> None:
        """Setup has failed on this rank: its peers hear why. May wait for them for a moment."""
        if self.mesh is not None:
            self.mesh.abort(cause)
