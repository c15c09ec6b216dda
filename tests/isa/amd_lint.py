"""AMD: what is in flight at each instruction, on any path to it. From that come the ordered events of a kernel, and a
lint: three hazards (the head of csrc/arch/hip.h), accesses of the system that are none, and memory that kernels do not
use."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tests.isa.amd_flow import ASM, Function, UnknownFlow, states_before
from tests.isa.compiled import (
    ACQUIRE_LOAD,
    BARRIER,
    COMPARE_EXCHANGE,
    CSRC,
    FETCH_ADD,
    LOAD_AFTER_READS,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    STORE_BEHIND,
    Event,
    Instruction,
)

STORE = re.compile(r"(global|flat|buffer)_(store|atomic)")
LOAD = re.compile(r"(global|flat|buffer)_load")
ATOMIC = re.compile(r"(global|flat|buffer)_atomic")
WORD_STORE, WORD_LOAD = re.compile(r"global_store_dword(x2)? "), re.compile(r"global_load_dword(x2)? ")
WRITE_BACK, INVALIDATE, BARRIER_OF_BLOCK = "buffer_wbl2", "buffer_inv", "s_barrier"
OF_SYSTEM = "sc0 sc1"
CONCERNS = re.compile(r"(asm: )?((global|flat|buffer|scratch)_|s_waitcnt\b|s_barrier\b)")

Site = tuple[str, ...]


def is_drain(instruction: Instruction) -> bool:
    """Waits for everything in flight of this wave."""
    return bool(re.match(r"(asm: )?s_waitcnt\b.*\bvmcnt\(0\)", instruction.text))


def is_of_system(text: str) -> bool:
    return bool(re.search(r"\bsc0 sc1$", text))


@dataclass(frozen=True)
class Flight:
    """What is in flight. May: on some path. Must: on all of them."""

    write_backs: frozenset[int] = frozenset()  # may: that nothing has waited for
    store: int = -1  # may: the first one that nothing has waited for
    loads: frozenset[int] = frozenset()  # may: loads of the system behind which their site has no invalidation yet
    late_loads: frozenset[int] = frozenset()  # may: those of them that nothing has waited for
    released: tuple[Site, bool, bool] | None = None  # must: the site of the last write-back; of the system; waited for
    drains: frozenset[Site] = frozenset()  # must: the sites of waits with no load or store behind them


def join(a: Flight, b: Flight) -> Flight:
    stores = [store for store in (a.store, b.store) if store >= 0]
    return Flight(
        a.write_backs | b.write_backs,
        min(stores, default=-1),
        a.loads | b.loads,
        a.late_loads | b.late_loads,
        a.released if a.released == b.released else None,
        a.drains & b.drains,
    )


def flights(function: Function) -> dict[int, Flight]:
    code = function.instructions

    def step(now: Flight, i: int, instruction: Instruction) -> Flight:
        text, site = instruction.text.removeprefix(ASM), instruction.site
        if is_drain(instruction):
            released = (*now.released[:2], True) if now.released else None
            return Flight(frozenset(), -1, now.loads, frozenset(), released, now.drains | {site})
        if text.startswith(WRITE_BACK):
            released = (site, text.endswith(OF_SYSTEM), False)
            return replace(now, write_backs=now.write_backs | {i}, released=released)
        if text.startswith(INVALIDATE):
            mine = {load for load in now.loads if code[load].site == site}
            return replace(now, loads=now.loads - mine, late_loads=now.late_loads - mine)
        if STORE.match(text):
            return replace(now, store=now.store if now.store >= 0 else i, released=None, drains=frozenset())
        if LOAD.match(text):
            now = replace(now, drains=frozenset())
            if not is_of_system(text):
                return now
            others = frozenset(load for load in now.loads if code[load].site != site)
            return replace(now, loads=others | {i}, late_loads=(now.late_loads & others) | {i})
        return now

    return states_before(function, lambda i: bool(CONCERNS.match(i.text)), Flight(), step, join)


def ordered_events(function: Function) -> list[Event]:
    """A release is buffer_wbl2 (to the system: sc0 sc1), a wait for it, and the store; an acquire is the load, a wait,
    and buffer_inv. All parts come from one call into arch/, and are there on every path."""
    try:
        before = flights(function)
    except UnknownFlow:
        return []
    code = function.instructions
    events, acquires = [], set()
    for i, now in sorted(before.items()):
        text, site = code[i].text, code[i].site
        is_released = now.released == (site, True, True)
        is_drained = site in now.drains
        kind = None
        if text.startswith(INVALIDATE) and text.endswith(OF_SYSTEM):
            acquires |= {load for load in now.loads - now.late_loads if code[load].site == site}
        elif text == BARRIER_OF_BLOCK:
            kind = PUBLISH_BARRIER if is_drained else BARRIER
        elif re.match(r"global_atomic_cmpswap_x2 .*\bsc1", text):
            kind = COMPARE_EXCHANGE if is_released else None
        elif re.match(r"global_atomic_add", text):
            kind = FETCH_ADD if now.released and now.released[0] == site and now.released[2] else None
        elif WORD_STORE.match(text) and is_of_system(text):
            kind = RELEASE_STORE if is_released else STORE_BEHIND if is_drained else None
        elif WORD_LOAD.match(text) and is_of_system(text) and is_drained:
            kind = LOAD_AFTER_READS
        if kind:
            events.append(Event(kind, code[i].lines))
    return events + [Event(ACQUIRE_LOAD, code[load].lines) for load in sorted(acquires)]


def lint(function: Function, csrc: Path = CSRC) -> list[str]:
    try:
        before = flights(function)
    except UnknownFlow as unknown:
        return [f"control flow: {unknown}"]
    code = function.instructions
    findings = []
    for i, now in sorted(before.items()):
        text, at = code[i].text.removeprefix(ASM), f"at {code[i].lines}"
        is_store = bool(STORE.match(text))
        if now.write_backs and is_store and (ATOMIC.match(text) or re.search(r"\bsc1\b", text)):
            findings.append(f"hazard 1: a flag is stored before the write-back has completed, {at}: {text}")
        if now.write_backs and text == BARRIER_OF_BLOCK:
            findings.append(f"hazard 1: a barrier is reached before the write-back has completed, {at}: {text}")
        if (is_store or LOAD.match(text)) and code[i].text.startswith(ASM):
            findings.append(f"hazard 2: an access in inline assembly, which no compiler waits for, {at}: {text}")
        if text == BARRIER_OF_BLOCK and now.store >= 0 and is_in(code[i], ("publish_done",), csrc):
            stored = code[now.store].text
            findings.append(f"hazard 3: stores are in flight at the barrier of publish_done, {at}: {stored}")
        if text.startswith(INVALIDATE):
            late = [code[load].text for load in sorted(now.late_loads) if code[load].site == code[i].site]
            findings += [f"an invalidation before its load has returned, {at}: {load}" for load in late]
        if (is_store or LOAD.match(text)) and is_in(code[i], SYSTEM_ACCESSES, csrc) and not is_word_of_system(text):
            findings.append(f"an access of the system that others may not see, {at}: {text}")
        if text.startswith("flat_"):
            findings.append(f"flat memory, {at}: {text}")
        elif re.match(r"scratch_|buffer_(load|store|atomic)", text):
            findings.append(f"scratch memory, {at}: {text}")
    return findings


SYSTEM_ACCESSES = ("load_acquire_sys", "load_relaxed_sys", "store_relaxed_sys", "compare_exchange_sys")


def is_word_of_system(text: str) -> bool:
    """One word, past all caches. With an atomic that returns what was there, sc0 says just that."""
    if ATOMIC.match(text):
        return bool(re.search(r"\bsc1\b", text))
    return bool(re.match(r"global_(load|store)_dword(x2)? ", text)) and is_of_system(text)


def is_in(instruction: Instruction, functions: tuple[str, ...], csrc: Path) -> bool:
    """Whether it comes from a line of one of these functions of arch/hip.h."""
    numbers = [int(line.partition(":")[2]) for line in instruction.lines if line.startswith("arch/hip.h:")]
    return any(number in lines_of(name, csrc) for name in functions for number in numbers)


@functools.cache
def lines_of(name: str, csrc: Path) -> range:
    source = (csrc / "arch/hip.h").read_text().splitlines()
    first = next(i for i, line in enumerate(source, 1) if re.match(rf"DCP_FN .*\b{name}\(", line))
    if source[first - 1].endswith("}"):
        return range(first, first + 1)
    return range(first, next(i for i, line in enumerate(source, 1) if i > first and line.startswith("}")) + 1)
