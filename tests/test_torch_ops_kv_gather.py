"""kv_gather under torch.compile, as test_torch_ops.py has the other two: calls are counted on every rank."""

from __future__ import annotations

import gc

import pytest
import torch

import dcpkernels
from dcpkernels import Workspace
from dcpkernels.errors import DcpInvalidArgument, DcpUnsupported
from dcpkernels.integrations.torch_ops import TraceablePlan, TraceableWorkspace, kv_gather, query_gather
from dcpkernels.testing import run_ranks
from tests.a2a_calls import same_bits
from tests.torch_ops_calls import CHUNK_ROWS, CONFIG, HEADS, KV_DIM, QUERY_DIM, Rank, assert_same, compiled, run_cases

FP8 = torch.float8_e4m3fn


def buffer(num_rows=CHUNK_ROWS, dtype=torch.float32):
    return torch.full((num_rows, KV_DIM), -5.0, dtype=dtype)


def expected(rows, chunk_idx, scale=None):
    """What `buffer()` holds after the gather of a chunk."""
    chunk = rows[chunk_idx * CHUNK_ROWS : (chunk_idx + 1) * CHUNK_ROWS]
    out = buffer(dtype=rows.dtype if scale is None else torch.bfloat16)
    out[: len(chunk)] = chunk if scale is None else (chunk.float() * scale).to(torch.bfloat16)
    return out


# -- eager


def eager(group):
    with Workspace(group, config=CONFIG) as workspace:
        rank = Rank(workspace)
        cache, plan, rows = rank.context()
        traceable_plan = TraceablePlan(plan)
        for lane in (0, 1):
            for chunk_idx in (0, 1):
                out = buffer()
                found, calls = rank.counted(
                    lambda out=out, i=chunk_idx, lane=lane: kv_gather(
                        cache, traceable_plan, i, workspace=rank.traceable, out=out, lane=lane
                    )
                )
                assert calls == [1, lane == 0, lane == 1] and found is out and same_bits(out, expected(rows, chunk_idx))
                assert same_bits(
                    out[: plan.num_rows(chunk_idx)],
                    dcpkernels.kv_gather(cache, plan, chunk_idx, workspace=workspace, lane=lane),
                )
        found = kv_gather(cache, traceable_plan, 1, workspace=rank.traceable)
        assert found.shape == (CHUNK_ROWS, KV_DIM) and same_bits(found[:11], rows[12:])
        # Another plan, in fp8 with scales.
        for dtype in (FP8, torch.float8_e4m3fnuz):
            cache, plan, rows = rank.context((5, 1), dtype)
            traceable_plan.set(plan)
            for scale in (0.5, torch.tensor([0.5])):
                out = buffer(dtype=torch.bfloat16)
                kv_gather(cache, traceable_plan, 0, workspace=rank.traceable, scale=scale, out=out)
                assert same_bits(out, expected(rows, 0, 0.5))
            assert kv_gather(cache, traceable_plan, 0, workspace=rank.traceable).dtype is dtype


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_eager_calls_are_those_of_the_function(num_ranks):
    run_ranks(eager, num_ranks)


def test_opcheck():
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = Rank(workspace)
            cache, plan, _ = rank.context()
            traceable, plan = rank.traceable, TraceablePlan(plan)
            arguments = (cache, plan.handle, buffer(), traceable.state, traceable.handle, 1)
            torch.library.opcheck(torch.ops.dcpkernels.kv_gather, arguments, {"lane": 1})

    run_ranks(body, 1)


# -- compiled


def two_equal_kv_gathers_into_one_tensor(rank):
    cache, plan, rows = rank.context()
    plan = TraceablePlan(plan)

    @compiled
    def function(cache, out):
        for _ in range(2):
            rank.traceable.kv_gather(cache, plan, 1, out=out)

    out = buffer()
    _, calls = rank.counted(function, cache, out)
    assert calls == [2, 2, 0]
    assert same_bits(out, expected(rows, 1))


def two_equal_kv_gathers_where_gradients_flow(rank):
    cache, plan, rows = rank.context()
    plan, weight = TraceablePlan(plan), torch.rand(CHUNK_ROWS, KV_DIM).requires_grad_()

    @compiled
    def function(cache, weight):
        first, second = (rank.traceable.kv_gather(cache, plan, 0, lane=1) for _ in range(2))
        return (first - 2 * second) * weight

    found, calls = rank.counted(function, cache, weight)
    assert calls == [2, 0, 2]
    assert same_bits(found.detach(), -rows[:CHUNK_ROWS] * weight.detach())


def an_unused_kv_gather(rank):
    cache, plan, _ = rank.context()
    plan = TraceablePlan(plan)

    @compiled
    def function(cache):
        rank.traceable.kv_gather(cache, plan, 0, lane=1)
        return cache + 1

    found, calls = rank.counted(function, cache)
    assert calls == [1, 0, 1]
    assert same_bits(found, cache + 1)


def in_place_after_a_kv_gather(rank):
    """And before one: a step writes its new rows into the cache."""
    cache, plan, rows = rank.context()
    plan = TraceablePlan(plan)

    @compiled
    def function(cache):
        cache.mul_(2)
        first = kv_gather(cache, plan, 0, workspace=rank.traceable)
        first.add_(1)
        second = kv_gather(cache, plan, 0, workspace=rank.traceable)
        cache.zero_()
        return first, second

    found, calls = rank.counted(function, cache)
    assert calls == [2, 2, 0]
    chunk = 2 * rows[:CHUNK_ROWS]
    assert_same(found, (chunk + 1, chunk))
    assert not cache.any()


