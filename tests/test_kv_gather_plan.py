"""KVGatherPlan: against dealing out tokens one by one, and against caches that know which token lies where."""

from __future__ import annotations

import hashlib
import random
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dcpkernels
from dcpkernels import KVGatherPlan, reference
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kv_gather_plan import KVSegment

GARBAGE = -(2**31)  # in entries of a block table that nobody may look at


def deal_out(lens, *, num_ranks, interleave, block_size, chunk_size, seed=0):
    """Every token by hand: block tables of all ranks, the tokens of each chunk. Blocks come in no order."""
    rng = random.Random(seed)
    longest = max(lens, default=0)
    max_blocks = longest // block_size + 2
    tables = [[[GARBAGE] * max_blocks for _ in lens] for _ in range(num_ranks)]
    free = [rng.sample(range(10**6), 4 * len(lens) + sum(lens) // block_size + 4) for _ in range(num_ranks)]
    tokens = []  # (request, position, owner, physical row), in sequence order
    for s, n in enumerate(lens):
        held = [0] * num_ranks
        turn, run = 0, 0
        for p in range(n):
            block, offset = divmod(held[turn], block_size)
            if offset == 0:
                tables[turn][s][block] = free[turn].pop()
            tokens.append((s, p, turn, tables[turn][s][block] * block_size + offset))
            held[turn] += 1
            run += 1
            if run == interleave:
                turn, run = (turn + 1) % num_ranks, 0
    chunks = [tokens[i : i + chunk_size] for i in range(0, len(tokens), chunk_size)]
    return SimpleNamespace(tables=tables, tokens=tokens, chunks=chunks)


def check_plan(plan, rank, truth, lens, num_ranks):
    assert plan.total_rows == len(truth.tokens)
    assert plan.num_chunks == len(truth.chunks)
    assert plan.max_source_row == max((row for _, _, owner, row in truth.tokens if owner == rank), default=-1)
    for i, chunk in enumerate(truth.chunks):
        owners = [owner for _, _, owner, _ in chunk]
        assert plan.num_rows(i) == len(chunk)
        assert plan.rank_rows(i) == tuple(owners.count(r) for r in range(num_ranks))
        assert plan.source_rows(i).tolist() == [row for _, _, owner, row in chunk if owner == rank]
        for r in range(num_ranks) if len(chunk) > 1 else owners:
            assert plan.final_rows(i, r).tolist() == [k for k, owner in enumerate(owners) if owner == r]
        assert plan.final_rows(i).tolist() == plan.final_rows(i, rank).tolist()
        requests = [s for s, _, _, _ in chunk]
        per_request = [requests.count(s) for s in range(len(lens))]
        assert plan.cu_rows(i).tolist() == [sum(per_request[:s]) for s in range(len(lens) + 1)]
        lying = [(seg.request_idx, seg.first_position + k) for seg in plan.segments(i) for k in range(seg.num_rows)]
        assert lying == [(s, p) for s, p, _, _ in chunk]
        assert [seg.first_row for seg in plan.segments(i)] == [requests.index(s) for s in sorted(set(requests))]


LENS = {
    "one": [1],
    "empty": [0, 0],
    "none": [],
    "short": [0, 7, 1, 0, 0, 13, 0],
    "uneven": [100, 0, 331, 64, 1, 65],
    "equal": [128, 128],
}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
@pytest.mark.parametrize("interleave", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 12, 16])
def test_agrees_with_dealing_out_one_by_one(num_ranks, interleave, lens):
    few = 1 if sum(lens) < 100 else 17
    for chunk_size, block_size in [(few, 16), (5, 3), (64, 16), (64, 64), (100, 1), (4096, 1536)]:
        geometry = {
            "num_ranks": num_ranks,
            "interleave": interleave,
            "block_size": block_size,
            "chunk_size": chunk_size,
        }
        truth = deal_out(lens, **geometry)
        rank = (chunk_size + block_size + interleave) % num_ranks
        plan = KVGatherPlan(lens, truth.tables[rank], rank=rank, **geometry)
        check_plan(plan, rank, truth, lens, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "interleave", "block_size"), [(8, 1, 64), (3, 3, 16), (16, 64, 64), (6, 16, 1536), (1, 2, 64)]
)
def test_long_contexts(num_ranks, interleave, block_size):
    """One request over several chunks, several in a chunk, ends in the middle of everything; seen from every rank."""
    lens = [8191, 0, 7, 4096, 1]
    geometry = {"num_ranks": num_ranks, "interleave": interleave, "block_size": block_size, "chunk_size": 4096}
    truth = deal_out(lens, **geometry)
    plans = [KVGatherPlan(lens, truth.tables[rank], rank=rank, **geometry) for rank in range(num_ranks)]
    for rank, plan in enumerate(plans):
        check_plan(plan, rank, truth, lens, num_ranks)
    for i in range(plans[0].num_chunks):  # every row of a chunk has exactly one writer
        written = np.concatenate([plan.final_rows(i) for plan in plans])
        assert sorted(written.tolist()) == list(range(plans[0].num_rows(i)))


