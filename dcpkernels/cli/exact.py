"""What the benches of the gathers share: inputs of any bytes, which come out as they went in or are wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist

# (output, input, group=): torch 2.13 deprecates the old name, earlier ones lack the new one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SEEDS_PER_RUN = 4096  # more than there are ranks


def generator_of(rank: int, seed: int) -> torch.Generator:
    """For the input of one rank, which any other can make as well."""
    return torch.Generator().manual_seed(seed * _SEEDS_PER_RUN + rank)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Every pattern of bits, NaNs too: a gather has to move them all."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


def words_of(tensor: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """A tensor whose last dim is a multiple of row_bytes, as the widest integers: torch moves those the fastest, and
    float8 with few of its functions."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.view(next(dtype for width, dtype in widths.items() if row_bytes % width == 0))


def wrong_bytes(out: torch.Tensor, truth: torch.Tensor) -> int:
    """How many bytes differ; all where shape or dtype do."""
    if (out.shape, out.dtype) != (truth.shape, truth.dtype):
        return truth.numel() * truth.element_size()
    return int((out.contiguous().view(torch.uint8) != truth.contiguous().view(torch.uint8)).sum())
