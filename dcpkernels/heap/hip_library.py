"""hip-python, and the HIP library behind it: found late, and only one of it in a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dcpkernels.errors import DcpUnsupported

_LIBRARY = "libamdhip64.so"
_GUIDE = "see 'One runtime in a process' in docs/targets/hip.md"
_finding_lock = threading.Lock()


def load_api() -> Any:
    """What `Driver` of hip_driver.py works on. Raises DcpUnsupported, with the cause and the fix, where it cannot work."""
    try:
        from hip import hip
    except ImportError as error:
        text = f"hip-python must be installed (pip install 'dcpkernels[hip]') (got {type(error).__name__}: {error})"
        raise DcpUnsupported(text) from error
    maps = Path("/proc/self/maps")
    try:
        with _finding(require_one(maps.read_text())):
            hip.hipRuntimeGetVersion()  # has hip-python load the library, for as long as the process lives
    except RuntimeError as error:  # "failed to dlopen 'libamdhip64.so'"
        raise no_library(error) from error
    return Api(hip, _exchange(require_one(maps.read_text())))


def no_library(error: Exception) -> DcpUnsupported:
    return DcpUnsupported(
        f"the HIP runtime must have what is asked of it (got {error}): {_LIBRARY} of ROCm 6.2 or later is what the process "
        "has already (PyTorch brings one), else that of the package rocm_sdk, else looked for in $ROCM_PATH/lib "
        "(else /opt/rocm/lib), and where there is none in LD_LIBRARY_PATH"
    )


@contextlib.contextmanager
def _finding(path: str) -> Iterator[None]:
    """Has hip-python, which looks for its library at its first call, find the one at `path`, which is loaded already; ""
    leaves it alone. Before 7.14 it has no place for that, and finds what it finds: see afterwards."""
    try:
        from rocm.bindings.util import paths
    except ImportError:
        path = ""
    if not path:
        yield
        return
    if _loaded(path) is None:  # by another name than it was loaded, a second one would come of it
        raise DcpUnsupported(f"the HIP runtime of this process must be where it was loaded from (got {path}); {_GUIDE}")
    with _finding_lock:
        looks = paths.get_library_path

        def get_library_path(name: str, *args: Any, **options: Any) -> bytes:
            return os.fsencode(path) if name == "amdhip64" else looks(name, *args, **options)

        paths.get_library_path = get_library_path
        try:
            yield
        finally:
            paths.get_library_path = looks


def _loaded(path: str) -> ctypes.CDLL | None:
    """The library that is there already, which is what RTLD_NOLOAD says: no second one can come of it."""
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def require_one(maps: str) -> str:
    """The path of the HIP library in a process whose /proc/self/maps is `maps`; "" when it is not there.

    Two of them know nothing of each other's memory, streams and current devices; and each looks as if it worked. It
    happens: wheels of PyTorch bring a library, and so does the package rocm_sdk. Raises DcpUnsupported then.
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
            f"a process must have one HIP runtime (got {' and '.join(found)}): import torch before anything that loads "
            f"another one, as the package rocm_sdk does; or have hip-python find the one that PyTorch brings, by "
            f"ROCM_PATH={os.path.dirname(torch_lib)}, or by LD_LIBRARY_PATH={torch_lib} where it looks there; {_GUIDE}"
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
    """None where it cannot be had; then what is done here during a capture may break the capture."""
    function = getattr(_loaded(path), "hipThreadExchangeStreamCaptureMode", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function