@pytest.mark.parametrize(("num_ranks", "interleave", "block_size"), [(1, 1, 64), (3, 2, 5), (8, 1, 16), (6, 16, 64)])
def test_agrees_with_the_reference(num_ranks, interleave, block_size):
    """What a gather by these plans puts together is what reference.kv_gather finds."""
    lens, chunk_size = [300, 0, 7, 129], 64
    geometry = {"num_ranks": num_ranks, "interleave": interleave, "block_size": block_size, "chunk_size": chunk_size}
    max_blocks = 300 // block_size + 1
    gen = torch.Generator().manual_seed(0)
    tables = [torch.randperm(4 * max_blocks, generator=gen).view(4, max_blocks) for _ in range(num_ranks)]
    caches = [torch.randn(4 * max_blocks, block_size, 3, generator=gen) for _ in range(num_ranks)]
    plans = [KVGatherPlan(lens, tables[rank], rank=rank, **geometry) for rank in range(num_ranks)]
    for i in range(plans[0].num_chunks):
        chunk = torch.full((plans[0].num_rows(i), 3), torch.nan)
        for plan, cache in zip(plans, caches):
            chunk[plan.final_rows(i).copy()] = cache.flatten(0, 1)[plan.source_rows(i).copy()]
        expected = reference.kv_gather(caches, lens, tables, interleave=interleave, chunk_size=chunk_size, chunk_idx=i)
        assert torch.equal(chunk, expected)


def test_an_example_worked_by_hand():
    """W = 2, I = 2, blocks of 3. Rank 1 has of request 0 (7 tokens) positions 2 3 6, of request 1 (5 tokens) 2 3."""
    plan = KVGatherPlan([7, 5], [[4, -1], [9, -1]], block_size=3, num_ranks=2, rank=1, chunk_size=5, interleave=2)
    assert (plan.num_ranks, plan.rank, plan.chunk_size, plan.interleave, plan.block_size) == (2, 1, 5, 2, 3)
    assert (plan.num_requests, plan.total_rows, plan.num_chunks, plan.max_source_row) == (2, 12, 3, 28)
    assert [plan.num_rows(i) for i in range(3)] == [5, 5, 2]
    assert [plan.rank_rows(i) for i in range(3)] == [(3, 2), (3, 2), (1, 1)]
    assert [plan.source_rows(i).tolist() for i in range(3)] == [[12, 13], [14, 27], [28]]
    assert [plan.final_rows(i).tolist() for i in range(3)] == [[2, 3], [1, 4], [0]]
    assert plan.segments(1) == (KVSegment(0, 5, 0, 2), KVSegment(1, 0, 2, 3))
    assert plan.cu_rows(1).tolist() == [0, 2, 5]


def test_the_largest_row_is_that_of_a_last_block_that_is_not_full():
    plan = KVGatherPlan([6], [[2, 5]], block_size=4, num_ranks=1, rank=0, chunk_size=4)
    assert plan.max_source_row == 5 * 4 + 1
    plan = KVGatherPlan([6], [[5, 2]], block_size=4, num_ranks=1, rank=0, chunk_size=4)
    assert plan.max_source_row == 5 * 4 + 3


