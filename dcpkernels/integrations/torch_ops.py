"""The ops for code under torch.compile: torch.ops.dcpkernels.*, which importing this module registers.

    from dcpkernels.integrations.torch_ops import TraceableWorkspace, a2a_lse_reduce
    traceable = TraceableWorkspace(workspace)  # once, outside of compiled code

    @torch.compile(fullgraph=True)
    def step(partial_out, partial_lse):
        return a2a_lse_reduce(partial_out, partial_lse, workspace=traceable, lse_base="e")

An op here writes into tensors that it is given and returns nothing. Besides its output it writes `state`, which all
calls of a workspace share: so a compiler sees that each call changes something that the next one needs, and makes as
many calls as were written, in that order, used or not. A compiler that merged, dropped or reordered a call on one rank
would have the other ranks wait, or merge what does not belong together. Calls on different lanes keep their order too:
a call waits for its peers, so ranks that made two of them in different orders would wait for each other.

Code that is not compiled calls the functions of `dcpkernels` itself; these here do the same, by way of the dispatcher.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument

# -- handles: a graph holds numbers and tensors, no workspaces


class _Registry:
    """Objects of a kind by number, none of which it keeps alive. A number is never given twice, so that an old one in a
    compiled graph cannot come to mean another object."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._handles = itertools.count(1)
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def register(self, obj: Any) -> int:
        with self._lock:
            for handle, known in self._objects.items():
                if known is obj:
                    return handle
            handle = next(self._handles)
            self._objects[handle] = obj
            return handle

    def find(self, op: str, handle: int) -> Any:
        obj = self._objects.get(handle)
        if obj is None:
            rule = f"handle must be that of a {self._kind} which still exists"
            raise DcpInvalidArgument(f"{op}: {rule} (got {handle}: never given, or its {self._kind} is gone)")
        return obj


# importlib.reload runs this again: handles that graphs hold stay good.
_registry: _Registry = globals().get("_registry") or _Registry("workspace")
_plans: _Registry = globals().get("_plans") or _Registry("plan")


def register(workspace: dcpkernels.Workspace) -> int:
    """The handle of a workspace, for `torch.ops.dcpkernels.*`: the same one at every call. Does not keep it alive.

    Raises DcpInvalidArgument when it is no Workspace.
    """
    if not isinstance(workspace, dcpkernels.Workspace):
        raise DcpInvalidArgument(f"register: workspace must be a dcpkernels.Workspace (got {type(workspace).__name__})")
    return _registry.register(workspace)


# -- the ops

_DEVICES = ("cpu", "cuda")


def _count(state: Tensor, lane: int) -> None:
    # On a GPU this would be a kernel more; what a compiler is told (that it changes) need not happen.
    if state.device.type == "cpu":
        state[lane].add_(1)


@torch.library.custom_op("dcpkernels::a2a_lse_reduce", mutates_args=("out", "lse_out", "state"), device_types=_DEVICES)
def _a2a_lse_reduce_op(
    partial_out: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse_out: Tensor | None,
    state: Tensor,
    handle: int,
    lse_base: str,
    seq_lens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    lane: int = 0,
) -> None:
    """`dcpkernels.a2a_lse_reduce` into `out` [T, H/W, D], and `lse_out` [T, H/W] where it is given."""
    workspace = _find("a2a_lse_reduce", handle, state)
    dcpkernels.a2a_lse_reduce(
        partial_out,
        partial_lse,
        workspace=workspace,
        lse_base=lse_base,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        out=out,
        lse_out=lse_out,
        lane=lane,
    )
    _count(state, lane)


