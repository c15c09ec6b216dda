"""Calls whose channels run in several threads, which Python owns: csrc starts none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from dcpkernels.errors import DcpError

ParallelFor = Callable[[int, Callable[[int, int], None]], None]


class EachOnce:
    """A `parallel_for` that runs every channel once, whatever the given one does: a channel that is left out would be
    waited for. What it raises is raised when no channel runs any more. Only an interrupt (Ctrl-C) goes through at once:
    the binding then ends the call on all ranks."""

    def __init__(self, parallel_for: ParallelFor) -> None:
        self._parallel_for = parallel_for

    def __call__(self, num_channels: int, body: Callable[[int, int], None]) -> None:
        run = _Run(body, num_channels)
        try:
            self._parallel_for(num_channels, run.body)
        except Exception as error:
            run.errors.append(error)
        run.finish()
        if run.errors:
            raise run.errors[0]


class _Run:
    """The channels of one call: each runs once, and none after the end of the call."""

    def __init__(self, run: Callable[[int, int], None], num_channels: int) -> None:
        self._run = run
        self._left = set(range(num_channels))
        self._num_running = 0
        self._changed = threading.Condition()
        self.errors: list[BaseException] = []

    def body(self, first: int, end: int) -> None:
        """For `parallel_for`."""
        channels = range(first, end)
        with self._changed:
            if not self._left.issuperset(channels):
                error = DcpError(
                    f"parallel_for: body must be called once for each channel (again for {first} .. {end})"
                )
                self.errors.append(error)
                raise error
            self._left.difference_update(channels)
            self._num_running += 1
        try:
            self._run(first, end)
        except BaseException as error:  # Ctrl-C: the kernel has told the peers
            self.errors.append(error)
            raise
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Runs what was left out, in this thread, and waits for what still runs."""
        if self._left and not self.errors:
            left = sorted(self._left)
            self.errors.append(DcpError(f"parallel_for: body must be called for all channels (was not for {left})"))
        while self._left:
            channel = min(self._left)
            self.body(channel, channel + 1)
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)


class ThreadPool:
    """The default `parallel_for`: a thread for each channel but the first, which the caller runs."""

    def __init__(self, num_channels: int) -> None:
        self._num_threads = num_channels - 1
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="dcpkernels-channel")

    def __call__(self, num_channels: int, body: Callable[[int, int], None]) -> None:
        others = [self._pool.submit(body, channel, channel + 1) for channel in range(1, num_channels)]
        body(0, 1)
        wait(others)
        for other in others:
            other.result()

    def start(self) -> None:
        """Has all threads started: as long as none is free, the pool makes another one."""
        everybody = threading.Barrier(self._num_threads + 1)
        others = [self._pool.submit(everybody.wait) for _ in range(self._num_threads)]
        everybody.wait()
        wait(others)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