def test_positions_and_rows_beyond_32_bits():
    """A context of more than 2**33 tokens, and a cache of more than 2**40 rows. The last chunk is 3 rows."""
    n = 2**33 + 3
    plan = KVGatherPlan([n], [[7, 2**31 - 1]], block_size=2**30, num_ranks=8, rank=2, chunk_size=2**20)
    assert (plan.total_rows, plan.num_chunks) == (n, 2**13 + 1)
    assert plan.rank_rows(2**13) == (1, 1, 1, 0, 0, 0, 0, 0)
    assert plan.segments(2**13) == (KVSegment(0, 2**33, 0, 3),)
    assert plan.source_rows(2**13).tolist() == [(2**31 - 1) * 2**30]
    assert plan.final_rows(2**13).tolist() == [2]
    assert plan.max_source_row == (2**31 - 1) * 2**30
    assert plan.source_rows(2**13 - 1).tolist() == list(range(8 * 2**30 - 2**17, 8 * 2**30))


# -- what goes in and what comes out


GEOMETRY = {"block_size": 16, "num_ranks": 3, "rank": 2, "chunk_size": 50, "interleave": 2}
CONTEXT, TABLE = [70, 0, 41], [[3, 8, -1], [-1, -1, -1], [5, -1, -1]]


def everything(plan):
    chunks = range(plan.num_chunks)
    assert (
        {plan.source_rows(i).dtype for i in chunks}
        == {plan.final_rows(i).dtype for i in chunks}
        == {np.dtype(np.int64)}
    )
    return plan.digest, [(plan.source_rows(i).tolist(), plan.final_rows(i).tolist(), plan.segments(i)) for i in chunks]


@pytest.mark.parametrize(
    ("context_lens", "block_tables"),
    [
        (tuple(CONTEXT), tuple(map(tuple, TABLE))),
        (CONTEXT, [[3, 8], [], [5]]),
        (CONTEXT, [np.array([3, 8]), [], torch.tensor([5, -1])]),
        (CONTEXT, [[3, 8, None], ["x"], [5, 0.5]]),
        (np.array(CONTEXT, np.uint8), np.array(TABLE, np.int16)),
        (np.array(CONTEXT, np.uint64), np.array(TABLE).astype(np.uint64)),
        (torch.tensor(CONTEXT, dtype=torch.int32), torch.tensor(TABLE, dtype=torch.int32)),
        (torch.tensor(CONTEXT), torch.tensor(TABLE).repeat(1, 2)[:, :3]),
        ([np.int64(70), 0, torch.tensor(41)], np.asfortranarray(TABLE)),
    ],
)
def test_takes_what_numpy_takes(context_lens, block_tables):
    plan = KVGatherPlan(context_lens, block_tables, **GEOMETRY)
    assert everything(plan) == everything(KVGatherPlan(CONTEXT, TABLE, **GEOMETRY))


@pytest.mark.parametrize("block_tables", [[], np.zeros((0, 4), np.int32), torch.zeros(0, 4)])
def test_no_requests(block_tables):
    plan = KVGatherPlan(torch.zeros(0, dtype=torch.int32), block_tables, **GEOMETRY)
    assert (plan.num_requests, plan.total_rows, plan.num_chunks, plan.max_source_row) == (0, 0, 0, -1)


def test_a_plan_does_not_change():
    lens, table = torch.tensor(CONTEXT), np.array(TABLE)
    plan = KVGatherPlan(lens, table, **GEOMETRY)
    lens.fill_(1)
    table.fill(1)
    assert everything(plan) == everything(KVGatherPlan(CONTEXT, TABLE, **GEOMETRY))
    with pytest.raises(AttributeError, match="rank cannot be set"):
        plan.rank = 1
    for array in (plan.source_rows(0), plan.final_rows(0), plan.final_rows(0, 0), plan.cu_rows(0)):
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert plan.source_rows(0).dtype == plan.final_rows(0).dtype == plan.final_rows(0, 1).dtype == np.int64
    assert plan.cu_rows(0).dtype == np.int32


def test_own_arrays_stay_where_they_are():
    """A kernel that is still running reads them at the address that it was given."""
    plan = KVGatherPlan(CONTEXT, TABLE, **GEOMETRY)
    source, final, cu = plan.source_rows(1), plan.final_rows(1), plan.cu_rows(1)
    for i in range(plan.num_chunks):
        plan.segments(i)
    assert plan.source_rows(1) is source
    assert plan.final_rows(1) is plan.final_rows(1, GEOMETRY["rank"]) is final
    assert plan.cu_rows(1) is cu


# -- the digest


def digest(context_lens=CONTEXT, block_tables=((0,) * 9,) * 3, **change):
    return KVGatherPlan(context_lens, block_tables, **(GEOMETRY | change)).digest


