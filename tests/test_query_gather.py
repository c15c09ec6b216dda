"""query_gather: the view that it returns, who writes which bytes and when, and arguments that are refused.

All dtypes, ranks and layouts are in test_query_gather_matrix.py; what holds between calls, in test_query_gather_contract.py.
"""

from __future__ import annotations

import dataclasses
import signal
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, query_gather, reference, release_query
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import PATTERN, Buffers, any_bits, release_by_merge

CONFIG = WorkspaceConfig(
    12, 16, 16, num_lanes=2, query_head_dim=40, query_dtype=torch.float32, timeout_s=10.0, first_call_timeout_s=10.0
)
MULTICAST = pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])


def queries_of(num_ranks, num_tokens, dtype=torch.bfloat16, seed=0, head_dim=40):
    return [any_bits((num_tokens, 12 // num_ranks, head_dim), dtype, 10 * seed + rank) for rank in range(num_ranks)]


# -- the view


@MULTICAST
def test_one_address_for_all_calls_of_a_lane(multicast):
    """Whatever T and dtype are; lanes lie apart, with room for the largest call."""

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, multicast=multicast)) as workspace:
            places = [set(), set()]
            for i, (num_tokens, dtype) in enumerate(
                [(16, torch.float32), (1, torch.bfloat16), (7, torch.float8_e5m2), (16, torch.float32)]
            ):
                for lane in (0, 1):
                    query = queries_of(2, num_tokens, dtype, i)[workspace.rank]
                    places[lane].add(query_gather(query, workspace=workspace, lane=lane).data_ptr())
                    release_query(workspace=workspace, lane=lane)
            return places

    for places in run_ranks(body, 2):
        (first,), (second,) = places
        assert abs(first - second) >= 16 * 12 * 40 * 4 and first % 64 == second % 64 == 0


@MULTICAST
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_padded_heads(dtype, multicast):
    """The view is the same, with 12 heads a row; a consumer may take it for one of 128 heads, as far as memory goes. No
    byte behind the last row is written."""
    fields = {"padded_num_heads": 128, "query_dtype": dtype, "multicast": multicast}
    queries = queries_of(3, 16, dtype)
    truth = reference.query_gather(queries)

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, **fields)) as workspace:
            buffers = Buffers(group, workspace, "query_gather")
            for num_tokens in (16, 1):
                buffers.fill()
                view = query_gather(queries[workspace.rank][:num_tokens], workspace=workspace)
                assert view.shape == (num_tokens, 12, 40) and view.stride() == (480, 40, 1)
                assert same_bits(view, truth[:num_tokens])
                # torch refuses what its storage does not hold.
                padded = view.as_strided((num_tokens, 128, 40), view.stride())
                assert same_bits(padded[:, :12], truth[:num_tokens])
                assert padded[-1, 12:].view(torch.uint8).eq(PATTERN).all()
                room = 12 * num_tokens + 116
                assert buffers.place(view)[0] + room * 40 * dtype.itemsize <= len(buffers.bytes) // 2
                buffers.check_around(view)
                release_query(workspace=workspace)

    run_ranks(body, 3)


def test_a_view_of_no_tokens():
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            view = query_gather(queries_of(2, 0)[0], workspace=workspace)
            assert view.shape == (0, 12, 40) and view.dtype == torch.bfloat16
            release_query(workspace=workspace)

    run_ranks(body, 2)


def late_reader(group, multicast, release):
    """Each rank in turn is the one that reads 30 ms later, when the others are long done, and inside the round that ends
    the use."""
    config = dataclasses.replace(CONFIG, multicast=multicast)
    with Workspace(group, config=config) as workspace:
        for turn in range(2 * workspace.num_ranks):
            queries = queries_of(workspace.num_ranks, 1 + turn % 16, seed=turn)
            truth = reference.query_gather(queries)
            view = query_gather(queries[workspace.rank], workspace=workspace)
            if turn % workspace.num_ranks == workspace.rank:
                time.sleep(0.03)
            assert same_bits(view, truth), turn
            if release == "merge":
                release_by_merge(workspace, len(view))
            else:
                release_query(workspace=workspace)


