"""Releases that are put off: of what a kernel may still use, where the device could not tell whether it is idle, as in the
middle of a capture. They are tried again when a heap of the process is made or closed next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Its methods are atomic: a finaliser may come from anywhere, also from the middle of `try_again`.
_put_off: deque[Callable[[], None]] = deque()


def put_off(release: Callable[[], None]) -> None:
    """`release` never raises, and may be called again; where it is too early once more, it puts itself off."""
    _put_off.append(release)


def try_again() -> None:
    """Each that is put off, once. Waits for kernels of this process. Never raises."""
    for _ in range(len(_put_off)):
        try:
            release = _put_off.popleft()
        except IndexError:  # another thread has taken it
            return
        release()


def num_put_off() -> int:
    return len(_put_off)
