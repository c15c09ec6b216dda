"""Breadth-first search over every interleaving of a protocol model.

The memory of a model is sequentially consistent: one move happens at a time, and all ranks see it at once.
How hardware is held to that (release and acquire on flags) is the business of csrc/arch and ThreadSanitizer;
here the question is whether the *order of steps* is right. The search finds every state that any schedule can
reach, or a shortest run to a wrong one.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Move(NamedTuple):
    """One enabled step: what moved (an opaque name that the model can describe) and the state after it."""

    action: Any
    state: Hashable
    wrong: str = ""  # why this very step breaks a promise; the search stops here
    alone: bool = False  # see explore()


Link = tuple[Hashable, Any]  # the state before, and the action that led on


class Model(Protocol):
    def initial(self) -> Hashable: ...

    def moves(self, state: Any) -> Iterable[Move]:
        """Every step that some rank, or its fate, can take now."""

    def unfinished(self, state: Any) -> str:
        """Asked where nothing can move: who is stuck, or "" when all programs have ended."""

    def judge(self, state: Any) -> str:
        """Asked where all programs have ended: which promise the whole run broke, or ""."""

    def describe(self, state: Any, action: Any) -> str:
        """The action, taken in this state, in words."""


@dataclass(frozen=True)
class Result:
    states: int  # distinct states that were reached
    ends: int  # of these, states in which all programs had ended
    wrong: str  # "" when the model keeps its promises
    trace: tuple[str, ...]  # shortest run to the wrong step, that step last

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def last(self) -> str:
        return self.trace[-1]

    def __str__(self) -> str:
        if self.ok:
            return f"ok: {self.states} states, {self.ends} ends"
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(self.trace, 1))
        return f"wrong after {len(self.trace)} steps ({self.states} states seen): {self.wrong}\n{steps}"


class TooManyStates(RuntimeError):
    """The search was cut off, so it shows nothing."""


def explore(model: Model, max_states: int = 400_000, use_alone: bool = True) -> Result:
    """Search until something is wrong or nothing is left.

    A move marked `alone` is the only one taken from its state. A model may mark a move when it commutes with
    all that others can do before it, and no promise looks at the order: to postpone the others then loses no
    end and no wrong step. Programs only go forward, so nothing is postponed for ever. ("Shortest" then means:
    of the runs that are kept.)
    """
    start = model.initial()
    came_from: dict[Hashable, Link | None] = {start: None}
    queue = deque([start])
    ends = 0
    while queue:
        state = queue.popleft()
        moves = list(model.moves(state))
        if not moves:
            ends += 1
            stuck = model.unfinished(state)
            wrong = f"deadlock: {stuck}" if stuck else model.judge(state)
            if wrong:
                return Result(len(came_from), ends, wrong, _trace(model, came_from, state))
        for move in moves:
            if move.alone and use_alone:
                moves = [move]
                break
        for move in moves:
            if move.wrong:
                trace = (*_trace(model, came_from, state), model.describe(state, move.action))
                return Result(len(came_from), ends, move.wrong, trace)
            if move.state not in came_from:
                came_from[move.state] = (state, move.action)
                queue.append(move.state)
        if len(came_from) > max_states:
            raise TooManyStates(f"explore: the model must have at most {max_states} states")
    return Result(len(came_from), ends, "", ())


def _trace(model: Model, came_from: Mapping[Hashable, Link | None], state: Hashable) -> tuple[str, ...]:
    steps: list[str] = []
    link = came_from[state]
    while link is not None:
        steps.append(model.describe(*link))
        link = came_from[link[0]]
    return tuple(reversed(steps))
