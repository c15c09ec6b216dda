"""What the fuzz has found, case by case: each of these ended the process, or raised something that is no Dcp error, or was
refused when the call had been made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dcpkernels import (
    KVGatherPlan,
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
)
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.integrations import torch_ops
from dcpkernels.planner import find_model, plan_capacity
from tests.torture.fuzz_targets import BOTH, CAPACITY, DQ, E4M3, D, H, Stage
from tests.torture.fuzz_values import HashRaises, Wrapper, _fake

T = 3
DIRECT, COLLECTIVE = ("direct", BOTH), ("collective", BOTH)


def freed(*shape: int, offset: int = 0, left: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Its storage has `left` bytes, and it begins `offset` elements behind the start."""
    count = torch.Size(shape).numel()
    tensor = torch.ones(offset + count).to(dtype)[offset:].view(shape)
    tensor.untyped_storage().resize_(left)
    return tensor


@pytest.fixture(params=[DIRECT, COLLECTIVE], ids=["direct", "collective"])
def stage(request):
    made = Stage(*request.param)
    yield made
    made.check_works()
    made.workspace.close()


STRANGE = {
    "freed, from an offset": lambda *shape: freed(*shape, offset=64),
    "made smaller": lambda *shape: freed(*shape, left=64),
    "nested": lambda *shape: torch.nested.nested_tensor([torch.ones(shape[1:]).bfloat16()] * shape[0]),
    "jagged": lambda *shape: torch.nested.nested_tensor(
        [torch.ones(shape[1:]).bfloat16()] * shape[0], layout=torch.jagged
    ),
    "sparse": lambda *shape: torch.ones(shape).bfloat16().to_sparse(),
    "sparse rows": lambda *shape: torch.ones(shape).bfloat16().flatten(1).to_sparse_csr(),
    "fake": lambda *shape: _fake(torch.ones(shape), None),
    "functional": lambda *shape: torch._to_functional_tensor(torch.ones(shape).bfloat16()),
    "wrapper": lambda *shape: Wrapper(torch.ones(shape).bfloat16()),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_tensors_without_memory(stage, strange):
    """As an input or output of every op; also right after a call of an ordinary tensor of the same shape."""
    lse, workspace = torch.zeros(T, H), {"workspace": stage.workspace}
    a2a_lse_reduce(torch.ones(T, H, D).bfloat16(), lse, lse_base="e", **workspace)
    cache = torch.ones(5, 4, 32).to(E4M3)
    calls = [
        lambda: a2a_lse_reduce(strange(T, H, D), lse, lse_base="e", **workspace),
        lambda: a2a_lse_reduce(torch.ones(T, H, D).bfloat16(), lse, lse_base="e", out=strange(T, H, D), **workspace),
        lambda: query_gather(strange(T, H, DQ), **workspace),
        lambda: query_gather(torch.ones(T, H, DQ).bfloat16(), out=strange(T, H, DQ), **workspace),
        lambda: query_gather((torch.ones(T, H, 8).bfloat16(), strange(T, H, 16)), **workspace),
        lambda: kv_gather_start(strange(5, 4, 16), stage.plan, 0, **workspace),
    ]
    for call in calls:
        with pytest.raises(DcpInvalidArgument):
            call()
    # A start that was refused has started nothing: the next one does, and is the one to wait for.
    with pytest.raises(DcpInvalidArgument, match="none was started"):
        kv_gather_wait(stage.plan, 0, **workspace)
    kv_gather_start(cache, stage.plan, 0, **workspace)
    assert kv_gather_wait(stage.plan, 0, **workspace).float().eq(1).all()


def test_storage_that_shrinks_between_calls(stage):
    """The call before has checked this very tensor."""
    partial_out = torch.ones(T, H, D, dtype=torch.bfloat16)
    for num_bytes in (64, 0):
        a2a_lse_reduce(partial_out, torch.zeros(T, H), workspace=stage.workspace, lse_base="e")
        partial_out.untyped_storage().resize_(num_bytes)
        with pytest.raises(DcpInvalidArgument, match="partial_out must have memory of its own"):
            a2a_lse_reduce(partial_out, torch.zeros(T, H), workspace=stage.workspace, lse_base="e")
        partial_out.untyped_storage().resize_(T * H * D * 2)
        partial_out.fill_(1)


def test_a_view_that_lies_beyond_what_is_left_of_its_storage(stage):
    """Of the shape, strides and storage of one that was checked; it only begins further on. Whole rows, and rows that lie
    apart."""
    lse = torch.zeros(T, H)
    for width in (D, D + 8):
        rows = torch.ones(2 * T, H, width, dtype=torch.bfloat16)
        first, second = rows[:T, :, :D], rows[T:, :, :D]
        rows.untyped_storage().resize_(T * H * width * 2)
        a2a_lse_reduce(first, lse, workspace=stage.workspace, lse_base="e")
        with pytest.raises(DcpInvalidArgument, match="partial_out must have memory of its own"):
            a2a_lse_reduce(second, lse, workspace=stage.workspace, lse_base="e")
        rows.untyped_storage().resize_(2 * T * H * width * 2)
        second.fill_(1)
        a2a_lse_reduce(second, lse, workspace=stage.workspace, lse_base="e")
        # The first one again, with one byte left.
        rows.untyped_storage().resize_(1)
        with pytest.raises(DcpInvalidArgument, match="partial_out must have memory of its own"):
            a2a_lse_reduce(first, lse, workspace=stage.workspace, lse_base="e")


def test_results_that_no_memory_holds(stage):
    rows = torch.ones(1, H, D, dtype=torch.bfloat16).expand(2**32 - 1, H, D)
    lse = torch.zeros(1, H).expand(2**32 - 1, H)
    if torch.empty(0).new_empty(0).device.type == "cpu" and not too_large(rows):
        pytest.skip("this machine would make a result of half a terabyte")
    with pytest.raises(DcpError, match="a2a_lse_reduce: there must be memory for a result"):
        a2a_lse_reduce(rows, lse, workspace=stage.workspace, lse_base="e")


def too_large(rows: torch.Tensor) -> bool:
    try:
        torch.empty(rows.shape, dtype=rows.dtype)
    except RuntimeError:
        return True
    return False


def test_arguments_that_compare_to_arrays(stage):
    strings = np.array(["e", "2"])
    arguments = {"workspace": stage.workspace, "lse_base": "e"}
    for changed in ({"return_lse": strings}, {"lse_base": strings}, {"lane": HashRaises()}):
        with pytest.raises(DcpInvalidArgument):
            a2a_lse_reduce(torch.ones(T, H, D).bfloat16(), torch.zeros(T, H), **arguments | changed)
    for name in ("wire", "cuda_heap", "hip_handles", "cpu_isa"):
        with pytest.raises(DcpInvalidArgument, match=f"workspace: {name} must be"):
            WorkspaceConfig(H, D, CAPACITY, **{name: strings})
    with pytest.raises(DcpInvalidArgument, match="backend must be one of"):
        Workspace(stage.workspace._group, config=stage.config, backend=strings)
    with pytest.raises(DcpInvalidArgument, match="must be one of"):
        find_model(strings)


def test_a_scale_inside_of_out(stage):
    """It would be read when the rows before it have been written: another number."""
    memory = torch.zeros(2 * CAPACITY * H * DQ, dtype=torch.uint8)
    out = memory.view(E4M3).view(2 * CAPACITY, H, DQ)
    for place in (0, 3 * H * DQ, len(memory) - 4):
        scale = memory[place : place + 4].view(torch.float32).fill_(0.5)
        with pytest.raises(DcpInvalidArgument, match="share memory"):
            query = torch.ones(2 * CAPACITY, H, DQ).bfloat16()
            query_gather(query, workspace=stage.workspace, scale=scale, out=out)
    out = memory[: 8 * 32 * 2].view(torch.bfloat16).view(8, 32)
    scale = memory[64:68].view(torch.float32).fill_(0.5)
    with pytest.raises(DcpInvalidArgument, match="share memory"):
        cache = torch.ones(5, 4, 32).to(E4M3)
        kv_gather(cache, stage.plan, 0, workspace=stage.workspace, scale=scale, out=out)


def test_outputs_and_scales_in_buffers_of_the_gathers(stage):
    """Those of any lane and op: a view may be open there."""
    rows, lse, workspace = torch.ones(T, H, D).bfloat16(), torch.zeros(T, H), {"workspace": stage.workspace}
    query, cache = torch.ones(T, H, DQ).bfloat16(), torch.ones(5, 4, 32).to(E4M3)
    gathers = [memory for memory in stage.handed_out if memory.dtype is torch.uint8]
    assert len(gathers) == 3
    for memory in gathers:
        out, scale = memory[: T * H * D * 2].view(torch.bfloat16).view(T, H, D), memory[:4].view(torch.float32)
        lse_out = memory[: T * H * 4].view(torch.float32).view(T, H)
        assert len(memory) >= 512
        scale.fill_(0.5)
        for call in (
            lambda: a2a_lse_reduce(rows, lse, lse_base="e", out=out, **workspace),
            lambda: a2a_lse_reduce(rows, lse, lse_base="e", lse_out=lse_out, **workspace),
            lambda: query_gather(query[:1], out=memory[: H * DQ * 2].view(torch.bfloat16).view(1, H, DQ), **workspace),
            lambda: query_gather(query, scale=scale, **workspace),
            lambda: kv_gather(cache, stage.plan, 0, scale=scale, **workspace),
            lambda: kv_gather(memory[:320].view(E4M3).view(5, 4, 16), stage.plan, 0, **workspace),
        ):
            with pytest.raises(DcpInvalidArgument, match="must not share memory"):
                call()


def test_sizes_of_what_is_no_configuration():
    config = WorkspaceConfig(H, D, CAPACITY)
    with pytest.raises(DcpInvalidArgument, match="workspace: config must be a WorkspaceConfig"):
        Workspace.size(None, 2)
    for device in ("0", None, [1], 2**70):
        with pytest.raises(DcpInvalidArgument, match="workspace: device must name a torch device"):
            Workspace.size(config, 2, device)
    with pytest.raises(DcpInvalidArgument, match="plan: model must be a ModelSpec"):
        plan_capacity(1.5, tp=8, dcp=8, max_model_len=2**20, available_bytes=2**35)


PLAN = {"block_size": 4, "num_ranks": 1, "rank": 0, "chunk_size": 8}
NO_TABLES = {
    "a nested tensor": torch.nested.nested_tensor([torch.tensor([2, 0, 4]), torch.tensor([1])]),
    "a set": [{2, 0, 4}, [1]],
    "a dict": [{0: 2, 1: 0, 2: 4}, [1]],
    "text": ["204", [1]],
    "freed": [torch.tensor([2, 0, 4]), torch.tensor([1])],
    "no iterable": [object(), [1]],
}
freed_table = NO_TABLES["freed"][0]
freed_table.untyped_storage().resize_(0)


@pytest.mark.parametrize("tables", NO_TABLES.values(), ids=NO_TABLES)
def test_block_tables_that_are_none(tables):
    with pytest.raises(DcpInvalidArgument, match="kv_gather_plan: block_tables"):
        KVGatherPlan([11, 3], tables, **PLAN)


def test_lengths_in_freed_memory():
    one = torch.tensor([11])
    number = one[0]
    one.untyped_storage().resize_(0)
    for lens in (freed(2, dtype=torch.int64), [number, 3], freed(2, offset=8, dtype=torch.int64)):
        with pytest.raises(DcpInvalidArgument, match="kv_gather_plan: context_lens must have memory of its own"):
            KVGatherPlan(lens, [[2, 0, 4], [1]], **PLAN)


def test_plans_need_no_torch():
    """The check of tensors is for those who have it."""
    script = (
        "import sys, dcpkernels; sys.modules['torch'] = None\n"
        "from dcpkernels.kv_gather_plan import KVGatherPlan\n"
        f"print(KVGatherPlan([11, 3], [[2, 0, 4], [1]], **{PLAN}).total_rows)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "14", done.stderr


def test_a_lazily_negated_output_of_a_custom_op():
    """The dispatcher hands on a copy of it, and fails at the output that is None when the call has been made."""
    stage = Stage(*DIRECT)
    before = stage.state()
    out = torch._neg_view(torch.zeros(T, H, D, dtype=torch.bfloat16))
    with pytest.raises(DcpInvalidArgument, match="a2a_lse_reduce: out must hold its values as they are"):
        torch_ops.a2a_lse_reduce(
            torch.ones(T, H, D).bfloat16(), torch.zeros(T, H), workspace=stage.traceable, lse_base="e", out=out
        )
    query = torch._neg_view(torch.zeros(T, H, DQ, dtype=torch.bfloat16))
    with pytest.raises(DcpInvalidArgument, match="query_gather: out must hold its values as they are"):
        torch_ops.query_gather(torch.ones(T, H, DQ).bfloat16(), workspace=stage.traceable, out=query)
    assert stage.state() == before
    stage.workspace.close()


def test_meta_tensors_for_a_custom_op():
    """The dispatcher takes what stands for the op while code is traced: no call was made, and the result was whatever memory
    held."""
    stage = Stage(*DIRECT)
    before = stage.state()
    rows, lse, traceable = torch.ones(T, H, D).bfloat16(), torch.zeros(T, H), {"workspace": stage.traceable}
    query, cache = torch.ones(T, H, DQ).bfloat16(), torch.ones(5, 4, 32).to(E4M3)
    for call in (
        lambda: torch_ops.a2a_lse_reduce(rows.to("meta"), lse, lse_base="e", **traceable),
        lambda: torch_ops.a2a_lse_reduce(rows, lse.to("meta"), lse_base="e", **traceable),
        lambda: torch_ops.a2a_lse_reduce(rows, lse, lse_base="e", out=rows.to("meta"), **traceable),
        lambda: torch_ops.query_gather(query.to("meta"), **traceable),
        lambda: torch_ops.query_gather((query[..., :8], query[..., 8:].to("meta")), **traceable),
        lambda: torch_ops.query_gather(query, scale=torch.ones(1, device="meta"), **traceable),
        lambda: torch_ops.kv_gather(cache.to("meta"), stage.traced_plan, 0, **traceable),
        lambda: torch_ops.kv_gather(cache, stage.traced_plan, 0, scale=torch.ones(1, device="meta"), **traceable),
    ):
        with pytest.raises(DcpInvalidArgument, match="must be on the workspace's device"):
            call()
    assert stage.state() == before
    stage.workspace.close()
