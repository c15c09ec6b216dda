"""What every function of the fake CUDA driver needs: cuInit, contexts, the mode of captures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.cuda.bindings import real
from tests.fake_gpu.core import Core, call, require

_MODES = real.CUstreamCaptureMode


class FakeCore(Core):
    """`call` needs "nothing", "init", or "context" (a current one; for the calls that have CUDA_ERROR_INVALID_CONTEXT in the
    manual)."""

    code = staticmethod(real.CUresult)

    def __init__(self) -> None:
        super().__init__()
        self.is_init = False
        self.contexts: Counter[int] = Counter()  # by ordinal

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("cu", "_")):
            raise AttributeError(name)  # a function that is not faked must not reach the real driver
        return getattr(real, name)

    def allow(self, needs: str) -> None:
        require(needs == "nothing" or self.is_init, 3)
        require(needs != "context" or self.stack(), 201)

    def heal(self) -> bool:
        """And what a failed call left of contexts on this thread's stack."""
        with self.lock:
            self.stack().clear()
            self._thread.mode = _MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
            return super().heal()

    @call("nothing")
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._thread.mode = self.capture_mode(), _MODES(mode)
        return before

    def capture_mode(self) -> Any:
        return getattr(self._thread, "mode", _MODES.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def minds_capture(self) -> bool:
        return bool(self.capture_mode() != _MODES.CU_STREAM_CAPTURE_MODE_RELAXED)

    def stack(self) -> list[int]:
        """Ordinals of the thread's contexts, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[int] = self._thread.stack
        return stack
