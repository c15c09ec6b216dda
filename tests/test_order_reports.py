"""What users of other libraries reported about order, delays and reuse; and the table of all such reports, those about
captured graphs among them (test_graph_reports.py)."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, _direct, a2a_lse_reduce, query_gather, release_query
from dcpkernels.errors import DcpError
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import assemble, attempt, check_with_peers, config_for, make_call, meet
from tests.a2a_ways import WAYS
from tests.prepared_calls import PATIENT, Prepared, calls_of, run_each
from tests.test_a2a_reports import assert_as_plain

# ../shared/reading/user-reports.md, section A3, by its numbers: who reported it, and what tries it here.
REPORTS = {
    45: ("vllm#36070", "tests/test_graph_reports.py::test_lengths_that_change_in_place"),
    46: ("vllm#45487", "tests/test_graph_reports.py::test_a_larger_call_after_a_repeated_one"),
    47: ("local-inference-lab/vllm#130", "tests/test_graph_reports.py::test_sixteen_sizes_in_random_order"),
    48: ("aiter#3928", "tests/test_graph_reports.py::test_every_repeat_is_a_new_call"),
    49: ("sglang#29508", "tests/test_graph_reports.py::test_repeats_and_other_calls_in_turn"),
    51: ("vllm#57059", "test_every_word_is_of_its_own_call"),
    52: ("aiter#4786", "tests/core/test_core.py::test_a_planted_fault_is_reported"),
    54: ("aiter#4855", "tests/test_stress.py::test_many_calls"),
    55: ("vllm#8404", "tests/core/test_core.py::test_a_planted_fault_is_reported"),
    56: ("sglang#37768", "test_producers_that_are_late"),
    57: ("flashinfer#3053", "tests/test_graph_reports.py::test_repeats_in_other_threads_with_a_late_peer"),
    58: ("sglang#38300", "test_uneven_delays_over_the_layers_of_a_model"),
    59: ("vllm#46145", "tests/test_graph_reports.py::test_a_decode_step_right_after_a_long_context"),
    60: ("local-inference-lab/vllm#177", "tests/test_kv_gather_threads.py::test_two_lanes_in_two_threads_each"),
    62: ("vllm#50484", "test_a_query_that_is_held"),
    63: ("flashinfer#4358", "test_a_first_call_while_a_peer_is_still_being_made"),
    64: ("pytorch#196546", "test_flags_are_ready_before_anybody_can_reach_them"),
    66: ("DeepEP#423", "test_barriers_with_random_delays"),
    67: ("sglang#37933", "tests/test_graph_reports.py::test_ranks_that_repeat_different_sizes"),
    68: ("TensorRT-LLM#14986", "tests/test_graph_reports.py::test_a_rank_that_leaves_a_size_out"),
}
# What of them needs a device, and what stands for it where there is none.
ON_A_DEVICE = {
    51: "loads over a real fabric; on each target the instructions are read (tests/isa/test_isa.py::test_ops_compile_as_meant)",
    52: "the scope of a load; it is read in the instructions (tests/isa/test_isa.py::test_ops_compile_as_meant)",
    55: "order between two GPUs; it is read in the instructions (tests/isa/test_isa.py::test_ops_compile_as_meant)",
    56: "programmatic dependent launch, which no kernel here uses",
    57: "lanes of a warp; what they do together runs on threads (tests/isa/test_isa.py::test_on_the_host)",
}
NUMBERS = {*range(45, 69)} - {50, 53, 61, 65}


def test_every_report_has_a_test_or_a_reason():
    """The tables name all rows, and tests that exist."""
    assert set(REPORTS) == NUMBERS and set(ON_A_DEVICE) <= NUMBERS
    root = Path(__file__).parents[1]
    reasons = [reason.split("(")[1].rstrip(")") for reason in ON_A_DEVICE.values() if "(" in reason]
    for test in [*[test for _, test in REPORTS.values()], *reasons]:
        file, _, name = test.rpartition("::")
        assert f"def {name}(" in (root / file if file else Path(__file__)).read_text(), test


@pytest.mark.parametrize("way", [name for name in WAYS if name != "collective"])
def test_every_word_is_of_its_own_call(way, torture):
    """vllm#57059. Each word that a peer writes is the number of the call; ranks are held up at random. A word of another
    call, a torn or an early one, changes the sum. The LSEs differ from call to call, too."""
    num_calls, shape = 100_000 if torture else 150, (3, 6, 44)

    def body(group):
        config = WorkspaceConfig(6, 44, 3, dtype=torch.float32, **WAYS[way].fields, **PATIENT)
        delays = random.Random(group.rank)
        with Workspace(group, config=config) as workspace:
            for i in range(num_calls):
                payload = workspace.partial_out(3) if WAYS[way].hands_out else torch.empty(shape)
                payload.fill_(3.0 * i + group.rank)
                if delays.random() < 0.05:
                    time.sleep(delays.random() * 1e-3)
                lse = torch.full((3, 6), float(i % 7))
                out, lse_out = a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="2", return_lse=True)
                assert out.eq(3.0 * i + 1).all(), (i, out.unique())  # the mean of 3 i, 3 i + 1, 3 i + 2
                assert (lse_out - i % 7 - 1.5849625).abs().max() < 1e-6, (i, lse_out.unique())

    run_ranks(body, 3, timeout_s=600.0 if torture else 60.0)


@pytest.mark.parametrize("num_tokens", [1, 32])
@pytest.mark.parametrize("way", WAYS)
def test_producers_that_are_late(way, num_tokens):
    """sglang#37768. What makes the partial output ends late on some rank, when its peers wait in the call already: they
    get what it has made, with one token as well."""
    calls = [make_call(3, num_tokens, 3, 64, torch.bfloat16, seed=i) for i in range(8)]

    def body(workspace, group):
        results, delays = [], random.Random(group.rank)
        for call in calls:
            values = call.outs[workspace.rank]
            payload = workspace.partial_out(num_tokens) if WAYS[way].hands_out else torch.empty_like(values)
            payload.fill_(float("nan"))

            def produce(payload, values, delay):
                time.sleep(delay)
                payload.copy_(values)

            producer = threading.Thread(target=produce, args=(payload, values, delays.random() * 0.006))
            producer.start(), producer.join()
            lse = call.lses[workspace.rank]
            results.append(a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e", return_lse=True))
        return results

    assert_as_plain(calls, run_each(way, 3, calls[0], body, max_num_tokens=32))


@pytest.mark.parametrize("way", ["bulk", "zero copy of ordinary tensors", "collective"])
def test_uneven_delays_over_the_layers_of_a_model(way, torture):
    """sglang#38300. Rounds of 49 calls, one for each layer; every rank has delays of its own, of 0 to 20 ms."""
    num_rounds = 100 if torture else 2
    calls = calls_of(49, 3, 2, 3, 16)
    expected = None

    def body(workspace, group):
        delays, results = random.Random(group.rank), []
        prepared = [Prepared(call, workspace.rank) for call in calls]
        for _ in range(num_rounds):
            for layer, call in zip(prepared, calls, strict=True):
                late = delays.random() * 0.02 if delays.random() < 0.1 else 0.0
                results.append(layer.repeat(workspace, call, lambda late=late: time.sleep(late)))
        return results

    results = run_each(way, 3, calls[0], body, max_num_tokens=2)
    for first in range(0, len(results), 49):
        expected = results[:49] if expected is None else expected
        assert_as_plain(calls, results[first : first + 49])


