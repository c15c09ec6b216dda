"""The protocol of query_gather, and of the calls that end the life of its view, to be explored.

What a2a_lse_reduce.py says of steps, threads and names of data holds. A lane has two epoch streams: one of
query_gather and release_query, one of a2a_lse_reduce, of which only the rounds matter here. It has one final
buffer: a copy on every rank, or one that all ranks share, as by the CPU's multicast.

    query_gather   enter, publish, signal, wait, confirm, leave
      of out=      enter, for each round { publish, signal, wait, copy; signal, wait }, confirm, leave
    release_query  enter, signal, wait, confirm, leave
    a2a_lse_reduce enter, for each round { signal, wait }, confirm, leave

    enter    also a look at the open word of the lane: a gather must find 0, a reduce 0 or T + 1
    publish  one row (token, head) of this channel into every rank's final buffer
    copy     the rows of this channel from the own final buffer to out
    leave    the last channel of a gather sets the open word to T + 1; of a release or reduce, to 0. Neither
             after a fault

`attend` is the caller's: it reads the whole view, between query_gather and the next call.

A caller is a string of calls, each a letter and T, and ' where it is on the second lane:
    g  query_gather, a view    r  a2a_lse_reduce
    o  query_gather, out=      x  release_query
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from a2a_lse_reduce import A2aLseReduce, State, Step, Thread
from a2a_rules import MISMATCH, Call, Case, Rules
from explorer import Move

OPEN = "query open"
SHARED = -1  # in place of the rank that owns a copy


@dataclass(frozen=True)
class QueryRules(Rules):
    open_word: bool = True  # False: no gather looks at it
    open_word_of_out: bool = True  # False: a gather with out= does not look at it
    reduce_checks_rows: bool = True  # False: a reduce may have another T than the gather
    digest_says_view: bool = True  # False: a view and out= of the same T have the same digest
    closes_last: bool = True  # False: a2a_lse_reduce clears the open word when it enters
    release_round: bool = True  # False: release_query clears the open word and does nothing else
    empty_epoch: bool = True  # False: out= ends a round after the copy


@dataclass(frozen=True)
class QueryCall(Call):
    kind: str = ""
    num_tokens: int = 0
    lane: int = 0


def query_calls(caller: str, capacity: int = 8, reduce_capacity: int = 8, digest_says_view: bool = True,
                ) -> tuple[QueryCall, ...]:
    made = []
    for number, word in enumerate(caller.split()):
        kind, lane = word[0], word.count("'")
        num_tokens = int(word[1:].rstrip("'") or 0)
        limit = reduce_capacity if kind == "r" else capacity
        rounds = tuple(min(limit, num_tokens - first) for first in range(0, max(num_tokens, 1), limit))
        assert kind != "g" or len(rounds) == 1, "a view holds one round"
        digest = ("g" if kind == "o" and not digest_says_view else kind, num_tokens)
        stream = f"{'reduce' if kind == 'r' else 'query'} {lane}"
        made.append(QueryCall(number, rounds, digest, None, stream, kind, num_tokens, lane))
    return tuple(made)


class QueryGather(A2aLseReduce):
    host_steps = ("attend",)

    def __init__(self, case: Case, rules: Rules = QueryRules(), shared: bool = False) -> None:
        assert isinstance(rules, QueryRules)
        self.query, self.shared = rules, shared
        super().__init__(case, rules)

    # ---- memory and programs

    def _declare_data(self, rank: int) -> None:
        all_calls = [call for of_rank in self.case.calls for call in of_rank]
        num_rows = max((max(call.rounds) for call in all_calls if call.kind in "go"), default=0)
        for lane in sorted({call.lane for call in all_calls}):
            self._declare(("open", rank, lane), 0)
            for row in range(num_rows):
                for owner in [SHARED] if self.shared else self.ranks:
                    self._declare(("query", owner, lane, rank, row), None)

    def _query(self, owner: int, call: Call, src: int, row: int) -> int:
        return self._cell["query", SHARED if self.shared else owner, call.lane, src, row]

    def _host(self, rank: int, ch: int, index: int) -> list[Step]:
        call = self.case.calls[rank][index - 1] if index else None
        if ch or not call or call.kind != "g":
            return []
        reads = self._rows_of_all(rank, call, range(call.num_tokens))
        return [Step("attend", index, name=(call.number, 0), cells=(reads, reads))]

    def _rows_of_all(self, rank: int, call: Call, rows: Any) -> tuple[Any, ...]:
        return tuple((row, src, self._query(rank, call, src, row)) for row in rows for src in self.ranks)

    def _program(self, rank: int, ch: int) -> list[Step]:
        program = super()._program(rank, ch)
        last = self._host(rank, ch, len(self.case.calls[rank]))
        return program + [step._replace(after=len(program) + 1) for step in last]

    def _has_rounds(self, call: Call) -> bool:
        if call.kind == "r":
            return super()._has_rounds(call)
        return call.kind != "x" or self.query.release_round

    def _round(self, rank: int, ch: int, index: int, call: Call, number: int, num_rows: int) -> list[Step]:
        peers = self._peers(rank)
        meet = [Step("signal", index, peer=peer, cells=self._flag(peer, ch, rank, call.stream)) for peer in peers]
        meet += [Step("wait", index, peer=peer, cells=self._flag(rank, ch, peer, call.stream)) for peer in peers]
        if call.kind in "rx":
            return meet
        name, num_channels = (call.number, number), len(self.channels)
        rows = [row for row in range(num_rows) if self.rules.row_channel(row, num_rows, num_channels) == ch]
        publish = []
        for owner in [SHARED] if self.shared else [*peers, rank]:
            cells = [(row, self._query(owner, call, rank, row)) for row in rows]
            publish += [Step("publish", index, 0, owner, row, name, (cell, cell)) for row, cell in cells]
        if call.kind == "g":
            return publish + meet
        reads = self._rows_of_all(rank, call, rows)
        copy = Step("copy", index, name=name, cells=(reads, reads), ends_round=self.query.empty_epoch)
        return [*publish, *meet, copy, *(meet if self.query.empty_epoch else [])]

    # ---- steps

    def _enter(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        call = self.case.calls[rank][step.call]
        cell = self._cell["open", rank, call.lane]
        for move in super()._enter(state, index, thread, step):
            cause = "" if self._poison_word(state, rank) else self._refusal(call, state.memory[cell])
            if cause:
                thread = Thread(step.after, self.rules.next_epoch(state.memory[self._epoch(rank, step.call)]))
                move = self._fault(state, index, thread, step, cause, cause)
            elif call.kind == "r" and not self.query.closes_last:
                move = self._move(state, index, move.state.threads[index], {cell: 0})
            yield move

    def _refusal(self, call: Call, word: int) -> str:
        looks = self.query.open_word and (call.kind == "g" or self.query.open_word_of_out)
        if call.kind in "go":
            return OPEN if word and looks else ""
        is_other = call.kind == "r" and word not in (0, call.num_tokens + 1)
        return MISMATCH if is_other and self.query.reduce_checks_rows else ""

    def _publish(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        for move in super()._publish(state, index, thread, step):  # nobody else reads the own copy
            yield move._replace(alone=step.peer == self.threads[index][0])

    def _attend(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        if not self._is_over(state, rank, step.call - 1):
            return
        if self._cause(state, rank):  # a faulted gather returns no view
            yield self._move(state, index, Thread(step.after), {}, "no view")
            return
        torn = self._torn(state, index, thread, step)
        yield self._move(state, index, Thread(step.after), {}, wrong=torn and f"wrong data returned: {torn}")

    def _copy(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        return self._reduce(state, index, thread, step)

    def _leave(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        call = self.case.calls[rank][step.call]
        if call.kind == "x" and not self.query.release_round:
            thread = thread._replace(epoch=state.memory[self._epoch(rank, step.call)])
        for move in super()._leave(state, index, thread, step):
            if self._is_over(move.state, rank, step.call) and not self._cause(state, rank) and call.kind != "o":
                memory = list(move.state.memory)
                memory[self._cell["open", rank, call.lane]] = call.num_tokens + 1 if call.kind == "g" else 0
                move = move._replace(state=State(move.state.threads, tuple(memory)))
            yield move

    def _words(self, step: Step) -> str:
        if step.kind == "publish" and self.shared:
            return f" row {step.row}"
        return super()._words(step)
