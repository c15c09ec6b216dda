"""The merge under the names that FlashInfer has for it, so that an engine written for those changes an import:

    from dcpkernels.integrations.flashinfer import (  # in place of flashinfer.comm
        decode_cp_a2a_lse_reduce,
        decode_cp_a2a_lse_reduce_create_workspace,
        decode_cp_a2a_lse_reduce_workspace_size,
    )

They are those of https://github.com/flashinfer-ai/flashinfer/pull/4929 (in both of its revisions), and
`DCPDirectReduceWorkspace` of https://github.com/flashinfer-ai/flashinfer/pull/4586. Arguments, defaults and results are
theirs; what comes behind a `*`, or where FlashInfer has an error and this has none, is more. Nothing of FlashInfer is
needed, or imported. docs/flashinfer.md has the differences on one page.

Errors are dcpkernels' own: DcpInvalidArgument is a ValueError, and all of them are a RuntimeError. FlashInfer's
TypeError for a dtype is a DcpInvalidArgument here.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

import dcpkernels
from dcpkernels.integrations import _drop_in
from dcpkernels.integrations._direct_reduce import DCPDirectReduceWorkspace

__all__ = [
    "DCPDirectReduceWorkspace",
    "DecodeCpWorkspace",
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_create_workspace",
    "decode_cp_a2a_lse_reduce_workspace_size",
]

_OP = "decode_cp_a2a_lse_reduce"
_LSE_MODES = {"base2": "2", "basee": "e"}


class DecodeCpWorkspace:
    """What `decode_cp_a2a_lse_reduce_create_workspace` returns, where FlashInfer returns a tensor of bytes. Callers
    keep it and pass it on; of a tensor it has what they ask besides: `shape`, `dtype` (uint8), `device`, `is_cuda`,
    `nbytes`, `numel()`, `size()`, `dim()`, `element_size()`. There is no byte of it to be read or written.

    It owns the memory: keep it as long as it is used. `close()`, which is collective, gives the memory back; so does
    forgetting it.

    Attributes:
        workspace: the dcpkernels.Workspace, for `check()`, `stats()`, `self_check()`, `warmup()` and the like.
        cp_rank, cp_size, local_heads, head_dim, max_tokens.
    """

    dtype = torch.uint8

    def __init__(self, workspace: dcpkernels.Workspace, num_bytes: int) -> None:
        self.workspace = workspace
        self.cp_rank, self.cp_size = workspace.rank, workspace.num_ranks
        self.local_heads, self.head_dim = workspace.num_local_heads, workspace.config.head_dim
        self.max_tokens = workspace.config.max_num_tokens
        self.device = torch.device(workspace.device)
        self.shape = torch.Size((num_bytes,))

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return 1

    def close(self) -> None:
        """`Workspace.close`."""
        self.workspace.close()

    def __repr__(self) -> str:
        geometry = f"max_tokens={self.max_tokens}, local_heads={self.local_heads}, head_dim={self.head_dim}"
        return f"DecodeCpWorkspace(rank {self.cp_rank} of {self.cp_size}, {geometry}, device={str(self.device)!r})"


def decode_cp_a2a_lse_reduce_workspace_size(
    max_tokens: int,
    local_heads: int,
    cp_size: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: Any = None,
    **fields: Any,
) -> int:
    """Bytes of one rank's workspace, before anything is allocated: as many as the workspace's `numel()`.

    Another number than FlashInfer's, for another protocol. More than there: float32, rows of any head_dim, `device` and
    `fields` as in `decode_cp_a2a_lse_reduce_create_workspace`.

    Raises DcpInvalidArgument for counts below 1, a cp_size above 64 or another dtype.
    """
    op = f"{_OP}_workspace_size"
    config = _config(op, max_tokens, local_heads, cp_size, head_dim, dtype, fields)
    return _drop_in.region_bytes(config, cp_size, device)


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens: int,
    local_heads: int,
    cp_size: int,
    head_dim: int,
    dtype: torch.dtype,
    group: Any,
    *,
    device: Any = None,
    backend: str = "auto",
    **fields: Any,
) -> DecodeCpWorkspace:
    """Makes the workspace for `decode_cp_a2a_lse_reduce`, on all ranks of `group` (collective), before graphs are
    captured.

    Args:
        max_tokens: of the usual largest call. Not a limit: a call with more runs in several rounds.
        local_heads: heads that a rank keeps. A call has max_tokens * local_heads rows (all leading dims together).
        cp_size: ranks of the group.
        head_dim, dtype: of partial_o; any head_dim, float16, bfloat16 or float32.
        group: a torch.distributed process group of any backend, or its name.
        device: "cuda", "cuda:1", "cpu"; None: the present GPU, a CPU where there is none.
        backend: as in `dcpkernels.Workspace`.
        fields: of `dcpkernels.WorkspaceConfig`: timeout_s, num_lanes, wire, ...

    Returns:
        DecodeCpWorkspace, to be passed on as FlashInfer's tensor is. One serves one call at a time, with num_lanes one
        on each lane: on any streams that are ordered with each other, in graphs as outside of them, where FlashInfer
        wants one stream for each workspace.

    Raises:
        DcpInvalidArgument: a wrong count, or cp_size is not the size of the group.
        What `dcpkernels.Workspace` raises, on all ranks.
    """
    op = f"{_OP}_create_workspace"
    config = _config(op, max_tokens, local_heads, cp_size, head_dim, dtype, fields)
    if group is None:
        _drop_in.fail(op, "group must be a process group or its name", "None")
    workspace = _drop_in.make_workspace(group, device, config, backend)
    if workspace.num_ranks != cp_size:  # on all ranks: they have agreed on num_heads
        workspace.close()
        _drop_in.fail(op, f"cp_size must be the size of the group, {workspace.num_ranks}", cp_size)
    return DecodeCpWorkspace(workspace, _drop_in.region_bytes(config, cp_size, workspace.device))


def decode_cp_a2a_lse_reduce(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    workspace: DecodeCpWorkspace,
    cp_rank: int,
    cp_size: int,
    lse_mode: Literal["base2", "basee"] = "base2",
    enable_pdl: bool | None = None,
    *,
    is_lse_base_on_e: bool | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    return_lse: bool = False,
    lane: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends partial_o[..., peer, :] to each rank `peer`, and merges what comes from all of them by their LSE.

    The merge is `dcpkernels.a2a_lse_reduce`, with its bits, its deadlines and its errors. Collective: all ranks call
    it, with as many rows (leading dims, multiplied) and the same base.

    How partial_o is read. A rank owns `local_heads` heads, and the leading dims are taken as [..., local_heads]. The
    heads that go to one rank have to follow each other at one stride. Attention's own output [T, cp * local_heads, D],
    viewed as [T, local_heads, cp, D] (`out.unflatten(1, (cp, local_heads)).transpose(1, 2)`), is such a view: it is
    read where it lies. A tensor that is contiguous as [T, local_heads, cp, D] is not, and is copied once; the result is
    equal in every bit, the copy may take longer than the call. So do not pack. Rows that are no multiple of local_heads
    are filled up, which is a copy too. The layout may differ between ranks.

    Args:
        partial_o: [..., cp, D] in the workspace's dtype, unit stride in the last dim.
        partial_lse: [..., cp] float32 (also float16, bfloat16), any strides; copied, as small as it is, where partial_o
            would be. A shard is empty where it is -inf, +inf or NaN: weight 0, payload not read into the sum.
        workspace: of `decode_cp_a2a_lse_reduce_create_workspace`.
        cp_rank, cp_size: have to be those of the workspace.
        lse_mode: "base2" or "basee", the base that attention used. A wrong one shows nowhere but in the answer.
        enable_pdl: of the earlier revision; does nothing.
        is_lse_base_on_e: of the earlier revision, which has it in place of lse_mode: a bool there is understood, too.
        out: [..., D], to be written and returned; allocated when None. Where the leading dims are [T, local_heads], any
            token and head strides; else contiguous.
        lse_out: float32 [...]; as `out`. Implies return_lse.
        return_lse: also return the merged LSE, float32 [...], in the base of the input; -inf where no shard is live.
        lane: with a workspace of num_lanes.

    Returns:
        out [..., D], 0 where all shards are empty; or (out, lse).

    More than FlashInfer's: no rows at all (the call is made, all ranks make it), more rows than the workspace was made
    for, out, the merged LSE, lanes, any head_dim and alignment, float32, CPUs, a deadline for every wait.

    Raises:
        DcpInvalidArgument: an argument is wrong; nothing was sent.
        DcpMismatch, DcpTimeout, DcpPeerLost, DcpError: as `dcpkernels.a2a_lse_reduce`.
    """
    base = _lse_base(lse_mode, is_lse_base_on_e)
    if not isinstance(workspace, DecodeCpWorkspace):
        rule = f"workspace must be what {_OP}_create_workspace returned"
        _drop_in.fail(_OP, rule, type(workspace).__name__)
    lead = _require_inputs(workspace, partial_o, partial_lse, cp_rank, cp_size)
    rows = _Rows(lead, workspace.local_heads)
    merged = dcpkernels.a2a_lse_reduce(
        rows.by_owner(partial_o, 0.0),
        rows.by_owner(partial_lse, -math.inf),
        workspace=workspace.workspace,
        lse_base=base,
        out=None if out is None else rows.target("out", out, partial_o, partial_o.dtype, partial_o.shape[-1:]),
        lse_out=None if lse_out is None else rows.target("lse_out", lse_out, partial_o, torch.float32, ()),
        return_lse=return_lse or lse_out is not None,
        lane=lane,
    )
    if not isinstance(merged, tuple):
        return rows.result(merged, out)
    return rows.result(merged[0], out), rows.result(merged[1], lse_out)


