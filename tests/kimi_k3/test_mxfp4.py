"""MXFP4 against the tables of the OCP Microscaling Formats (MX) specification v1.0, typed off here, and against the
decoder that transformers has for gpt-oss."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.mxfp4 import MXFP4Tensor, quantise
from tests.kimi_k3.conftest import oracle, random

# Section 5.3.3, table 5: sign, two bits of exponent with bias 1, one bit of mantissa. No infinities, no NaN.
E2M1 = {
    0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0,
    0b1000: -0.0, 0b1001: -0.5, 0b1010: -1.0, 0b1011: -1.5, 0b1100: -2.0, 0b1101: -3.0, 0b1110: -4.0, 0b1111: -6.0,
}  # fmt: skip
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def _e8m0(byte: int) -> float:
    """Section 5.4.1, table 7: exponent with bias 127, no sign, no mantissa, no zero; 255 is NaN."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def _all_bytes(scale: int) -> MXFP4Tensor:
    """All 256 bytes, in rows of one block each, under the same scale."""
    return MXFP4Tensor(ALL_BYTES.view(16, 16), torch.full((16, 1), scale, dtype=torch.uint8))


@pytest.mark.parametrize("scale", [0, 1, 2, 126, 127, 128, 252, 253, 254, 255])
def test_every_byte_under_a_scale(scale: int) -> None:
    # The first element of two is in the low half of a byte.
    by_table = [E2M1[half] * _e8m0(scale) for byte in range(256) for half in (byte & 15, byte >> 4)]
    expected = torch.tensor(by_table, dtype=torch.float64).view(16, 32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = _all_bytes(scale).dequantise(dtype)
        assert out.dtype == dtype
        assert torch.equal(out.nan_to_num(nan=7e77), expected.to(dtype).nan_to_num(nan=7e77))
        assert torch.equal(out.signbit(), expected.signbit()) or scale == 255  # -0 too
    # In fp32 and bf16 nothing is lost but what is above their range.
    wide = expected.abs() >= 2.0**128
    assert bool(wide.any()) == (scale in (253, 254))
    for dtype in (torch.float32, torch.bfloat16):
        assert scale == 255 or torch.equal(expected.to(dtype).double()[~wide], expected[~wide])


def test_all_scales_against_torch() -> None:
    """Under E2M1's 1.0 an element is its scale."""
    ones = MXFP4Tensor(torch.full((256, 16), 0b0010_0010, dtype=torch.uint8), ALL_BYTES[:, None])
    expected = ALL_BYTES.view(torch.float8_e8m0fnu).float()[:, None].expand(256, 32)
    assert torch.equal(ones.dequantise(torch.float32).nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_against_the_decoder_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (3, 5, 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 5, 4), generator=generator, dtype=torch.uint8)
    decode = oracle("transformers.integrations.mxfp4").convert_moe_packed_tensors
    for dtype in (torch.float32, torch.bfloat16):
        expected = decode(packed.unflatten(-1, (4, 16)), scales, dtype=dtype)
        # It is made for weights that are used transposed.
        expected = expected if expected.shape == (3, 5, 128) else expected.transpose(-1, -2)
        assert torch.equal(MXFP4Tensor(packed, scales).dequantise(dtype), expected)
        assert torch.equal(MXFP4Tensor(packed, scales)[1].dequantise(dtype), expected[1])


# -- quantise


def _decode_exactly(tensor: MXFP4Tensor) -> list[list[Fraction]]:
    """By the tables, without dequantise: rows of one block each."""
    assert tensor.packed.dtype == tensor.scales.dtype == torch.uint8
    rows = []
    for packed, scale in zip(tensor.packed.tolist(), tensor.scales.flatten().tolist(), strict=True):
        rows.append([Fraction(E2M1[half]) * Fraction(2) ** (scale - 127) for b in packed for half in (b & 15, b >> 4)])
    return rows


def _block(*values: float) -> torch.Tensor:
    """A block of these and zeros, in fp64."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=torch.float64)


@pytest.mark.parametrize("scale", [0, 1, 64, 127, 128, 253, 254])
def test_what_is_representable_comes_back(scale: int) -> None:
    """All 16 elements, with and without the largest ones of the block."""
    for largest in range(1, 8):
        some = [half for half in E2M1 if half & 7 <= largest]
        block = _block(*(E2M1[half] * _e8m0(scale) for half in some))
        out = quantise(block)
        assert _decode_exactly(out) == [[Fraction(value) for value in block[0].tolist()]]
        assert torch.equal(out.dequantise(torch.float64), block)


@pytest.mark.parametrize(
    ("value", "expected"),
    # Under a scale of 1. Ties go to the element whose mantissa bit is 0: 0, 1, 2, 4.
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4),
     (0.2501, 0.5), (0.7499, 0.5), (1.2501, 1.5), (1.7499, 1.5), (2.5001, 3), (3.4999, 3), (5.0001, 6), (4.9999, 4),
     (0.2499, 0), (6.9999, 6), (7.9999, 6)],
)  # fmt: skip
def test_nearest_and_ties_to_even(value: float, expected: float) -> None:
    for sign in (1, -1):
        for exponent in (0, -20, 20):  # of the block
            out = quantise(_block(sign * value * 2.0**exponent, 4.0 * 2.0**exponent))  # 4 makes the scale 1
            assert out.scales.tolist() == [[127 + exponent]]
            assert _decode_exactly(out)[0][0] == Fraction(sign * expected) * Fraction(2) ** exponent


@pytest.mark.parametrize("largest", [1.0, 1.9999, 2.0, 3.0, 3.9999, 4.0, 5.9, 6.0, 7.9999, 8.0, 1e-30, 1e30, 0.3, -5.0])
def test_scale_is_that_of_the_largest(largest: float) -> None:
    """Section 6.3: 2^(floor(log2 max |v|) - 2), since 4 = 2^2 is the largest power of two among the elements. So what
    lies between 6 and 8 of them saturates."""
    out = quantise(_block(0.01 * largest, largest, -0.9 * largest))
    exponent = math.floor(math.log2(abs(largest))) - 2
    assert out.scales.tolist() == [[127 + exponent]]
    scaled = largest / 2.0**exponent
    assert 4 <= abs(scaled) < 8
    kept = float(_decode_exactly(out)[0][1]) / 2.0**exponent
    assert abs(kept) == (6 if abs(scaled) > 5 else 4)
    assert (kept < 0) == (largest < 0)


def test_scale_at_the_ends_of_its_range() -> None:
    tiny, huge = quantise(_block(2.0**-128, 2.0**-140)), quantise(_block(6 * 2.0**127, -(2.0**140)))
    assert tiny.scales.item() == 0
    assert _decode_exactly(tiny)[0][:2] == [Fraction(2) ** -128, 0]
    assert huge.scales.item() == 254  # not 255, NaN
    assert _decode_exactly(huge)[0][:2] == [6 * Fraction(2) ** 127, -6 * Fraction(2) ** 127]
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert torch.equal(quantise(largest).dequantise(torch.float32), torch.full((1, 32), 6 * 2.0**125))


def test_zeros() -> None:
    out = quantise(torch.zeros(2, 64))
    assert not out.packed.any()
    assert torch.equal(out.dequantise(torch.float32), torch.zeros(2, 64))
    assert (out.scales != 255).all()
    # A block of zeros beside others.
    mixed = torch.cat([torch.zeros(2, 32), torch.full((2, 32), 1e9)], 1)
    assert not quantise(mixed).dequantise(torch.float32)[:, :32].any()


def test_blocks_have_scales_of_their_own() -> None:
    """Along the last dim, 32 each; each block as if alone."""
    x = random(3, 4, 96, seed=1) * torch.logspace(-6, 6, 36, base=2.0).view(3, 4, 3).repeat_interleave(32, 2)
    out = quantise(x)
    assert out.packed.shape == (3, 4, 48)
    assert out.scales.shape == (3, 4, 3)
    for i in range(3):
        alone = quantise(x[..., 32 * i : 32 * i + 32])
        assert torch.equal(out.packed[..., 16 * i : 16 * i + 16], alone.packed)
        assert torch.equal(out.scales[..., i : i + 1], alone.scales)
    # The largest error is half of the gap below 6 (1), or what saturates (2), in scales.
    scales = out.scales.view(torch.float8_e8m0fnu).float().repeat_interleave(32, -1)
    error = (out.dequantise(torch.float32) - x).abs() / scales
    assert 0.2 < error.max() < 2
    assert (error.mean() < 0.3).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_against_distances(dtype: torch.dtype) -> None:
    """All distances from a value to the elements, exactly: the nearest, and of two the one with an even code."""
    x = random(8, 32, seed=2, std=3.0).to(dtype)
    x[:, :16] = (x[:, :16] * 4).round() / 4  # ties among them
    out = quantise(x)
    for row, scale, decoded in zip(x.tolist(), out.scales.flatten().tolist(), _decode_exactly(out), strict=True):
        unit = Fraction(2) ** (scale - 127)
        for value, element in zip(row, decoded, strict=True):
            nearest = min(E2M1, key=lambda half: (abs(Fraction(E2M1[half]) * unit - Fraction(value)), half & 1))
            assert element == Fraction(E2M1[nearest]) * unit


# -- shapes


@pytest.mark.parametrize(
    ("shape", "packed", "scales"),
    [((3072, 3584), (3072, 1792), (3072, 112)), ((3584, 3072), (3584, 1536), (3584, 96))],
    ids=["w1", "w2"],
)
def test_published_shapes(shape: tuple[int, int], packed: tuple[int, int], scales: tuple[int, int]) -> None:
    with torch.device("meta"):
        stored = MXFP4Tensor(torch.empty(packed, dtype=torch.uint8), torch.empty(scales, dtype=torch.uint8))
    assert stored[5].packed.shape == packed[1:]
    few = quantise(random(8, shape[1], seed=3))
    assert (few.packed.shape, few.scales.shape) == ((8, packed[1]), (8, scales[1]))
    assert few.dequantise(torch.bfloat16).shape == (8, shape[1])


@pytest.mark.parametrize(
    ("packed", "scales"), [((4, 16), (4, 2)), ((4, 16), (4,)), ((4, 16), (3, 1)), ((4, 8), (4, 1)), ((4, 24), (4, 1))]
)
def test_scales_that_do_not_fit(packed: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(DcpInvalidArgument, match="mxfp4: scales must be one for each 32 elements"):
        MXFP4Tensor(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))


def test_a_last_dim_that_is_not_of_blocks() -> None:
    with pytest.raises(DcpInvalidArgument, match=r"the last dim must be a multiple of 32 \(got 48\)"):
        quantise(torch.zeros(2, 48))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_scale_is_refused(value: float) -> None:
    tensor = torch.zeros(2, 32)
    tensor[1, 5] = value
    with pytest.raises(DcpInvalidArgument, match="mxfp4: the tensor must be finite"):
        quantise(tensor)
