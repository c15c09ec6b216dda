"""A stand-in for what the bench uses of torch.cuda, with one device of whose streams all share one queue: work takes the
time that it says, in microseconds of a clock that only work moves. `log` has what was done, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

LAUNCH_US = 3.0  # of a kernel that sleeps
CYCLES_PER_US = 1300.0


class FakeCuda:
    """`torch.cuda`. With `torch_with` the module `torch` that a module under test is given."""

    def __init__(self, num_devices: int = 4) -> None:
        self.now_us = 0.0
        self.log: list[Any] = []
        self.device: int | None = None
        self._num_devices = num_devices
        self._stream = Stream(self, "default")
        self._num_streams = 0
        self._capture: list[Callable[[], None]] | None = None

    def torch_with(self) -> Any:
        """Tensors are of the CPU; `log` says on which device they were asked for."""

        def make(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def made(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
                self.log.append(("allocate", device))
                tensor = factory(*size, dtype=dtype).as_subclass(_Tensor)
                tensor.cuda, tensor.at = self, device
                return tensor

            return made

        return SimpleNamespace(
            cuda=self, ones=make(torch.ones), zeros=make(torch.zeros), uint8=torch.uint8, device=torch.device,
            __version__="0",
        )  # fmt: skip

    # -- what tests call

    def work(self, name: str, us: float) -> None:
        """As an op: enqueued where the current stream is, or captured."""

        def run() -> None:
            self.log.append(name)
            self.now_us += us

        if self._capture is not None:
            self._capture.append(run)
        else:
            run()

    def take_log(self) -> list[Any]:
        log, self.log = self.log, []
        return log

    # -- torch.cuda

    def device_count(self) -> int:
        return self._num_devices

    def get_device_name(self, idx: int) -> str:
        return "a GPU" if idx else "another GPU"

    def set_device(self, idx: int) -> None:
        self.device = idx
        self.log.append(("device", idx))

    def Stream(self) -> Stream:
        self._num_streams += 1
        return Stream(self, f"stream {self._num_streams}")

    def current_stream(self) -> Stream:
        return self._stream

    def set_stream(self, stream: Stream) -> None:
        self._stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    @contextlib.contextmanager
    def graph(self, graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert self._capture is None and stream is self._stream and stream.name != "default"
        assert capture_error_mode == "thread_local"
        self.log.append("capture")
        self._capture = graph.steps
        yield
        self._capture = None

    def _sleep(self, cycles: int) -> None:
        self.work(f"sleep {round(cycles / CYCLES_PER_US, 1):g}", LAUNCH_US + cycles / CYCLES_PER_US)


class _Tensor(torch.Tensor):
    cuda: FakeCuda
    at: str

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        self.cuda.work(f"{self.numel()} bytes to {self.at} on {self.cuda.current_stream().name}", self.numel() / 100)
        return self


class Stream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._cuda.log.append("stream.synchronize")


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._at_us, self._is_done = cuda, None, False

    def record(self) -> None:
        assert self._cuda._capture is None
        self._cuda.log.append("event")
        self._at_us, self._is_done = self._cuda.now_us, False

    def synchronize(self) -> None:
        self._is_done = True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert end._is_done, "torch raises: the event has not happened yet"
        return (end._at_us - self._at_us) / 1e3


class Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.steps = cuda, []

    def replay(self) -> None:
        self._cuda.log.append("replay")
        for step in self.steps:
            step()