def test_digest_is_the_same_on_all_ranks():
    same = {
        digest(rank=0),
        digest(rank=1),
        digest(),
        digest(block_tables=TABLE),
        digest(block_size=32),
        digest(context_lens=np.array(CONTEXT, np.int16)),
    }
    assert len(same) == 1
    assert 0 <= same.pop() < 2**32


def test_digest_tells_all_apart_that_must_be_equal():
    tables = [[0] * 9] * 4
    others = [
        digest(),
        digest(num_ranks=4),
        digest(interleave=1),
        digest(chunk_size=51),
        digest(num_ranks=2, rank=1, interleave=3),  # the same two numbers the other way round
        digest([70, 0, 42], tables[:3]),
        digest([0, 70, 41], tables[:3]),
        digest([70, 41, 0], tables[:3]),
        digest([70, 41], tables[:2]),
        digest([70, 0, 41, 0], tables),
        digest([], []),
    ]
    assert len(set(others)) == len(others)


def test_digest_is_the_same_in_every_process():
    """And without torch. The number is SHA-256 by hand: ranks with other versions of Python compare with it."""
    code = (
        "import sys; from dcpkernels import KVGatherPlan;"
        f"print(KVGatherPlan({CONTEXT}, {TABLE}, **{GEOMETRY}).digest, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == [str(digest()), "False"]
    shared = struct.pack("<7q", 3, 2, 50, 3, *CONTEXT)  # num_ranks, interleave, chunk_size, S, lengths
    assert digest() == int.from_bytes(hashlib.sha256(b"kv_gather_plan" + shared).digest()[:4], "little")
    assert digest() == 1095128253


# -- errors


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_size": 0}, "block_size must be in 1 .. 2147483647 (got 0)"),
        ({"num_ranks": 0}, "num_ranks must be in 1 .. 2147483647 (got 0)"),
        ({"rank": 3}, "rank must be in 0 .. 2 (got 3)"),
        ({"rank": -1}, "rank must be in 0 .. 2 (got -1)"),
        ({"chunk_size": -5}, "chunk_size must be in 1 .. 2147483647 (got -5)"),
        ({"chunk_size": 2**31}, "chunk_size must be in 1 .. 2147483647 (got 2147483648)"),
        ({"interleave": 0}, "interleave must be in 1 .. 2147483647 (got 0)"),
        ({"interleave": 1.0}, "interleave must be an integer (got 1.0)"),
        ({"num_ranks": True}, "num_ranks must be an integer (got True)"),
        ({"rank": None}, "rank must be an integer (got None)"),
        ({"chunk_size": "8"}, "chunk_size must be an integer (got '8')"),
        ({"context_lens": [70, -1, 41]}, "context_lens[1] must be in 0 .. 9223372036854775807 (got -1)"),
        (
            {"context_lens": np.array([2**63, 0, 0], np.uint64)},
            f"context_lens[0] must be in 0 .. 9223372036854775807 (got {2**63})",
        ),
        ({"context_lens": [2**64, 0, 0]}, "context_lens must be integers (got dtype object)"),
        (
            {"context_lens": [2**62, 2**62, 0]},
            "context_lens must sum to at most 9223372036854775807 (got 9223372036854775808)",
        ),
        ({"context_lens": [70.0, 0, 41]}, "context_lens must be integers (got dtype float64)"),
        ({"context_lens": [True, False, True]}, "context_lens must be integers (got bools among them)"),
        ({"context_lens": [70, False, 41]}, "context_lens must be integers (got bools among them)"),
        ({"context_lens": torch.tensor([True] * 3)}, "context_lens must be integers (got dtype bool)"),
        ({"context_lens": [[70, 0, 41]]}, "context_lens must be [S] (got shape [1, 3])"),
        ({"context_lens": 70}, "context_lens must be [S] (got shape [])"),
        ({"context_lens": None}, "context_lens must be [S] (got shape [])"),
        ({"context_lens": [70, 0]}, "block_tables must have a row for each of the 2 requests (got 3)"),
        ({"block_tables": TABLE[:2]}, "block_tables must have a row for each of the 3 requests (got 2)"),
        ({"block_tables": np.zeros(3, np.int32)}, "block_tables must be [S, max_blocks] (got shape [3])"),
        ({"block_tables": np.zeros((3, 4))}, "block_tables must be integers (got dtype float64)"),
        ({"block_tables": None}, "block_tables must be [S, max_blocks] (got shape [])"),
        ({"block_tables": [3, 8, 5]}, "block_tables[0] must be a row of integers (got 3)"),
        ({"block_tables": [[3, 8], None, [5]]}, "block_tables[1] must be a row of integers (got None)"),
        ({"block_tables": [[[3], [8]], [], [5]]}, "block_tables[0] must be [max_blocks] (got shape [2, 1])"),
        ({"block_tables": [[3, 8.5], [], [5]]}, "block_tables[0] must be integers (got dtype float64)"),
        ({"block_tables": [[3, True], [], [5]]}, "block_tables[0] must be integers (got bools among them)"),
        (
            {"block_tables": [[3], [], [5]]},
            "block_tables[0] must have at least 2 entries for 22 local tokens (got 1)",
        ),
        (
            {"block_tables": np.array(TABLE)[:, :1]},
            "block_tables[0] must have at least 2 entries for 22 local tokens (got 1)",
        ),
        ({"block_tables": [[3, -1], [], [5]]}, "block_tables[0][1] must be in 0 .. 2147483647 (got -1)"),
        (
            {"block_tables": np.array([[3, 8], [0, 0], [2**31, 0]])},
            "block_tables[2][0] must be in 0 .. 2147483647 (got 2147483648)",
        ),
    ],
)
def test_bad_arguments(change, text):
    arguments = {"context_lens": CONTEXT, "block_tables": TABLE} | GEOMETRY | change
    with pytest.raises(DcpInvalidArgument) as caught:
        KVGatherPlan(**arguments)
    assert str(caught.value) == f"kv_gather_plan: {text}"


