"""What is fuzzed besides the ops: configurations and sizes, the making of a workspace, plans of gathers, layout, reference,
planner, handles of workspaces."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dcpkernels import KVGatherPlan, Workspace, WorkspaceConfig, _check, layout, reference
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.integrations import torch_ops
from dcpkernels.planner import find_model, gib, gib_as_printed, plan_capacity
from dcpkernels.testing import ThreadGroup
from tests.torture.fuzz_targets import BLOCK, BOTH, CHUNK, DKV, E4M3, LENS, TABLES, D, H, Target, plan_of

CONFIG = {
    "num_heads": H,
    "head_dim": D,
    "max_num_tokens": 4,
    "dtype": torch.bfloat16,
    "num_lanes": 1,
    "num_channels": 2,
    "zero_copy": False,
    "wire": "auto",
    "packet_bytes": 8,
    "padded_num_heads": 8,
    "query_dtype": torch.bfloat16,
    "multicast": True,
    "cuda_heap": "driver",
    "hip_handles": "auto",
    "timeout_s": 5.0,
    "first_call_timeout_s": 5.0,
    "cpu_isa": None,
    "start_epoch": 3,
    **BOTH,
}


def make_workspace(**arguments: Any) -> None:
    Workspace(**arguments).close()


def use_plan(chunk_idx: Any, of_rank: Any, **arguments: Any) -> None:
    """Makes a plan, and takes all of one chunk."""
    plan = KVGatherPlan(**arguments)
    if plan.chunk_size > 10**6 or plan.total_rows > 10**6:
        return  # right, and larger than a test machine
    plan.num_rows(chunk_idx), plan.segments(chunk_idx), plan.rank_rows(chunk_idx), plan.cu_rows(chunk_idx)
    plan.final_rows(chunk_idx, of_rank)
    rows = plan.source_rows(chunk_idx)
    assert ((0 <= rows) & (rows <= plan.max_source_row)).all(), "rows outside of every cache"


def positions(n: Any, **arguments: Any) -> None:
    if not isinstance(n, int) or n < 10**5:
        layout.local_positions(n, **arguments)


def small(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The reference is plain torch: left out are rows that only strides have, and freed memory, which torch itself reads."""

    def is_fit(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(is_fit, value))
        if not isinstance(value, torch.Tensor) or value.is_nested or value.layout is not torch.strided:
            return True
        if value.is_quantized:
            return False  # torch itself ends the process where its bytes are looked at
        try:
            _check.has_memory(name, "argument", value)
        except DcpInvalidArgument:
            return False
        return value.numel() <= 10**6

    def call(**arguments: Any) -> None:
        if all(map(is_fit, arguments.values())):
            function(**arguments)

    call.__name__ = name
    return call


def targets() -> list[Target]:
    (group,) = ThreadGroup.create(1)
    config = WorkspaceConfig(**CONFIG)
    model = find_model("kimi-k3")

    def plan(dice: random.Random) -> dict[str, Any]:
        tables = dice.choice([TABLES, [np.array(row) for row in TABLES], [torch.tensor(row) for row in TABLES]])
        lens = dice.choice([list(LENS), np.array(LENS), torch.tensor(LENS)])
        if dice.random() < 0.3:
            tables = torch.tensor([[2, 0, 4], [0, 0, 0], [1, 3, 0]])
        sizes = {"block_size": BLOCK, "num_ranks": 1, "rank": 0, "chunk_size": CHUNK, "interleave": 1}
        return {
            "context_lens": lens,
            "block_tables": tables,
            "chunk_idx": dice.choice([0, 1, 2]),
            "of_rank": 0,
            **sizes,
        }

    def merge(dice: random.Random) -> dict[str, Any]:
        arguments = {"partial_outs": torch.ones(2, 3, H, D), "partial_lses": torch.zeros(2, 3, H), "lse_base": "e"}
        if dice.random() < 0.5:
            arguments["seq_lens"] = torch.ones(2, 2, dtype=torch.int32)
            arguments["query_start_loc"] = torch.tensor([0, 1, 2], dtype=torch.int32)
        return arguments

    def gather(dice: random.Random) -> dict[str, Any]:
        return {"queries": [torch.ones(3, 2, D), torch.ones(3, 2, D)], "scale": dice.choice([None, 0.5])}

    def chunk(dice: random.Random) -> dict[str, Any]:
        caches = [torch.ones(5, BLOCK, DKV).to(E4M3)]
        sizes = {"chunk_size": CHUNK, "chunk_idx": 0, "interleave": 1, "scale": dice.choice([None, 0.5])}
        return {"kv_caches": caches, "context_lens": list(LENS), "block_tables": [TABLES], **sizes}

    def capacity(dice: random.Random) -> dict[str, Any]:
        return {"model": model, "tp": 8, "dcp": 8, "max_model_len": 2**20, "available_bytes": 2**35}

    def always(**arguments: Any) -> Callable[[random.Random], dict[str, Any]]:
        return lambda dice: dict(arguments)

    where = {"num_ranks": 3, "interleave": 2}
    return [
        Target("WorkspaceConfig", WorkspaceConfig, lambda dice: dict(CONFIG)),
        Target("WorkspaceConfig", WorkspaceConfig, lambda dice: dict(CONFIG)),
        Target(
            "WorkspaceConfig.for_engine",
            WorkspaceConfig.for_engine,
            always(max_num_seqs=3, draft_tokens=1, num_heads=H, head_dim=D, wire="packet"),
        ),
        Target("Workspace.size", Workspace.size, always(config=config, num_ranks=2, device="cpu")),
        Target("region_layout", config.region_layout, always(num_ranks=2)),
        Target(
            "Workspace",
            make_workspace,
            always(group=group, device="cpu", config=config, backend="auto", parallel_for=None),
        ),
        Target("KVGatherPlan", use_plan, plan),
        Target("KVGatherPlan", use_plan, plan),
        Target("layout.owner", layout.owner, always(p=5, **where)),
        Target("layout.local_slot", layout.local_slot, always(p=5, **where)),
        Target("layout.local_length", layout.local_length, always(n=9, rank=1, **where)),
        Target(
            "layout.local_lengths",
            lambda n, num_ranks, interleave: _lengths(n, num_ranks, interleave),
            always(n=9, **where),
        ),
        Target("layout.local_positions", positions, always(n=9, rank=1, **where)),
        Target("reference.a2a_lse_reduce", small("merge", reference.a2a_lse_reduce), merge, lenient=True),
        Target("reference.query_gather", small("gather", reference.query_gather), gather, lenient=True),
        Target("reference.kv_gather", small("chunk", reference.kv_gather), chunk, lenient=True),
        Target("plan_capacity", plan_capacity, capacity),
        Target("gib", gib, always(value="25.12", name="memory")),
        Target("gib_as_printed", gib_as_printed, always(text="25.12")),
        Target("find_model", find_model, always(name="kimi-k3")),
        Target("torch_ops.register", torch_ops.register, always(workspace=None)),
        Target("TraceableWorkspace", torch_ops.TraceableWorkspace, always(workspace=None)),
        Target("TraceablePlan", torch_ops.TraceablePlan, always(plan=plan_of())),
    ]


def _lengths(n: Any, num_ranks: Any, interleave: Any) -> None:
    if not isinstance(num_ranks, int) or num_ranks < 10**5:
        layout.local_lengths(n, num_ranks, interleave)
