"""Memory that tells: buffers whose unread bytes are NaN and whose unwritten bytes are a known pattern.

The pattern fills the guard bands around a tensor and the gaps that its strides leave. It reads as a quiet NaN
in every floating dtype, so one pattern finds both faults: a read of a gap turns the result into NaN, and a
write into a gap destroys the pattern, also when the kernel writes NaN (hardware and compilers make other NaNs
than this one).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# Little-endian 0xFFFD: in fp16 and bf16, and repeated in fp32 and fp64, a quiet NaN.
_PATTERN = torch.tensor([0xFD, 0xFF], dtype=torch.uint8)


def fill_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a floating tensor with NaN, in place, through any strides. Returns it."""
    return tensor.fill_(float("nan"))


class Guarded:
    """A tensor inside a larger buffer whose other bytes are watched.

    `tensor` has the given shape, dtype and strides (elements; contiguous by default, non-negative); its
    elements start as the pattern, that is, NaN. `guard_bytes` lie before and after it. `offset` (elements)
    shifts its start, to test alignments: with offset 0 it is aligned to 64 bytes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        guard_bytes: int = 256,
        offset: int = 0,
    ) -> None:
        shape = tuple(shape)
        strides = _contiguous_strides(shape) if strides is None else tuple(strides)
        if len(strides) != len(shape) or any(stride < 0 for stride in strides):
            raise ValueError(f"Guarded: strides must be {len(shape)} numbers >= 0 (got {strides})")
        itemsize = torch.empty((), dtype=dtype).element_size()
        last_element = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        span = 0 if 0 in shape else last_element + 1
        # torch aligns CPU storage to 64 bytes; a guard of whole 64s hands that on to the tensor.
        guard_bytes = -(-guard_bytes // 64) * 64
        num_bytes = -(-(2 * guard_bytes + (offset + span) * itemsize) // 64) * 64
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._bytes.view(-1, len(_PATTERN)).copy_(_PATTERN)
        self._start = guard_bytes + offset * itemsize
        self._itemsize = itemsize
        self._layout = (shape, strides)
        elements = self._bytes[self._start : self._start + span * itemsize].view(dtype)
        self.tensor = elements.as_strided(shape, strides) if span else elements.view(shape)

    def check(self) -> None:
        """Raises AssertionError when a byte outside the tensor's elements has changed, and says which."""
        shape, strides = self._layout
        outside = torch.ones(len(self._bytes), dtype=torch.bool)
        if self.tensor.numel():
            byte_strides = [stride * self._itemsize for stride in strides]
            outside.as_strided((*shape, self._itemsize), (*byte_strides, 1), self._start).fill_(False)
        changed = self._bytes.view(-1, len(_PATTERN)) != _PATTERN
        bad = (changed.view(-1) & outside).nonzero().view(-1)
        if len(bad):
            first = int(bad[0]) - self._start
            raise AssertionError(
                f"{len(bad)} bytes outside the tensor were written; the first is at byte {first} from its "
                f"start (shape {shape}, strides {strides}, {self._itemsize}-byte elements)"
            )


@contextmanager
def unchanged(*tensors: torch.Tensor) -> Iterator[None]:
    """Asserts that the block leaves every byte of the tensors' storages as it was, gaps and NaNs included."""
    storages = [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in tensors]
    before = [storage.clone() for storage in storages]
    yield
    for i, (was, now) in enumerate(zip(before, storages, strict=True)):
        changed = (was != now).nonzero().view(-1)
        assert not len(changed), f"tensor {i}: {len(changed)} bytes changed, the first at byte {int(changed[0])}"


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
