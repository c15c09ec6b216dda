"""What users of other libraries reported about captured graphs, tried where there is none: what a graph does to a call is
that its addresses stay and only their contents change, that the host passes nothing else, and that calls of several sizes
come in an order that nobody foresaw. The table of reports is in test_order_reports.py."""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce, kv_gather, query_gather
from dcpkernels.errors import DcpMismatch, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, attempt, config_for, make_call, meet, own_mappings
from tests.a2a_ways import WAYS
from tests.gather_calls import Context
from tests.prepared_calls import PATIENT, Prepared, calls_of, every_repeatable_way, run_each
from tests.test_a2a_reports import assert_as_plain


@every_repeatable_way
def test_lengths_that_change_in_place(way):
    """vllm#36070. seq_lens and query_start_loc are read where they are at every call, and so are the inputs."""
    calls = calls_of(6, 3, 7, 6, 40, lengths=True)

    def body(workspace, group):
        prepared = Prepared(calls[0], workspace.rank)
        return [prepared.repeat(workspace, call) for call in calls]

    assert_as_plain(calls, run_each(way, 3, calls[0], body, max_num_tokens=8))


@every_repeatable_way
def test_a_larger_call_after_a_repeated_one(way):
    """vllm#45487. Nothing is made larger, freed or moved for it: the same regions are mapped at the same addresses."""
    small, large = calls_of(4, 2, 3, 4, 72), calls_of(3, 2, 29, 4, 72, seed=50)

    def body(workspace, group):
        prepared, results, places = Prepared(small[0], workspace.rank), [], []
        for i, call in enumerate(small):
            results.append(prepared.repeat(workspace, call))
            meet(group)
            places.append((own_mappings(), getattr(workspace._impl, "_heap", None) and workspace._impl._heap.bases[:]))
            meet(group)
            if i < len(large):
                results.append(Prepared(large[i], workspace.rank).repeat(workspace, large[i]))
        assert places == places[:1] * len(places)
        return results

    calls = [call for pair in itertools.zip_longest(small, large) for call in pair if call is not None]
    assert_as_plain(calls, run_each(way, 2, small[0], body, max_num_tokens=4))


@pytest.mark.parametrize("way", ["bulk", "bulk, 2 channels", "packets of 16", "zero copy of ordinary tensors"])
def test_sixteen_sizes_in_random_order(way):
    """local-inference-lab/vllm#130. One call of each of 16 sizes from 1 to 512, then a thousand repeats in any order; each
    result is that of its own call, exactly."""
    sizes = [1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    order = [*sizes, *random.Random(way).choices(sizes, k=1000)]

    def body(workspace, group):
        heads = slice(2 * workspace.rank, 2 * workspace.rank + 2)
        base, prepared = {}, {}
        for size in sizes:
            row = torch.arange(size).view(-1, 1, 1) * 8.0 + torch.arange(4).view(1, -1, 1) * 4096
            base[size] = (row + 2 * workspace.rank).expand(size, 4, 4).contiguous()
            tensors = {"partial_out": base[size].clone(), "partial_lse": torch.zeros(size, 4)}
            expected = (row + 1).expand(size, 4, 4)[:, heads]
            prepared[size] = tensors, torch.empty(size, 2, 4), expected
        for i, size in enumerate(order):
            tensors, out, expected = prepared[size]
            torch.add(base[size], 2.0 * i, out=tensors["partial_out"])
            a2a_lse_reduce(**tensors, out=out, workspace=workspace, lse_base="e")
            assert torch.equal(out, expected + 2.0 * i), (i, size)
        return []

    config = WorkspaceConfig(4, 4, 64, dtype=torch.float32, **WAYS[way].fields, **PATIENT)

    def rank(group):
        with Workspace(group, config=config) as workspace:
            return body(workspace, group)

    run_ranks(rank, 2)


def epoch_in_memory(workspace: Workspace) -> int:
    impl = workspace._impl
    at = impl._heap.bases[workspace.rank] + impl._layout.parts["streams"].offset
    return ctypes.c_uint64.from_address(at).value  # of stream 0, whose first word it is


@pytest.mark.parametrize("start", [3, 2**32 - 4, 2**33 - 3])
@pytest.mark.parametrize("way", ["bulk", "packets of 8", "zero copy of ordinary tensors"])
def test_every_repeat_is_a_new_call(way, start):
    """aiter#3928. The very same call again: each result is of what is in its inputs now, and the epoch, which nobody
    passes, has gone on in the region's memory, past the 0 and 1 of its low half."""
    calls = calls_of(9, 3, 5, 3, 24)

    def body(workspace, group):
        prepared, results, epochs = Prepared(calls[0], workspace.rank), [], [epoch_in_memory(workspace)]
        for call in calls:
            results.append(prepared.repeat(workspace, call))
            epochs.append(epoch_in_memory(workspace))
        assert len(workspace._plans) == 1, "one prepared call"
        assert epochs == [start, *itertools.islice((e for e in itertools.count(start + 1) if e % 2**32 > 1), 9)]
        return results

    assert_as_plain(calls, run_each(way, 3, calls[0], body, max_num_tokens=5, start_epoch=start))


@every_repeatable_way
def test_repeats_and_other_calls_in_turn(way):
    """sglang#29508. Repeats between calls with tensors of their own, of other sizes, of none, on the same lane."""
    repeated, others = (
        calls_of(6, 2, 4, 4, 40),
        [make_call(2, t, 4, 40, torch.bfloat16, seed=t) for t in (2, 0, 4, 9, 1)],
    )

    def body(workspace, group):
        prepared, results = Prepared(repeated[0], workspace.rank), []
        for i, call in enumerate(repeated):
            results.append(prepared.repeat(workspace, call))
            if i < len(others):
                results.append(Prepared(others[i], workspace.rank).repeat(workspace, others[i]))
        return results

    calls = [call for pair in itertools.zip_longest(repeated, others) for call in pair if call is not None]
    assert_as_plain(calls, run_each(way, 2, repeated[0], body, max_num_tokens=4))


@pytest.mark.parametrize(
    "way", ["bulk", "bulk, 2 channels", "packets of 8", "zero copy of ordinary tensors", "collective"]
)
def test_repeats_in_other_threads_with_a_late_peer(way):
    """flashinfer#3053. Prepared in one thread and repeated in others, as a graph on another stream; in turn a rank is 50 ms
    late."""
    calls = calls_of(6, 3, 2, 6, 40)

    def body(workspace, group):
        prepared = Prepared(calls[0], workspace.rank)
        results = [prepared.repeat(workspace, calls[0])]
        for i, call in enumerate(calls[1:]):
            late = (lambda: time.sleep(0.05)) if i % 3 == workspace.rank else (lambda: None)
            with ThreadPoolExecutor(1) as thread:
                results.append(thread.submit(prepared.repeat, workspace, call, late).result())
        return results

    assert_as_plain(calls, run_each(way, 3, calls[0], body, max_num_tokens=2))


@pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])
def test_a_decode_step_right_after_a_long_context(multicast):
    """vllm#46145. Chunk after chunk of context, and with no pause a step of one token that has been made before."""
    context = Context((900, 0, 77, 1100), 4, 16, torch.bfloat16, interleave=2)
    calls = calls_of(6, 4, 1, 4, 40)
    config = config_for(
        calls[0],
        query_head_dim=24,
        query_dtype=torch.bfloat16,
        kv_chunk_rows=64,
        kv_dim=16,
        multicast=multicast,
        **PATIENT,
    )
    queries = [[torch.full((1, 1, 24), 10.0 * i + rank).bfloat16() for rank in range(4)] for i in range(len(calls))]

    def body(group):
        with Workspace(group, config=config) as workspace:
            rank, results = workspace.rank, []
            prepared, plan = Prepared(calls[0], rank), context.plan(rank, 64)
            assert plan.num_chunks > 30
            for i, call in enumerate(calls):
                for chunk in range(plan.num_chunks if i % 2 else 0):
                    got = kv_gather(context.caches[rank], plan, chunk, workspace=workspace)
                    assert torch.equal(got.view(torch.int16), context.chunk(64, chunk).view(torch.int16))
                view = query_gather(queries[i][rank], workspace=workspace)
                assert torch.equal(view, torch.cat(queries[i], dim=1))
                results.append(prepared.repeat(workspace, call))
            return results

    assert_as_plain(calls, assemble(run_ranks(body, 4)))


