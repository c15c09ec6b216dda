"""The truth of the gathers, checked: byte by byte, and fp8 against the definition of the format."""

from __future__ import annotations

import bisect
import math

import pytest
import torch

from dcpkernels import reference
from dcpkernels.errors import DcpInvalidArgument

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
DTYPES = [torch.float32, torch.float16, torch.bfloat16, E4M3, torch.float8_e5m2, FNUZ, torch.float8_e5m2fnuz]


def any_bytes(*shape, dtype, seed=0):
    """Every bit pattern that the dtype has: NaNs with all payloads, both zeros, subnormals."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*shape, dtype.itemsize), generator=gen, dtype=torch.uint8).view(dtype)[..., 0]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_query_gather_puts_heads_side_by_side(num_ranks, dtype):
    num_tokens, num_local_heads, dims = 5, 2, (4, 3)
    queries = [any_bytes(num_tokens, num_local_heads, sum(dims), dtype=dtype, seed=r) for r in range(num_ranks)]
    out = reference.query_gather(queries)
    assert out.dtype == dtype
    assert out.shape == (num_tokens, num_ranks * num_local_heads, sum(dims))
    for t in range(num_tokens):
        for r in range(num_ranks):
            for h in range(num_local_heads):
                assert bits(out[t, r * num_local_heads + h]) == bits(queries[r][t, h])
    parts = [query.view(torch.uint8).split([d * dtype.itemsize for d in dims], dim=2) for query in queries]
    as_parts = [[part.contiguous().view(dtype) for part in of_rank] for of_rank in parts]
    assert bits(reference.query_gather(as_parts)) == bits(out)
    for dim in (0, 1):  # strides do not matter
        strided = [query.transpose(dim, dim + 1).contiguous().transpose(dim, dim + 1) for query in queries]
        assert bits(reference.query_gather(strided)) == bits(out)


def test_query_gather_of_no_tokens():
    assert reference.query_gather([torch.zeros(0, 2, 5)] * 3).shape == (0, 6, 5)
    assert reference.query_gather([torch.zeros(0, 2, 5)] * 3, scale=2.0).dtype == torch.float8_e4m3fn


def numbers(bias):
    """By code: 4 bits of exponent, 3 of mantissa."""
    return [
        m / 8 * 2.0 ** (1 - bias) if e == 0 else (1 + m / 8) * 2.0 ** (e - bias) for e in range(16) for m in range(8)
    ]


NUMBERS = {E4M3: numbers(7)[:-1], FNUZ: numbers(8)}  # up to 448, to 240
NANS = {E4M3: (0x7F, 0xFF), FNUZ: (0x80,)}


def e4m3(value, to=E4M3):
    """The code that is nearest to a number, the even one in between; saturates. Of e4m3fnuz 0 has no sign."""
    if math.isnan(value):
        return NANS[to][0]
    magnitude = min(abs(value), NUMBERS[to][-1])
    above = bisect.bisect_left(NUMBERS[to], magnitude)
    code = min(range(max(above - 1, 0), above + 1), key=lambda c: (abs(NUMBERS[to][c] - magnitude), c % 2))
    return code | (0x80 if math.copysign(1, value) < 0 and (code > 0 or to is E4M3) else 0)


@pytest.mark.parametrize("to", [E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-3, 50.0])
def test_query_gather_to_fp8(scale, dtype, to):
    values = [0.0, -0.0, 1.0, 1.0625, 1.1875, 448, 463.9, 464, 1e4, -1e4, 2**-9, 2**-10, 1.5 * 2**-9, 0.3, -7.77]
    values += [math.inf, -math.inf, math.nan, 240, 247.9, 248, 2**-11, 1.5 * 2**-11, 1.5 * 2**-10, 1e-9]
    query = torch.cat([torch.tensor(values), torch.tensor(values) * scale]).to(dtype).view(1, 2, -1)
    out = reference.query_gather([query, -query], scale=scale, scaled_dtype=to)
    assert out.dtype == to
    assert out.shape == (1, 4, len(values))
    # One division in fp32: exact quotients of fp32 numbers, rounded once.
    scale32 = torch.tensor(scale).double()
    quotients = (torch.cat([query, -query], dim=1).double() / scale32).float().flatten().tolist()
    expected = [e4m3(q, to) for q in quotients]
    got = out.view(torch.uint8).flatten().tolist()
    assert [NANS[to][0] if g in NANS[to] else g for g in got] == expected


def test_query_gather_to_fp8_divides():
    """Around the middle between two codes, where one ulp decides: q * (1 / scale) would give the neighbour."""
    middles = torch.tensor([1 + (2 * k + 1) / 16 for k in range(8)])
    scale = torch.rand(64, generator=torch.Generator().manual_seed(3))
    near = torch.outer(scale, middles)
    near = torch.stack([near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(9.0))])
    differs = 0
    for k, s in enumerate(scale):
        q = near[:, k].reshape(1, 1, -1)
        out = reference.query_gather([q], scale=s.item())
        assert out.view(torch.uint8).flatten().tolist() == [
            e4m3(v) for v in (q.double() / s.double()).float().flatten()
        ]
        differs += bits(out) != bits((q * (1 / s)).to(torch.float8_e4m3fn))
    assert differs > 0


def shard_by_hand(contexts, *, num_ranks, interleave, block_size, row_bytes):
    """Deals the tokens of each request ([n, row_bytes]) out to paged caches: (caches, block tables) of all ranks."""
    num_blocks = sum(len(context) // block_size + 1 for context in contexts)
    caches = [any_bytes(num_blocks, block_size, row_bytes, dtype=torch.uint8, seed=r) for r in range(num_ranks)]
    max_blocks = max(len(context) for context in contexts) // block_size + 1
    tables = [torch.full((len(contexts), max_blocks), -1) for _ in range(num_ranks)]
    for r in range(num_ranks):
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(r)).tolist()
        for s, context in enumerate(contexts):
            mine = [p for p in range(len(context)) if p // interleave % num_ranks == r]
            for slot, p in enumerate(mine):
                if slot % block_size == 0:
                    tables[r][s, slot // block_size] = free.pop()
                caches[r][tables[r][s, slot // block_size], slot % block_size] = context[p]
    return caches, tables


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_ranks", "interleave", "block_size"), [(1, 1, 4), (2, 4, 4), (3, 2, 5), (8, 1, 16), (6, 3, 2)]
)
def test_kv_gather_gives_back_what_was_dealt_out(num_ranks, interleave, block_size, dtype):
    lens, width = [37, 0, 1, 16, 50], 3
    contexts = [any_bytes(n, width, dtype=dtype, seed=n) for n in lens]
    caches, tables = shard_by_hand(
        [context.view(torch.uint8) for context in contexts],
        num_ranks=num_ranks,
        interleave=interleave,
        block_size=block_size,
        row_bytes=width * dtype.itemsize,
    )
    caches = [cache.view(dtype) for cache in caches]
    whole = [row for context in contexts for row in bits(context)]
    for chunk_size in (1, 16, 104, 1000):
        for i in range(-(-104 // chunk_size)):
            out = reference.kv_gather(caches, lens, tables, interleave=interleave, chunk_size=chunk_size, chunk_idx=i)
            assert out.dtype == dtype
            assert out.shape[1] == width
            assert bits(out) == whole[i * chunk_size : (i + 1) * chunk_size]
    as_lists = [[row[row >= 0].tolist() for row in table] for table in tables]  # rows as long as they have to be
    out = reference.kv_gather(caches, torch.tensor(lens), as_lists, interleave=interleave, chunk_size=60, chunk_idx=1)
    assert bits(out) == whole[60:]


@pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7e-3, 50.0])
def test_kv_gather_from_fp8(scale, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    out = reference.kv_gather([codes.view(dtype)], [16], [[[0]]], chunk_size=16, chunk_idx=0, scale=scale)
    assert out.dtype == torch.bfloat16
    for code, got in enumerate(out.flatten().tolist()):
        if code in NANS[dtype]:
            assert math.isnan(got)
            continue
        value = NUMBERS[dtype][code & 0x7F]
        # fp32 first, then bf16: each of the two roundings is torch's.
        product = (torch.tensor(value, dtype=torch.float64) * torch.tensor(scale).double()).float()
        expected = product.bfloat16().item() * (-1 if code & 0x80 else 1)
        assert (got, math.copysign(1, got)) == (expected, math.copysign(1, expected))


PARTS_RULE = "must be [T, H/W, Dq], or parts of it that differ in the last dim only"
QUERIES = [torch.zeros(3, 2, 5)] * 2


@pytest.mark.parametrize(
    ("queries", "scale", "text"),
    [
        ([], None, "there must be at least one rank (got 0)"),
        ([()], None, "there must be at least one part (got 0)"),
        (
            [torch.zeros(3, 2)],
            None,
            f"queries[0] {PARTS_RULE} (got [(3, 2)])",
        ),
        (
            [(torch.zeros(3, 2, 4), torch.zeros(3, 1, 4))],
            None,
            f"queries[0] {PARTS_RULE} (got [(3, 2, 4), (3, 1, 4)])",
        ),
        (
            [*QUERIES, torch.zeros(3, 1, 5)],
            None,
            "queries[2] must have the shapes of rank 0, [(3, 2, 5)] (got [(3, 1, 5)])",
        ),
        (
            [*QUERIES, torch.zeros(3, 2, 5).half()],
            None,
            "queries[2] must be torch.float32 as on rank 0 (got [torch.float16])",
        ),
        (
            [torch.zeros(3, 2, 5).to(torch.float8_e4m3fn)],
            1.0,
            f"queries with a scale must be one of {reference.SCALABLE} (got torch.float8_e4m3fn)",
        ),
        (QUERIES, 0.0, "scale must be above 0 and finite in fp32 (got 0.0)"),
        (QUERIES, -1.0, "scale must be above 0 and finite in fp32 (got -1.0)"),
        (QUERIES, math.nan, "scale must be above 0 and finite in fp32 (got nan)"),
        (QUERIES, 1e-60, "scale must be above 0 and finite in fp32 (got 1e-60)"),
    ],
)
def test_bad_arguments_of_query_gather(queries, scale, text):
    with pytest.raises(DcpInvalidArgument) as caught:
        reference.query_gather(queries, scale=scale)
    assert str(caught.value) == f"reference.query_gather: {text}"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2fnuz, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_scales_are_of_e4m3(dtype):
    with pytest.raises(
        DcpInvalidArgument, match=r"query_gather: scaled_dtype must be one of .*e4m3fn, .*e4m3fnuz\) \(got"
    ):
        reference.query_gather(QUERIES, scale=1.0, scaled_dtype=dtype)
    caches = {"kv_caches": [torch.zeros(4, 8, 3).to(dtype)] * 2, "scale": 1.0}
    with pytest.raises(DcpInvalidArgument, match=r"kv_gather: kv_caches with a scale must be one of .*\(got torch."):
        reference.kv_gather(**(GATHER | caches))


GATHER = {
    "kv_caches": [torch.zeros(4, 8, 3)] * 2,
    "context_lens": [20, 5],
    "block_tables": [[[0, 1], [2]]] * 2,
    "chunk_size": 10,
    "chunk_idx": 0,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_caches": []}, "there must be at least one rank (got 0)"),
        (
            {"kv_caches": [torch.zeros(4, 3)] * 2},
            "kv_caches[0] must be [num_blocks, block_size, Dkv] (got (4, 3))",
        ),
        (
            {"kv_caches": [torch.zeros(4, 8, 3), torch.zeros(9, 8, 4)]},
            "kv_caches[1] must have rank 0's block_size and Dkv, [8, 3] (got [8, 4])",
        ),
        (
            {"kv_caches": [torch.zeros(4, 8, 3), torch.zeros(4, 8, 3).half()]},
            "kv_caches[1] must be torch.float32 as on rank 0 (got torch.float16)",
        ),
        ({"block_tables": [[[0, 1], [2]]]}, "block_tables must be those of 2 ranks (got 1)"),
        ({"block_tables": [[[0, 1], [2]], [[0, 1]]]}, "block_tables[1] must have 2 rows (got 1)"),
        ({"block_tables": [[[0, -1], [2]]] * 2, "chunk_idx": 1}, "block_tables[0][0][1] must be a block (got -1)"),
        ({"context_lens": [20, -5]}, "context_lens must be at least 0 (got [20, -5])"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 (got 0)"),
        ({"interleave": 0}, "interleave must be at least 1 (got 0)"),
        ({"chunk_idx": 3}, "chunk_idx must be that of a chunk of 25 rows (got 3)"),
        ({"chunk_idx": -1}, "chunk_idx must be that of a chunk of 25 rows (got -1)"),
        ({"scale": 1.0}, f"kv_caches with a scale must be one of {reference.SCALED} (got torch.float32)"),
        (
            {"scale": math.inf, "kv_caches": [torch.zeros(4, 8, 3).to(torch.float8_e4m3fn)] * 2},
            "scale must be above 0 and finite in fp32 (got inf)",
        ),
    ],
)
def test_bad_arguments_of_kv_gather(change, text):
    with pytest.raises(DcpInvalidArgument) as caught:
        reference.kv_gather(**(GATHER | change))
    assert str(caught.value) == f"reference.kv_gather: {text}"
