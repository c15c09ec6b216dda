"""seq_lens and query_start_loc: which rows of which rank they make empty, padding, and LSEs that contradict them."""

from __future__ import annotations

import math

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce, layout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import Call, config_for, make_call, run_calls, same_bits


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_lengths(call: Call, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> Call:
    """The call with lengths, and NaN in place of every payload that they call empty. The LSEs stay as they are."""
    outs = call.outs.clone()
    rows = torch.repeat_interleave(query_start_loc.diff().long())  # row -> sequence, as far as the sequences reach
    for rank in range(call.num_ranks):
        outs[rank, : len(rows)][seq_lens[rank, rows] <= 0] = math.nan
    outs[:, len(rows) :] = math.nan
    return Call(outs, call.lses, call.lse_base, seq_lens, query_start_loc, call.lane)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("starts", [(0, 1, 2, 3, 4, 5), (0, 4, 4, 5, 11, 11), (0, 0, 0, 0, 0, 11), (0, 1, 2, 3, 4, 9)])
def test_lengths_make_shards_empty(dtype, starts):
    """Decode rows, rows with several queries, sequences without a query; context lengths dealt out token by token, so
    that short ones are empty on most of 4 ranks. Finite LSEs and NaN payloads of empty shards leave no trace."""
    lengths = [layout.local_lengths(n, 4) for n in (1, 1000, 0, 3, 2)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32).T.contiguous()  # [W, S]
    call = with_lengths(make_call(4, starts[-1], 12, 72, dtype, lse_base="2"), seq_lens, int32(*starts))
    ((out, lse),) = run_calls([call])
    call.check(out, lse)
    assert out.isfinite().all()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_padding_rows_are_empty_on_every_rank(num_ranks):
    """Rows from query_start_loc[-1] on give 0 and -inf whatever is in them; the rows before keep their bits."""
    plain = make_call(num_ranks, 9, 6, 64, torch.bfloat16)
    seq_lens = torch.full((num_ranks, 2), 7, dtype=torch.int32)
    padded = with_lengths(plain, seq_lens, int32(0, 1, 5))
    (out, lse), (padded_out, padded_lse) = run_calls([plain, padded])
    padded.check(padded_out, padded_lse)
    assert same_bits(padded_out[:5], out[:5]) and same_bits(padded_lse[:5], lse[:5])
    assert same_bits(padded_out[5:], torch.zeros_like(out[5:])) and (padded_lse[5:] == -math.inf).all()


def test_a_batch_without_sequences_is_all_padding():
    """S = 0 with rows, as an engine has them that runs a padded graph without a request: everything is at or past
    query_start_loc[-1] = 0."""
    call = make_call(2, 4, 4, 64, torch.float32)
    padded = with_lengths(call, torch.zeros(2, 0, dtype=torch.int32), int32(0))
    ((out, lse),) = run_calls([padded])
    assert not out.any() and (lse == -math.inf).all()


def test_a_length_below_zero_is_empty():
    """Engines mark unused slots with -1."""
    call = with_lengths(make_call(2, 2, 4, 64, torch.float32), torch.tensor([[-1, 5], [5, -1]]).int(), int32(0, 1, 2))
    ((out, lse),) = run_calls([call])
    call.check(out, lse)


@pytest.mark.parametrize("starts", [(0, 2, 1), (0, 3, 100), (-5, 2, 4), (0, 2**31 - 1, 2**31 - 1), (-(2**31), 0, 4)])
def test_starts_that_make_no_sense_do_no_harm(starts):
    """Values are read on the device and are not checked; whatever they are, no row outside the call is touched and
    each row is merged, or empty."""
    call = make_call(2, 4, 4, 64, torch.float32)
    nonsense = Call(call.outs, call.lses, "e", torch.ones(2, 2, dtype=torch.int32), int32(*starts))
    (out, lse), (got, got_lse) = run_calls([call, nonsense])
    for row in range(4):
        merged = same_bits(got[row], out[row]) and same_bits(got_lse[row], lse[row])
        assert merged or (not got[row].any() and (got_lse[row] == -math.inf).all())


def test_lengths_are_read_at_every_call():
    """The same two tensors, changed in place between calls, as a graph replay does it."""
    call = make_call(3, 6, 6, 64, torch.bfloat16, seed=3)
    steps = [
        ([[1, 1], [1, 1], [1, 1]], (0, 3, 6)),
        ([[0, 1], [1, 0], [1, 1]], (0, 3, 6)),
        ([[0, 1], [1, 1], [0, 0]], (0, 1, 4)),
    ]
    steps = [(torch.tensor(lengths).int(), int32(*starts)) for lengths, starts in steps]

    def body(group):
        with Workspace(group, config=config_for(call)) as workspace:
            arguments = call.arguments(workspace.rank)
            arguments |= {"seq_lens": int32(0, 0), "query_start_loc": int32(0, 0, 0)}
            results = []
            for lengths, starts in steps + steps[:1]:
                arguments["seq_lens"].copy_(lengths[workspace.rank])
                arguments["query_start_loc"].copy_(starts)
                results.append(a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments))
            return results

    by_rank = run_ranks(body, 3)
    for i, (lengths, starts) in enumerate(steps + steps[:1]):
        expected = Call(call.outs, call.lses, "e", lengths, starts)
        expected.check(torch.cat([r[i][0] for r in by_rank], 1), torch.cat([r[i][1] for r in by_rank], 1))


