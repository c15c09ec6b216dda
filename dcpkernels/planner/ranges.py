"""Numbers that are known to lie between two others."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpInvalidArgument


@dataclass(frozen=True)
class Range:
    """A value that lies in low .. high, both included. A value that is known has both alike.

    Raises DcpInvalidArgument unless both are finite numbers, and low <= high.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        for value in (self.low, self.high):
            if not is_number(value):
                raise DcpInvalidArgument(f"range: both ends must be finite numbers (got {self.low!r} .. {self.high!r})")
        if self.low > self.high:
            raise DcpInvalidArgument(f"range: low must be at most high (got {self.low!r} .. {self.high!r})")

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def scaled(self, factor: float) -> Range:
        return (
            Range(self.low * factor, self.high * factor)
            if factor >= 0
            else Range(self.high * factor, self.low * factor)
        )

    def text(self) -> str:
        """Two digits of each end, rounded outwards: "14-220" of 14.2 .. 215. What is shown never claims to be known
        better than it is."""
        low, high = _two_digits(self.low, math.floor), _two_digits(self.high, math.ceil)
        if self.low == self.high:
            return _two_digits(self.low, round)
        if low == high:
            return low
        return f"{low} to {high}" if self.low < 0 else f"{low}-{high}"

    def to_dict(self) -> dict[str, float]:
        """For JSON: three digits of each end, rounded outwards."""
        return {"low": _rounded(self.low, 3, math.floor), "high": _rounded(self.high, 3, math.ceil)}


def is_number(value: Any) -> bool:
    """A finite int or float, and not a bool; an int that a float can be."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


# Products of a few such counts stay exact in a float, and JSON readers take them.
MAX_COUNT = 2**40


def check_count(op: str, name: str, value: Any, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raises DcpInvalidArgument unless `value` is an int, and not a bool, in least .. most."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DcpInvalidArgument(f"{op}: {name} must be a whole number in {least} .. {most} (got {value!r})")


def _rounded(value: float, digits: int, towards: Any) -> float:
    if abs(value) < sys.float_info.min * 10**digits:  # 10**exponent would be no number
        return 0.0
    exponent = math.floor(math.log10(abs(value))) - digits + 1
    # As many digits as a float is sure of come first: 0.3 / 0.1 is not to become the next number.
    steps = float(f"{value / 10.0**exponent:.12g}")
    return float(f"{towards(steps)}e{exponent}")


def _two_digits(value: float, towards: Any) -> str:
    rounded = _rounded(value, 2, towards)
    if rounded == int(rounded):
        return f"{int(rounded):,}"
    return f"{rounded:.10f}".rstrip("0") if abs(rounded) >= 1e-8 else f"{rounded:g}"