@torch.library.custom_op("dcpkernels::query_gather", mutates_args=("out", "state"), device_types=_DEVICES)
def _query_gather_op(
    parts: list[Tensor],
    out: Tensor,
    state: Tensor,
    handle: int,
    scale: float | None = None,
    scale_tensor: Tensor | None = None,
    lane: int = 0,
) -> None:
    """`dcpkernels.query_gather` into `out` [T, H, Dq]. The scale is a number or a tensor, or there is none."""
    workspace = _find("query_gather", handle, state)
    if scale is not None and scale_tensor is not None:
        raise DcpInvalidArgument("query_gather: scale must be a number or a tensor (got scale and scale_tensor)")
    dcpkernels.query_gather(
        parts, workspace=workspace, scale=scale if scale_tensor is None else scale_tensor, out=out, lane=lane
    )
    _count(state, lane)


@torch.library.custom_op("dcpkernels::kv_gather", mutates_args=("out", "state"), device_types=_DEVICES)
def _kv_gather_op(
    kv_cache: Tensor,
    plan: Tensor,
    out: Tensor,
    state: Tensor,
    handle: int,
    chunk_idx: int,
    scale: float | None = None,
    scale_tensor: Tensor | None = None,
    lane: int = 0,
) -> None:
    """`dcpkernels.kv_gather` into the first rows of `out` [rows or more, Dkv]; `plan` has the handle of the plan."""
    op = "kv_gather"
    workspace = _find(op, handle, state)
    if plan.dtype is not torch.int64 or tuple(plan.shape) != (1,):
        raise DcpInvalidArgument(f"{op}: plan must be an int64 tensor [1] (got {plan.dtype}, {list(plan.shape)})")
    found = _plans.find(op, int(plan))
    if scale is not None and scale_tensor is not None:
        raise DcpInvalidArgument(f"{op}: scale must be a number or a tensor (got scale and scale_tensor)")
    rows, dim = found.num_rows(chunk_idx), kv_cache.shape[-1]
    # Without kv_chunk_rows it is the function that refuses, as it does everything else.
    if workspace.config.kv_chunk_rows > 0 and (out.dim() != 2 or out.shape[0] < rows or out.shape[1] != dim):
        raise DcpInvalidArgument(f"{op}: out must have shape [{rows} or more, {dim}] (got {list(out.shape)})")
    arguments: dict[str, Any] = {"workspace": workspace, "lane": lane}
    if scale is None and scale_tensor is None:
        if out.dtype is not kv_cache.dtype:
            raise DcpInvalidArgument(f"{op}: out must have kv_cache's dtype {kv_cache.dtype} (got {out.dtype})")
        out[:rows].copy_(dcpkernels.kv_gather(kv_cache, found, chunk_idx, **arguments))
    else:
        arguments["scale"] = scale if scale_tensor is None else scale_tensor
        dcpkernels.kv_gather(kv_cache, found, chunk_idx, out=out[:rows], **arguments)
    _count(state, lane)


@_a2a_lse_reduce_op.register_fake
def _(*_arguments: Any, **_keywords: Any) -> None:
    """All that the op writes is there before it; arguments are checked when it runs, with errors that name them."""


@_query_gather_op.register_fake
def _(*_arguments: Any, **_keywords: Any) -> None:
    """As above."""


@_kv_gather_op.register_fake
def _(*_arguments: Any, **_keywords: Any) -> None:
    """As above."""


def _find(op: str, handle: int, state: Tensor) -> Any:
    """The workspace, for which `state` has to be."""
    workspace = _registry.find(op, handle)
    if state.dtype is not torch.int64 or tuple(state.shape) != (workspace.config.num_lanes,):
        rule = f"state must be an int64 tensor [num_lanes] = [{workspace.config.num_lanes}]"
        raise DcpInvalidArgument(f"{op}: {rule} (got {state.dtype}, {list(state.shape)})")
    return workspace


# -- what compiled code calls


