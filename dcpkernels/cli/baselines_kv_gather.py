"""What an engine runs without `kv_gather`: a local gather, an all-gather, a de-interleave, by torch.distributed and
torch ops.

Frozen, as `baselines`: a yardstick of the numbers that this repository shows. Everything is allocated beforehand.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dcpkernels.cli.exact import all_gather, words_of

NAMES = ("gloo",)


class AllGatherRows:
    """`kv_gather` of a chunk that is one whole request.

    The rank's blocks are gathered into a slab by index_select, block by block. Slabs are padded to whole turns of W * I
    tokens, so that all ranks send as much, and exchanged by one `all_gather_into_tensor`, rank-major. One copy of the
    transposed view brings them into sequence order; the padding comes out behind the last row.

    For 66,048 rows of 1,152 bytes, W = 8, one thread of an EPYC, in ms: that copy 19 to 22; index_select of the rows 27
    to 31; a strided copy for each rank 28 to 33; index_copy_ 49 to 174. index_select of the blocks 0.6 to 0.7, of the
    rank's rows one by one 0.6 to 2.2.

    Args:
        group: a torch.distributed group that can do all_gather_into_tensor (gloo here).
        cache: [num_blocks, block_size, Dkv] contiguous, of this rank, read in every call.
        blocks: int64 [n], those with this rank's tokens of the request, in order.
        num_rows: tokens of the request on all ranks.
        interleave: I, consecutive tokens that a rank holds.
    """

    def __init__(
        self, group: dist.ProcessGroup, cache: torch.Tensor, blocks: torch.Tensor, num_rows: int, interleave: int
    ) -> None:
        num_ranks, (_, block_size, dim) = group.size(), cache.shape
        self._group, self._blocks = group, blocks
        self._cache = words_of(cache, dim * cache.element_size())
        num_turns = -(-num_rows // (num_ranks * interleave))
        num_slab_rows = num_turns * interleave
        words, dtype = self._cache.shape[2], self._cache.dtype
        slab = torch.zeros(max(num_slab_rows, len(blocks) * block_size), words, dtype=dtype)
        self._slab_blocks = slab[: len(blocks) * block_size].view(len(blocks), block_size, words)
        self._send = slab[:num_slab_rows]
        self._recv = torch.empty(num_ranks * num_slab_rows, words, dtype=dtype)
        turns = self._recv.view(num_ranks, num_turns, interleave * words)
        self._rank_major = turns.transpose(0, 1)  # [turns, W, .], of memory [W, turns, .]
        self._final = torch.empty(num_turns, num_ranks, interleave * words, dtype=dtype)
        self._out = self._final.view(-1, words)[:num_rows].view(cache.dtype)

    def __call__(self) -> torch.Tensor:
        torch.index_select(self._cache, 0, self._blocks, out=self._slab_blocks)
        all_gather(self._recv, self._send, group=self._group)
        self._final.copy_(self._rank_major)
        return self._out
