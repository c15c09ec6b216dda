"""The truth, checked: against the shared table, and against attention that was never split."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dcpkernels import layout, reference
from dcpkernels.errors import DcpInvalidArgument

CASES = json.loads((Path(__file__).parent / "data" / "lse_merge.json").read_text())["cases"]


def number(value):
    return math.nan if value is None else float(value)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_table(case):
    num_ranks = len(case["lse"])
    outs = torch.tensor([number(v) for v in case["o"]], dtype=torch.float64).view(num_ranks, 1, 1, 1)
    lses = torch.tensor([number(v) for v in case["lse"]], dtype=torch.float64).view(num_ranks, 1, 1)
    lengths = torch.tensor(case["local_len"]).view(num_ranks, 1) if "local_len" in case else None
    out, lse = reference.a2a_lse_reduce(outs, lses, lse_base=case["base"], seq_lens=lengths)
    assert out.dtype == lse.dtype == torch.float64
    assert out.shape == (1, 1, 1)
    assert lse.shape == (1, 1)
    assert out.item() == pytest.approx(case["out"], rel=1e-9, abs=0)
    if "out_lse" in case:
        assert lse.item() == pytest.approx(number(case["out_lse"]), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 1), (3, 2), (8, 1)])
def test_merging_shards_is_the_attention_over_all_tokens(num_ranks, interleave, lse_base):
    """Three sequences, one shorter than the number of ranks; several query tokens each; a row of padding."""
    gen = torch.Generator().manual_seed(1)
    num_heads, head_dim = 2, 5
    kv_lens, query_start_loc = [37, 2, 16], torch.tensor([0, 2, 3, 5])
    num_tokens = 6
    outs = torch.full((num_ranks, num_tokens, num_heads, head_dim), math.nan, dtype=torch.float64)
    lses = torch.zeros(num_ranks, num_tokens, num_heads, dtype=torch.float64)  # finite: only the lengths say "empty"
    seq_lens = torch.tensor([layout.local_lengths(n, num_ranks, interleave) for n in kv_lens]).T
    whole = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64)
    whole_lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for s, kv_len in enumerate(kv_lens):
        keys, values = torch.randn(2, kv_len, num_heads, head_dim, generator=gen, dtype=torch.float64)
        for t in range(query_start_loc[s], query_start_loc[s + 1]):
            scores = 4 * torch.einsum("hd,nhd->nh", torch.randn(num_heads, head_dim, generator=gen).double(), keys)
            whole[t] = torch.einsum("nh,nhd->hd", scores.softmax(0), values)
            whole_lse[t] = scores.logsumexp(0)
            for rank in range(num_ranks):
                mine = layout.local_positions(kv_len, num_ranks, rank, interleave)
                if mine:
                    outs[rank, t] = torch.einsum("nh,nhd->hd", scores[mine].softmax(0), values[mine])
                    lses[rank, t] = scores[mine].logsumexp(0)
    unit = 1.0 if lse_base == "e" else math.log(2)
    out, lse = reference.a2a_lse_reduce(
        outs, lses / unit, lse_base=lse_base, seq_lens=seq_lens, query_start_loc=query_start_loc
    )
    torch.testing.assert_close(out, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse * unit, whole_lse, rtol=1e-13, atol=1e-13)
    assert not out[5].any()  # padding: exactly 0


def test_only_the_gap_between_lses_counts():
    """Far from 0 the logarithms have few digits left, the differences have all."""
    lses = torch.tensor([3.0, 0.5, -1.25]).view(3, 1, 1)
    outs = torch.tensor([1.0, -2.0, 5.0]).view(3, 1, 1, 1)
    near, near_lse = reference.a2a_lse_reduce(outs, lses, lse_base="2")
    far, far_lse = reference.a2a_lse_reduce(outs, lses + 65536, lse_base="2")
    assert torch.equal(near, far)
    assert far_lse.item() - 65536 == pytest.approx(near_lse.item(), abs=1e-10)


def test_query_start_loc_alone_marks_padding():
    outs, lses = torch.ones(2, 4, 1, 3), torch.zeros(2, 4, 1)
    out, lse = reference.a2a_lse_reduce(outs, lses, lse_base="e", query_start_loc=torch.tensor([0, 1, 3]))
    assert out[:3].eq(1).all()
    assert not out[3].any()
    assert lse[3].item() == -math.inf
    assert lse[2].item() == pytest.approx(math.log(2))


def test_a_nan_of_a_live_shard_is_not_hidden():
    outs, lses = torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1)
    outs[1, 0, 0, 1] = math.nan
    out, _ = reference.a2a_lse_reduce(outs, lses, lse_base="e")
    assert out[0, 0].isnan().tolist() == [False, True]


def test_no_tokens():
    out, lse = reference.a2a_lse_reduce(torch.zeros(2, 0, 4, 8), torch.zeros(2, 0, 4), lse_base="e")
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_input_dtype_is_taken_at_its_value(dtype):
    outs, lses = (
        torch.tensor([1.0, 3.0]).to(dtype).view(2, 1, 1, 1),
        torch.tensor([0.1, 0.3]).to(dtype).view(2, 1, 1),
    )
    out, _ = reference.a2a_lse_reduce(outs, lses, lse_base="e")
    w = 1 / (1 + math.exp(lses[0].item() - lses[1].item()))
    assert out.item() == pytest.approx(1 - w + 3 * w, rel=1e-15)


OK = {"partial_outs": torch.zeros(2, 3, 4, 8), "partial_lses": torch.zeros(2, 3, 4), "lse_base": "e"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"lse_base": "10"}, 'lse_base must be "e" or "2" (got \'10\')'),
        ({"partial_outs": torch.zeros(3, 4, 8)}, "partial_outs must be [W, T, H, D] (got (3, 4, 8))"),
        (
            {"partial_lses": torch.zeros(2, 4, 3)},
            "partial_lses must be [W, T, H] = [2, 3, 4] (got (2, 4, 3))",
        ),
        (
            {"seq_lens": torch.zeros(2, 2)},
            "seq_lens without query_start_loc must be [W, T] = [2, 3] (got (2, 2))",
        ),
        (
            {"seq_lens": torch.zeros(2, 3), "query_start_loc": torch.tensor([0, 1, 3])},
            "seq_lens must be [W, S] = [2, 2] (got (2, 3))",
        ),
        ({"query_start_loc": torch.tensor([0, 2, 1])}, "query_start_loc must not decrease (got [0, 2, 1])"),
        ({"query_start_loc": torch.zeros(1, 2)}, "query_start_loc must be [S+1] (got (1, 2))"),
    ],
)
def test_bad_arguments(change, text):
    with pytest.raises(DcpInvalidArgument) as caught:
        reference.a2a_lse_reduce(**(OK | change))
    assert str(caught.value) == f"reference.a2a_lse_reduce: {text}"
