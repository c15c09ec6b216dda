"""Zero copy: `Workspace.partial_out`, whose buffers peers read in place. What is handed out, to whom, and for how long.

Readers that are slow, stopped or dead are in test_zero_copy_readers.py.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.heap.group import as_group
from dcpkernels.testing import ThreadGroup, fill_nan, run_ranks
from tests.a2a_calls import assemble, attempt, make_call, meet, merge, own_mappings, run_calls, same_bits

AT_ONCE_S = 0.5
CONFIG = WorkspaceConfig(6, 64, 8, dtype=torch.float32, zero_copy=True, timeout_s=2.0, first_call_timeout_s=10.0)


def buffer(workspace, call, lane=0):
    """This rank's payload of the call in a buffer that held NaN."""
    outs = call.outs[workspace.rank]
    return fill_nan(workspace.partial_out(outs.shape[0], lane=lane)).copy_(outs)


def merge_from(workspace, call, partial_out, **outputs):
    arguments = call.arguments(workspace.rank) | {"partial_out": partial_out} | outputs
    return a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments)


def calls_of(num_ranks, sizes, **fields):
    return [make_call(num_ranks, n, 6, 64, torch.float32, kind="empty", seed=i, **fields) for i, n in enumerate(sizes)]


def check_all(calls, by_rank):
    plain = run_calls(calls, num_lanes=2)
    for call, (out, lse), expected in zip(calls, assemble(by_rank), plain, strict=True):
        call.check(out, lse)
        assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


# -- what is handed out


def test_two_buffers_a_lane():
    """Contiguous, in the workspace's dtype, of as many rows as asked for. Two that are asked for in a row are two; one that
    a call has taken comes again when all have read it."""

    def body(group):
        config = dataclasses.replace(CONFIG, num_lanes=2)
        with Workspace(group, config=config) as workspace:
            places, again = [], []
            for call in calls_of(2, [3, 8, 1, 8]):
                unused = workspace.partial_out(8).data_ptr()
                tensor = buffer(workspace, call)
                assert tensor.shape == call.outs.shape[1:] and tensor.is_contiguous()
                assert tensor.dtype == torch.float32 and not tensor.requires_grad
                assert tensor.data_ptr() != unused
                places += [unused, tensor.data_ptr()]
                merge_from(workspace, call, tensor)
                meet(group)  # after this, all have read it
                again.append(workspace.partial_out(1).data_ptr() == tensor.data_ptr())
            other_lane = workspace.partial_out(8, lane=1).data_ptr()
            return places, again, other_lane

    for places, again, other_lane in run_ranks(body, 2):
        assert all(again) and len(set(places)) == 2 and other_lane not in places
        assert all(place % 64 == 0 for place in places)


@pytest.mark.parametrize(
    "num_tokens, lane", [(9, 0), (-1, 0), (2.0, 0), (None, 0), ("2", 0), (2, 1), (2, -1), (2, "0"), (2, None)], ids=str
)
def test_wrong_arguments_of_partial_out(num_tokens, lane):
    (group,) = ThreadGroup.create(1)
    for zero_copy in (True, False):
        config = dataclasses.replace(CONFIG, zero_copy=zero_copy)
        with Workspace(group, config=config) as workspace:
            with pytest.raises(DcpInvalidArgument, match=r"partial_out: (num_tokens|lane) must be in 0 \.\. .*\(got "):
                workspace.partial_out(num_tokens, lane=lane)
            assert workspace.partial_out(8).shape == (8, 6, 64)


def test_without_zero_copy_it_is_an_ordinary_tensor():
    """A new one each time, so that code which asks for one runs everywhere; also with the collective backend."""
    calls = calls_of(2, [3, 0, 8])

    def body(group, backend, zero_copy):
        config = dataclasses.replace(CONFIG, zero_copy=zero_copy)
        with Workspace(group, config=config, backend=backend) as workspace:
            first, second = workspace.partial_out(3), workspace.partial_out(3)
            assert first.data_ptr() != second.data_ptr()
            second.fill_(1.0), first.fill_(2.0)
            assert second.eq(1).all()
            return [merge_from(workspace, call, buffer(workspace, call)) for call in calls]

    for backend, zero_copy in [("direct", False), ("collective", False), ("collective", True)]:
        check_all(calls, run_ranks(body, 2, backend, zero_copy))


