"""a2a_lse_reduce gives the right numbers: published vectors, what users of other libraries reported, and the error
bound over dtypes, numbers of ranks, head sizes and hard inputs. The truth is dcpkernels.reference, in fp64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import Guarded, run_ranks
from dcpkernels.testing.inputs import KINDS
from tests.a2a_calls import Call, assemble, make_call, run_calls, same_bits

VECTORS = json.loads((Path(__file__).parent / "data" / "lse_merge.json").read_text())["cases"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_RANKS = [1, 2, 3, 4, 6, 8, 12, 16]
HEAD_DIMS = [64, 72, 128, 512, 576]
LOCAL_HEADS = [1, 3, 11, 12]
EMPTY_LSES = [-math.inf, math.inf, math.nan]


def name_of(value) -> str:
    return str(value).removeprefix("torch.")


# -- the published vectors


def number(value) -> float:
    return math.nan if value is None else float(value)


def vector_call(case: dict, *, dtype=torch.float32, lse_dtype=torch.float32) -> Call:
    """One value per shard, spread over 2 tokens, one head a rank, 64 elements."""
    num_ranks = len(case["lse"])
    lses = torch.tensor([number(v) for v in case["lse"]]).view(-1, 1, 1).expand(num_ranks, 2, num_ranks)
    outs = torch.tensor([number(v) for v in case["o"]]).view(-1, 1, 1, 1).expand(num_ranks, 2, num_ranks, 64)
    call = Call(outs.to(dtype).contiguous(), lses.to(lse_dtype).contiguous(), case["base"])
    if "local_len" in case:
        call.seq_lens = torch.tensor(case["local_len"], dtype=torch.int32).view(-1, 1)
        call.query_start_loc = torch.tensor([0, 2], dtype=torch.int32)
    return call


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_vectors(case, dtype):
    """Each vector of tests/data/lse_merge.json, against its own expected numbers and not against our reference."""
    ((out, lse),) = run_calls([vector_call(case, dtype=dtype)])
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    expected = number(case["out"])
    assert out.double().sub(expected).abs().max() <= tolerance * abs(expected), (out[0, 0, 0], expected)
    if "out_lse" in case:
        expected = number(case["out_lse"])
        assert lse.dtype == torch.float32
        # No tolerance where no logarithm of a sum has to be rounded: -inf, and one live shard.
        torch.testing.assert_close(lse.double(), torch.full_like(lse, expected).double(), rtol=2e-7, atol=0)


# -- what users of other libraries reported: ../shared/reading/user-reports.md, section A1, by its numbers

REPORTS = {
    1: "test_vectors",  # a kernel leaves LSE at 0 on an empty shard: "empty by length although lse is 0"
    2: "test_an_empty_shard_leaves_no_trace",
    3: "test_rows_empty_on_all_ranks_are_zero",
    4: "tests/test_a2a_bits.py::test_cpu_variants_give_the_same_bits",
    5: "test_an_empty_row_does_not_touch_its_neighbours",
    6: "test_vectors",  # "+inf lse is empty", "NaN lse is empty"
    8: "test_the_payload_of_an_empty_shard_does_not_matter",
    10: "test_vectors",  # "two shards, base e", "same numbers, base 2"
    11: "test_vectors",  # "wrong base must show"
    12: "tests/test_a2a_arguments.py::test_lse_base_is_required",
    14: "test_error_is_within_the_bound",  # both bases in every dtype
    15: "tests/test_a2a_lengths.py::test_a_lse_that_is_not_finite_is_counted",
    16: "test_lse_dtypes",
    17: "tests/test_a2a_arguments.py::test_wrong_arguments",  # seq_lens of shape [requests, ranks]
    19: "test_sharded_attention_is_whole_attention",
    21: "tests/test_a2a_bits.py::test_repeats_give_the_same_bits",
    22: "tests/test_a2a_bits.py::test_repeats_give_the_same_bits",
    23: "tests/test_a2a_bits.py::test_a_row_does_not_depend_on_its_batch",
    24: "tests/test_workspace.py::test_heads_follow_the_order_of_the_group",
}  # 9: no fallback yet; 18: local lengths, tests/test_layout.py


@pytest.mark.parametrize("report", REPORTS)
def test_report_has_its_test(report):
    """The table above names tests that exist."""
    file, _, test = REPORTS[report].rpartition("::")
    text = (Path(__file__).parents[1] / file if file else Path(__file__)).read_text()
    assert f"def {test}(" in text


@pytest.mark.parametrize("marker", EMPTY_LSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_an_empty_shard_leaves_no_trace(dtype, marker):
    """Ranks whose shard is empty are as if they were not there, bit for bit: W ranks against the others alone."""
    whole = make_call(4, 5, 12, 72, dtype, seed=2)
    for empty in ([0], [3], [1, 2], [0, 1, 3]):
        call = Call(whole.outs.clone(), whole.lses.clone())
        call.outs[empty], call.lses[empty] = math.nan, marker
        live = [rank for rank in range(4) if rank not in empty]
        ((out, lse),) = run_calls([call])
        ((expected, expected_lse),) = run_calls([Call(whole.outs[live], whole.lses[live])])
        assert same_bits(out, expected) and same_bits(lse, expected_lse), empty


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_empty_on_all_ranks_are_zero(num_ranks, dtype):
    """Output +0 and LSE -inf to the bit for every marker, also with one rank."""
    for marker in EMPTY_LSES:
        call = make_call(num_ranks, 3, num_ranks * 3, 64, dtype)
        call.outs.fill_(math.nan), call.lses.fill_(marker)
        ((out, lse),) = run_calls([call])
        assert same_bits(out, torch.zeros_like(out)) and same_bits(lse, torch.full_like(lse, -math.inf))


def test_an_empty_row_does_not_touch_its_neighbours():
    """Live rows of a batch keep their bits when the rows between them become empty on all ranks."""
    call = make_call(3, 8, 6, 72, torch.bfloat16, lse_base="2")
    mixed = Call(call.outs.clone(), call.lses.clone(), "2")
    mixed.outs[:, ::2], mixed.lses[:, ::2] = math.nan, -math.inf
    (out, lse), (mixed_out, mixed_lse) = run_calls([call, mixed])
    assert same_bits(out[:, :][1::2], mixed_out[1::2]) and same_bits(lse[1::2], mixed_lse[1::2])
    assert not mixed_out[::2].any() and (mixed_lse[::2] == -math.inf).all()


@pytest.mark.parametrize("marker", EMPTY_LSES)
def test_the_payload_of_an_empty_shard_does_not_matter(marker):
    """NaN, infinities, leftovers: the result is the same to the bit, and it is the truth."""
    results = []
    for payload in (math.nan, math.inf, -math.inf, 3e38, 0.0):
        call = make_call(4, 3, 8, 64, torch.float32, seed=5)
        call.lses[1], call.outs[1] = marker, payload
        ((out, lse),) = run_calls([call])
        call.check(out, lse)
        results.append((out, lse))
    assert all(same_bits(out, results[0][0]) and same_bits(lse, results[0][1]) for out, lse in results)


def test_a_nan_in_a_live_shard_is_not_hidden():
    """It reaches its own element of the output and no other."""
    call = make_call(2, 2, 2, 64, torch.float32)
    call.outs[1, 1, 0, 5] = math.nan
    ((out, lse),) = run_calls([call])
    assert out.isnan().nonzero().tolist() == [[1, 0, 5]] and lse.isfinite().all()


@pytest.mark.parametrize("lse_dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_lse_dtypes(lse_dtype, lse_base):
    """The values of a 16-bit LSE count, not its bits; the returned LSE is fp32 always."""
    calls = [make_call(3, 4, 9, 64, dtype, kind="empty", lse_base=lse_base) for dtype in DTYPES]
    for call in calls:
        call.lses = call.lses.to(lse_dtype)
        ((out, lse),) = run_calls([call])
        call.check(out, lse)
        assert lse.dtype == torch.float32 and out.dtype == call.outs.dtype


def test_sharded_attention_is_whole_attention():
    """End to end: attention over 1,000 tokens at once, and over 4 interleaved shards that the op merges, one of which
    is empty for the short sequence."""
    gen = torch.Generator().manual_seed(0)
    num_heads, dim, lengths, num_ranks = 8, 64, [1000, 3, 517], 4
    q = torch.randn(len(lengths), num_heads, dim, generator=gen, dtype=torch.float64)
    kv = torch.randn(max(lengths), dim, generator=gen, dtype=torch.float64)  # one latent for all heads, as in MLA

    def attend(query, keys):
        scores = query @ keys.T / math.sqrt(dim)
        return scores.softmax(-1) @ keys, scores.logsumexp(-1)

    shards = [[attend(q[t], kv[rank:n:num_ranks]) for t, n in enumerate(lengths)] for rank in range(num_ranks)]
    outs = torch.stack([torch.stack([out for out, _ in rows]) for rows in shards]).float()
    lses = torch.stack([torch.stack([lse for _, lse in rows]) for rows in shards]).float()
    assert lses[3, 1].eq(-math.inf).all()
    ((out, lse),) = run_calls([Call(outs, lses)])
    whole = [attend(q[t], kv[:n]) for t, n in enumerate(lengths)]
    torch.testing.assert_close(out.double(), torch.stack([o for o, _ in whole]), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), torch.stack([x for _, x in whole]), rtol=1e-6, atol=0)


# -- the error bound

MAX_ELEMENTS = 3_000_000  # of a call, all ranks together: what the truth in fp64 takes is what this test costs


def bound_calls(num_ranks, head_dim, dtype, turn) -> list[Call]:
    """Up to 5 calls: every T that is not too large here, with kind and base in turn."""
    num_heads = num_ranks * LOCAL_HEADS[turn % len(LOCAL_HEADS)]
    per_token = num_ranks * num_heads * head_dim
    calls = []
    for i, num_tokens in enumerate([2, 17, 0, 7, 1]):
        if num_tokens > 1 and num_tokens * per_token > MAX_ELEMENTS:
            continue
        kind, lse_base = KINDS[(i + turn) % len(KINDS)], "e2"[(i + turn // 4) % 2]
        calls.append(make_call(num_ranks, num_tokens, num_heads, head_dim, dtype, kind=kind, lse_base=lse_base, seed=i))
    return calls


def guarded_call(call: Call, workspace: Workspace, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The call with every tensor in memory that tells: NaN in the gaps of the input, guard bands around the output.
    It is made twice, into the same buffers, and has to give the same bits."""
    rank, (_, num_tokens, num_heads, head_dim) = workspace.rank, call.outs.shape
    dtype, local_heads = call.outs.dtype, num_heads // workspace.num_ranks
    pitch = head_dim + 24 if padded else head_dim
    offset = 1 if padded else 0
    strides = (num_heads * pitch + 3 * offset, pitch, 1)
    partial_out = Guarded((num_tokens, num_heads, head_dim), dtype, strides=strides, offset=offset)
    partial_lse = Guarded((num_tokens, num_heads), torch.float32, strides=(num_heads + 5 * offset, 1))
    partial_out.tensor.copy_(call.outs[rank]), partial_lse.tensor.copy_(call.lses[rank])
    out = Guarded((num_tokens, local_heads, head_dim), dtype, offset=offset)
    lse_out = Guarded((num_tokens, local_heads), torch.float32, offset=offset)
    tensors = call.arguments(rank) | {"partial_out": partial_out.tensor, "partial_lse": partial_lse.tensor}
    results = []
    for _ in range(2):
        returned = a2a_lse_reduce(workspace=workspace, out=out.tensor, lse_out=lse_out.tensor, **tensors)
        assert returned[0] is out.tensor and returned[1] is lse_out.tensor
        results.append((out.tensor.clone(), lse_out.tensor.clone()))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])
    for memory in (out, lse_out, partial_out, partial_lse):
        memory.check()
    return results[0]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_error_is_within_the_bound(dtype, num_ranks):
    """testing.compare's bound, for all head sizes, 1 to 12 heads a rank, 0 to 17 tokens, wide and dominated LSEs, empty
    shards and rows. Calls of different T follow each other in one workspace, so staging is dirty."""
    for i, head_dim in enumerate(HEAD_DIMS):
        turn = i + NUM_RANKS.index(num_ranks) + 2 * DTYPES.index(dtype)
        calls = bound_calls(num_ranks, head_dim, dtype, turn)
        config = WorkspaceConfig(calls[0].outs.shape[2], head_dim, 17, dtype=dtype)

        def body(group, calls=calls, config=config):
            with Workspace(group, config=config) as workspace:
                results = [guarded_call(call, workspace, padded=j % 2 == 1) for j, call in enumerate(calls)]
                assert workspace.stats() == {"num_calls": 2 * len(calls), "nonfinite_lse": 0}
                return results

        results = assemble(run_ranks(body, num_ranks))
        for call, (out, lse) in zip(calls, results, strict=True):
            call.check(out, lse)


def test_the_bound_sees_an_error_of_the_last_place():
    """The check above fails when one element of a 16-bit result is two neighbours off, or one row has its ranks'
    weights in the wrong base."""
    call = make_call(4, 7, 8, 72, torch.bfloat16, seed=1)
    ((out, lse),) = run_calls([call])
    call.check(out, lse)
    wrong = out.clone()
    wrong.view(torch.int16)[3, 2, 11] += 2
    with pytest.raises(AssertionError, match=r"at \(3, 2, 11\)"):
        call.check(wrong, lse)
    ((other_base, _),) = run_calls([Call(call.outs, call.lses, "2")])
    with pytest.raises(AssertionError, match="exceed the error bound"):
        call.check(other_base, lse)
