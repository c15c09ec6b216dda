"""A region's memory on a GPU: what of it the driver hands out, each with an owner here that gives it back.

`Handle` is memory, and `Mapping` a range of addresses at which it can be reached: two things to a driver with virtual memory
management. Memory lives until its handles are released and its mappings are gone, in all processes; so a rank that is done
with its own takes nothing away from its peers. `Block` is memory that came with its address. A `Region` is one or the other,
for all who use it in this process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dcpkernels.errors import DcpError
from dcpkernels.heap import gpu_later
from dcpkernels.heap.gpu_driver import GpuDriver


class Handle:
    """Memory or a multicast object, counted: thread ranks hand it to each other."""

    def __init__(self, driver: GpuDriver, value: Any) -> None:
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
        self, driver: GpuDriver, handle: Handle, nbytes: int, devices: Sequence[int], *, alignment: int = 0
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


class Block:
    """Memory at `address`, which `give_back(address)` gives back."""

    def __init__(self, driver: GpuDriver, address: int, give_back: Callable[[int], Any]) -> None:
        """Takes over the memory."""
        self.address, self._driver, self._give_back = address, driver, give_back
        driver.share()

    def release(self) -> None:
        """Never raises; may be called again. Nothing may use the addresses any more."""
        address, self.address = self.address, 0
        if address != 0:
            self._driver.quietly(self._give_back, address)
            self._driver.close()


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

    def __init__(self, driver: GpuDriver, place: Mapping | Block, nbytes: int, handle: Handle | None = None) -> None:
        """Takes over `place` and `handle`, which is what is mapped there."""
        self.handle, self.nbytes, self.address = handle, nbytes, place.address
        self._driver, self._place, self._users = driver, place, 1
        self._lock = threading.RLock()

    @classmethod
    def map(cls, driver: GpuDriver, handle: Handle, nbytes: int, devices: Sequence[int]) -> Region:
        """`handle` at new addresses, for `devices`. Takes it over, also when it raises."""
        try:
            return cls(driver, Mapping(driver, handle, nbytes, devices), nbytes, handle)
        except BaseException:
            handle.release()
            raise

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
        given a view of it may. Where the device cannot tell, that is put off. Never raises."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._free()

    def _free(self) -> None:
        if not self._driver.becomes_idle():
            gpu_later.put_off(self._free)
            return
        self._place.release()
        if self.handle is not None:
            self.handle.release()
