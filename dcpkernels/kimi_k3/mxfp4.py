"""MXFP4, as published weights are stored: blocks of 32 four-bit floats that share a scale.

OCP Microscaling Formats (MX) v1.0: an element is E2M1 (sign, 0 0.5 1 1.5 2 3 4 6), a scale is E8M0, 2^(byte - 127),
255 is NaN. Two elements a byte, the first in the low half, as compressed-tensors' mxfp4-pack-quantized lays them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcpkernels.errors import DcpInvalidArgument

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
_MIDPOINTS = torch.tensor([(a + b) / 2 for a, b in zip(_MAGNITUDES, _MAGNITUDES[1:], strict=False)])
_TOP_EXPONENT = 2  # of 4 and 6, the largest elements
_BIAS, _NAN = 127, 255


@dataclass(frozen=True)
class MXFP4Tensor:
    """packed uint8 [..., n / 2] and scales uint8 [..., n / 32] of a tensor [..., n].

    Raises DcpInvalidArgument for shapes that do not fit together.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        expected = (*self.packed.shape[:-1], self.packed.shape[-1] * 2 // BLOCK)
        if self.packed.shape[-1] * 2 % BLOCK or tuple(self.scales.shape) != expected:
            raise DcpInvalidArgument(
                f"mxfp4: scales must be one for each {BLOCK} elements of packed {list(self.packed.shape)} "
                f"(got {list(self.scales.shape)})"
            )

    def __getitem__(self, index: int) -> MXFP4Tensor:
        return MXFP4Tensor(self.packed[index], self.scales[index])

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """[..., n]. Exact, in bfloat16 too; but what the largest two scales put beyond float32's range is inf."""
        nibbles = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(-2)
        values = _VALUES[nibbles.int()].unflatten(-1, (-1, BLOCK))
        # In fp64: 2^-127 times 0.5 is far below what fp32 can hold without subnormals.
        scales = torch.ldexp(torch.ones(self.scales.shape, dtype=torch.float64), self.scales.int() - _BIAS)
        scales = torch.where(self.scales == _NAN, torch.nan, scales)
        return (values * scales[..., None]).flatten(-2).to(dtype)


def quantise(tensor: torch.Tensor) -> MXFP4Tensor:
    """The nearest elements (ties to even) under the scale 2^(floor(log2 of the block's largest magnitude) - 2),
    section 6.3 of the specification; larger ones saturate. [..., n] with n a multiple of 32. Raises
    DcpInvalidArgument for another n, NaN or infinity."""
    if tensor.shape[-1] % BLOCK:
        raise DcpInvalidArgument(f"mxfp4: the last dim must be a multiple of {BLOCK} (got {tensor.shape[-1]})")
    if not bool(torch.isfinite(tensor).all()):
        raise DcpInvalidArgument("mxfp4: the tensor must be finite (it holds NaN or infinity)")
    blocks = tensor.double().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1 - _TOP_EXPONENT  # frexp's mantissa is in [0.5, 1)
    exponent = torch.where(largest == 0, 0, exponent).clamp(-_BIAS, _NAN - 1 - _BIAS)
    magnitude = torch.ldexp(blocks.abs(), -exponent)
    # How many midpoints lie below; a tie goes up where that gives an even number.
    below, to = (torch.bucketize(magnitude, _MIDPOINTS.double(), right=right) for right in (False, True))
    code = torch.where(to % 2 == 0, to, below)
    code = (code + 8 * blocks.signbit()).flatten(-2).to(torch.uint8)
    return MXFP4Tensor(code[..., 0::2] | code[..., 1::2] << 4, (exponent.squeeze(-1) + _BIAS).to(torch.uint8))
