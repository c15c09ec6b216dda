"""The paged latent cache of one MLA layer, and who writes and reads which row of it in a decode step.

Tokens of a request are dealt out to the ranks of the DCP group as dcpkernels.layout says; a rank's tokens of a request
lie in its blocks in order of position. So the keys that a query at position p may see are, on every rank, the *first*
local_length(p + 1) of them: a causal mask is one number a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dcpkernels import layout
from dcpkernels.errors import DcpInvalidArgument

PADDING = -1  # a slot or a position that is none


@dataclass(frozen=True)
class DecodeBatch:
    """What one decode step is about, on one rank: T rows of S requests, each with one or several query tokens (the next
    token and drafts to verify), then padding rows. int32 unless stated.

    Args:
        query_start_loc: [S + 1]; rows query_start_loc[s] .. query_start_loc[s + 1] - 1 are request s's, in order of
            position. Rows from query_start_loc[S] on are padding.
        positions: int64 [T], of each row in its request; -1 for padding. The same on all ranks.
        slot_mapping: int64 [T], where the row goes in this rank's cache (block * block_size + offset); -1 where another
            rank owns it, and for padding.
        local_lens: [T], how many of this rank's tokens of the request the row may see, itself included; 0 for padding.
        block_tables: [S, max_blocks], blocks of each request in this rank's caches, the same on all ranks. Entries past
            a request's last block are undefined.
        state_slots: int64 [S], the place of each request in what is kept per request (KDA).
        num_ranks: over which the caches are sharded.
    """

    query_start_loc: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    local_lens: torch.Tensor
    block_tables: torch.Tensor
    state_slots: torch.Tensor
    num_ranks: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    def to(self, device: torch.device | str) -> DecodeBatch:
        """The same batch with its tensors on `device`."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    def require_rows(self, x: torch.Tensor) -> None:
        """Raises DcpInvalidArgument unless x [T, ...] has this batch's rows."""
        if len(x) != self.num_rows:
            raise DcpInvalidArgument(f"kimi_k3: x must have the batch's {self.num_rows} rows (got {len(x)})")


