"""Where vLLM's module of DCP collectives is changed: its three factories of workspaces, the two functions that grouped-query
attention merges by, and the constructor of MLADCPManager, which alone knows all of a layer's shape.

`dcpkernels.integrations.vllm` has looked at the signatures before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from dcpkernels.integrations.vllm_workspaces import Collectives, KVGather, LseReduce, MlaCollectives, MlaShape

MERGE_FUNCTIONS = ("dcp_a2a_lse_reduce", "cp_lse_ag_out_rs")
# Modules that take those by name, when they are imported.
IMPORTERS = ("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.flashinfer")


class _Building:
    """A manager whose constructor runs: its arguments, and what its layer got of ours."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.collectives: MlaCollectives | None = None

    def shape(self, device: torch.device, max_num_tokens: int, num_lanes: int) -> MlaShape:
        of = self.arguments
        return MlaShape(
            device,
            max_num_tokens,
            heads_per_rank=of["num_heads"],
            head_dim=of["output_head_dim"],
            dtype=of["output_dtype"],
            num_lanes=num_lanes,
            query_head_dim=of["query_head_dim"],
            query_dtype=of["query_dtype"],
            padded_num_heads=of["padded_num_heads"] or 0,
        )


_building: ContextVar[_Building | None] = ContextVar("building", default=None)


def replace(dcp: ModuleType, collectives: Collectives) -> None:
    """`dcp` is vllm.v1.attention.ops.dcp."""
    for factory in (_a2a_factory, _query_factory, _kv_factory):
        name, ours = factory(dcp, collectives)
        setattr(dcp, name, ours)
    for name in MERGE_FUNCTIONS:
        original = getattr(dcp, name)
        ours = _merge_function(original, collectives)
        setattr(dcp, name, ours)
        for importer in map(sys.modules.get, IMPORTERS):
            if getattr(importer, name, None) is original:
                setattr(importer, name, ours)
    _wrap_constructor(dcp.MLADCPManager, collectives)


# -- factories: a workspace of ours, or what vLLM's own gives


def _of_manager(
    collectives: Collectives, group: Any, device: torch.device, max_num_tokens: int, num_lanes: int
) -> MlaCollectives | None:
    building = _building.get()
    if building is None or building.arguments["use_pcp"]:  # under prefill context parallelism nothing was tried
        return None
    shape = building.shape(torch.device(device), max_num_tokens, num_lanes)
    building.collectives = collectives.mla(group, shape)
    return building.collectives


def _a2a_factory(dcp: ModuleType, collectives: Collectives) -> tuple[str, Callable[..., Any]]:
    vllms = dcp.get_direct_dcp_a2a_workspace

    @functools.wraps(vllms)
    def get_direct_dcp_a2a_workspace(
        group: Any,
        device: torch.device,
        max_num_tokens: int,
        heads_per_rank: int,
        head_dim: int,
        dtype: torch.dtype,
        num_ubatches: int,
    ) -> Any:
        made: MlaCollectives | None
        if _building.get() is None:  # asked by somebody else than the manager
            shape = MlaShape(torch.device(device), max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches)
            made = collectives.mla(group, shape)
        else:
            made = _of_manager(collectives, group, device, max_num_tokens, num_ubatches)
        if made is not None:
            return LseReduce(made)
        return vllms(group, device, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches)

    return vllms.__name__, get_direct_dcp_a2a_workspace


def _query_factory(dcp: ModuleType, collectives: Collectives) -> tuple[str, Callable[..., Any]]:
    vllms = dcp.get_direct_dcp_q_gather_workspace

    @functools.wraps(vllms)
    def get_direct_dcp_q_gather_workspace(
        group: Any,
        device: torch.device,
        max_num_tokens: int,
        heads_per_rank: int,
        head_dim: int,
        dtype: torch.dtype,
        num_ubatches: int,
        padded_num_heads: int | None = None,
    ) -> Any:
        # Not for others than the manager: a query is in use until its workspace's merge, so the two belong together.
        made = _of_manager(collectives, group, device, max_num_tokens, num_ubatches)
        if made is not None:
            return made
        return vllms(group, device, max_num_tokens, heads_per_rank, head_dim, dtype, num_ubatches, padded_num_heads)

    return vllms.__name__, get_direct_dcp_q_gather_workspace


def _kv_factory(dcp: ModuleType, collectives: Collectives) -> tuple[str, Callable[..., Any]]:
    vllms = dcp.get_direct_dcp_kv_gather_workspace

    @functools.wraps(vllms)
    def get_direct_dcp_kv_gather_workspace(
        group: Any,
        device: torch.device,
        max_gathered_tokens: int,
        token_dim: int,
        dtype: torch.dtype,
        num_ubatches: int,
    ) -> Any:
        made: KVGather | None = collectives.kv(
            group, torch.device(device), max_gathered_tokens, token_dim, dtype, num_ubatches
        )
        if made is not None:
            return made
        return vllms(group, device, max_gathered_tokens, token_dim, dtype, num_ubatches)

    return vllms.__name__, get_direct_dcp_kv_gather_workspace


# -- functions and the manager


def _merge_function(original: Callable[..., Any], collectives: Collectives) -> Callable[..., Any]:
    """`original` by our merge. The results of both are [T, H/W, D], and with return_lse [T, H/W]: they differ in what they
    send. Grouped-query attention calls them by name."""

    @functools.wraps(original)  # __wrapped__ is the original
    def merge(
        cp_attn_out: torch.Tensor,
        cp_attn_lse: torch.Tensor,
        cp_group: Any,
        ctx: Any = None,
        return_lse: bool = False,
        is_lse_base_on_e: bool = True,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
    ) -> Any:
        made = collectives.merge(cp_group, cp_attn_out) if cp_group.world_size > 1 else None
        if made is None:
            return original(
                cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e, seq_lens, query_start_loc
            )
        return made.lse_reduce(
            cp_attn_out, cp_attn_lse, is_lse_base_on_e, seq_lens, query_start_loc, return_lse=return_lse
        )

    merge.is_dcpkernels = True  # type: ignore[attr-defined]
    return merge


def _wrap_constructor(manager: type, collectives: Collectives) -> None:
    init = manager.__init__  # type: ignore[misc]
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        building = _Building(dict(signature.bind(self, *args, **kwargs).arguments))
        token = _building.set(building)
        try:
            init(self, *args, **kwargs)
        finally:
            _building.reset(token)
        if building.arguments["use_pcp"]:
            collectives.decline(self.group)
        _choose_combine(self, building)

    manager.__init__ = wrapped  # type: ignore[misc]


def _choose_combine(manager: Any, building: _Building) -> None:
    """With --dcp-comm-backend ag_rs the manager asks for no workspace of the merge and takes the function, now ours, that
    would make one of its own. The layer has one already, in which its query is gathered; or it has none of ours."""
    chosen = getattr(manager.combine, "func", None)
    if not getattr(chosen, "is_dcpkernels", False):
        return
    if building.collectives is not None:
        base = building.arguments["is_lse_base_on_e"]
        manager.combine = functools.partial(building.collectives.lse_reduce, is_lse_base_on_e=base)
    else:
        manager.combine = functools.partial(chosen.__wrapped__, *manager.combine.args, **manager.combine.keywords)
