"""kda_step in Triton's interpreter, against flash-linear-attention's naive functions, one request at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from tests.kimi_k3.interpreted import need, run_cases

NUM_STATES = 16
FP32 = 1e-5  # of the largest value
# What a result in fewer bits is off by: the interpreter truncates to bfloat16.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}

CASES: dict[str, Callable[[], None]] = {}


def case(name: str, **arguments: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(body: Callable[..., None]) -> Callable[..., None]:
        CASES[name] = functools.partial(body, **arguments)
        return body

    return add


def make(
    counts: list[int],
    *,
    num_heads: int = 2,
    dims: tuple[int, int] = (16, 16),
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """counts[s] tokens of request s. Request 0 starts fresh, s from state s; behind row t the state goes to 6 + t. All
    other states, and padding rows, are NaN; q and k are not of unit length."""
    generator = torch.Generator().manual_seed(seed)
    (key_dim, value_dim), num_rows = dims, sum(counts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def rows(*shape: int, factor: float = 1) -> torch.Tensor:
        full = torch.full((num_rows + padding, *shape), math.nan)
        full[:num_rows] = random(num_rows, *shape) * factor
        return full.to(dtype)

    states = torch.full((NUM_STATES, num_heads, value_dim, key_dim), math.nan)
    states[1 : len(counts)] = random(max(len(counts) - 1, 0), num_heads, value_dim, key_dim)
    return {
        "q": rows(num_heads, key_dim, factor=3), "k": rows(num_heads, key_dim, factor=0.2),
        "v": rows(num_heads, value_dim), "f": rows(num_heads, key_dim), "b": rows(num_heads),
        "A_log": random(num_heads), "dt_bias": random(num_heads, key_dim), "states": states,
        "state_in": torch.tensor([-1, *range(1, len(counts))][: len(counts)], dtype=torch.int64),
        "state_out": torch.tensor([*range(6, 6 + num_rows), *[3] * padding], dtype=torch.int64),
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    }  # fmt: skip


def truth(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, states), by other people's code in fp32. Rows whose place is negative are left out of it."""
    from fla.ops.kda.gate import naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    out, states = torch.zeros(inputs["v"].shape), inputs["states"].clone()
    starts = inputs["query_start_loc"].tolist()
    for s, source in enumerate(inputs["state_in"].tolist()):
        # fla's states are [K, V].
        state = None if source < 0 else inputs["states"][source].transpose(1, 2)[None].contiguous()
        for t in range(starts[s], starts[s + 1]):
            target = int(inputs["state_out"][t])
            if target < 0:
                continue
            q, k, v, f, b = (inputs[name][t].float()[None, None] for name in ("q", "k", "v", "f", "b"))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            g = naive_kda_lowerbound_gate(f, inputs["A_log"], inputs["dt_bias"].flatten(), lower_bound=-5.0)
            o, state = naive_recurrent_kda(q, k, v, g, b.sigmoid(), initial_state=state, output_final_state=True)
            out[t] = o[0, 0]
            states[target] = state[0].transpose(1, 2)
    return out, states


