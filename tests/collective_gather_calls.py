"""What the tests of gathers over both backends share: calls of every kind as all ranks make them, and the truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from dcpkernels import (
    KVGatherPlan,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    reference,
    release_query,
)
from dcpkernels.testing import Guarded
from tests.test_reference_gathers import DTYPES, any_bytes

NUM_HEADS, QUERY_DIM, MAX_TOKENS = 6, 36, 4
CHUNK_ROWS, KV_BYTES = 24, 96
CONFIG = WorkspaceConfig(
    NUM_HEADS,
    16,
    MAX_TOKENS,
    dtype=torch.float32,
    num_lanes=2,
    query_head_dim=QUERY_DIM,
    query_dtype=torch.float32,
    padded_num_heads=8,
    kv_chunk_rows=CHUNK_ROWS,
    kv_dim=KV_BYTES,
    kv_dtype=torch.float8_e4m3fn,
    timeout_s=20.0,
    first_call_timeout_s=20.0,
)
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def as_bytes(tensor):
    """So that two NaN and the two zeros compare as what they are."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def placed(tensor, turn):
    """The same values among NaN, at one of several strides and alignments."""
    *outer, last = range(tensor.dim())
    order = [*(outer if turn % 2 else reversed(outer)), last]
    strides, reached = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = reached
        reached = reached * tensor.shape[dim] + (turn % 3 if dim == last else turn % 5)
    guarded = Guarded(tensor.shape, tensor.dtype, strides=strides, offset=turn % 7)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    guarded.tensor.view(integer).copy_(tensor.view(integer))
    return guarded


# -- query_gather


@dataclass
class Query:
    """[rank][part] tensors of one call on all ranks."""

    parts: list[list[torch.Tensor]]
    scale: float | torch.Tensor | None = None
    has_out: bool = False
    lane: int = 0
    to: torch.dtype = torch.float8_e4m3fn  # with a scale

    @property
    def num_tokens(self):
        return self.parts[0][0].shape[0]

    def truth(self):
        scale = self.scale.item() if isinstance(self.scale, torch.Tensor) else self.scale
        return as_bytes(reference.query_gather(self.parts, scale=scale, scaled_dtype=self.to))


