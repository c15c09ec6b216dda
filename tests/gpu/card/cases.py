"""What sections share: the context that they get, and a list of cases of which one that fails hides no other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .virtual import Ranks


@dataclass
class Card:
    """ext: the compiled module. device: "cuda", or "cpu" in a dry run. quick: few and small cases. one_grid: all ranks
    in one grid instead of a stream for each. seconds: what a section may take that runs until its time is up.
    timeout_s: of every wait."""

    ext: ModuleType
    device: str
    quick: bool = False
    one_grid: bool = False
    seconds: float = 60.0
    num_sms: int = 1
    timeout_s: float = 5.0
    _streams: list[Any] = field(default_factory=list)

    @property
    def wires(self) -> tuple[str, ...]:
        """Of the target: payload that stays in its source's memory is for CPUs (csrc/arch/cuda.h: kHasPull)."""
        return ("push", "packet8", "packet16", "packet128", *(() if self.device == "cuda" else ("pull",)))

    def streams(self, num_ranks: int) -> list[int]:
        """The same ones for all regions: a device has as many queues as CUDA_DEVICE_MAX_CONNECTIONS says, and streams
        that share one run one after the other, which kernels that wait for each other do not survive."""
        if self.device == "cpu":
            return [0] * num_ranks
        import torch

        while len(self._streams) < num_ranks:
            self._streams.append(torch.cuda.Stream())
        return [stream.cuda_stream for stream in self._streams[:num_ranks]]

    def ranks(self, num_ranks: int, **fields: Any) -> Ranks:
        streams = self.streams(num_ranks)
        return Ranks(self.ext, self.device, num_ranks, streams=streams, timeout_s=self.timeout_s, **fields)


class Cases:
    def __init__(self) -> None:
        self.num = 0
        self.failures: list[str] = []

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        self.num += 1
        try:
            yield
        except Exception as error:
            if is_fatal(error):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{name}: {type(error).__name__} in {where.name}:{where.lineno}: {str(error)[:500]}")
            if len(self.failures) >= 20:
                raise AssertionError(f"20 cases failed; the first: {self.failures[:3]}") from error

    def result(self, **numbers: Any) -> dict[str, Any]:
        result = {"cases": self.num, "failed": len(self.failures), **numbers}
        if self.failures:
            result["failures"] = self.failures
        return {"passed": not self.failures and self.num > 0, **result}


def is_fatal(error: BaseException) -> bool:
    """The device is lost to this process: every later call would fail as well."""
    text = str(error)
    return any(words in text for words in ("illegal", "CUDA error", "unspecified launch failure", "misaligned"))


def until(seconds: float) -> Iterator[int]:
    """0, 1, 2, ... for so long, at least once."""
    end, i = time.monotonic() + seconds, 0
    while i == 0 or time.monotonic() < end:
        yield i
        i += 1