def close(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert torch.equal(a.isnan(), b.isnan()), "what is NaN"
    scale = b.nan_to_num().abs().max() if b.numel() else 0
    error = (a.float() - b.float()).nan_to_num().abs().max() if b.numel() else torch.zeros(())
    assert error <= bound * scale, f"error {error}, largest value {scale}"


def check(inputs: dict[str, Any], **options: object) -> None:
    from dcpkernels.kimi_k3.triton.kda_step import kda_step

    before, (expected, expected_states) = inputs["states"].clone(), truth(inputs)
    out = kda_step(**inputs, **options)
    assert out.dtype == (options["out"].dtype if "out" in options else inputs["v"].dtype)
    close(out, expected, FP32 + ROUNDING[out.dtype])
    none = (expected == 0).all(2)
    assert (out[none] == 0).all(), "rows of padding are 0"
    close(inputs["states"], expected_states, FP32)
    written = {int(place) for place in inputs["state_out"][: int(inputs["query_start_loc"][-1])] if place >= 0}
    kept = [i for i in range(len(before)) if i not in written]
    assert torch.equal(inputs["states"][kept].nan_to_num(7), before[kept].nan_to_num(7)), "states of others"


@case("one token each", counts=[1, 1, 1])
@case("several tokens", counts=[3, 1, 4])
@case("padding rows", counts=[2, 1], padding=2)
@case("only padding", counts=[], padding=2)
@case("a request without rows", counts=[1, 0, 2])
@case("dims that fill no tile", counts=[1, 2], dims=(24, 40), padding=1)
@case("Kimi-K3", counts=[1, 2], dims=(128, 128))
@case("12 heads", counts=[1, 1], num_heads=12)
@case("bf16", counts=[2, 1], dims=(128, 128), dtype=torch.bfloat16)
@case("fp16", counts=[2, 1], dtype=torch.float16)
def against_fla(**arguments: Any) -> None:
    check(make(**arguments))


@case("queries and keys next to nothing")
def small() -> None:
    """Where the epsilon, added to the sum of squares and not to their mean, decides; and none at all."""
    inputs = make([2, 2])
    for name in ("q", "k"):
        inputs[name] *= 1e-3
        inputs[name][3] = 0
    check(inputs)


@case("in place")
def in_place() -> None:
    """Each request's state is read and written where it is."""
    inputs = make([1, 2, 3])
    inputs["states"][0] = 0.5
    inputs["state_in"] = torch.tensor([0, 1, 2])
    inputs["state_out"] = torch.tensor([0, 1, 1, 2, 2, 2])
    check(inputs)


@case("rows that are skipped")
def skipped() -> None:
    inputs = make([1, 3, 1])
    inputs["state_out"][[0, 2]] = -1
    inputs["v"][2] = math.nan  # not looked at
    check(inputs)


@case("a rejected draft")
def rejected_draft() -> None:
    """The state behind token j is, to the bit, that of a step with j + 1 tokens; a next step can start from it."""
    from dcpkernels.kimi_k3.triton.kda_step import kda_step

    all_tokens = make([1, 4])
    out = kda_step(**all_tokens)
    for j in range(4):
        fewer = make([1, 4])
        for name in ("q", "k", "v", "f", "b", "state_out"):
            fewer[name] = fewer[name][: 2 + j]
        fewer["query_start_loc"] = torch.tensor([0, 1, 2 + j], dtype=torch.int32)
        assert torch.equal(kda_step(**fewer), out[: 2 + j])
        assert torch.equal(fewer["states"][7 + j], all_tokens["states"][7 + j])

    # Tokens 2 and 3 rejected: a step from behind token 1, with the inputs of token 2, is token 2.
    again = make([1, 4])
    for name in ("q", "k", "v", "f", "b"):
        again[name] = again[name][3:4]
    again |= {"states": all_tokens["states"].clone(), "state_in": torch.tensor([8]), "state_out": torch.tensor([15]),
              "query_start_loc": torch.tensor([0, 1], dtype=torch.int32)}  # fmt: skip
    assert torch.equal(kda_step(**again)[0], out[3])
    assert torch.equal(again["states"][15], all_tokens["states"][9])


@case("strides")
def strides() -> None:
    """q, k and v side by side, as the convolution leaves them; a pool whose states are apart."""
    inputs = make([2, 1])
    qkv = torch.stack([inputs["q"], inputs["k"], inputs["v"]], 1)
    b = torch.full((2, 3), math.nan)
    b[:] = inputs["b"].T
    pool = torch.full((NUM_STATES, 700), math.nan)
    states = pool[:, : 2 * 16 * 16].unflatten(1, (2, 16, 16))
    states[:] = inputs["states"]
    check({**inputs, "q": qkv[:, 0], "k": qkv[:, 1], "v": qkv[:, 2], "b": b.T, "states": states})
    assert pool[:, 512:].isnan().all()


@case("an output that is given")
def given_output() -> None:
    outs = torch.full((3, 4, 17), math.nan)
    check(make([1, 2], dtype=torch.bfloat16), out=outs[:, 1:3, :16])
    assert outs[:, 0].isnan().all() and outs[:, 3].isnan().all() and outs[..., 16].isnan().all()


@case("other constants")
def other_constants() -> None:
    """The bound of the gate and the epsilon are taken from the arguments."""
    from dcpkernels.kimi_k3.triton.kda_step import kda_step

    plain = kda_step(**make([0, 2]))
    assert not torch.allclose(kda_step(**make([0, 2]), lower_bound=-1.0), plain)
    assert not torch.allclose(kda_step(**make([0, 2]), l2_eps=1.0), plain)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"q": torch.zeros(2, 2)}, "q must have 3 dims (got [2, 2])"),
    ({"k": torch.zeros(2, 2, 15)}, "k must have shape [2, 2, 16] (got [2, 2, 15])"),
    ({"f": torch.zeros(2, 16, 2).mT}, "f must have stride 1 in its last dim (got 2)"),
    ({"A_log": torch.zeros(2, dtype=torch.bfloat16)}, "A_log must be float32 (got bfloat16)"),
    ({"dt_bias": torch.zeros(16, 2).T}, "dt_bias must be contiguous (got strides (1, 2))"),
    ({"states": torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16)}, "states must be float32 (got bfloat16)"),
    ({"states": torch.zeros(4, 2, 16, 16).mT}, "states[i] must be contiguous (got strides (256, 1, 16))"),
    ({"states": torch.zeros(1, 2, 16, 16).expand(4, 2, 16, 16)},
     "states must not overlap itself (got strides (0, 256, 16, 1))"),
    ({"state_in": torch.zeros(1, dtype=torch.int32)}, "state_in must be int64 (got int32)"),
    ({"state_out": torch.zeros(3, dtype=torch.int64)}, "state_out must have shape [2] (got [3])"),
    ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc must have shape [2] (got [3])"),
    ({"out": torch.zeros(2, 2, 16, dtype=torch.float16)}, "out must be float32 (got float16)"),
]  # fmt: skip


@case("what is refused")
def refused() -> None:
    from dcpkernels.kimi_k3.triton.kda_step import kda_step

    for change, text in REFUSED:
        inputs = {**make([2]), "out": torch.full((2, 2, 16), 7.0), **change}
        before = inputs["states"].clone()
        with pytest.raises(DcpInvalidArgument) as caught:
            kda_step(**inputs)
        assert str(caught.value) == f"kda_step: {text}", caught.value
        assert torch.equal(inputs["states"].nan_to_num(7), before.nan_to_num(7)), "something was written"
        assert "out" in change or (inputs["out"] == 7).all(), "something was written"


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    need("triton", "fla")
    return run_cases("tests.kimi_k3.test_triton_kda_step")


@pytest.mark.parametrize("name", CASES)
def test_kda_step(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