@pytest.mark.parametrize("way", ["bulk", "packets of 8", "zero copy of ordinary tensors", "collective"])
def test_ranks_that_repeat_different_sizes(way):
    """sglang#37933. One rank takes the bucket of 4, the others that of 8, both used before: an error on all of them that
    has both sizes, at once, and no numbers."""
    calls = {size: make_call(3, size, 3, 40, torch.bfloat16) for size in (8, 4)}
    config = WAYS[way].config(calls[8], max_num_tokens=8, timeout_s=10.0, first_call_timeout_s=10.0)

    def body(group):
        with WAYS[way].open(group, config) as workspace:
            prepared = {size: Prepared(call, workspace.rank) for size, call in calls.items()}
            for size in (8, 4, 8, 4):
                prepared[size].repeat(workspace, calls[size])
            meet(group)  # a rank that is still in the call before would discard that one too
            size = 4 if workspace.rank == 1 else 8
            raised = attempt(prepared[size].repeat, workspace, calls[size])
            assert prepared[size].out.isnan().all()
            return raised

    for raised in run_ranks(body, 3):
        assert type(raised.error) is DcpMismatch and raised.seconds < 5, raised
        assert "num_tokens=4" in str(raised.error) and "num_tokens=8" in str(raised.error)


@pytest.mark.parametrize("left_out", [0, 2], ids=["the first", "the last"])
@pytest.mark.parametrize("way", ["bulk", "packets of 8", "zero copy of ordinary tensors", "collective"])
def test_a_rank_that_leaves_a_size_out(way, left_out):
    """TensorRT-LLM#14986. One rank does not warm up one of three sizes. Its next call is another one, which all learn at
    once; or it makes none, and they learn at the deadline who was missing. Nobody waits for ever."""
    sizes = [8, 4, 2]
    calls = [make_call(3, size, 3, 40, torch.bfloat16) for size in sizes]
    config = WAYS[way].config(calls[0], max_num_tokens=8, timeout_s=2.0, first_call_timeout_s=2.0)

    def body(group):
        with WAYS[way].open(group, config) as workspace:
            mine = [call for i, call in enumerate(calls) if workspace.rank != 1 or i != left_out]
            raised = [attempt(Prepared(call, workspace.rank).repeat, workspace, call) for call in mine]
            meet(group)
            return [r.error for r in raised], sum(r.seconds for r in raised)

    for rank, (errors, seconds) in enumerate(run_ranks(body, 3)):
        assert seconds < 6, seconds
        if left_out == 0:
            assert all(type(error) is DcpMismatch for error in errors), errors
        elif rank == 1:
            assert errors == [None, None]
        else:
            assert errors[:2] == [None, None] and type(errors[2]) is DcpTimeout and errors[2].ranks == (1,), errors