VIEWS = {
    "whole": lambda t: t,
    "rows in the middle": lambda t: t[2:-1],
    "first row": lambda t: t[:1],
    "no rows": lambda t: t[:0],
    "every other row": lambda t: t[::2],
    "head-major": lambda t: t.view(6, t.shape[0], 64).transpose(0, 1),
    "one row for all": lambda t: t[3:4].expand(5, 6, 64),
    "other order of dims": lambda t: t.view(-1).as_strided((2, 6, 64), (64, 128, 1), 64),
}


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view, num_channels):
    """Any view with unit last stride is read in place: offset and strides go with the signal. Each rank has another one
    in the same call."""
    names = [*VIEWS]

    def body(group):
        results = []
        with Workspace(group, config=dataclasses.replace(CONFIG, num_channels=num_channels)) as workspace:
            for turn in range(3):
                tensor = fill_nan(workspace.partial_out(8))
                num_tokens = VIEWS[view](tensor).shape[0]
                call = make_call(3, num_tokens, 6, 64, torch.float32, seed=turn)
                mine = VIEWS[view](tensor)
                if workspace.rank == turn:  # on one rank another view of the same shape
                    other = [name for name in names if VIEWS[name](tensor).shape[0] == num_tokens]
                    mine = VIEWS[other[turn % len(other)]](tensor)
                if mine.stride(0) == 0 and num_tokens > 1:
                    mine[0].copy_(call.outs[workspace.rank, 0])
                else:
                    mine.copy_(call.outs[workspace.rank])
                merged = merge_from(workspace, call, mine)
                payloads = torch.stack([t for t in group.all_gather_object(mine.clone())])
                call.outs = payloads
                results.append((call, merged))
        return results

    by_rank = run_ranks(body, 3)
    for same_call in zip(*by_rank, strict=True):
        call = same_call[0][0]
        call.check(torch.cat([out for _, (out, _) in same_call], 1), torch.cat([lse for _, (_, lse) in same_call], 1))


# -- old and used tensors


def across_both_buffers(workspace):
    """[4, 6, 64] that starts in the first buffer and ends in the second. From a tensor torch lets nobody get there."""
    layout = workspace._impl._layout
    part = layout.parts["a2a_lse_reduce.partial_out"]
    memory = workspace._impl._heap.own_memory(part.offset, part.num_bytes)
    return torch.frombuffer(memory, dtype=torch.float32)[layout.buffer_bytes // 4 - 64 :][: 4 * 6 * 64].view(4, 6, 64)


def test_a_tensor_serves_one_call():
    """An older one, a used one, and one that reaches beyond its buffer: DcpInvalidArgument on this rank, nothing is sent,
    and the call put right meets the peers, who wait in that very call."""
    (call,) = calls_of(3, [4])

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=5.0)) as workspace:
            results, used = [], None
            for turn in range(6):
                tensor = buffer(workspace, call)
                if workspace.rank == turn % 3:
                    # A used one is free again only if it is the memory of the new one.
                    wrong = [used] if used is not None and used.data_ptr() != tensor.data_ptr() else []
                    if turn >= 3:
                        wrong = [tensor]  # older, as soon as there is a newer one
                        tensor = buffer(workspace, call)
                    wrong.append(across_both_buffers(workspace))
                    for old in wrong:
                        raised = attempt(merge_from, workspace, call, old)
                        assert type(raised.error) is DcpInvalidArgument, raised
                        assert str(raised.error).startswith("a2a_lse_reduce: partial_out must lie in the tensor that")
                    workspace.check()
                results.append(merge_from(workspace, call, tensor))
                used = tensor
            assert workspace.stats()["num_calls"] == 6
            return results

    check_all([call] * 6, run_ranks(body, 3))


