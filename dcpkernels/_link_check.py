"""Whether every rank reaches every other one's region: csrc/ops/link_check.h, and what it found, in words.

Heaps that map memory of other devices run it when a workspace is made. On a CPU all ranks map the same pages, and
what a mapping is the kernel says: there it runs in tests only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dcpkernels.errors import DcpDeviceError
from dcpkernels.heap.group import Group
from dcpkernels.heap.verdict import agree, attempt, rank_list

NUM_RESULT_WORDS = 6  # csrc/ops/link_check.h: LinkResult
_MAX_NAMED = 12  # bad links in one text
_NO_FLAG = "flag did not arrive"


class BadLink(NamedTuple):
    """What `source` stored did not get to `destinations` as it should. Of multicast, those are in one entry."""

    source: int
    destinations: tuple[int, ...]
    finding: str
    is_multicast: bool = False
    of_all: bool = False  # multicast that no rank got

    def __str__(self) -> str:
        if not self.is_multicast:
            return f"rank {self.source} -> {rank_list(self.destinations)}: {self.finding}"
        where = "" if self.of_all else f" on {rank_list(self.destinations)}"
        return f"multicast from rank {self.source}: {self.finding}{where}"


def check_links(
    group: Group,
    module: Any,
    *,
    bases: Sequence[int],
    offset: int,
    nonce: int,
    timeout_s: float,
    wait_budget: tuple[int, int],
    isa: str = "auto",
    bases_table: int = 0,
    multicast: int = 0,
    multicast_view: int = 0,
    stream: int = 0,
    device: int = 0,
    result: tuple[int, Callable[[], Sequence[int]]] | None = None,
    agree_timeout_s: float = 0.0,
) -> list[BadLink]:
    """Collective. The links that are bad; the same list on every rank.

    Args:
        bases, bases_table: where the regions are, for this process; the device's copy of the same numbers.
        offset: of the part `link_check` of RegionLayout, which was zero before the first check.
        nonce: the same on all ranks, not 0, and another one in every check of these regions.
        timeout_s: how long a rank waits for the others, more than 0; they may differ by as much in when they come.
        multicast: address that reaches all regions, 0 = none. multicast_view: base of where this rank sees it arrive,
            0 = its own region.
        result: address of the result's words, which the kernel can write, and a function that waits for the kernel and
            reads them; None: memory of the process, on a CPU.
        agree_timeout_s: for the exchange of what the ranks found, which comes after the waits; 0 = the group's own.
    """

    def step() -> list[int]:
        words = (ctypes.c_uint64 * NUM_RESULT_WORDS)()
        address, read = result or (ctypes.addressof(words), lambda: words)
        status = module.link_check(
            rank=group.rank,
            bases=list(bases),
            bases_table=bases_table,
            multicast=multicast,
            multicast_view=multicast_view,
            offset=offset,
            nonce=nonce,
            timeout_ns=math.ceil(timeout_s * 1e9),
            num_spins=wait_budget[0],
            num_yields=wait_budget[1],
            result=address,
            isa=isa,
            stream=stream,
            device=device,
        )
        found = [int(word) for word in read()] if status == 0 else []
        if len(found) != NUM_RESULT_WORDS or found[-1] != nonce:
            raise DcpDeviceError(f"the kernel must run (status {status}, result {found})", ranks=(group.rank,))
        return found[:-1]

    found, error = attempt(step)
    # Also what a slot needs before it is written again: no rank is in the check any more.
    return bad_links(agree(group, "workspace: check links", found, error, timeout_s=agree_timeout_s))


def bad_links(found: Sequence[Sequence[int]]) -> list[BadLink]:
    """Of every rank's result, without the nonce. First the pairs, by source and destination, then multicast.

    An echo that is missing is named where nothing else is wrong between the two: else it follows from that."""
    no_flag, wrong, no_echo, no_multicast, wrong_multicast = (
        [_ranks(of_rank[i]) for of_rank in found] for i in range(5)
    )
    ranks = range(len(found))
    pairs: list[BadLink] = []
    for source in ranks:
        for destination in ranks:
            if source in no_flag[destination]:
                pairs.append(BadLink(source, (destination,), _NO_FLAG))
            elif source in wrong[destination]:
                pairs.append(BadLink(source, (destination,), "pattern wrong"))
    known = {frozenset((bad.source, *bad.destinations)) for bad in pairs}
    pairs += [
        BadLink(source, (destination,), "echo did not arrive")
        for destination in ranks
        for source in sorted(no_echo[destination])
        if frozenset((source, destination)) not in known
    ]
    pairs.sort()
    for source in ranks:
        for sets, finding in ((no_multicast, _NO_FLAG), (wrong_multicast, "pattern wrong")):
            on = tuple(rank for rank in ranks if source in sets[rank])
            if on:
                pairs.append(BadLink(source, on, finding, is_multicast=True, of_all=len(on) == len(found)))
    return pairs


def require_links(group: Group, module: Any, *, advice: str = "", **check: Any) -> None:
    """Collective. `check_links`, and where a link is bad DcpDeviceError, the same on every rank; its `.ranks` are those
    that all bad links have in common, and all of their ends where there is none. `advice`: for a flag that did not arrive,
    the same on all ranks."""
    bad = check_links(group, module, **check)
    if bad:
        named = [str(link) for link in bad[:_MAX_NAMED]]
        more = [f"and {len(bad) - _MAX_NAMED} more"] if len(bad) > _MAX_NAMED else []
        ends = [{link.source, *(() if link.of_all else link.destinations)} for link in bad]
        ranks = set.intersection(*ends) or set.union(*ends)
        text = f"workspace: every rank must reach every other ({'; '.join(named + more)})"
        if advice and any(link.finding == _NO_FLAG for link in bad):
            text = f"{text}: {advice}"
        raise DcpDeviceError(text, ranks=ranks)


def _ranks(mask: int) -> frozenset[int]:
    return frozenset(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
