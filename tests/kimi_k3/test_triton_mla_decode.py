"""mla_decode in Triton's interpreter, against attention in fp64 that shares no code with it: keys are collected one by
one through the block table, and softmax is torch's.

The interpreter truncates fp32 to bfloat16, where a GPU rounds: a bf16 result is off by up to an ulp, and each weight in
front of the second product by an ulp of itself. The bound below is those two and fp32's share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from tests.kimi_k3.interpreted import need, run_cases

SCALE = 0.15
ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of a truncated result; fp32 is not
FP32 = 1e-5

CASES: dict[str, Callable[[], None]] = {}


def case(name: str, **arguments: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(body: Callable[..., None]) -> Callable[..., None]:
        CASES[name] = functools.partial(body, **arguments)
        return body

    return add


class Inputs(NamedTuple):
    query: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    local_lens: torch.Tensor


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
    """A batch; lens[s] has what each row of request s sees. What no row may see is NaN in the cache and -1, or a block
    that is not there, in the table. Padding rows hold NaN, and a length that must not be looked at."""
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-max(some, default=0) // block_size) for some in lens]
    cache = torch.full((sum(needs) + 2, block_size, sum(dims)), math.nan)
    free = torch.randperm(len(cache), generator=generator).tolist()
    tables = torch.full((len(lens), max(needs, default=0) + 2), -1, dtype=torch.int32)
    tables[:, -1] = 1 << 30
    for s, need_s in enumerate(needs):
        for i in range(need_s):
            tables[s, i] = free.pop()
        for p in range(max(lens[s], default=0)):
            cache[tables[s, p // block_size], p % block_size] = torch.randn(sum(dims), generator=generator)
    rows = [n for some in lens for n in some]
    query = torch.full((len(rows) + padding, num_heads, sum(dims)), math.nan)
    query[: len(rows)] = torch.randn(len(rows), num_heads, sum(dims), generator=generator)
    starts = torch.tensor([0, *map(len, lens)]).cumsum(0).to(torch.int32)
    local_lens = torch.tensor(rows + [9] * padding, dtype=torch.int32)
    return Inputs(query.to(dtype), cache.to(dtype), tables, starts, local_lens)


class Truth(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    size: torch.Tensor  # softmax @ |values|: what an error of the weights is multiplied with


def truth(inputs: Inputs, value_dim: int, scale: float = SCALE) -> Truth:
    query, cache, tables, starts, lens = inputs
    shape = (*query.shape[:2], value_dim)
    out, size = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    lse = torch.full(shape[:2], -math.inf, dtype=torch.float64)
    for s in range(len(tables)):
        for t in range(int(starts[s]), int(starts[s + 1])):
            for_row = [(int(tables[s, p // cache.shape[1]]), p % cache.shape[1]) for p in range(int(lens[t]))]
            if for_row:
                keys = torch.stack([cache[block, offset] for block, offset in for_row]).double()
                scores = scale * (query[t].double() @ keys.T)
                weights, values = torch.softmax(scores, 1), keys[:, :value_dim]
                out[t], size[t], lse[t] = weights @ values, weights @ values.abs(), torch.logsumexp(scores, 1)
    return Truth(out, lse, size)


def check(inputs: Inputs, *, value_dim: int = 32, scale: float = SCALE, **options: object) -> None:
    from dcpkernels.kimi_k3.triton.mla_decode import mla_decode

    out, lse = mla_decode(*inputs, scale=scale, value_dim=value_dim, **options)
    assert out.dtype == inputs.query.dtype
    compare(out, lse, truth(inputs, value_dim, scale))


def compare(out: torch.Tensor, lse: torch.Tensor, expected: Truth) -> None:
    assert lse.dtype == torch.float32
    empty = expected.lse == -math.inf
    assert torch.equal(lse == -math.inf, empty), "which rows are empty"
    assert (out[empty] == 0).all(), "empty rows are 0"
    lse_error = (lse.double() - expected.lse)[~empty].abs() / (1 + expected.lse[~empty].abs())
    assert lse_error.numel() == 0 or lse_error.max() < FP32, f"lse: {lse_error.max()}"
    ulp = ULP[out.dtype]
    bound = ulp * expected.out.abs() + (ulp + FP32) * expected.size + 1e-30
    over = (out.double() - expected.out).abs() / bound
    assert over.numel() == 0 or over.max() <= 1, f"out: {over.max()} of the bound"


MIXED = [[0], [1], [0, 1, 2], [], [15, 16, 17], [150, 151, 151]]


@case("block size 16", block_size=16)
@case("block size 64", block_size=64)
@case("block size 7", block_size=7)
@case("block size 16, one split", block_size=16, num_splits=1)
@case("block size 64, four splits", block_size=64, num_splits=4)
@case("block size 7, three splits", block_size=7, num_splits=3)
def rows_of_all_kinds(block_size: int, num_splits: int | None = None) -> None:
    """Empty, one key, around a block, several tiles; a request without rows; rows of a request that see unlike many."""
    check(make(MIXED, block_size=block_size, padding=2), num_splits=num_splits)


@case("64 splits, most of them empty")
def empty_splits() -> None:
    check(make([[600], [1], [0]], num_heads=1, padding=1), num_splits=64)


@case("tiles of other GPUs", tile=(16, 16))
@case("tiles of other GPUs, 32 heads", tile=(32, 16))
def tiles(tile: tuple[int, int]) -> None:
    """The interpreter has a CUDA GPU's otherwise."""
    from dcpkernels.kimi_k3.triton import mla_decode

    inputs = make([[40], [16, 17]], num_heads=33, padding=1)
    out, lse = torch.empty(4, 33, 32), torch.empty(4, 33)
    for launch in mla_decode.launches(*inputs, SCALE, 32, 2, out, lse, mla_decode.Tile(*tile, 4, 1)):
        launch.run()
    compare(out, lse, truth(inputs, 32))


