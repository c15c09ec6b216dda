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

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported

STDOUT = Path("-")


def require_writable(option: str, path: Path | None) -> None:
    """Finds a bad place for a result before the work, not after. Raises DcpInvalidArgument."""
    if path is None:
        return
    try:
        bad = path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # of a name that no file can have
        raise DcpInvalidArgument(
            f"{option}: must be a file's name (got {str(path)[:60]!r}...: {error.strerror})"
        ) from None
    if bad:
        raise DcpInvalidArgument(f"{option}: must be a file in a writable folder (got {str(path)!r})")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What only writing finds, a full disk say, is an error in one line too. Raises DcpError."""
    try:
        yield
    except OSError as error:
        raise DcpError(f"{path} must be written (got {error.strerror or error})") from None


def write_text(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib(option: str) -> None:
    if not has_matplotlib():
        raise DcpUnsupported(f"{option}: matplotlib must be installed, by `pip install 'dcpkernels[cli]'` (not found)")


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    write_text(path, to_json(value) + "\n")


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON lacks: an error that has no number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
