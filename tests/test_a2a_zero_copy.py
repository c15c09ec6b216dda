"""Tensors of Workspace.partial_out: which call takes them, which views of them peers read in place, and what may be done
with them before and after."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.testing import run_ranks
from tests.a2a_calls import Call, assemble, attempt, config_for, make_call, meet, merge, run_calls, same_bits

CALL = make_call(2, 4, 4, 64, torch.float32, kind="empty", seed=1)
OTHER = make_call(2, 4, 4, 64, torch.float32, kind="empty", seed=2)
MANY = make_call(2, 37, 4, 64, torch.float32, kind="empty", seed=3)


def handed_out(workspace: Workspace, call: Call) -> torch.Tensor:
    """The call's payload in a tensor of the workspace."""
    values = call.outs[workspace.rank]
    return workspace.partial_out(values.shape[0], lane=call.lane).copy_(values)


def merge_this(workspace: Workspace, call: Call, partial_out: torch.Tensor, **fields):
    """The call with this tensor as payload."""
    arguments = call.arguments(workspace.rank) | {"partial_out": partial_out} | fields
    return a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments)


def run(body, calls: list[Call], **fields) -> None:
    """body(group, workspace) -> results of `calls`, in their order; they have to be the bits of plain calls."""
    fields = {"max_num_tokens": 8, "zero_copy": True, "timeout_s": 10.0, "first_call_timeout_s": 10.0} | fields

    def rank(group):
        with Workspace(group, config=config_for(calls[0], **fields)) as workspace:
            return body(group, workspace)

    results = assemble(run_ranks(rank, 2))
    plain = run_calls([Call(call.outs, call.lses) for call in calls])  # on lane 0
    for call, (out, lse), (wanted, wanted_lse) in zip(calls, results, plain, strict=True):
        call.check(out, lse)
        assert same_bits(out, wanted) and same_bits(lse, wanted_lse)


def test_a_tensor_serves_one_call():
    """A used one is refused, and an older one, by name; nothing was sent, and the right call follows."""

    def refused(workspace, tensor):
        call = Call(CALL.outs[:, : len(tensor)], CALL.lses[:, : len(tensor)])
        raised = attempt(merge_this, workspace, call, tensor)
        assert type(raised.error) is DcpInvalidArgument and "handed out last on this lane" in str(raised.error)

    def body(group, workspace):
        used = handed_out(workspace, CALL)
        results = [merge_this(workspace, CALL, used)]
        refused(workspace, used), refused(workspace, used[1:3])
        older = handed_out(workspace, OTHER)  # perhaps the memory of `used`, which is free again
        newer = handed_out(workspace, CALL)
        refused(workspace, older), refused(workspace, older.view(-1).as_strided((2, 4, 64), (64, 128, 1)))
        assert same_bits(older, OTHER.outs[workspace.rank])
        results.append(merge_this(workspace, CALL, newer))
        refused(workspace, newer)
        assert workspace.stats()["num_calls"] == 2
        return results

    run(body, [CALL, CALL])


def test_a_refused_call_does_not_use_the_tensor_up():
    def body(group, workspace):
        tensor = handed_out(workspace, CALL)
        for wrong in ({"lse_base": "10"}, {"out": tensor[:, :2]}, {"partial_lse": None}, {"lane": 1}):
            assert type(attempt(merge_this, workspace, CALL, tensor, **wrong).error) is DcpInvalidArgument
        return [merge_this(workspace, CALL, tensor)]

    run(body, [CALL])


@pytest.mark.parametrize("num_channels", [1, 2])
def test_calls_with_ordinary_tensors_leave_a_pending_one_alone(num_channels):
    """One to three calls that copy, and one of several rounds, between asking for a tensor and passing it."""
    between = [[OTHER], [OTHER, CALL], [OTHER, CALL, OTHER], [MANY], [MANY, OTHER]]

    def body(group, workspace):
        results = []
        for calls in between:
            pending = handed_out(workspace, CALL)
            results += [merge(workspace, call) for call in calls]
            results.append(merge_this(workspace, CALL, pending))
        return results

    run(body, [call for calls in between for call in (*calls, CALL)], num_channels=num_channels)


def test_a_rank_may_hand_out_where_another_copies():
    """Each decides for itself, call by call."""

    def body(group, workspace):
        turns = [(i >> workspace.rank) & 1 for i in range(8)]
        return [
            merge_this(workspace, CALL, handed_out(workspace, CALL)) if t else merge(workspace, CALL) for t in turns
        ]

    run(body, [CALL] * 8)


