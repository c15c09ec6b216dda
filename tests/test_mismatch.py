"""Calls of every two kinds that meet; a rank that is ahead. What differs inside of one op is in test_faults.py, test_query_gather_faults.py
and test_kv_gather_faults.py, random programs in torture/test_mismatch.py."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpkernels.errors import DcpError, DcpMismatch, DcpTimeout
from tests.torture.mismatch_check import check_programs
from tests.torture.mismatch_programs import Call
from tests.torture.mismatch_ranks import CONFIG

TIMEOUT_S = 1.0  # of the direct backend, whose ranks end together
SHORT = dataclasses.replace(CONFIG, timeout_s=TIMEOUT_S)

# -- calls of every two kinds

KINDS = {
    "merge": (Call("reduce", 0, 3, "e"),),
    "merge of more": (Call("reduce", 0, 9, "e"),),
    "merge in lane 1": (Call("reduce", 1, 3, "e"),),
    "query": (Call("query", 0, 3, "float32"),),
    "query with out": (Call("query_out", 0, 3, "float32"),),
    "query in lane 1": (Call("query", 1, 3, "float32"),),
    "release": (Call("release", 0),),
    "chunk": (Call("chunk", 0, 0, 0),),
    "another chunk, split": (Call("start", 0, 1, 0), Call("wait", 0, 1, 0)),
    "chunk in lane 1": (Call("chunk", 1, 0, 0),),
}


def check_pair(number: int, pair: tuple[str, str], backend: str) -> None:
    """The last rank makes the second kind, or, of every other pair, the first."""
    num_ranks = 2 + number % 3
    usual, other = (KINDS[name] for name in (pair if number % 2 else reversed(pair)))
    # Without shared memory ranks do not end together: none must be held up by a busy machine up to another's deadline.
    config = SHORT if backend == "direct" else dataclasses.replace(SHORT, timeout_s=3.0)
    expected, error = check_programs([usual] * (num_ranks - 1) + [other], config, backend=backend)
    assert type(error) is DcpMismatch and num_ranks - 1 in error.ranks, (pair, error)
    assert "all ranks must make the same calls" in str(error)
    assert expected.at_once == (usual[0].stream == other[0].stream), pair


@pytest.mark.parametrize("backend, every", [("direct", 1), ("collective", 3)])
def test_calls_of_every_two_kinds(backend, every):
    """DcpMismatch on all of 2, 3 and 4 ranks, in one text that has both calls; in time; no numbers."""
    pairs = list(enumerate(itertools.combinations(KINDS, 2)))[::every]
    with ThreadPoolExecutor(6) as pool:  # they wait for deadlines
        list(pool.map(lambda pair: check_pair(*pair, backend), pairs))


# -- a rank that is ahead of the others

QUERY, MERGE = Call("query", 0, 3, "float32"), Call("reduce", 0, 3, "e")
LAYER, WIDER = (QUERY, MERGE), (QUERY._replace(number=4), MERGE._replace(number=4))
OTHER_LANE = tuple(call._replace(lane=1) for call in LAYER)
CHUNKS = tuple(Call("chunk", 0, i, 0) for i in range(3))
AHEAD = {  # the calls of all, those that rank 1 leaves out, the error, and how many of the others' calls return
    "by a merge: its next query finds its own one open": (LAYER * 3, [1], DcpError, 1),
    "by a query": (LAYER * 3, [2], DcpMismatch, 2),
    "by a layer of another shape": (LAYER + WIDER + LAYER, [2, 3], DcpMismatch, 2),
    "by a layer of the other lane": (LAYER + OTHER_LANE + LAYER, [2, 3], DcpMismatch, 2),
    "by a layer before one of the other lane": (LAYER + OTHER_LANE + LAYER, [0, 1], DcpMismatch, 0),
    "by a chunk": (CHUNKS, [0], DcpMismatch, 0),
    "by all chunks": (CHUNKS + LAYER, [0, 1, 2], DcpMismatch, 0),
    "by the merges of two layers": ((MERGE, MERGE, QUERY, MERGE), [0, 1], DcpMismatch, 0),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_rank_that_is_ahead(name):
    """It is found at the first call that differs from the others', on all ranks."""
    program, left_out, cls, num_good = AHEAD[name]
    ahead = tuple(call for i, call in enumerate(program) if i not in left_out)
    expected, error = check_programs([program, ahead, program], SHORT)
    assert type(error) is cls and 1 in error.ranks, error
    assert expected.ends[0] == expected.ends[2] == num_good


def test_a_layer_like_the_next_one_is_missed_at_the_end_only():
    """What a digest cannot see: the ranks made the same calls, as far as any of them can know, until one had no more. Each
    layer of the others was merged with the layer after it of rank 1, and with nothing else."""
    expected, error = check_programs([LAYER * 3, LAYER * 2, LAYER * 3], SHORT)
    assert type(error) is DcpTimeout and error.ranks == (1,)
    assert expected.ends == [4, 4, 4] and expected.matched[0][2] == (2, 2, 2)
