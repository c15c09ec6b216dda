"""Values of options, as argparse's `type`. Imports no torch: `--help` is quick."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def count(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    if value >= 2**31:  # nothing has so many; ranks would find it one after the other, each with its traceback
        raise argparse.ArgumentTypeError(f"must be at most 2**31 - 1 (got {value})")
    return value


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be in 0 .. 2**31 - 1 (got {value})")
    return value


def ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0 (got {text})")
    return value


def microseconds(text: str) -> float:
    return ratio(text)


def one_of(*names: str) -> Callable[[str], str]:
    """As argparse's `choices`, for the values of a list."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)} (got {text})")
        return text

    return parse


def number_of(*numbers: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        return int(one_of(*map(str, numbers))(text))

    return parse


def yes_or_no(text: str) -> bool:
    return one_of("yes", "no")(text) == "yes"


def list_of(kind: Callable[[str], object]) -> Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    parse.__name__ = f"list of {getattr(kind, '__name__', 'values')}"  # argparse puts it into its message
    return parse
