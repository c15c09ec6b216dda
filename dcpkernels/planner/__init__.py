"""Capacity of a KV cache under decode context parallelism, before anything is started. Imports no torch.

    from dcpkernels.planner import find_model, gib, plan_capacity

    plan = plan_capacity(find_model("kimi-k3"), tp=8, dcp=8, max_model_len=2**20, available_bytes=gib("34.28"))
    plan.tokens, plan.concurrency

docs/planner.md has the formulas; `dcpkernels plan` is the same as a command."""

from __future__ import annotations

from dcpkernels.planner.cache_layout import CacheLayout, cache_layout
from dcpkernels.planner.capacity import Capacity, Decomposition, decompose, plan_capacity
from dcpkernels.planner.checks import gib, gib_as_printed
from dcpkernels.planner.memory import MemoryBudget, memory_budget, workspace_region
from dcpkernels.planner.models import MODELS, ModelSpec, find_model

__all__ = [
    "MODELS",
    "CacheLayout",
    "Capacity",
    "Decomposition",
    "MemoryBudget",
    "ModelSpec",
    "cache_layout",
    "decompose",
    "find_model",
    "gib",
    "gib_as_printed",
    "memory_budget",
    "plan_capacity",
    "workspace_region",
]