QUERY = {"query_head_dim": 24, "query_dtype": torch.bfloat16, **PATIENT}


def test_a_query_that_is_held():
    """vllm#50484. With a merge behind each gather, whoever still reads is waited for; without one, the second gather is an
    error on all ranks, and what the first one gave stays as it was."""
    calls = calls_of(3, 2, 4, 4, 40)
    queries = [[torch.full((4, 2, 24), 10.0 * i + rank).bfloat16() for rank in range(2)] for i in range(4)]

    def body(group):
        with Workspace(group, config=config_for(calls[0], **QUERY)) as workspace:
            rank, results = workspace.rank, []
            for i, call in enumerate(calls):
                view = query_gather(queries[i][rank], workspace=workspace)
                time.sleep(0.02 * ((i + rank) % 2))  # the peer comes to its next gather meanwhile
                assert torch.equal(view, torch.cat(queries[i], dim=1))
                results.append(Prepared(call, rank).repeat(workspace, call))
            held = query_gather(queries[3][rank], workspace=workspace)
            meet(group)  # a rank that is still in that gather would get the error there
            raised = attempt(query_gather, queries[0][rank], workspace=workspace)
            assert torch.equal(held, torch.cat(queries[3], dim=1))
            meet(group)
            return results, raised

    by_rank = run_ranks(body, 2)
    assert_as_plain(calls, assemble([results for results, _ in by_rank]))
    for _, raised in by_rank:
        assert type(raised.error) is DcpError and "release_query" in str(raised.error) and raised.seconds < 5


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_first_call_while_a_peer_is_still_being_made(late, monkeypatch):
    """flashinfer#4358. The last step of making a workspace is over, and on one rank its constructor returns 0.2 s later
    than on the others, who have gone into their first calls: nothing that they have written is lost."""
    agree, made = _direct.agree, []

    def agree_and_dawdle(group, step, *arguments, **keywords):
        agree(group, step, *arguments, **keywords)
        made.append(step)
        if step == "workspace: start" and group.rank == late:
            time.sleep(0.2)

    monkeypatch.setattr(_direct, "agree", agree_and_dawdle)
    call = make_call(3, 2, 6, 40, torch.float32)

    def body(group):
        with Workspace(group, config=config_for(call, **QUERY)) as workspace:
            view = query_gather(torch.full((2, 2, 24), 1.0 + workspace.rank).bfloat16(), workspace=workspace)
            assert view.eq(torch.arange(1, 4).repeat_interleave(2).view(1, 6, 1)).all()
            release_query(workspace=workspace)
            check_with_peers(group, workspace, call)

    run_ranks(body, 3)
    assert made.count("workspace: start") == 3


