"""What users of other libraries reported about shapes, strides, capacity and reuse, tried in every way of travelling."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.errors import DcpInvalidArgument, DcpMismatch
from dcpkernels.testing import Guarded, run_ranks
from tests.a2a_calls import Call, assemble, attempt, make_call, meet, merge, run_calls, same_bits
from tests.a2a_ways import OUTS, PAYLOADS, WAYS, Layout, guarded_output, lay_in, lay_out, num_elements

every_way = pytest.mark.parametrize("way", WAYS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# ../shared/reading/user-reports.md, sections A1 to A3, by its numbers.
REPORTS = {
    9: "test_vectors_in_every_way",
    25: "test_a_head_major_view_of_a_larger_capacity",
    28: "test_ranks_with_different_head_strides",
    29: "tests/test_a2a_matrix.py::test_matrix",  # capacity 1408 and 128, T = 1409 and 8192
    30: "test_decode_and_prefill_rows_in_one_call",
    32: "test_any_sequence_of_rows_around_the_capacity",
    33: "test_any_number_of_heads",
    35: "test_sizes_in_turn_with_changing_inputs",
    40: "test_two_workspaces_of_different_geometry",
    42: "tests/test_a2a_memory.py::test_no_copy_of_a_strided_input",
    44: "test_no_tokens_on_all_ranks",
    58: "test_ranks_that_come_in_any_order",
    62: "tests/test_a2a_zero_copy.py::test_a_tensor_serves_one_call",
    67: "test_no_tokens_on_some_ranks",
}


@pytest.mark.parametrize("report", REPORTS)
def test_report_has_its_test(report):
    """The table above names tests that exist."""
    file, _, test = REPORTS[report].rpartition("::")
    assert f"def {test}(" in (Path(__file__).parents[1] / file if file else Path(__file__)).read_text()


def payload_of(way: str, workspace: Workspace, values: torch.Tensor, layout: Layout, lane: int = 0) -> torch.Tensor:
    """The values in this layout: in a tensor that the workspace hands out where the way does so and it has room."""
    if WAYS[way].hands_out:
        rows = -(-num_elements(layout, tuple(values.shape)) // (values.shape[1] * values.shape[2]))
        if rows <= workspace.config.max_num_tokens:
            return lay_in(workspace.partial_out(rows, lane=lane).view(-1), layout, values)
    return lay_out(layout, values)


def merge_laid_out(way: str, workspace: Workspace, call: Call, layout=PAYLOADS["contiguous"], **outputs):
    arguments = call.arguments(workspace.rank)
    values = arguments.pop("partial_out")
    payload = payload_of(way, workspace, values, layout, call.lane)
    return a2a_lse_reduce(payload, workspace=workspace, return_lse=True, **arguments, **outputs)


def run_in(way: str, calls: list[Call], layouts, *, max_num_tokens: int, **fields):
    """[(out, lse)] of the calls in one workspace; layouts[i][rank] is that of call i on a rank."""
    config = WAYS[way].config(calls[0], max_num_tokens=max_num_tokens, **fields)

    def body(group):
        with WAYS[way].open(group, config) as workspace:
            pairs = zip(calls, layouts, strict=True)
            return [merge_laid_out(way, workspace, call, by_rank[workspace.rank]) for call, by_rank in pairs]

    return assemble(run_ranks(body, calls[0].num_ranks))


def assert_as_plain(calls: list[Call], results) -> None:
    """The truth, and the bits that contiguous tensors give in a workspace of the plain kind."""
    for call, (out, lse), (wanted, wanted_lse) in zip(calls, results, run_calls(calls), strict=True):
        call.check(out, lse)
        assert same_bits(out, wanted) and same_bits(lse, wanted_lse), tuple(call.outs.shape)


@every_way
def test_vectors_in_every_way(way):
    """The published vectors with NaN, infinities and leftovers as payload of their empty shards: each way reads none."""
    cases = json.loads((Path(__file__).parent / "data" / "lse_merge.json").read_text())["cases"]
    for case in cases:
        lses, outs = ([math.nan if v is None else float(v) for v in case[name]] for name in ("lse", "o"))
        num_ranks = len(lses)
        call = Call(
            torch.tensor(outs).view(-1, 1, 1, 1).repeat(1, 3, num_ranks, 20),
            torch.tensor(lses).view(-1, 1, 1).repeat(1, 3, num_ranks),
            case["base"],
        )
        if "local_len" in case:
            call.seq_lens = torch.tensor(case["local_len"], dtype=torch.int32).view(-1, 1)
            call.query_start_loc = torch.tensor([0, 3], dtype=torch.int32)
        ((out, lse),) = run_in(way, [call], [[PAYLOADS["contiguous"]] * num_ranks], max_num_tokens=2)
        torch.testing.assert_close(out, torch.full_like(out, float(case["out"])), rtol=1e-6, atol=0)
        if "out_lse" in case:
            torch.testing.assert_close(lse, torch.full_like(lse, float(case["out_lse"])), rtol=2e-7, atol=0)


@every_way
def test_a_head_major_view_of_a_larger_capacity(way):
    """Strides (512, capacity * 512, 1), as of partial outputs so of `out`: no abort, same bits."""
    capacity, call = 24, make_call(2, 9, 6, 512, torch.bfloat16)
    layout = Layout(lambda t, h, d: (d, capacity * d))

    def body(group):
        with WAYS[way].open(group, WAYS[way].config(call, max_num_tokens=capacity)) as workspace:
            out = guarded_output(layout, (9, 3, 512), torch.bfloat16)
            assert out.tensor.stride() == (512, capacity * 512, 1)
            returned = merge_laid_out(way, workspace, call, layout, out=out.tensor)
            out.check()
            assert returned[0] is out.tensor
            return [returned]

    assert_as_plain([call], assemble(run_ranks(body, 2)))


@every_way
def test_ranks_with_different_head_strides(way):
    """192 on one rank, 128 on the next, 576 on the third: nobody reads a peer's rows by his own strides."""
    calls = [make_call(3, t, 6, 128, dtype, kind="empty") for t, dtype in ((5, torch.bfloat16), (3, torch.bfloat16))]
    pitches = [Layout(lambda t, h, d, pitch=pitch: (h * pitch, pitch)) for pitch in (192, 128, 576)]
    layouts = [pitches, [pitches[1], pitches[2], pitches[0]]]
    assert_as_plain(calls, run_in(way, calls, layouts, max_num_tokens=24))


