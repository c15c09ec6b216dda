"""The ops under torch.compile: results are those of the eager functions, and every call that is written is made, once,
in order, on every rank.

What is compiled runs in processes, all cases of a group in one go: most of the time is Inductor's. A case that fails on
a rank is reported by its own test.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcpkernels
from dcpkernels import Workspace
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.integrations import torch_ops
from dcpkernels.integrations.torch_ops import TraceableWorkspace, a2a_lse_reduce, query_gather
from dcpkernels.testing import run_ranks
from tests.a2a_calls import same_bits
from tests.torch_ops_calls import (
    CONFIG,
    DIM,
    HEADS,
    INDUCTOR,
    QUERY_DIM,
    TOKENS,
    Rank,
    assert_same,
    compiled,
    run_cases,
)

ROOT = Path(__file__).parents[1]
RANKS = [1, 2, 3]


# -- eager: the op is the function


def eager(group):
    with Workspace(group, config=CONFIG) as workspace:
        rank = Rank(workspace)
        traceable = rank.traceable
        for num_tokens in (0, 1, 4, TOKENS, 2 * TOKENS + 1):
            partials, query = rank.partials(num_tokens, seed=num_tokens), rank.query(num_tokens, seed=num_tokens)
            for lane in (0, 1):
                for arguments in ({}, {"return_lse": True}, {"return_lse": True, **rank.lengths(num_tokens)}):
                    for lse_base in ("e", "2"):
                        asked = {"lse_base": lse_base, "lane": lane, **arguments}
                        found = a2a_lse_reduce(*partials, workspace=traceable, **asked)
                        expected = rank.merged(*partials, **asked)
                        assert_same(*((f,) if isinstance(f, torch.Tensor) else f for f in (found, expected)))
                parts = [rank.query(num_tokens, dim, seed=dim) for dim in (32, 8)]
                for asked, scale in ((query, None), (parts, None), (tuple(parts), 0.5), (query, torch.tensor([0.25]))):
                    found = query_gather(asked, workspace=traceable, scale=scale, lane=lane)
                    assert found.dtype == (torch.float32 if scale is None else torch.float8_e4m3fn)
                    out = torch.empty_like(found)
                    dcpkernels.query_gather(asked, workspace=workspace, scale=scale, out=out, lane=lane)
                    assert same_bits(found, out)
                    if num_tokens <= TOKENS:
                        assert same_bits(found, rank.gathered(asked, scale=scale, lane=lane))
        # Tensors of the caller's are the ones that are written and returned.
        partials, query = rank.partials(), rank.query()
        out, lse_out = torch.empty(4, workspace.num_local_heads, DIM), torch.empty(4, workspace.num_local_heads)
        found = a2a_lse_reduce(*partials, workspace=traceable, lse_base="e", out=out, lse_out=lse_out)
        assert found[0] is out and found[1] is lse_out
        assert_same(found, rank.merged(*partials, return_lse=True))
        out = torch.empty(4, HEADS, QUERY_DIM)
        assert query_gather(query, workspace=traceable, out=out) is out and same_bits(out, rank.gathered(query))
        # Not differentiable, as the functions.
        found = a2a_lse_reduce(partials[0].requires_grad_(), partials[1], workspace=traceable, lse_base="e")
        assert not found.requires_grad
        with torch.inference_mode():
            query_gather(query, workspace=traceable)


def quantised(group):
    """To what the workspace's query_dtype says, or an `out`."""
    for dtype, to in ((torch.float8_e4m3fnuz, torch.float8_e4m3fnuz), (torch.float8_e5m2fnuz, torch.float8_e4m3fn)):
        with Workspace(group, config=dataclasses.replace(CONFIG, query_dtype=dtype)) as workspace:
            rank = Rank(workspace)
            query = rank.query()
            found = query_gather(query, workspace=rank.traceable, scale=0.01)
            assert found.dtype is to and same_bits(found, rank.gathered(query, scale=0.01))
            for other in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
                out, expected = (torch.empty(4, HEADS, QUERY_DIM, dtype=other) for _ in range(2))
                query_gather(query, workspace=rank.traceable, scale=0.01, out=out)
                assert same_bits(out, dcpkernels.query_gather(query, workspace=workspace, scale=0.01, out=expected))


def test_what_a_query_is_quantised_to():
    run_ranks(quantised, 2)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_eager_calls_are_those_of_the_functions(num_ranks):
    run_ranks(eager, num_ranks)