class Watched(ThreadGroup):
    """A group that looks at a rank's flags at the moment when the peers get its region."""

    def __init__(self, group: ThreadGroup, look) -> None:
        self.__dict__.update(group.__dict__)
        self.look = look

    def exchange_regions(self, region, *, timeout_s=0.0):
        if region is not None:
            self.look(region)
        return super().exchange_regions(region, timeout_s=timeout_s)


@pytest.mark.parametrize("start", [3, 2**32 - 1])
def test_flags_are_ready_before_anybody_can_reach_them(start):
    """pytorch#196546. Flags, epochs and the fault record are what they have to be before a region is handed over; nothing
    writes them afterwards but the protocol."""
    call, looks = make_call(2, 2, 4, 40, torch.float32), []
    config = config_for(call, num_channels=2, num_lanes=2, start_epoch=start, **QUERY)

    def body(group):
        def look(region):
            looks.append(ctypes.string_at(region.address, region.nbytes))

        with Workspace(Watched(group, look), config=config) as workspace:
            layout = workspace._impl._layout
            check_with_peers(group, workspace, call)
            return layout

    layout = run_ranks(body, 2)[0]
    before = start - 1 if start > 3 else 2
    for memory in looks[:2]:
        at, size = layout.parts["flags"].offset, layout.flags_bytes * layout.num_streams
        flags = [int.from_bytes(memory[i : i + 8], "little") for i in range(at, at + size, 64)]
        assert len(flags) == 4 * 2 * 2 * 2 and set(flags) == {start % 2**32, before % 2**32}, set(flags)
        streams = layout.parts["streams"].offset
        for i in range(layout.num_streams):
            assert int.from_bytes(memory[streams + i * layout.stream_bytes :][:8], "little") == start
    assert looks[0] == looks[1]


@pytest.mark.parametrize("way", ["bulk", "bulk, 3 channels", "packets of 8", "zero copy"])
def test_barriers_with_random_delays(way, torture):
    """DeepEP#423. A call without tokens is a barrier: no rank leaves it before all have entered it, thousands of times."""
    num_calls, entered = 1_000_000 if torture else 400, [0] * 4
    config = WorkspaceConfig(4, 16, 2, dtype=torch.float32, **WAYS[way].fields, **PATIENT)

    def body(group):
        delays, payload, lse = random.Random(group.rank), torch.empty(0, 4, 16), torch.empty(0, 4)
        with Workspace(group, config=config) as workspace:
            for i in range(1, num_calls + 1):
                if delays.random() < 0.02:
                    time.sleep(delays.random() * 1e-3)
                entered[group.rank] = i
                a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e")
                assert min(entered) >= i and max(entered) <= i + 1, (i, entered)

    run_ranks(body, 4, timeout_s=3600.0 if torture else 60.0)
