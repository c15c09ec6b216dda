"""Tensors as engines have them: head-major, padded, sliced, transposed, expanded; outputs likewise; more rows than the
workspace holds. Every gap is NaN and watched."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.testing import Guarded, run_ranks
from tests.a2a_calls import Call, assemble, config_for, make_call, run_calls, same_bits

# Strides in elements of [T, H, D], as functions of these three; the last one is 1.
PAYLOAD_STRIDES = {
    "token-major": lambda t, h, d: (h * d, d, 1),
    "head-major": lambda t, h, d: (d, t * d, 1),
    "head-major in a larger capacity": lambda t, h, d: (d, (t + 9) * d, 1),
    "padded heads": lambda t, h, d: (h * (d + 40), d + 40, 1),
    "padded heads, odd": lambda t, h, d: (h * (d + 3) + 5, d + 3, 1),
    "more heads in storage": lambda t, h, d: ((h + 7) * d, d, 1),
    "part of a latent": lambda t, h, d: (h * (d + 64), d + 64, 1),
    "tokens far apart": lambda t, h, d: (8192, d, 1),
}
LSE_STRIDES = {
    "token-major": lambda t, h: (h, 1),
    "head-major": lambda t, h: (1, t),
    "head-major in a larger capacity": lambda t, h: (1, t + 9),
    "padded": lambda t, h: (h + 5, 1),
    "every third": lambda t, h: (3 * h, 3),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def place(values: torch.Tensor, strides, offset: int) -> Guarded:
    """A copy of the values at these strides, `offset` elements from an aligned address."""
    memory = Guarded(values.shape, values.dtype, strides=strides(*values.shape), offset=offset)
    memory.tensor.copy_(values)
    return memory


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_strides(dtype, head_dim, offset):
    """Same bits as from contiguous tensors; ranks differ in their layouts within one call."""
    call = make_call(3, 5, 12, head_dim, dtype, kind="empty", lse_base="2")
    lse_layouts = [*LSE_STRIDES.values()]

    def body(group):
        with Workspace(group, config=config_for(call)) as workspace:
            results = []
            for i in range(len(PAYLOAD_STRIDES)):
                turn = i + workspace.rank
                payload_strides = [*PAYLOAD_STRIDES.values()][turn % len(PAYLOAD_STRIDES)]
                arguments = call.arguments(workspace.rank)
                payload = place(arguments["partial_out"], payload_strides, offset)
                lse = place(arguments["partial_lse"], lse_layouts[turn % len(lse_layouts)], offset)
                arguments |= {"partial_out": payload.tensor, "partial_lse": lse.tensor}
                results.append(a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments))
                payload.check(), lse.check()
            return results

    ((expected, expected_lse),) = run_calls([call])
    call.check(expected, expected_lse)
    for out, lse in assemble(run_ranks(body, 3)):
        assert same_bits(out, expected) and same_bits(lse, expected_lse)


@pytest.mark.parametrize("lse_dtype", DTYPES)
def test_lses_of_any_strides_and_dtype(lse_dtype):
    call = make_call(2, 5, 6, 64, torch.bfloat16)
    call.lses = call.lses.to(lse_dtype)
    variants = [[place(lse, strides, 1).tensor for lse in call.lses] for strides in LSE_STRIDES.values()]
    calls = [Call(call.outs, lses) for lses in variants]  # a list of per-rank tensors keeps their strides
    (expected, expected_lse), *others = run_calls([call, *calls])
    call.check(expected, expected_lse)
    assert all(same_bits(out, expected) and same_bits(lse, expected_lse) for out, lse in others)


def test_expanded_inputs():
    """Stride 0: one row for all tokens, one LSE for all heads."""
    row, lses = make_call(2, 1, 4, 64, torch.float32).outs, torch.tensor([[[0.5]], [[-1.0]]])
    expanded = Call(row.expand(2, 6, 4, 64), lses.expand(2, 6, 4))
    ((out, lse),) = run_calls([expanded])
    Call(expanded.outs.contiguous(), expanded.lses.contiguous()).check(out, lse)


@pytest.mark.parametrize("max_num_tokens", [16, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_of_any_strides(dtype, max_num_tokens):
    """out= and lse_out= are written in place, through their strides and nowhere else, also in several rounds."""
    call = make_call(3, 5, 12, 72, dtype, kind="all_empty")

    def body(group):
        config = config_for(call, max_num_tokens=max_num_tokens)
        with Workspace(group, config=config) as workspace:
            results = []
            for i, strides in enumerate(PAYLOAD_STRIDES.values()):
                out = Guarded((5, 4, 72), dtype, strides=strides(5, 4, 72), offset=i % 4)
                lse_strides = [*LSE_STRIDES.values()][i % len(LSE_STRIDES)](5, 4)
                lse_out = Guarded((5, 4), torch.float32, strides=lse_strides, offset=i % 4)
                arguments = call.arguments(workspace.rank) | {"out": out.tensor, "lse_out": lse_out.tensor}
                returned = a2a_lse_reduce(workspace=workspace, **arguments)
                assert returned[0] is out.tensor and returned[1] is lse_out.tensor
                out.check(), lse_out.check()
                results.append(returned)
            return results

    ((expected, expected_lse),) = run_calls([call])
    call.check(expected, expected_lse)
    for out, lse in assemble(run_ranks(body, 3)):
        assert same_bits(out, expected) and same_bits(lse, expected_lse)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_what_is_returned(with_out, return_lse):
    """out or (out, lse), in every combination, also without tokens; lse_out alone implies the LSE."""
    calls = [make_call(2, num_tokens, 4, 64, torch.float16) for num_tokens in (3, 0)]

    def body(group):
        with Workspace(group, config=config_for(calls[0])) as workspace:
            for call in calls:
                num_tokens = call.outs.shape[1]
                arguments = call.arguments(workspace.rank) | {"workspace": workspace}
                out = torch.empty(num_tokens, 2, 64, dtype=torch.float16) if with_out else None
                lse_out = torch.empty(num_tokens, 2)
                result = a2a_lse_reduce(out=out, return_lse=return_lse, **arguments)
                assert isinstance(result, tuple) == return_lse
                result, lse = result if return_lse else (result, lse_out)
                assert result is out or not with_out
                assert result.shape == (num_tokens, 2, 64) and result.dtype == torch.float16 and result.is_contiguous()
                assert lse.shape == (num_tokens, 2) and lse.dtype == torch.float32
                assert a2a_lse_reduce(out=out, lse_out=lse_out, **arguments)[1] is lse_out

    run_ranks(body, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [1, 4, 8])
def test_more_tokens_than_the_workspace_holds(capacity, dtype):
    """T around one and several capacities, in turn with small calls: same bits as in a workspace that holds them all.
    Strided tensors, so that a round starts in the middle of them."""
    calls = [
        make_call(3, n, 6, 64, dtype, kind="empty", seed=n) for n in (capacity, capacity + 1, 0, 3 * capacity + 2, 1)
    ]

    def body(group):
        with Workspace(group, config=config_for(calls[0], max_num_tokens=capacity)) as workspace:
            results = []
            for call in calls:
                payload = place(call.outs[workspace.rank], PAYLOAD_STRIDES["head-major in a larger capacity"], 0)
                lse = place(call.lses[workspace.rank], LSE_STRIDES["head-major"], 0)
                out = Guarded((call.outs.shape[1], 2, 64), dtype)
                arguments = call.arguments(workspace.rank) | {"partial_out": payload.tensor, "partial_lse": lse.tensor}
                results.append(a2a_lse_reduce(workspace=workspace, return_lse=True, out=out.tensor, **arguments))
                out.check()
            assert workspace.stats()["num_calls"] == len(calls)  # a call of several rounds is one call
            return results

    for call, (out, lse), expected in zip(calls, assemble(run_ranks(body, 3)), run_calls(calls), strict=True):
        call.check(out, lse)
        assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


def test_many_rounds():
    """8,192 tokens, 128 at a time, as a prefill that meets a workspace sized for decoding."""
    call = make_call(2, 8192, 2, 64, torch.bfloat16)
    ((out, lse),) = run_calls([call], max_num_tokens=128)
    call.check(out, lse)


def test_strides_beyond_32_bits():
    """Two tokens 2**31 + 16 elements apart, in the payload and in the output. Untouched pages of such memory cost
    nothing."""
    stride = 2**31 + 16
    call = make_call(2, 2, 2, 64, torch.bfloat16)

    def far_apart(*shape):
        span = ((shape[0] - 1) * stride + math.prod(shape[1:])) * 2
        no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.10 does not name
        memory = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        return torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(shape, (stride, shape[2], 1))

    def body(group):
        with Workspace(group, config=config_for(call)) as workspace:
            arguments = call.arguments(workspace.rank)
            arguments["partial_out"] = far_apart(2, 2, 64).copy_(arguments["partial_out"])
            out, lse = a2a_lse_reduce(workspace=workspace, return_lse=True, out=far_apart(2, 1, 64), **arguments)
            return [(out.contiguous(), lse)]

    ((out, lse),) = assemble(run_ranks(body, 2))
    call.check(out, lse)


def test_extreme_values():
    """Largest and subnormal payloads, LSEs at the ends of fp32, a shard that weighs e^-87 and still decides."""
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        for payload, lses in [
            ([info.max, info.max, info.max], [0.0, 0.0, 1.0]),
            ([info.max, -info.max, info.max], [0.0, 0.0, 0.0]),
            ([info.tiny / 4, info.tiny / 8, -info.tiny], [0.0, 1.0, 0.5]),
            ([1.0, 2.0, 3.0], [3e38, -3e38, 2.9e38]),
            ([1.0, 2.0, 3.0], [-3.3e38, -3.4e38, math.nan]),
            ([0.0, 1.0, 0.0], [87.0, 0.0, -87.0]),
        ]:
            outs = torch.tensor(payload).view(3, 1, 1, 1).expand(3, 1, 3, 64).to(dtype).contiguous()
            call = Call(outs, torch.tensor(lses).view(3, 1, 1).expand(3, 1, 3).contiguous())
            ((out, lse),) = run_calls([call])
            call.check(out, lse)
