"""Decode context parallelism (DCP) for vLLM on CPUs, which vLLM refuses there: for models with MLA. What is missing in it,
and is added by `register`:

    attention that returns the LSE      the backend CPU_MLA is a subclass of vLLM's, `vllm_cpu_backend`
    slots of new tokens over ranks      BlockTable.compute_slot_mapping
    gather of context                   in sequence order, `vllm_cpu_context`; and vllm._custom_ops.cp_gather_cache, where
                                        vLLM's build has no such op, for vLLM's own gather
    chunked prefill, prefix caching     CpuPlatform.check_and_update_config, which turns them off for MLA

An engine without DCP runs vLLM's own code in each of these.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

import torch

from dcpkernels.errors import DcpUnsupported
from dcpkernels.integrations.vllm import check_signature
from dcpkernels.integrations.vllm_cpu_context import replace_gather
from dcpkernels.integrations.vllm_cpu_ops import gather_context, slot_mapping

_log = logging.getLogger("vllm.dcpkernels")

BACKEND = "dcpkernels.integrations.vllm_cpu_backend.DcpCPUMLABackend"

# What is replaced, called or derived from: module, name, the parameters that are expected. An exact list: a parameter more
# is one that ours would not pass on.
SIGNATURES = (
    ("vllm.v1.attention.backends.registry", "register_backend", "backend class_path is_mamba"),
    ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLABackend.get_impl_cls", ""),
    (
        "vllm.v1.attention.backends.mla.cpu_mla",
        "CPUMLAImpl.forward_mqa",
        "self q kv_c_and_k_pe_cache attn_metadata layer",
    ),
    ("vllm.v1.worker.block_table", "BlockTable.compute_slot_mapping", "self num_reqs query_start_loc positions"),
    ("vllm._custom_ops", "cp_gather_cache", "src_cache dst block_table cu_seq_lens batch_size seq_starts"),
    ("vllm._custom_ops", "gather_mla_context_cache_cpu", "* src_cache dst block_table starts cu_seq_lens"),
    (
        "vllm.v1.attention.backends.mla.cpu_mla",
        "CPUMLAImpl._compute_prefill_context",
        "self q kv_c_and_k_pe_cache attn_metadata k_scale",
    ),
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", "vllm_config"),
)


def register() -> None:
    """Adds DCP for MLA to the vLLM of this process. Does nothing the second time.

    Raises DcpUnsupported, before anything is changed, where this vLLM is not as expected.
    """
    modules = {name: _module(name) for name, _, _ in SIGNATURES}
    registry, block_table = modules["vllm.v1.attention.backends.registry"], modules["vllm.v1.worker.block_table"]
    if hasattr(block_table.BlockTable.compute_slot_mapping, "__wrapped__"):
        return  # ours is there
    for module, name, expected in SIGNATURES:
        check_signature(modules[module], name, expected)
    cpu_mla = getattr(registry.AttentionBackendEnum, "CPU_MLA", None)
    if cpu_mla is None:
        raise DcpUnsupported("vllm: AttentionBackendEnum must have CPU_MLA (got none)")
    registry.register_backend(cpu_mla, BACKEND)
    _replace_slot_mapping(block_table.BlockTable)
    _add_gather(modules["vllm._custom_ops"])
    replace_gather(modules["vllm._custom_ops"])
    _keep_chunks(modules["vllm.platforms.cpu"].CpuPlatform, cpu_mla)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DcpUnsupported(f"vllm: {name} must be importable (got {error})") from error


def _replace_slot_mapping(block_table: type) -> None:
    vllms = block_table.compute_slot_mapping  # type: ignore[attr-defined]

    @functools.wraps(vllms)
    def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
        mode = getattr(self, "slot_mapping_mode", None)  # a cache may have no slots; older versions have no modes
        if self.dcp_world_size == 1 or (mode is not None and mode.name != "TOKEN_TO_KV_SLOT"):
            return vllms(self, num_reqs, query_start_loc, positions)
        slot_mapping(
            query_start_loc[: num_reqs + 1],
            positions,
            self.block_table.gpu,  # on CPUs these are the tensors that attention reads, too
            self.slot_mapping.gpu,
            block_size=self.block_size,
            num_ranks=self.dcp_world_size,
            rank=self.dcp_rank,
            interleave=self.cp_kv_cache_interleave_size,
        )

    block_table.compute_slot_mapping = compute_slot_mapping  # type: ignore[attr-defined]


def _add_gather(custom_ops: ModuleType) -> None:
    if hasattr(torch.ops._C_cache_ops, "cp_gather_cache"):
        return  # a build that has one

    @functools.wraps(custom_ops.cp_gather_cache)
    def cp_gather_cache(
        src_cache: torch.Tensor,
        dst: torch.Tensor,
        block_table: torch.Tensor,
        cu_seq_lens: torch.Tensor,
        batch_size: int,
        seq_starts: torch.Tensor | None = None,
    ) -> None:
        gather_context(src_cache, dst, block_table, cu_seq_lens[: batch_size + 1], seq_starts)

    custom_ops.cp_gather_cache = cp_gather_cache


def _keep_chunks(platform: type, cpu_mla: Any) -> None:
    vllms = platform.check_and_update_config.__func__  # type: ignore[attr-defined]

    @functools.wraps(vllms)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        model = vllm_config.model_config
        if vllm_config.parallel_config.decode_context_parallel_size == 1 or not getattr(model, "use_mla", False):
            return vllms(cls, vllm_config)
        # The other backend for MLA, of processors with AMX, has no DCP; vLLM would prefer it.
        attention = vllm_config.attention_config
        if attention.backend is None:
            attention.backend = cpu_mla
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching)
        vllms(cls, vllm_config)
        # vLLM says in its log that it has turned them off.
        (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching) = asked
        _log.info("dcpkernels: DCP on CPUs: chunked prefill %s, prefix caching %s", asked[0], asked[2])

    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[attr-defined]
