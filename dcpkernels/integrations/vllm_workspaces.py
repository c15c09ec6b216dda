"""What vLLM's decode context parallelism calls in place of its own workspaces: the ops of this package, behind the names
and the contracts of vllm/v1/attention/ops/dcp.py (0.29 to 0.33). `dcpkernels.integrations.vllm` puts them there.

    DirectDCPA2AWorkspace.lse_reduce    -> MlaCollectives.lse_reduce     a2a_lse_reduce
    DirectDCPQGatherWorkspace.gather    -> MlaCollectives.gather         query_gather
    DirectDCPKVGatherWorkspace.gather   -> KVGather.gather               kv_gather
    dcp_a2a_lse_reduce, cp_lse_ag_out_rs                                 a2a_lse_reduce

A group, as vLLM has it (GroupCoordinator): `.cpu_group` is a torch ProcessGroup over gloo, `.world_size`, `.rank_in_group`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

import dcpkernels
from dcpkernels import DcpError, DcpTimeout, KVGatherPlan, Workspace, WorkspaceConfig

# vLLM's own loggers have a handler and are shown; those of a library that vLLM does not know are not.
log = logging.getLogger("vllm.dcpkernels")

# An engine's ranks are apart by what one of them compiles or loads on its own; vLLM itself waits 300 s for an answer of its
# workers. A rank that is dead is told at once all the same.
TIMEOUT_S = 300.0

# Micro-batches that layers may run side by side which do not say how many they run.
_MERGE_LANES = 2

# Plans of chunks by their number of rows: a step has a few, the last chunk of a prompt any.
_MAX_PLANS = 256


@dataclass(frozen=True)
class MlaShape:
    """What the layers of one model agree in, so that they share one workspace. Heads are those of one rank."""

    device: torch.device
    max_num_tokens: int
    heads_per_rank: int
    head_dim: int
    dtype: torch.dtype
    num_lanes: int
    query_head_dim: int = 0
    query_dtype: torch.dtype = torch.bfloat16
    padded_num_heads: int = 0

    def config(self, num_ranks: int) -> WorkspaceConfig:
        return WorkspaceConfig(
            num_heads=self.heads_per_rank * num_ranks,
            head_dim=self.head_dim,
            max_num_tokens=self.max_num_tokens,
            dtype=self.dtype,
            num_lanes=self.num_lanes,
            query_head_dim=self.query_head_dim,
            query_dtype=self.query_dtype,
            padded_num_heads=self.padded_num_heads,
            timeout_s=TIMEOUT_S,
        )


class Collectives:
    """The workspaces of this process, by vLLM's groups; none outlives its group. Ranks ask for them in one order, as they
    build their layers in one order: making one is collective."""

    def __init__(self, backend: str, lane: Callable[[], int]) -> None:
        self.num_calls: Counter[str] = Counter()
        self.lane = lane
        self._backend = backend
        self._made: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
        self._declined: weakref.WeakSet[Any] = weakref.WeakSet()

    def mla(self, group: Any, shape: MlaShape) -> MlaCollectives | None:
        """The merge and the query gather of layers of a shape; None: all ranks keep what vLLM has."""

        def make() -> MlaCollectives | None:
            workspace = self._workspace(group, shape.device, lambda: shape.config(group.world_size), "merge and query")
            return None if workspace is None else MlaCollectives(self, workspace, shape)

        return self._once(group, shape, make)

    def decline(self, group: Any) -> None:
        """The context of this group stays vLLM's."""
        self._declined.add(group)

    def kv(
        self, group: Any, device: torch.device, max_rows: int, row_dim: int, dtype: torch.dtype, num_lanes: int
    ) -> KVGather | None:
        """The gather of context; None as in `mla`."""
        if group in self._declined:
            return None

        def config() -> WorkspaceConfig:
            # Nothing is merged here: the least that a workspace can merge.
            return WorkspaceConfig(
                num_heads=group.world_size,
                head_dim=8,
                max_num_tokens=1,
                dtype=torch.float32,
                num_lanes=num_lanes,
                kv_chunk_rows=max_rows,
                kv_dim=row_dim,
                kv_dtype=dtype,
                timeout_s=TIMEOUT_S,
            )

        def make() -> KVGather | None:
            workspace = self._workspace(group, device, config, "context")
            return None if workspace is None else KVGather(self, workspace)

        return self._once(group, ("kv", device, max_rows, row_dim, dtype, num_lanes), make)

    def merge(self, group: Any, partial_out: torch.Tensor) -> MlaCollectives | None:
        """The merge for layers that tell nothing before their first call, as those of grouped-query attention; None as in
        `mla`, and where the first call would be recorded into a graph, which cannot make a workspace."""
        num_tokens, num_heads, head_dim = partial_out.shape
        device, dtype = partial_out.device, partial_out.dtype
        if num_heads % group.world_size or self.lane() >= _MERGE_LANES:
            return None

        def make() -> MlaCollectives | None:
            # A larger call takes several rounds.
            heads_per_rank = num_heads // group.world_size
            shape = MlaShape(device, max(num_tokens, 64), heads_per_rank, head_dim, dtype, _MERGE_LANES)
            workspace = self._workspace(group, device, lambda: shape.config(group.world_size), "merge")
            return None if workspace is None else MlaCollectives(self, workspace, shape)

        key = ("merge", device, num_heads, head_dim, dtype)
        if device.type == "cuda" and key not in self._made.get(group, {}) and torch.cuda.is_current_stream_capturing():
            return None
        return self._once(group, key, make)

    def close(self) -> None:
        """Gives all memory back. Collective, as Workspace.close is."""
        made, self._made = self._made, weakref.WeakKeyDictionary()
        for objects in list(made.values()):
            for collectives in objects.values():
                if collectives is not None:
                    collectives.workspace.close()

    def _once(self, group: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        made = self._made.setdefault(group, {})
        if key not in made:
            made[key] = make()
        return made[key]

    def _workspace(
        self, group: Any, device: torch.device, config: Callable[[], WorkspaceConfig], what: str
    ) -> Workspace | None:
        """A workspace, or None with a warning. The same on all ranks: they share one verdict, or one arithmetic."""
        try:
            workspace = Workspace(group.cpu_group, device, config(), backend=self._backend)
        except DcpTimeout:
            raise  # a rank is not there; what vLLM has would wait for it too, and without an end
        except DcpError as reason:
            log.warning("dcpkernels: %s of %d ranks: vLLM's own collectives (%s)", what, group.world_size, reason)
            return None
        # What all ranks of a host share is there with the direct backend only.
        shared = Workspace.size(workspace.config, group.world_size, device).shared_total
        log.info(
            "dcpkernels: %s of %d ranks on backend %s (%s), %.1f MiB per rank%s",
            what, group.world_size, workspace.backend, workspace.backend_reason, workspace.num_bytes / 2**20,
            f", {shared / 2**20:.1f} MiB for all" if shared and workspace.backend == "direct" else "",
        )  # fmt: skip
        return workspace


class MlaCollectives:
    """The query gather and the merge of one model's layers, in one workspace: the merge is what tells the ranks that all
    have read the query."""

    def __init__(self, owner: Collectives, workspace: Workspace, shape: MlaShape) -> None:
        self.workspace, self.shape = workspace, shape
        # vLLM gathers by other means what has more rows.
        self.max_num_tokens = shape.max_num_tokens
        self._num_calls, self._lane = owner.num_calls, owner.lane

    def gather(self, local_query: torch.Tensor) -> torch.Tensor:
        """[T, heads_per_rank, Dq] -> [T, W * heads_per_rank, Dq], a view that is valid until the layer's merge."""
        gathered = dcpkernels.query_gather(local_query, workspace=self.workspace, lane=self._lane())
        self._num_calls["query_gather"] += 1
        return gathered

    def lse_reduce(
        self,
        partial_output: torch.Tensor,
        partial_lse: torch.Tensor,
        is_lse_base_on_e: bool,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """[T, H, D] and [T, H] -> [T, H/W, D], any T; with return_lse also the merged LSE, fp32 [T, H/W].

        seq_lens: local KV lengths, int32 [S]; query_start_loc: int32 [S + 1]; both or none.
        """
        merged = dcpkernels.a2a_lse_reduce(
            partial_output,
            partial_lse,
            workspace=self.workspace,
            lse_base="e" if is_lse_base_on_e else "2",
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            return_lse=return_lse,
            lane=self._lane(),
        )
        self._num_calls["a2a_lse_reduce"] += 1
        return merged


class LseReduce:
    """The merge as vLLM's manager calls it. It asks `max_num_tokens` before each call; ours takes any number of rows."""

    max_num_tokens = sys.maxsize

    def __init__(self, collectives: MlaCollectives) -> None:
        self.lse_reduce = collectives.lse_reduce


class KVGather:
    """The gather of one chunk of context: rank by rank, as vLLM's own caller expects it (the rows of rank 0, of rank 1, ...),
    or in sequence order, from the paged cache (`vllm_context`)."""

    def __init__(self, owner: Collectives, workspace: Workspace) -> None:
        self.workspace = workspace
        self._num_calls, self._lane = owner.num_calls, owner.lane
        self._plans: dict[int, KVGatherPlan] = {}

    def gather(self, gathered_kv: torch.Tensor, local_kv: torch.Tensor) -> None:
        """local_kv [T, Dkv], the same T on all ranks, into gathered_kv [W * T, Dkv]."""
        num_rows = local_kv.shape[0]
        if num_rows == 0:
            return
        rows = dcpkernels.kv_gather(
            local_kv.unsqueeze(0), self._plan(num_rows), 0, workspace=self.workspace, lane=self._lane()
        )
        gathered_kv.copy_(rows)
        self._num_calls["kv_gather"] += 1

    def gather_in_order(self, out: torch.Tensor, kv_cache: torch.Tensor, plan: KVGatherPlan) -> None:
        """out [rows of the plan, Dkv]; kv_cache [num_blocks, block_size, Dkv], this rank's, of which plan.block_size divides
        block_size. Plans have one chunk."""
        if kv_cache.shape[1] != plan.block_size:
            kv_cache = kv_cache.unflatten(1, (-1, plan.block_size)).flatten(0, 1)
        rows = dcpkernels.kv_gather(kv_cache, plan, 0, workspace=self.workspace, lane=self._lane())
        out.copy_(rows)
        self._num_calls["kv_gather"] += 1

    def _plan(self, num_rows: int) -> KVGatherPlan:
        """One request of W * num_rows tokens of which the first num_rows are rank 0's, and so on: sequence order is then
        the order of ranks."""
        plan = self._plans.get(num_rows)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            num_ranks, config = self.workspace.num_ranks, self.workspace.config
            plan = self._plans[num_rows] = KVGatherPlan(
                [num_ranks * num_rows],
                [[0]],
                block_size=num_rows,
                num_ranks=num_ranks,
                rank=self.workspace.rank,
                chunk_size=config.kv_chunk_rows,
                interleave=num_rows,
            )
        return plan
