"""Inputs that differ from sample to sample, in a way that goes through the op unchanged: a result that an earlier call has
left behind is then a wrong one, although one reference serves all samples.

A stamp is a number. A tensor goes from stamp `a` to stamp `b` by being stamped with `a ^ b`.
"""

from __future__ import annotations

import torch

_SIGN_BITS = 16
_SHIFTS = 64
_FRACTION_BITS = 10  # 2^-10 at 2^13 is an fp32 yet: shifts of what is smaller are exact


def signs(stamp: int, dim: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """[dim] of +1 and -1. For sums over other dims, and rounding: neither minds the sign."""
    bits = torch.arange(dim, device=device) % _SIGN_BITS
    return (1 - 2 * ((stamp >> bits) & 1)).to(dtype)


def stamp_signs(tensor: torch.Tensor, stamp: int) -> None:
    """Writes every element of [..., dim] anew."""
    tensor.mul_(signs(stamp, tensor.shape[-1], tensor.dtype, tensor.device))


def stamp_bytes(tensor: torch.Tensor, stamp: int) -> None:
    """Writes every byte of a contiguous tensor anew. For what is moved and not looked at."""
    tensor.view(torch.uint8).bitwise_xor_(stamp & 0xFF)


def for_shifts(lse: torch.Tensor) -> torch.Tensor:
    """Of fp32 below 2^12 in size: with so few bits that it can be shifted, and back, without being rounded."""
    return (lse * 2**_FRACTION_BITS).round() / 2**_FRACTION_BITS


def shift_lse(lse: torch.Tensor, before: int, stamp: int) -> None:
    """From one stamp to another: all of it up by the same. A merge does not mind where all ranks do so, and minds very much
    the LSEs of a peer that are from another sample."""
    lse.add_(stamp % _SHIFTS - before % _SHIFTS)
