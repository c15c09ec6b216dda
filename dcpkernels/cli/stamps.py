"""Inputs that differ from sample to sample, in a way that goes through the op unchanged: a result that an earlier call has
left behind is then a wrong one, although one reference serves all samples.

A stamp is a number. A tensor goes from stamp `a` to stamp `b` by being stamped with `a ^ b`.
"""

from __future__ import annotations

import torch

_SIGN_BITS = 16


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