def test_an_error_leaves_the_buffer_with_its_caller():
    """A call that was refused for another reason has not taken the tensor."""
    (call,) = calls_of(2, [4])

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            tensor = buffer(workspace, call)
            for wrong in ({"lse_base": "10"}, {"lane": 1}, {"out": torch.empty(1)}, {"out": tensor[:, :3]}):
                with pytest.raises(DcpInvalidArgument):
                    a2a_lse_reduce(
                        workspace=workspace, **call.arguments(workspace.rank) | {"partial_out": tensor} | wrong
                    )
            return [merge_from(workspace, call, tensor)]

    check_all([call], run_ranks(body, 2))


@pytest.mark.parametrize("which", ["the same", "the other buffer", "another lane's"])
def test_outputs_may_not_lie_in_a_buffer(which):
    """Peers read there. An error before anything is sent; nothing is written."""
    (call,) = calls_of(2, [4])

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, num_lanes=2)) as workspace:
            other, of_another_lane = workspace.partial_out(8), workspace.partial_out(8, lane=1)
            tensor = buffer(workspace, call)
            place = {"the same": tensor, "another lane's": of_another_lane}.get(which, other)
            before = place.clone()
            flat = place.view(-1)
            out, lse_out = flat[: 4 * 3 * 64].view(4, 3, 64), flat[:12].view(4, 3)
            for outputs in ({"out": out}, {"lse_out": lse_out}, {"out": out, "lse_out": torch.empty(4, 3)}):
                for partial_out in (tensor, call.outs[workspace.rank]):
                    raised = attempt(merge_from, workspace, call, partial_out, **outputs)
                    assert type(raised.error) is DcpInvalidArgument, (outputs.keys(), raised)
                    assert "must not share memory" in str(raised.error)
            assert same_bits(place, before)
            return [merge_from(workspace, call, tensor)]

    check_all([call], run_ranks(body, 2))


def test_inputs_may_lie_in_any_buffer():
    """The LSEs, or the payload of a call on another lane: that one is copied as any tensor is."""
    (call,) = calls_of(2, [4])

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, num_lanes=2)) as workspace:
            lses = workspace.partial_out(1, lane=1).view(-1)[:24].view(4, 6).copy_(call.lses[workspace.rank])
            arguments = call.arguments(workspace.rank) | {"partial_lse": lses, "partial_out": buffer(workspace, call)}
            results = [a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments)]
            elsewhere = buffer(workspace, call, lane=1)
            results.append(merge_from(workspace, call, elsewhere))
            call_on_1 = dataclasses.replace(call, lane=1)
            results.append(merge_from(workspace, call_on_1, elsewhere))  # and it is still good for its own lane
            return results

    check_all([call] * 3, run_ranks(body, 2))


# -- a long walk


def walk(group, seed, num_ranks, config, num_calls):
    """Calls on any lane, from any kind of tensor, in an order of its own on each rank. Whatever the rank may write to is
    overwritten at once, so that a peer which still reads it gets NaN."""
    shared, own = random.Random(seed), random.Random(100 * seed + 1 + as_group(group).rank)
    plain_config = dataclasses.replace(config, zero_copy=False, num_channels=1, max_num_tokens=64)
    with Workspace(group, config=config) as workspace, Workspace(group, config=plain_config) as plain:
        kept = [None] * config.num_lanes  # out of date when the lane's other buffer has been handed out since
        for i in range(num_calls):
            lane = shared.randrange(config.num_lanes)
            num_tokens = shared.choice([0, 1, 2, 5, 8, 8, 8, 19])
            call = make_call(num_ranks, num_tokens, 6, 64, config.dtype, kind="empty", seed=1000 * seed + i, lane=lane)
            payload = call.outs[workspace.rank]
            ways = ["handed out", "handed out twice", "view", "own tensor", "own tensor, one handed out"]
            way = own.choice(ways if num_tokens <= 8 else ways[3:])
            own_copy = None
            if way.startswith("handed out"):
                for _ in range(1 + (way == "handed out twice")):
                    tensor = fill_nan(workspace.partial_out(8, lane=lane))[:num_tokens]
                tensor.copy_(payload)
            elif way == "view":
                whole = fill_nan(workspace.partial_out(8, lane=lane))
                tensor = whole.view(6, 8, 64).transpose(0, 1)[8 - num_tokens :]
                tensor.copy_(payload)
            else:
                tensor = own_copy = payload.clone()
                if way == "own tensor, one handed out":
                    kept[lane] = fill_nan(workspace.partial_out(8, lane=lane))
            old = kept[lane]
            if own_copy is None and 0 < num_tokens and old is not None and own.random() < 0.3:
                if old.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                    assert type(attempt(merge_from, workspace, call, old[:num_tokens]).error) is DcpInvalidArgument
            if own.random() < 0.2:
                time.sleep(own.random() * 2e-3)
            got = merge_from(workspace, call, tensor)
            if own_copy is not None:
                fill_nan(own_copy)
            expected = merge(plain, call)
            assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1]), (i, way, num_tokens, lane)
    return True