@MULTICAST
@pytest.mark.parametrize("release", ["merge", "release_query"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_late_reader_reads_its_own_call(num_ranks, release, multicast):
    run_ranks(late_reader, num_ranks, multicast, release)


def test_a_late_reader_between_processes():
    run_ranks(late_reader, 2, True, "merge", mode="process")


def test_the_view_stays_memory_after_the_workspace():
    """Of undefined contents. It must not be unmapped under the caller."""

    def body(group):
        for multicast in (True, False):
            workspace = Workspace(group, config=dataclasses.replace(CONFIG, multicast=multicast))
            view = query_gather(queries_of(2, 4)[workspace.rank], workspace=workspace)
            release_query(workspace=workspace)
            workspace.close()
            meet(group)
            view.clone()

    run_ranks(body, 2)


def writes_into_the_view(group):
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=2.0))
    queries = queries_of(2, 4)
    view = query_gather(queries[workspace.rank], workspace=workspace)
    assert same_bits(view, reference.query_gather(queries))
    meet(group)
    if workspace.rank == 1:
        view.view(torch.uint8)[0, 0, 0] = 1
    return attempt(release_query, workspace=workspace).error


def test_read_only_views(monkeypatch):
    """With DCPKERNELS_READ_ONLY_VIEWS=1 a caller who writes into a view dies there and then; reading is as ever."""
    monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", "1")
    error, _ = run_ranks(writes_into_the_view, 2, mode="process", expect_exit={1: -signal.SIGSEGV})
    assert isinstance(error, DcpError) and error.ranks == (1,)
    monkeypatch.setenv("DCPKERNELS_READ_ONLY_VIEWS", "0")
    assert run_ranks(writes_into_the_view, 2, mode="process") == [None, None]


# -- who writes what


