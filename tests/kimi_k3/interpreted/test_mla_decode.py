"""mla_decode in Triton's interpreter, against attention in fp64 that shares no code with it.

The interpreter truncates fp32 to bfloat16 instead of rounding: a bf16 result may be an ulp off, and so may each weight in
front of the second product.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attention import local_attention
from dcpkernels.kimi_k3.cache import DecodeBatch
from dcpkernels.kimi_k3.triton.mla_decode import choose_num_splits, mla_decode

SCALE = 0.15
BF16_ULP = 2.0**-7


class Inputs(NamedTuple):
    query: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    local_lens: torch.Tensor
    value_dim: int


def make(
    lens: list[list[int]],
    *,
    num_heads: int = 3,
    dims: tuple[int, int] = (32, 8),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
) -> Inputs:
    """A batch of requests, `lens[s]` of which has what each of request s's rows sees. What nobody may read is NaN, and -1 in
    the tables; blocks lie in the cache in no order."""
    generator = torch.Generator().manual_seed(seed)
    dim, most = sum(dims), [max(some, default=0) for some in lens]
    needs = [-(-n // block_size) for n in most]
    cache = torch.full((sum(needs) + 3, block_size, dim), math.nan)
    free = torch.randperm(len(cache), generator=generator).tolist()
    tables = torch.full((len(lens), max(needs, default=0) + 2), -1, dtype=torch.int32)
    for s, (need, n) in enumerate(zip(needs, most, strict=True)):
        blocks = [free.pop() for _ in range(need)]
        tables[s, :need] = torch.tensor(blocks, dtype=torch.int32)
        for p in range(n):
            cache[blocks[p // block_size], p % block_size] = torch.randn(dim, generator=generator)
    rows = [n for some in lens for n in some]
    query = torch.randn(len(rows) + padding, num_heads, dim, generator=generator)
    starts = torch.tensor([0, *[len(some) for some in lens]]).cumsum(0)
    return Inputs(
        query.to(dtype), cache.to(dtype), tables, starts.to(torch.int32),
        # What stands beside padding rows is not looked at.
        torch.tensor(rows + [7] * padding, dtype=torch.int32), dims[0],
    )  # fmt: skip


def truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, cache, tables, starts, lens, value_dim = inputs
    out = torch.zeros(*query.shape[:2], value_dim, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for s in range(len(tables)):
        for t in range(int(starts[s]), int(starts[s + 1])):
            if n := int(lens[t]):
                keys = torch.stack([cache[tables[s, p // cache.shape[1]], p % cache.shape[1]] for p in range(n)]).double()
                scores = query[t].double() @ keys.T * SCALE
                out[t], lse[t] = torch.softmax(scores, 1) @ keys[:, :value_dim], torch.logsumexp(scores, 1)
    return out, lse


def check(inputs: Inputs, **options: object) -> None:
    out, lse = mla_decode(*inputs[:5], scale=SCALE, value_dim=inputs.value_dim, **options)
    expected, expected_lse = truth(inputs)
    assert out.dtype == inputs.query.dtype and lse.dtype == torch.float32
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty) and (out[empty] == 0).all()
    assert ((lse.double() - expected_lse)[~empty].abs() < 2e-6 * (10 + expected_lse[~empty].abs())).all()
    # Truncated: an ulp of the result, and an ulp of each weight, whose sum is 1 and whose values are below 5.
    bound = 2e-5 if inputs.query.dtype == torch.float32 else BF16_ULP * (expected.abs() + 1)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@pytest.mark.parametrize("block_size", [16, 64, 7])
def test_rows_of_all_kinds(block_size: int, num_splits: int | None) -> None:
    """Empty, one key, around a block, several tiles; several query tokens of a request, one of which sees nothing yet."""
    lens = [[0], [1], [0, 1, 2], [block_size], [block_size + 1], [150, 151, 151]]
    check(make(lens, block_size=block_size, padding=2), num_splits=num_splits)


@pytest.mark.parametrize("num_heads", [1, 12, 16, 17, 33])
def test_heads_that_do_not_fill_a_tile(num_heads: int) -> None:
    check(make([[40], [3]], num_heads=num_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [12, 96])
def test_the_shape_of_kimi_k3(num_heads: int, dtype: torch.dtype) -> None:
    check(make([[70], [5, 6]], num_heads=num_heads, dims=(512, 64), block_size=64, dtype=dtype, padding=1))


def test_more_parts_than_tiles() -> None:
    """Parts without keys come out of the merge."""
    check(make([[33], [1]]), num_splits=16)


def test_nothing_to_do() -> None:
    check(make([], padding=2))
    inputs = make([[4]])
    out, lse = mla_decode(
        inputs.query[:0], inputs.cache, inputs.block_tables[:0], inputs.query_start_loc[:1], inputs.local_lens[:0],
        scale=SCALE, value_dim=32,
    )  # fmt: skip
    assert out.shape == (0, 3, 32) and lse.shape == (0, 3)


def test_strides_and_given_outputs() -> None:
    inputs = make([[40], [9]], num_heads=4)
    wide = torch.full((2, 6, 48), math.nan)
    wide[:, 1:5, :40] = inputs.query
    inputs = inputs._replace(query=wide[:, 1:5, :40])
    expected, expected_lse = truth(inputs)
    outs, lses = torch.full((2, 9, 32), math.nan), torch.full((4, 3), math.nan)
    out, lse = outs[:, 2:6], lses[:, 1:].T
    given = mla_decode(*inputs[:5], scale=SCALE, value_dim=32, out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    assert (out - expected).abs().max() < 2e-5 and (lse - expected_lse).abs().max() < 2e-5
    assert outs[:, :2].isnan().all() and outs[:, 6:].isnan().all() and lses[:, 0].isnan().all()


def test_large_scores() -> None:
    """Exponents of a thousand: without the maximum taken off they overflow."""
    inputs = make([[70]])
    check(inputs._replace(query=inputs.query * 500))


def test_the_same_as_on_a_cpu() -> None:
    inputs = make([[90, 91], [4]], dims=(64, 16), padding=1)
    batch = DecodeBatch(
        query_start_loc=inputs.query_start_loc, positions=torch.zeros(4), slot_mapping=torch.zeros(4),
        local_lens=inputs.local_lens, block_tables=inputs.block_tables, state_slots=torch.zeros(2),
    )  # fmt: skip
    out, lse = mla_decode(*inputs[:5], scale=SCALE, value_dim=64)
    cpu_out, cpu_lse = local_attention(inputs.query, inputs.cache, batch, scale=SCALE, value_dim=64)
    assert torch.equal(lse == -math.inf, cpu_lse == -math.inf)
    assert (out - cpu_out)[:3].abs().max() < 2e-5 and (lse - cpu_lse)[:3].abs().max() < 2e-5


def test_the_number_of_parts() -> None:
    choose = choose_num_splits
    assert choose(1, 96, 120_000) == 64 and choose(1, 12, 100) == 1 and choose(64, 96, 120_000) == 1
    for rows in (1, 3, 8, 100):
        number = choose(rows, 96, 4000)
        assert number & (number - 1) == 0 and 1 <= number <= 64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": torch.zeros(1, 3)}, "query must have shape [T, H, Dq]"),
        ({"query": torch.zeros(1, 3, 40, dtype=torch.int32)}, "query must be bfloat16, float16 or float32"),
        ({"cache": torch.zeros(4, 16, 41)}, "cache must have shape [num_blocks, block_size, 40]"),
        ({"cache": torch.zeros(4, 16, 40, dtype=torch.bfloat16)}, "cache must be torch.float32 as query is"),
        ({"cache": torch.zeros(4, 16, 80)[..., ::2]}, "cache must have unit stride in its last dim"),
        ({"block_tables": torch.zeros(1, 3, dtype=torch.int64)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(2, 3, dtype=torch.int32)}, "query_start_loc must have S+1=3 entries (got 2)"),
        ({"local_lens": torch.zeros(2, dtype=torch.int32)}, "local_lens must have an entry for each of the 1 rows (got 2)"),
        ({"value_dim": 40}, "value_dim must be in 1 .. Dq-1=39 (got 40)"),
        ({"num_splits": 3}, "num_splits must be a power of 2 (got 3)"),
        ({"out": torch.zeros(1, 3, 31)}, "out must have shape [1, 3, 32]"),
        ({"lse": torch.zeros(1, 3, dtype=torch.float64)}, "lse must be float32"),
    ],
)
def test_what_is_refused(change: dict[str, object], text: str) -> None:
    arguments = {**make([[5]])._asdict(), "scale": SCALE, "out": None, "lse": None, **change}
    with pytest.raises(DcpInvalidArgument) as caught:
        mla_decode(**arguments)
    assert str(caught.value).startswith("mla_decode: ") and text in str(caught.value)
