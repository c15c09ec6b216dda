"""AMD: the control flow of a function in assembly text, and what holds in front of each instruction on every path to
it, or may hold on some path."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.isa.compiled import Instruction

ASM = "asm: "  # in front of an instruction that was written as inline assembly
ENDS = re.compile(r"s_(endpgm|trap)\b")
BRANCHES = re.compile(r"(s_branch|s_cbranch_\w+)\s+(\S+)$")
LEAVES = re.compile(r"s_(setpc|swappc|call|cbranch_i_fork|cbranch_g_fork|rfe)\w*\b")

State = TypeVar("State")


@dataclass
class Function:
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the index of the instruction behind it


@dataclass(frozen=True)
class Block:
    first: int
    end: int
    successors: tuple[int, ...]  # indices of blocks


class UnknownFlow(Exception):
    """A jump to a place that this text does not tell."""


def blocks_of(function: Function) -> list[Block]:
    """A conditional branch goes both ways; also one that leaves out what no lane would do."""
    count = len(function.instructions)
    starts, targets = {0, count}, {}
    starts |= set(function.labels.values())
    for i, instruction in enumerate(function.instructions):
        text = instruction.text.removeprefix(ASM)
        if LEAVES.match(text):
            raise UnknownFlow(f"a jump that cannot be followed: {text}")
        if branch := BRANCHES.match(text):
            if branch[2] not in function.labels:
                raise UnknownFlow(f"a branch to nowhere: {text}")
            targets[i] = function.labels[branch[2]]
            starts.add(i + 1)
        elif ENDS.match(text):
            starts.add(i + 1)
    order = sorted(start for start in starts if start <= count)
    index = {start: block for block, start in enumerate(order)}
    blocks = []
    for first, end in itertools.pairwise(order):
        last = function.instructions[end - 1].text.removeprefix(ASM)
        goes_on = not ENDS.match(last) and not last.startswith("s_branch ")
        successors = ([targets[end - 1]] if end - 1 in targets else []) + ([end] if goes_on else [])
        if any(successor == count for successor in successors):
            raise UnknownFlow("the end of the function is reached without s_endpgm")
        blocks.append(Block(first, end, tuple(index[successor] for successor in successors)))
    return blocks


def states_before(
    function: Function,
    concerns: Callable[[Instruction], bool],
    start: State,
    step: Callable[[State, int, Instruction], State],
    join: Callable[[State, State], State],
) -> dict[int, State]:
    """The state in front of each instruction that `concerns`, after as many turns as it takes until no path adds to it.
    What no path reaches is left out."""
    if not function.instructions:
        return {}
    blocks = blocks_of(function)
    relevant = [
        [(i, function.instructions[i]) for i in range(b.first, b.end) if concerns(function.instructions[i])]
        for b in blocks
    ]
    at_entry: dict[int, State] = {0: start}
    waiting = [0]
    while waiting:
        number = min(waiting)  # about in the order of the text: few turns
        waiting.remove(number)
        state = at_entry[number]
        for i, instruction in relevant[number]:
            state = step(state, i, instruction)
        for successor in blocks[number].successors:
            joined = join(at_entry[successor], state) if successor in at_entry else state
            if successor not in at_entry or joined != at_entry[successor]:
                at_entry[successor] = joined
                if successor not in waiting:
                    waiting.append(successor)
    found = {}
    for number, state in at_entry.items():
        for i, instruction in relevant[number]:
            found[i] = state
            state = step(state, i, instruction)
    return found
