"""What every function of a fake driver shares, of any vendor: counting, faults on demand, refusals."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class Refusal(Exception):
    """Ends a call with this error number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def require(holds: Any, number: int = 1) -> None:
    """1 is "invalid value" with every vendor."""
    if not holds:
        raise Refusal(number)


def call(
    needs: str = "init", *, breaks_capture: bool = False, waits_for_all: bool = False, results: int = 1
) -> Callable[[Any], Any]:
    """A function of the driver: counted, may be told to fail, returns a tuple that starts with an error code. `needs` is
    the vendor's (`Core.allow`). `breaks_capture`: is taken to be "potentially unsafe" during a capture, as the manuals call
    cudaMalloc. `waits_for_all`: of a device, which breaks a capture in any mode, and fails until it is ended. `results`: how
    many there are besides the code."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def run(self: Core, *args: Any) -> tuple[Any, ...]:
            with self.lock:
                self.calls.append(function.__name__)
                try:
                    self.allow(needs)
                    going_on = self.capture == "going on" and breaks_capture and self.minds_capture()
                    if going_on or (self.capture and waits_for_all):
                        self.capture = "broken"
                        require(False, 900)
                    self._act(function.__name__)
                    result = function(self, *args)
                except Refusal as refusal:
                    return self.failed(refusal.number, results)
            return (self.code(0), *(result if isinstance(result, tuple) else (result,)))

        return run

    return wrap


class Core:
    """State of a process, and what tests ask of it."""

    devices: list[int]  # the machine's number of each ordinal
    cut: set[tuple[int, int]]  # of the machine's numbers: from, to

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.capture = ""  # "going on": one of some thread, in the global mode; "broken": no more, until it is ended
        self._actions: dict[str, tuple[int, Callable[[], None]]] = {}
        self._last = 0x1000
        self._thread = threading.local()

    # ---- the vendor's part

    def code(self, number: int) -> Any:
        """The error code of that number."""
        raise NotImplementedError

    def failed(self, number: int, results: int) -> tuple[Any, ...]:
        """What a call returns that has failed."""
        return (self.code(number), None)

    def allow(self, needs: str) -> None:
        """Raises Refusal where a call with these needs may not be made."""

    def minds_capture(self) -> bool:
        """Whether this thread's calls break another one's capture: it has not said that they are to stay out of it."""
        raise NotImplementedError

    # ---- faults on demand

    def fail(self, name: str, nth: int = 1, number: int = 999) -> None:
        """Has the nth call of `name` from now on (1 = the next) return this error and do nothing."""
        self.act(name, nth, lambda: require(False, number))

    def act(self, name: str, nth: int, action: Callable[[], None]) -> None:
        """Has the nth call of `name` from now on begin with `action()`."""
        with self.lock:
            self._actions[name] = nth, action

    def heal(self) -> bool:
        """Takes back what was asked for. Returns whether all of it had happened."""
        with self.lock:
            happened = not self._actions
            self._actions.clear()
            return happened

    def last_error(self) -> int:
        """Of the thread, where a driver keeps it for whoever asks."""
        return 0

    def _act(self, name: str) -> None:
        if name in self._actions:
            nth, action = self._actions.pop(name)
            if nth == 1:
                action()
            else:
                self._actions[name] = nth - 1, action

    # ---- numbers and devices

    def new(self) -> int:
        """A number that no object has had."""
        self._last += 0x10
        return self._last

    def ordinal(self, device: Any) -> int:
        require(0 <= int(device) < len(self.devices), 101)
        return int(device)

    def uuid(self, ordinal: int) -> str:
        return bytes([0xAB, self.devices[ordinal], *[7] * 14]).hex()

    def reaches(self, ordinal: int, uuid: str) -> bool:
        """Whether a device can load and store in the memory of another one, or in its own."""
        pair = self.devices[ordinal], bytes.fromhex(uuid)[1]
        return pair not in self.cut
