"""What a2a_lse_reduce has decided (Rules), and the situations it is put in (Case).

Every field of Rules is one decision of the design. The tests turn each off and find the run that it prevents.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISMATCH, TIMEOUT, CRASH = "mismatch", "timeout", "crash"


def low32(epoch: int) -> int:
    return epoch & 0xFFFFFFFF


def next_epoch(epoch: int) -> int:
    """Low halves 0 and 1 are skipped together: 0 is untouched memory, and parities must go on alternating."""
    return epoch + 1 if low32(epoch + 1) >= 2 else epoch + 3


def previous_epoch(epoch: int) -> int:
    return epoch - 1 if low32(epoch) > 2 else epoch - 3


def old_epoch(epoch: int) -> int:
    """What the flags of this parity held before: two rounds back; after the wrap that is not epoch - 2."""
    return previous_epoch(previous_epoch(epoch))


def row_modulo_channels(row: int, num_rows: int, num_channels: int) -> int:
    return row % num_channels


@dataclass(frozen=True)
class Rules:
    row_channel: Callable[[int, int, int], int] = row_modulo_channels  # (row, rows, channels) -> channel
    next_epoch: Callable[[int], int] = next_epoch
    old_epoch: Callable[[int], int] = old_epoch
    fill_by_parity: bool = True  # fresh flags hold the last epoch of *their* parity, not one for all
    staging_by_parity: bool = True
    publish_first: bool = True
    exact_match: bool = True  # False: any flag at least as new will do, whatever its digest
    signal_empty: bool = True  # False: a rank that has no rows neither signals nor is waited for
    round_when_empty: bool = True  # False: T = 0 goes from enter straight to leave
    last_stores_epoch: bool = True  # False: the first channel to leave stores it
    confirm: bool = True
    poison_self: bool = True  # the rank that reports a fault finds its own poison word set at its next enter
    forward_poison: bool = True  # a rank that adopts poison tells all peers too, before it returns


@dataclass(frozen=True)
class Call:
    number: int  # which of the caller's calls this is: the name of its data
    rounds: tuple[int, ...]  # rows of each round
    digest: Any
    senders: frozenset[int] | None = None  # ranks that have rows to send; None = all
    stream: str = ""  # its epoch stream, where a model has several


def calls(*tokens: int, capacity: int = 8, senders: dict[int, set[int]] | None = None) -> tuple[Call, ...]:
    """One call per T. The digest holds T and nothing else, as for two layers of the same shape."""
    made = []
    for number, num_tokens in enumerate(tokens):
        rounds = tuple(min(capacity, num_tokens - first) for first in range(0, max(num_tokens, 1), capacity))
        have_rows = (senders or {}).get(number)
        made.append(Call(number, rounds, num_tokens, None if have_rows is None else frozenset(have_rows)))
    return tuple(made)


@dataclass(frozen=True)
class Case:
    calls: tuple[tuple[Call, ...], ...]  # [rank][call]
    # "data": every call returns data, a fault breaks the promise.
    # A cause, such as "mismatch": every rank ends with a fault of that cause.
    # "either": calls may fault, and then every rank that still had to meet the faulted one ends faulted.
    # Wrong data and deadlock break every promise.
    promise: str = "data"
    num_channels: int = 1
    start_epochs: tuple[int, ...] = ()  # [rank], in memory before the first call; () = 3 on all
    # "expire": any wait may reach its deadline. "crash": rank 0 may stop for good, at any step.
    # "interrupt": Ctrl-C may end a wait of rank 0. "lost": a wait ends when rank 0 has crashed and its flag
    # is not there. Only rank 0 is picked: peers are visited in rotated order, so another rank is the same
    # case with other names.
    fates: tuple[str, ...] = ()
    channel_orders: tuple[tuple[int, ...], ...] = ()  # [rank]: one thread runs all channels, in this order
