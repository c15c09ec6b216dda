"""Which versions of vLLM the plugin knows. Imports nothing of either."""

from __future__ import annotations

import re

VERSIONS = ((0, 29), (0, 33))  # first and last that were looked at
RANGE = " to ".join(".".join(map(str, version)) for version in VERSIONS)


def is_known(version: str) -> bool:
    """Whether `version`, as vLLM tells it, is among them. What is built from a checkout has no such number: there its
    signatures decide."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or version.startswith("0.1.dev"):
        return True
    first, last = VERSIONS
    return first <= tuple(map(int, numbers.groups())) <= last
