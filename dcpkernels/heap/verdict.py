"""Group verdicts: after a step that can fail on one rank, all ranks learn how it went on all of them.

A rank whose step failed still calls `agree`; so nobody waits for it in vain, and every rank raises the same
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcpkernels import errors
from dcpkernels.errors import DcpError, DcpTimeout, DcpUnsupported
from dcpkernels.heap.group import Group

_MAX_TEXT = 2000  # characters of one error that travel; the rank that failed logs or raises the rest itself


def attempt(step: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a local step, or its error for `agree`. Ctrl-C is not a step's error and goes through."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def agree(
    group: Group,
    step: str,
    payload: Any = None,
    error: BaseException | None = None,
    *,
    timeout_s: float = 0.0,
) -> list[Any]:
    """Collective. Returns every rank's `payload`, in rank order, when no rank passed an `error`.

    Otherwise every rank raises the same class with the same text, `<step> failed on rank <r>: <text>`. The
    lowest failing rank leads, except that a timeout or a lost peer leads only where no rank has anything else
    to say: those are mostly echoes of another rank's failure. `.ranks` are the ranks that the leading error
    names, else those that failed. When the group itself fails (a rank died or is late) the error is a
    DcpError that names the step, with the class of the cause where that is one of ours.
    """
    described = None if error is None else describe(error)
    try:
        reports = group.all_gather_object((payload, described), timeout_s=timeout_s)
    except Exception as lost:
        if error is not None and not isinstance(error, DcpTimeout):  # says more than that the others are gone
            text = f"{step} failed on rank {group.rank}: {_text(error)}"
            ranks = error.ranks if isinstance(error, DcpError) else ()
            raise _own_class(error)(text, ranks=ranks or (group.rank,)) from error
        ranks = lost.ranks if isinstance(lost, DcpError) else ()
        text = _text(lost)
        if not isinstance(lost, DcpError):
            text = f"a rank is gone or the group is broken ({text})"
        raise _own_class(lost)(f"{step}: {text}", ranks=ranks) from lost

    failures = {rank: failure for rank, (_, failure) in enumerate(reports) if failure is not None}
    if failures:
        lead = min(failures, key=lambda rank: (issubclass(_class_of(failures[rank]), DcpTimeout), rank))
        _, text, ranks = failures[lead]
        others = [rank for rank in failures if rank != lead]
        also = f" (also failed on {rank_list(others)})" if others else ""
        text = f"{step} failed on rank {lead}: {text}{also}"
        raise _class_of(failures[lead])(text, ranks=ranks or failures) from error
    return [payload for payload, _ in reports]


def require_same(op: str, payloads: Sequence[Mapping[str, Any]]) -> None:
    """Raises DcpUnsupported unless all ranks' payloads are equal; equal input gives the same error on every
    rank.

    The text names each key that differs, with the ranks that have each value. `.ranks` are the ranks outside
    the largest group of equals. Values are plain data; two are equal when their `repr` is.
    """
    differences: list[str] = []
    odd: set[int] = set()
    for key in dict.fromkeys(key for payload in payloads for key in payload):
        values: list[tuple[str, list[int]]] = []
        for rank, payload in enumerate(payloads):
            value = repr(payload[key]) if key in payload else "not given"
            for known, ranks in values:
                if known == value:
                    ranks.append(rank)
                    break
            else:
                values.append((value, [rank]))
        if len(values) > 1:
            listed = "; ".join(f"{rank_list(ranks)}: {value}" for value, ranks in values)
            differences.append(f"{key} ({listed})")
            usual = max(values, key=lambda entry: len(entry[1]))
            odd.update(rank for _, ranks in values if ranks is not usual[1] for rank in ranks)
    if differences:
        raise DcpUnsupported(f"{op}: all ranks must agree on " + ", ".join(differences), ranks=odd)


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 2, 3`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def describe(error: BaseException) -> tuple[str, str, tuple[int, ...]]:
    """Class, text and ranks of an error as plain data that any process can read."""
    ranks = error.ranks if isinstance(error, DcpError) else ()
    return _own_class(error).__name__, _text(error), ranks


def restore(described: tuple[str, str, tuple[int, ...]]) -> DcpError:
    """The error that `describe` described, as the nearest class of dcpkernels.errors."""
    return _class_of(described)(described[1], ranks=described[2])


def _class_of(described: tuple[str, str, tuple[int, ...]]) -> type[DcpError]:
    cls: type[DcpError] = getattr(errors, described[0])
    return cls


def _own_class(error: BaseException) -> type[DcpError]:
    # A caller may have derived a class that the other ranks cannot import: the nearest of ours travels.
    return next((c for c in type(error).__mro__ if c.__module__ == errors.__name__), DcpError)


def _text(error: BaseException) -> str:
    text = str(error) if isinstance(error, DcpError) else f"{type(error).__name__}: {error}".rstrip(": ")
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."
