"""Random weights, made piece by piece: a rank draws its own heads and no others, and they do not depend on how many
ranks there are."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch


def draw(*shape: int, key: tuple[object, ...], dtype: torch.dtype, std: float | None = None) -> torch.Tensor:
    """[*shape] of N(0, std^2), a function of `key` alone. std None: 1 / sqrt(shape[-1]), so that the product of a row
    with a vector of unit variance has unit variance."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    std = shape[-1] ** -0.5 if std is None else std
    return (torch.randn(shape, generator=generator) * std).to(dtype)


def draw_each(
    indices: Iterable[int], *shape: int, key: tuple[object, ...], dtype: torch.dtype, std: float | None = None
) -> torch.Tensor:
    """[n, *shape]: one `draw` for each of the n indices (heads, experts), which is part of the key."""
    return torch.stack([draw(*shape, key=(*key, index), dtype=dtype, std=std) for index in indices])


def draw_norm(size: int, *, key: tuple[object, ...], dtype: torch.dtype) -> torch.Tensor:
    """[size] around 1: the weight of an RMSNorm, uneven so that leaving it out is seen."""
    return (1 + draw(size, key=key, dtype=torch.float32, std=0.1)).to(dtype)
