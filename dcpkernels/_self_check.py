"""`Workspace.self_check`: every op on data that all ranks can make for themselves, against the reference."""

from __future__ import annotations

from typing import Any

import torch

from dcpkernels import reference
from dcpkernels.errors import DcpError
from dcpkernels.kv_gather_plan import KVGatherPlan
from dcpkernels.ops.a2a_lse_reduce import a2a_lse_reduce
from dcpkernels.ops.kv_gather import kv_gather
from dcpkernels.ops.query_gather import query_gather, release_query

_NUM_TOKENS = 3  # one of them empty everywhere, one on some ranks
_NUM_BLOCKS, _BLOCK_SIZE = 2, 2  # of the cache of kv_gather


def check_ops(workspace: Any) -> None:
    """Collective. Raises DcpError where this rank got a wrong result, and what an op raises."""
    config = workspace.config
    checks = [_check_a2a_lse_reduce]
    checks += [_check_query_gather] if config.query_head_dim else []
    checks += [_check_kv_gather] if config.kv_chunk_rows else []
    # A rank with a wrong result goes on: the others wait for it in the next lane.
    lanes = range(config.num_lanes)
    wrong = [error for lane in lanes for check in checks if (error := check(workspace, lane))]
    if workspace.device != "cpu":
        torch.cuda.current_stream(workspace.device).synchronize()
    workspace.check()  # a fault explains a wrong result better than its numbers
    if wrong:
        raise wrong[0]


def _check_a2a_lse_reduce(workspace: Any, lane: int) -> DcpError | None:
    config, num_ranks, rank = workspace.config, workspace.num_ranks, workspace.rank
    num_tokens = min(_NUM_TOKENS, config.max_num_tokens)
    generator = torch.Generator().manual_seed(lane)
    shape = (num_ranks, num_tokens, config.num_heads)
    outs = torch.randn(*shape, config.head_dim, generator=generator).to(config.dtype)
    lses = torch.randn(shape, generator=generator) * 3
    lses[:, 1:2] = float("-inf")
    lses[::2, 2:3] = float("nan")
    mine, my_lse = workspace.partial_out(num_tokens, lane=lane).copy_(outs[rank]), lses[rank].to(workspace.device)
    results = a2a_lse_reduce(mine, my_lse, workspace=workspace, lse_base="2", return_lse=True, lane=lane)
    got, got_lse = (result.cpu() for result in results)
    heads = slice(rank * workspace.num_local_heads, (rank + 1) * workspace.num_local_heads)
    exact, exact_lse = (value[:, heads] for value in reference.a2a_lse_reduce(outs, lses, lse_base="2"))
    # Coarse: it is the way of the rows that is checked here, and not the last bit of the sum.
    close = torch.allclose(got.double(), exact, rtol=torch.finfo(config.dtype).eps, atol=1e-4)
    if close and torch.allclose(got_lse.double(), exact_lse, rtol=1e-5, atol=1e-4):
        return None
    errors = [_largest(got, exact), _largest(got_lse, exact_lse)]
    return DcpError(
        "a2a_lse_reduce: the result must be the merge of all ranks "
        f"(rank {rank}, lane {lane}: largest error {errors[0]:.3g}, of the LSE {errors[1]:.3g})",
        ranks=(rank,),
    )


def _check_query_gather(workspace: Any, lane: int) -> DcpError | None:
    config, num_ranks = workspace.config, workspace.num_ranks
    num_tokens = min(_NUM_TOKENS, config.max_num_tokens)
    shape = (num_ranks, num_tokens, workspace.num_local_heads, config.query_head_dim)
    queries = _any_bytes(lane, shape, config.query_dtype)
    got = query_gather(queries[workspace.rank].to(workspace.device), workspace=workspace, lane=lane)
    is_equal = _same_bytes(got.cpu(), reference.query_gather(list(queries)))
    release_query(workspace=workspace, lane=lane)
    return None if is_equal else _gather_error("query_gather", workspace, lane)


def _check_kv_gather(workspace: Any, lane: int) -> DcpError | None:
    config, num_ranks = workspace.config, workspace.num_ranks
    length = min(_NUM_BLOCKS * _BLOCK_SIZE * num_ranks, config.kv_chunk_rows)
    caches = _any_bytes(lane, (num_ranks, _NUM_BLOCKS, _BLOCK_SIZE, config.kv_dim), config.kv_dtype)
    tables = [list(range(_NUM_BLOCKS))]
    plan = KVGatherPlan(
        [length],
        tables,
        block_size=_BLOCK_SIZE,
        num_ranks=num_ranks,
        rank=workspace.rank,
        chunk_size=config.kv_chunk_rows,
    )
    got = kv_gather(caches[workspace.rank].to(workspace.device), plan, 0, workspace=workspace, lane=lane).cpu()
    exact = reference.kv_gather(
        list(caches), [length], [tables] * num_ranks, interleave=1, chunk_size=config.kv_chunk_rows, chunk_idx=0
    )
    return None if _same_bytes(got, exact) else _gather_error("kv_gather", workspace, lane)


def _any_bytes(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def _same_bytes(got: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), exact.view(torch.uint8))


def _gather_error(op: str, workspace: Any, lane: int) -> DcpError:
    rank = workspace.rank
    return DcpError(
        f"{op}: the result must be the bytes of all ranks (rank {rank}, lane {lane}: it is not)", ranks=(rank,)
    )


def _largest(got: torch.Tensor, exact: torch.Tensor) -> float:
    got = got.double()
    return torch.where(got == exact, 0.0, (got - exact).abs()).max().item()  # -inf == -inf
