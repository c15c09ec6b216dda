"""What an engine runs without `kv_gather`: a local gather, an all-gather, a de-interleave, by torch.distributed or
MPI and torch ops.

Frozen, as `baselines`: a yardstick of the numbers that this repository shows. Everything is allocated beforehand.
"""

from __future__ import annotations

import torch

from dcpkernels.cli.baselines_gather import AllGather, Exchange
from dcpkernels.cli.exact import words_of


class AllGatherRows(AllGather):
    """`kv_gather` of a chunk that is one whole request.

    The rank's blocks are gathered into a slab by index_select, block by block. Slabs are padded to whole turns of W * I
    tokens, so that all ranks send as much, and exchanged by one all-gather, rank-major. One copy of the
    transposed view brings them into sequence order; the padding comes out behind the last row.

    For 66,048 rows of 1,152 bytes, W = 8, one thread of an EPYC, in ms: that copy 19 to 22; index_select of the rows 27
    to 31; a strided copy for each rank 28 to 33; index_copy_ 49 to 174. index_select of the blocks 0.6 to 0.7, of the
    rank's rows one by one 0.6 to 2.2.

    Args:
        num_ranks: W.
        all_gather: makes what exchanges, of the tensors (recv, send).
        cache: [num_blocks, block_size, Dkv] contiguous, of this rank, read in every call.
        blocks: int64 [n], those with this rank's tokens of the request, in order.
        num_rows: tokens of the request on all ranks.
        interleave: I, consecutive tokens that a rank holds.
    """

    def __init__(
        self,
        num_ranks: int,
        all_gather: Exchange,
        cache: torch.Tensor,
        blocks: torch.Tensor,
        num_rows: int,
        interleave: int,
    ) -> None:
        _, block_size, dim = cache.shape
        self._blocks = blocks
        self._cache = words_of(cache, dim * cache.element_size())
        num_turns = -(-num_rows // (num_ranks * interleave))
        num_slab_rows = num_turns * interleave
        words, dtype = self._cache.shape[2], self._cache.dtype
        slab = torch.zeros(max(num_slab_rows, len(blocks) * block_size), words, dtype=dtype)
        self._slab_blocks = slab[: len(blocks) * block_size].view(len(blocks), block_size, words)
        self.packed = slab[:num_slab_rows]
        recv = torch.empty(num_ranks * num_slab_rows, words, dtype=dtype)
        self.exchange = all_gather(recv, self.packed)
        turns = recv.view(num_ranks, num_turns, interleave * words)
        self._rank_major = turns.transpose(0, 1)  # [turns, W, .], of memory [W, turns, .]
        self._final = torch.empty(num_turns, num_ranks, interleave * words, dtype=dtype)
        self._out = self._final.view(-1, words)[:num_rows].view(cache.dtype)

    def pack(self) -> None:
        torch.index_select(self._cache, 0, self._blocks, out=self._slab_blocks)

    def unpack(self) -> torch.Tensor:
        self._final.copy_(self._rank_major)
        return self._out
