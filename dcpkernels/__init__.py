"""Fused collectives for decode context parallelism (DCP): one sequence's KV cache sharded by token over several ranks.

    workspace = dcpkernels.Workspace(group, device="cpu", config=dcpkernels.WorkspaceConfig(...))
    out = dcpkernels.a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e")

Importing this package loads no extension and no torch, touches no device and prints nothing: names are resolved at
their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcpkernels.errors import (
    DcpDeviceError,
    DcpError,
    DcpInvalidArgument,
    DcpMismatch,
    DcpPeerLost,
    DcpTimeout,
    DcpUnsupported,
)

if TYPE_CHECKING:
    from dcpkernels.config import WorkspaceConfig, WorkspaceSize
    from dcpkernels.kv_gather_plan import KVGatherPlan
    from dcpkernels.ops.a2a_lse_reduce import a2a_lse_reduce
    from dcpkernels.ops.kv_gather import kv_gather, kv_gather_start, kv_gather_wait
    from dcpkernels.ops.query_gather import query_gather, release_query
    from dcpkernels.workspace import Workspace

__version__ = "0.1.0"

_HOMES = {
    "KVGatherPlan": "dcpkernels.kv_gather_plan",
    "Workspace": "dcpkernels.workspace",
    "WorkspaceConfig": "dcpkernels.config",
    "WorkspaceSize": "dcpkernels.config",
    # Ops share their names with the modules under ops/; these are the functions.
    "a2a_lse_reduce": "dcpkernels.ops.a2a_lse_reduce",
    "kv_gather": "dcpkernels.ops.kv_gather",
    "kv_gather_start": "dcpkernels.ops.kv_gather",
    "kv_gather_wait": "dcpkernels.ops.kv_gather",
    "query_gather": "dcpkernels.ops.query_gather",
    "release_query": "dcpkernels.ops.query_gather",
}

__all__ = [
    "DcpDeviceError",
    "DcpError",
    "DcpInvalidArgument",
    "DcpMismatch",
    "DcpPeerLost",
    "DcpTimeout",
    "DcpUnsupported",
    "KVGatherPlan",
    "Workspace",
    "WorkspaceConfig",
    "WorkspaceSize",
    "__version__",
    "a2a_lse_reduce",
    "kv_gather",
    "kv_gather_start",
    "kv_gather_wait",
    "query_gather",
    "release_query",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dcpkernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
