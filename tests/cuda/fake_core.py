"""What every function of the fake driver shares: counting, faults on demand, refusals; devices and contexts."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.cuda.bindings import real

_RELAXED = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Refusal(Exception):
    """Ends a call with this CUresult."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def require(holds: Any, number: int = 1) -> None:
    """1 is CUDA_ERROR_INVALID_VALUE."""
    if not holds:
        raise Refusal(number)


def call(needs: str = "init", *, breaks_capture: bool = False) -> Callable[[Any], Any]:
    """A function of the driver: counted, may be told to fail, returns a tuple that starts with a CUresult. `needs`:
    "nothing", "init", or "context" (a current one; for the calls that have CUDA_ERROR_INVALID_CONTEXT in the manual).
    `breaks_capture`: is taken to be "potentially unsafe" during a capture, as the manual calls cudaMalloc."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def run(self: FakeCore, *args: Any) -> tuple[Any, ...]:
            with self.lock:
                self.calls.append(function.__name__)
                try:
                    require(needs == "nothing" or self.is_init, 3)
                    require(needs != "context" or self.stack(), 201)
                    if breaks_capture and self.capture == "going on" and self.capture_mode() != _RELAXED:
                        self.capture = "broken"
                        require(False, 900)
                    self._act(function.__name__)
                    result = function(self, *args)
                except Refusal as refusal:
                    return real.CUresult(refusal.number), None
            return (real.CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        return run

    return wrap


class FakeCore:
    """State of a process, and what tests ask of it."""

    devices: list[int]  # the machine's number of each ordinal
    cut: set[tuple[int, int]]  # of the machine's numbers: from, to

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.is_init = False
        self.capture = ""  # "going on": one of some thread, in the global mode; "broken": no more
        self.contexts: Counter[int] = Counter()  # by ordinal
        self._actions: dict[str, tuple[int, Callable[[], None]]] = {}
        self._last = 0x1000
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("cu", "_")):
            raise AttributeError(name)  # a function that is not faked must not reach the real driver
        return getattr(real, name)

    def fail(self, name: str, nth: int = 1, number: int = 999) -> None:
        """Has the nth call of `name` from now on (1 = the next) return this CUresult and do nothing."""
        self.act(name, nth, lambda: require(False, number))

    def act(self, name: str, nth: int, action: Callable[[], None]) -> None:
        """Has the nth call of `name` from now on begin with `action()`."""
        with self.lock:
            self._actions[name] = nth, action

    def heal(self) -> bool:
        """Takes back what was asked for, and what a failed call left of contexts on this thread's stack. Returns whether all
        of it had happened."""
        with self.lock:
            happened = not self._actions
            self._actions.clear()
            self.stack().clear()
            self._thread.mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            return happened

    def _act(self, name: str) -> None:
        if name in self._actions:
            nth, action = self._actions.pop(name)
            if nth == 1:
                action()
            else:
                self._actions[name] = nth - 1, action

    def new(self) -> int:
        """A number that no object has had."""
        self._last += 0x10
        return self._last

    @call("nothing")
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._thread.mode = self.capture_mode(), real.CUstreamCaptureMode(mode)
        return before

    def capture_mode(self) -> Any:
        return getattr(self._thread, "mode", real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def stack(self) -> list[int]:
        """Ordinals of the thread's contexts, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[int] = self._thread.stack
        return stack

    def ordinal(self, device: Any) -> int:
        require(0 <= int(device) < len(self.devices), 101)
        return int(device)

    def uuid(self, ordinal: int) -> str:
        return bytes([0xAB, self.devices[ordinal], *[7] * 14]).hex()

    def reaches(self, ordinal: int, uuid: str) -> bool:
        """Whether a device can load and store in the memory of another one, or in its own."""
        pair = self.devices[ordinal], bytes.fromhex(uuid)[1]
        return pair not in self.cut