@pytest.mark.parametrize(
    "num_ranks, fields",
    [
        (2, {}),
        (3, {"num_lanes": 2, "dtype": torch.bfloat16}),
        (3, {"num_channels": 2, "start_epoch": 2**32 - 20}),
        (6, {"num_lanes": 2, "start_epoch": 2**40 - 100, "dtype": torch.float16}),
        (1, {"num_lanes": 2}),
    ],
    ids=str,
)
def test_a_long_walk(num_ranks, fields):
    config = dataclasses.replace(CONFIG, timeout_s=10.0, **fields)
    run_ranks(walk, num_ranks, num_ranks, num_ranks, config, 300)


def test_a_long_walk_of_processes():
    config = dataclasses.replace(CONFIG, timeout_s=10.0, num_lanes=2)
    run_ranks(walk, 3, 7, 3, config, 300, mode="process")


def test_two_lanes_in_two_threads():
    """Each lane has its own two buffers and credits."""
    lanes = [calls_of(2, [random.Random(lane).choice([0, 1, 5, 8]) for _ in range(60)], lane=lane) for lane in (0, 1)]

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, num_lanes=2, timeout_s=10.0)) as workspace:
            results, errors = [[], []], []

            def run(lane):
                delays = random.Random(10 * workspace.rank + lane)
                for call in lanes[lane]:
                    if delays.random() < 0.1:
                        time.sleep(delays.random() * 2e-3)
                    tensor = buffer(workspace, call, lane)
                    if delays.random() < 0.2:
                        tensor = buffer(workspace, call, lane)
                    results[lane].append(merge_from(workspace, call, tensor))

            threads = [threading.Thread(target=lambda i=i: errors.append(attempt(run, i).error)) for i in (0, 1)]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            assert errors == [None] * 2
            return results

    by_rank = run_ranks(body, 2)
    for lane in (0, 1):
        check_all(lanes[lane], [results[lane] for results in by_rank])


# -- calls in flight, and the end


def in_thread(fn, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(attempt(fn, *args)))
    thread.start()
    return thread, results


def test_partial_out_while_a_call_is_in_flight():
    """Refused at once, as a second call would be; the call goes on. Another lane is free."""
    (call,) = calls_of(2, [4])

    def body(group):
        config = dataclasses.replace(CONFIG, num_lanes=2, timeout_s=5.0)
        with Workspace(group, config=config) as workspace:
            tensor = buffer(workspace, call)
            if workspace.rank == 0:
                thread, results = in_thread(merge_from, workspace, call, tensor)
                time.sleep(0.2)
                second = attempt(workspace.partial_out, 4)
                assert type(second.error) is DcpError and second.seconds < AT_ONCE_S
                assert str(second.error).startswith("partial_out: calls on one lane must come one after the other")
                assert workspace.partial_out(4, lane=1).shape == (4, 6, 64)
                with pytest.raises(DcpError, match="in flight"):
                    workspace.close()
                meet(group)
                thread.join()
                return [results[0].value]
            meet(group)
            return [merge_from(workspace, call, tensor)]

    check_all([call], run_ranks(body, 2))


