"""Arguments that kv_gather, kv_gather_start and kv_gather_wait refuse: at once, with a typed error, and nothing has been
sent. The call put right works, and the peers have waited for it."""

from __future__ import annotations

import pytest
import torch

from dcpkernels import (
    KVGatherPlan,
    Workspace,
    WorkspaceConfig,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
)
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import attempt, meet, same_bits
from tests.gather_calls import Buffers, Context

E4M3 = torch.float8_e4m3fn
CONFIG = WorkspaceConfig(
    12, 8, 4, num_lanes=2, kv_chunk_rows=64, kv_dim=32, kv_dtype=E4M3, timeout_s=10.0, first_call_timeout_s=10.0
)
CONTEXT = Context((100, 33), 2, 32, E4M3)
CACHE = CONTEXT.caches[1]


def plan_of(rank=1, chunk_size=64, **fields):
    fields = {"block_size": 16, "num_ranks": 2, "interleave": 1} | fields
    return KVGatherPlan(CONTEXT.lens, CONTEXT.tables[1], rank=rank, chunk_size=chunk_size, **fields)


PLAN = plan_of()
WRONG = {
    "no plan": ({"plan": None}, r"plan must be a dcpkernels\.KVGatherPlan \(got NoneType\)"),
    "another rank's plan": ({"plan": CONTEXT.plan(0, 64)}, r"plan must be for rank 1 of 2 \(got 0 of 2\)"),
    "a plan of more ranks": ({"plan": plan_of(num_ranks=3)}, r"plan must be for rank 1 of 2 \(got 1 of 3\)"),
    "chunk_size": ({"plan": plan_of(chunk_size=65)}, r"plan\.chunk_size must be at most kv_chunk_rows=64 \(got 65\)"),
    "chunk_idx": ({"chunk_idx": 3}, r"chunk_idx must be .* below num_chunks=3 \(got 3\)"),
    "negative chunk_idx": ({"chunk_idx": -1}, r"chunk_idx must be at least 0 .*\(got -1\)"),
    "chunk_idx, no number": ({"chunk_idx": "0"}, "chunk_idx must be an integer"),
    "chunk_idx, a float": ({"chunk_idx": 0.0}, "chunk_idx must be an integer"),
    "None": ({"kv_cache": None}, "kv_cache must be a torch.Tensor"),
    "two dims": ({"kv_cache": CACHE[0]}, r"kv_cache must have shape .*block_size=16.*\(got \[16, 32\]\)"),
    "block_size": ({"kv_cache": CACHE[:, :15]}, r"kv_cache must have shape .*block_size=16"),
    "dtype": ({"kv_cache": CACHE.view(torch.uint8)}, r"kv_cache must be .*\(got uint8\)"),
    "last stride": ({"kv_cache": CACHE.transpose(1, 2).contiguous().transpose(1, 2)}, "kv_cache must have stride 1"),
    "row bytes": ({"kv_cache": CACHE[..., :24]}, r"multiple of 16 bytes, at most 32 .*\(got 24\)"),
    "no row bytes": ({"kv_cache": CACHE[..., :0]}, r"multiple of 16 bytes, at most 32 .*\(got 0\)"),
    "wide rows": ({"kv_cache": torch.zeros(*CACHE.shape[:2], 48).to(E4M3)}, r"at most 32 .*\(got 48\)"),
    "too few blocks": ({"kv_cache": CACHE[:2]}, "block_tables of the plan must stay below num_blocks=2"),
    "lane": ({"lane": 2}, r"lane must be in 0 \.\. 1"),
    "negative lane": ({"lane": -1}, r"lane must be in 0 \.\. 1"),
    "lane, no number": ({"lane": "0"}, r"lane must be in 0 \.\. 1"),
    "lane, no key": ({"lane": [0]}, r"lane must be in 0 \.\. 1"),
}
WRONG_OUTPUT = {
    "out alone": ({"out": torch.empty(64, 32, dtype=E4M3)}, "out must come with scale"),
    "scale of 0": ({"scale": 0}, "scale must be a positive number"),
    "negative scale": ({"scale": -0.5}, "scale must be a positive number"),
    "infinite scale": ({"scale": float("inf")}, "scale must be a positive number"),
    "NaN scale": ({"scale": float("nan")}, "scale must be a positive number"),
    "a bool": ({"scale": True}, "scale must be a positive number"),
    "scale's dtype": ({"scale": torch.ones(1).bfloat16()}, "scale must be float32"),
    "scale's size": ({"scale": torch.ones(0)}, "scale must have one element"),
    "shape of out": ({"scale": 1.0, "out": torch.empty(63, 32).bfloat16()}, r"out must have shape .* = \[64, 32\]"),
    "dtype of out": ({"scale": 1.0, "out": torch.empty(64, 32)}, r"out must be bfloat16 \(got float32\)"),
    "stride of out": ({"scale": 1.0, "out": torch.empty(32, 64).bfloat16().T}, "out must have stride 1"),
    "out on itself": (
        {"scale": 1.0, "out": torch.empty(1, 32).bfloat16().expand(64, 32)},
        "out must not overlap itself",
    ),
    "out, no tensor": ({"scale": 1.0, "out": 1}, "out must be a torch.Tensor"),
}
WRONG_TOGETHER = {
    "scale of e5m2fnuz": (
        {"scale": 1.0, "kv_cache": CACHE.view(torch.float8_e5m2fnuz)},
        r"kv_cache must be float8_e4m3fn or float8_e4m3fnuz where scale is given \(got float8_e5m2fnuz\)",
    ),
}