class TraceablePlan:
    """The `KVGatherPlan` of the present step, as compiled code can use it: make one outside of it, and `set` the plan
    of each step before the step runs.

    A plan is new in every step; in a graph it would be a constant, and every step would compile again. So a graph has
    `handle`, a tensor int64 [1], which `set` writes and the op reads when it runs.

    Attributes:
        plan: kept alive until the next one is set.
        handle: to be passed to `torch.ops.dcpkernels.kv_gather`, not to be written.

    Raises DcpInvalidArgument when `plan` is no dcpkernels.KVGatherPlan.
    """

    def __init__(self, plan: dcpkernels.KVGatherPlan) -> None:
        with torch.inference_mode(False):
            self.handle = torch.zeros(1, dtype=torch.int64)
        self.set(plan)

    def set(self, plan: dcpkernels.KVGatherPlan) -> None:
        if not isinstance(plan, dcpkernels.KVGatherPlan):
            got = type(plan).__name__
            raise DcpInvalidArgument(f"TraceablePlan: plan must be a dcpkernels.KVGatherPlan (got {got})")
        self.handle.fill_(_plans.register(plan))
        self.plan = plan


def _require_dispatched(op: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Where the dispatcher would not bring these tensors to the op. With one on the meta device it runs what stands for the
    op while code is traced: nothing. In place of a lazily negated output it hands on a copy; where another output is None
    it then fails, when the call has been made."""
    if torch.compiler.is_compiling():
        return
    for name, value in (inputs | outputs).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise DcpInvalidArgument(f"{op}: {name} must be on the workspace's device (got 'meta')")
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.is_neg():
            given = "a lazily negated view: pass resolve_neg()"
            raise DcpInvalidArgument(f"{op}: {name} must hold its values as they are (got {given})")


class TraceableWorkspace:
    """A workspace as compiled code can use it: its handle, and the `state` that its calls share.

    Make one per workspace, outside of compiled code, and keep it: two of them on one workspace have states of their
    own, and a compiler may then swap calls of the one and the other.

    Its methods are the functions of `dcpkernels` with `workspace` left out, on tensors that they allocate where no
    `out` is given. They may be called inside torch.compile(fullgraph=True), with any number of tokens, and outside of
    it. Tensors are checked when the op runs: the errors are those of the functions, raised by the compiled code. What
    is no tensor at all is refused by torch, in its own words.

    Attributes:
        workspace: kept alive; closing it is the caller's, as before.
        handle: `register(workspace)`.
        state: int64 [num_lanes], calls made through this object on each lane. Stands for the epochs, which are in the
            workspace's memory. To be passed to `torch.ops.dcpkernels.*`, not to be written.

    Raises DcpInvalidArgument when `workspace` is no dcpkernels.Workspace.
    """

    def __init__(self, workspace: dcpkernels.Workspace) -> None:
        self.handle = register(workspace)
        self.workspace = workspace
        self.num_heads, self.num_local_heads = workspace.config.num_heads, workspace.num_local_heads
        self.kv_chunk_rows, self.quantised_dtype = workspace.config.kv_chunk_rows, workspace.config.quantised_dtype
        with torch.inference_mode(False):  # else code outside of inference mode could not write it
            self.state = torch.zeros(workspace.config.num_lanes, dtype=torch.int64, device=workspace.device)

    def a2a_lse_reduce(
        self,
        partial_out: Tensor,
        partial_lse: Tensor,
        *,
        lse_base: str,
        seq_lens: Tensor | None = None,
        query_start_loc: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
        return_lse: bool = False,
        lane: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`dcpkernels.a2a_lse_reduce`: arguments, result and errors are its own."""
        inputs = {"partial_out": partial_out, "partial_lse": partial_lse}
        inputs |= {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
        _require_dispatched("a2a_lse_reduce", inputs, {"out": out, "lse_out": lse_out})
        # Without detach the dispatcher would ask for a derivative of what requires grad.
        partial_out, partial_lse = partial_out.detach(), partial_lse.detach()
        if out is None:
            out = partial_out.new_empty((partial_out.shape[0], self.num_local_heads, partial_out.shape[2]))
        if lse_out is None and return_lse:
            lse_out = partial_out.new_empty((partial_out.shape[0], self.num_local_heads), dtype=torch.float32)
        torch.ops.dcpkernels.a2a_lse_reduce(
            partial_out, partial_lse, out, lse_out, self.state, self.handle, lse_base, seq_lens, query_start_loc, lane
        )
        return out if lse_out is None else (out, lse_out)

    def query_gather(
        self,
        query: Tensor | tuple[Tensor, ...] | list[Tensor],
        *,
        scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lane: int = 0,
    ) -> Tensor:
        """`dcpkernels.query_gather` with an `out`, which is allocated when None: arguments and errors are its own.

        The result is a tensor of the caller's, which may be written, not a view of the workspace: a compiler may write
        in place, or keep a tensor, where peers would not expect it. So the rows are copied once more than in
        `dcpkernels.query_gather` without `out`, and nothing stays open: no `release_query`.
        """
        parts = [part.detach() for part in (query if isinstance(query, (tuple, list)) else (query,))]
        if not parts:
            raise DcpInvalidArgument("query_gather: query must have parts (got 0)")
        inputs = {f"query[{i}]": part for i, part in enumerate(parts)}
        _require_dispatched("query_gather", {**inputs, "scale": scale}, {"out": out})
        if out is None:
            dtype = parts[0].dtype if scale is None else self.quantised_dtype
            head_dim = sum(part.shape[-1] for part in parts)
            out = parts[0].new_empty((parts[0].shape[0], self.num_heads, head_dim), dtype=dtype)
        number, tensor = (None, scale) if isinstance(scale, Tensor) else (scale, None)
        torch.ops.dcpkernels.query_gather(parts, out, self.state, self.handle, number, tensor, lane)
        return out

    def kv_gather(
        self,
        kv_cache: Tensor,
        plan: TraceablePlan,
        chunk_idx: int,
        *,
        scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lane: int = 0,
    ) -> Tensor:
        """`dcpkernels.kv_gather` into the first `plan.plan.num_rows(chunk_idx)` rows of `out`, whose other rows it does
        not touch: arguments and errors are its own otherwise.

        out: [rows or more, Dkv], of the cache's dtype, with scale bf16; allocated with kv_chunk_rows rows when None, so
            that its shape is that of every chunk of every step. The result, a copy, as that of `query_gather`.
        """
        kv_cache = kv_cache.detach()
        _require_dispatched("kv_gather", {"kv_cache": kv_cache, "scale": scale}, {"out": out})
        if out is None:
            dtype = kv_cache.dtype if scale is None else torch.bfloat16
            out = kv_cache.new_empty((self.kv_chunk_rows, kv_cache.shape[2]), dtype=dtype)
        number, tensor = (None, scale) if isinstance(scale, Tensor) else (scale, None)
        arguments = (self.state, self.handle, chunk_idx, number, tensor, lane)
        torch.ops.dcpkernels.kv_gather(kv_cache, plan.handle, out, *arguments)
        return out


def a2a_lse_reduce(
    partial_out: Tensor, partial_lse: Tensor, *, workspace: TraceableWorkspace, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`dcpkernels.a2a_lse_reduce` with the same arguments, on a workspace that compiled code can use."""
    return workspace.a2a_lse_reduce(partial_out, partial_lse, **arguments)


def query_gather(
    query: Tensor | tuple[Tensor, ...] | list[Tensor], *, workspace: TraceableWorkspace, **arguments: Any
) -> Tensor:
    """`dcpkernels.query_gather` with the same arguments, on a workspace that compiled code can use: a copy, as
    `TraceableWorkspace.query_gather` says."""
    return workspace.query_gather(query, **arguments)


def kv_gather(
    kv_cache: Tensor, plan: TraceablePlan, chunk_idx: int, *, workspace: TraceableWorkspace, **arguments: Any
) -> Tensor:
    """`dcpkernels.kv_gather` of the plan that is set, on a workspace that compiled code can use: a copy, in a tensor of
    a fixed size, as `TraceableWorkspace.kv_gather` says."""
    return workspace.kv_gather(kv_cache, plan, chunk_idx, **arguments)