@every_way
def test_decode_and_prefill_rows_in_one_call(way):
    """A workspace made for 16 decode rows; 9 of them meet a prefill of 7, then of 8 rows and 100: one call each."""
    calls = []
    for prefill in (7, 8, 100):
        call = make_call(2, 9 + prefill, 4, 72, torch.bfloat16, kind="empty", seed=prefill)
        call.seq_lens = torch.tensor([[3, 0, 1, 1, 1, 5, 0, 2, 2, 60], [3, 1, 0, 1, 0, 5, 0, 2, 2, 59]]).int()
        call.query_start_loc = torch.tensor([*range(10), 9 + prefill]).int()
        calls.append(call)
    layouts = [[PAYLOADS["padded heads"], PAYLOADS["head-major"]]] * 3
    assert_as_plain(calls, run_in(way, calls, layouts, max_num_tokens=16))


@every_way
def test_any_sequence_of_rows_around_the_capacity(way):
    """60 calls of 0 to 2 * capacity + 2 rows on 2 lanes, any layout in, any layout out, watched bytes around the outputs."""
    choose, capacity, shape = random.Random(way), 5, (3, 6, 40)
    calls, layouts = [], []
    for seed in range(60):
        num_tokens = choose.choice([0, 1, capacity - 1, capacity, capacity + 1, 2 * capacity, 2 * capacity + 2])
        kind = choose.choice(["empty", "all_empty"])
        num_ranks, num_heads, head_dim = shape
        calls.append(make_call(num_ranks, num_tokens, num_heads, head_dim, torch.float16, kind=kind, seed=seed))
        calls[-1].lane = choose.randrange(2)
        layouts.append([choose.choice(OUTS) for _ in range(num_ranks)])
    out_layouts = [choose.choice(OUTS) for _ in calls]

    def body(group):
        config = WAYS[way].config(calls[0], max_num_tokens=capacity, num_lanes=2)
        with WAYS[way].open(group, config) as workspace:
            results = []
            for call, by_rank, out_layout in zip(calls, layouts, out_layouts, strict=True):
                num_tokens = call.outs.shape[1]
                out = guarded_output(out_layout, (num_tokens, 2, 40), torch.float16)
                lse_out = Guarded((num_tokens, 2), torch.float32, strides=(1, num_tokens + 3))
                outputs = {"out": out.tensor, "lse_out": lse_out.tensor}
                results.append(merge_laid_out(way, workspace, call, by_rank[workspace.rank], **outputs))
                out.check(), lse_out.check()
            return results

    results = assemble(run_ranks(body, 3))
    for call in calls:
        call.lane = 0  # run_calls has one
    assert_as_plain(calls, results)