def refused(op, text, call, *args, **kwargs):
    raised = attempt(call, *args, **kwargs)
    assert type(raised.error) is DcpInvalidArgument and raised.value is None and raised.seconds < 5, raised
    with pytest.raises(DcpInvalidArgument, match=text):
        raise raised.error
    # An error of the plan's own carries the plan's name.
    assert str(raised.error).startswith((f"{op}: ", "kv_gather_plan: ")), raised.error


@pytest.mark.parametrize(
    "op, name",
    [("kv_gather", name) for name in WRONG | WRONG_OUTPUT | WRONG_TOGETHER]
    + [("kv_gather_start", name) for name in WRONG],
)
def test_a_refused_call_sends_nothing(op, name):
    """Rank 1's mistake raises there at once, and leaves the buffers as they are. Put right, the call works on all."""
    wrong, text = (WRONG | WRONG_OUTPUT | WRONG_TOGETHER)[name]

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = workspace.rank
            buffers = Buffers(group, workspace, "kv_gather")
            buffers.fill()
            if rank == 1:
                arguments = {"kv_cache": CACHE, "plan": PLAN, "chunk_idx": 0, "workspace": workspace} | wrong
                refused(op, text, kv_gather if op == "kv_gather" else kv_gather_start, **arguments)
            buffers.check()
            plan, cache = CONTEXT.plan(rank, 64), CONTEXT.caches[rank]
            for i in range(2):
                assert same_bits(kv_gather(cache, plan, i, workspace=workspace), CONTEXT.chunk(64, i))

    run_ranks(body, 2)


# -- the split form's own order


def test_wait_without_start():
    """Before any call, and after a plain one."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            plan, cache = CONTEXT.plan(workspace.rank, 64), CONTEXT.caches[workspace.rank]
            for _ in range(2):
                refused("kv_gather_wait", "none was started", kv_gather_wait, plan, 0, workspace=workspace)
                kv_gather(cache, plan, 0, workspace=workspace)

    run_ranks(body, 2)


def test_a_second_start_without_a_wait():
    """Of the next chunk, of the same, or a plain call; the one that was started is still good. Lanes have their own."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            plan, cache = CONTEXT.plan(workspace.rank, 64), CONTEXT.caches[workspace.rank]
            kv_gather_start(cache, plan, 0, workspace=workspace)
            text = "the chunk started before on lane 0 must be waited for first"
            for idx in (1, 0):
                refused("kv_gather_start", text, kv_gather_start, cache, plan, idx, workspace=workspace)
            refused("kv_gather", text, kv_gather, cache, plan, 1, workspace=workspace)
            assert same_bits(kv_gather(cache, plan, 2, workspace=workspace, lane=1), CONTEXT.chunk(64, 2))
            assert same_bits(kv_gather_wait(plan, 0, workspace=workspace), CONTEXT.chunk(64, 0))
            assert same_bits(kv_gather(cache, plan, 1, workspace=workspace), CONTEXT.chunk(64, 1))

    run_ranks(body, 2)


