"""A stand-in for what dcpkernels.integrations.vllm takes hold of in vLLM, with the signatures of 0.29 to 0.33, for tests in
an environment without it. tests/vllm runs the engine itself.

Its own collectives answer with "vllm's ..." and send nothing, so a test sees who was called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from dcpkernels.testing import ThreadGroup


class FakeGroup:
    """A GroupCoordinator of thread ranks."""

    def __init__(self, group: ThreadGroup) -> None:
        self.cpu_group = group
        self.rank_in_group, self.world_size = group.rank, group.num_ranks


def get_direct_dcp_a2a_workspace(group, device, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches):
    return None


def get_direct_dcp_q_gather_workspace(
    group, device, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches, padded_num_heads=None
):
    return None


def get_direct_dcp_kv_gather_workspace(group, device, max_gathered_tokens, token_dim, dtype, num_ubatches):
    return None


def dcp_a2a_lse_reduce(
    cp_attn_out,
    cp_attn_lse,
    cp_group,
    ctx=None,
    return_lse=False,
    is_lse_base_on_e=True,
    seq_lens=None,
    query_start_loc=None,
):
    return "vllm's a2a"


def cp_lse_ag_out_rs(
    cp_attn_out,
    cp_attn_lse,
    cp_group,
    ctx=None,
    return_lse=False,
    is_lse_base_on_e=True,
    seq_lens=None,
    query_start_loc=None,
):
    return "vllm's ag_rs"


class DirectDCPA2AWorkspace:
    def lse_reduce(self, partial_output, partial_lse, is_lse_base_on_e, seq_lens=None, query_start_loc=None):
        raise AssertionError("not on this machine")


class DirectDCPQGatherWorkspace:
    def gather(self, local_query):
        raise AssertionError("not on this machine")


class DirectDCPKVGatherWorkspace:
    def gather(self, gathered_kv, local_kv):
        raise AssertionError("not on this machine")


def make_manager(dcp: ModuleType, group_of: Any) -> type:
    """The class, which looks its functions up in `dcp` as vLLM's does in its own module."""

    class MLADCPManager:
        def __init__(
            self,
            vllm_config,
            device,
            num_heads,
            query_head_dim,
            output_head_dim,
            query_dtype,
            output_dtype,
            padded_num_heads,
            is_lse_base_on_e,
            use_pcp,
        ):
            self.group, self.device = group_of(), device
            self.max_num_tokens, self.num_ubatches = vllm_config.max_num_tokens, vllm_config.num_ubatches
            shape = (self.group, device, self.max_num_tokens, num_heads)
            workspace = None
            if vllm_config.use_a2a:
                workspace = dcp.get_direct_dcp_a2a_workspace(
                    *shape, output_head_dim, output_dtype, self.num_ubatches
                )
            if workspace is not None:
                self.combine = functools.partial(self._direct, workspace, is_lse_base_on_e=is_lse_base_on_e)
            else:
                combine = dcp.dcp_a2a_lse_reduce if vllm_config.use_a2a else dcp.cp_lse_ag_out_rs
                self.combine = functools.partial(combine, cp_group=self.group, is_lse_base_on_e=is_lse_base_on_e)
            self.query_gather = None
            if not use_pcp:
                queries = dcp.get_direct_dcp_q_gather_workspace(
                    *shape, query_head_dim, query_dtype, self.num_ubatches, padded_num_heads
                )
                self.query_gather = (lambda query: "vllm's gather") if queries is None else queries.gather

        def _direct(self, workspace, out, lse, is_lse_base_on_e, seq_lens=None, query_start_loc=None):
            assert out.shape[0] <= workspace.max_num_tokens
            return workspace.lse_reduce(out, lse, is_lse_base_on_e, seq_lens, query_start_loc)

        def init_kv_gather(self, workspace, max_gathered_tokens):
            made = dcp.get_direct_dcp_kv_gather_workspace(
                self.group,
                workspace.device,
                max_gathered_tokens,
                workspace.shape[1],
                workspace.dtype,
                self.num_ubatches,
            )
            self._kv_gather = (lambda *tensors: "vllm's kv") if made is None else made.gather

        def kv_gather(self, gathered_kv, local_kv):
            return self._kv_gather(gathered_kv, local_kv)

    return MLADCPManager


@contextmanager
def installed(group_of: Any, *, version: str = "0.32.0", lane: Any = lambda: 0, cpu: bool = False) -> Iterator[ModuleType]:
    """Makes `import vllm` find the stand-in; yields its module of DCP collectives."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    names = ["vllm", "vllm.platforms", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops", "vllm.v1.attention.ops.dcp"]
    names += ["vllm.v1.attention.backends", "vllm.v1.attention.backends.flash_attn"]
    names += ["vllm.v1.worker", "vllm.v1.worker.ubatching"]
    modules = {name: ModuleType(name) for name in names}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    dcp = modules["vllm.v1.attention.ops.dcp"]
    for made in (
        functools.cache(get_direct_dcp_a2a_workspace),
        functools.cache(get_direct_dcp_q_gather_workspace),
        functools.cache(get_direct_dcp_kv_gather_workspace),
        dcp_a2a_lse_reduce,
        cp_lse_ag_out_rs,
        # A test may change these.
        *(
            type(made.__name__, (made,), {})
            for made in (DirectDCPA2AWorkspace, DirectDCPQGatherWorkspace, DirectDCPKVGatherWorkspace)
        ),
        make_manager(dcp, group_of),
    ):
        setattr(dcp, made.__name__, made)
    modules["vllm"].__version__ = version
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: cpu)
    modules["vllm.v1.worker.ubatching"].dbo_current_ubatch_id = lane
    # Imported before the plugin came: it has the functions by name.
    flash_attn = modules["vllm.v1.attention.backends.flash_attn"]
    flash_attn.dcp_a2a_lse_reduce, flash_attn.cp_lse_ag_out_rs = dcp.dcp_a2a_lse_reduce, dcp.cp_lse_ag_out_rs
    try:
        yield dcp
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
