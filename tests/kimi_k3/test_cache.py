"""The paged latent cache and who owns what: against tokens that are dealt out one by one, against vLLM's formula, and
through caches whose rows say which token they are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from dcpkernels import KVGatherPlan, reference
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache, RequestTable

SIZES = [1, 2, 3, 4, 6, 8]
# (interleave, block_size): interleave divides, does not, is larger, is equal.
PAGES = [(1, 1), (1, 16), (2, 5), (2, 16), (16, 16), (16, 24), (64, 16), (64, 64), (64, 100)]
sharded = pytest.mark.parametrize("num_ranks", SIZES, ids="w{}".format)
paged = pytest.mark.parametrize("interleave, block_size", PAGES, ids=lambda n: str(n))


def deal_out(n: int, num_ranks: int, interleave: int) -> list[tuple[int, int]]:
    """(owner, index among the owner's tokens) of positions 0 .. n - 1: hands of `interleave` tokens go round."""
    held = [0] * num_ranks
    places = []
    for p in range(n):
        owner = (p // interleave) % num_ranks
        places.append((owner, held[owner]))
        held[owner] += 1
    return places


PLACES = {(w, i): deal_out(1500, w, i) for w in SIZES for i in {i for i, _ in PAGES}}


class Ranks:
    """The tables and caches of all ranks, driven alike, beside a model: which token should be where. A cache row holds
    the number of the write that put it there, so no two tokens ever look the same."""

    def __init__(
        self, num_ranks: int, interleave: int, block_size: int, num_blocks: int, max_requests: int = 5
    ) -> None:
        self.num_ranks, self.interleave, self.block_size = num_ranks, interleave, block_size
        self.tables = [
            RequestTable(num_blocks, block_size, max_requests, num_ranks=num_ranks, rank=rank, interleave=interleave)
            for rank in range(num_ranks)
        ]
        self.caches = [LatentCache(num_blocks, block_size, 2, torch.float64) for _ in range(num_ranks)]
        self.tokens: dict[int, list[int]] = {}  # of each request: the write of each position
        self.blocks: dict[int, list[int]] = {}
        self.places = PLACES[num_ranks, interleave]
        self.num_writes = 0

    def add(self) -> int:
        (slot,) = {table.add() for table in self.tables}
        assert slot not in self.tokens
        self.tokens[slot], self.blocks[slot] = [], []
        return slot

    def remove(self, slot: int) -> None:
        for table in self.tables:
            table.remove(slot)
        del self.tokens[slot], self.blocks[slot]

    def rewind(self, slot: int, n: int) -> None:
        for table in self.tables:
            table.rewind(slot, n)
        del self.tokens[slot][len(self.tokens[slot]) - n :]

    def _write(self, slot: int, n: int) -> list[int]:
        numbers = list(range(self.num_writes, self.num_writes + n))
        self.num_writes += n
        self.tokens[slot] += numbers
        return numbers

    def extend(self, slots: Sequence[int], counts: Sequence[int], padding: int = 0) -> list[DecodeBatch]:
        total = sum(counts)
        first = {slot: len(self.tokens[slot]) for slot in slots}
        batches = [table.extend(slots, counts, num_rows=total + padding) for table in self.tables]
        numbers = [number for slot, n in zip(slots, counts, strict=True) for number in self._write(slot, n)]
        rows = torch.full((total + padding, 2), torch.nan, dtype=torch.float64)
        rows[:total] = torch.tensor(numbers, dtype=torch.float64)[:, None]
        for rank, batch in enumerate(batches):
            self._check(batch, rank, slots, counts, first, padding)
            self.caches[rank].append(rows, batch.slot_mapping)
        for name in ("query_start_loc", "positions", "block_tables", "state_slots"):
            for batch in batches[1:]:
                assert torch.equal(getattr(batch, name), getattr(batches[0], name)), name
        return batches

    def prefill(self, slot: int, n: int) -> None:
        first = len(self.tokens[slot])
        numbers = self._write(slot, n)
        for rank, table in enumerate(self.tables):
            mine = [number for p, number in enumerate(numbers, first) if self.places[p][0] == rank]
            places = table.prefill(slot, n)
            assert places.dtype == torch.int64 and len(places) == len(mine)
            rows = torch.tensor(mine, dtype=torch.float64)[:, None].expand(-1, 2)
            self.caches[rank].append(rows, places)

    def _check(
        self,
        batch: DecodeBatch,
        rank: int,
        slots: Sequence[int],
        counts: Sequence[int],
        first: dict[int, int],
        padding: int,
    ) -> None:
        positions, slot_mapping, local_lens, starts = [], [], [], [0]
        tables = batch.block_tables.tolist()
        for s, (slot, n) in enumerate(zip(slots, counts, strict=True)):
            needed = -(-sum(owner == 0 for owner, _ in self.places[: first[slot] + n]) // self.block_size)
            known = self.blocks[slot]
            self.blocks[slot] = tables[s][: max(needed, len(known))]
            assert self.blocks[slot][: len(known)] == known, "a block of a request changes"
            for p in range(first[slot], first[slot] + n):
                owner, index = self.places[p]
                block = tables[s][index // self.block_size]
                positions.append(p)
                slot_mapping.append(block * self.block_size + index % self.block_size if owner == rank else -1)
                local_lens.append(sum(owner == rank for owner, _ in self.places[: p + 1]))
            starts.append(len(positions))
        assert batch.num_rows == len(positions) + padding
        assert batch.positions.tolist() == positions + [-1] * padding
        assert batch.slot_mapping.tolist() == slot_mapping + [-1] * padding
        assert batch.local_lens.tolist() == local_lens + [0] * padding
        assert batch.query_start_loc.tolist() == starts
        assert batch.state_slots.tolist() == list(slots)
        wide = {batch.positions.dtype, batch.slot_mapping.dtype, batch.state_slots.dtype}
        narrow = {batch.local_lens.dtype, batch.query_start_loc.dtype, batch.block_tables.dtype}
        assert wide == {torch.int64} and narrow == {torch.int32}

    def check_all(self) -> None:
        """No block belongs to two requests, and each cache holds every live token of its rank where it should."""
        handed_out = [block for blocks in self.blocks.values() for block in blocks]
        assert len(set(handed_out)) == len(handed_out)
        for slot, tokens in self.tokens.items():
            assert [table.length(slot) for table in self.tables] == [len(tokens)] * self.num_ranks
            for number, (owner, index) in zip(tokens, self.places, strict=False):
                block = self.blocks[slot][index // self.block_size]
                row = self.caches[owner].blocks[block, index % self.block_size]
                assert row.tolist() == [number, number], (slot, owner, index)


@sharded
@paged
def test_random_requests(num_ranks: int, interleave: int, block_size: int) -> None:
    """Requests come, grow, are rewound and go; at every step all is where the model says."""
    rng = random.Random(f"{num_ranks} {interleave} {block_size}")
    ranks = Ranks(num_ranks, interleave, block_size, num_blocks=4000 // block_size)
    sizes = [1, 1, 2, 3, interleave, block_size + 1, num_ranks * interleave // 2 + 1]
    for _ in range(2):
        ranks.add()
    for step in range(40):
        live = list(ranks.tokens)
        what = rng.choice(["add", "extend", "extend", "extend", "rewind", "remove"])
        if what == "add" and len(live) < 5 or not live:
            ranks.add()
        elif what == "extend":
            chosen = [slot for slot in rng.sample(live, rng.randint(1, len(live))) if len(ranks.tokens[slot]) < 600]
            ranks.extend(chosen, [rng.choice(sizes) for _ in chosen], padding=rng.choice([0, 0, 1, 5]))
        elif what == "rewind":
            slot = rng.choice(live)
            ranks.rewind(slot, rng.randint(0, len(ranks.tokens[slot])))
        elif what == "remove" and rng.random() < 0.4:
            ranks.remove(rng.choice(live))
        if step % 10 == 9:
            ranks.check_all()
    assert ranks.num_writes >= 50  # the seed must give a test


@sharded
@paged
def test_one_owner_of_every_position(num_ranks: int, interleave: int, block_size: int) -> None:
    ranks = Ranks(num_ranks, interleave, block_size, num_blocks=1000 // block_size + 5)
    slot = ranks.add()
    for n in (1, 2, 3 * interleave, num_ranks * interleave + 1, 97):
        batches = ranks.extend([slot], [n], padding=2)
        owners = torch.stack([batch.slot_mapping for batch in batches]) >= 0
        assert owners.sum(0).tolist() == [1] * n + [0, 0]
        # What a row sees on all ranks together is its whole past and itself.
        lens = torch.stack([batch.local_lens for batch in batches])
        assert torch.equal(lens.sum(0), batches[0].positions.int() + 1)


@sharded
@pytest.mark.parametrize(
    "interleave, block_size", [(i, b) for i, b in PAGES if b % i == 0] + [(2, 64), (16, 48)], ids=lambda n: str(n)
)
def test_slots_are_those_of_vllm(num_ranks: int, interleave: int, block_size: int) -> None:
    """Where the interleave divides the block: block-table entry p // (B W), and in that block the offset
    ((p mod B W) // (W I)) I + p mod I."""
    n = 2 * num_ranks * block_size + num_ranks * interleave + 3
    big = num_ranks * block_size
    for rank in range(num_ranks):
        table = RequestTable(4000, block_size, 2, num_ranks=num_ranks, rank=rank, interleave=interleave)
        table.extend([table.add()], [block_size + 1])  # so that the blocks do not start at 0
        batch = table.extend([table.add()], [n])
        for p in range(n):
            offset = (p % big) // (num_ranks * interleave) * interleave + p % interleave
            slot = int(batch.block_tables[0, p // big]) * block_size + offset
            owner = p // interleave % num_ranks
            assert batch.slot_mapping[p] == (slot if owner == rank else -1), (rank, p)


@sharded
@paged
def test_gathers_find_what_was_appended(num_ranks: int, interleave: int, block_size: int) -> None:
    """reference.kv_gather and KVGatherPlan, which know nothing of RequestTable, bring back the context in order. Rows
    that were rewound are overwritten by those that came after; what was prefilled comes back as what was decoded."""
    ranks = Ranks(num_ranks, interleave, block_size, num_blocks=1500 // block_size + 10)
    slots = [ranks.add() for _ in range(3)]
    ranks.extend(slots, [1, interleave + 1, 2 * num_ranks * interleave // 3 + 1])
    ranks.prefill(slots[2], num_ranks * interleave // 2)
    ranks.extend([slots[2], slots[1]], [block_size + 2, 2], padding=3)
    ranks.rewind(slots[2], block_size // 2 + 1)
    ranks.rewind(slots[1], 1)
    ranks.prefill(slots[0], 5)
    batches = ranks.extend(slots, [3, 1, 2], padding=1)

    expected = torch.tensor([number for slot in slots for number in ranks.tokens[slot]], dtype=torch.float64)
    lens = [len(ranks.tokens[slot]) for slot in slots]
    tables = [batch.block_tables for batch in batches]
    gathered = reference.kv_gather(
        [cache.blocks for cache in ranks.caches],
        lens,
        tables,
        chunk_size=sum(lens),
        chunk_idx=0,
        interleave=interleave,
    )
    assert torch.equal(gathered, expected[:, None].expand(-1, 2))

    by_plan = torch.full((sum(lens), 2), torch.nan, dtype=torch.float64)
    for rank, cache in enumerate(ranks.caches):
        plan = KVGatherPlan(
            lens,
            tables[rank],
            block_size=block_size,
            num_ranks=num_ranks,
            rank=rank,
            chunk_size=sum(lens),
            interleave=interleave,
        )
        rows = cache.blocks.flatten(0, 1)[torch.from_numpy(plan.source_rows(0).copy())]
        by_plan[torch.from_numpy(plan.final_rows(0).copy())] = rows
    assert torch.equal(by_plan, gathered)


def test_append_writes_its_slots_and_nothing_else() -> None:
    cache = LatentCache(3, 4, 2, torch.bfloat16)
    assert cache.blocks.shape == (3, 4, 2) and cache.blocks.isnan().all()  # an early read must show
    assert cache.num_bytes == 3 * 4 * 2 * 2
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])  # fp32, rounded on the way
    cache.append(rows, torch.tensor([9, -1, 3]))
    flat = cache.blocks.flatten(0, 1)
    assert flat[9].tolist() == [1, 2] and flat[3].tolist() == [5, 6]
    assert flat.isnan().all(1).sum() == 10
    cache.append(rows[:0], torch.empty(0, dtype=torch.int64))
    cache.append(rows[2:], torch.tensor([9]))
    assert flat[9].tolist() == [5, 6]


def test_a_request_that_is_rewound_keeps_its_blocks() -> None:
    table = RequestTable(3, 4, 2)
    slot = table.add()
    before = table.extend([slot], [12])
    table.rewind(slot, 12)
    assert table.length(slot) == 0
    other = table.add()
    with pytest.raises(DcpInvalidArgument, match="blocks"):
        table.extend([other], [1])
    after = table.extend([slot], [12])
    assert torch.equal(after.slot_mapping, before.slot_mapping) and torch.equal(after.positions, before.positions)


def test_what_is_removed_is_free_again() -> None:
    table = RequestTable(4, 2, 2, num_ranks=2, rank=1)
    for _ in range(5):
        slots = [table.add(), table.add()]
        assert sorted(slots) == [0, 1]
        batch = table.extend(slots, [8, 7])
        assert sorted(batch.block_tables.flatten().tolist()) == [0, 1, 2, 3]
        for slot in slots:
            table.remove(slot)


def test_padding_only() -> None:
    """A rank that has nothing to do still takes part in the step."""
    batch = RequestTable(4, 4, 1).extend([], [], num_rows=3)
    assert batch.num_rows == 3 and batch.query_start_loc.tolist() == [0] and len(batch.block_tables) == 0
    assert batch.positions.tolist() == batch.slot_mapping.tolist() == [-1] * 3 and batch.local_lens.tolist() == [0] * 3


def test_a_batch_moves_as_a_whole() -> None:
    table = RequestTable(8, 4, 2, num_ranks=2, rank=1)
    batch = table.extend([table.add(), table.add()], [5, 1], num_rows=8)
    for device in ("meta", torch.device("meta"), "cpu"):
        moved = batch.to(device)
        for field in dataclasses.fields(DecodeBatch):
            was, now = getattr(batch, field.name), getattr(moved, field.name)
            if not isinstance(was, torch.Tensor):
                assert now == was
                continue
            assert now.device.type == torch.device(device).type
            assert (now.shape, now.dtype) == (was.shape, was.dtype)
            assert device != "cpu" or torch.equal(now, was)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.positions = batch.local_lens


# -- what is refused


@pytest.mark.parametrize("num_ranks, rank", [(1, 0), (4, 0), (4, 3)])
def test_out_of_blocks_changes_nothing(num_ranks: int, rank: int) -> None:
    """On every rank alike, also on one that would itself have room; and a request that fits is not given blocks because
    another one does not."""
    table = RequestTable(3, 4, 4, num_ranks=num_ranks, rank=rank)
    fits, too_long = table.add(), table.add()
    table.extend([fits], [1])
    # Two blocks are left: 8 tokens on rank 0.
    limit = 7 * num_ranks + 1
    for _ in range(2):
        with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: blocks .*\(need 3 more, 2 are free\)$"):
            table.extend([fits, too_long], [4 * num_ranks, limit])
        with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: blocks .*need 3 more"):
            table.extend([too_long], [8 * num_ranks + 1])
        with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: blocks .*need 3 more"):
            table.prefill(too_long, 8 * num_ranks + 1)
        assert (table.length(fits), table.length(too_long)) == (1, 0)
    batch = table.extend([fits, too_long], [1, 8 * num_ranks])
    assert batch.positions[:2].tolist() == [1, 0] and table.length(too_long) == 8 * num_ranks


def test_too_many_requests() -> None:
    table = RequestTable(4, 4, 2)
    table.add(), table.add()
    with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: .*max_requests.*\(got 3\)$"):
        table.add()
    table.remove(1)
    assert table.add() == 1


@pytest.mark.parametrize(
    "slots, counts, num_rows, text",
    [
        ([0, 0], [1, 1], None, r"once"),
        ([0, 1], [1, 0], None, r"at least one token"),
        ([0], [-1], None, r"at least one token"),
        ([0, 1], [1], None, r"got slots \[0, 1\], tokens \[1\]"),
        ([0, 1], [2, 1], 2, r"num_rows must be at least the 3 tokens \(got 2\)"),
    ],
    ids=["a slot twice", "no tokens", "fewer than none", "lengths differ", "too few rows"],
)
def test_counts_that_do_not_fit(slots: list[int], counts: list[int], num_rows: int | None, text: str) -> None:
    table = RequestTable(4, 4, 2)
    table.add(), table.add()
    with pytest.raises(DcpInvalidArgument, match=f"^kimi_k3: .*{text}"):
        table.extend(slots, counts, num_rows=num_rows)
    assert table.length(0) == table.length(1) == 0
    assert table.extend([0, 1], [8, 8]).num_rows == 16  # all four blocks are still there


@pytest.mark.parametrize("n", [4, -1])
def test_rewinding_too_far(n: int) -> None:
    table = RequestTable(4, 4, 1)
    table.extend([table.add()], [3])
    with pytest.raises(DcpInvalidArgument, match=rf"^kimi_k3: rewind .*3 tokens \(got {n}\)$"):
        table.rewind(0, n)
    assert table.length(0) == 3


def test_prefilling_fewer_than_no_tokens() -> None:
    table = RequestTable(4, 4, 1)
    table.extend([table.add()], [3])
    with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: .*\(got -1\)$"):
        table.prefill(0, -1)
    assert table.length(0) == 3
    assert table.prefill(0, 0).tolist() == []


@pytest.mark.parametrize(
    "sharding",
    [
        {"num_ranks": 2, "rank": 2},
        {"num_ranks": 2, "rank": -1},
        {"num_ranks": 0},
        {"interleave": 0},
    ],
    ids=str,
)
def test_a_sharding_that_is_none(sharding: dict[str, int]) -> None:
    with pytest.raises(DcpInvalidArgument, match=r"^kimi_k3: .*must be .*\(got"):
        RequestTable(4, 4, 1, **sharding)


@pytest.mark.parametrize("call", ["extend", "rewind", "remove", "length", "prefill"])
def test_a_slot_that_is_none(call: str) -> None:
    table = RequestTable(8, 4, 2)
    gone = table.add()
    table.remove(gone)
    arguments = {"extend": ([gone], [1]), "rewind": (gone, 0), "prefill": (gone, 1)}.get(call, (gone,))
    with pytest.raises(DcpInvalidArgument, match="kimi_k3: slot must be one that add"):
        getattr(table, call)(*arguments)


@pytest.mark.parametrize("sizes", [(8, 0, 2), (-1, 4, 2), (8, 4, 0)])
def test_sizes_that_are_none(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(DcpInvalidArgument, match="kimi_k3: block_size and max_requests must be at least 1"):
        RequestTable(*sizes)
