"""The pull way of a2a_lse_reduce: payload stays with its source, in one of two buffers, and peers read it there.

What a2a_lse_reduce.py says holds, with these differences:

    acquire  only of a rank that passes an ordinary tensor: await the credit of a buffer, copy the rows there
    publish  LSE rows only
    signal   the descriptor of the payload (which buffer, where in it) comes with the flag
    reduce   read LSE rows from staging and payload rows from the peers' buffers
    release  released := epoch, in the line of this round's flag, at each owner of a buffer that was read

`partial_out` is the caller's: it hands the two buffers out in turn, and awaits the credit of the one that it
hands out. The caller writes what it got at once. After a fault it writes into both buffers, whatever they are:
to it, a call or partial_out that raised is over. That is the worst for a late reader.

A caller is a string, one letter a step:
    o  partial_out            z  call with the buffer that was handed out last
    c  call, ordinary tensor  v  the same, with a view of it that starts one row on
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from a2a_lse_reduce import A2aLseReduce, State, Step, Thread
from a2a_rules import TIMEOUT, Call, Case, Rules, low32
from explorer import Move

JUNK = "what no call passes"


def at_least(released: int, used: int) -> bool:
    return released >= used


def no_credit(released: int, used: int) -> bool:
    return True


def equal_credit(released: int, used: int) -> bool:
    return released == used or not used


def low_half_credit(released: int, used: int) -> bool:
    return low32(released) >= low32(used)


def parity_credit(released: int, used: int) -> bool:
    return not used or (released != 0 and released & 1 == used & 1)


@dataclass(frozen=True)
class PullRules(Rules):
    credit: Callable[[int, int], bool] = at_least  # (released by a peer, used by me) -> may be written again
    credit_line_of_use: bool = True  # False: looks into the flag line of the current round's parity
    host_awaits: bool = True  # partial_out
    host_forwards: bool = True  # partial_out that finds poison passes it on before it raises
    kernel_awaits: bool = True  # acquire
    # Whose credit acquire awaits. "first": in the first round of a call all channels', then its own channel's.
    # "own", "all": these, always.
    acquire_from: str = "first"
    copies_spare_handed_out: bool = True  # False: copies take the buffers in turn, whatever the caller holds
    release_last: bool = True  # False: before the reads
    release_empty: bool = True  # False: no release of a round in which this channel has nothing to read
    descriptor_first: bool = True  # False: written after the flag
    reads_by_descriptor: bool = True  # False: the buffer that the parity names
    confirm_last: bool = True  # False: after wait, before the reads
    lost_by_credit: bool = True  # False: a lost peer is missed only where its flag of the round of use is missing


class Source(NamedTuple):
    """Where the payload of one call lies."""

    is_copy: bool
    buffer: int
    first_row: int = 0


class Plan(NamedTuple):
    handed_out: list[list[tuple[int, Any]]]  # before each call, and at the end: buffer, name of what goes in
    sources: list[Source]  # [call]


def plan(caller: str, calls: tuple[Call, ...], spares: bool) -> Plan:
    """Which buffers a caller gets; its own rank alone decides. A buffer that was handed out is the caller's until a
    call takes it or another one is handed out; a copy goes into the other one."""
    following, held = 0, -1
    handed_out: list[list[tuple[int, Any]]] = [[]]
    sources: list[Source] = []
    for letter in caller:
        if letter == "o":
            handed_out[-1].append((following, JUNK))
            held, following = following, 1 - following
            place = len(handed_out) - 1, len(handed_out[-1]) - 1
            continue
        call = calls[len(sources)]
        if letter == "c":
            buffer = 1 - held if held >= 0 and spares else following
            sources.append(Source(True, buffer))
            following = 1 - held if held >= 0 and spares else 1 - buffer
        else:
            assert held >= 0 and len(call.rounds) == 1, "what was handed out is passed once, and holds a round"
            handed_out[place[0]][place[1]] = (held, (call.number, 0))
            sources.append(Source(False, held, int(letter == "v")))
            held = -1
        handed_out.append([])
    assert len(sources) == len(calls), "a call for each letter but o"
    return Plan(handed_out, sources)


class A2aPull(A2aLseReduce):
    host_steps = ("partial_out",)

    def __init__(self, case: Case, rules: Rules = PullRules(), callers: tuple[str, ...] = ()) -> None:
        assert isinstance(rules, PullRules)
        self.pull = rules
        callers = callers or tuple("c" * len(calls) for calls in case.calls)
        self.plans = [plan(caller, calls, rules.copies_spare_handed_out)
                      for caller, calls in zip(callers, case.calls, strict=True)]
        super().__init__(case, rules)
        self._buffers: dict[tuple[int, ...], list[int]] = {}
        for word, cell in self._cell.items():
            if word[0] == "buffer":
                self._buffers.setdefault(word[1:3], []).append(cell)
        if case.promise == "data" and rules.release_last:
            self._alone |= {"release"}  # it commutes where no wait gives up: others only come to be enabled

    # ---- memory and programs

    def _declare_region(self, rank: int) -> None:
        super()._declare_region(rank)
        num_rows = 1 + max(max(call.rounds) for of_rank in self.case.calls for call in of_rank)
        for buffer in (0, 1):
            for row in range(num_rows):
                self._declare(("buffer", rank, buffer, row), None)
            for ch in self.channels:
                self._declare(("used", rank, buffer, ch), 0)
        for parity in (0, 1):
            for ch in self.channels:
                for src in self._peers(rank):
                    self._declare(("released", rank, parity, ch, src), 0)
                    self._declare(("descriptor", rank, parity, ch, src), None)

    def _host(self, rank: int, ch: int, index: int) -> list[Step]:
        handed_out = self.plans[rank].handed_out[index] if ch == 0 else []
        return [Step("partial_out", index, name=name, cells=(buffer,)) for buffer, name in handed_out]

    def _program(self, rank: int, ch: int) -> list[Step]:
        program = super()._program(rank, ch)
        end = len(self.case.calls[rank])  # no call follows
        if host := self._host(rank, ch, end):
            tells = [Step("poison", end, peer=peer) for peer in self._peers(rank)]
            poison_at = len(program) + len(host)
            return_at = poison_at + len(tells)
            self._exits[rank, ch, end] = poison_at, return_at
            for step in [*host, *tells, Step("returns", end)]:
                after = len(program) + 1
                program.append(step._replace(after=return_at if after == poison_at else after))
        return program

    def _confirms_last(self) -> bool:
        return self.rules.confirm and self.pull.confirm_last

    def _round(self, rank: int, ch: int, index: int, call: Call, number: int, num_rows: int) -> list[Step]:
        steps = super()._round(rank, ch, index, call, number, num_rows)
        source, reduce = self.plans[rank].sources[index], steps[-1]
        descriptor = (source.buffer, source.first_row)
        steps = [step._replace(name=descriptor) if step.kind == "signal" else step for step in steps[:-1]]
        if not self.pull.descriptor_first:
            signals = [step for step in steps if step.kind == "signal"]
            described = [step._replace(kind="describe") for step in signals]
            at = 1 + max((place for place, step in enumerate(steps) if step.kind == "signal"), default=-1)
            steps[at:at] = described
        if source.is_copy:
            rows = [row for row in range(num_rows) if self.rules.row_channel(row, num_rows, len(self.channels)) == ch]
            cells = (source.buffer, tuple(rows), number == 0)
            steps.insert(0, Step("acquire", index, name=(call.number, number), cells=cells))
        releases = [Step("release", index, peer=peer) for peer in self._peers(rank)]
        if not self.pull.release_empty and not reduce.cells[0]:
            releases = []
        if not self.pull.confirm_last and number + 1 == len(call.rounds):
            steps.append(Step("confirm", index))
        return [*steps, reduce, *releases] if self.pull.release_last else [*steps, *releases, reduce]

    # ---- steps

    def _owing(self, state: State, rank: int, buffer: int, channels: list[tuple[int, int]],
               epoch: int = 0) -> set[int]:
        """Peers that have not released what they were shown. channels: (theirs, mine that knows the epoch)."""
        owing = set()
        for ch, mine in channels:
            used = state.memory[self._cell["used", rank, buffer, mine]]
            parity = (used if self.pull.credit_line_of_use else epoch) & 1
            for peer in self._peers(rank):
                if not self.pull.credit(state.memory[self._cell["released", rank, parity, ch, peer]], used):
                    owing.add(peer)
        return owing

    def _partial_out(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, (buffer,) = self.threads[index][0], step.cells
        if not self._is_over(state, rank, step.call - 1):
            return
        epoch = self.rules.next_epoch(state.memory[self._epoch(rank, step.call)])
        owing = self._owing(state, rank, buffer, [(ch, ch) for ch in self.channels], epoch)
        if cause := self._poison_word(state, rank):
            move = self._fault(state, index, thread, step, cause, "adopts poison")
            yield move if self.pull.host_forwards else self._silent(state, index, step, move)
        elif not owing or not self.pull.host_awaits:
            writes = {cell: step.name for cell in self._buffers[rank, buffer]}
            yield self._move(state, index, thread._replace(pc=step.after), writes)
        elif self._gives_up(state, rank, 0 in owing and self._misses_0(state, rank, buffer)):
            yield self._fault(state, index, thread, step, TIMEOUT, "expire")

    def _misses_0(self, state: State, rank: int, buffer: int) -> bool:
        used = state.memory[self._cell["used", rank, buffer, 0]]
        flag = state.memory[self._flag(rank, 0, 0)[used & 1]] if rank else (0, None)
        return self.pull.lost_by_credit or flag[0] != low32(used)

    def _silent(self, state: State, index: int, step: Step, move: Move) -> Move:
        _, leave_at = self._exits[(*self.threads[index], step.call)]
        threads = list(move.state.threads)
        threads[index] = threads[index]._replace(pc=leave_at)
        return move._replace(state=State(tuple(threads), move.state.memory))

    def _acquire(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        buffer, rows, is_first = step.cells
        from_all = self.pull.acquire_from == "all" or (self.pull.acquire_from == "first" and is_first)
        channels = [(other, ch) for other in self.channels] if from_all else [(ch, ch)]
        owing = self._owing(state, rank, buffer, channels, thread.epoch)
        if not owing or not self.pull.kernel_awaits:
            writes = {self._cell["buffer", rank, buffer, row]: step.name for row in rows}
            yield self._move(state, index, thread._replace(pc=step.after), writes)
        elif cause := self._poison_word(state, rank):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        elif self._gives_up(state, rank, 0 in owing and self._misses_0(state, rank, buffer)):
            yield self._fault(state, index, thread, step, TIMEOUT, "expire")

    def _signal(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        for move in super()._signal(state, index, thread, step):
            memory = list(move.state.memory)
            memory[self._cell["used", rank, step.name[0], ch]] = thread.epoch
            if self.pull.descriptor_first:  # its words come before the flag's, and nobody looks at them earlier
                memory[self._cell["descriptor", step.peer, thread.epoch & 1, ch, rank]] = step.name
            yield move._replace(state=State(move.state.threads, tuple(memory)))

    def _describe(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        cell = self._cell["descriptor", step.peer, thread.epoch & 1, ch, rank]
        yield self._move(state, index, thread._replace(pc=step.after), {cell: step.name})

    def _reads(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[tuple[int, int, Any]]:
        yield from super()._reads(state, index, thread, step)
        rank, ch = self.threads[index]
        parity = thread.epoch & 1
        for row, src, _ in step.cells[parity]:
            described = state.memory[self._cell["descriptor", rank, parity, ch, src]]
            if not self.pull.reads_by_descriptor:
                described = (parity, 0)
            if described is None:
                yield row, src, None
                continue
            buffer, first_row = described
            yield row, src, state.memory[self._cell["buffer", src, buffer, first_row + row]]

    def _release(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        cell = self._cell["released", step.peer, thread.epoch & 1, ch, rank]
        yield self._move(state, index, self._onward(thread, step), {cell: thread.epoch})

    def _leave(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        for move in super()._leave(state, index, thread, step):
            yield self._given_up(move, self.threads[index][0], step.call + 1)

    def _returns(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        move = self._move(state, index, Thread(step.after), {})
        yield self._given_up(move, self.threads[index][0], step.call)

    def _given_up(self, move: Move, rank: int, num_calls: int) -> Move:
        """After a fault the caller is free to write. It does so at once, which is the worst for late readers."""
        if not self._is_over(move.state, rank, num_calls - 1) or not self._cause(move.state, rank):
            return move
        memory = list(move.state.memory)
        for cell in (*self._buffers[rank, 0], *self._buffers[rank, 1]):
            memory[cell] = JUNK
        return move._replace(state=State(move.state.threads, tuple(memory)), alone=False)

    def _words(self, step: Step) -> str:
        return f" buffer {step.cells[0]}" if step.kind in ("acquire", "partial_out") else super()._words(step)