WRONG_WAITS = {
    "another chunk": {"chunk_idx": 1},
    "no chunk": {"chunk_idx": 7},
    "another lane": {"lane": 1},
    "no lane": {"lane": 5},
    "an equal plan": {"plan": "equal"},
    "no plan": {"plan": None},
    **{name: wrong for name, (wrong, _) in WRONG_OUTPUT.items()},
}


@pytest.mark.parametrize("name", WRONG_WAITS)
def test_a_refused_wait_can_be_put_right(name):
    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            plan, cache = CONTEXT.plan(workspace.rank, 64), CONTEXT.caches[workspace.rank]
            kv_gather_start(cache, plan, 0, workspace=workspace)
            if workspace.rank == 1:
                arguments = {"plan": plan, "chunk_idx": 0, "workspace": workspace} | WRONG_WAITS[name]
                if arguments["plan"] == "equal":
                    arguments["plan"] = CONTEXT.plan(1, 64)
                refused("kv_gather_wait", None, kv_gather_wait, **arguments)
            assert same_bits(kv_gather_wait(plan, 0, workspace=workspace), CONTEXT.chunk(64, 0))
            assert same_bits(kv_gather(cache, plan, 1, workspace=workspace), CONTEXT.chunk(64, 1))

    run_ranks(body, 2)


@pytest.mark.parametrize("wrong", [{"chunk_idx": 0.0}, {"chunk_idx": False}, {"lane": [0]}, {"lane": 0.0}], ids=str)
def test_a_wait_with_what_is_no_integer(wrong):
    """But equal to one, or of no hash. It is refused as in the other calls, and can be put right."""
    (group,) = ThreadGroup.create(1)
    context = Context((100, 33), 1, 32, E4M3)
    with Workspace(group, config=CONFIG) as workspace:
        plan = context.plan(0, 64)
        kv_gather_start(context.caches[0], plan, 0, workspace=workspace)
        arguments = {"plan": plan, "chunk_idx": 0, "workspace": workspace} | wrong
        refused("kv_gather_wait", "must be", kv_gather_wait, **arguments)
        assert same_bits(kv_gather_wait(plan, 0, workspace=workspace), context.chunk(64, 0))


def test_a_workspace_without_kv():
    (group,) = ThreadGroup.create(1)
    plan = Context((3,), 1, 32, E4M3).plan(0, 64)
    with Workspace(group, config=WorkspaceConfig(12, 16, 16)) as workspace:
        for call in (kv_gather, kv_gather_start):
            with pytest.raises(DcpUnsupported, match=rf"{call.__name__}: .*must have been made with kv_chunk_rows"):
                call(CACHE, plan, 0, workspace=workspace)


def test_a_closed_workspace():
    (group,) = ThreadGroup.create(1)
    context = Context((3,), 1, 32, E4M3)
    workspace, plan = Workspace(group, config=CONFIG), context.plan(0, 64)
    kv_gather_start(context.caches[0], plan, 0, workspace=workspace)
    workspace.close()
    for op, call in {
        "kv_gather": lambda ws: kv_gather(context.caches[0], plan, 0, workspace=ws),
        "kv_gather_start": lambda ws: kv_gather_start(context.caches[0], plan, 0, workspace=ws),
        "kv_gather_wait": lambda ws: kv_gather_wait(plan, 0, workspace=ws),
    }.items():
        with pytest.raises(DcpError, match=f"{op}: the workspace must be open"):
            call(workspace)
        with pytest.raises(DcpInvalidArgument, match=rf"{op}: workspace must be a dcpkernels\.Workspace"):
            call(None)


def test_closing_with_a_chunk_that_was_not_waited_for():
    """No call is in flight: it closes on all ranks, and a new workspace works."""

    def body(group):
        plan, cache = CONTEXT.plan(group.rank, 64), CONTEXT.caches[group.rank]
        for _ in range(2):
            workspace = Workspace(group, config=CONFIG)
            kv_gather(cache, plan, 0, workspace=workspace)
            kv_gather_start(cache, plan, 1, workspace=workspace)
            meet(group)
            closed = attempt(workspace.close)
            assert closed.error is None and closed.seconds < 5

    run_ranks(body, 2)
