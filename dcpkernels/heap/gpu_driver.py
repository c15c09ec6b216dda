"""What the layers over the drivers of GPUs have in common: who uses a driver, how a call fails, on which device.

Everything the heap asks of a GPU goes through a `GpuDriver`: cuda_driver.py, hip_driver.py.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dcpkernels.errors import DcpDeviceError, DcpError

_log = logging.getLogger("dcpkernels")

_FAILED = object()

# How memory is to leave the process: not at all, as a descriptor, as 64 bytes that work on other hosts too, or as 64 bytes
# that work on this host.
NONE, FD, FABRIC, IPC = "none", "fd", "fabric", "ipc"


class GpuDriver(ABC):
    """The driver as one rank sees it, and its device. Counted: `open` and `share` each want a `close`; the last one
    gives up what `open` took. Made without allocating anything on the device.

    Calls for memory, streams and copies are made inside `with driver.current():`, which leaves the thread's current
    device as it was, so that an engine that has another one selected keeps it.
    """

    device: int
    name: str
    uuid: str  # equal exactly for one device, in all processes of a host
    pci: str
    version: int
    num_devices: int

    def __init__(self, api: Any, device: int) -> None:
        self._api, self.device, self.name, self._pid = api, device, "", os.getpid()
        self._lock = threading.RLock()
        self._users = 0
        self._stream: Any = None

    def __str__(self) -> str:
        return f"device {self.device}" + (f", {self.name}" if self.name else "")

    @property
    def place(self) -> str:
        """Which one it is, for people, whatever a process calls it."""
        return f"{self}, {self.pci}"

    # ---- what a vendor has

    @abstractmethod
    def _no_library(self, error: Exception) -> DcpError:
        """For a driver that is not there, or has not what is asked of it."""

    @abstractmethod
    def _call_error(self, call: str, result: Any, details: dict[str, Any]) -> DcpError:
        """For a call that returned `result`, not 0; `details` as given to `_call`."""

    @abstractmethod
    def _too_new(self, call: str, error: Exception) -> str:
        """The text for a result that the bindings do not know."""

    @abstractmethod
    def _entering(self) -> Sequence[Callable[[], Callable[[], Any]]]:
        """The steps into `current`, each of which returns the one that undoes it."""

    @abstractmethod
    def _take(self) -> None:
        """The first user is there: takes what has to be given back."""

    @abstractmethod
    def _new_stream(self) -> Any:
        """A stream of its own, for copies."""

    @abstractmethod
    def _destroy_stream(self, stream: Any) -> None: ...

    @abstractmethod
    def _give_back(self) -> None:
        """The last user is gone. Never raises."""

    @property
    @abstractmethod
    def version_text(self) -> str:
        """For people."""

    # ---- calls

    def _call(self, call: str, *args: Any, **details: Any) -> Any:
        """Calls a driver function; returns its result, or raises what a failure means."""
        result, values = self._result(call, *args)
        if int(result) != 0:
            raise self._call_error(call, result, details)
        return values[0] if values else None

    def _result(self, call: str, *args: Any) -> tuple[Any, list[Any]]:
        """The status of a call, and what else it returned."""
        if os.getpid() != self._pid:  # the driver's state in the child is a copy of somebody else's; it may even crash
            raise DcpDeviceError(f"{call} must be called in the process that set {self} up (this is a fork of it)")
        function = getattr(self._api, call)
        try:
            result, *values = function(*args)
        except RuntimeError as error:  # no library, or one without this function
            raise self._no_library(error) from error
        except (ValueError, KeyError) as error:  # how the bindings report a number that is newer than themselves
            raise DcpDeviceError(self._too_new(call, error)) from error
        return result, values

    def _enum(self, cls: str, name: str) -> Any:
        return getattr(getattr(self._api, cls), name)

    # ---- users

    def open(self) -> None:
        """The first user: the device is taken into use, and there is the stream of the copies. On failure nothing is
        held."""
        with self._lock:
            self._take()
            self._users = 1
            try:
                with self.current():
                    self._stream = self._new_stream()
            except BaseException:
                self.close()
                raise

    def share(self) -> None:
        """One more user of an open driver: memory that lives longer than its heap."""
        with self._lock:
            if self._users == 0:
                raise DcpDeviceError(f"{self} must still be open (it is closed)")
            self._users += 1

    def close(self) -> None:
        """One user fewer; the last one gives everything back. Never raises, as `quietly`."""
        with self._lock:
            self._users -= 1
            if self._users != 0:
                return
            if self._stream is not None:
                self.quietly(self._destroy_stream, self._stream)
            self._stream = None
            self._give_back()

    # ---- the device of a thread

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device current on this thread for a while."""
        undo: list[Callable[[], Any]] = []
        try:
            for enter in self._entering():
                undo.append(enter())
            yield
        except BaseException:  # this is the error to see, whatever the way out has to say
            for leave in reversed(undo):
                self._try(leave)
            raise
        self._leave(undo)

    def _leave(self, undo: list[Callable[[], Any]]) -> None:
        """All of them, whichever of them fails."""
        if undo:
            try:
                undo[-1]()
            finally:
                self._leave(undo[:-1])

    def quietly(self, step: Callable[..., Any], *args: Any) -> bool:
        """For taking down: as inside `current` where that works, calls `step(*args)` in any case, logs what fails. What is
        left to do must be done, and an error here would hide the one that led here. Garbage collection may come here
        from anywhere. Returns whether the step was done."""
        undo = [self._try(enter) for enter in self._entering()]
        done = self._try(step, *args) is not _FAILED
        for leave in reversed(undo):
            if leave is not _FAILED:
                self._try(leave)
        return done

    def _try(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except Exception as error:  # noqa: BLE001  also what a broken installation raises
            _log.debug("while releasing: %s", error)
            return _FAILED

    def becomes_idle(self) -> bool:
        """For taking down: `wait_idle`, and whether that could be. While any stream of the process is captured it cannot, and
        breaks the capture, unless the capture is seen before. Never raises."""
        return not _captures() and self.quietly(self.wait_idle)

    # ---- what the heap needs, all but that of handles

    @abstractmethod
    def wait_idle(self) -> None:
        """Until no kernel of this process runs on the device: one could still use what is about to be unmapped. Raises
        while a stream of the process is captured, in whatever mode, and the capture is broken."""

    @abstractmethod
    def ordinal_of(self, uuid: str) -> int | None:
        """What this process calls the device of another rank; None when it does not see it. Ordinals differ between
        processes, by environment variables."""

    @abstractmethod
    def can_access_peer(self, ordinal: int) -> bool:
        """Whether kernels of this device can load and store in the memory of another one."""

    @abstractmethod
    def reserve(self, nbytes: int, alignment: int) -> int:
        """The start of a free range of addresses."""

    @abstractmethod
    def map(self, address: int, nbytes: int, handle: Any) -> None: ...

    @abstractmethod
    def set_access(self, address: int, nbytes: int, devices: Sequence[int]) -> None:
        """Lets kernels of `devices` read and write there. Without it every access is a fault."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def free_address(self, address: int, nbytes: int) -> None: ...

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Memory that is mapped anywhere lives on until it is not."""

    @abstractmethod
    def export_fd(self, handle: Any) -> int:
        """A new descriptor, the caller's to close."""

    @abstractmethod
    def import_fd(self, fd: int) -> Any:
        """A handle of another process' memory; the descriptor may be closed afterwards."""

    @abstractmethod
    def host_alloc(self, nbytes: int) -> int:
        """Pinned memory of the host, for every device of the process and for kernels. Not zeroed."""

    @abstractmethod
    def host_device_address(self, address: int) -> int:
        """Where kernels see pinned memory of the host."""

    @abstractmethod
    def host_free(self, address: int) -> None: ...

    # On an own stream, of which alone the end is awaited. Devices have few hardware queues: a stream that shares one waits for
    # the other's work all the same.

    @abstractmethod
    def copy_to_device(self, address: int, source: int, nbytes: int) -> None:
        """From `source`, an address of the host."""

    @abstractmethod
    def copy_from_device(self, target: int, address: int, nbytes: int) -> None:
        """To `target`, an address of the host."""

    @abstractmethod
    def zero(self, address: int, nbytes: int) -> None: ...


def _captures() -> bool:
    """Whether PyTorch's current stream of this thread is being captured: garbage collection may come to a heap from there.
    No driver has a question about the streams of other threads."""
    torch = sys.modules.get("torch")
    try:
        return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    except (AttributeError, RuntimeError):  # another kind of build; a device that is lost
        return False


def text_of(raw: Any) -> str:
    """A C string of the bindings: bytes with the end somewhere in them, or what knows its own end."""
    return raw.partition(b"\0")[0].decode(errors="replace").strip() if isinstance(raw, bytes) else str(raw).strip()
