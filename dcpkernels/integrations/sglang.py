"""The calls of SGLang's DCP code (`sglang.srt.layers.dcp.comm`), on a workspace.

    comm = DcpComm(get_parallel().dcp_group, device, max_num_tokens=..., heads_per_rank=..., head_dim=512,
                   dtype=torch.bfloat16, query_head_dim=576)  # once, before graphs are captured
    attn_output = comm.dcp_a2a_lse_reduce(attn_output, lse, get_parallel().dcp_group, is_lse_base_on_e=False)

Each method has name, arguments, defaults and result of the function that it stands for; what comes behind a `*` is
more. There is no state of the module's: where SGLang keeps a workspace by a key of its own, keep the object there.
`DirectSymmA2AWorkspace` and `estimate_symm_a2a_workspace_nbytes` are those of `symm_a2a`
(https://github.com/sgl-project/sglang/pull/33364). Nothing of SGLang is needed, or imported: a group is anything with
`world_size`, `rank_in_group` and `cpu_group`, as its GroupCoordinator. docs/sglang.md says which call sites there are.
"""

from __future__ import annotations

from typing import Any

import torch

import dcpkernels
from dcpkernels.integrations import _drop_in

COMM_BACKENDS = ("a2a", "fi_a2a", "symm_a2a")


def estimate_symm_a2a_workspace_nbytes(
    *,
    world_size: int,
    max_num_tokens: int,
    heads_per_rank: int,
    head_dim: int,
    dtype: torch.dtype,
    num_ubatches: int = 1,
    device: Any = None,
    **fields: Any,
) -> int:
    """Bytes of a `DirectSymmA2AWorkspace` on each rank: its region, and the outputs of its micro-batches, LSE and all.
    Another number than SGLang's, for another protocol. Raises DcpInvalidArgument as the workspace does."""
    op = "estimate_symm_a2a_workspace_nbytes"
    _drop_in.require_counts(op, world_size=world_size)
    config = _config(op, world_size, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches, fields)
    output_bytes = num_ubatches * max_num_tokens * heads_per_rank * (head_dim * dtype.itemsize + 4)
    return _drop_in.region_bytes(config, world_size, device) + output_bytes


class DirectSymmA2AWorkspace:
    """The workspace of `symm_a2a`. Collective, as making a `dcpkernels.Workspace`.

    Args:
        cp_group: a GroupCoordinator, or a process group.
        device: "cuda:0", "cpu", ...
        max_num_tokens: of the usual largest call.
        heads_per_rank: heads that a rank keeps; those of all ranks together in a call.
        head_dim, dtype: of the attention output; any head_dim, float16, bfloat16 or float32.
        num_ubatches: micro-batches that may run at the same time: lanes of the workspace.
        backend, fields: of `dcpkernels.Workspace` and `dcpkernels.WorkspaceConfig`, such as timeout_s.

    More than SGLang's: one rank; any head_dim; float32; CPUs; ranks on several hosts, by backend="auto"; a deadline for
    every wait. Kept as there: an allocation that fails on one rank fails on all.

    Attributes: cp_group, device, world_size, rank, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches;
        combined_output [num_ubatches, max_num_tokens, heads_per_rank, D]; geometry; workspace, the
        dcpkernels.Workspace.

    Raises DcpInvalidArgument for a wrong count, and what `dcpkernels.Workspace` raises, on all ranks.
    """

    def __init__(
        self,
        cp_group: Any,
        device: torch.device | str | None,
        max_num_tokens: int,
        heads_per_rank: int,
        head_dim: int,
        dtype: torch.dtype,
        num_ubatches: int = 1,
        *,
        backend: str = "auto",
        **fields: Any,
    ) -> None:
        op = "DirectSymmA2AWorkspace"
        num_ranks = _num_ranks(op, cp_group)
        config = _config(op, num_ranks, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches, fields)
        self._slots = _drop_in.Slots(cp_group, device, config, backend)
        self.workspace = self._slots.workspace
        self.cp_group, self.device = cp_group, torch.device(self.workspace.device)
        self.world_size, self.rank = num_ranks, self.workspace.rank
        self.max_num_tokens, self.heads_per_rank, self.head_dim = max_num_tokens, heads_per_rank, head_dim
        self.dtype, self.num_ubatches = dtype, num_ubatches
        self.combined_output = self._slots.output

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What has to be equal for one workspace to serve in place of another."""
        sizes = (self.max_num_tokens, self.heads_per_rank, self.head_dim, self.dtype, self.num_ubatches)
        return (*_names(self.cp_group), self.world_size, self.rank, self.device, *sizes)

    def lse_reduce(
        self,
        attn_out: torch.Tensor,
        lse: torch.Tensor,
        is_lse_base_on_e: bool = True,
        ubatch_id: int = 0,
        output: torch.Tensor | None = None,
        *,
        lse_out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`dcpkernels.a2a_lse_reduce` of attn_out [T, H, D] and lse [T, H] into `output` [T, heads_per_rank, D].

        output: any token and head strides; None: a view of combined_output[ubatch_id], valid until the next call of
            that micro-batch.
        lse_out, return_lse: the merged LSE, float32 [T, heads_per_rank], in the base of the input; returned behind the
            output.

        More than SGLang's: T = 0; T above max_num_tokens, in several rounds, and then into a new tensor; any strides;
        LSE of 16 bits; the merged LSE. Raises DcpInvalidArgument where SGLang has a ValueError or TypeError.
        """
        op = "DirectSymmA2AWorkspace.lse_reduce"
        base = _drop_in.lse_base(op, is_lse_base_on_e)
        self._slots.require_slot(op, "ubatch_id", ubatch_id)
        _drop_in.require_tensor(op, "attn_out", attn_out, "[T, H, D]")
        merged = self._slots.merge(attn_out, lse, ubatch_id, base, output, lse_out)
        return merged if return_lse or lse_out is not None else merged[0]

    def close(self) -> None:
        """`Workspace.close`: collective."""
        self.workspace.close()


