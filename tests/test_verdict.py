"""Group verdicts: one rank's failure is the same error on every rank, and the cause leads, not its echo."""

import pytest

from dcpkernels.errors import (
    DcpError,
    DcpInvalidArgument,
    DcpMismatch,
    DcpPeerLost,
    DcpTimeout,
    DcpUnsupported,
)
from dcpkernels.heap.group import as_group
from dcpkernels.heap.verdict import agree, describe, require_same, restore
from dcpkernels.testing import run_ranks


class Derived(DcpUnsupported):
    """A class that only its user can import."""


def _vote(group, errors):
    error = errors.get(group.rank)
    try:
        return agree(group, "op: step", {"rank": group.rank}, error, timeout_s=20)
    except DcpError as raised:
        assert raised.__cause__ is error  # the traceback of the real failure is not lost
        return type(raised), str(raised), raised.ranks


def _vote_all(group):
    return [_vote(as_group(group), errors) for errors, *_ in CASES]


CASES = [
    (
        {2: DcpUnsupported("no such thing (3)")},
        DcpUnsupported,
        "op: step failed on rank 2: no such thing (3)",
        (2,),
    ),
    (
        {1: ValueError("x"), 3: KeyError("y")},
        DcpError,
        "rank 1: ValueError: x (also failed on rank 3)",
        (1, 3),
    ),
    ({0: MemoryError()}, DcpError, "op: step failed on rank 0: MemoryError", (0,)),
    ({1: Derived("mine")}, DcpUnsupported, "op: step failed on rank 1: mine", (1,)),
    # Rank 0 only waited for rank 3 in vain: rank 3 knows why.
    (
        {0: DcpTimeout("late", ranks=(3,)), 3: OSError(24, "full")},
        DcpError,
        "on rank 3: OSError: [Errno 24] full",
        (0, 3),
    ),
    (
        {1: DcpPeerLost("gone", ranks=(2,)), 0: DcpTimeout("late", ranks=(2,))},
        DcpTimeout,
        "on rank 0: late",
        (2,),
    ),
    ({3: DcpInvalidArgument("z" * 5000)}, DcpInvalidArgument, "z" * 2000 + " ...", (3,)),
]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_all_ranks_raise_the_leading_error(mode):
    results = run_ranks(_vote_all, 4, mode=mode)
    for result in results:
        assert result == results[0]
        for (cls, text, ranks), (_, expected, part, expected_ranks) in zip(result, CASES, strict=True):
            assert cls is expected and part in text and ranks == expected_ranks
            assert text.startswith("op: step failed on rank ")


def test_without_an_error_the_payloads_come_back_in_rank_order():
    assert run_ranks(_vote, 3, {}) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


class Broken:
    rank, num_ranks = 1, 2

    def __init__(self, error):
        self.error = error

    def all_gather_object(self, obj, *, timeout_s=0.0):
        raise self.error


@pytest.mark.parametrize(
    "broken, own, cls, text, ranks",
    [
        (
            RuntimeError("closed"),
            None,
            DcpError,
            "op: step: a rank is gone or the group is broken (RuntimeError: closed)",
            (),
        ),
        (DcpTimeout("no answer", ranks=(0,)), None, DcpTimeout, "op: step: no answer", (0,)),
        (DcpPeerLost("gone", ranks=(0,)), DcpTimeout("echo"), DcpPeerLost, "op: step: gone", (0,)),
        (
            RuntimeError("closed"),
            OSError(5, "disk"),
            DcpError,
            "op: step failed on rank 1: OSError: [Errno 5] disk",
            (1,),
        ),
    ],
)
def test_a_broken_group_is_an_error_that_names_the_step(broken, own, cls, text, ranks):
    with pytest.raises(DcpError) as caught:
        agree(Broken(broken), "op: step", error=own)
    assert (type(caught.value), str(caught.value), caught.value.ranks) == (cls, text, ranks)


def test_require_same_names_keys_ranks_and_values():
    same = {"build": "abc", "dtype": "bf16"}
    require_same("op", [same, dict(reversed(same.items())), same])
    with pytest.raises(DcpUnsupported) as caught:
        require_same("op", [same | {"build": "x"}, same, same | {"new": 1}])
    text = "op: all ranks must agree on build (rank 0: 'x'; ranks 1, 2: 'abc'), new (ranks 0, 1: not given; rank 2: 1)"
    assert str(caught.value) == text and caught.value.ranks == (0, 2)
    with pytest.raises(DcpUnsupported):
        require_same("op", [{"a": 1}, {"a": "1"}])  # equal when printed, but not equal


def test_describe_and_restore_are_a_round_trip():
    for error in (DcpMismatch("a", ranks=(1,)), DcpPeerLost("b"), DcpError("c")):
        twin = restore(describe(error))
        assert (type(twin), str(twin), twin.ranks) == (type(error), str(error), error.ranks)