@case("1 head", num_heads=1)
@case("12 heads", num_heads=12)
@case("16 heads", num_heads=16)
@case("17 heads", num_heads=17)
@case("33 heads", num_heads=33)
def heads_that_do_not_fill_a_tile(num_heads: int) -> None:
    check(make([[40], [3, 4]], num_heads=num_heads))


@case("Kimi-K3, 12 heads, fp32", num_heads=12, dtype=torch.float32)
@case("Kimi-K3, 12 heads, bf16", num_heads=12, dtype=torch.bfloat16)
@case("Kimi-K3, 96 heads, fp32", num_heads=96, dtype=torch.float32)
@case("Kimi-K3, 96 heads, bf16", num_heads=96, dtype=torch.bfloat16)
@case("Kimi-K3, 12 heads, fp16", num_heads=12, dtype=torch.float16)
def kimi_k3(num_heads: int, dtype: torch.dtype) -> None:
    lens = [[70], [4, 5]] if num_heads < 96 else [[70]]
    inputs = make(lens, num_heads=num_heads, dims=(512, 64), block_size=64, dtype=dtype, padding=num_heads < 96)
    check(inputs, value_dim=512, scale=192**-0.5, num_splits=2)


@case("dims that are no powers of 2")
def odd_dims() -> None:
    check(make([[40], [3]], dims=(40, 24)), value_dim=40)


@case("more requests than are searched at once")
def many_requests() -> None:
    check(make([[1 + s % 3] if s % 5 == 0 else [] for s in range(150)], num_heads=1, padding=1), num_splits=1)


