"""A region's memory on a GPU: a handle, a range of addresses, and the mapping of one at the other.

These are three things to the driver, each with an owner here that gives it back: `Handle`, `Mapping`, `Region`.
Memory lives until its handles are released and its mappings are gone, in all processes; so a rank that is done with
its own takes nothing away from its peers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from dcpkernels.errors import DcpError
from dcpkernels.heap.cuda_driver import Driver


class Handle:
    """Memory or a multicast object, counted: thread ranks hand it to each other."""

    def __init__(self, driver: Driver, value: Any) -> None:
        """Takes over `value`."""
        self.value = value
        self._driver = driver
        self._users = 1
        self._lock = threading.RLock()  # a finalizer may release while its thread retains
        driver.share()

    def retain(self) -> None:
        """One more user. Raises DcpError when it is released already."""
        with self._lock:
            if self._users == 0:
                raise DcpError("device memory must still be there (its owner has closed it)")
            self._users += 1

    def release(self) -> None:
        """One user fewer; to be called once per user. The last one releases. Never raises."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._driver.quietly(self._driver.release, self.value)
                self._driver.close()


class Mapping:
    """Addresses at which kernels of `devices` read and write what `handle` stands for."""

    def __init__(
        self, driver: Driver, handle: Handle, nbytes: int, devices: Sequence[int], *, alignment: int = 0
    ) -> None:
        """Raises what the driver raises; then nothing is held."""
        self._driver, self.nbytes, self._mapped = driver, nbytes, False
        self.address = driver.reserve(nbytes, alignment)
        try:
            driver.map(self.address, nbytes, handle.value)
            self._mapped = True
            driver.set_access(self.address, nbytes, devices)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Never raises; may be called again. Nothing may use the addresses any more."""
        address, self.address = self.address, 0
        if address == 0:
            return
        if self._mapped:
            self._driver.quietly(self._driver.unmap, address, self.nbytes)
        self._driver.quietly(self._driver.free_address, address, self.nbytes)


class DeviceMemory:
    """A part of a region for those who know `__cuda_array_interface__`: torch.as_tensor, cupy, numba."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self._address, False)  # not read-only
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class Region:
    """A rank's region in this process, counted: thread ranks use one mapping, and the last of them unmaps it."""

    def __init__(self, driver: Driver, handle: Handle, nbytes: int, devices: Sequence[int]) -> None:
        """Takes over `handle`, also when it raises."""
        self.handle, self.nbytes = handle, nbytes
        self._driver, self._users = driver, 1
        self._lock = threading.RLock()
        try:
            self._mapping = Mapping(driver, handle, nbytes, devices)
        except BaseException:
            handle.release()
            raise
        self.address = self._mapping.address

    def retain(self) -> None:
        """One more user. Raises DcpError when the region is unmapped already."""
        with self._lock:
            if self._users == 0:
                raise DcpError("a region must still be mapped (its owner has closed it)")
            self._users += 1

    def memory(self, offset: int, nbytes: int) -> DeviceMemory:
        """`nbytes` at `offset`. It keeps the region mapped for as long as anything refers to it."""
        self.retain()
        memory = DeviceMemory(self.address + offset, nbytes)
        weakref.finalize(memory, self.release).atexit = False
        return memory

    def release(self) -> None:
        """One user fewer; to be called once per user. The last one unmaps, when no kernel runs any more: one that was
        given a view of it may. Where the device cannot tell, the memory stays until the process ends. Never raises."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._driver.quietly(self._driver.wait_idle):
                self._mapping.release()
                self.handle.release()
