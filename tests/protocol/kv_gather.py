"""The protocol of kv_gather, to be explored: chunks in two buffers, started and awaited by two calls.

What a2a_lse_reduce.py says of steps, threads and names of data holds. The lane's one epoch stream has two epochs
in memory, that of the last chunk started and that of the last one waited for. A buffer is a copy on every rank, or
one that all ranks share.

    start  enter, acquire, publish, signal, leave
    wait   enter, release, wait, [dequantise,] confirm, leave

    enter       the epoch of the chunk. Start and wait must take turns, and so must the buffers: the chunk before
                may be in use
    acquire     await every peer's credit: released >= the epoch u in which the buffer was last used, in the line
                of u's parity
    publish     one row of this channel into every rank's buffer
    release     released := epoch of the chunk before, in the line of its parity, at every peer
    wait        until every peer's flag is {epoch, digest}; where `dequantise` follows, of all channels
    dequantise  reads rows of all channels, and writes them elsewhere
    leave       the last channel stores the epoch, and after a start that of the buffer's use

`use` is the caller's: it reads the chunk that was waited for last.

A caller is a string, one letter a step:
    s  start     w  wait, returns the chunk itself      u  use
    p  start and wait in one pass of each channel       d, q  as w and p, with dequantise
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from a2a_lse_reduce import A2aLseReduce, State, Step, Thread
from a2a_pull import at_least
from a2a_rules import TIMEOUT, Call, Case, Rules, low32, previous_epoch
from explorer import Move

TURN = "out of turn"
SHARED = -1  # in place of the rank that owns a copy
STARTS, WAITS, DEQUANTISES = "spq", "wdpq", "dq"


def from_memory(used: int, epoch: int) -> int:
    return used


def two_less(used: int, epoch: int) -> int:
    return used and epoch - 2


@dataclass(frozen=True)
class KvRules(Rules):
    checks_turn: bool = True  # False: nobody looks whether start and wait take turns
    checks_buffer: bool = True  # False: start takes any buffer, that of the chunk before too
    credit: Callable[[int, int], bool] = at_least  # (released by a peer, used by me) -> may be written again
    last_use: Callable[[int, int], int] = from_memory  # (stored by the last start, epoch now) -> used
    credits_from: str = "all"  # "all but one": not the next rank's
    credits_before: str = "all"  # stores to any rank. "each": only to the rank that gave it
    releases_previous: bool = True  # False: wait releases its own chunk
    release_line_of_use: bool = True  # False: in the line of the chunk that is awaited
    release_first: bool = True  # False: after the flags
    dequantise_awaits_all: bool = True  # False: only the flags of its own channel
    lost_by_all: bool = True  # False: a lost peer is missed only where its flag of the own channel is missing
    dequantise_own_rows: str = "source"  # "buffer": the own rows are read there too


@dataclass(frozen=True)
class KvCall(Call):
    kind: str = ""
    buffer: int = 0
    used: int = -1  # the chunk that the caller reads after this call


def kv_calls(caller: str, rows: int = 1, buffers: tuple[int, ...] = (), plans: dict[int, Any] | None = None,
             ) -> tuple[KvCall, ...]:
    """buffers, plans: of the chunks, where they are not 0, 1, 0, 1, ... and all the same."""
    made: list[KvCall] = []
    started = waited = 0
    for letter in caller:
        if letter == "u":
            made[-1] = KvCall(**{**made[-1].__dict__, "used": waited - 1})
            continue
        chunk = started if letter in STARTS else waited
        started, waited = started + (letter in STARTS), waited + (letter in WAITS)
        buffer = buffers[chunk] if buffers else chunk % 2
        digest = (chunk, buffer, (plans or {}).get(chunk))
        made.append(KvCall(chunk, (rows,), digest, None, "", letter, buffer))
    return tuple(made)


class KvGather(A2aLseReduce):
    host_steps = ("use",)

    def __init__(self, case: Case, rules: Rules = KvRules(), shared: bool = False) -> None:
        assert isinstance(rules, KvRules)
        self.kv, self.shared = rules, shared
        super().__init__(case, rules)
        if case.promise == "data":
            self._alone |= {"release"}  # it commutes where no wait gives up: others only come to be enabled

    # ---- memory and programs

    def _declare_data(self, rank: int) -> None:
        all_calls = [call for of_rank in self.case.calls for call in of_rank]
        self._declare(("waited", rank), self._memory[self._cell["epoch", rank, ""]])
        for parity in (0, 1):
            for ch in self.channels:
                for src in self._peers(rank):
                    self._declare(("released", rank, parity, ch, src), 0)
        for buffer in sorted({call.buffer for call in all_calls}):
            self._declare(("used", rank, buffer), 0)
            for row in range(max(call.rounds[0] for call in all_calls)):
                for owner in [SHARED] if self.shared else self.ranks:
                    self._declare(("buffer", owner, buffer, rank, row), None)

    def _epoch(self, rank: int, call: int) -> int:
        calls = self.case.calls[rank]
        is_wait = calls[min(call, len(calls) - 1)].kind in "wd"
        return self._cell["waited", rank] if is_wait else self._cell["epoch", rank, ""]

    def _buffer(self, owner: int, buffer: int, src: int, row: int) -> int:
        return self._cell["buffer", SHARED if self.shared else owner, buffer, src, row]

    def _rows_of(self, rank: int, call: KvCall, sources: Any) -> tuple[Any, ...]:
        return tuple((row, src, self._buffer(rank, call.buffer, src, row))
                     for row in range(call.rounds[0]) for src in sources)

    def _host(self, rank: int, ch: int, index: int) -> list[Step]:
        chunk = self.case.calls[rank][index - 1].used if index else -1
        if ch or chunk < 0:
            return []
        waits = [call for call in self.case.calls[rank] if call.kind in WAITS]
        reads = self._rows_of(rank, waits[chunk], self.ranks)
        return [Step("use", index, name=(chunk, 0), cells=(reads, reads))]

    def _program(self, rank: int, ch: int) -> list[Step]:
        program = super()._program(rank, ch)
        last = self._host(rank, ch, len(self.case.calls[rank]))
        return program + [step._replace(after=len(program) + 1) for step in last]

    def _confirms(self, call: Call) -> bool:
        return super()._confirms(call) and call.kind != "s"

    def _round(self, rank: int, ch: int, index: int, call: Call, number: int, num_rows: int) -> list[Step]:
        steps = self._start(rank, ch, index, call) if call.kind in STARTS else []
        return steps + (self._await(rank, ch, index, call) if call.kind in WAITS else [])

    def _start(self, rank: int, ch: int, index: int, call: KvCall) -> list[Step]:
        peers, num_rows, num_channels = self._peers(rank), call.rounds[0], len(self.channels)
        rows = [row for row in range(num_rows) if self.rules.row_channel(row, num_rows, num_channels) == ch]
        awaited = peers if self.kv.credits_from == "all" else peers[1:]
        each = self.kv.credits_before == "each"
        steps = [] if each else [Step("acquire", index, cells=(call.buffer, tuple(awaited)))]
        for place, owner in enumerate([*peers, rank]):
            if each and owner in awaited:
                steps.append(Step("acquire", index, cells=(call.buffer, (owner,))))
            if self.shared and place > 0:
                continue  # every byte is written once
            to, name = SHARED if self.shared else owner, (call.number, 0)
            cells = [(row, self._buffer(owner, call.buffer, rank, row)) for row in rows]
            steps += [Step("publish", index, 0, to, row, name, (cell, cell)) for row, cell in cells]
        return steps + [Step("signal", index, peer=peer, cells=self._flag(peer, ch, rank)) for peer in peers]

    def _await(self, rank: int, ch: int, index: int, call: KvCall) -> list[Step]:
        peers, dequantises = self._peers(rank), call.kind in DEQUANTISES
        from_all = dequantises and self.kv.dequantise_awaits_all
        channels = [ch, *[other for other in self.channels if other != ch]] if from_all else [ch]
        release = [Step("release", index, peer=peer) for peer in peers]
        wait = [Step("wait", index, peer=peer, cells=self._flag(rank, other, peer))
                for other in channels for peer in peers]
        steps = release + wait if self.kv.release_first else wait + release
        if dequantises:
            sources = peers if self.kv.dequantise_own_rows == "source" else self.ranks
            reads = self._rows_of(rank, call, sources)
            steps.append(Step("dequantise", index, name=(call.number, 0), cells=(reads, reads)))
        return steps

    # ---- steps

    def _enter(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        started, waited = state.memory[self._cell["epoch", rank, ""]], state.memory[self._cell["waited", rank]]
        call = self.case.calls[rank][step.call]
        in_use = call.kind in STARTS and state.memory[self._cell["used", rank, call.buffer]] == started
        is_turn = started == (waited if call.kind in STARTS else self.rules.next_epoch(waited))
        refused = (self.kv.checks_turn and not is_turn) or (self.kv.checks_buffer and in_use)
        for move in super()._enter(state, index, thread, step):
            if refused and not self._poison_word(state, rank):
                move = self._fault(state, index, move.state.threads[index], step, TURN, TURN)
            yield move

    def _acquire(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        buffer, peers = step.cells
        used = self.kv.last_use(state.memory[self._cell["used", rank, buffer]], thread.epoch)
        owing = [peer for peer in peers
                 if not self.kv.credit(state.memory[self._cell["released", rank, used & 1, ch, peer]], used)]
        if not owing:
            yield self._move(state, index, thread._replace(pc=step.after), {})
        elif cause := self._poison_word(state, rank):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        elif self._gives_up(state, rank, 0 in owing):
            yield self._fault(state, index, thread, step, TIMEOUT, "expire")

    def _lacks_flag_of_0(self, state: State, index: int, thread: Thread) -> bool:
        rank, ch = self.threads[index]
        is_own = self.case.calls[rank][self.programs[index][thread.pc].call].kind not in DEQUANTISES
        channels = [ch] if is_own or not self.kv.lost_by_all else self.channels
        flags = [state.memory[self._flag(rank, other, 0)[thread.epoch & 1]] for other in channels if rank]
        return any(flag[0] != low32(thread.epoch) for flag in flags)

    def _release(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        over = previous_epoch(thread.epoch) if self.kv.releases_previous else thread.epoch
        line = over if self.kv.release_line_of_use else thread.epoch
        cell = self._cell["released", step.peer, line & 1, ch, rank]
        yield self._move(state, index, thread._replace(pc=step.after), {cell: over})

    def _dequantise(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        return self._reduce(state, index, thread, step)

    def _publish(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        for move in super()._publish(state, index, thread, step):  # nobody else reads the own copy
            yield move._replace(alone=step.peer == self.threads[index][0])

    def _use(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        if not self._is_over(state, rank, step.call - 1):
            return
        if self._cause(state, rank):  # after a fault no data is trusted
            yield self._move(state, index, Thread(step.after), {}, "not trusted")
            return
        torn = self._torn(state, index, thread, step)
        yield self._move(state, index, Thread(step.after), {}, wrong=torn and f"wrong data returned: {torn}")

    def _leave(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        call = self.case.calls[rank][step.call]
        for move in super()._leave(state, index, thread, step):
            if self._is_over(move.state, rank, step.call) and call.kind in STARTS:
                memory = list(move.state.memory)
                memory[self._cell["used", rank, call.buffer]] = thread.epoch
                if call.kind in WAITS:
                    memory[self._cell["waited", rank]] = thread.epoch
                move = move._replace(state=State(move.state.threads, tuple(memory)))
            yield move

    def _last_met(self, rank: int) -> int:
        calls = self.case.calls[rank]
        waited_for = {call.number for call in calls if call.kind in WAITS}
        return max(index for index, call in enumerate(calls) if call.kind in STARTS and call.number in waited_for)

    def _words(self, step: Step) -> str:
        if step.kind == "publish" and self.shared:
            return f" row {step.row}"
        return f" buffer {step.cells[0]}" if step.kind == "acquire" else super()._words(step)