@pytest.mark.parametrize(
    ("context_lens", "start"),
    [
        ([[1], [2, 3]], "context_lens must be [S] integers in host memory (got "),
        (torch.ones(3, requires_grad=True), "context_lens must be [S] integers in host memory (got "),
        (torch.ones(3, dtype=torch.bfloat16), "context_lens must be [S] integers in host memory (got "),
        (torch.ones(3, dtype=torch.int32, device="meta"), "context_lens must be [S] integers in host memory (got "),
    ],
)
def test_what_is_no_host_array(context_lens, start):
    with pytest.raises(DcpInvalidArgument) as caught:
        KVGatherPlan(context_lens, TABLE, **GEOMETRY)
    assert str(caught.value).startswith(f"kv_gather_plan: {start}")


@pytest.mark.parametrize("method", ["num_rows", "rank_rows", "source_rows", "final_rows", "segments", "cu_rows"])
@pytest.mark.parametrize(
    ("chunk_idx", "text"),
    [
        (3, "chunk_idx must be at least 0 and below num_chunks=3 (got 3)"),
        (-1, "chunk_idx must be at least 0 and below num_chunks=3 (got -1)"),
        (1.0, "chunk_idx must be an integer (got 1.0)"),
        (True, "chunk_idx must be an integer (got True)"),
    ],
)
def test_bad_chunks(method, chunk_idx, text):
    plan = KVGatherPlan(CONTEXT, TABLE, **GEOMETRY)
    with pytest.raises(DcpInvalidArgument) as caught:
        getattr(plan, method)(chunk_idx)
    assert str(caught.value) == f"kv_gather_plan: {text}"


def test_an_empty_plan_has_no_chunk_0():
    plan = KVGatherPlan([0], [[]], **GEOMETRY)
    with pytest.raises(DcpInvalidArgument, match=r"below num_chunks=0 \(got 0\)"):
        plan.num_rows(0)


@pytest.mark.parametrize(
    ("rank", "text"), [(3, "in 0 .. 2 (got 3)"), (-1, "in 0 .. 2 (got -1)"), (0.0, "an integer (got 0.0)")]
)
def test_bad_rank_of_final_rows(rank, text):
    plan = KVGatherPlan(CONTEXT, TABLE, **GEOMETRY)
    with pytest.raises(DcpInvalidArgument) as caught:
        plan.final_rows(0, rank)
    assert str(caught.value) == f"kv_gather_plan: rank must be {text}"


def test_is_a_public_name():
    assert dcpkernels.KVGatherPlan is KVGatherPlan
    assert "KVGatherPlan" in dcpkernels.__all__