def test_lengths_in_several_rounds():
    """More rows than the workspace holds: a row's sequence is that of its place in the call, not in its round."""
    lengths = torch.tensor([[4, 0, 1], [0, 0, 2], [3, 0, 0]]).int()
    call = with_lengths(make_call(3, 23, 6, 64, torch.float32), lengths, int32(0, 6, 11, 20))
    ((out, lse),) = run_calls([call], max_num_tokens=4)
    call.check(out, lse)


def test_the_workspace_can_do_without_lengths_again():
    """A call with lengths leaves nothing behind for the next one without."""
    plain = make_call(2, 5, 4, 64, torch.float16)
    masked = with_lengths(plain, torch.zeros(2, 1, dtype=torch.int32), int32(0, 5))
    before, _, after = run_calls([plain, masked, plain])
    assert same_bits(before[0], after[0]) and same_bits(before[1], after[1])


# -- LSEs that contradict the lengths


def count_nonfinite(group, lses, seq_lens, query_start_loc):
    num_tokens, num_heads = lses.shape[1:]
    with Workspace(group, config=WorkspaceConfig(num_heads, 64, 4, dtype=torch.float32)) as workspace:
        rank, counts = workspace.rank, []
        lengths = {"seq_lens": seq_lens and seq_lens[rank], "query_start_loc": query_start_loc}
        for _ in range(2):
            payload = torch.ones(num_tokens, num_heads, 64)
            out = a2a_lse_reduce(payload, lses[rank], workspace=workspace, lse_base="e", **lengths)
            counts.append(workspace.stats()["nonfinite_lse"])
        assert out.isfinite().all()
        return counts


def test_a_lse_that_is_not_finite_is_counted():
    """Only where the lengths say that there is something; on the rank that has it; added up over calls; in several
    rounds too. The shard is treated as empty."""
    lses = torch.zeros(2, 6, 4)
    lses[0, 0, 0], lses[0, 1, 3], lses[0, 2, 1] = math.nan, math.inf, -math.inf  # sequence 0: 3 on rank 0
    lses[0, 3, 0] = lses[1, 3, 1] = lses[1, 3, 2] = math.nan  # sequence 1: empty on rank 0, 2 on rank 1
    lses[0, 5, 0] = lses[1, 5, 3] = math.nan  # padding
    seq_lens = [int32(5, 0), int32(5, 1)]
    assert run_ranks(count_nonfinite, 2, lses, seq_lens, int32(0, 3, 5)) == [[3, 6], [2, 4]]


def test_without_lengths_nothing_is_counted():
    """Then a LSE that is not finite is how a kernel says that its shard is empty."""
    lses = torch.full((2, 6, 4), math.nan)
    assert run_ranks(count_nonfinite, 2, lses, None, None) == [[0, 0], [0, 0]]