class _Rows:
    """The rows of a call, leading dims of any number, as the tokens and heads of `dcpkernels.a2a_lse_reduce`."""

    def __init__(self, lead: torch.Size, local_heads: int) -> None:
        self.lead, self.local_heads = lead, local_heads
        self.num_rows = math.prod(lead)
        self.num_tokens = -(-self.num_rows // local_heads)
        self.num_missing = self.num_tokens * local_heads - self.num_rows  # rows that only fill up
        self.is_by_head = len(lead) == 2 and lead[1] == local_heads  # as most are: a view is a microsecond

    def by_owner(self, value: torch.Tensor, filling: float) -> torch.Tensor:
        """[..., cp, *] as [T, cp * local_heads, *], heads of one rank side by side. A view where there is one."""
        tail = value.shape[len(self.lead) :]
        if self.num_missing:
            filled = value.new_full((self.num_missing, *tail), filling)
            value = torch.cat([value.reshape(self.num_rows, *tail), filled])
        by_head = value if self.is_by_head else value.reshape(self.num_tokens, self.local_heads, *tail)
        return by_head.transpose(1, 2).reshape(self.num_tokens, self.local_heads * tail[0], *tail[1:])

    def target(
        self, name: str, given: Any, like: torch.Tensor, dtype: torch.dtype, tail: tuple[int, ...]
    ) -> torch.Tensor | None:
        """A caller's [..., *] as the merge's [T, local_heads, *]; None where the merge has more rows."""
        _drop_in.require_tensor(_OP, name, given)
        expected = (list((*self.lead, *tail)), dtype, like.device)
        if (list(given.shape), given.dtype, given.device) != expected:
            found = f"{list(given.shape)}, {given.dtype}, {given.device}"
            _drop_in.fail(_OP, f"{name} must be {expected[0]}, {dtype}, {like.device}", found)
        if self.num_missing:
            return None
        try:
            return given.view(self.num_tokens, self.local_heads, *tail)
        except RuntimeError:
            rule = f"{name} must be contiguous where its leading dims are not [T, {self.local_heads}]"
            _drop_in.fail(_OP, rule, f"strides {given.stride()} for shape {list(given.shape)}")

    def result(self, merged: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """[T, local_heads, *] as what the caller gets: what it gave, or [..., *]."""
        if self.is_by_head or (given is not None and not self.num_missing):
            return merged if given is None else given
        rows = merged.flatten(0, 1)[: self.num_rows].view((*self.lead, *merged.shape[2:]))
        return rows if given is None else given.copy_(rows)


def _config(
    op: str, max_tokens: Any, local_heads: Any, cp_size: Any, head_dim: Any, dtype: Any, fields: dict[str, Any]
) -> dcpkernels.WorkspaceConfig:
    counts = {"max_tokens": max_tokens, "local_heads": local_heads, "cp_size": cp_size, "head_dim": head_dim}
    _drop_in.require_counts(op, **counts)
    if cp_size > _drop_in.MAX_RANKS:
        _drop_in.fail(op, f"cp_size must be at most {_drop_in.MAX_RANKS}", cp_size)
    return _drop_in.make_config(op, local_heads * cp_size, head_dim, max_tokens, dtype, fields)


def _lse_base(lse_mode: Any, is_lse_base_on_e: Any) -> str:
    if isinstance(lse_mode, bool):  # the earlier revision's sixth argument
        lse_mode = "basee" if lse_mode else "base2"
    if not isinstance(lse_mode, str) or lse_mode not in _LSE_MODES:
        _drop_in.fail(_OP, "lse_mode must be 'base2' or 'basee'", repr(lse_mode))
    base = _LSE_MODES[lse_mode]
    if is_lse_base_on_e is None:
        return base
    asked = _drop_in.lse_base(_OP, is_lse_base_on_e)
    if lse_mode == "basee" and asked != base:
        _drop_in.fail(_OP, "lse_mode and is_lse_base_on_e must say the same", f"'basee' and {is_lse_base_on_e}")
    return asked


def _require_inputs(
    workspace: DecodeCpWorkspace, partial_o: Any, partial_lse: Any, cp_rank: Any, cp_size: Any
) -> torch.Size:
    """The leading dims."""
    if cp_rank != workspace.cp_rank or cp_size != workspace.cp_size:
        rule = f"cp_rank and cp_size must be those of the workspace, {workspace.cp_rank} and {workspace.cp_size}"
        _drop_in.fail(_OP, rule, f"{cp_rank!r} and {cp_size!r}")
    _drop_in.require_tensor(_OP, "partial_o", partial_o)
    _drop_in.require_tensor(_OP, "partial_lse", partial_lse)
    expected = [cp_size, workspace.head_dim]
    if partial_o.dim() < 2 or list(partial_o.shape[-2:]) != expected:
        _drop_in.fail(_OP, f"partial_o must have shape [..., cp_size, head_dim] = [..., {cp_size}, {expected[1]}]",
                      list(partial_o.shape))  # fmt: skip
    if partial_lse.shape != partial_o.shape[:-1]:
        rule = f"partial_lse must have partial_o's shape without the last dim, {list(partial_o.shape[:-1])}"
        _drop_in.fail(_OP, rule, list(partial_lse.shape))
    if not partial_lse.is_floating_point():  # filling rows are -inf
        _drop_in.fail(_OP, "partial_lse must be float32 or float16 or bfloat16", partial_lse.dtype)
    return partial_o.shape[:-2]