class LatentCache:
    """Rows [normalised KV latent | shared key part] of one MLA layer on one rank: `blocks` is [num_blocks, block_size,
    latent_dim]."""

    def __init__(
        self, num_blocks: int, block_size: int, latent_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        # NaN, so that a read of a row that was never written does not go unseen.
        self.blocks = torch.full((num_blocks, block_size, latent_dim), float("nan"), dtype=dtype, device=device)

    def append(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Writes rows [T, latent_dim] to the slots int64 [T]; -1: not this rank's."""
        mine = slot_mapping >= 0
        self.blocks.view(-1, self.blocks.shape[-1])[slot_mapping[mine]] = rows[mine].to(self.blocks.dtype)

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes


@dataclass
class _Request:
    length: int = 0  # tokens of it in the cache, on all ranks together
    blocks: list[int] = field(default_factory=list)


class RequestTable:
    """The requests of an engine on one rank: their lengths, their blocks, and the batches made of them. Every rank of
    the DCP group makes the same calls and hands out the same blocks.

    Args:
        num_blocks, block_size: of each LatentCache that is used with the batches.
        max_requests: state slots.
        num_ranks, rank: of the DCP group, and of this process in it.
        interleave: consecutive positions on one rank.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_requests: int,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        interleave: int = 1,
    ) -> None:
        try:
            layout.local_length(0, num_ranks, rank, interleave)  # checks the three
        except DcpInvalidArgument as error:
            raise DcpInvalidArgument(f"kimi_k3: {str(error).removeprefix('local_length: ')}") from None
        if block_size < 1 or num_blocks < 0 or max_requests < 1:
            raise DcpInvalidArgument(
                "kimi_k3: block_size and max_requests must be at least 1, num_blocks at least 0 "
                f"(got {block_size}, {max_requests} and {num_blocks})"
            )
        self.block_size, self.num_ranks, self.rank, self.interleave = block_size, num_ranks, rank, interleave
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._requests: dict[int, _Request] = {}

    def add(self) -> int:
        """A new, empty request: its state slot, which names it from now on. Another request may have had it: what
        layers keep there is forgotten by KimiK3Model.reset, or KDAState.reset."""
        if not self._free_slots:
            raise DcpInvalidArgument(f"kimi_k3: requests must be at most max_requests (got {len(self._requests) + 1})")
        slot = self._free_slots.pop()
        self._requests[slot] = _Request()
        return slot

    def remove(self, slot: int) -> None:
        """Ends a request and frees its blocks."""
        self._free_blocks.extend(reversed(self._request(slot).blocks))
        del self._requests[slot]
        self._free_slots.append(slot)

    def length(self, slot: int) -> int:
        """Tokens of the request so far."""
        return self._request(slot).length

    def prefill(self, slot: int, num_tokens: int) -> torch.Tensor:
        """Adds tokens whose rows come by other means than a decode step: int64 slots of those that are this rank's, in
        order of position, for the caller to write. Raises DcpInvalidArgument when blocks run out, or for fewer than 0
        tokens; nothing is changed."""
        if num_tokens < 0:
            raise DcpInvalidArgument(f"kimi_k3: prefill must be of at least 0 tokens (got {num_tokens})")
        request = self._request(slot)
        self._grow([request], [num_tokens])
        sharding = (self.num_ranks, self.rank, self.interleave)
        first, last = (layout.local_length(n, *sharding) for n in (request.length, request.length + num_tokens))
        request.length += num_tokens
        places = torch.arange(first, last)
        blocks = torch.tensor(request.blocks, dtype=torch.int64)
        return blocks[places // self.block_size] * self.block_size + places % self.block_size

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Forgets the last `num_tokens` of a request, as when drafts are rejected. Blocks are kept: later tokens
        overwrite."""
        request = self._request(slot)
        if not 0 <= num_tokens <= request.length:
            raise DcpInvalidArgument(
                f"kimi_k3: rewind must be within the request's {request.length} tokens (got {num_tokens})"
            )
        request.length -= num_tokens

    def extend(self, slots: Sequence[int], num_tokens: Sequence[int], *, num_rows: int | None = None) -> DecodeBatch:
        """The batch that adds num_tokens[s] >= 1 tokens to request slots[s], and queries with each of them.

        num_rows: pads to so many rows. Raises DcpInvalidArgument when blocks run out (nothing is changed), or for
        counts that do not fit.
        """
        total = sum(num_tokens)
        num_rows = total if num_rows is None else num_rows
        if len(slots) != len(num_tokens) or min(num_tokens, default=1) < 1 or len(set(slots)) != len(slots):
            raise DcpInvalidArgument("kimi_k3: each request must come once and with at least one token "
                                     f"(got slots {list(slots)}, tokens {list(num_tokens)})")  # fmt: skip
        if num_rows < total:
            raise DcpInvalidArgument(f"kimi_k3: num_rows must be at least the {total} tokens (got {num_rows})")
        requests = [self._request(slot) for slot in slots]
        self._grow(requests, num_tokens)

        # Lists first: a tensor takes longer to give one element its value than all of them.
        positions, slot_mapping, local_lens, starts = [], [], [], [0]
        sharding = (self.num_ranks, self.interleave)
        for request, count in zip(requests, num_tokens, strict=True):
            for p in range(request.length, request.length + count):
                positions.append(p)
                local_lens.append(layout.local_length(p + 1, self.num_ranks, self.rank, self.interleave))
                slot = PADDING
                if layout.owner(p, *sharding) == self.rank:
                    block, offset = divmod(layout.local_slot(p, *sharding), self.block_size)
                    slot = request.blocks[block] * self.block_size + offset
                slot_mapping.append(slot)
            request.length += count
            starts.append(len(positions))
        padding = [PADDING] * (num_rows - total)
        tables = torch.full((len(slots), max((len(r.blocks) for r in requests), default=0)), PADDING, dtype=torch.int32)
        for s, request in enumerate(requests):
            tables[s, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return DecodeBatch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            positions=torch.tensor(positions + padding, dtype=torch.int64),
            slot_mapping=torch.tensor(slot_mapping + padding, dtype=torch.int64),
            local_lens=torch.tensor(local_lens + [0] * len(padding), dtype=torch.int32),
            block_tables=tables,
            state_slots=torch.tensor(slots, dtype=torch.int64),
            num_ranks=self.num_ranks,
        )

    def _request(self, slot: int) -> _Request:
        if slot not in self._requests:
            raise DcpInvalidArgument(f"kimi_k3: slot must be one that add() returned, and not removed (got {slot!r})")
        return self._requests[slot]

    def _grow(self, requests: Sequence[_Request], num_tokens: Sequence[int]) -> None:
        # Rank 0 has most of every request, so that its need is enough for all, and all hand out the same blocks.
        needs = []
        for request, count in zip(requests, num_tokens, strict=True):
            most = layout.local_length(request.length + count, self.num_ranks, 0, self.interleave)
            needs.append(max(0, -(-most // self.block_size) - len(request.blocks)))
        free = len(self._free_blocks)
        if sum(needs) > free:
            raise DcpInvalidArgument(
                f"kimi_k3: blocks must be enough for the batch (need {sum(needs)} more, {free} are free)"
            )
        for request, need in zip(requests, needs, strict=True):
            request.blocks.extend(self._free_blocks.pop() for _ in range(need))
