"""Tokens and blocks that requests hold over time, once it is known when each starts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_NS = 10**9
# Events in the order in which they count where they are at the same time.
_LEAVE, _START, _DECODE, _GROW = range(4)


class Stay(NamedTuple):
    """One request: starts, has read its prompt, and then has a token more each time per output token."""

    start_ns: int
    decode_ns: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Series:
    """What was held over time: each sample is the most that was held since the one before. `seconds` since the first
    arrival."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]


class Residency(NamedTuple):
    peak_tokens: int
    peak_blocks: int
    end_ns: int
    series: Series


class _Tally:
    """What is held now. Tokens of requests that decode come one by one, at a phase of each request's own; they are
    counted when they are asked for, all at once: of (t - begin) // tpot, summed over requests, the quotients of
    `begin` are a sum and the remainders a sorted list."""

    def __init__(self, tpot_ns: int) -> None:
        self.blocks = 0
        self._tpot_ns = tpot_ns
        self._prompts = 0
        self._quotients = 0
        self._remainders: list[int] = []

    def tokens(self, now_ns: int) -> int:
        quotient, remainder = divmod(now_ns, self._tpot_ns)
        num_decoding = len(self._remainders)
        later_in_step = num_decoding - bisect_right(self._remainders, remainder)
        return self._prompts + num_decoding * (quotient + 1) - self._quotients - later_in_step

    def add(self, input_tokens: int, blocks: int) -> None:
        self._prompts += input_tokens
        self.blocks += blocks

    def begin_decode(self, begin_ns: int) -> None:
        quotient, remainder = divmod(begin_ns, self._tpot_ns)
        self._quotients += quotient
        insort(self._remainders, remainder)

    def end_decode(self, begin_ns: int) -> None:
        quotient, remainder = divmod(begin_ns, self._tpot_ns)
        self._quotients -= quotient
        del self._remainders[bisect_left(self._remainders, remainder)]


def residency(
    stays: Iterable[Stay], tpot_ns: int, span: int, state_blocks: int, num_samples: int, span_blocks: int = 1
) -> Residency:
    """Peaks and a series of at most num_samples. `span_blocks` blocks are needed for every `span` tokens of a
    request, begun ones too, and state_blocks besides. The first output token is there when the prompt has been read; a request leaves
    tpot_ns after its last one.

    Between two departures nothing shrinks, so the most is held just before each of them, and at the end of each sample.
    """
    events: list[tuple[int, int, Stay, int]] = []
    for stay in stays:
        start, decode, prompt, output = stay
        blocks = -(-prompt // span) * span_blocks + state_blocks
        events.append((start, _START, stay, blocks))
        if output:
            events.append((decode, _DECODE, stay, 0))
        # Output token j is the first of its span.
        for j in range(-prompt % span + 1, output + 1, span):
            events.append((decode + (j - 1) * tpot_ns, _GROW, stay, span_blocks))
            blocks += span_blocks
        events.append((decode + output * tpot_ns, _LEAVE, stay, blocks))
    events.sort()
    end = events[-1][0] if events else 0
    width = max(1, -(-end // num_samples))
    tally, samples = _Tally(tpot_ns), []
    sample_end, most_tokens, most_blocks = width, 0, 0
    for when, kind, stay, blocks in events:
        # What leaves at the end of a sample was held in it; what comes then belongs to the next.
        while when > sample_end or (when == sample_end and kind != _LEAVE):
            most_tokens, most_blocks = max(most_tokens, tally.tokens(sample_end - 1)), max(most_blocks, tally.blocks)
            samples.append((sample_end / _NS, most_tokens, most_blocks))
            sample_end, most_tokens, most_blocks = sample_end + width, 0, 0
        if kind == _LEAVE:
            most_tokens, most_blocks = max(most_tokens, tally.tokens(when - 1)), max(most_blocks, tally.blocks)
            tally.add(-stay.input_tokens, -blocks)
            if stay.output_tokens:
                tally.end_decode(stay.decode_ns)
        elif kind == _DECODE:
            tally.begin_decode(when)
        else:
            tally.add(stay.input_tokens if kind == _START else 0, blocks)
    if events:
        samples.append((end / _NS, most_tokens, most_blocks))
    seconds, tokens, blocks_held = zip(*samples, strict=True) if samples else ((), (), ())
    return Residency(max(tokens, default=0), max(blocks_held, default=0), end, Series(seconds, tokens, blocks_held))
