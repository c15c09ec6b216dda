"""Checks of arguments, for all of the planner. Text: `plan: what must hold (what was given)`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NoReturn

from dcpkernels.errors import DcpInvalidArgument

GIB = 2**30
MAX_COUNT = 2**62  # of anything: what an engine holds in 64 bits
_MAX_GIB = 2**30  # an exbibyte

Number = int | float | str | Decimal  # a str or Decimal is taken as written, a float as it prints


def fail(rule: str, given: Any) -> NoReturn:
    raise DcpInvalidArgument(f"plan: {rule} (got {given})")


def whole(name: str, value: Any, least: int) -> int:
    """`value` as an int of at least `least`. Raises DcpInvalidArgument, as all functions here."""
    try:
        number = operator.index(value)
    except TypeError:
        fail(f"{name} must be a whole number", repr(value))
    if isinstance(value, bool) or not least <= number <= MAX_COUNT:
        fail(f"{name} must be a whole number of at least {least} (and at most 2**62)", repr(value))
    return number


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        fail(f"{name} must be one of {', '.join(names)}", repr(value))
    return value


def divides(name: str, value: int, of: str, whole_value: int) -> None:
    if whole_value % value:
        fail(f"{name} must divide {of}={whole_value}", value)


def decimal(name: str, value: Any) -> Fraction:
    """A finite number, exactly as written: Fraction(25.12) would not be 25.12."""
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        fail(f"{name} must be a number", repr(value))
    if not number.is_finite() or number.adjusted() > 30:
        fail(f"{name} must be a finite number", repr(value))
    return Fraction(number) if number.adjusted() > -30 else Fraction(0)


def gib(value: Number, name: str = "memory", *, above_zero: bool = False) -> int:
    """Bytes of `value` GiB, rounded down: gib("25.12") is what a log that says 25.12 GiB means, gib(25.12) the same."""
    number = decimal(name, value)
    if not (0 < number if above_zero else 0 <= number) or number > _MAX_GIB:
        fail(f"{name} must be {'above' if above_zero else 'at least'} 0 GiB (and at most 2**30)", value)
    return int(number * GIB)


def gib_as_printed(text: str) -> tuple[int, int]:
    """The least and the most bytes that are printed as `text` GiB: with two decimals, as vLLM's log has them, they are up
    to 5 MiB apart from `gib(text)`, which can be a block. Other numbers are taken as they are."""
    exact = gib(text)
    _, point, decimals = str(text).strip().partition(".")
    if not point or len(decimals) != 2 or not decimals.isdecimal():
        return exact, exact
    half = Fraction(GIB, 200)
    middle = decimal("memory", text) * GIB
    return max(0, math.ceil(middle - half)), int(middle + half)


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
