"""query_gather that quantises: the bytes that torch gives for `(q.float() / scale).clamp(-448, 448).to(float8_e4m3fn)`, and
for float8_e4m3fnuz, with 240."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, _backend, query_gather, reference, release_query
from dcpkernels.testing import run_ranks, unchanged
from tests.a2a_calls import bits
from tests.a2a_ways import OUTS, PAYLOADS, guarded_output, lay_out
from tests.gather_calls import Buffers, any_bits, release_by_merge

SOURCES = [torch.bfloat16, torch.float16, torch.float32]
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FORMATS = pytest.mark.parametrize("to", [E4M3, FNUZ], ids=str)
# Powers of two, none, one that overflows all and one that loses all; subnormal as fp32 itself.
ISAS = pytest.mark.parametrize("isa", _backend.load("cpu").runnable_variants)
SCALES = [1.0, 2.0**-7, 0.1, 3.7e-3, 50.0, 448.0, 1e-30, 3e38, 1e-40]


def open_workspace(group, num_heads, head_dim, max_num_tokens=64, **fields):
    fields = {"query_dtype": E4M3, "timeout_s": 20.0, "first_call_timeout_s": 20.0} | fields
    config = WorkspaceConfig(num_heads, 8, max_num_tokens, query_head_dim=head_dim, **fields)
    return Workspace(group, config=config, backend="direct")


def assert_as_torch(got: torch.Tensor, queries, scale: float, to: torch.dtype = E4M3) -> None:
    """Every byte. A NaN of e4m3fn may have either sign: torch's kernels differ in it themselves."""
    truth = reference.query_gather(queries, scale=scale, scaled_dtype=to)
    assert got.dtype is to and got.shape == truth.shape
    got, truth = (t.contiguous().view(torch.uint8) for t in (got, truth))
    wrong = got != truth
    if to is E4M3:
        wrong &= ~((got & 0x7F == 0x7F) & (truth & 0x7F == 0x7F))
    if wrong.any():
        places = wrong.nonzero()[:4].tolist()
        inputs = torch.cat(
            [torch.cat([part.float() for part in ([q] if torch.is_tensor(q) else q)], 2) for q in queries], 1
        )
        shown = [(inputs[tuple(i)].item(), int(got[tuple(i)]), int(truth[tuple(i)])) for i in places]
        raise AssertionError(f"{int(wrong.sum())} of {wrong.numel()} wrong; (q, got, torch's): {shown}; scale {scale}")


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def around_the_midpoints(scale: float, to: torch.dtype = E4M3) -> torch.Tensor:
    """fp32 values whose quotients lie on, or an ulp or two beside, what is between two neighbours of e4m3; between the
    largest and what would be above it, too."""
    codes = torch.arange(0x7F if to is E4M3 else 0x80, dtype=torch.uint8).view(to).double()
    codes = torch.cat([codes, 2 * codes[-1:] - codes[-2]])
    middles = ((codes[1:] + codes[:-1]) / 2 * torch.tensor(scale, dtype=torch.float32).double()).float()
    near = [middles]
    for toward in (0.0, math.inf):
        once = middles.nextafter(torch.tensor(toward))
        near += [once, once.nextafter(torch.tensor(toward))]
    values = torch.cat(near)
    return torch.cat([values, -values])


