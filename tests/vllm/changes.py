"""What is changed in a running engine, layer by layer: vLLM's own collectives in place of ours, sabotage, poison."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def managers(layers: list[Any]) -> list[Any]:
    return [layer.dcp_manager for layer in layers]


def gathers_context(manager: Any) -> bool:
    """All layers gather by the manager of the first one."""
    return "_kv_gather" in manager.__dict__


@contextmanager
def changed(name: str, layers: list[Any]) -> Iterator[None]:
    """The layers with the change `name` ("" is none)."""
    if not name:
        yield
        return
    before = [dict(manager.__dict__) for manager in managers(layers)]
    for manager in managers(layers):
        CHANGES[name](manager)
    try:
        yield
    finally:
        for manager, attributes in zip(managers(layers), before, strict=True):
            manager.__dict__.clear()
            manager.__dict__.update(attributes)


# -- vLLM's own collectives


def vllms_collectives(manager: Any) -> None:
    """What vLLM falls back to without direct access to peers, over gloo. Two helpers of its merge are Triton kernels, which
    do not run here: these have torch bodies."""
    from vllm.v1.attention.ops import dcp

    dcp._dcp_a2a_pack_send, dcp._dcp_a2a_unpack_combine = pack_send, unpack_combine
    merge = dcp.dcp_a2a_lse_reduce.__wrapped__  # ours wraps it
    manager.combine = functools.partial(merge, cp_group=manager.group, is_lse_base_on_e=True)
    manager.query_gather = manager._gather_query
    if gathers_context(manager):
        manager._kv_gather = functools.partial(
            torch.distributed.all_gather_into_tensor, group=manager.group.device_group
        )


def pack_send(out, lse, send, world_size, heads, head_dim, lse_dim, seq_lens=None, query_start_loc=None) -> None:
    from vllm.v1.attention.ops.dcp import mask_dcp_empty_shards_

    lse = lse.float().clone()
    mask_dcp_empty_shards_(lse, seq_lens, query_start_loc)
    num_tokens = out.shape[0]
    send[..., :head_dim] = out.view(num_tokens, world_size, heads, head_dim).transpose(0, 1)
    # The LSE keeps its 32 bits: it takes the room of one fp32 or of two 16-bit numbers.
    send[..., head_dim:] = lse.view(torch.int32)[..., None].view(send.dtype).view(
        num_tokens, world_size, heads, lse_dim
    ).transpose(0, 1)


def unpack_combine(received, head_dim, lse_dim, return_lse, is_lse_base_on_e):
    assert is_lse_base_on_e and not return_lse
    parts = received[..., :head_dim].float()
    lse = received[..., head_dim:].contiguous().view(torch.float32)[..., 0]
    lse = torch.where(lse.isnan() | (lse == torch.inf), -torch.inf, lse)
    top = lse.amax(0)
    weights = (lse - torch.where(top == -torch.inf, 0.0, top)).exp()
    # As the kernel does: what has no weight is not read.
    parts = torch.where(weights[..., None] == 0, 0.0, parts)
    total = weights.sum(0)
    merged = (weights[..., None] * parts).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged.to(received.dtype)


def compared(manager: Any) -> None:
    """The same partial results merged by both; the engine goes on with ours. Counts in `comparison`."""
    ours = manager.combine
    vllms_collectives(manager)
    vllms = manager.combine

    def combine(partial_out, partial_lse, **lengths):
        merged = ours(partial_out, partial_lse, **lengths)
        distance = steps_between(merged, vllms(partial_out, partial_lse, **lengths))
        comparison["elements"] += distance.numel()
        comparison["different"] += int((distance > 0).sum())
        comparison["steps"] = max(comparison["steps"], int(distance.max()))
        return merged

    manager.combine = combine


def steps_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many bf16 numbers further the other one is; NaN is far from everything."""
    a, b = (x.view(torch.int16).int() for x in (a, b))
    a, b = (torch.where(x < 0, -(x & 0x7FFF), x) for x in (a, b))
    return (a - b).abs()


comparison = {"elements": 0, "different": 0, "steps": 0}


# -- sabotage: our op runs, and what it returns is then made wrong


def merge_own_part_only(manager: Any) -> None:
    merge, rank = manager.combine, manager.group.rank_in_group

    def combine(partial_out, partial_lse, **lengths):
        merged = merge(partial_out, partial_lse, **lengths)
        first = rank * merged.shape[1]
        own = partial_out[:, first : first + merged.shape[1]].clone()
        own[partial_lse[:, first] == -torch.inf] = 0  # there it is undefined
        return own

    manager.combine = combine


def query_of_wrong_ranks(manager: Any) -> None:
    gather, num_ranks = manager.query_gather, manager.group.world_size
    manager.query_gather = lambda query: gather(query).unflatten(1, (num_ranks, -1)).flip(1).flatten(1, 2)


def context_of_own_rank_only(manager: Any) -> None:
    """With two ranks and interleave 1 neighbours are of different ranks. (To swap them would change nothing: attention does
    not ask for the order of what it sees all of.)"""
    if not gathers_context(manager):
        return
    wrong = copy.copy(manager._kv_gather.__self__)

    class WrongGather(type(wrong)):
        def gather_in_order(self, out, cache, plan):
            super().gather_in_order(out, cache, plan)
            pairs, rank = out[: len(out) // 2 * 2].unflatten(0, (-1, 2)), manager.group.rank_in_group
            pairs[:, 1 - rank] = pairs[:, rank]

    wrong.__class__ = WrongGather
    manager._kv_gather = wrong.gather


def slab_of_wrong_ranks(manager: Any) -> None:
    if not gathers_context(manager):
        return
    gather, num_ranks = manager._kv_gather, manager.group.world_size

    def gather_wrong(gathered, local):
        gather(gathered, local)
        gathered.copy_(gathered.unflatten(0, (num_ranks, -1)).flip(0).flatten(0, 1))

    manager._kv_gather = gather_wrong


# -- the other way of context


def context_by_slab(manager: Any) -> None:
    """vLLM's own way, whose gather is ours: rank by rank. It cannot tell whose the function is, and takes that way."""
    if gathers_context(manager):
        manager._kv_gather = functools.partial(manager._kv_gather)


CHANGES: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        vllms_collectives,
        compared,
        merge_own_part_only,
        query_of_wrong_ranks,
        context_of_own_rank_only,
        slab_of_wrong_ranks,
        context_by_slab,
    )
}


# -- poison


def poison_empty_shards(layers: list[Any], counts: dict[str, int]) -> None:
    """For a row without local tokens attention may return anything; so it returns NaN, with an LSE that looks like one."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_mqa(q, cache, metadata, layer):
            out, lse = forward(q, cache, metadata, layer)
            empty = metadata.decode.seq_lens == 0
            counts["poisoned_rows"] += int(empty.sum())
            out[empty], lse[empty] = torch.nan, 7.0
            return out, lse

        return forward_mqa

    for layer in layers:
        layer.impl.forward_mqa = wrap(layer.impl.forward_mqa)
