"""What an engine runs without `query_gather`: an all-gather and a copy, by torch.distributed or MPI and torch ops.

Frozen, as `baselines`: a yardstick of the numbers that this repository shows. Everything is allocated beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcpkernels.cli.baselines_gather import AllGather, Exchange
from dcpkernels.cli.exact import words_of


class AllGatherHeads(AllGather):
    """`query_gather` as one all-gather to [W, T, H/W, Dq], and a copy to [T, H, Dq].

    Before that, where there are any: parts are concatenated, and a query with a scale is divided, clamped and rounded.

    Args:
        num_ranks: W.
        all_gather: makes what exchanges, of the tensors (recv, send).
        parts: [T, H/W, d_i] contiguous, of this rank, read in every call.
        scale: None, or what the query is divided by on its way to fp8 e4m3.
    """

    def __init__(
        self, num_ranks: int, all_gather: Exchange, parts: Sequence[torch.Tensor], scale: float | None
    ) -> None:
        num_tokens, num_local_heads, _ = parts[0].shape
        head_dim, dtype = sum(part.shape[2] for part in parts), parts[0].dtype
        query = parts[0] if len(parts) == 1 else torch.empty(num_tokens, num_local_heads, head_dim, dtype=dtype)
        part_bytes = [part.shape[2] * dtype.itemsize for part in parts]
        width = 8 if all(size % 8 == 0 for size in part_bytes) else min(size & -size for size in part_bytes)
        self._parts = [words_of(part, width) for part in parts] if len(parts) > 1 else []
        self._concatenated = words_of(query, width)

        self._query, self._scale = query, None
        local = query
        if scale is not None:
            self._scale = torch.tensor(scale, dtype=torch.float32)
            self._scaled = torch.empty(query.shape, dtype=torch.float32)
            local = torch.empty(query.shape, dtype=torch.float8_e4m3fn)
        self._quantised = local

        head_bytes = head_dim * local.dtype.itemsize
        self._out = torch.empty(num_tokens, num_ranks * num_local_heads, head_dim, dtype=local.dtype)
        self.packed = words_of(local, head_bytes)
        gathered = torch.empty(num_ranks, *self.packed.shape, dtype=self.packed.dtype)
        self.exchange = all_gather(gathered.flatten(0, 1), self.packed)
        self._rank_major = gathered.flatten(2).transpose(0, 1)  # [T, W, .], of memory [W, T, .]
        self._final = words_of(self._out, head_bytes).view(num_tokens, num_ranks, -1)

    def pack(self) -> None:
        if self._parts:
            torch.cat(self._parts, 2, out=self._concatenated)
        if self._scale is not None:
            self._scaled.copy_(self._query).div_(self._scale).clamp_(-448, 448)
            self._quantised.copy_(self._scaled)

    def unpack(self) -> torch.Tensor:
        self._final.copy_(self._rank_major)
        return self._out
