"""A fake driver's streams and its memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fake_gpu import pages
from tests.fake_gpu.core import Core, require

GARBAGE = 0xCD  # what new memory is full of


class Streams(Core):
    """Work on a stream is done when the stream is synchronised, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, list[Callable[[], Any]]] = {}
        self._host: dict[int, int] = {}

    def new_stream(self) -> int:
        stream = self.new()
        self._streams[stream] = []
        return stream

    def end_stream(self, stream: int) -> None:
        require(self._streams.pop(stream, None) is not None, 400)

    def wait_stream(self, stream: int) -> None:
        require(stream in self._streams, 400)
        while self._streams[stream]:
            self._streams[stream].pop(0)()

    def enqueue(self, stream: int, work: Callable[[], Any]) -> None:
        require(stream in self._streams, 400)
        self._streams[stream].append(work)

    def new_host(self, nbytes: int) -> int:
        require(nbytes > 0)
        address, size = pages.host(nbytes, GARBAGE)
        self._host[address] = size
        return address

    def end_host(self, address: int) -> None:
        require(address in self._host)
        pages.free(address, self._host.pop(address))
