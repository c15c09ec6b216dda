"""How far rank processes are: counters in a file that all of them map, and bars for who waits."""

from __future__ import annotations

import mmap
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcpkernels.cli import table

_POLL_S = 0.1


class Progress:
    """Two counters a rank, written by that rank alone: tokens that it has made, calls that it has timed."""

    _COUNTERS = struct.Struct("qq")

    def __init__(self, path: str, rank: int = 0) -> None:
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
    def shown(cls, num_ranks: int, num_tokens: int, num_calls: int) -> Iterator[str]:
        """The path of a new file, for the ranks; bars of what they do until the block is left."""
        with tempfile.TemporaryDirectory(prefix="dcpkernels-") as folder:
            path = Path(folder, "progress")
            path.write_bytes(bytes(cls._COUNTERS.size * num_ranks))
            progress, over = cls(str(path)), threading.Event()
            thread = threading.Thread(
                target=_show, args=(progress, over, num_tokens, num_calls), name="progress", daemon=True
            )
            thread.start()
            try:
                yield str(path)
            finally:
                over.set()
                thread.join()


def _show(progress: Progress, over: threading.Event, num_tokens: int, num_calls: int) -> None:
    for text, total, which in (
        ("caches of all ranks, rows", num_tokens, 0),
        ("steps and collectives in turns, calls", num_calls, 1),
    ):
        with table.Bar(text, total) as bar:
            done, ended = 0, False
            while done < total and not ended:
                ended = over.wait(_POLL_S)  # first, so that what is read after the end is all there is
                bar.update(done := progress.read()[which])
