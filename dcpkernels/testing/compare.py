"""How close a merge has to be: an error bound per element, and an assert that says where it is missed.

The bound is what fp32 arithmetic in rank order can be held to. With w_i the normalised weights, g_i the
distance of LSE i below the largest one in natural-log units, and the sum over the shards that are not empty:

    |out - exact| <= 2^-24 * sum_i (2W + 4 + 3 g_i) * w_i * |o_i|  +  0.5 ulp(out)

2W: the running sums of weights and of products; 4: exp, the scaling and the division; 3 g_i: an exponent that
is relatively wrong by 2^-24 makes a weight wrong by g_i as much. The last term is the rounding to the
output's dtype.
"""

from __future__ import annotations

import math

import torch

from dcpkernels import reference

_UNIT = 2.0**-24  # half the distance from 1.0 to the next fp32


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64: the distance between neighbours of `dtype` at |values|, subnormals included."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.double().abs())  # |v| = m * 2^exponent, m in [0.5, 1)
    lowest = round(math.log2(info.smallest_normal))
    exponent = torch.where(values == 0, lowest, exponent - 1).clamp(min=lowest)
    power_of_two = (exponent.long() + 1023 << 52).view(torch.float64)  # exact; torch.ldexp goes through fp32
    return power_of_two * info.eps


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 `values` rounded once, to nearest even, to `dtype`.

    `values.to(torch.bfloat16)` goes through fp32: a value just beside a midpoint then rounds the wrong way.
    """
    values = values.double()
    unit = ulp(values, dtype)
    # The division is exact, because the unit is a power of two; torch.round goes half to even.
    rounded = torch.round(values / unit) * unit
    rounded = torch.where(torch.isfinite(values), rounded, values)
    overflow = rounded.abs() > torch.finfo(dtype).max
    infinity = torch.copysign(torch.full_like(rounded, math.inf), rounded)
    return torch.where(overflow, infinity, rounded).to(dtype)


def error_bound(
    partial_outs: torch.Tensor,
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    out_dtype: torch.dtype,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp64 [T, H, D]: the largest error that each element of a merged output in `out_dtype` may have.

    Arguments as for `reference.a2a_lse_reduce`. The output's ulp is taken at the largest magnitude that the
    unrounded result may have, because it may lie on the far side of a power of two.
    """
    lengths = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    exact, _ = reference.a2a_lse_reduce(partial_outs, partial_lses, lse_base=lse_base, **lengths)
    arithmetic = arithmetic_bound(partial_outs, partial_lses, lse_base=lse_base, **lengths)
    return arithmetic + 0.5 * ulp(exact.abs() + arithmetic, out_dtype)


def arithmetic_bound(
    partial_outs: torch.Tensor,
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp64 [T, H, D]: `error_bound` without the rounding of the output."""
    w = reference.merge_weights(partial_lses, lse_base=lse_base, seq_lens=seq_lens, query_start_loc=query_start_loc)
    size = torch.where(w.live[..., None], partial_outs.double().abs(), 0.0)
    return (_relative_error(w)[..., None] * size).sum(0)


def lse_error_bound(
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp64 [T, H]: the largest error of a merged fp32 LSE, in units of its base.

    The relative error of the sum of weights is an absolute error of its logarithm; one ulp more for the
    logarithm and the last addition.
    """
    w = reference.merge_weights(partial_lses, lse_base=lse_base, seq_lens=seq_lens, query_start_loc=query_start_loc)
    ln_base = 1.0 if lse_base == "e" else math.log(2.0)
    bound = _relative_error(w).sum(0) / ln_base
    return torch.where(w.live.any(0), bound + ulp(w.lse, torch.float32), 0.0)


def _relative_error(w: reference.MergeWeights) -> torch.Tensor:
    return _UNIT * (2 * w.live.shape[0] + 4 + 3 * w.gap) * w.weight


def max_err_over_bound(out: torch.Tensor, ref: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest |out - ref| / bound: at most 1 passes. No error is 0, also over bound 0; any NaN is inf."""
    return float(_err_over_bound(out, ref, bound).max()) if out.numel() else 0.0


def _err_over_bound(out: torch.Tensor, ref: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    if not out.shape == ref.shape == bound.shape:
        raise ValueError(f"shapes must be equal (got {tuple(out.shape)}, {tuple(ref.shape)}, {tuple(bound.shape)})")
    err = (out.double() - ref.double()).abs()
    ratio = torch.where(err == 0, 0.0, err / bound)
    return torch.where(torch.isnan(ratio), math.inf, ratio)


def assert_merge_close(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial_outs: torch.Tensor,
    partial_lses: torch.Tensor,
    *,
    lse_base: str,
    rank: int | None = None,
    seq_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Asserts that a merged output, and its LSE unless None, are what the partial results of all ranks give.

    `out` is [T, H/W, D] of the given rank, or [T, H, D] with rank None; `lse` fp32 without the last
    dimension; the other arguments are those of `reference.a2a_lse_reduce`. Checked are: every element within
    `error_bound`; rows that are empty on all ranks exactly 0 with LSE -inf; and for a 16-bit output, that at
    least 99.9 % of the elements (all but one of a small output) equal the exact result rounded to that dtype.
    The others are its neighbours, because the bound allows them no more, except where terms cancel so far
    that an ulp of the sum is below the error of fp32.
    """
    lengths = {"lse_base": lse_base, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    ref, ref_lse = reference.a2a_lse_reduce(partial_outs, partial_lses, **lengths)
    arithmetic = arithmetic_bound(partial_outs, partial_lses, **lengths)
    lse_bound = lse_error_bound(partial_lses, **lengths)
    num_ranks, _, num_heads, _ = partial_outs.shape
    if rank is not None:
        heads = slice(rank * num_heads // num_ranks, (rank + 1) * num_heads // num_ranks)
        ref, ref_lse, arithmetic, lse_bound = (x[:, heads] for x in (ref, ref_lse, arithmetic, lse_bound))

    _assert_within("out", out, ref, arithmetic + 0.5 * ulp(ref.abs() + arithmetic, out.dtype))
    empty = ref_lse == -math.inf
    assert not out[empty].any(), "out: rows that are empty on all ranks must be exactly 0"
    if out.element_size() == 2:
        _assert_rounded(out, ref)
    if lse is not None:
        assert lse.dtype == torch.float32, f"lse: must be float32 (got {lse.dtype})"
        assert bool((lse[empty] == -math.inf).all()), "lse: rows that are empty on all ranks must be -inf"
        _assert_within("lse", lse[~empty], ref_lse[~empty], lse_bound[~empty])


def _assert_within(name: str, got: torch.Tensor, ref: torch.Tensor, bound: torch.Tensor) -> None:
    ratio = _err_over_bound(got, ref, bound)
    if not (ratio > 1).any():
        return
    worst = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    raise AssertionError(
        f"{name}: {int((ratio > 1).sum())} of {ratio.numel()} elements exceed the error bound; "
        f"the worst is at {worst}: got {float(got[worst])!r}, exact {float(ref[worst])!r}, "
        f"{float(ratio[worst]):.3g} times the bound {float(bound[worst]):.3g}"
    )


def _assert_rounded(out: torch.Tensor, ref: torch.Tensor) -> None:
    differ = int((out != round_to(ref, out.dtype)).sum())
    allowed = max(1, out.numel() // 1000)
    assert differ <= allowed, f"out: {differ} of {out.numel()} elements are not the rounded exact result, {allowed} may"
