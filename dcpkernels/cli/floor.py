"""The stated lower bound of a collective: moving its bytes once, with nothing to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from dcpkernels.cli.measure import take_turns

ROUNDS = 5


def moved_bytes(num_ranks: int, num_tokens: int, num_heads: int, head_dim: int, item_bytes: int) -> int:
    """What one rank sends to the others in one a2a_lse_reduce: their heads' payload, an fp32 LSE per row and head."""
    return (num_ranks - 1) * num_tokens * (num_heads // num_ranks) * (head_dim * item_bytes + 4)


def memcpy_samples_us(num_bytes: int, barrier: Callable[[], None]) -> list[float]:
    """Times of `memcpy` of that many bytes on this rank, while every other rank does the same; warm memory."""
    source = torch.ones(max(num_bytes, 1), dtype=torch.uint8)
    target = torch.zeros_like(source)
    to, frm = target.data_ptr(), source.data_ptr()
    copy = {"memcpy": lambda: ctypes.memmove(to, frm, num_bytes)}
    return take_turns(copy, barrier, iters=ROUNDS, warmup=2)["memcpy"]
