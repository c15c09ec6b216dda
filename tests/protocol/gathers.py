"""Lifetimes of buffers that callers see: query_gather, kv_gather, partial outputs that peers read in place.

The scripts say which rules such ops need and what breaks without them, so that the rules stay tests. Calls
and chunks count from 0; a word that holds n + 1 bears the data of number n.
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


def kv_gather(num_ranks: int, num_chunks: int, num_buffers: int, order: Sequence[str], *,
              with_credits: bool = False, buffer_of: Sequence[int] = ()) -> Scripts:
    """start(i) pushes my rows of chunk i into a buffer of every rank, wait(i) awaits all, use(i) reads them.

    `order` is what a rank does at chunk i: ("wait 0", "start 1", "use 0") is wait(i), start(i + 1), use(i).
    With credits, wait(i) also tells all that chunk i - 1 is no longer in use, and start(i) waits for
    everybody's word on the chunk that was in its buffer before.
    """
    buffers = list(buffer_of) or [chunk % num_buffers for chunk in range(num_chunks)]

    def start(rank: int, i: int) -> list[Line]:
        lines = []
        before = [chunk for chunk in range(i) if buffers[chunk] == buffers[i]]
        if with_credits and before:
            awaited = _arrived("released", rank, num_ranks, before[-1] + 1)
            lines.append(Line(f"start({i}) waits for the release of chunk {before[-1]}", wait=awaited))
        lines += [Line(f"start({i}) writes buffer {buffers[i]} of rank {owner}",
                       store={("buffer", owner, buffers[i], rank): i + 1}) for owner in range(num_ranks)]
        return lines + _signals("chunk", f"start({i})", rank, num_ranks, i + 1)

    def wait(rank: int, i: int) -> list[Line]:
        lines = [Line(f"wait({i})", wait=_arrived("chunk", rank, num_ranks, i + 1))]
        return lines + (_signals("released", f"wait({i})", rank, num_ranks, i) if with_credits and i else [])

    def use(rank: int, i: int) -> list[Line]:
        rows = {("buffer", rank, buffers[i], src): i + 1 for src in range(num_ranks)}
        return [Line(f"use({i})", check=rows)]

    steps = {"start": start, "wait": wait, "use": use}
    verbs = [(verb, int(ahead)) for verb, ahead in (step.split() for step in order)]
    todo = [(verb, i + ahead) for i in range(-1, num_chunks) for verb, ahead in verbs]
    todo = [(verb, i) for verb, i in todo if 0 <= i < num_chunks]
    scripts = [[line for verb, i in todo for line in steps[verb](rank, i)] for rank in range(num_ranks)]
    return Scripts(scripts)


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


def query_gather(num_ranks: int, num_steps: int, *, reduce: str = "full",
                 rows: tuple[int, ...] = ()) -> Scripts:
    """Gather i writes my heads into every rank's one query buffer, attention i reads it, then comes reduce i.

    reduce: "full" = all signal and wait for all; "none" = it does nothing, as with T = 0 and an early return;
    "rows" = only the ranks in `rows` signal and are waited for.
    """
    senders = {"full": tuple(range(num_ranks)), "none": (), "rows": rows}[reduce]

    def script(rank: int) -> list[Line]:
        lines = []
        for i in range(num_steps):
            for owner in range(num_ranks):
                store = {("query", owner, rank): i + 1}
                lines.append(Line(f"gather {i} writes the query of rank {owner}", store=store))
            lines += _signals("gathered", f"gather {i}", rank, num_ranks, i + 1)
            lines.append(Line(f"gather {i} waits", wait=_arrived("gathered", rank, num_ranks, i + 1)))
            heads = {("query", rank, src): i + 1 for src in range(num_ranks)}
            lines.append(Line(f"attention {i}", check=heads))
            if rank in senders:
                lines += _signals("reduced", f"reduce {i}", rank, num_ranks, i + 1)
            awaited = {word: value for word, value in _arrived("reduced", rank, num_ranks, i + 1).items()
                       if word[2] in senders}
            lines.append(Line(f"reduce {i} waits", wait=awaited))
        return lines

    return Scripts([script(rank) for rank in range(num_ranks)])