@pytest.mark.parametrize("multicast, num_channels", [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_a_rank_writes_its_own_heads_only(multicast, num_channels):
    """While rank 1 has not come: rank 0's heads are in the buffer that rank 1 will read, all other bytes are as before."""
    config = dataclasses.replace(CONFIG, multicast=multicast, num_channels=num_channels)
    queries = queries_of(2, 16, torch.float32)

    def body(group):
        with Workspace(group, config=config) as workspace:
            buffers = Buffers(group, workspace, "query_gather")
            buffers.fill()
            if workspace.rank == 1:
                rows = buffers.bytes[: 16 * 12 * 160].view(16, 12, 160)
                deadline = time.monotonic() + 5
                while rows[:, :6].eq(PATTERN).all(-1).any() and time.monotonic() < deadline:
                    time.sleep(1e-3)
                time.sleep(0.01)
                assert torch.equal(rows[:, :6], queries[0].view(torch.uint8))
                assert rows[:, 6:].eq(PATTERN).all() and buffers.bytes[16 * 12 * 160 :].eq(PATTERN).all()
            view = query_gather(queries[workspace.rank], workspace=workspace)
            assert same_bits(view, reference.query_gather(queries))
            release_query(workspace=workspace)

    run_ranks(body, 2)


def test_out_leaves_the_query_as_it_is():
    """The input may be changed as soon as the call returns, also while peers are still in it."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            for turn in range(20):
                queries = queries_of(3, 40, seed=turn)
                query = queries[workspace.rank].clone()
                out = query_gather(query, workspace=workspace, out=torch.empty(40, 12, 40, dtype=torch.bfloat16))
                query.view(torch.uint8).fill_(turn)
                assert same_bits(out, reference.query_gather(queries))

    run_ranks(body, 3)


# -- arguments

GOOD = torch.zeros(4, 6, 40, dtype=torch.bfloat16)
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
WRONG = {
    "no tensor": ({"query": [[1.0]]}, "query must be a torch.Tensor"),
    "None": ({"query": None}, "query must be a torch.Tensor"),
    "no parts": ({"query": ()}, r"query must have 1 \.\. 4 parts \(got 0\)"),
    "five parts": ({"query": (GOOD[..., :8],) * 5}, r"query must have 1 \.\. 4 parts \(got 5\)"),
    "two dims": ({"query": GOOD[0]}, r"query must have shape .*\(got \[6, 40\]\)"),
    "wrong heads": ({"query": GOOD[:, :5]}, r"query must have shape .* = \[4, 6, 40\] \(got \[4, 5, 40\]\)"),
    "all heads": ({"query": GOOD.repeat(1, 2, 1)}, r"query must have shape .*\(got \[4, 12, 40\]\)"),
    "wrong dim": ({"query": GOOD[..., :39]}, r"query_head_dim=40 .*\(got 39\)"),
    "wrong sum of dims": ({"query": (GOOD, GOOD[..., :1])}, r"query_head_dim=40 .*\(got 41\)"),
    "parts of other rows": ({"query": (GOOD[..., :20], GOOD[:3, :, :20])}, r"query\[1\] must have shape"),
    "parts of other dtypes": (
        {"query": (GOOD[..., :20], GOOD[..., :20].half())},
        r"query\[1\] must be bfloat16 \(got float16\)",
    ),
    "last stride": ({"query": GOOD.repeat(1, 1, 2)[..., ::2]}, "query must have stride 1 in its last dim"),
    "dtype": ({"query": GOOD.double()}, r"query must be .*\(got float64\)"),
    "integers": ({"query": GOOD.short()}, r"query must be .*\(got int16\)"),
    "too wide": ({"query": GOOD.float()}, r"no wider than query_dtype=bfloat16 \(got float32\)"),
    "lane": ({"lane": 2}, r"lane must be in 0 \.\. 1 .*\(got 2\)"),
    "negative lane": ({"lane": -1}, r"lane must be in 0 \.\. 1"),
    "lane, no number": ({"lane": "0"}, r"lane must be in 0 \.\. 1"),
    "lane, no key": ({"lane": [0]}, r"lane must be in 0 \.\. 1"),
    "T without out": ({"query": GOOD.repeat(5, 1, 1)}, r"out must be given .*max_num_tokens=16 \(got T = 20\)"),
    "shape of out": ({"out": torch.zeros(4, 6, 40, dtype=torch.bfloat16)}, r"out must have shape .* = \[4, 12, 40\]"),
    "dtype of out": ({"out": torch.zeros(4, 12, 40)}, r"out must be bfloat16 \(got float32\)"),
    "stride of out": ({"out": GOOD.repeat(1, 2, 2)[..., ::2]}, "out must have stride 1 in its last dim"),
    "out on itself": ({"out": GOOD[:, :1].expand(4, 12, 40)}, "out must not overlap itself"),
    "out, no tensor": ({"out": [1]}, "out must be a torch.Tensor"),
    "scale of 0": ({"scale": 0.0}, r"scale must be a positive number .*\(got 0.0\)"),
    "negative scale": ({"scale": -1.0}, "scale must be a positive number"),
    "infinite scale": ({"scale": float("inf")}, "scale must be a positive number"),
    "NaN scale": ({"scale": float("nan")}, "scale must be a positive number"),
    "a bool": ({"scale": True}, "scale must be a positive number"),
    "a text": ({"scale": "1"}, "scale must be a positive number"),
    "scale's dtype": ({"scale": torch.ones(1, dtype=torch.float64)}, r"scale must be float32 \(got float64\)"),
    "scale's size": ({"scale": torch.ones(2)}, r"scale must have one element \(got \[2\]\)"),
    "scale of fp8": ({"query": GOOD.to(E4M3), "scale": 1.0}, r"query must be .*\(got float8_e4m3fn\)"),
    "scale of fnuz": ({"query": GOOD.to(FNUZ), "scale": 1.0}, r"query must be .*\(got float8_e4m3fnuz\)"),
    "scale, out": (
        {"scale": 1.0, "out": GOOD.repeat(1, 2, 1)},
        r"out must be float8_e4m3fn or float8_e4m3fnuz \(got bfloat16\)",
    ),
    "scale, out of e5m2": (
        {"scale": 1.0, "out": GOOD.repeat(1, 2, 1).to(torch.float8_e5m2fnuz)},
        r"out must be float8_e4m3fn or float8_e4m3fnuz \(got float8_e5m2fnuz\)",
    ),
    "fnuz, out": ({"query": GOOD.to(FNUZ), "out": GOOD.repeat(1, 2, 1).to(E4M3)}, r"out must be float8_e4m3fnuz \(got"),
    "e8m0": ({"query": GOOD.to(torch.float8_e8m0fnu)}, r"query must be .*\(got float8_e8m0fnu\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_call_sends_nothing(name):
    """Rank 1's mistake raises there at once. The others wait for it; put right, the call works on all."""
    wrong, text = WRONG[name]
    queries = queries_of(2, 4)

    def body(group):
        config = dataclasses.replace(CONFIG, query_dtype=torch.bfloat16)
        with Workspace(group, config=config) as workspace:
            if workspace.rank == 1:
                arguments = {"query": queries[1]} | wrong
                raised = attempt(query_gather, arguments.pop("query"), workspace=workspace, **arguments)
                assert type(raised.error) is DcpInvalidArgument and raised.value is None, raised
                assert str(raised.error).startswith("query_gather: ") and raised.seconds < 5
                with pytest.raises(DcpInvalidArgument, match=text):
                    raise raised.error
            assert same_bits(
                query_gather(queries[workspace.rank], workspace=workspace), reference.query_gather(queries)
            )
            release_by_merge(workspace, 4)

    run_ranks(body, 2)


@pytest.mark.parametrize("name", ["out is the query", "out behind the query", "out is the view", "query is the view"])
def test_memory_that_overlaps(name):
    """Refused, with nothing written: a peer could be given bytes of either call."""
    (group,) = ThreadGroup.create(1)
    with Workspace(group, config=CONFIG) as workspace:
        memory = any_bits((5, 12, 40), torch.bfloat16)
        kept = memory.clone()
        view = query_gather(memory[:4], workspace=workspace)
        release_query(workspace=workspace)
        query, out = {
            "out is the query": (memory[:4], memory[:4]),
            "out behind the query": (memory[:4], memory[1:]),
            "out is the view": (memory[:4], view),
            "query is the view": (view, None),
        }[name]
        with pytest.raises(DcpInvalidArgument, match="query_gather: outputs must not share memory"):
            query_gather(query, workspace=workspace, out=out)
        assert same_bits(memory, kept) and same_bits(view, kept[:4])
        assert same_bits(query_gather(memory[1:], workspace=workspace), kept[1:])


@pytest.mark.parametrize("scale", [1e-60, 1e39], ids=str)
def test_a_scale_that_fp32_does_not_hold(scale):
    """0 or infinite as fp32, in which the division takes place."""
    (group,) = ThreadGroup.create(1)
    with Workspace(group, config=CONFIG) as workspace:
        raised = attempt(query_gather, GOOD.repeat(1, 2, 1), workspace=workspace, scale=scale)
        assert type(raised.error) is DcpInvalidArgument, raised


def test_a_workspace_without_queries():
    (group,) = ThreadGroup.create(1)
    with Workspace(group, config=WorkspaceConfig(12, 16, 16)) as workspace:
        for call in (lambda: query_gather(GOOD, workspace=workspace), lambda: release_query(workspace=workspace)):
            with pytest.raises(DcpUnsupported, match="must have been made with query_head_dim"):
                call()


def test_a_closed_workspace():
    (group,) = ThreadGroup.create(1)
    workspace = Workspace(group, config=CONFIG)
    query = GOOD.repeat(1, 2, 1)
    query_gather(query, workspace=workspace)
    release_query(workspace=workspace)
    workspace.close()
    for op, call in {
        "query_gather": lambda: query_gather(query, workspace=workspace),
        "release_query": lambda: release_query(workspace=workspace),
    }.items():
        with pytest.raises(DcpError, match=f"{op}: the workspace must be open"):
            call()


NO_WORKSPACES = pytest.mark.parametrize("workspace", [None, CONFIG, 1], ids=lambda workspace: type(workspace).__name__)


@NO_WORKSPACES
def test_what_is_no_workspace(workspace):
    with pytest.raises(DcpInvalidArgument, match=r"query_gather: workspace must be a dcpkernels\.Workspace"):
        query_gather(GOOD, workspace=workspace)


@NO_WORKSPACES
def test_what_is_no_workspace_of_release_query(workspace):
    with pytest.raises(DcpInvalidArgument, match=r"release_query: workspace must be a dcpkernels\.Workspace"):
        release_query(workspace=workspace)


@pytest.mark.parametrize("lane", [-1, 2, "0", None, [0]], ids=str)
def test_wrong_lanes_of_release_query(lane):
    (group,) = ThreadGroup.create(1)
    with (
        Workspace(group, config=CONFIG) as workspace,
        pytest.raises(DcpInvalidArgument, match="release_query: lane must be in"),
    ):
        release_query(workspace=workspace, lane=lane)