@case("large scores")
def large_scores() -> None:
    """Of hundreds, in ascending order: without the maximum taken off they overflow. Tiles have ever larger ones."""
    inputs = make([[100]])
    key = inputs.cache[inputs.block_tables[0, 0], 0].clone()
    for p in range(100):
        inputs.cache[inputs.block_tables[0, p // 16], p % 16] = key * (p / 10)
    inputs.query[0] = key * 8
    check(inputs, num_splits=2)


@case("nothing to see, nothing to do")
def nothing() -> None:
    check(make([], padding=3))
    check(make([[0], [0, 0]]))
    inputs = make([[4]])
    check(inputs._replace(query=inputs.query[:0], local_lens=inputs.local_lens[:0],
                          query_start_loc=torch.zeros(2, dtype=torch.int32)))  # fmt: skip


@case("a strided query and cache")
def strided() -> None:
    inputs = make([[40], [9]], num_heads=4)
    query, cache = torch.full((2, 6, 48), math.nan), torch.full((len(inputs.cache), 20, 41), math.nan)
    query[:, 1:5, :40], cache[:, 2:18, :40] = inputs.query, inputs.cache
    tables = torch.cat([inputs.block_tables, inputs.block_tables], 1)[:, : inputs.block_tables.shape[1]]
    check(inputs._replace(query=query[:, 1:5, :40], cache=cache[:, 2:18, :40], block_tables=tables))


@case("outputs that are given")
def given_outputs() -> None:
    from dcpkernels.kimi_k3.triton.mla_decode import mla_decode

    inputs = make([[40], [9]], num_heads=4, padding=1)
    expected = truth(inputs, 32)
    outs, lses = torch.full((3, 9, 33), math.nan), torch.full((5, 3), math.nan)
    out, lse = outs[:, 2:6, :32], lses[1:].T
    given = mla_decode(*inputs, scale=SCALE, value_dim=32, out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    assert (out - expected.out).abs().max() < FP32
    assert torch.allclose(lse.double(), expected.lse, rtol=FP32, atol=FP32)
    assert outs[:, :2].isnan().all() and outs[:, 6:].isnan().all() and outs[..., 32].isnan().all()
    assert lses[0].isnan().all()


@case("NaN in a query stays in its row")
def nan_stays() -> None:
    from dcpkernels.kimi_k3.triton.mla_decode import mla_decode

    inputs = make([[40], [9]])
    inputs.query[0, 1, 3] = math.nan
    out, lse = mla_decode(*inputs, scale=SCALE, value_dim=32, num_splits=2)
    bad = torch.zeros(2, 3, dtype=torch.bool)
    bad[0, 1] = True
    assert torch.equal(out.isnan().all(2), bad) and torch.equal(lse.isnan(), bad)
    assert torch.equal(out.isnan().any(2), bad)


@case("how many splits")
def how_many_splits() -> None:
    from dcpkernels.kimi_k3.triton.mla_decode import choose_num_splits

    assert choose_num_splits(1, 96, 120_000, 32) == 64  # as many as there may be
    assert choose_num_splits(2, 96, 120_000, 32) == 44  # 6 programs: as many as fill 264
    assert choose_num_splits(1, 12, 1000, 16) == 7  # as there are keys for
    assert choose_num_splits(1, 12, 0, 16) == 1 and choose_num_splits(1000, 96, 120_000, 32) == 1


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"query": [1]}, "query must be a torch.Tensor (got list)"),
    ({"query": torch.zeros(1, 40)}, "query must have 3 dims (got [1, 40])"),
    ({"query": torch.zeros(1, 3, 40, dtype=torch.int32)}, "query must be bfloat16 or float16 or float32 (got int32)"),
    ({"query": torch.zeros(1, 3, 80)[..., ::2]}, "query must have stride 1 in its last dim (got 2)"),
    ({"cache": torch.zeros(4, 16, 41)}, "cache.shape[2] must be query.shape[2]=40 (got 41)"),
    ({"cache": torch.zeros(4, 16, 40, dtype=torch.bfloat16)}, "cache must be float32 (got bfloat16)"),
    ({"cache": torch.zeros(4, 16, 40, device="meta")}, "cache must be on cpu, as the others (got meta)"),
    ({"block_tables": torch.zeros(1, 3, dtype=torch.int64)}, "block_tables must be int32 (got int64)"),
    ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc must have shape [2] (got [3])"),
    ({"local_lens": torch.zeros(2, dtype=torch.int32)}, "local_lens must have shape [1] (got [2])"),
    ({"value_dim": 40}, "value_dim must be in 1 .. query.shape[2]-1=39 (got 40)"),
    ({"num_splits": 65}, "num_splits must be in 1 .. 64 (got 65)"),
    ({"num_splits": 0}, "num_splits must be in 1 .. 64 (got 0)"),
    ({"out": torch.zeros(1, 3, 31)}, "out must have shape [1, 3, 32] (got [1, 3, 31])"),
    ({"out": torch.zeros(1, 1, 32).expand(1, 3, 32)}, "out must not overlap itself (got strides (32, 0, 1))"),
    ({"lse": torch.zeros(1, 3, dtype=torch.float64)}, "lse must be float32 (got float64)"),
]


@case("what is refused")
def refused() -> None:
    from dcpkernels.kimi_k3.triton.mla_decode import mla_decode

    for change, text in REFUSED:
        out, lse = torch.full((1, 3, 32), 7.0), torch.full((1, 3), 7.0)
        arguments = {**make([[5]])._asdict(), "scale": SCALE, "value_dim": 32, "out": out, "lse": lse, **change}
        with pytest.raises(DcpInvalidArgument) as caught:
            mla_decode(**arguments)
        assert str(caught.value) == f"mla_decode: {text}", caught.value
        assert (out == 7).all() and (lse == 7).all(), "something was written"


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    need("triton")
    return run_cases("tests.kimi_k3.test_triton_mla_decode")


@pytest.mark.parametrize("name", CASES)
def test_mla_decode(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


