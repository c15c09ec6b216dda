"""link_check: what it finds wrong between ranks, and what it must not find. Ranks are threads, and processes over CpuHeap."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from dcpkernels import _backend
from dcpkernels._link_check import NUM_RESULT_WORDS, BadLink, bad_links, check_links, require_links
from dcpkernels.errors import DcpDeviceError, DcpError
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import as_group
from dcpkernels.heap.verdict import agree
from dcpkernels.region_layout import LINK_SLOT_BYTES, RegionLayout
from dcpkernels.testing import ThreadGroup, run_ranks

MODULE = _backend.load("cpu")
SOON_S, LONG_S = 1.0, 30.0
NONCE = 0x9E3779B97F4A7C15
WORLDS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])


# -- regions of one process, and ranks that are threads


class Regions:
    """One region for each rank, and one more that all of them store into as by multicast."""

    def __init__(self, num_ranks: int, offset: int = 128) -> None:
        self.num_ranks, self.offset = num_ranks, offset
        num_bytes = offset + 2 * num_ranks * LINK_SLOT_BYTES + 64
        self.memory = [(ctypes.c_char * (num_bytes + 64))() for _ in range(num_ranks + 1)]
        bases = [-(-ctypes.addressof(memory) // 64) * 64 for memory in self.memory]
        self.bases, self.shared = bases[:-1], bases[-1]

    def slot(self, base: int, source: int, *, multicast: bool = False) -> Slot:
        return Slot.from_address(base + self.offset + (source + multicast * self.num_ranks) * LINK_SLOT_BYTES)

    def run_rank(self, rank: int, nonce: int = NONCE, timeout_s: float = LONG_S, **changes: object) -> list[int]:
        words = (ctypes.c_uint64 * NUM_RESULT_WORDS)(*[7] * NUM_RESULT_WORDS)
        arguments = {
            "rank": rank,
            "bases": self.bases,
            "bases_table": 0,
            "multicast": 0,
            "multicast_view": 0,
            "offset": self.offset,
            "nonce": nonce,
            "timeout_ns": int(timeout_s * 1e9),
            "num_spins": 0,
            "num_yields": 10,
            "result": ctypes.addressof(words),
            "isa": "auto",
        }
        assert MODULE.link_check(**(arguments | changes)) == 0
        assert words[NUM_RESULT_WORDS - 1] == arguments["nonce"]
        return list(words[:-1])

    def run(self, of_rank: Callable[[int], dict[str, object]] = lambda rank: {}, ranks: range | None = None):
        """The results of `ranks`, of all by default. `of_rank`: arguments that only that rank has."""
        found: dict[int, list[int]] = {}

        def body(rank: int) -> None:
            found[rank] = self.run_rank(rank, **of_rank(rank))

        threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks or range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in ranks or range(self.num_ranks)]


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def pattern(nonce: int, source: int, destination: int) -> list[int]:
    """What rank `source` stores to rank `destination` (64: to all), as csrc/ops/link_check.cc has it."""
    low = mixed(nonce & 0xFFFFFFFF)
    seed = mixed((mixed((low + (nonce >> 32)) & 0xFFFFFFFF) + (source << 8 | destination)) & 0xFFFFFFFF)
    return [mixed((seed + i) & 0xFFFFFFFF) for i in range(256)]


class Slot(ctypes.Structure):
    """csrc/ops/link_check.h: LinkSlot."""

    _fields_ = [("words", ctypes.c_uint32 * 256), ("line", ctypes.c_uint64 * 8)]
    FLAG, ECHO = 0, 4  # of `line`

    def raise_by_hand(
        self, nonce: int, words: list[int] | None = None, *, flag: bool = True, echo: bool = True
    ) -> None:
        """What a peer does, but for its reading."""
        if words is not None:
            self.words[:] = words
        if flag:
            self.line[self.FLAG] = nonce
        if echo:
            self.line[self.ECHO] = nonce


def as_text(found: list[list[int]]) -> list[str]:
    return [str(link) for link in bad_links(found)]


def by_multicast(regions: Regions) -> dict[str, object]:
    return {"multicast": regions.shared, "multicast_view": regions.shared}


@WORLDS
@pytest.mark.parametrize("multicast", [False, True])
def test_good_memory_is_found_good_again_and_again(num_ranks: int, multicast: bool) -> None:
    regions = Regions(num_ranks)
    for check in range(5):
        more = by_multicast(regions) if multicast else {}
        found = regions.run(lambda rank, more=more, check=check: {"nonce": NONCE + check, **more})
        assert found == [[0] * 5] * num_ranks


@pytest.mark.parametrize("isa", MODULE.runnable_variants)
def test_every_variant_stores_the_same_pattern(isa: str) -> None:
    """Ranks of different variants check each other; and the bytes are those of this test."""
    regions = Regions(3)
    found = regions.run(lambda rank: {"isa": isa if rank else "baseline", **by_multicast(regions)})
    assert found == [[0] * 5] * 3
    for source in range(3):
        assert list(regions.slot(regions.shared, source, multicast=True).words) == pattern(NONCE, source, 64)
        for rank, base in enumerate(regions.bases):
            assert list(regions.slot(base, source).words) == pattern(NONCE, source, rank)
            assert list(regions.slot(base, source, multicast=True).words) == [0] * 256


def test_nothing_is_written_beside_the_slots() -> None:
    regions = Regions(3, offset=192)
    end = 192 + 2 * 3 * LINK_SLOT_BYTES
    for base in (*regions.bases, regions.shared):
        ctypes.memset(base, 0x5A, 192)
        ctypes.memset(base + end, 0x5A, 64)
    assert regions.run(lambda rank: by_multicast(regions)) == [[0] * 5] * 3
    for base in (*regions.bases, regions.shared):
        assert ctypes.string_at(base, 192) == b"\x5a" * 192 and ctypes.string_at(base + end, 64) == b"\x5a" * 64


def test_a_base_of_another_rank_is_named() -> None:
    """Rank 0 sees rank 2's region where rank 1's should be: nothing of it gets to rank 1."""
    regions = Regions(3)
    wrong = [regions.bases[0], regions.bases[2], regions.bases[2]]
    found = regions.run(lambda rank: {"timeout_s": SOON_S, "bases": wrong if rank == 0 else regions.bases})
    assert as_text(found) == ["rank 0 -> rank 1: flag did not arrive"]
    # Rank 1 has not seen rank 0, so it has not echoed either: the one follows from the other.
    assert found == [[0, 0, 0b010, 0, 0], [0b001, 0, 0b001, 0, 0], [0] * 5]


def test_two_bases_that_are_exchanged_are_named() -> None:
    regions = Regions(4)
    wrong = [regions.bases[i] for i in (0, 3, 2, 1)]
    found = regions.run(lambda rank: {"timeout_s": SOON_S, "bases": wrong if rank == 2 else regions.bases})
    assert as_text(found) == ["rank 2 -> rank 1: pattern wrong", "rank 2 -> rank 3: pattern wrong"]


def test_a_rank_that_looks_in_the_wrong_region_is_named() -> None:
    regions = Regions(3)
    elsewhere = [regions.bases[0], regions.shared, regions.bases[2]]
    found = regions.run(lambda rank: {"timeout_s": SOON_S, "bases": elsewhere if rank == 1 else regions.bases})
    assert as_text(found) == ["rank 0 -> rank 1: flag did not arrive", "rank 2 -> rank 1: flag did not arrive"]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_rank_that_never_comes_is_named_within_the_deadline(num_ranks: int) -> None:
    """And nobody else: the wait for it must not delay what the others are owed."""
    regions, last = Regions(num_ranks), num_ranks - 1
    start = time.monotonic()
    found = regions.run(lambda rank: {"timeout_s": SOON_S, **by_multicast(regions)}, range(last))
    assert SOON_S <= time.monotonic() - start < SOON_S + 5
    assert found == [[1 << last, 0, 1 << last, 1 << last, 0]] * last


def test_ranks_that_come_late_in_turn_are_not_named() -> None:
    regions = Regions(4)

    def late(rank: int) -> dict[str, object]:
        time.sleep(0.2 * rank)
        return {"timeout_s": 5.0}

    assert regions.run(late) == [[0] * 5] * 4


def test_multicast_that_reaches_one_rank_only() -> None:
    regions = Regions(3)
    found = regions.run(lambda rank: {"timeout_s": SOON_S, "multicast": regions.bases[1]})
    expected = [f"multicast from rank {source}: flag did not arrive on ranks 0, 2" for source in range(3)]
    assert as_text(found) == expected


def test_multicast_of_one_rank_that_reaches_nobody() -> None:
    regions, lost = Regions(3), Regions(3)
    found = regions.run(lambda rank: {"timeout_s": SOON_S, **by_multicast(lost if rank == 2 else regions)})
    assert as_text(found) == [
        "multicast from rank 0: flag did not arrive on rank 2",
        "multicast from rank 1: flag did not arrive on rank 2",
        "multicast from rank 2: flag did not arrive on ranks 0, 1",
    ]


# -- one rank, whose peer is this test


def rank_0_beside(regions: Regions, nonce: int = NONCE, timeout_s: float = 0.2, **more: object) -> list[int]:
    return regions.run_rank(0, nonce, timeout_s, **more)


@pytest.mark.parametrize("word", [0, 1, 2, 3, 4, 17, 128, 254, 255])
@pytest.mark.parametrize("multicast", [False, True])
def test_one_bit_of_any_word_is_found(word: int, multicast: bool) -> None:
    regions, base = Regions(2), 0
    base = regions.bases[0]
    to_0, to_all = regions.slot(base, 1), regions.slot(regions.shared, 1, multicast=True)
    to_0.raise_by_hand(NONCE, pattern(NONCE, 1, 0))
    to_all.raise_by_hand(NONCE, pattern(NONCE, 1, 64))
    assert rank_0_beside(regions, **by_multicast(regions)) == [0] * 5
    (to_all if multicast else to_0).words[word] ^= 1 << word % 32
    assert rank_0_beside(regions, **by_multicast(regions)) == ([0, 0, 0, 0, 2] if multicast else [0, 2, 0, 0, 0])


def test_what_an_earlier_check_left_does_not_count() -> None:
    regions = Regions(2)
    more = by_multicast(regions)
    assert regions.run(lambda rank: more) == [[0] * 5] * 2
    later = NONCE + 1
    assert rank_0_beside(regions, later, **more) == [2, 0, 2, 2, 0]  # no flag of rank 1 is of this check
    regions.slot(regions.bases[0], 1).raise_by_hand(later)
    regions.slot(regions.shared, 1, multicast=True).raise_by_hand(later)
    assert rank_0_beside(regions, later, **more) == [0, 2, 0, 0, 2]  # and here no pattern is
    high = later ^ 1 << 63  # all 64 bits of a nonce count, in the flags ...
    assert rank_0_beside(regions, high, **more) == [2, 0, 2, 2, 0]
    regions.slot(regions.bases[0], 1).raise_by_hand(high)
    regions.slot(regions.shared, 1, multicast=True).raise_by_hand(high)  # ... and in the patterns
    assert rank_0_beside(regions, high, **more) == [0, 2, 0, 0, 2]


@pytest.mark.parametrize(("source", "destination"), [(1, 1), (0, 0), (0, 1), (1, 64)])
def test_a_pattern_for_another_pair_is_wrong(source: int, destination: int) -> None:
    regions = Regions(2)
    regions.slot(regions.bases[0], 1).raise_by_hand(NONCE, pattern(NONCE, source, destination))
    assert rank_0_beside(regions) == [0, 2, 0, 0, 0]


def test_an_echo_that_does_not_come_is_found() -> None:
    regions = Regions(2)
    regions.slot(regions.bases[0], 1).raise_by_hand(NONCE, pattern(NONCE, 1, 0), echo=False)
    found = rank_0_beside(regions)
    assert found == [0, 0, 2, 0, 0]
    assert as_text([found, [0] * 5]) == ["rank 1 -> rank 0: echo did not arrive"]
    echoed = regions.slot(regions.bases[1], 0)
    assert echoed.line[Slot.FLAG] == echoed.line[Slot.ECHO] == NONCE  # rank 0 has done its part


def test_no_echo_before_the_flag() -> None:
    regions = Regions(2)
    assert rank_0_beside(regions) == [2, 0, 2, 0, 0]
    echoed = regions.slot(regions.bases[1], 0)
    assert echoed.line[Slot.FLAG] == NONCE and echoed.line[Slot.ECHO] == 0


def test_programming_mistakes_are_refused() -> None:
    regions = Regions(1)
    for change in ({"nonce": 0}, {"timeout_ns": 0}, {"rank": 1}, {"offset": 8}, {"result": 0}, {"bases": []}):
        with pytest.raises(RuntimeError):
            regions.run_rank(**({"rank": 0} | change))
    with pytest.raises(ValueError, match="no variant v9"):
        regions.run_rank(0, isa="v9")


# -- the words


def test_words_of_a_group() -> None:
    found = [[0, 0, 0, 0b0100, 0], [0, 0, 0, 0b0100, 0], [0, 0, 0, 0b0100, 0], [0, 0b10, 0, 0b0100, 0b1]]
    assert as_text(found) == [
        "rank 1 -> rank 3: pattern wrong",
        "multicast from rank 0: pattern wrong on rank 3",
        "multicast from rank 2: flag did not arrive",
    ]
    assert bad_links([[0] * 5] * 3) == []
    assert bad_links([[0, 0, 0, 0, 0], [1, 0, 1, 0, 0]]) == [BadLink(0, (1,), "flag did not arrive")]


# -- the group: heaps, verdicts


def make_heap(group: object, layout: RegionLayout) -> CpuHeap:
    return CpuHeap.create(
        as_group(group),
        layout.num_bytes,
        shared_nbytes=layout.num_bytes,
        init=lambda base: None,
        payload={},
        timeout_s=60.0,
    )


def layout_of(num_ranks: int) -> RegionLayout:
    return RegionLayout(
        num_ranks=num_ranks,
        num_heads=num_ranks,
        head_dim=8,
        max_num_tokens=1,
        item_bytes=2,
        num_lanes=1,
        link_check=True,
    )


def arguments_of(heap: CpuHeap, layout: RegionLayout, nonce: int, timeout_s: float = LONG_S) -> dict[str, object]:
    return {
        "bases": heap.bases,
        "offset": layout.parts["link_check"].offset,
        "nonce": nonce,
        "timeout_s": timeout_s,
        "wait_budget": (0, 10),
        "multicast": heap.shared_base,
        "multicast_view": heap.shared_base,
        "agree_timeout_s": 60.0,
    }


def error_of(call: Callable[[], object]) -> tuple[type, str, tuple[int, ...]] | None:
    try:
        call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    return None


def _check_a_heap(group: object, damaged: bool) -> list[object]:
    layout = layout_of(as_group(group).num_ranks)
    heap = make_heap(group, layout)
    group = as_group(group)
    outcomes: list[object] = [
        check_links(group, MODULE, **arguments_of(heap, layout, NONCE + check)) for check in range(3)
    ]
    if damaged:
        arguments = arguments_of(heap, layout, NONCE + 3, 3.0)
        if group.rank == 2:  # two regions exchanged; and multicast that goes to the own region alone
            arguments["bases"] = [heap.bases[1], heap.bases[0], *heap.bases[2:]]
            arguments["multicast"] = heap.bases[2]
        outcomes.append(error_of(lambda: require_links(group, MODULE, advice="try this", **arguments)))
        outcomes.append(check_links(group, MODULE, **arguments_of(heap, layout, NONCE + 4)))  # whole again
    agree(group, "end")
    heap.close(timeout_s=20)
    return outcomes


@WORLDS
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_over_a_heap(mode: str, num_ranks: int) -> None:
    assert run_ranks(_check_a_heap, num_ranks, False, mode=mode) == [[[]] * 3] * num_ranks


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_damage_over_a_heap_raises_the_same_on_all_ranks(mode: str) -> None:
    text = (
        "workspace: every rank must reach every other (rank 2 -> rank 0: pattern wrong; rank 2 -> rank 1: pattern wrong;"
        " multicast from rank 2: flag did not arrive): try this"
    )
    outcomes = run_ranks(_check_a_heap, 4, True, mode=mode)
    for outcome in outcomes:
        assert outcome == [[], [], [], (DcpDeviceError, text, (2,)), []]


def test_many_bad_links_are_counted_and_a_step_that_fails_fails_everywhere() -> None:
    regions = Regions(6)
    arguments = {"bases": regions.bases, "offset": regions.offset, "timeout_s": 0.05, "wait_budget": (0, 10)}

    def check(group: ThreadGroup) -> list[object]:
        nonce = NONCE + group.rank  # no two ranks are in one check
        lost = error_of(lambda: require_links(group, MODULE, nonce=nonce, **arguments))
        mistake = {"isa": "v9"} if group.rank == 4 else {}
        failed = error_of(lambda: require_links(group, MODULE, nonce=1, **(arguments | mistake)))
        result = (0, list) if group.rank == 3 else None
        no_result = error_of(lambda: require_links(group, NoKernel, nonce=2, result=result, **arguments))
        return [lost, failed, no_result]

    results = run_ranks(check, 6, mode="thread")
    assert all(result == results[0] for result in results)
    lost, failed, no_result = results[0]
    assert (
        lost[2] == tuple(range(6)) and lost[1].endswith("; and 18 more)") and lost[1].count("flag did not arrive") == 12
    )
    assert failed[1].startswith("workspace: check links failed on rank 4: ") and "no variant v9" in failed[1]
    assert no_result[0] is DcpDeviceError and no_result[1].startswith(
        "workspace: check links failed on rank 0: the kernel must run (status 3, result [])"
    )


class NoKernel:
    """A module whose launch fails."""

    @staticmethod
    def link_check(**_: object) -> int:
        return 3


def test_a_rank_that_dies_is_named() -> None:
    def check(group: ThreadGroup) -> object:
        layout = layout_of(3)
        heap = make_heap(group, layout)
        if group.rank == 1:
            return None
        error = error_of(lambda: check_links(group, MODULE, **arguments_of(heap, layout, NONCE, SOON_S)))
        heap.close(timeout_s=0)
        return error

    outcomes = run_ranks(check, 3, mode="thread")
    for error in (outcomes[0], outcomes[2]):
        assert error[2] == (1,) and error[1].startswith("workspace: check links: "), error


def test_the_part_is_there_when_it_is_wanted() -> None:
    with_it, without = layout_of(3), RegionLayout(3, 3, 8, 1, 2, 1)
    assert without.parts["link_check"].num_bytes == 0
    assert with_it.parts["link_check"].num_bytes == 2 * 3 * LINK_SLOT_BYTES
    names = list(with_it.parts)
    assert names[names.index("flags") + 1] == "link_check" and with_it.parts["link_check"].offset % 4096 == 0
    assert with_it.num_bytes == without.num_bytes + 8192