@pytest.mark.parametrize("num_local_heads", [1, 2, 4, 8, 11, 12, 16, 22, 64])
@every_way
def test_any_number_of_heads(way, num_local_heads):
    """No powers of two wanted, 96, 66 and 12 heads in all among them; the heads that 128 of storage hold more are NaN."""
    num_ranks = {1: 12, 4: 3, 11: 6, 12: 8}.get(num_local_heads, 2)
    num_heads = num_ranks * num_local_heads
    call = make_call(num_ranks, 3, num_heads, 8, DTYPES[num_local_heads % 3])
    layout = Layout(lambda t, h, d: (128 * d, d))
    assert_as_plain([call], run_in(way, [call], [[layout] * num_ranks], max_num_tokens=130))


@every_way
def test_sizes_in_turn_with_changing_inputs(way):
    """T = 8, 4, 8, 4, .. as replays of two graphs: each call equals one in a fresh workspace."""
    calls = [make_call(3, 8 - 4 * (i % 2), 6, 64, torch.bfloat16, kind="empty", seed=i) for i in range(12)]
    results = run_in(way, calls, [[PAYLOADS["contiguous"]] * 3] * 12, max_num_tokens=8)
    for call, result in zip(calls, results, strict=True):
        assert_as_plain([call], [result])


@every_way
def test_two_workspaces_of_different_geometry(way):
    """A target's and a draft's, in turn, over the same ranks; each stays with its own heads, rows and data. A draft on a
    group of one is the identity, on every rank, beside them."""
    targets = [make_call(2, t, 6, 64, torch.bfloat16, seed=t) for t in (4, 1, 9, 0, 3)]
    drafts = [make_call(2, t, 2, 128, torch.float16, seed=t) for t in (1, 7, 2, 2, 0)]

    def body(group):
        alone = group.subgroup([group.rank])
        with (
            WAYS[way].open(group, WAYS[way].config(targets[0], max_num_tokens=4)) as target,
            WAYS[way].open(group, WAYS[way].config(drafts[0], max_num_tokens=2)) as draft,
            WAYS[way].open(alone, WAYS[way].config(drafts[0], max_num_tokens=2)) as single,
        ):
            with pytest.raises(DcpInvalidArgument, match="partial_out must"):  # the draft's tensors in the target
                merge(target, drafts[1])
            results = []
            for one, other in zip(targets, drafts, strict=True):
                results += [merge_laid_out(way, target, one), merge_laid_out(way, draft, other)]
                values, lse = other.outs[group.rank], other.lses[group.rank]
                payload = payload_of(way, single, values, PAYLOADS["contiguous"])
                out, lse_out = a2a_lse_reduce(payload, lse, workspace=single, lse_base="e", return_lse=True)
                assert torch.equal(out, values) and torch.equal(lse_out, lse)
            return results

    results = assemble(run_ranks(body, 2))
    assert_as_plain(targets, results[::2])
    assert_as_plain(drafts, results[1::2])


