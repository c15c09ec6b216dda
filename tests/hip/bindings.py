"""`hip` of hip-python, which has the enums and structs also without ROCm. Who imports this is skipped where it is not
installed."""

import os

import pytest

try:
    from hip import hip as real
    from rocm.bindings.util import types
except ImportError as error:
    if os.environ.get("DCPKERNELS_REQUIRE_ISA") == "1":
        raise
    pytest.skip(f"needs hip-python: pip install '.[test]' (got {error})", allow_module_level=True)

__all__ = ["real", "types"]
