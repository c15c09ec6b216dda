"""`Workspace.self_check`: every op on data that all ranks can make for themselves, against the reference."""

from __future__ import annotations

from typing import Any

import torch

from dcpkernels import reference
from dcpkernels.errors import DcpError
from dcpkernels.ops.a2a_lse_reduce import a2a_lse_reduce

_NUM_TOKENS = 3  # one of them empty everywhere, one on some ranks


def check_ops(workspace: Any) -> None:
    """Collective. Raises DcpError where this rank got a wrong result, and what an op raises."""
    # A rank with a wrong result goes on: the others wait for it in the next lane.
    wrong = [error for lane in range(workspace.config.num_lanes) if (error := _check_a2a_lse_reduce(workspace, lane))]
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
    mine = workspace.partial_out(num_tokens, lane=lane).copy_(outs[rank])
    got, got_lse = a2a_lse_reduce(mine, lses[rank], workspace=workspace, lse_base="2", return_lse=True, lane=lane)
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


def _largest(got: torch.Tensor, exact: torch.Tensor) -> float:
    got = got.double()
    return torch.where(got == exact, 0.0, (got - exact).abs()).max().item()  # -inf == -inf
