"""A plugin of vLLM: decode context parallelism (DCP) on the ops of this package.

    DCPKERNELS_VLLM=1 vllm serve MODEL --tensor-parallel-size 8 --decode-context-parallel-size 8 --dcp-comm-backend a2a

vLLM loads `register`, an entry point of the group `vllm.general_plugins`, in each of its processes on a machine that has
dcpkernels installed. Without DCPKERNELS_VLLM it does nothing. With it, vLLM's choice of collectives for DCP finds ours:
the merge of MLA and of grouped-query attention, MLA's gather of the query and of chunked context, for both of
vLLM's --dcp-comm-backend. On CPUs, where vLLM has no DCP, it also adds what is missing (`vllm_cpu`).

It takes hold of private functions of vLLM, so it looks first whether they have the parameters that it knows (0.29 to
0.33). Where one differs nothing is replaced: one warning, and vLLM runs as without it. It never raises. docs/vllm.md
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

from dcpkernels import env
from dcpkernels.errors import DcpUnsupported
from dcpkernels.integrations import vllm_patch, vllm_versions
from dcpkernels.integrations.vllm_workspaces import Collectives

_log = logging.getLogger("vllm.dcpkernels")

_DCP = "vllm.v1.attention.ops.dcp"
_MERGE_PARAMETERS = "cp_attn_out cp_attn_lse cp_group ctx return_lse is_lse_base_on_e seq_lens query_start_loc"
# What is replaced or called, with the parameters that ours expects.
SIGNATURES = {
    "get_direct_dcp_a2a_workspace": "group device max_num_tokens heads_per_rank head_dim dtype num_ubatches",
    "get_direct_dcp_q_gather_workspace": (
        "group device max_num_tokens heads_per_rank head_dim dtype num_ubatches padded_num_heads"
    ),
    "get_direct_dcp_kv_gather_workspace": "group device max_gathered_tokens token_dim dtype num_ubatches",
    "dcp_a2a_lse_reduce": _MERGE_PARAMETERS,
    "cp_lse_ag_out_rs": _MERGE_PARAMETERS,
    "MLADCPManager.__init__": (
        "self vllm_config device num_heads query_head_dim output_head_dim query_dtype output_dtype "
        "padded_num_heads is_lse_base_on_e use_pcp"
    ),
    "DirectDCPA2AWorkspace.lse_reduce": "self partial_output partial_lse is_lse_base_on_e seq_lens query_start_loc",
    "DirectDCPQGatherWorkspace.gather": "self local_query",
    "DirectDCPKVGatherWorkspace.gather": "self gathered_kv local_kv",
}

# The one patch of this process; vLLM's modules, which it changes, exist once too.
_collectives: Collectives | None = None
_tried = False


def register() -> None:
    """Entry point `vllm.general_plugins`: puts our collectives in place of vLLM's, if DCPKERNELS_VLLM asks for it.

    Does nothing the second time. Never raises: an engine that cannot have ours starts with vLLM's own, and the log says why.
    """
    global _collectives, _tried
    if _tried:
        return
    _tried = True
    try:
        backend = env.vllm_backend()
        if backend is not None:
            _collectives = _patch(backend)
    except Exception as reason:  # vLLM calls this unguarded
        _log.warning("dcpkernels: vLLM is left as it is (%s)", reason)


def calls() -> dict[str, int]:
    """How many calls of each op vLLM has made in this process: {"query_gather": 48, "a2a_lse_reduce": 48, ...}."""
    counts = {} if _collectives is None else _collectives.num_calls
    return {op: counts.get(op, 0) for op in ("a2a_lse_reduce", "query_gather", "kv_gather")}


def close() -> None:
    """Closes the workspaces of this process's engine, before its process group goes. Collective. Only for processes that
    outlive an engine: at the end of a process there is nothing to do."""
    if _collectives is not None:
        _collectives.close()


# -- what is looked at before anything is replaced


def _patch(backend: str) -> Collectives:
    vllm = importlib.import_module("vllm")
    _check_version(getattr(vllm, "__version__", "unknown"))
    try:
        dcp = importlib.import_module(_DCP)
    except ImportError as error:
        raise DcpUnsupported(f"vllm: {_DCP} must be importable (got {error})") from error
    for name, expected in SIGNATURES.items():
        check_signature(dcp, name, expected)
    # All that may be missing comes first, so that nothing is changed where something is.
    lane = importlib.import_module("vllm.v1.worker.ubatching").dbo_current_ubatch_id
    is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    collectives = Collectives(backend, lane)
    if is_cpu:
        importlib.import_module("dcpkernels.integrations.vllm_cpu").register()
    vllm_patch.replace(dcp, collectives)
    return collectives


def _check_version(version: str) -> None:
    if not vllm_versions.is_known(version):
        raise DcpUnsupported(f"vllm: version must be {vllm_versions.RANGE} (got {version})")


def check_signature(module: Any, name: str, expected: str) -> None:
    """Raises DcpUnsupported unless `name`, as "function" or "Class.method", has the parameters that are expected; "*" stands
    before those that are passed by name only."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    where = f"{getattr(module, '__name__', module)}.{name}"
    if not callable(found):
        raise DcpUnsupported(f"vllm: {where} must exist (got none)")
    words: list[str] = []
    for parameter in inspect.signature(found).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name)
    parameters = " ".join(words)
    if parameters != expected:
        raise DcpUnsupported(f"vllm: {where} must have the parameters {expected} (got {parameters})")
