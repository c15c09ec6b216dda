"""kda_step in Triton's interpreter, against flash-linear-attention's naive functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.triton.kda_step import kda_step
from tests.kimi_k3.conftest import oracle

NUM_STATES = 12


def make(counts: list[int], *, num_heads: int = 2, dims: tuple[int, int] = (16, 16), padding: int = 0, seed: int = 0) -> dict[str, Any]:
    """A step with counts[s] tokens of request s. Request s starts from state s, the first one from nothing; the state behind
    row t goes to place 4 + t. Rows of padding hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    (key_dim, value_dim), num_rows = dims, sum(counts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def rows(*shape: int) -> torch.Tensor:
        return torch.cat([random(num_rows, *shape), torch.full((padding, *shape), torch.nan)])

    # Keys and queries of the first head are so small that the epsilon of their norm shows.
    small = torch.tensor([1e-3, *[1.0] * (num_heads - 1)])[:, None]
    return {
        "q": rows(num_heads, key_dim) * small, "k": rows(num_heads, key_dim) * small, "v": rows(num_heads, value_dim),
        "f": rows(num_heads, key_dim), "b": rows(num_heads),
        "A_log": random(num_heads) * 0.5, "dt_bias": random(num_heads, key_dim),
        "states": random(NUM_STATES, num_heads, value_dim, key_dim),
        "state_in": torch.tensor([-1, *range(1, len(counts))]),
        "state_out": torch.tensor([*range(4, 4 + num_rows), *[-1] * padding]),
        "query_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    }  # fmt: skip


def truth(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, states behind it), by other people's code."""
    recurrent = oracle("fla.ops.kda.naive").naive_recurrent_kda
    gate = oracle("fla.ops.kda.gate").naive_kda_lowerbound_gate
    out, states = torch.zeros_like(inputs["v"]), inputs["states"].clone()
    starts = inputs["query_start_loc"].tolist()

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    for s, source in enumerate(inputs["state_in"].tolist()):
        state = torch.zeros_like(states[0]) if source < 0 else inputs["states"][source]
        state = state.transpose(1, 2)[None]  # fla's are [K, V]
        for t in range(starts[s], starts[s + 1]):
            q, k, v, f, b = (inputs[name][t][None, None] for name in ("q", "k", "v", "f", "b"))
            g = gate(f, inputs["A_log"], inputs["dt_bias"].flatten(), lower_bound=-5.0)
            o, state = recurrent(unit(q), unit(k), v, g, b.sigmoid(), initial_state=state, output_final_state=True)
            out[t] = o[0, 0]
            states[inputs["state_out"][t]] = state[0].transpose(1, 2)
    return out, states


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(
    ("counts", "dims", "padding"),
    [([1, 1, 1], (16, 16), 0), ([3, 1, 4], (16, 16), 2), ([2], (128, 128), 0), ([1, 2], (24, 40), 1), ([0, 2], (16, 16), 0)],
)
def test_against_fla(counts: list[int], dims: tuple[int, int], padding: int) -> None:
    inputs = make(counts, dims=dims, padding=padding)
    expected, expected_states = truth(inputs)
    out = kda_step(**inputs)
    num_rows = sum(counts)
    assert relative(out[:num_rows], expected[:num_rows]) < 1e-5
    assert (out[num_rows:] == 0).all()
    # The states that were written, and all others as they were.
    assert relative(inputs["states"], expected_states) < 1e-5
    untouched = [i for i in range(NUM_STATES) if not 4 <= i < 4 + num_rows]
    assert torch.equal(inputs["states"][untouched], expected_states[untouched])


def test_tokens_of_a_step_are_steps_of_a_token() -> None:
    """So a draft that is rejected leaves the state before it as it is."""
    inputs = make([3])
    once = kda_step(**inputs)
    one_by_one = make([3])
    for t in range(3):
        row = {name: one_by_one[name][t : t + 1] for name in ("q", "k", "v", "f", "b", "state_out")}
        source = torch.tensor([-1 if t == 0 else int(one_by_one["state_out"][t - 1])])
        starts = torch.tensor([0, 1], dtype=torch.int32)
        out = kda_step(**{**one_by_one, **row, "state_in": source, "query_start_loc": starts})
        assert torch.equal(out[0], once[t])
    assert torch.equal(inputs["states"], one_by_one["states"])


def test_nowhere_to_go() -> None:
    inputs = make([2])
    before = inputs["states"].clone()
    inputs["state_out"][:] = -1
    kda_step(**inputs)
    assert torch.equal(inputs["states"], before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(2, 2, 15)}, "k must have shape [2, 2, 16] (got [2, 2, 15])"),
        ({"q": torch.zeros(2, 2)}, "q and v must have shapes [T, H, K] and [T, H, V]"),
        ({"f": torch.zeros(2, 16, 2).transpose(1, 2)}, "f must be contiguous in its last two dims"),
        ({"states": torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16)}, "states must be torch.float32"),
        ({"state_in": torch.zeros(1, dtype=torch.int32)}, "state_in must be torch.int64"),
        ({"state_out": torch.zeros(3, dtype=torch.int64)}, "state_out must have shape [2] (got [3])"),
        ({"out": torch.zeros(2, 2, 15)}, "out must have shape [2, 2, 16]"),
    ],
)
def test_what_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(DcpInvalidArgument) as caught:
        kda_step(**{**make([2]), **change})
    assert str(caught.value).startswith("kda_step: ") and text in str(caught.value)