VIEWS = {
    "head-major": lambda t, h, d, ask: ask(t).view(h, t, d).transpose(0, 1),
    "first rows": lambda t, h, d, ask: ask(t + 3)[:t],
    "last rows": lambda t, h, d, ask: ask(t + 3)[3:],
    "every other row": lambda t, h, d, ask: ask(2 * t)[::2],
    "head-major in a larger capacity": lambda t, h, d, ask: ask(2 * t).view(h, 2 * t, d)[:, 2 : t + 2].transpose(0, 1),
    "[T, H, 2, D][:, :, 1]": lambda t, h, d, ask: ask(2 * t).view(t, h, 2, d)[:, :, 1],
    "[2, T, H, D][1]": lambda t, h, d, ask: ask(2 * t).view(2, t, h, d)[1],
    "other heads and sizes": lambda t, h, d, ask: ask(2 * t).view(-1)[3 : 3 + t * (h * d + 5)].as_strided(
        (t, h, d), (h * d + 5, d, 1), 3
    ),
    "detached": lambda t, h, d, ask: ask(t).detach(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_are_read_in_place(dtype):
    """All that torch makes of a handed out tensor, each rank another: the rest of the tensor is NaN, and stays."""
    call = make_call(3, 5, 6, 40, dtype, kind="empty")

    def body(group):
        with Workspace(group, config=config_for(call, max_num_tokens=16, zero_copy=True)) as workspace:
            results, asked = [], []

            def ask(num_tokens):
                asked.append(workspace.partial_out(num_tokens).fill_(torch.nan))
                return asked[-1]

            for i in range(len(VIEWS)):
                view = [*VIEWS.values()][(i + workspace.rank) % len(VIEWS)](5, 6, 40, ask)
                assert view.untyped_storage().data_ptr() == asked[-1].untyped_storage().data_ptr()
                view.copy_(call.outs[workspace.rank])
                before = asked[-1].clone()
                results.append(merge_this(workspace, call, view))
                assert same_bits(asked[-1], before)
            return results

    ((expected, expected_lse),) = run_calls([call])
    for out, lse in assemble(run_ranks(body, 3)):
        assert same_bits(out, expected) and same_bits(lse, expected_lse)


def test_one_row_expanded_beyond_the_capacity():
    """A handed out tensor in several rounds, with another of more rows after it, time and again: it is not handed out for
    writing before the last round was read."""
    rows = [make_call(2, 1, 4, 64, torch.float32, seed=i) for i in range(20)]
    calls = [Call(row.outs.expand(2, 37, 4, 64), row.lses.expand(2, 37, 4)) for row in rows]

    def body(group, workspace):
        results = []
        for row, call in zip(rows, calls, strict=True):
            tensor = workspace.partial_out(1).fill_(torch.nan).copy_(row.outs[workspace.rank])
            results.append(merge_this(workspace, call, tensor.expand(37, 4, 64)))
        return results

    run(body, calls)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_a_tensor_is_handed_out_when_peers_have_read_it(num_channels):
    """Rows that take a while to read, ranks that are late at times; the first thing that happens to a tensor is that NaN
    goes into it."""
    tables = [make_call(3, 24, 6, 512, torch.bfloat16, seed=i) for i in range(3)]
    expected = run_calls(tables)

    def body(group):
        delays = random.Random(group.rank)
        config = config_for(tables[0], zero_copy=True, num_channels=num_channels)
        with Workspace(group, config=config) as workspace:
            heads = slice(2 * workspace.rank, 2 * workspace.rank + 2)
            for i in range(60):
                if delays.random() < 0.1:
                    time.sleep(delays.random() * 2e-3)
                tensor = workspace.partial_out(24).fill_(torch.nan)
                call = tables[i % 3]
                out, lse = merge_this(workspace, call, tensor.copy_(call.outs[workspace.rank]))
                assert same_bits(out, expected[i % 3][0][:, heads]), i
                assert same_bits(lse, expected[i % 3][1][:, heads]), i

    run_ranks(body, 3)


def test_outputs_must_not_lie_in_a_tensor_of_the_workspace():
    """In none of it: not in the rows behind those that are passed, not in the other buffer, not when the payload is an
    ordinary tensor. No byte is written."""

    def body(group, workspace):
        used = handed_out(workspace, CALL)
        results = [merge_this(workspace, CALL, used)]
        tensor = workspace.partial_out(8).fill_(7.0)
        tensor[:4].copy_(CALL.outs[workspace.rank])
        for memory in (tensor[4:], used):
            for name, shape in (("out", (4, 2, 64)), ("lse_out", (4, 2))):
                output = memory.view(-1).as_strided(shape, (128, 64, 1)[: len(shape)], memory.storage_offset())
                before = memory.clone()
                for payload in (tensor[:4], CALL.outs[workspace.rank]):
                    raised = attempt(merge_this, workspace, CALL, payload, **{name: output})
                    assert type(raised.error) is DcpInvalidArgument and "share memory" in str(raised.error), name
                assert same_bits(memory, before)
        return [*results, merge_this(workspace, CALL, tensor[:4])]

    run(body, [CALL, CALL])


def test_each_lane_hands_out_its_own():
    calls = [make_call(2, 4, 4, 64, torch.float32, seed=i, lane=i % 3) for i in range(6)]

    def body(group, workspace):
        tensors = [workspace.partial_out(4, lane=lane) for lane in range(3)]
        for tensor, call in zip(tensors, calls[:3], strict=True):
            tensor.copy_(call.outs[workspace.rank])
        again = [merge_this(workspace, call, tensor) for call, tensor in zip(calls[:3], tensors, strict=True)]
        return again + [merge_this(workspace, call, handed_out(workspace, call)) for call in calls[3:]]

    run(body, calls, num_lanes=3)


def test_asking_while_a_call_is_in_flight():
    """An error at once, on that lane only; the call goes on."""

    def body(group, workspace):
        results = []
        thread = threading.Thread(target=lambda: results.append(merge(workspace, CALL)))
        if workspace.rank == 0:
            thread.start()
            time.sleep(0.1)
            raised = attempt(workspace.partial_out, 4)
            assert type(raised.error) is DcpError and "lane 0 is in flight" in str(raised.error) and raised.seconds < 1
            assert workspace.partial_out(4, lane=1).shape == (4, 4, 64)
        meet(group)
        if workspace.rank == 1:
            thread.start()
        thread.join()
        return results

    run(body, [CALL], num_lanes=2)


WRONG = [((9,), {}), ((-1,), {}), ((1.0,), {}), (("1",), {}), ((None,), {}), ((1,), {"lane": 1}), ((1,), {"lane": "0"})]


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("arguments, keywords", WRONG)
def test_what_is_not_handed_out(zero_copy, arguments, keywords):
    """The same answer with and without zero_copy; the workspace goes on."""

    def body(group, workspace):
        raised = attempt(workspace.partial_out, *arguments, **keywords)
        assert type(raised.error) is DcpInvalidArgument and str(raised.error).startswith("partial_out: ")
        return [merge_this(workspace, CALL, handed_out(workspace, CALL))]

    run(body, [CALL], zero_copy=zero_copy)


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_without_zero_copy_it_is_an_ordinary_tensor(backend):
    """New each time, to be passed to any call, any number of times."""

    def body(group):
        with Workspace(group, config=config_for(CALL), backend=backend) as workspace:
            older, newer = handed_out(workspace, CALL), handed_out(workspace, OTHER)
            assert older.is_contiguous() and older.data_ptr() != newer.data_ptr()
            return [merge_this(workspace, c, t) for c, t in ((CALL, older), (OTHER, newer), (CALL, older))]

    for (out, _), (wanted, _) in zip(assemble(run_ranks(body, 2)), run_calls([CALL, OTHER, CALL]), strict=True):
        assert same_bits(out, wanted)


def test_tensors_outlive_the_workspace():
    """Used, stale, and views: ordinary memory from then on."""

    def body(group):
        with Workspace(group, config=config_for(CALL, zero_copy=True)) as workspace:
            pending = handed_out(workspace, OTHER)[1:]
            used = handed_out(workspace, CALL)
            merge_this(workspace, CALL, used)
        assert same_bits(used, CALL.outs[group.rank]) and same_bits(pending, OTHER.outs[group.rank, 1:])
        pending.fill_(3.0)
        with pytest.raises(DcpError, match="the workspace must be open"):
            workspace.partial_out(4)
        return float(pending.sum())

    assert run_ranks(body, 2) == [3.0 * 3 * 4 * 64] * 2
