"""cuda.bindings.driver of cuda-python, which has the enums and structs also without a driver. Who imports this is skipped
where it is not installed."""

import os

import pytest

try:
    from cuda.bindings import driver as real
except ImportError as error:
    if os.environ.get("DCPKERNELS_REQUIRE_ISA") == "1":
        raise
    pytest.skip(f"needs cuda-python: pip install '.[test]' (got {error})", allow_module_level=True)

__all__ = ["real"]