def queries(num_ranks):
    """All dtypes, parts, scales of both kinds; T of 0, of the capacity and, with `out`, of several rounds."""
    calls = []
    dims = [(QUERY_DIM,), (32, 4), (1, 16, 16, 3), (5, 31)]
    kinds = [
        (dtype, quantises, has_out)
        for has_out in (False, True)
        for dtype in DTYPES
        for quantises in (False, True)
        if not quantises or dtype.itemsize > 1
    ]
    for i, (dtype, quantises, has_out) in enumerate(random.Random(0).sample(kinds, len(kinds))):
        num_tokens = ([9, 0, 4, 13] if has_out else [4, 1, 0, 3])[sum(call.has_out == has_out for call in calls) % 4]
        shape = (num_tokens, NUM_HEADS // num_ranks)
        parts = [
            [any_bytes(*shape, dim, dtype=dtype, seed=100 * i + 10 * rank + dim) for dim in dims[i % 4]]
            for rank in range(num_ranks)
        ]
        scale = (3.7e-3 if i % 2 else torch.tensor([0.1 * i + 0.1])) if quantises else None
        to = E4M3 if not has_out or i % 3 else FNUZ  # CONFIG decides where there is no `out`
        calls.append(Query(parts, scale, has_out, i // 2 % 2, to))
    # Numbers that do not all saturate; of e4m3fnuz, some between its largest and that of e4m3fn.
    gen = torch.Generator().manual_seed(7)
    numbers = [[torch.randn(4, NUM_HEADS // num_ranks, QUERY_DIM, generator=gen)] for _ in range(num_ranks)]
    calls += [Query(numbers, 0.02), Query(numbers, torch.tensor(0.3), True)]
    return [*calls, Query(numbers, 0.01, True, 0, FNUZ)]


def gather_query(workspace, call, turn=0):
    """(bytes of the result, address of the view or None); a view is left open."""
    mine = [placed(part, turn + i) for i, part in enumerate(call.parts[workspace.rank])]
    arguments = {"workspace": workspace, "scale": call.scale, "lane": call.lane}
    given = [part.tensor for part in mine]
    if call.has_out:
        dtype = given[0].dtype if call.scale is None else call.to
        shape = (call.num_tokens, NUM_HEADS, QUERY_DIM)
        out = placed(torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype), turn + 1)
        got = query_gather(given, out=out.tensor.view(dtype), **arguments)
        out.check()
    else:
        got = query_gather(given[0] if len(given) == 1 else tuple(given), **arguments)
        assert got.is_contiguous() and not got.requires_grad
    assert got.shape == (call.num_tokens, NUM_HEADS, QUERY_DIM)
    [part.check() for part in mine]
    return as_bytes(got), None if call.has_out else got.data_ptr()


def reduce_rows(workspace, num_tokens, lane=0):
    """A merge whose result is known: of rank r's all r, with equal weights."""
    payload = torch.full((num_tokens, NUM_HEADS, 16), float(workspace.rank))
    lse = torch.zeros(num_tokens, NUM_HEADS)
    out = a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e", lane=lane)
    assert out.sub((workspace.num_ranks - 1) / 2).abs().lt(1e-6).all()


def run_queries(workspace, calls):
    """Every call, each view closed by a merge or by a release."""
    results, addresses = [], {0: set(), 1: set()}
    for i, call in enumerate(calls):
        got, address = gather_query(workspace, call, turn=i + workspace.rank)
        results.append(got)
        if address is None:
            continue
        if call.num_tokens:
            addresses[call.lane].add(address)
        if i % 2:
            release_query(workspace=workspace, lane=call.lane)
        else:
            reduce_rows(workspace, call.num_tokens, call.lane)
    assert [len(of_lane) for of_lane in addresses.values()] == [1, 1]
    return results


# -- kv_gather


@dataclass
class Context:
    """Caches and tables of all ranks: what one plan of each rank is about."""

    num_ranks: int
    dtype: torch.dtype
    context_lens: list[int]
    block_size: int = 4
    interleave: int = 1
    chunk_size: int = CHUNK_ROWS
    seed: int = 0
    scale: float | torch.Tensor | None = None
    has_out: bool = False
    lane: int = 0
    row_bytes: int = KV_BYTES
    caches: list[torch.Tensor] = field(init=False)
    tables: list[list[list[int]]] = field(init=False)

    def __post_init__(self):
        gen = torch.Generator().manual_seed(self.seed)
        blocks = [-(-n // self.block_size) + 1 for n in self.context_lens]  # enough for one rank alone
        dim = self.row_bytes // self.dtype.itemsize
        self.caches, self.tables = [], []
        for rank in range(self.num_ranks):
            cache = any_bytes(sum(blocks) + 2, self.block_size, dim, dtype=self.dtype, seed=self.seed + 50 + rank)
            order = torch.randperm(sum(blocks) + 2, generator=gen)[: sum(blocks)]
            self.caches.append(cache)
            self.tables.append([table.tolist() for table in order.split(blocks)])

    def plan(self, rank):
        return KVGatherPlan(
            self.context_lens,
            self.tables[rank],
            block_size=self.block_size,
            num_ranks=self.num_ranks,
            rank=rank,
            chunk_size=self.chunk_size,
            interleave=self.interleave,
        )

    def truth(self, chunk_idx):
        scale = self.scale.item() if isinstance(self.scale, torch.Tensor) else self.scale
        chunk = reference.kv_gather(
            self.caches,
            self.context_lens,
            self.tables,
            chunk_size=self.chunk_size,
            chunk_idx=chunk_idx,
            interleave=self.interleave,
            scale=scale,
        )
        if scale is not None:  # a NaN stays one; torch and csrc differ in which
            chunk.view(torch.int16).masked_fill_(chunk.isnan(), 0x7FC0)
        return as_bytes(chunk)

    def truths(self):
        return [self.truth(i) for i in range(-(-sum(self.context_lens) // self.chunk_size))]


def contexts(num_ranks):
    """All dtypes; rows on all ranks, on some, on one; several requests in a chunk, one over several; scales."""
    shapes = [
        {"context_lens": [5, 0, 17, 3, 40], "chunk_size": 24},
        {"context_lens": [1], "interleave": 4},
        {"context_lens": [23, 31], "interleave": 3, "block_size": 5, "chunk_size": 7},
        {"context_lens": [16], "interleave": 16, "chunk_size": 8},
        {"context_lens": [2, 2, 2, 60], "block_size": 1, "chunk_size": 23},
    ]
    made = [
        Context(num_ranks, dtype, **shapes[(i + j) % 5], seed=10 * i + j, lane=i % 2)
        for i, dtype in enumerate(DTYPES)
        for j in (0, 3)
    ]
    for i, scale in enumerate([0.37, torch.tensor([2.5e-3]), 1.0, torch.tensor(448.0)]):
        fields = {"scale": scale, "has_out": i % 2 == 0, "lane": i // 2, "row_bytes": [96, 16, 48, 96][i]}
        made.append(Context(num_ranks, (E4M3, FNUZ)[i // 2], **shapes[i], seed=200 + i, **fields))
        made.append(Context(num_ranks, (FNUZ, E4M3)[i // 2], **shapes[i], seed=300 + i, **fields))
    return made


def run_context(workspace, context, turn=0, split=False):
    """Every chunk of the plan: bytes as they are while they are valid, and addresses of the views."""
    plan, cache = context.plan(workspace.rank), placed(context.caches[workspace.rank], turn)
    on_lane = {"workspace": workspace, "lane": context.lane}
    results, views = [], []
    if split and plan.num_chunks:
        kv_gather_start(cache.tensor, plan, 0, **on_lane)
    for i in range(plan.num_chunks):
        arguments = {"scale": context.scale, **on_lane}
        shape = (plan.num_rows(i), cache.tensor.shape[2])
        out = placed(torch.zeros(shape, dtype=torch.bfloat16), turn + i) if context.has_out else None
        if out is not None:
            arguments["out"] = out.tensor
        if split:
            got = kv_gather_wait(plan, i, **arguments)
            if i + 1 < plan.num_chunks:
                kv_gather_start(cache.tensor, plan, i + 1, **on_lane)
        else:
            got = kv_gather(cache.tensor, plan, i, **arguments)
        assert got.shape == shape and got.dtype == (context.dtype if context.scale is None else torch.bfloat16)
        if out is not None:
            out.check()
        results.append(as_bytes(got))
        if context.scale is None:
            views.append(got)
    cache.check()
    # The last two chunks are in different buffers, which take turns.
    addresses = [view.data_ptr() for view in views]
    assert addresses[2:] == addresses[:-2] and len(set(addresses)) == min(2, len(views))
    return results
