"""Lifetimes of partial outputs that peers read in place, where nobody awaits a credit: as in a captured graph.

The scripts say which rules that needs and what breaks without them, so that the rules stay tests. Calls count
from 0; a word that holds n + 1 bears the data of number n.
"""
from __future__ import annotations

from collections.abc import Sequence

from scripts import Line, Scripts


def _others(rank: int, num_ranks: int) -> list[int]:
    return [(rank + i) % num_ranks for i in range(1, num_ranks)]


def _signals(name: str, text: str, rank: int, num_ranks: int, value: int) -> list[Line]:
    peers = _others(rank, num_ranks)
    return [Line(f"{text} signals rank {peer}", store={(name, peer, rank): value}) for peer in peers]


def _arrived(name: str, rank: int, num_ranks: int, value: int) -> dict[tuple[object, ...], int]:
    return {(name, rank, peer): value for peer in _others(rank, num_ranks)}


def pull_reduce(num_ranks: int, buffer_of: Sequence[int], *, gather_between: bool = False,
                faults: bool = False, confirm: bool = True, forward_poison: bool = True) -> Scripts:
    """Attention i writes my partial_out[buffer_of[i]]; reduce i signals, waits, and reads the peers' ones.

    With `faults` any wait may expire. The rank then poisons its peers one after the other, and its caller
    goes on: the attentions that follow write partial_out as ever (on a GPU they are in the stream already),
    while the reduces that follow find the poison at once and do nothing.
    """
    last = len(buffer_of) - 1

    def attention(rank: int, i: int, goto: str = "") -> Line:
        buffer = buffer_of[i]
        store = {("partial_out", rank, buffer): i + 1}
        return Line(f"attention {i} writes partial_out[{buffer}]", store=store, goto=goto)

    def call(rank: int, i: int) -> list[Line]:
        lines = []
        if gather_between:
            lines += _signals("query", f"gather {i}", rank, num_ranks, i + 1)
            lines.append(Line(f"gather {i} waits", wait=_arrived("query", rank, num_ranks, i + 1)))
        poison = ("poison", rank)
        divert = (poison, f"tell {i}" if forward_poison else f"return {i}") if faults else (None, "")
        reads = {("partial_out", peer, buffer_of[i]): i + 1 for peer in _others(rank, num_ranks)}
        lines += [attention(rank, i), Line(f"reduce {i} enters", divert=divert)]
        lines += _signals("partial", f"reduce {i}", rank, num_ranks, i + 1)
        arrived = _arrived("partial", rank, num_ranks, i + 1)
        lines.append(Line(f"reduce {i} waits", arrived, divert=divert, expire=f"tell {i}" if faults else ""))
        lines.append(Line(f"reduce {i} reads partial_out[{buffer_of[i]}] of its peers", check=reads,
                          unless=poison if confirm else None, goto="end" if i == last else ""))
        return lines

    def fault(rank: int, i: int) -> list[Line]:
        lines = [Line(f"reduce {i} has a fault", label=f"tell {i}")]
        lines += [Line(f"reduce {i} poisons rank {peer}", store={("poison", peer): 1})
                  for peer in _others(rank, num_ranks)]
        lines.append(Line(f"reduce {i} returns NaN", label=f"return {i}", goto="end" if i == last else ""))
        later = range(i + 1, last + 1)
        return lines + [attention(rank, j, "end" if j == last else "") for j in later]

    scripts = []
    for rank in range(num_ranks):
        scripts.append([line for i in range(last + 1) for line in call(rank, i)])
        scripts[-1] += [line for i in range(last + 1) if faults for line in fault(rank, i)]
    return Scripts(scripts)