def outlive(group):
    (call,) = calls_of(2, [4])
    workspace = Workspace(group, config=CONFIG)
    old, new = workspace.partial_out(8).fill_(3.0), buffer(workspace, call)
    out, _ = merge_from(workspace, call, new)
    row = old[5:6]
    while_open = len(own_mappings())
    workspace.close()
    del workspace, new
    gc.collect()
    row.add_(1.0)
    old_kept = len(own_mappings())
    del old
    gc.collect()
    torch.full((1 << 16,), 9.0)  # whoever would get that memory next
    assert row.eq(4.0).all() and out.isfinite().any()
    view_kept = len(own_mappings())
    del row
    gc.collect()
    return while_open, old_kept, view_kept, len(own_mappings())


def test_a_tensor_outlives_the_workspace():
    """It is memory as long as anything refers to it, also a row of it; the last one to go unmaps the own region. Those of
    the peers go with the workspace."""
    assert run_ranks(outlive, 2, mode="process") == [(2, 1, 1, 0)] * 2


def forgotten(group):
    workspace = Workspace(group, config=CONFIG)
    tensor = workspace.partial_out(8).fill_(3.0)
    meet(group)
    del workspace
    gc.collect()
    assert tensor.add_(1).eq(4).all()
    kept = len(own_mappings())
    meet(group)
    cycle = [tensor]
    cycle.append(cycle)
    del tensor, cycle
    gc.collect()
    return kept, len(own_mappings())


def test_a_tensor_outlives_a_workspace_that_was_not_closed():
    assert run_ranks(forgotten, 2, mode="process") == [(1, 0)] * 2


def test_thread_ranks_keep_their_regions_as_long_as_tensors_live():
    """All ranks use one mapping of a region; a tensor of one rank keeps that one only."""
    gc.collect()
    before = len(own_mappings())

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            return workspace.partial_out(8).fill_(workspace.rank) if workspace.rank == 1 else None

    _, tensor, _ = run_ranks(body, 3)
    assert tensor.eq(1).all() and len(own_mappings()) == before + 1
    del tensor
    gc.collect()
    assert len(own_mappings()) == before


def test_no_tokens():
    """T = 0 from a tensor of partial_out and from others, on different ranks, in turn with rows."""
    sizes = [0, 3, 0, 0, 8, 0, 1, 1, 0, 3]
    calls = calls_of(3, sizes)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            results = []
            for i, call in enumerate(calls):
                handed_out = (i + workspace.rank) % 3 != 0
                results.append(
                    merge_from(workspace, call, buffer(workspace, call)) if handed_out else merge(workspace, call)
                )
            return results

    check_all(calls, run_ranks(body, 3))


@pytest.mark.parametrize("num_channels", [1, 2, 5])
def test_more_tokens_than_the_workspace_holds(num_channels):
    """An ordinary tensor in several rounds, with a handed-out one of the same lane waiting for its turn untouched."""
    calls = calls_of(2, [20, 4, 9, 8, 33])

    def body(group):
        config = dataclasses.replace(CONFIG, num_channels=num_channels, timeout_s=5.0)
        with Workspace(group, config=config) as workspace:
            results, waiting = [], None
            for call in calls:
                if call.outs.shape[1] > 8:
                    with pytest.raises(DcpInvalidArgument, match="max_num_tokens=8"):
                        workspace.partial_out(call.outs.shape[1])
                    waiting = workspace.partial_out(8).fill_(7.0 + workspace.rank)
                    results.append(merge(workspace, call))
                    assert waiting.eq(7.0 + workspace.rank).all()
                else:
                    tensor = (
                        waiting[: call.outs.shape[1]] if workspace.rank else workspace.partial_out(call.outs.shape[1])
                    )
                    results.append(merge_from(workspace, call, tensor.copy_(call.outs[workspace.rank])))
                    waiting = workspace.partial_out(8)
            return results

    check_all(calls, run_ranks(body, 2))
