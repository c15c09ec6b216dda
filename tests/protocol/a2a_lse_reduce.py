"""The protocol of a2a_lse_reduce, to be explored: the steps of csrc/ops/a2a_lse_reduce.h in the same order.

    enter    read the epoch from memory, look at poison
    publish  one row of this channel into the peer's staging [parity][slot of me] } for each peer,
    signal   {epoch low 32, digest} into the peer's flag [parity][channel][me]    } (rank + i) % num_ranks
    wait     until the peer's flag here is {my epoch, my digest}; poison or an impossible flag end it too
    reduce   read the rows of this channel from staging; then the next round starts at publish
    confirm  look at poison after the last read of staging
    leave    the last channel stores the epoch

This is the bulk way. a2a_pull.py adds the steps `acquire` and `release`, a2a_packet.py adds `receive`.

Three more are fate's: a wait may `expire`, a rank may `crash`, and whoever reports a fault has to `poison`
one peer after the other, with time in between. A thread of the model is one channel of one rank. Data is a
name, (call, round): a merge is right when every slot that it reads bears the reader's own name.
"""
from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from a2a_rules import CRASH, MISMATCH, TIMEOUT, Call, Case, Rules, low32, previous_epoch
from explorer import Move


class Step(NamedTuple):
    kind: str
    call: int
    after: int = 0  # where the program goes on
    peer: int = -1
    row: int = -1
    name: tuple[int, int] = (-1, -1)  # of the data that is published or wanted
    cells: tuple[Any, ...] = ()  # what it touches, by parity
    ends_round: bool = False  # the next round of the same call follows


class Thread(NamedTuple):
    pc: int
    epoch: int = 0  # of the round it is in
    torn: str = ""  # what reduce found where its own data should have been


class State(NamedTuple):
    threads: tuple[Thread, ...]
    memory: tuple[Any, ...]