class DcpComm:
    """What attention calls of `sglang.srt.layers.dcp.comm`, for one DCP group and one geometry. Collective to make.

    MLA and GQA models differ in the sizes alone. A model with layers of several geometries has one object for each.

    Args:
        cp_group, device, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches, backend, fields: as in
            `DirectSymmA2AWorkspace`; `dtype` is that of the query, too.
        query_head_dim: elements of one head of a gathered query: of MLA latent and rope together (576), of GQA its
            head_dim; 0: the gathers are not used.

    With one rank the methods return what they were given, as SGLang's functions.

    Attributes: cp_group, world_size, rank, workspace (the dcpkernels.Workspace).
    """

    def __init__(
        self,
        cp_group: Any,
        device: torch.device | str | None,
        max_num_tokens: int,
        heads_per_rank: int,
        head_dim: int,
        dtype: torch.dtype,
        num_ubatches: int = 1,
        *,
        query_head_dim: int = 0,
        backend: str = "auto",
        **fields: Any,
    ) -> None:
        op = "DcpComm"
        self.cp_group, self.world_size = cp_group, _num_ranks(op, cp_group)
        fields = {"query_dtype": dtype, **fields, "query_head_dim": query_head_dim}
        sizes = (max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches)
        config = _config(op, self.world_size, *sizes, fields)
        self.workspace = _drop_in.make_workspace(cp_group, device, config, backend)
        self.rank = self.workspace.rank

    # -- merges

    def dcp_a2a_lse_reduce(
        self,
        cp_attn_out: torch.Tensor,
        cp_attn_lse: torch.Tensor,
        cp_group: Any,
        is_lse_base_on_e: bool = True,
        cuda_graph_buffers: dict[str, torch.Tensor] | None = None,
        comm_backend: str = "a2a",
        ubatch_id: int = 0,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Merges [B, H, D] and [B, H] of all ranks: [B, H / N, D], rank r's heads; `dcpkernels.a2a_lse_reduce`.

        The same for each comm_backend, "a2a", "fi_a2a" and "symm_a2a". cuda_graph_buffers are not needed, and not
        touched. More than SGLang's: the merged LSE (which chunked prefill of GQA needs, and takes from `ag_rs` for want
        of it), `out`, any strides, so no `.contiguous()` before. Less: no fp8 output.
        """
        op = "dcp_a2a_lse_reduce"
        if not isinstance(comm_backend, str) or comm_backend not in COMM_BACKENDS:
            _drop_in.fail(op, f"comm_backend must be one of {COMM_BACKENDS}", repr(comm_backend))
        return self._merge(op, cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, return_lse, ubatch_id, out)

    def cp_lse_ag_out_rs_mha(
        self, cp_attn_out: torch.Tensor, cp_attn_lse: torch.Tensor, cp_group: Any, return_lse: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Of the path of GQA: LSE to the base e, [B, H / N, D], and with return_lse the merged LSE [B, H / N].

        cp_attn_out is left as it is, where SGLang's scales it in place. An LSE of +inf is an empty shard here.
        """
        return self._merge("cp_lse_ag_out_rs_mha", cp_attn_out, cp_attn_lse, cp_group, True, return_lse)

    def cp_lse_ag_out_rs_mla(
        self,
        cp_attn_out: torch.Tensor,
        cp_attn_lse: torch.Tensor,
        cp_group: Any,
        ctx: Any = None,
        is_lse_base_on_e: bool = False,
    ) -> torch.Tensor:
        """Of the path of MLA: [H / N, B, D], heads first, as SGLang's, which callers transpose. `ctx` is not needed."""
        merged = self._merge("cp_lse_ag_out_rs_mla", cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, False)
        # SGLang's returns what it was given, tokens first, where there is one rank.
        return merged if self.world_size == 1 else merged.transpose(0, 1)

    def _merge(
        self,
        op: str,
        partial_out: Any,
        partial_lse: Any,
        cp_group: Any,
        is_lse_base_on_e: Any,
        return_lse: bool,
        lane: int = 0,
        out: torch.Tensor | None = None,
    ) -> Any:
        base = _drop_in.lse_base(op, is_lse_base_on_e)
        if cp_group is not self.cp_group and _names(cp_group) != _names(self.cp_group):
            _drop_in.fail(op, "cp_group must be the group that this was made for", type(cp_group).__name__)
        if self.world_size == 1 and out is None:
            return (partial_out, partial_lse) if return_lse else partial_out
        arguments = {"workspace": self.workspace, "lse_base": base, "lane": lane, "out": out, "return_lse": return_lse}
        return dcpkernels.a2a_lse_reduce(partial_out, partial_lse, **arguments)

    # -- gathers

    def all_gather_q_for_mla_decode(
        self, q_nope_out: torch.Tensor, q_pe: torch.Tensor, *, ubatch_id: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent and rope part of each rank's heads, [B, H / N, L] and [B, H / N, R], to those of all heads.

        Both results are views of one tensor [B, H, L + R] of the caller's own: a kernel that wants the parts side by
        side takes that (`dcpkernels.query_gather`, which has it without a copy, too).
        """
        if self.world_size == 1:
            return q_nope_out, q_pe
        for name, part in (("q_nope_out", q_nope_out), ("q_pe", q_pe)):
            _drop_in.require_tensor("all_gather_q_for_mla_decode", name, part, "[B, H, L]")
        gathered = self._gather((q_nope_out, q_pe), ubatch_id)
        latent, rope = gathered.split([q_nope_out.shape[-1], q_pe.shape[-1]], dim=-1)
        return latent, rope

    def gather_q_heads(self, q: torch.Tensor, *, ubatch_id: int = 0) -> torch.Tensor:
        """Each rank's heads [B, H / N, D] to those of all, [B, H, D], in a tensor of the caller's own: what GQA does by
        `cp_group.all_gather(q, dim=1)`. Any strides but in the last dim."""
        if self.world_size == 1:
            return q
        _drop_in.require_tensor("gather_q_heads", "q", q, "[B, H, D]")
        return self._gather((q,), ubatch_id)

    def _gather(self, parts: tuple[torch.Tensor, ...], lane: int) -> torch.Tensor:
        # Not the view of the workspace's buffer: a merge is to end the use of that one, and SGLang's warm-up leaves
        # merges out.
        shape = (parts[0].shape[0], self.workspace.config.num_heads, sum(part.shape[-1] for part in parts))
        out = parts[0].new_empty(shape)
        return dcpkernels.query_gather(parts, workspace=self.workspace, out=out, lane=lane)

    def close(self) -> None:
        """`Workspace.close`: collective."""
        self.workspace.close()


def _num_ranks(op: str, cp_group: Any) -> int:
    """Of a GroupCoordinator, a process group or a group of threads."""
    for name in ("world_size", "num_ranks"):
        if isinstance(getattr(cp_group, name, None), int):
            return getattr(cp_group, name)
    if not callable(getattr(cp_group, "size", None)):
        _drop_in.fail(op, "cp_group must be a GroupCoordinator or a process group", type(cp_group).__name__)
    return cp_group.size()


def _names(cp_group: Any) -> tuple[Any, ...]:
    """What tells a group from others: SGLang makes no second object for one, but one may be handed on by a copy."""
    groups = [getattr(cp_group, name, None) for name in ("device_group", "cpu_group")]
    names = [getattr(group, "group_name", None) for group in groups]
    return tuple(names) if any(names) else (id(cp_group),)


def _config(
    op: str,
    num_ranks: int,
    max_num_tokens: Any,
    heads_per_rank: Any,
    head_dim: Any,
    dtype: Any,
    num_ubatches: Any,
    fields: dict[str, Any],
) -> dcpkernels.WorkspaceConfig:
    counts = {"max_num_tokens": max_num_tokens, "heads_per_rank": heads_per_rank, "head_dim": head_dim}
    _drop_in.require_counts(op, **counts, num_ubatches=num_ubatches)
    num_heads = heads_per_rank * num_ranks
    return _drop_in.make_config(op, num_heads, head_dim, max_num_tokens, dtype, fields, num_lanes=num_ubatches)
