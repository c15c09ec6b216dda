"""Files that commands write. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcpkernels.errors import DcpInvalidArgument, DcpUnsupported

STDOUT = Path("-")


def require_writable(option: str, path: Path | None) -> None:
    """Finds a bad place for a result before the work, not after. Raises DcpInvalidArgument."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise DcpInvalidArgument(f"{option}: must be a file in a writable folder (got {str(path)!r})")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(option: str) -> None:
    if not has_matplotlib():
        raise DcpUnsupported(f"{option}: matplotlib must be installed, by `pip install 'dcpkernels[cli]'` (not found)")


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DcpInvalidArgument where the file cannot be written after all: the disk is full, or it is no real folder."""
    try:
        yield
    except OSError as error:
        raise DcpInvalidArgument(
            f"{path}: must be a file that can be written (got {error.strerror or error})"
        ) from error


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks: an error that has no number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