class A2aLseReduce:
    host_steps: tuple[str, ...] = ()  # of the caller, between calls

    def __init__(self, case: Case, rules: Rules = Rules()) -> None:
        self.case, self.rules = case, rules
        self.ranks, self.channels = range(len(case.calls)), range(case.num_channels)
        self.threads = [(rank, ch) for rank in self.ranks for ch in self.channels]
        self._cell: dict[tuple[Any, ...], int] = {}
        self._memory: list[Any] = []
        for rank in self.ranks:
            self._declare_region(rank)
        self._enters: dict[tuple[int, ...], int] = {}  # rank, channel, call -> enter
        self._exits: dict[tuple[int, ...], tuple[int, int]] = {}  # rank, channel, call -> first poison, leave
        self.programs = [self._program(rank, ch) for rank, ch in self.threads]
        # Moves that may be taken alone, see explore(). `leave` touches words that only its own rank reads, at
        # an enter which awaits it. Where a fault breaks the promise nobody poisons: to look for it commutes.
        self._alone = {"leave"} | ({"enter", "confirm"} if case.promise == "data" else set())
        if not rules.last_stores_epoch:
            self._alone = set()

    # ---- memory and programs

    def _peers(self, rank: int) -> list[int]:
        return [(rank + i) % len(self.ranks) for i in range(1, len(self.ranks))]

    def _declare(self, word: tuple[Any, ...], value: Any) -> None:
        self._cell[word] = len(self._memory)
        self._memory.append(value)

    def _declare_region(self, rank: int) -> None:
        start = (self.case.start_epochs or (3,) * len(self.ranks))[rank]
        for word, value in (("left", 0), ("poison", ""), ("fault", None)):
            self._declare((word, rank), value)
        for stream in sorted({call.stream for of_rank in self.case.calls for call in of_rank}):
            self._declare(("epoch", rank, stream), start)
            for parity, src, ch in product((0, 1), self._peers(rank), self.channels):
                mine = not self.rules.fill_by_parity or start & 1 == parity
                flag = (low32(start if mine else previous_epoch(start)), None)
                self._declare(("flag", rank, stream, parity, ch, src), flag)
        self._declare_data(rank)

    def _declare_data(self, rank: int) -> None:
        for parity in (0, 1):
            for src in self._peers(rank):
                for row in range(max(max(call.rounds) for of_rank in self.case.calls for call in of_rank)):
                    self._declare(("staging", rank, parity, src, row), None)

    def _stream(self, rank: int, call: int) -> str:
        """Of that call; of the one before, where the caller makes no more."""
        calls = self.case.calls[rank]
        return calls[min(call, len(calls) - 1)].stream

    def _epoch(self, rank: int, call: int) -> int:
        """The cell of the epoch that this call reads and stores."""
        return self._cell["epoch", rank, self._stream(rank, call)]

    def _flag(self, owner: int, ch: int, src: int, stream: str = "") -> tuple[int, int]:
        return self._cell["flag", owner, stream, 0, ch, src], self._cell["flag", owner, stream, 1, ch, src]

    def _staging(self, owner: int, src: int, row: int) -> tuple[int, int]:
        return (self._cell["staging", owner, 0, src, row],
                self._cell["staging", owner, int(self.rules.staging_by_parity), src, row])

    def _program(self, rank: int, ch: int) -> list[Step]:
        program: list[Step] = []
        for index, call in enumerate(self.case.calls[rank]):
            steps = [*self._host(rank, ch, index), Step("enter", index)]
            self._enters[rank, ch, index] = len(program) + len(steps) - 1
            if self._has_rounds(call):
                for number, num_rows in enumerate(call.rounds):
                    steps += self._round(rank, ch, index, call, number, num_rows)
                    if number + 1 < len(call.rounds):
                        steps[-1] = steps[-1]._replace(ends_round=True)
                steps += [Step("confirm", index)] * self._confirms(call)
            poison_at = len(program) + len(steps)
            steps += [Step("poison", index, peer=peer) for peer in self._peers(rank)] + [Step("leave", index)]
            leave_at = len(program) + len(steps) - 1
            self._exits[rank, ch, index] = poison_at, leave_at
            for step in steps:
                after = len(program) + 1
                program.append(step._replace(after=leave_at if after == poison_at else after))
        return program

    def _host(self, rank: int, ch: int, index: int) -> list[Step]:
        """What the caller does before this call."""
        return []

    def _has_rounds(self, call: Call) -> bool:
        return bool(sum(call.rounds)) or self.rules.round_when_empty

    def _confirms(self, call: Call) -> bool:
        return self._confirms_last()

    def _confirms_last(self) -> bool:
        return self.rules.confirm

    def _round(self, rank: int, ch: int, index: int, call: Call, number: int, num_rows: int) -> list[Step]:
        name, num_channels = (call.number, number), len(self.channels)
        rows = [row for row in range(num_rows) if self.rules.row_channel(row, num_rows, num_channels) == ch]
        senders = set(self.ranks) if call.senders is None else call.senders
        signallers = set(self.ranks) if self.rules.signal_empty else senders
        steps: list[Step] = []
        for peer in self._peers(rank):
            flag = self._flag(peer, ch, rank)
            signal = [Step("signal", index, peer=peer, cells=flag)] if rank in signallers else []
            slots = [(row, self._staging(peer, rank, row)) for row in rows if rank in senders]
            publish = [Step("publish", index, 0, peer, row, name, slot) for row, slot in slots]
            steps += publish + signal if self.rules.publish_first else signal + publish
        waited_for = [peer for peer in self._peers(rank) if peer in signallers]
        steps += [Step("wait", index, peer=peer, cells=self._flag(rank, ch, peer)) for peer in waited_for]
        # All reads are one step: where one of many goes wrong, it still does when the others happen then.
        wanted = [(row, src) for row in rows for src in self._peers(rank) if src in senders]
        reads = [tuple((row, src, self._staging(rank, src, row)[p]) for row, src in wanted) for p in (0, 1)]
        return steps + [Step("reduce", index, name=name, cells=tuple(reads))]

    # ---- steps

    def initial(self) -> State:
        return State(tuple(Thread(0) for _ in self.threads), tuple(self._memory))

    def moves(self, state: State) -> Iterator[Move]:
        for index, thread in enumerate(state.threads):
            if thread.pc < len(self.programs[index]):
                step = self.programs[index][thread.pc]
                yield from getattr(self, "_" + step.kind)(state, index, thread, step)
        if "crash" in self.case.fates and self._cause(state, 0) != CRASH and self._running(state, 0):
            yield self._crash(state)

    def _move(self, state: State, index: int, thread: Thread, writes: dict[int, Any], note: str = "",
              wrong: str = "") -> Move:
        memory = state.memory
        if writes:
            changed = list(memory)
            for cell, value in writes.items():
                changed[cell] = value
            memory = tuple(changed)
        threads = (*state.threads[:index], thread, *state.threads[index + 1:])
        kind = self.programs[index][state.threads[index].pc].kind
        return Move((index, note), State(threads, memory), wrong, kind in self._alone)

    def _fault(self, state: State, index: int, thread: Thread, step: Step, cause: str, note: str) -> Move:
        """The first cause of a rank stays. Its reporter goes on to poison the peers; who adopts it leaves."""
        rank, ch = self.threads[index]
        poison_at, leave_at = self._exits[rank, ch, step.call]
        adopts, is_first = bool(self._poison_word(state, rank)), not self._cause(state, rank)
        writes = {self._cell["fault", rank]: (cause, self._last_call(step))} if is_first else {}
        if not adopts and self.rules.poison_self:
            writes[self._cell["poison", rank]] = cause
        tells = not adopts or (self.rules.forward_poison and is_first)
        wrong = f"a healthy call faults ({cause})" if self.case.promise == "data" else ""
        thread = Thread(poison_at if tells else leave_at, thread.epoch)
        return self._move(state, index, thread, writes, note, wrong)

    def _last_call(self, step: Step) -> int:
        return step.call - (step.kind in self.host_steps)

    def _poison_word(self, state: State, rank: int) -> str:
        return state.memory[self._cell["poison", rank]]

    def _cause(self, state: State, rank: int) -> str:
        fault = state.memory[self._cell["fault", rank]]
        return fault[0] if fault else ""

    def _enter(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        if not self._may_start(state, rank, ch, step.call):
            return
        thread = Thread(step.after, self.rules.next_epoch(state.memory[self._epoch(rank, step.call)]))
        if cause := self._poison_word(state, rank):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        else:
            yield self._move(state, index, thread, {})

    def _may_start(self, state: State, rank: int, ch: int, call: int) -> bool:
        """The caller orders its calls: all channels have left the one before, and channel 0, of which the caller
        is part, comes to this one. Channels that share a thread run one after the other, each straight through."""
        if not self._is_over(state, rank, call - 1) or self._pc(state, rank, 0) < self._enters[rank, 0, call]:
            return False
        order = self.case.channel_orders[rank] if self.case.channel_orders else ()
        before = order[:order.index(ch)] if order else ()
        return all(self._pc(state, rank, other) > self._exits[rank, other, call][1] for other in before)

    def _is_over(self, state: State, rank: int, call: int) -> bool:
        return state.memory[self._cell["left", rank]] >= (call + 1) * len(self.channels)

    def _pc(self, state: State, rank: int, ch: int) -> int:
        return state.threads[rank * len(self.channels) + ch].pc

    def _publish(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        slot = step.cells[thread.epoch & 1]
        yield self._move(state, index, thread._replace(pc=step.after), {slot: step.name})

    def _signal(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        flag = (low32(thread.epoch), self.case.calls[self.threads[index][0]][step.call].digest)
        yield self._move(state, index, thread._replace(pc=step.after), {step.cells[thread.epoch & 1]: flag})

    def _wait(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        epoch, digest = state.memory[step.cells[thread.epoch & 1]]
        wanted = (low32(thread.epoch), self.case.calls[rank][step.call].digest)
        if (epoch, digest) == wanted or (not self.rules.exact_match and epoch >= wanted[0]):
            yield self._move(state, index, self._onward(thread, step), {})
        elif cause := self._poison_word(state, rank):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        elif self.rules.exact_match and epoch != low32(self.rules.old_epoch(thread.epoch)):
            yield self._fault(state, index, thread, step, MISMATCH, "mismatch")
        elif self._gives_up(state, rank, self._lacks_flag_of_0(state, index, thread)):
            yield self._fault(state, index, thread, step, TIMEOUT, "expire")

    def _onward(self, thread: Thread, step: Step, torn: str = "") -> Thread:
        epoch = self.rules.next_epoch(thread.epoch) if step.ends_round else thread.epoch
        return Thread(step.after, epoch, thread.torn or torn)

    def _gives_up(self, state: State, rank: int, lacks_0: bool) -> bool:
        if rank == 0 or "lost" not in self.case.fates:
            return "expire" in self.case.fates or (rank == 0 and "interrupt" in self.case.fates)
        return self._cause(state, 0) == CRASH and lacks_0

    def _lacks_flag_of_0(self, state: State, index: int, thread: Thread) -> bool:
        rank, ch = self.threads[index]
        if rank == 0:
            return False
        flag = self._flag(rank, ch, 0, self._stream(rank, self.programs[index][thread.pc].call))
        return state.memory[flag[thread.epoch & 1]][0] != low32(thread.epoch)

    def _reads(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[tuple[int, int, Any]]:
        for row, src, cell in step.cells[thread.epoch & 1]:
            yield row, src, state.memory[cell]

    def _torn(self, state: State, index: int, thread: Thread, step: Step) -> str:
        for row, src, found in self._reads(state, index, thread, step):
            if found != step.name:
                held = "nothing" if found is None else found
                held = held if isinstance(held, str) else "call {} round {}".format(*held)
                return f"row {row} of rank {src} held {held}, not call {step.name[0]} round {step.name[1]}"
        return ""

    def _reduce(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        torn = self._torn(state, index, thread, step)
        wrong = f"wrong data returned: {torn}" if torn and not self._confirms_last() else ""
        yield self._move(state, index, self._onward(thread, step, torn), {}, wrong=wrong)

    def _confirm(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        if cause := self._poison_word(state, self.threads[index][0]):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        else:
            wrong = f"wrong data returned: {thread.torn}" if thread.torn else ""
            yield self._move(state, index, thread._replace(pc=step.after), {}, wrong=wrong)

    def _poison(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        writes = {}
        if not self._poison_word(state, step.peer):
            writes[self._cell["poison", step.peer]] = self._cause(state, self.threads[index][0])
        yield self._move(state, index, thread._replace(pc=step.after), writes)

    def _leave(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        count = state.memory[self._cell["left", rank]] + 1
        writes = {self._cell["left", rank]: count}
        num_channels = len(self.channels)
        if count % num_channels == (0 if self.rules.last_stores_epoch else 1 % num_channels):
            # In a faulted call the channels may be in different rounds: it does not matter, poison stays.
            writes[self._epoch(rank, step.call)] = thread.epoch
        yield self._move(state, index, Thread(step.after), writes)

    def _crash(self, state: State) -> Move:
        threads, entered = list(state.threads), len(self.case.calls[0]) - 1
        for index, program in enumerate(self.programs):
            if self.threads[index][0] == 0:
                if threads[index].pc < len(program):
                    step = program[threads[index].pc]
                    entered = min(entered, self._last_call(step) - (step.kind == "enter"))
                threads[index] = Thread(len(program))
        memory = list(state.memory)
        memory[self._cell["fault", 0]] = (CRASH, entered)
        return Move((0, CRASH), State(tuple(threads), tuple(memory)))

    # ---- promises and words

    def _running(self, state: State, rank: int) -> list[int]:
        return [index for index, thread in enumerate(state.threads)
                if self.threads[index][0] == rank and thread.pc < len(self.programs[index])]

    def unfinished(self, state: State) -> str:
        stuck = [index for rank in self.ranks for index in self._running(state, rank)]
        return "; ".join(self.describe(state, (index, "")) for index in stuck)

    def judge(self, state: State) -> str:
        faults = [state.memory[self._cell["fault", rank]] for rank in self.ranks]
        if self.case.promise not in ("data", "either"):
            causes = {self._cause(state, rank) for rank in self.ranks}
            return "" if causes == {self.case.promise} else f"not all a {self.case.promise}: {faults}"
        early = any(fault and fault[1] < self._last_met(rank) for rank, fault in enumerate(faults))
        return f"a fault did not reach all ranks: {faults}" if early and not all(faults) else ""

    def _last_met(self, rank: int) -> int:
        """Its last call that all peers wait for. It never signals that one if it gave up in a call before: nobody can
        have got data from it."""
        return len(self.case.calls[rank]) - 1

    def describe(self, state: State, action: tuple[int, str]) -> str:
        index, note = action
        rank, ch = self.threads[index]
        if note == CRASH:
            return f"rank {rank}: crash"
        thread = state.threads[index]
        step = self.programs[index][thread.pc]
        epoch = thread.epoch or self.rules.next_epoch(state.memory[self._epoch(rank, step.call)])
        words = f"{step.kind}{self._words(step)} (epoch {epoch})"
        return f"rank {rank} ch {ch}: {words}" + (f", {note}" if note else "")

    def _words(self, step: Step) -> str:
        if step.kind == "publish":
            return f" row {step.row} to rank {step.peer}"
        if step.kind == "reduce":
            return f" rows {', '.join(dict.fromkeys(str(row) for row, _, _ in step.cells[0])) or 'none'}"
        return f" for rank {step.peer}" if step.kind == "wait" else f" rank {step.peer}" if step.peer >= 0 else ""
