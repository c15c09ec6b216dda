"""How far rank processes are: counters in a file that all of them map, and bars for who waits."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from dcpkernels.cli import table

_POLL_S = 0.1


class Progress:
    """Two counters a rank, written by that rank alone: tokens that it has made, calls that it has timed.

    `path` is of `file`; None counts for nobody.
    """

    _COUNTERS = struct.Struct("qq")

    def __init__(self, path: str | None, rank: int = 0) -> None:
        self._map: mmap.mmap | bytearray = bytearray(self._COUNTERS.size * (rank + 1))
        if path is not None:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        self._offset = rank * self._COUNTERS.size
        self._tokens = self._calls = 0

    def add_tokens(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        self._write()

    def add_call(self) -> None:
        self._calls += 1
        self._write()

    def _write(self) -> None:
        self._COUNTERS.pack_into(self._map, self._offset, self._tokens, self._calls)

    def read(self) -> tuple[int, int]:
        """(tokens of all ranks together, calls of the slowest rank)."""
        tokens, calls = zip(*self._COUNTERS.iter_unpack(self._map), strict=True)
        return sum(tokens), min(calls)

    @classmethod
    @contextmanager
    def file(cls, num_ranks: int) -> Iterator[str]:
        """A new one with all counters at 0. It has no name in any folder: nobody who is killed leaves it behind."""
        fd = os.memfd_create("dcpkernels-progress")
        try:
            os.truncate(fd, cls._COUNTERS.size * num_ranks)
            yield f"/proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)

    @classmethod
    @contextmanager
    def shown(cls, num_ranks: int, num_tokens: int, num_calls: int) -> Iterator[str]:
        """The path of a new file, for the ranks; bars of what they do until the block is left."""
        with cls.file(num_ranks) as path, _beside(_show, cls(path), num_tokens, num_calls):
            yield path


@contextmanager
def _beside(body: Callable, *args: object) -> Iterator[None]:
    """Runs `body(*args, over)` in a thread; `over` is set when the block is left."""
    over = threading.Event()
    thread = threading.Thread(target=body, args=(*args, over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show(progress: Progress, num_tokens: int, num_calls: int, over: threading.Event) -> None:
    for text, total, which in (
        ("caches of all ranks, rows", num_tokens, 0),
        ("steps and collectives in turns, calls", num_calls, 1),
    ):
        with table.Bar(text, total) as bar:
            _follow(progress, which, total, bar.update, over)


def _follow(progress: Progress, which: int, total: int, update: Callable[[int], object], over: threading.Event) -> None:
    done, ended = 0, False
    while done < total and not ended:
        ended = over.wait(_POLL_S)  # first, so that what is read after the end is all there is
        update(done := progress.read()[which])


class RowBars:
    """A bar of a command's rows and, below, one of the calls in the row that is being measured; where nobody is
    watching, a line for each row that is done. On stderr."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self._done, self._began = num_rows, 0, time.monotonic()
        self._bars = None

    def __enter__(self) -> RowBars:  # noqa: PYI034  typing has Self from Python 3.11 on
        if table.is_rich(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column

            # In a narrow terminal the text is what takes two lines; what is done of how much, and the time, stay whole.
            text = TextColumn("{task.description}", table_column=Column())
            columns = text, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()
            self._bars = Progress(*columns, console=Console(stderr=True), redirect_stdout=False)
            self._bars.start()
            self._rows = self._bars.add_task("rows", total=self._num_rows, completed=self._done)
            self._bars.tasks[0].start_time = self._began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Between rows, for what goes to stdout. Rich would draw its bars over some of that, or, asked to take care of
        stdout, write it to stderr, which may be another place."""
        if self._bars is not None:
            self._bars.live.transient = True  # wiped
            self._bars.stop()
        yield
        self.__enter__()

    @contextmanager
    def row(self, text: str, num_ranks: int, num_calls: int) -> Iterator[str]:
        """While the next row is measured, of so many calls of a rank: the path that the ranks need for `Progress`."""
        start = time.monotonic()
        with Progress.file(num_ranks) as path:
            if self._bars is None:
                yield path
            else:
                task = self._bars.add_task(text, total=num_calls)
                try:
                    with _beside(self._follow_calls, Progress(path), task, num_calls):
                        yield path
                finally:
                    self._bars.remove_task(task)
        self._done += 1
        if self._bars is not None:
            self._bars.update(self._rows, completed=self._done)
        else:
            passed = f"{num_calls:,} calls, {time.monotonic() - start:.1f} s"
            print(f"row {self._done} of {self._num_rows}: {text}: {passed}", file=sys.stderr)

    def _follow_calls(self, progress: Progress, task: int, num_calls: int, over: threading.Event) -> None:
        _follow(progress, 1, num_calls, lambda done: self._bars.update(task, completed=done), over)