def gather_values(values: torch.Tensor, scales, to: torch.dtype, **fields) -> None:
    """Quantises a flat list of values with each scale, as heads of 64 of two ranks."""
    per_call = 2 * 512 * 64
    values = torch.cat([values, values.new_zeros(-len(values) % per_call)])
    queries = values.view(-1, 2, 512, 64).unbind(1)  # [rank] of [T, 512, 64]

    def body(group):
        with open_workspace(group, 1024, 64, len(values) // per_call, query_dtype=to, **fields) as workspace:
            for scale in scales:
                view = query_gather(queries[workspace.rank], workspace=workspace, scale=scale)
                if workspace.rank == 0:
                    assert_as_torch(view, queries, scale, to)
                release_query(workspace=workspace)

    run_ranks(body, 2)


@FORMATS
@ISAS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_values_of_16_bits(dtype, isa, to):
    gather_values(every_pattern(dtype), SCALES, to, cpu_isa=isa)


@FORMATS
@ISAS
def test_fp32(isa, to):
    """Any bits; every power of two and NaN of several payloads; and around the midpoints, where a product with the
    reciprocal would round the other way."""
    high = torch.arange(2**12, dtype=torch.int32).bitwise_left_shift(20)  # sign, exponent, 3 bits of mantissa
    steps = torch.cat([high + low for low in (-1, 0, 1, 1 << 19)]).view(torch.float32)
    gather_values(torch.cat([any_bits((2**17,), torch.float32), steps]), SCALES, to, cpu_isa=isa)
    for scale in SCALES[:-2]:
        gather_values(around_the_midpoints(scale, to), [scale], to, cpu_isa=isa)


def test_around_the_midpoints_a_reciprocal_would_be_wrong():
    """That the inputs of test_fp32 tell."""
    for scale in (0.1, 3.7e-3):
        values = around_the_midpoints(scale)
        divided = (values / torch.tensor(scale)).clamp(-448, 448).to(E4M3)
        assert bits(divided).ne(bits((values * (1 / torch.tensor(scale))).clamp(-448, 448).to(E4M3))).any()


SHAPES = [  # dims of the parts, heads of a rank, T
    ((5, 3), 3, 7),
    ((1,), 1, 1),
    ((17, 15, 1), 2, 20),
    ((512, 64), 2, 16),
    ((3, 8, 1, 21), 1, 64),
    ((40,), 3, 0),
]


@pytest.mark.parametrize("multicast, num_channels", [(True, 1), (True, 3), (False, 1), (False, 3)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_parts_and_strides(num_ranks, multicast, num_channels):
    """Odd dims, any strides, numbers and tensors as the scale, a view and `out`; nothing else is written."""

    def body(group):
        for turn, (dims, heads, num_tokens) in enumerate(SHAPES):
            dtype, scale = SOURCES[(turn + num_ranks) % 3], (0.03, 1.0, 5.0)[turn % 3]
            to, other = (E4M3, FNUZ)[:: 1 if turn % 2 else -1]
            shape = (num_tokens, heads)
            queries = [
                tuple(
                    lay_out(
                        list(PAYLOADS.values())[(3 * turn + rank + 5 * part) % len(PAYLOADS)],
                        any_bits((*shape, dim), dtype, 100 * turn + 10 * rank + part),
                    )
                    for part, dim in enumerate(dims)
                )
                for rank in range(num_ranks)
            ]
            mine = queries[group.rank]
            given = scale if turn % 2 else torch.full(((), (1,), (1, 1))[turn // 2], scale)
            fields = {"multicast": multicast, "num_channels": num_channels, "query_dtype": to}
            with open_workspace(group, num_ranks * heads, sum(dims), **fields) as workspace:
                buffers = Buffers(group, workspace, "query_gather")
                buffers.fill()
                with unchanged(*mine):
                    view = query_gather(mine, workspace=workspace, scale=given)
                assert_as_torch(view, queries, scale, to)
                buffers.check_around(view)
                release_by_merge(workspace, num_tokens)
                layout = OUTS[(turn + workspace.rank) % len(OUTS)]
                for dtype in (to, other):  # of `out`
                    out = guarded_output(layout, (num_tokens, num_ranks * heads, sum(dims)), dtype)
                    assert query_gather(mine, workspace=workspace, scale=given, out=out.tensor) is out.tensor
                    out.check()
                    assert_as_torch(out.tensor, queries, scale, dtype)

    run_ranks(body, num_ranks)


def test_out_over_the_capacity():
    queries = [any_bits((150, 2, 33), torch.bfloat16, rank) for rank in range(3)]

    def body(group):
        with open_workspace(group, 6, 33) as workspace:
            for scale in (0.5, torch.tensor(0.5)):
                for to in (E4M3, FNUZ):
                    out = torch.empty(150, 6, 33, dtype=to)
                    query_gather(queries[workspace.rank], workspace=workspace, scale=scale, out=out)
                    assert_as_torch(out, queries, 0.5, to)

    run_ranks(body, 3)


def test_a_tensor_as_the_scale_is_read_in_each_call():
    """Of the same shape, at another place, or the same with another value: as a captured graph reads it."""
    queries = [any_bits((9, 1, 24), torch.bfloat16, rank) for rank in range(2)]

    def body(group):
        with open_workspace(group, 2, 24) as workspace:
            scale, values = torch.tensor([1.0]), np.random.default_rng(0).uniform(0.01, 30, 12).astype(np.float32)
            for turn, value in enumerate(values.tolist()):
                if turn % 3 == 0:
                    scale = torch.empty(3, dtype=torch.float32)[turn % 2 : turn % 2 + 1]
                scale.fill_(value)
                assert_as_torch(query_gather(queries[workspace.rank], workspace=workspace, scale=scale), queries, value)
                release_query(workspace=workspace)
                by_number = query_gather(queries[workspace.rank], workspace=workspace, scale=value / 2)
                assert_as_torch(by_number, queries, value / 2)
                release_query(workspace=workspace)

    run_ranks(body, 2)


def test_plain_and_quantised_calls_in_turn():
    """One lane, one buffer; a workspace for bf16 serves fp8 too, of which e4m3fnuz in an `out`."""
    queries = [any_bits((9, 1, 24), torch.bfloat16, rank) for rank in range(2)]

    def body(group):
        with open_workspace(group, 2, 24, query_dtype=torch.bfloat16) as workspace:
            for _ in range(3):
                view = query_gather(queries[workspace.rank], workspace=workspace, scale=0.2)
                assert_as_torch(view, queries, 0.2)
                release_by_merge(workspace, 9)
                view = query_gather(queries[workspace.rank], workspace=workspace)
                assert view.dtype == torch.bfloat16
                assert torch.equal(bits(view), bits(reference.query_gather(queries)))
                release_query(workspace=workspace)
                out = torch.empty(9, 2, 24, dtype=FNUZ)
                query_gather(queries[workspace.rank], workspace=workspace, scale=0.2, out=out)
                assert_as_torch(out, queries, 0.2, FNUZ)

    run_ranks(body, 2)


def test_what_a_query_is_quantised_to():
    """e4m3fn but where the workspace's query_dtype is e4m3fnuz; a query of that type itself is moved as it is."""
    query = torch.randn(3, 2, 16)

    def body(group):
        for dtype in (torch.bfloat16, E4M3, torch.float8_e5m2, torch.float8_e5m2fnuz, FNUZ):
            with open_workspace(group, 2, 16, query_dtype=dtype) as workspace:
                to = FNUZ if dtype is FNUZ else E4M3
                assert workspace.config.quantised_dtype is to
                assert_as_torch(query_gather(query, workspace=workspace, scale=0.5), [query], 0.5, to)
                release_query(workspace=workspace)
                for same in (E4M3, FNUZ):
                    codes = any_bits((3, 2, 16), same)
                    assert torch.equal(bits(query_gather(codes, workspace=workspace)), bits(codes))
                    release_query(workspace=workspace)

    run_ranks(body, 1)


@FORMATS
def test_between_processes(to):
    run_ranks(in_a_process, 2, to, mode="process")


def in_a_process(group, to):
    queries = [(every_pattern(torch.bfloat16).view(64, 16, 64)[:, rank::2],) for rank in range(2)]
    with open_workspace(group, 16, 64, query_dtype=to) as workspace:
        view = query_gather(queries[workspace.rank], workspace=workspace, scale=torch.tensor(0.7))
        assert_as_torch(view, queries, 0.7, to)
        release_by_merge(workspace, 64)