def steps_without_recompilation(rank):
    """Plans of other lengths and tables, behind a query_gather; as many calls as the graph has chunks."""
    query, cache = rank.query(), torch.zeros(16, 4, KV_DIM)
    traceable_plan = TraceablePlan(rank.context()[1])

    @compiled
    def function(query, cache, out):
        gathered = query_gather(query, workspace=rank.traceable)
        for chunk_idx in range(2):
            kv_gather(cache, traceable_plan, chunk_idx, workspace=rank.traceable, out=out[chunk_idx])
        return gathered

    def check(lens):
        blocks, plan, rows = rank.context(lens)
        cache[: blocks.shape[0]] = blocks
        traceable_plan.set(plan)
        out = torch.stack([buffer(), buffer()])
        gathered, calls = rank.counted(function, query, cache, out)
        assert calls == [3, 3, 0]
        assert same_bits(gathered, rank.gathered(query))
        assert_same(list(out), [expected(rows, i) for i in range(2)])

    check((9, 0, 14))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lens in ((13,), (1, 5, 1, 10), (24, 0), (9, 0, 14)):
            check(lens)


def kv_gather_with_a_scale(rank):
    cache, plan, rows = rank.context((9, 14), FP8)
    plan = TraceablePlan(plan)

    @compiled
    def function(cache, scale):
        first = rank.traceable.kv_gather(cache, plan, 0, scale=0.5)
        return first, rank.traceable.kv_gather(cache, plan, 0, scale=scale)

    found, calls = rank.counted(function, cache, torch.tensor([0.25]))
    assert calls == [2, 2, 0]
    assert_same(found, [expected(rows, 0, scale) for scale in (0.5, 0.25)])


CASES = [
    two_equal_kv_gathers_into_one_tensor,
    two_equal_kv_gathers_where_gradients_flow,
    an_unused_kv_gather,
    in_place_after_a_kv_gather,
    steps_without_recompilation,
    kv_gather_with_a_scale,
]


@pytest.fixture(scope="module", params=[3], ids=lambda num_ranks: f"{num_ranks} ranks")
def wrong(request, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("inductor"))
    return run_ranks(run_cases, request.param, CASES, cache, mode="process", timeout_s=300)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_compiled(wrong, case):
    assert [rank.get(case) for rank in wrong] == [None] * len(wrong)


# -- what is refused


def test_wrong_arguments():
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = Rank(workspace)
            cache, plan, _ = rank.context()
            traceable, traceable_plan = rank.traceable, TraceablePlan(plan)

            def refuse(text, *arguments, **keywords):
                with pytest.raises(DcpInvalidArgument, match=f"^kv_gather: {text}"):
                    kv_gather(*arguments, workspace=traceable, **keywords)

            with pytest.raises(DcpInvalidArgument, match="^TraceablePlan: plan must be a dcpkernels.KVGatherPlan"):
                TraceablePlan(3)
            refuse(
                r"out must have shape \[11 or more, 16\] \(got \[10, 16\]\)", cache, traceable_plan, 1, out=buffer(10)
            )
            refuse("out must have shape", cache, traceable_plan, 0, out=buffer().t())
            refuse("out must have kv_cache's dtype", cache, traceable_plan, 0, out=buffer(dtype=torch.bfloat16))
            refuse(
                "kv_cache must be float8_e4m3fn or float8_e4m3fnuz where scale is given",
                cache,
                traceable_plan,
                0,
                scale=0.5,
            )
            refuse("lane must be in 0 .. 1", cache, traceable_plan, 0, lane=2)
            with pytest.raises(DcpInvalidArgument, match="chunk_idx must be at least 0 and below num_chunks=2"):
                kv_gather(cache, traceable_plan, 2, workspace=traceable)
            op, out = torch.ops.dcpkernels.kv_gather, buffer()
            with pytest.raises(DcpInvalidArgument, match=r"^kv_gather: plan must be an int64 tensor \[1\]"):
                op(cache, torch.zeros(2), out, traceable.state, traceable.handle, 0)
            with pytest.raises(DcpInvalidArgument, match="^kv_gather: scale must be a number or a tensor"):
                op(cache, traceable_plan.handle, out, traceable.state, traceable.handle, 0, 0.5, torch.tensor([0.5]))
            old = traceable_plan.handle.clone()
            traceable_plan.set(rank.context((3,))[1])
            assert not torch.equal(old, traceable_plan.handle)
            workspace._chunks.clear()  # what the workspace remembers of the plan it was used with last
            del plan
            gc.collect()
            with pytest.raises(
                DcpInvalidArgument, match="must be that of a plan which still exists .got 1?.*never given"
            ):
                op(cache, old, out, traceable.state, traceable.handle, 0)
            assert traceable.state.tolist() == [0, 0] and workspace.stats()["num_calls"] == 0
        config = dcpkernels.WorkspaceConfig(HEADS, 16, 8, query_head_dim=QUERY_DIM)
        with Workspace(group, config=config) as workspace, pytest.raises(DcpUnsupported, match="kv_chunk_rows"):
            kv_gather(cache, traceable_plan, 0, workspace=TraceableWorkspace(workspace))

    run_ranks(body, 1)