@every_way
def test_no_tokens_on_all_ranks(way):
    """(0, H/W, D), and (0, H/W) wherever an LSE is promised; calls with rows before and after."""
    call, empty = make_call(2, 3, 4, 64, torch.float16), make_call(2, 0, 4, 64, torch.float16)

    def body(group):
        with WAYS[way].open(group, WAYS[way].config(call, max_num_tokens=4)) as workspace:
            results = [merge_laid_out(way, workspace, call)]
            lses = empty.lses[workspace.rank]
            # The last two have strides that are never used.
            for payload in (
                workspace.partial_out(0),
                workspace.partial_out(4)[4:],
                torch.empty(0, 4, 64, dtype=torch.float16),
                torch.empty(0, dtype=torch.float16).as_strided((0, 4, 64), (2**62, 2**62, 1)),
            ):
                arguments = {"partial_lse": lses, "workspace": workspace, "lse_base": "e"}
                out, lse = a2a_lse_reduce(payload, return_lse=True, **arguments)
                assert out.shape == (0, 2, 64) and out.dtype == torch.float16
                assert lse.shape == (0, 2) and lse.dtype == torch.float32
            assert a2a_lse_reduce(torch.empty(0, 4, 64, dtype=torch.float16), **arguments).shape == (0, 2, 64)
            lse_out = torch.empty(0, 2)
            results.append(merge_laid_out(way, workspace, empty, lse_out=lse_out))
            assert results[-1][1] is lse_out
            results.append(merge_laid_out(way, workspace, call))
            assert workspace.stats()["num_calls"] == 8
            return results

    assert_as_plain([call, empty, call], assemble(run_ranks(body, 2)))


@every_way
def test_no_tokens_on_some_ranks(way):
    """No hang and no numbers: a mismatch on every rank, at once, and NaN in what was to be the output."""
    call = make_call(3, 2, 6, 64, torch.bfloat16)

    def body(group):
        config = WAYS[way].config(call, max_num_tokens=4, timeout_s=10.0, first_call_timeout_s=10.0)
        with WAYS[way].open(group, config) as workspace:
            merge_laid_out(way, workspace, call)
            num_tokens = 0 if workspace.rank == 1 else 2
            payload = payload_of(way, workspace, call.outs[workspace.rank][:num_tokens], PAYLOADS["contiguous"])
            meet(group)  # a rank that asked for its tensor later would get the error there
            out, lse = torch.zeros(num_tokens, 2, 64, dtype=torch.bfloat16), call.lses[workspace.rank][:num_tokens]
            raised = attempt(a2a_lse_reduce, payload, lse, workspace=workspace, lse_base="e", out=out)
            again = attempt(merge, workspace, call)
            assert out.isnan().all()
            return raised, again

    by_rank = run_ranks(body, 3)
    for raised, again in by_rank:
        assert type(raised.error) is type(again.error) is DcpMismatch and raised.seconds < 3
        assert "num_tokens=0" in str(raised.error) and "num_tokens=2" in str(raised.error)
    # docs/errors.md
    assert len({(str(raised.error), raised.error.ranks) for raised, _ in by_rank}) == 1


@every_way
def test_ranks_that_come_in_any_order(way):
    """Delays of 0 to 20 ms before a call and of 0 to 2 ms between writing the partial output and passing it, each rank its
    own, on some calls; every result checked, so that a row read too early or too late shows."""
    calls = [make_call(3, 1 + i % 4, 3, 64, torch.float32, seed=i) for i in range(25)]

    def body(group):
        delays = random.Random(group.rank)
        with WAYS[way].open(group, WAYS[way].config(calls[0], max_num_tokens=4)) as workspace:
            results = []
            for call in calls:
                if delays.random() < 0.3:
                    time.sleep(delays.random() * 0.02)
                payload = payload_of(way, workspace, call.outs[workspace.rank], PAYLOADS["contiguous"])
                if delays.random() < 0.3:
                    time.sleep(delays.random() * 0.002)
                lse = call.lses[workspace.rank]
                results.append(a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e", return_lse=True))
            return results

    assert_as_plain(calls, assemble(run_ranks(body, 3)))