def test_opcheck():
    """torch's own: the schema says what is written, shapes are known without running, functionalisation is right."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = Rank(workspace)
            state, handle = rank.traceable.state, rank.traceable.handle
            partials, out, lse = rank.partials(), torch.empty(4, HEADS, DIM), torch.empty(4, HEADS)
            op = torch.ops.dcpkernels.a2a_lse_reduce
            torch.library.opcheck(op, (*partials, out, None, state, handle, "e"), {"lane": 1})
            arguments = (*partials, out, lse, state, handle, "2", *rank.lengths(4).values(), 1)
            torch.library.opcheck(op, arguments)
            op = torch.ops.dcpkernels.query_gather
            parts = [rank.query(head_dim=dim) for dim in (32, 8)]
            torch.library.opcheck(op, (parts, torch.empty(4, HEADS, QUERY_DIM), state, handle))
            out = torch.empty(4, HEADS, QUERY_DIM, dtype=torch.float8_e4m3fn)
            # The others compare tensors by a function that torch has not for fp8.
            tests = ("test_faketensor", "test_autograd_registration")
            torch.library.opcheck(op, (parts, out, state, handle, 0.5), test_utils=tests)

    run_ranks(body, 1)


# -- compiled: cases, each run by all ranks of a group


def two_equal_merges(rank):
    partials = rank.partials()

    @compiled
    def function(partial_out, partial_lse):
        first = a2a_lse_reduce(partial_out, partial_lse, workspace=rank.traceable, lse_base="e")
        return first, a2a_lse_reduce(partial_out, partial_lse, workspace=rank.traceable, lse_base="e")

    expected = rank.merged(*partials)
    for _ in range(2):
        found, calls = rank.counted(function, *partials)
        assert calls == [2, 2, 0]
        assert_same(found, (expected, expected))
        assert found[0].data_ptr() != found[1].data_ptr()


def two_equal_calls_into_one_tensor(rank):
    """Where even the output is the same."""
    partials, query = rank.partials(), rank.query()

    @compiled
    def function(partial_out, partial_lse, query, merged, gathered):
        for _ in range(2):
            rank.traceable.a2a_lse_reduce(partial_out, partial_lse, lse_base="e", out=merged, lane=1)
        for _ in range(2):
            rank.traceable.query_gather(query, out=gathered)

    outs = torch.empty(4, HEADS // rank.num_ranks, DIM), torch.empty(4, HEADS, QUERY_DIM)
    _, calls = rank.counted(function, *partials, query, *outs)
    assert calls == [4, 2, 2]
    assert_same(outs, (rank.merged(*partials), rank.gathered(query)))


def two_equal_gathers(rank):
    query = rank.query()

    @compiled
    def function(query):
        return query_gather(query, workspace=rank.traceable), query_gather(query, workspace=rank.traceable)

    found, calls = rank.counted(function, query)
    assert calls == [2, 2, 0]
    assert_same(found, [rank.gathered(query)] * 2)


def two_equal_calls_where_gradients_flow(rank):
    """Only here does torch merge what is equal: in graphs that it splits into forward and backward. Results that are
    returned it leaves alone, so these are used up."""
    partials, query = rank.partials(kind="spread"), rank.query()
    shapes = (4, HEADS // rank.num_ranks, DIM), (4, HEADS, QUERY_DIM)
    weights = [torch.rand(*shape).requires_grad_() for shape in shapes]

    @compiled
    def function(partial_out, partial_lse, query, *weights):
        merged = [rank.traceable.a2a_lse_reduce(partial_out, partial_lse, lse_base="e") for _ in range(2)]
        gathered = [rank.traceable.query_gather(query, lane=1) for _ in range(2)]
        return (merged[0] - 2 * merged[1]) * weights[0], (gathered[0] - 2 * gathered[1]) * weights[1]

    found, calls = rank.counted(function, *partials, query, *weights)
    assert calls == [4, 2, 2]
    merged, gathered = rank.merged(*partials), rank.gathered(query)
    assert_same([part.detach() for part in found], [-merged * weights[0].detach(), -gathered * weights[1].detach()])
    sum(part.sum() for part in found).backward()
    assert_same([weight.grad for weight in weights], (-merged, -gathered))


def unused_results(rank):
    partials, query = rank.partials(), rank.query()

    @compiled
    def function(partial_out, partial_lse, query):
        rank.traceable.a2a_lse_reduce(partial_out, partial_lse, lse_base="2", return_lse=True)
        rank.traceable.query_gather(query, lane=1)
        return partial_out + 1

    found, calls = rank.counted(function, *partials, query)
    assert calls == [2, 1, 1]
    assert torch.equal(found.nan_to_num(), (partials[0] + 1).nan_to_num())


def in_place_after_a_gather(rank):
    query, partials = rank.query(), rank.partials()

    @compiled
    def function(query, partial_out, partial_lse):
        first = query_gather(query, workspace=rank.traceable)
        first.add_(1)
        second = query_gather(query, workspace=rank.traceable)
        merged = a2a_lse_reduce(partial_out, partial_lse, workspace=rank.traceable, lse_base="e")
        merged.mul_(2)
        query.zero_()  # behind the calls that read it
        return first, second, merged

    expected, merged = rank.gathered(query), rank.merged(*partials)
    found, calls = rank.counted(function, query, *partials)
    assert calls == [3, 3, 0]
    assert_same(found, (expected + 1, expected, merged * 2))
    assert not query.any()


def order(rank, lane):
    """Of calls that have nothing in common but `state`. In the opposite order they would need less memory: `doubled`
    could go before `gathered` comes."""
    num_tokens = 8 * TOKENS
    partials, query, names = rank.partials(num_tokens), rank.query(num_tokens), []

    @compiled
    def function(partial_out, partial_lse, query):
        doubled = partial_out * 2
        gathered = query_gather(query, workspace=rank.traceable)
        return gathered, a2a_lse_reduce(doubled, partial_lse, workspace=rank.traceable, lse_base="e", lane=lane)

    def noted(name, call):
        return lambda *arguments, **keywords: names.append(name) or call(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("query_gather", "a2a_lse_reduce"):
            patch.setattr(dcpkernels, name, noted(name, getattr(dcpkernels, name)))
        found, calls = rank.counted(function, *partials, query)
    assert names == ["query_gather", "a2a_lse_reduce"]
    assert calls == ([2, 2, 0] if lane == 0 else [2, 1, 1])
    out = torch.empty_like(found[0])
    dcpkernels.query_gather(query, workspace=rank.workspace, out=out)
    assert_same(found, (out, rank.merged(partials[0] * 2, partials[1])))


def order_on_a_lane(rank):
    order(rank, 0)


def order_of_lanes(rank):
    order(rank, 1)


def any_number_of_tokens(rank):
    @compiled
    def function(partial_out, partial_lse, latent, rope, seq_lens, query_start_loc):
        merged = rank.traceable.a2a_lse_reduce(
            partial_out, partial_lse, lse_base="e", return_lse=True, seq_lens=seq_lens, query_start_loc=query_start_loc
        )
        gathered = rank.traceable.query_gather((latent * 2, rope), lane=1)
        return (*merged, gathered)

    def check(num_tokens):
        partials, lengths = rank.partials(num_tokens, seed=num_tokens), rank.lengths(num_tokens)
        latent, rope = rank.query(num_tokens, 32, seed=1), rank.query(num_tokens, 8, seed=2)
        for tensor in (*partials, latent, rope, *lengths.values()):
            torch._dynamo.mark_dynamic(tensor, 0)
        found, calls = rank.counted(function, *partials, latent, rope, *lengths.values())
        assert calls == [2, 1, 1]
        out = torch.empty(num_tokens, HEADS, QUERY_DIM)
        dcpkernels.query_gather((latent * 2, rope), workspace=rank.workspace, out=out)
        assert_same(found, (*rank.merged(*partials, return_lse=True, **lengths), out))

    check(5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (7, 3, TOKENS, 2 * TOKENS + 1, 5):
            check(num_tokens)


def scales(rank):
    query, scale = rank.query(), torch.tensor([0.25])

    @compiled
    def function(query, scale):
        first = rank.traceable.query_gather(query, scale=0.5)
        return first, rank.traceable.query_gather(query, scale=scale)

    found, calls = rank.counted(function, query, scale)
    assert calls == [2, 2, 0]
    assert_same(found, (rank.gathered(query, scale=0.5), rank.gathered(query, scale=0.25)))


def a_closed_workspace(rank):
    """The last case."""
    query = rank.query()
    function = compiled(lambda query: rank.traceable.query_gather(query))
    function(query)
    rank.workspace.close()
    with pytest.raises(DcpError, match=r"^query_gather: the workspace must be open \(it was closed\)$"):
        function(query)


CASES = [
    two_equal_merges,
    two_equal_calls_into_one_tensor,
    two_equal_gathers,
    two_equal_calls_where_gradients_flow,
    unused_results,
    in_place_after_a_gather,
    order_on_a_lane,
    order_of_lanes,
    any_number_of_tokens,
    scales,
    a_closed_workspace,
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="module", params=RANKS, ids=lambda num_ranks: f"{num_ranks} ranks")
def wrong(request, cache):
    return run_ranks(run_cases, request.param, CASES, cache, mode="process", timeout_s=300)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_compiled(wrong, case):
    assert [rank.get(case) for rank in wrong] == [None] * len(wrong)


# -- handles


def test_handles():
    def body(group):
        first, second = (Workspace(group, config=CONFIG) for _ in range(2))
        handles = torch_ops.register(first), torch_ops.register(second)
        assert handles[0] != handles[1]
        assert torch_ops.register(first) == handles[0] == TraceableWorkspace(first).handle
        rank = Rank(second)
        out, state = torch.empty(4, HEADS, QUERY_DIM), rank.traceable.state

        def gather(handle, state=state):
            torch.ops.dcpkernels.query_gather([rank.query()], out, state, handle)

        def merge(handle):
            merged = torch.empty(4, HEADS, DIM)
            torch.ops.dcpkernels.a2a_lse_reduce(*rank.partials(), merged, None, state, handle, "e")

        gather(handles[0])
        # Importing once more leaves handles good, and the ops as they are.
        importlib.reload(torch_ops)
        gather(handles[0])
        merge(handles[0])
        assert state.tolist() == [3, 0] and torch_ops.register(first) == handles[0]
        first.close()
        for call, name in ((gather, "query_gather"), (merge, "a2a_lse_reduce")):
            with pytest.raises(DcpError, match=rf"^{name}: the workspace must be open"):
                call(handles[0])
        del first
        gc.collect()
        for handle in (handles[0], 10**6):
            for call, name in ((gather, "query_gather"), (merge, "a2a_lse_reduce")):
                with pytest.raises(DcpInvalidArgument, match=rf"^{name}: handle must be .* \(got {handle}: never"):
                    call(handle)
        assert state.tolist() == [3, 0]
        with pytest.raises(DcpInvalidArgument, match=r"^query_gather: state must be an int64 tensor \[num_lanes\] = "):
            gather(handles[1], torch.zeros(2))
        assert torch_ops.register(Workspace(group, config=CONFIG)) not in handles
        second.close()

    run_ranks(body, 1)


def test_wrong_arguments():
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = Rank(workspace)
            with pytest.raises(DcpInvalidArgument, match=r"^register: workspace must be a dcpkernels.Workspace \(got"):
                TraceableWorkspace(rank.traceable)
            for lane in (-1, 2):
                with pytest.raises(DcpInvalidArgument, match=r"^query_gather: lane must be in 0 .. 1 \(num_lanes=2\)"):
                    query_gather(rank.query(), workspace=rank.traceable, lane=lane)
            with pytest.raises(DcpInvalidArgument, match=r"^query_gather: query must have parts \(got 0\)"):
                query_gather([], workspace=rank.traceable)
            with pytest.raises(DcpInvalidArgument, match=r"^query_gather: query must have query_head_dim=40 "):
                query_gather(rank.query(head_dim=8), workspace=rank.traceable)
            with pytest.raises(DcpInvalidArgument, match=r'^a2a_lse_reduce: lse_base must be "e" or "2" '):
                a2a_lse_reduce(*rank.partials(), workspace=rank.traceable, lse_base="10")
            out, state = torch.empty(4, HEADS, QUERY_DIM), rank.traceable.state
            two_scales = ([rank.query()], out, state, rank.traceable.handle)
            with pytest.raises(DcpInvalidArgument, match="^query_gather: scale must be a number or a tensor"):
                torch.ops.dcpkernels.query_gather(*two_scales, 0.5, torch.tensor([0.5]))

    run_ranks(body, 1)


def test_the_example_of_the_docs(tmp_path):
    page = (ROOT / "docs/torch_compile.md").read_text()
    (example, _), (printed,) = (  # the second one: test_compiled_step.py
        re.findall(rf"^```{kind}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) for kind in ("python", "text")
    )
    file = tmp_path / "compiled.py"
    file.write_text(example)
    environment = {**INDUCTOR, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, file],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr[-4000:]


def test_the_package_registers_nothing():
    script = """if True:
        import sys
        import dcpkernels
        assert "torch" not in sys.modules
        dcpkernels.Workspace, dcpkernels.a2a_lse_reduce, dcpkernels.query_gather
        import dcpkernels.integrations, torch
        assert "dcpkernels.integrations.torch_ops" not in sys.modules
        assert not [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dcpkernels::")]
        import dcpkernels.integrations.torch_ops
        names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dcpkernels::")]
        assert sorted(names) == [f"dcpkernels::{op}" for op in ("a2a_lse_reduce", "kv_gather", "query_gather")], names
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
