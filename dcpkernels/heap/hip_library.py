"""hip-python, and the HIP library behind it: found late, and only one of it in a process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcpkernels.errors import DcpUnsupported

_LIBRARY = "libamdhip64.so"
_GUIDE = "see 'Memory' in docs/targets/hip.md"


def load_api() -> Any:
    """What `Driver` of hip_driver.py works on. Raises DcpUnsupported, with the cause and the fix, where it cannot work."""
    try:
        from hip import hip
    except ImportError as error:
        text = f"hip-python must be installed (pip install 'dcpkernels[hip]') (got {type(error).__name__}: {error})"
        raise DcpUnsupported(text) from error
    try:
        hip.hipRuntimeGetVersion()  # has hip-python load the library
    except RuntimeError as error:  # "failed to dlopen 'libamdhip64.so'"
        raise no_library(error) from error
    return Api(hip, _exchange(require_one(Path("/proc/self/maps").read_text())))


def no_library(error: Exception) -> DcpUnsupported:
    return DcpUnsupported(
        f"the HIP runtime must have what is asked of it (got {error}): {_LIBRARY} of ROCm 6.2 or later is looked for in "
        "$ROCM_PATH/lib (else /opt/rocm/lib), and where there is none in LD_LIBRARY_PATH"
    )


def require_one(maps: str) -> str:
    """The path of the HIP library in a process whose /proc/self/maps is `maps`; "" when it is not there.

    Two of them know nothing of each other's memory, streams and current devices; and each looks as if it worked. It
    happens: wheels of PyTorch bring a library, hip-python loads one by a path of its own. Raises DcpUnsupported then.
    """
    paths: dict[tuple[str, str], str] = {}  # by device and inode, for one file may have several names
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and os.path.basename(fields[5]).startswith(_LIBRARY):
            paths.setdefault((fields[3], fields[4]), fields[5])
    if len(paths) > 1:
        found = sorted(paths.values())
        torch_lib = next((os.path.dirname(path) for path in found if "/torch/lib/" in path), ".../torch/lib")
        raise DcpUnsupported(
            f"a process must have one HIP runtime (got {' and '.join(found)}): have hip-python find the one that PyTorch "
            f"brings, by ROCM_PATH={os.path.dirname(torch_lib)}, or by LD_LIBRARY_PATH={torch_lib} where it looks there; "
            f"{_GUIDE}"
        )
    return next(iter(paths.values()), "")


class Api:
    """The module hip.hip, with one function that it gets wrong."""

    def __init__(self, module: Any, exchange: Callable[[Any], int] | None) -> None:
        """`exchange`: hipThreadExchangeStreamCaptureMode of the library."""
        self._module, self._exchange = module, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def hipThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:
        """(status, the mode before). hip-python's own takes no mode, and gives the library whatever is on the stack."""
        if self._exchange is None:
            return self._module.hipError_t(0), mode
        value = ctypes.c_int(int(mode))
        result = self._exchange(ctypes.byref(value))
        return self._module.hipError_t(result), self._module.hipStreamCaptureMode(value.value)


def _exchange(path: str) -> Callable[[Any], int] | None:
    """From the library that is there already, which is what RTLD_NOLOAD says: no second one can come of it. None where it
    cannot be had; then what is done here during a capture may break the capture."""
    try:
        function = ctypes.CDLL(path, mode=os.RTLD_NOLOAD).hipThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function
