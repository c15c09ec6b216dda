"""Programs of calls, one of which a rank makes otherwise; and what must come of them, by a model that knows of calls what
docs/protocol.md promises and nothing of how it is done.

A call is matched with the peers' calls by its stream (op and lane) and its place there. A model of one thread a rank:
every call but a start waits for all ranks, so the ranks go on together or stand still.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

LANES = (0, 1)
BASES = ("e", "2")
DTYPES = ("float32", "bfloat16", "float16")
MAX_TOKENS, NUM_CHUNKS, NUM_PLANS = 4, 3, 2


class Call(NamedTuple):
    """`what` is a base of a reduce, a dtype of a query, the number of a plan; `number` is T or the chunk."""

    op: str  # reduce, query, query_out, release, chunk, start, wait
    lane: int = 0
    number: int = 0
    what: str | int = ""

    @property
    def stream(self) -> tuple[str, int]:
        op = {"query_out": "query", "release": "query", "start": "chunk", "wait": "chunk"}.get(self.op, self.op)
        return op, self.lane

    @property
    def is_chunk(self) -> bool:
        return self.op in ("chunk", "start", "wait")

    def is_named(self, rank: int, text: str) -> bool:
        """Whether an error says that `rank` made this call."""
        words = f"release_query(lane={self.lane})"
        if self.op == "reduce":
            words = f"a2a_lse_reduce(num_tokens={self.number}, dtype=float32, lse_base={self.what!r}, lane={self.lane})"
        elif self.op.startswith("query"):
            out = "out, " if self.op == "query_out" else ""
            words = f"query_gather(num_tokens={self.number}, dtype={self.what}, {out}lane={self.lane})"
        elif self.is_chunk:
            words = f"kv_gather(chunk_idx={self.number} (mod 4096), dtype=bfloat16, plan="
        ends = rf"\w+, buffer [01], lane={self.lane}\)" if self.is_chunk else ""
        return re.search(rf"\brank {rank}: {re.escape(words)}{ends}", text) is not None


Program = tuple[Call, ...]


def reduce_call(rng: random.Random, lane: int, num_tokens: int | None = None) -> Call:
    return Call("reduce", lane, rng.randrange(10) if num_tokens is None else num_tokens, rng.choice(BASES))


def any_call(rng: random.Random) -> Call:
    """Of any kind, whether it may be made now or not."""
    lane, op = rng.choice(LANES), rng.choice(("reduce", "query", "query_out", "release", "chunk", "start", "wait"))
    if op == "reduce":
        return reduce_call(rng, lane)
    if op == "release":
        return Call(op, lane)
    if op in ("query", "query_out"):
        return Call(op, lane, rng.randrange(MAX_TOKENS + 1 if op == "query" else 10), rng.choice(DTYPES))
    return Call(op, lane, rng.randrange(NUM_CHUNKS), rng.randrange(NUM_PLANS))


def legal_program(rng: random.Random, length: int) -> Program:
    """Calls as engines make them, on two lanes, some of them several times over: a model has many equal layers."""
    calls: list[Call] = []
    open_rows: dict[int, int] = {}
    started: dict[int, Call] = {}
    while len(calls) < length or open_rows or started:
        call = any_call(rng)
        lane = call.lane
        if len(calls) >= length:  # to an end
            lane = next(iter(open_rows or started))
            call = Call("release", lane) if open_rows else started[lane]._replace(op="wait")
        if call.op == "reduce" and lane in open_rows:
            call = call._replace(number=open_rows[lane])
        if (call.op == "query" and lane in open_rows) or (call.op == "query_out" and lane in open_rows):
            continue
        if call.op in ("chunk", "start") and lane in started:
            continue
        if call.op == "wait":
            if lane not in started:
                continue
            call = started.pop(lane)._replace(op="wait")
        if call.op in ("reduce", "release"):
            open_rows.pop(lane, None)
        elif call.op == "query":
            open_rows[lane] = call.number
        elif call.op == "start":
            started[lane] = call
        calls.append(call)
        if call.op in ("reduce", "query_out", "chunk") and rng.random() < 0.3:
            calls += [call] * rng.randrange(1, 3)  # equal ones
    return tuple(calls)


CHANGES = ("insert", "delete", "substitute", "swap")


def changed(rng: random.Random, program: Program, change: str) -> Program:
    """One change at one point. The result may be the same program, where two equal calls were swapped."""
    at = rng.randrange(len(program))
    before, call, after = program[:at], program[at : at + 1], program[at + 1 :]
    if change == "insert":
        return (*before, rng.choice((any_call(rng), *call)), *call, *after)
    if change == "delete":
        return (*before, *after)
    if change == "substitute":
        return (*before, any_call(rng), *after)
    return (*before, *after[:1], *call, *after[1:])


# -- what must come of it


class Fault(NamedTuple):
    """An error that all ranks raise: its class, and what `.ranks` may be (any of these)."""

    error: str
    ranks: frozenset[tuple[int, ...]]


@dataclass
class Outcome:
    """`matched[rank][i]`: the places in their own programs at which each rank made the call that is call i of `rank`, if
    that call returns; `ends[rank]` how many calls return at most, and `refused` who is told so by itself alone. One of
    `faults` ends the others; none: every rank comes to the end of its program."""

    matched: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    at_once: bool = True  # or at the deadline


class _Rank:
    def __init__(self) -> None:
        self.at = 0
        self.entered = False  # the call at `at` has raised its flag
        self.open_rows: dict[int, int] = {}
        self.started: dict[int, tuple[Call, int]] = {}  # lane -> the start that is to be waited for, and its place
        self.num_waits: dict[int, int] = defaultdict(int)  # entered, by lane
        self.num_rounds: dict[tuple[str, int], int] = defaultdict(int)
        self.stopped = False  # refused, or in a fault of its own


def outcome(programs: list[Program], *, closes: bool, sees_closed: bool, direct: bool = True) -> Outcome:
    """Of programs that differ on one rank at most. `closes`: a rank closes its workspace when it has come to its end, as it
    does in any case when it is refused; `sees_closed`: others notice (threads have no sockets that could tell them).

    Not `direct`, the collective backend: a chunk is sent by its wait alone, and a call that a rank must not make now is
    looked at when all ranks have come to it, which they do not."""
    num_ranks = len(programs)
    ranks = [_Rank() for _ in programs]
    result = Outcome([{} for _ in programs], [0] * num_ranks)
    # stream, round -> rank -> (what the digest holds, the place of the call)
    flags: dict[tuple[tuple[str, int], int], dict[int, tuple[Call, int]]] = defaultdict(dict)

    def step(rank: int) -> bool:
        """Whether `rank` has got further."""
        me = ranks[rank]
        if me.stopped or me.at == len(programs[rank]):
            return False
        call = programs[rank][me.at]
        if me.entered:
            return leave(rank, me, call)
        me.entered = may_enter(rank, me, call)
        return me.entered or me.stopped

    def may_enter(rank: int, me: _Rank, call: Call) -> bool:
        lane = call.lane
        if (call.op in ("chunk", "start") and lane in me.started) or (
            call.op == "wait" and (lane not in me.started or me.started[lane][0] != call._replace(op="start"))
        ):
            me.stopped = True
            result.refused.add(rank)
            return False
        is_open = lane in me.open_rows
        if direct and call.op in ("query", "query_out") and is_open:
            return fault_of_its_own(rank, me, "DcpError")
        if direct and call.op == "reduce" and is_open and me.open_rows[lane] != call.number:
            return fault_of_its_own(rank, me, "DcpMismatch")
        round_idx = me.num_rounds[call.stream]
        if call.op in ("chunk", "start"):
            # The buffer of the chunk before last: every peer has come to the wait for the last one. (Another chunk lies
            # behind every lane.)
            if (
                direct
                and round_idx >= 1
                and any(other.num_waits[lane] < round_idx for other in ranks if other is not me)
            ):
                return False
            me.started[lane] = (call._replace(op="start"), me.at)
        if call.op != ("wait" if direct else "start"):
            what = call._replace(op="chunk") if call.is_chunk else call
            flags[call.stream, round_idx][rank] = (what, me.started[lane][1] if call.is_chunk else me.at)
        if call.op in ("chunk", "wait"):
            me.num_waits[lane] += 1
        return True

    def fault_of_its_own(rank: int, me: _Rank, error: str) -> bool:
        me.stopped = True
        result.faults.append(Fault(error, frozenset({(rank,)})))
        return False

    def leave(rank: int, me: _Rank, call: Call) -> bool:
        lane, stream = call.lane, call.stream
        if call.op != "start":
            here = flags[stream, me.num_rounds[stream]]
            mine = here[rank][0]
            if len(here) < num_ranks or any(other != mine for other, _ in here.values()):
                return False
            result.matched[rank][me.at] = tuple(here[other][1] for other in range(num_ranks))
            me.num_rounds[stream] += 1
        if call.op in ("chunk", "wait"):
            me.started.pop(lane, None)
        if call.op in ("reduce", "release", "query_out"):
            me.open_rows.pop(lane, None)
        elif call.op == "query":
            me.open_rows[lane] = call.number
        me.at, me.entered = me.at + 1, False
        return True

    progress = True
    while progress:
        progress = sum(step(rank) for rank in range(num_ranks)) > 0
    result.ends = [me.at for me in ranks]
    for place, here in flags.items():
        waits = {rank for rank in here if _waits_in(programs[rank], ranks[rank], *place)}
        differ = {(a, b) for a in here for b in here if a < b and here[a][0] != here[b][0] and {a, b} & waits}
        if differ:
            result.faults.append(Fault("DcpMismatch", frozenset(differ)))
    if result.faults or all(me.at == len(program) for me, program in zip(ranks, programs, strict=True)):
        return result
    gone = [rank for rank in range(num_ranks) if ranks[rank].stopped or ranks[rank].at == len(programs[rank])]
    waiting = [rank for rank in range(num_ranks) if rank not in gone]
    if gone and sees_closed and (closes or result.refused):
        # Whoever looks first may see some of those that leave, and not yet all; or that a connection broke.
        some = {tuple(rank for i, rank in enumerate(gone) if bits >> i & 1) for bits in range(direct, 1 << len(gone))}
        result.faults.append(Fault("DcpPeerLost", frozenset(some)))
    elif gone:
        result.faults.append(Fault("DcpTimeout", frozenset({tuple(gone)})))
        result.at_once = False
    else:
        here = [programs[rank][ranks[rank].at].stream for rank in waiting]
        pairs = {(a, b) for i, a in enumerate(waiting) for j, b in enumerate(waiting) if a < b and here[i] != here[j]}
        result.faults.append(Fault("DcpMismatch", frozenset(pairs)))
        result.at_once = False
    return result


def _waits_in(program: Program, rank: _Rank, stream: tuple[str, int], round_idx: int) -> bool:
    """Whether it waits for flags there, and so sees those that differ."""
    if not rank.entered or rank.at == len(program):
        return False
    return program[rank.at].stream == stream and rank.num_rounds[stream] == round_idx
