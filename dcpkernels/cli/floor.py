"""The stated lower bound of a collective: moving its bytes once, with nothing to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from dcpkernels.cli.measure import take_turns

ROUNDS = 5


def memcpy_samples_us(num_bytes: int, barrier: Callable[[], None]) -> list[float]:
    """Times of `memcpy` of that many bytes on this rank, while every other rank does the same; warm memory."""
    source = torch.ones(max(num_bytes, 1), dtype=torch.uint8)
    target = torch.zeros_like(source)
    to, frm = target.data_ptr(), source.data_ptr()
    copy = {"memcpy": lambda: ctypes.memmove(to, frm, num_bytes)}
    return take_turns(copy, barrier, iters=ROUNDS, warmup=2)["memcpy"]
