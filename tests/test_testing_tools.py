"""The tools that judge the kernels: each must pass an honest kernel and catch a faulty one."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from dcpkernels import reference
from dcpkernels.testing import Guarded, assert_merge_close, fill_nan, merge_inputs, unchanged
from dcpkernels.testing.compare import (
    error_bound,
    lse_error_bound,
    max_err_over_bound,
    round_to,
    ulp,
)
from dcpkernels.testing.inputs import KINDS
from dcpkernels.testing.timing import interleave, max_over_ranks, summarize

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def fp32_merge(outs, lses, lse_base):
    """What a kernel does: fp32 throughout, in rank order, one rounding at the end."""
    live = torch.isfinite(lses)
    top = torch.where(live, lses, -math.inf).amax(0)
    acc, total = torch.zeros(outs.shape[1:]), torch.zeros(lses.shape[1:])
    for out, lse, alive in zip(outs.float(), lses, live, strict=True):
        exponent = torch.where(alive, lse - top, 0.0)
        w = torch.where(alive, torch.exp(exponent) if lse_base == "e" else torch.exp2(exponent), 0.0)
        acc = acc + w[..., None] * torch.where(alive[..., None], out, 0.0)
        total = total + w
    out = torch.where(total[..., None] > 0, acc / total[..., None], 0.0)
    lse = torch.where(total > 0, top + (torch.log(total) if lse_base == "e" else torch.log2(total)), -math.inf)
    return out.to(outs.dtype), lse


# -- compare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_an_honest_merge_passes(num_ranks, lse_base, dtype, kind):
    outs, lses = merge_inputs(num_ranks, 17, 8 * num_ranks, 64, dtype, kind=kind, seed=3)
    out, lse = fp32_merge(outs, lses, lse_base)
    assert_merge_close(out, lse, outs, lses, lse_base=lse_base)
    mine = slice(8 * (num_ranks - 1), 8 * num_ranks)
    assert_merge_close(out[:, mine], lse[:, mine], outs, lses, lse_base=lse_base, rank=num_ranks - 1)


def wrong_base(outs, lses):
    return fp32_merge(outs, lses, "2")


def last_rank_forgotten(outs, lses):
    return fp32_merge(outs[:-1], lses[:-1], "e")


def lse_in_16_bits(outs, lses):
    return fp32_merge(outs, lses.bfloat16().float(), "e")


def sum_in_16_bits(outs, lses):
    w = reference.merge_weights(lses, lse_base="e")
    out = torch.zeros(outs.shape[1:], dtype=outs.dtype)
    for weight, payload, live in zip(w.weight, outs, w.live, strict=True):
        out = out + (weight[..., None] * torch.where(live[..., None], payload.double(), 0.0)).to(outs.dtype)
    return out, w.lse.float()


def truncated(outs, lses):
    out, lse = reference.a2a_lse_reduce(outs, lses, lse_base="e")
    nearest = round_to(out, outs.dtype)
    toward_zero = torch.where(
        nearest.double().abs() > out.abs(), nearest.double() - ulp(out, outs.dtype) * out.sign(), nearest
    )
    return toward_zero.to(outs.dtype), lse.float()


def lse_wrong_in_the_fifth_digit(outs, lses):
    out, lse = fp32_merge(outs, lses, "e")
    return out, lse * 1.00001


def lse_not_checked_for_emptiness(outs, lses):
    out, lse = fp32_merge(outs, lses, "e")
    return out, torch.where(lse == -math.inf, -1e30, lse)


def nan_for_all_empty(outs, lses):
    out, lse = fp32_merge(outs, lses, "e")
    return torch.where(lse[..., None] == -math.inf, math.nan, out), lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (wrong_base, "spread"),
        (wrong_base, "dominant"),
        (last_rank_forgotten, "spread"),
        (lse_in_16_bits, "spread"),
        (lse_wrong_in_the_fifth_digit, "spread"),
        (lse_not_checked_for_emptiness, "all_empty"),
        (nan_for_all_empty, "all_empty"),
    ],
)
def test_a_faulty_merge_is_caught(kernel, kind, dtype):
    outs, lses = merge_inputs(4, 9, 8, 64, dtype, kind=kind, seed=5)
    out, lse = kernel(outs, lses)
    with pytest.raises(AssertionError):
        assert_merge_close(out, lse, outs, lses, lse_base="e")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [sum_in_16_bits, truncated])
def test_a_careless_rounding_is_caught(kernel, dtype):
    outs, lses = merge_inputs(4, 9, 8, 64, dtype, kind="spread", seed=5)
    out, lse = kernel(outs, lses)
    with pytest.raises(AssertionError):
        assert_merge_close(out, lse, outs, lses, lse_base="e")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ties_have_to_go_to_even(dtype):
    """Results halfway between two values: either neighbour is within the bound, one of them is right."""
    low = (torch.arange(64, dtype=torch.int16) + 0x3F80).view(dtype)
    high = (torch.arange(64, dtype=torch.int16) + 0x3F81).view(dtype)
    outs, lses = torch.stack([low, high]).view(2, 1, 1, 64), torch.zeros(2, 1, 1)
    even = torch.where(torch.arange(64) % 2 == 0, low, high).view(1, 1, 64)
    odd = torch.where(torch.arange(64) % 2 == 1, low, high).view(1, 1, 64)
    assert_merge_close(even, None, outs, lses, lse_base="e")
    one_odd = torch.cat([even[..., :63], odd[..., 63:]], -1)
    assert_merge_close(one_odd, None, outs, lses, lse_base="e")
    with pytest.raises(AssertionError, match="out: 64 of 64 elements are not the rounded exact result, 1 may"):
        assert_merge_close(odd, None, outs, lses, lse_base="e")


def test_another_ranks_heads_are_caught():
    outs, lses = merge_inputs(2, 3, 4, 8, torch.float32, kind="spread", seed=1)
    out, lse = fp32_merge(outs, lses, "e")
    with pytest.raises(AssertionError, match=r"out: 48 of 48 elements exceed the error bound; the worst is at \("):
        assert_merge_close(out[:, 2:], lse[:, 2:], outs, lses, lse_base="e", rank=0)


def test_lengths_reach_the_comparison():
    outs, lses = merge_inputs(2, 3, 2, 4, torch.float32, kind="spread", seed=1)
    seq_lens = torch.tensor([[4, 0, 0], [4, 4, 0]])
    lengths = {"seq_lens": seq_lens}
    blanked = torch.where(seq_lens[..., None] > 0, lses, -math.inf)
    out, lse = fp32_merge(outs, blanked, "e")
    assert_merge_close(out, lse, outs, lses, lse_base="e", **lengths)
    with pytest.raises(AssertionError):
        assert_merge_close(out, lse, outs, lses, lse_base="e")


def test_bound_by_hand():
    """Two shards, gap 2 in base 2; the formula with pencil and paper."""
    outs = torch.tensor([[3.0], [-5.0]]).view(2, 1, 1, 1)
    lses = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    relative = 2 * 2 + 4
    arithmetic = 2.0**-24 * ((relative + 3 * 2 * math.log(2)) * 0.2 * 3 + relative * 0.8 * 5)
    half_ulp = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # |-3.4| in [2, 4)
    for dtype, rounding in half_ulp.items():
        bound = error_bound(outs, lses, lse_base="2", out_dtype=dtype)
        assert bound.item() == pytest.approx(arithmetic + rounding, rel=1e-12)
    of_lse = 2.0**-24 * (relative + 3 * 2 * math.log(2) * 0.2) / math.log(2) + 2.0**-22  # log2(10) in [2, 4)
    assert lse_error_bound(lses, lse_base="2").item() == pytest.approx(of_lse, rel=1e-12)


def test_empty_shards_add_nothing_to_the_bound():
    outs, lses = merge_inputs(4, 3, 2, 8, torch.float32, kind="all_empty", seed=2)
    bound = error_bound(outs, lses, lse_base="e", out_dtype=torch.float32)
    assert torch.isfinite(bound).all()
    all_empty = ~torch.isfinite(lses).any(0)
    assert bound[all_empty].eq(2.0**-150).all()  # half of the smallest fp32: nothing but 0 passes
    more = (
        torch.cat([outs, torch.full_like(outs[:1], 1e30)]),
        torch.cat([lses, torch.full_like(lses[:1], math.inf)]),
    )
    wider = error_bound(*more, lse_base="e", out_dtype=torch.float32)
    assert (wider / bound).max() < 1.5  # one rank more, not 1e30


def test_max_err_over_bound():
    zero, one = torch.zeros(2), torch.ones(2)
    assert max_err_over_bound(zero, zero, zero) == 0
    assert max_err_over_bound(zero, one, one * 4) == 0.25
    assert max_err_over_bound(one, zero, zero) == math.inf
    assert max_err_over_bound(torch.tensor([0, math.nan]), zero, one) == math.inf
    assert max_err_over_bound(zero, torch.tensor([0, math.nan]), one) == math.inf
    assert max_err_over_bound(torch.full((2,), math.inf), torch.full((2,), math.inf), one) == math.inf
    with pytest.raises(ValueError, match="shapes must be equal"):
        max_err_over_bound(zero, zero[:1], zero)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ulp_is_the_distance_to_the_next_value(dtype):
    """All finite positive values, subnormals included."""
    values = torch.arange(0, 0x7F80, dtype=torch.int16).view(dtype)
    values = values[torch.isfinite(values)].double()
    assert torch.equal(ulp(values[:-1], dtype), values.diff())
    assert torch.equal(ulp(-values, dtype), ulp(values, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_nearest_even_and_single(dtype):
    """Midpoints of all neighbours go to the even one; a hair beside a midpoint goes to the nearer one."""
    bits = torch.arange(0, 0x7F7F, dtype=torch.int16)
    low = bits.view(dtype)
    bits, low = bits[torch.isfinite(low)][:-1], low[torch.isfinite(low)]
    low, high = low[:-1], low[1:]
    middle = (low.double() + high.double()) / 2
    hair = middle * 2.0**-40
    even = torch.where(bits % 2 == 0, low, high)
    for sign in (1, -1):
        assert torch.equal(round_to(sign * middle, dtype), sign * even)
        assert torch.equal(round_to(sign * (middle - hair), dtype), sign * low)
        assert torch.equal(round_to(sign * (middle + hair), dtype), sign * high)
        assert torch.equal(round_to(sign * low.double(), dtype), sign * low)


def test_rounding_at_the_ends():
    top = torch.finfo(torch.float16).max
    values = torch.tensor([top + 15.9, top + 16, -top - 16, 1e300, math.inf, -math.inf, math.nan, -0.0, 2.0**-30])
    rounded = round_to(values.double(), torch.float16)
    assert rounded[:6].tolist() == [top, math.inf, -math.inf, math.inf, math.inf, -math.inf]
    assert rounded[6].isnan()
    assert rounded[7:].tolist() == [0, 0]
    assert torch.signbit(rounded[7])
    fp32 = torch.tensor([1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-150 * 1.0001], dtype=torch.float64)
    assert round_to(fp32, torch.float32).double().tolist() == [1, 1 + 2 * 2.0**-23, 2.0**-149]


# -- inputs


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_what_they_say(kind):
    outs, lses = merge_inputs(5, 4, 10, 16, torch.bfloat16, kind=kind, seed=7)
    assert (outs.shape, outs.dtype, lses.shape, lses.dtype) == (
        (5, 4, 10, 16),
        torch.bfloat16,
        (5, 4, 10),
        torch.float32,
    )
    again = merge_inputs(5, 4, 10, 16, torch.bfloat16, kind=kind, seed=7)
    assert torch.equal(outs.view(torch.int16), again[0].view(torch.int16))
    assert not torch.equal(outs, merge_inputs(5, 4, 10, 16, torch.bfloat16, kind=kind, seed=8)[0])

    live = torch.isfinite(lses)
    assert torch.equal(live, ~outs.isnan().all(-1))
    assert not outs[live].isnan().any()
    spread = lses.amax(0) - lses.amin(0)
    if kind == "spread":
        assert live.all()
        assert 8 < spread.max() <= 12
    elif kind == "dominant":
        assert live.all()
        top = lses.argmax(0)
        assert not outs.gather(0, top[None, ..., None].expand(1, -1, -1, 16)).any()
        second = lses.topk(2, dim=0).values
        assert (second[0] - second[1]).min() > 3.99
    else:
        assert lses.isnan().any()
        assert (lses == math.inf).any()
        assert (lses == -math.inf).any()
        all_empty = (~live).all(0).view(-1)
        assert all_empty.tolist() == [kind == "all_empty" and i % 2 == 0 for i in range(40)]


def test_inputs_refuse_an_unknown_kind():
    with pytest.raises(ValueError, match="merge_inputs: kind must be one of .*got 'easy'"):
        merge_inputs(1, 1, 1, 1, torch.float32, kind="easy", seed=0)


# -- poison


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_guarded_starts_as_nan_and_is_aligned(dtype):
    guarded = Guarded((3, 4, 5), dtype, strides=(40, 8, 1), offset=0)
    assert guarded.tensor.stride() == (40, 8, 1)
    assert guarded.tensor.data_ptr() % 64 == 0
    assert guarded.tensor.isnan().all()
    gaps = guarded.tensor.as_strided((3, 40), (40, 1))  # the elements and the gaps between them
    assert gaps.isnan().all()
    guarded.check()
    guarded.tensor.copy_(torch.zeros(3, 4, 5))
    guarded.check()
    assert Guarded((2,), dtype, offset=3).tensor.data_ptr() % 64 == 3 * guarded.tensor.element_size()


@pytest.mark.parametrize(
    ("index", "byte"),
    [(-1, -2), (5, 10), (7, 14), (29, 58), (29 + 127, 58 + 254)],
    ids=["before", "gap", "end of gap", "after", "last guard element"],
)
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_guarded_catches_a_write_outside(index, byte, value):
    guarded = Guarded((4, 5), torch.bfloat16, strides=(8, 1), guard_bytes=256)
    start = guarded.tensor.storage_offset()
    guarded.tensor.as_strided((1,), (1,), start + index).fill_(value)
    with pytest.raises(AssertionError, match=f"2 bytes outside the tensor were written; the first is at byte {byte} "):
        guarded.check()


def test_guarded_catches_a_single_byte():
    guarded = Guarded((3,), torch.float32)
    raw = guarded.tensor.view(torch.uint8)
    raw.as_strided((1,), (1,), raw.storage_offset() - 1).fill_(0)
    with pytest.raises(AssertionError, match="1 bytes outside the tensor were written; the first is at byte -1 "):
        guarded.check()


def test_guarded_odd_shapes():
    empty = Guarded((0, 4), torch.float16)
    assert empty.tensor.shape == (0, 4)
    empty.check()
    lengths = Guarded((3,), torch.int32)
    lengths.tensor.copy_(torch.tensor([1, 2, 3]))
    lengths.check()
    with pytest.raises(ValueError, match="strides must be 2 numbers"):
        Guarded((2, 2), torch.float32, strides=(1,))


def test_fill_nan_goes_through_strides():
    base = torch.zeros(4, 8)
    assert fill_nan(base[:, ::2]).isnan().all()
    assert base[:, 1::2].eq(0).all()


def test_unchanged():
    base = fill_nan(torch.empty(4, 8))
    with unchanged(base[:, :4]):
        base.add(1)
    with (
        pytest.raises(AssertionError, match="tensor 0: 4 bytes changed, the first at byte 20"),
        unchanged(base[:, :4]),
    ):
        base.view(torch.int32)[0, 5] = 0x01010101  # in the gap of the view, and the whole storage is watched


# -- timing


def test_summarize():
    assert summarize([3.0, 1.0, 2.0]) == (2.0, 3.0, 3, 1.0)
    assert summarize(list(range(1, 201))) == (100.5, 198, 200, 99.5)
    assert summarize([7.0]) == (7.0, 7.0, 1, 0.0)
    with pytest.raises(ValueError, match="must not be empty"):
        summarize([])


def test_max_over_ranks():
    assert max_over_ranks([[1.0, 5.0, 2.0], [4.0, 3.0, 2.5]]) == [4.0, 5.0, 2.5]
    with pytest.raises(ValueError, match=r"as many samples \(got \[1, 2\]\)"):
        max_over_ranks([[1.0], [1.0, 2.0]])


def test_interleave_alternates_and_reverses():
    log = []
    candidates = {name: (lambda name=name: log.append(name)) for name in "ab"}
    times = interleave(candidates, rounds=3, warmup=1, num_calls=2, before=lambda name: log.append("|"))
    assert "".join(log) == "|bb|aa" + "|aa|bb" + "|bb|aa" + "|aa|bb"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 3, "b": 3}
    assert all(sample > 0 for samples in times.values() for sample in samples)


# -- the package


def test_importing_the_tools_needs_no_pytest_and_starts_nothing():
    code = (
        "import sys, threading; sys.modules['pytest'] = None; import dcpkernels.testing, os; "
        "print(threading.active_count(), os.listdir('/proc/self/task') == [str(os.getpid())])"
    )
    env = {"PYTHONPATH": ":".join(sys.path), "OPENBLAS_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["1", "True"]
