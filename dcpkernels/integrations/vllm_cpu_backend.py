"""vLLM's MLA attention for CPUs with what decode context parallelism (DCP) asks of a backend: it says that it supports it,
keeps the number of ranks, and returns the log-sum-exp. Imported by vLLM, by name (`vllm_cpu.BACKEND`).

Without DCP it does what vLLM's does.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.integrations.vllm_context import context_gather
from dcpkernels.integrations.vllm_cpu_context import across_ranks
from dcpkernels.integrations.vllm_cpu_ops import mla_decode


class DcpCPUMLAImpl(CPUMLAImpl):
    # vLLM reads these when it makes an object, before __init__.
    can_return_lse_for_decode = True
    supports_dcp = True
    lse_base_on_e = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        num_ranks = self.dcp_world_size  # __new__ has set it, and __init__ makes it 1
        super().__init__(*args, **kwargs)
        self.dcp_world_size = num_ranks
        self.cp_kv_cache_interleave_size = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dcp_world_size == 1:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        # Of the metadata's builder: this backend decodes one token a request.
        if query.shape[0] != decode.seq_lens.shape[0]:
            raise DcpInvalidArgument(
                f"vllm_cpu: query must have one row for each of {decode.seq_lens.shape[0]} requests "
                f"(got {query.shape[0]} rows)"
            )
        return mla_decode(
            query,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            scale=self.scale,
            value_dim=self.kv_lora_rank,
        )

    def _context_parallel_compute_prefill_context(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        dcp_world_size: int,
        **others: Any,
    ) -> Any:
        prefill = attn_metadata.prefill
        chunked, arguments = prefill.chunked_context, (q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        gather = context_gather(chunked.dcp_manager)
        if gather is None:  # vLLM's own gather, which knows the order of ranks only
            return super()._context_parallel_compute_prefill_context(*arguments, dcp_world_size, **others)
        with across_ranks(chunked, prefill.block_table, gather, self.cp_kv_cache_interleave_size):
            return self._compute_prefill_context(*arguments)


class DcpCPUMLABackend(CPUMLABackend):
    @staticmethod
    def get_impl_cls() -> type[DcpCPUMLAImpl]:
        return DcpCPUMLAImpl
