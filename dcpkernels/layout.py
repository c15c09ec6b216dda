"""Who owns which token: interleaved ownership of a sequence that is sharded over ranks. Pure integers.

Runs of `interleave` (I) consecutive positions are dealt out, rank after rank, to `num_ranks` (W) ranks:

    W = 3, I = 2     position   0 1 | 2 3 | 4 5 | 6 7 | 8 ...
                     owner      0 0 | 1 1 | 2 2 | 0 0 | 1 ...
                     local slot 0 1 | 0 1 | 0 1 | 2 3 | 2 ...

A local slot is the index of a token among its owner's tokens. Growing a sequence never moves a token. Every
function raises DcpInvalidArgument for an argument that is no integer or is out of range.
"""

from __future__ import annotations

import operator

from dcpkernels.errors import DcpInvalidArgument


def owner(p: int, num_ranks: int, interleave: int = 1) -> int:
    """The rank that holds position `p`: (p // I) % W."""
    p = _at_least("owner", "p", p, 0)
    num_ranks, interleave = _sharding("owner", num_ranks, interleave)
    return p // interleave % num_ranks


def local_slot(p: int, num_ranks: int, interleave: int = 1) -> int:
    """The index of position `p` among the tokens of its owner: (p // (W*I)) * I + p % I."""
    p = _at_least("local_slot", "p", p, 0)
    num_ranks, interleave = _sharding("local_slot", num_ranks, interleave)
    return p // (num_ranks * interleave) * interleave + p % interleave


def local_length(n: int, num_ranks: int, rank: int, interleave: int = 1) -> int:
    """How many of the first `n` positions `rank` holds."""
    n = _at_least("local_length", "n", n, 0)
    num_ranks, interleave = _sharding("local_length", num_ranks, interleave)
    rank = _rank("local_length", rank, num_ranks)
    full_turns, rest = divmod(n, num_ranks * interleave)
    return full_turns * interleave + min(max(rest - rank * interleave, 0), interleave)


def local_lengths(n: int, num_ranks: int, interleave: int = 1) -> list[int]:
    """`local_length` of every rank, in rank order. The sum is `n`."""
    n = _at_least("local_lengths", "n", n, 0)
    num_ranks, interleave = _sharding("local_lengths", num_ranks, interleave)
    return [local_length(n, num_ranks, rank, interleave) for rank in range(num_ranks)]


def local_positions(n: int, num_ranks: int, rank: int, interleave: int = 1) -> list[int]:
    """The positions among the first `n` that `rank` holds, ascending: element i is in local slot i."""
    n = _at_least("local_positions", "n", n, 0)
    num_ranks, interleave = _sharding("local_positions", num_ranks, interleave)
    rank = _rank("local_positions", rank, num_ranks)
    starts = range(rank * interleave, n, num_ranks * interleave)
    return [p for start in starts for p in range(start, min(start + interleave, n))]


def _sharding(op: str, num_ranks: int, interleave: int) -> tuple[int, int]:
    return _at_least(op, "num_ranks", num_ranks, 1), _at_least(op, "interleave", interleave, 1)


def _rank(op: str, rank: int, num_ranks: int) -> int:
    rank = _at_least(op, "rank", rank, 0)
    if rank >= num_ranks:
        raise DcpInvalidArgument(f"{op}: rank must be below num_ranks={num_ranks} (got {rank})")
    return rank


def _at_least(op: str, name: str, value: int, low: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise DcpInvalidArgument(f"{op}: {name} must be an integer (got {value!r})") from None
    if number < low:
        raise DcpInvalidArgument(f"{op}: {name} must be at least {low} (got {number})")
    return number
