"""Every error that dcpkernels raises on purpose. The classes exist once, here; C++ reports codes and texts.

The text reads `op: what must hold (what was given)`. Each class is also the built-in that a caller who has
never heard of this library would catch: ValueError, NotImplementedError, TimeoutError, and RuntimeError for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class DcpError(RuntimeError):
    """Base class of all errors of this library.

    `text` is the whole message. `ranks` are the group ranks at fault, where that is known: the ranks that
    failed a step, that did not arrive, or that are gone. They are in `.ranks` as a tuple, sorted, without
    repeats.
    """

    ranks: tuple[int, ...]

    def __init__(self, text: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        # OSError, a base of DcpTimeout, sets `args` in __new__ and not in __init__; set them here for all
        # alike.
        self.args = (text,)
        self.ranks = tuple(sorted({int(rank) for rank in ranks}))

    def __str__(self) -> str:
        return str(self.args[0])  # OSError would put "[Errno ...]" in front when it finds an errno

    def __reduce__(self) -> tuple[Any, ...]:
        # The default passes `args` only and would lose `ranks`; the state carries __notes__ and the like.
        return _rebuild, (type(self), str(self), self.ranks), dict(self.__dict__)


def _rebuild(cls: type[DcpError], text: str, ranks: tuple[int, ...]) -> DcpError:
    return cls(text, ranks=ranks)


class DcpInvalidArgument(DcpError, ValueError):
    """An argument breaks the documented contract. Nothing has been sent; the workspace is still usable.

    Other ranks that did make the call wait for this one: make the call after all, with the argument put right. A rank
    that leaves a call out and goes on would have its next call merged with the others' earlier one.
    """


class DcpUnsupported(DcpError, NotImplementedError):
    """The request is well formed, but this machine, build or combination of ranks cannot serve it."""


class DcpTimeout(DcpError, TimeoutError):
    """A wait reached its deadline. `.ranks` are the ranks that were missing."""


class DcpPeerLost(DcpTimeout):
    """A wait ended early because a rank's process is gone or has closed the workspace. `.ranks` names them."""


class DcpMismatch(DcpError):
    """Ranks made calls that do not belong together. `.ranks` are the ranks whose calls were found to differ."""


class DcpDeviceError(DcpError):
    """The device or its driver reported an error."""
