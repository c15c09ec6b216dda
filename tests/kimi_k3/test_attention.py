"""local_attention on CPUs: against a softmax in fp64, with all that it must not read filled with NaN."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.attention import attention_for, local_attention
from dcpkernels.kimi_k3.cache import DecodeBatch, RequestTable
from dcpkernels.testing import Guarded, unchanged

# Around the borders of the chunks that keys are worked on in (64, 128, 256, 512, then steps of 512), and of blocks.
BORDERS = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1537, 2049]
FP32 = 1e-5  # of the largest element: fp32 sums of a few thousand products stay a good way below


class Problem(NamedTuple):
    query: torch.Tensor
    blocks: torch.Tensor
    batch: DecodeBatch
    keys: list[torch.Tensor]  # fp64 [local_lens[t], Dq]: what row t sees; of none for padding


def make_problem(
    lens: Sequence[Sequence[int]],
    *,
    padding: int = 0,
    num_heads: int = 2,
    dims: tuple[int, int] = (40, 32),
    block_size: int = 16,
    order: str = "shuffled",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Requests whose rows see lens[s] tokens each. All else in the cache is NaN, and so is the query of padding."""
    generator = torch.Generator().manual_seed(seed)
    query_dim = dims[0]
    needs = [-(-max(rows) // block_size) for rows in lens]
    num_blocks = sum(needs) + 3
    numbers = torch.randperm(num_blocks, generator=generator) if order == "shuffled" else torch.arange(num_blocks)
    if order == "backwards":
        numbers = numbers.flip(0)
    tables = torch.full((len(lens), max(needs, default=0) + 1), -1, dtype=torch.int32)
    blocks = torch.full((num_blocks, block_size, query_dim), torch.nan, dtype=dtype)
    keys, used = [], 1  # block numbers[0] is nobody's
    for s, (rows, need) in enumerate(zip(lens, needs, strict=True)):
        tables[s, :need] = numbers[used : used + need]
        used += need
        context = torch.randn(max(rows), query_dim, generator=generator).to(dtype)
        for j, key in enumerate(context):
            blocks[tables[s, j // block_size], j % block_size] = key
        keys += [context[:n].double() for n in rows]
    num_rows = len(keys) + padding
    query = torch.randn(num_rows, num_heads, query_dim, generator=generator).to(dtype)
    query[len(keys) :] = torch.nan
    flat = [n for rows in lens for n in rows] + [0] * padding
    return Problem(query, blocks, batch_of(lens, tables, flat), keys)


def batch_of(lens: Sequence[Sequence[int]], tables: torch.Tensor, local_lens: list[int]) -> DecodeBatch:
    starts = [0]
    for rows in lens:
        starts.append(starts[-1] + len(rows))
    absent = torch.full((len(local_lens),), -1)  # attention has no business with these
    return DecodeBatch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        positions=absent,
        slot_mapping=absent,
        local_lens=torch.tensor(local_lens, dtype=torch.int32),
        block_tables=tables,
        state_slots=torch.arange(len(lens)),
    )


def truth(problem: Problem, scale: float, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64, of the rows that belong to a request; 0 and -inf where there is nothing to see."""
    outs, lses = [], []
    for row, keys in zip(problem.query.double(), problem.keys, strict=False):
        scores = scale * row @ keys.T
        lses.append(torch.logsumexp(scores, 1))
        outs.append(torch.softmax(scores, 1) @ keys[:, :value_dim])
    return torch.stack(outs), torch.stack(lses)


def check(
    problem: Problem,
    *,
    scale: float = 0.2,
    value_dim: int = 32,
    tolerance: float = FP32,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs it and compares: fp32 by the largest element, 16 bits by the rounding of each element besides."""
    options: dict[str, Any] = {name: given for name, given in (("out", out), ("lse", lse)) if given is not None}
    with unchanged(problem.blocks, problem.query):
        got, got_lse = local_attention(
            problem.query, problem.blocks, problem.batch, scale=scale, value_dim=value_dim, **options
        )
    expected, expected_lse = truth(problem, scale, value_dim)
    n = len(problem.keys)
    sees = problem.batch.local_lens > 0
    assert got.shape == (*problem.query.shape[:2], value_dim) and got_lse.shape == problem.query.shape[:2]
    assert got.dtype == (problem.query.dtype if out is None else out.dtype) and got_lse.dtype == torch.float32
    assert (got_lse[~sees] == -torch.inf).all()
    if sees.any():
        live = sees[:n]
        unit = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
        allowed = tolerance * expected.abs().max() + unit * expected.abs()
        error = (got[:n].double() - expected).abs()[live]
        assert (error <= allowed[live]).all(), float((error / allowed[live]).max())  # NaN is not <=
        lse_error = (got_lse[:n].double() - expected_lse).abs()[live]
        assert (lse_error <= tolerance * max(1.0, expected_lse[live].abs().max())).all(), float(lse_error.max())
    return got, got_lse


@pytest.mark.parametrize("order", ["consecutive", "shuffled", "backwards"])
@pytest.mark.parametrize("length", BORDERS)
def test_lengths_around_borders(length: int, order: str) -> None:
    """One request alone: the blocks of a consecutive one are read where they are."""
    check(make_problem([[length]], order=order, seed=length))


@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
def test_all_those_lengths_in_one_batch(order: str) -> None:
    check(make_problem([[length] for length in BORDERS], order=order, padding=2))


MIXED = [
    [7],
    [1021, 1022, 1023, 1024, 1025],
    [0],  # nothing of it is here
    [2, 2, 3],  # the tokens of several rows are on other ranks
    [0, 0, 1],  # the last row alone sees one
    [62, 63, 64, 65],
    [513],
    [0, 0],
    [126, 127, 128, 128, 129],
    [64],
    [511, 512, 513],
    # Of the same number of rows, and ahead of it by its first row, not by its last: its newest tokens are elsewhere.
    [512, 512, 512],
    [0, 0, 0],
]


@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 2000])
def test_requests_of_all_kinds_in_one_batch(block_size: int, order: str) -> None:
    check(make_problem(MIXED, padding=3, block_size=block_size, order=order, num_heads=3))


@pytest.mark.parametrize("rows", MIXED, ids=str)
def test_each_of_them_alone(rows: list[int]) -> None:
    """In a cache of consecutive blocks, of which a row sees a part of the last one."""
    check(make_problem([rows], order="consecutive"))


def test_every_row_sees_its_own_number_of_tokens() -> None:
    """All that a request has so far in one step, as drafts or a short prompt: row i sees i + 1 tokens."""
    check(make_problem([range(1, 131), range(40, 101)], padding=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ["consecutive", "shuffled"])
def test_16_bits(dtype: torch.dtype, order: str) -> None:
    """All is computed in fp32 from what the cache holds, and rounded once: half a unit in the last place on top of what
    fp32 is allowed."""
    for lens in (MIXED, [[1025]], [[300, 301]]):
        check(make_problem(lens, padding=2, order=order, dtype=dtype))


def test_dims_of_the_model() -> None:
    """576 and 512, a few of 96 heads, at the model's scale."""
    problem = make_problem([[700], [65, 66], [3]], num_heads=5, dims=(576, 512), block_size=64, padding=1)
    check(problem, scale=192**-0.5, value_dim=512)


@pytest.mark.parametrize("top", [80, 500])
def test_large_scores(top: int) -> None:
    """|score| around 80, where exp is at the end of fp32, and far beyond. fp32 scores are wrong by 2^-24 of what they
    add up, in all some tens of 2^-24 |score|, and weights by as much, relatively."""
    problem = make_problem(MIXED, padding=1, seed=3)
    largest = max(
        float((q @ k.T).abs().max()) for q, k in zip(problem.query.double(), problem.keys, strict=False) if len(k)
    )
    for sign in (1, -1):
        check(problem, scale=sign * top / largest, tolerance=FP32 + 4 * 2.0**-24 * top)


@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
def test_scores_that_rise_or_fall_along_the_context(falling: bool) -> None:
    """Every chunk has a larger score than the one before, so that what was added up is scaled down, by a lot; or none
    has. Then no weight may come out larger than 1."""
    problem = make_problem([[1300], [1299, 1300]], seed=4)
    problem.query[..., 39] = 1.0
    ramp = torch.linspace(0, 60, 1300).sub(30) * (-1 if falling else 1)
    for table in problem.batch.block_tables:
        for j in range(1300):
            problem.blocks[table[j // 16], j % 16, 39] = ramp[j]
    for keys in problem.keys:
        keys[:, 39] = ramp[: len(keys)]
    check(problem, scale=1.0, tolerance=FP32 + 4 * 2.0**-24 * 60)


def test_one_token_is_its_own_value() -> None:
    """And its LSE is the score, in natural units: log2 would be 1.44 times as much."""
    problem = make_problem([[1]], num_heads=4)
    out, lse = check(problem)
    value = problem.keys[0][0].float()
    assert torch.equal(out, value[:32].expand(1, 4, 32))
    score = 0.2 * (problem.query[0] @ value)
    assert torch.allclose(lse[0], score, rtol=0, atol=1e-5)
    # Of n equal keys: log n more.
    many = make_problem([[1, 700]], num_heads=4)
    same = many.keys[1][:1].expand(700, -1)
    for j in range(700):
        many.blocks[many.batch.block_tables[0, j // 16], j % 16] = same[j].float()
    many.query[1] = many.query[0]
    many.keys[1] = same
    _, lse = check(many)
    assert torch.allclose(lse[1] - lse[0], torch.tensor(700.0).log(), atol=2e-5)


def test_rows_that_see_nothing_change_nothing() -> None:
    """Whatever surrounds a request, it gets the same bits: other requests of the same number of tokens, and padding."""
    alone = make_problem([[100, 101]], seed=9)
    out, lse = check(alone)
    tables = torch.full((3, alone.batch.block_tables.shape[1]), -1, dtype=torch.int32)
    tables[1] = alone.batch.block_tables[0]
    query = torch.full((8, *alone.query.shape[1:]), torch.nan)
    query[2:4] = alone.query
    batch = batch_of([[0, 0], [100, 101], [0, 0]], tables, [0, 0, 100, 101, 0, 0, 0, 0])
    among, among_lse = local_attention(query, alone.blocks, batch, scale=0.2, value_dim=32)
    assert torch.equal(among[2:4], out) and torch.equal(among_lse[2:4], lse)
    assert (among_lse[[0, 1, 4, 5, 6, 7]] == -torch.inf).all()


def test_nothing_at_all() -> None:
    """Padding alone, and not even that."""
    for padding in (0, 3):
        query, blocks = torch.full((padding, 2, 40), torch.nan), torch.full((2, 16, 40), torch.nan)
        batch = batch_of([], torch.empty(0, 0, dtype=torch.int32), [0] * padding)
        out, lse = local_attention(query, blocks, batch, scale=0.2, value_dim=32)
        assert out.shape == (padding, 2, 32) and (lse == -torch.inf).all()


@pytest.mark.parametrize("strides", [(64, 32, 1), (100, 40, 1), (1, 256, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_given_outputs_are_written_and_nothing_around_them(dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    problem = make_problem([[70, 71], [0], [3]], padding=2)
    plain, plain_lse = check(problem)
    out = Guarded((6, 2, 32), dtype, strides=strides)
    lse = Guarded((6, 2), torch.float32, strides=(3, 1))
    got, got_lse = check(problem, out=out.tensor, lse=lse.tensor)
    assert got is out.tensor and got_lse is lse.tensor
    out.check()
    lse.check()
    assert torch.equal(lse.tensor, plain_lse)
    assert torch.equal(out.tensor[[0, 1, 3]], plain[[0, 1, 3]].to(dtype))


def test_a_strided_query() -> None:
    problem = make_problem(MIXED, padding=1, num_heads=3)
    out, lse = check(problem)
    tokens, heads, dim = problem.query.shape
    for strides in ((heads * dim + 7, dim, 1), (dim, tokens * dim, 1), (1, tokens * dim, tokens)):
        query = Guarded(problem.query.shape, torch.float32, strides=strides)
        query.tensor.copy_(problem.query)
        got, got_lse = check(problem._replace(query=query.tensor))
        # Another layout may be another kernel of the product, so close and not equal.
        live = problem.batch.local_lens > 0
        assert torch.allclose(got[live], out[live], atol=1e-5) and torch.allclose(got_lse[live], lse[live], atol=1e-5)


@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["nearly even weights", "some tokens matter"])
def test_the_error_does_not_grow_with_the_length(spread: float) -> None:
    """Of contexts of 1 .. 120,000 tokens: the largest error relative to the largest element is within the same few
    units of fp32. It is so only if chunks are summed on their own and then added up: adding product by product to one
    sum is wrong by 5e-5 here."""
    errors = {}
    for length in (1, 10, 100, 1_000, 10_000, 120_000):
        generator = torch.Generator().manual_seed(length)
        rows = torch.randn(length, 40, generator=generator)
        blocks = torch.full((-(-length // 64), 64, 40), torch.nan)
        blocks.view(-1, 40)[:length] = rows
        tables = torch.arange(len(blocks), dtype=torch.int32)[None]
        query = torch.randn(1, 2, 40, generator=generator)
        problem = Problem(query, blocks, batch_of([[length]], tables, [length]), [rows.double()])
        scale = spread * 40**-0.5
        out, lse = local_attention(query, blocks, problem.batch, scale=scale, value_dim=32)
        expected, expected_lse = truth(problem, scale, 32)
        error = (out - expected).abs().max() / expected.abs().max()
        lse_error = (lse - expected_lse).abs().max() / max(1.0, expected_lse.abs().max())
        errors[length] = (float(error), float(lse_error))
    assert all(error < 2e-6 and lse_error < 5e-7 for error, lse_error in errors.values()), errors


def test_the_cpu_has_the_plain_one() -> None:
    assert attention_for(torch.device("cpu")) is local_attention


def test_a_draft_that_is_nan_stays_its_own() -> None:
    """A later row of the same request, which earlier ones must not see, brings NaN into the cache: 0 * NaN is NaN."""
    table = RequestTable(8, 4, 1)
    slot = table.add()
    batch = table.extend([slot], [3])
    blocks = torch.randn(8, 4, 40)
    query = torch.randn(3, 2, 40)
    expected, expected_lse = local_attention(query, blocks, batch, scale=0.2, value_dim=32)
    for wrong in (math.nan, math.inf):
        blocks.view(-1, 40)[batch.slot_mapping[2]] = wrong
        out, lse = local_attention(query, blocks, batch, scale=0.2, value_dim=32)
        assert torch.equal(out[:2], expected[:2]) and torch.equal(lse[:2], expected_lse[:2])
        assert not out[2].isfinite().any()


def test_rows_that_are_not_the_batch_s() -> None:
    table = RequestTable(8, 4, 1)
    batch = table.extend([table.add()], [3])
    for shape in ((2, 2, 40), (3, 2, 41)):
        with pytest.raises(DcpInvalidArgument, match="kimi_k3: query must have 3 rows of 40 columns"):
            local_attention(torch.zeros(shape), torch.zeros(8, 4, 40), batch, scale=1.0, value_dim=32)


def test_a_request_without_a_row() -> None:
    """As an engine's batch may have it."""
    blocks = torch.randn(4, 4, 40)
    table = RequestTable(4, 4, 2)
    slots = [table.add(), table.add()]
    batch = table.extend(slots, [2, 1])
    without = dataclasses.replace(batch, query_start_loc=torch.tensor([0, 0, 3], dtype=torch.int32))
    query = torch.randn(3, 2, 40)
    out, lse = local_attention(query, blocks, without, scale=0.2, value_dim=32)
    whole = table.extend([slots[1]], [2])
    again = dataclasses.replace(whole, query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
                                positions=batch.positions, local_lens=batch.local_lens)  # fmt: skip
    expected, expected_lse = local_attention(query, blocks, again, scale=0.2, value_dim=32)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
