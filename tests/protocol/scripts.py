"""Ranks as scripts over named words: for protocols that need no more than stores, waits and checks."""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from explorer import Move

Words = Mapping[Hashable, int]


@dataclass(frozen=True)
class Line:
    """One step: waits, then checks, then stores, all at one moment.

    A check stands for a read of data and the look at `unless` after it. One moment is enough for both: that
    word goes from 0 to 1 only, so a read that a later look would let pass is let pass by a look at once.
    """

    text: str
    wait: Words = field(default_factory=dict)  # word -> at least this
    check: Words = field(default_factory=dict)  # word -> exactly this, or wrong data is returned
    store: Words = field(default_factory=dict)  # word -> becomes this
    unless: Hashable = None  # word: where it is not 0, what was read is discarded
    divert: tuple[Hashable, str] = (None, "")  # word, label: where it is not 0 and the wait not over
    expire: str = ""  # label: as long as the wait is not over, the script may go on there
    label: str = ""
    goto: str = ""  # label of the line that follows; "" = the next one, "end" = none


class State(NamedTuple):
    places: tuple[int, ...]  # [rank] next line of its script
    values: tuple[int, ...]  # [word]


class Scripts:
    def __init__(self, scripts: list[list[Line]]) -> None:
        self._scripts = scripts
        self._words: dict[Hashable, int] = {}
        for line in (line for script in scripts for line in script):
            for word in (*line.wait, *line.check, *line.store, line.unless, line.divert[0]):
                self._words.setdefault(word, len(self._words))
        self._labels = [{line.label: place for place, line in enumerate(script)} | {"end": len(script)}
                        for script in scripts]

    def initial(self) -> State:
        return State((0,) * len(self._scripts), (0,) * len(self._words))

    def _line(self, state: State, rank: int) -> Line | None:
        script, place = self._scripts[rank], state.places[rank]
        return script[place] if place < len(script) else None

    def _value(self, state: State, word: Hashable) -> int:
        return state.values[self._words[word]]

    def moves(self, state: State) -> Iterator[Move]:
        for rank in range(len(self._scripts)):
            if line := self._line(state, rank):
                yield from self._line_moves(state, rank, line)

    def _line_moves(self, state: State, rank: int, line: Line) -> Iterator[Move]:
        word, label = line.divert
        over = all(self._value(state, word) >= least for word, least in line.wait.items())
        if self._value(state, word) and not (over and line.wait):
            yield self._move(state, rank, self._labels[rank][label], {}, f"goes to {label}")
        elif over:
            wrong = ""
            for read, wanted in line.check.items():
                if self._value(state, read) != wanted and not self._value(state, line.unless):
                    wrong = f"wrong data returned: {read} is {self._value(state, read)}, not {wanted}"
            place = self._labels[rank][line.goto] if line.goto else state.places[rank] + 1
            yield self._move(state, rank, place, line.store, "", wrong)
        elif line.expire:
            yield self._move(state, rank, self._labels[rank][line.expire], {}, "expire")

    def _move(self, state: State, rank: int, place: int, store: Words, note: str, wrong: str = "") -> Move:
        values = list(state.values)
        for word, value in store.items():
            values[self._words[word]] = value
        places = (*state.places[:rank], place, *state.places[rank + 1:])
        return Move((rank, note), State(places, tuple(values)), wrong)

    def unfinished(self, state: State) -> str:
        lines = [(rank, self._line(state, rank)) for rank in range(len(self._scripts))]
        return "; ".join(f"rank {rank}: {line.text}" for rank, line in lines if line)

    def judge(self, state: State) -> str:
        return ""  # wrong data is found at the line that returns it

    def describe(self, state: State, action: tuple[int, str]) -> str:
        rank, note = action
        line = self._line(state, rank)
        return f"rank {rank}: {line.text if line else 'done'}" + (f", {note}" if note else "")
