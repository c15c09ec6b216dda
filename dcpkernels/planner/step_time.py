"""Time of the attention section of one layer of a decode step, under tensor parallelism alone (TP) and with decode
context parallelism (DCP): where DCP is faster, where it is slower, and where nobody can say.

A roofline with latencies. S sequences of `context` tokens in a batch of T tokens (S = T but for speculative decoding),
rows of `row` bytes on a rank, a DCP group of D ranks:

    attention(D) = max(floor, context / D * row * max(S / memory bandwidth, 1 / bandwidth of one sequence))
    t(1)         = attention(1)
    t(D)         = attention(D) + query gather + merge
    gather       = latency + T * (D - 1) * Hr * Dq * item / link bandwidth
    merge        = latency + T * (D - 1) * Hr * (Dv * item + 4) / link bandwidth      Hr = heads / TP size

Bandwidths and latencies are ranges (`hardware.py` has their sources). Both arms run on one machine and with one
attention kernel, so that their difference is not that of two independent ranges: it is taken at one value of each
parameter for both. The difference t(1) - t(D) grows, or stays, as reading gets slower or the link faster; it shrinks,
or stays, as `floor` or a latency gets longer. So one corner of all ranges is the best for DCP and one the worst, and
what lies between gives differences between those two.

What the model leaves out: the arithmetic of attention (equal in both arms, but for padding of heads to a tile, which
favours DCP), a rank that is late (which costs more than all of this), other layers, and prefill.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.hardware import Hardware
from dcpkernels.planner.models import MAX_TP
from dcpkernels.planner.ranges import Range, check_count

DCP_WINS, TP_WINS, TOO_CLOSE = "dcp wins", "tp wins", "too close to call"
LSE_BYTES = 4  # a merge sends LSEs as fp32, whatever they were
# Of two DCP sizes none is called the faster one for less than that, per layer: a launch varies by as much.
RESOLUTION_S = 0.5e-6

# Published, to hold the model against. Microseconds of one layer.
# vLLM #50484: (13.806 - 10.544) ms a token over 24 MLA layers, one sequence of 114k to 120k tokens.
PUBLISHED_SAVING_US = 136.0
# SGLang #33926: DCP of 8 overtakes between these two concurrencies, at this context.
PUBLISHED_CROSSINGS = ((32 * 1024, 8, 16), (64 * 1024, 4, 8), (128 * 1024, 2, 4), (256 * 1024, 0, 1))

_NOT_INHERENT = (
    "vLLM's published -24 % per token (Kimi-K3, DCP8, one sequence of 120k tokens) is not an inherent gain of DCP: reading "
    "less explains 1 %. The kernel without DCP left most of the device idle; one that fills it would be about even."
)
_NOT_MEASURED = (
    "No time here was measured with dcpkernels. With what your own machine does in place of the ranges, they become "
    "narrow."
)
_MEMORY = "What DCP gives for sure is memory: batches of long contexts that fit by it alone."
CAVEATS = (_NOT_INHERENT, _NOT_MEASURED, _MEMORY)


@dataclass(frozen=True)
class Point:
    """One value of each parameter that is a range."""

    memory_bandwidth: float
    sequence_bandwidth: float
    attention_s: float
    gather_s: float
    merge_s: float
    link_share: float


@dataclass(frozen=True)
class Comparison:
    """TP against DCP in one layer of one step. Times in microseconds; saving = TP - DCP, negative where DCP is slower.

    query_bytes, merge_bytes: what a rank receives from all peers together.
    """

    num_tokens: int
    context: int
    dcp: int
    tp_us: Range
    dcp_us: Range
    collectives_us: Range
    saving_us: Range
    saving_ms_per_step: Range
    query_bytes: int
    merge_bytes: int

    @property
    def verdict(self) -> str:
        if self.saving_us.low > 0:
            return DCP_WINS
        return TP_WINS if self.saving_us.high < 0 else TOO_CLOSE

    def to_dict(self) -> dict[str, Any]:
        ranges = ("tp_us", "dcp_us", "collectives_us", "saving_us", "saving_ms_per_step")
        counts = ("num_tokens", "context", "dcp", "query_bytes", "merge_bytes")
        return {
            **{name: getattr(self, name) for name in counts},
            **{name: getattr(self, name).to_dict() for name in ranges},
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class BestDcp:
    """The DCP sizes that may be the fastest; the others are surely slower than one of these."""

    num_tokens: int
    context: int
    sizes: tuple[int, ...]
    time_us: dict[int, Range] = field(compare=False)

    @property
    def dcp(self) -> int | None:
        """The fastest one. None: too close to call."""
        return self.sizes[0] if len(self.sizes) == 1 else None

    def text(self) -> str:
        return str(self.dcp) if self.dcp else f"{', '.join(map(str, self.sizes))}: {TOO_CLOSE}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "context": self.context,
            "best_dcp": self.dcp,
            "may_be_best": list(self.sizes),
            "time_us": {str(size): time.to_dict() for size, time in self.time_us.items()},
        }


@dataclass(frozen=True)
class StepTimeModel:
    """The model of one kind of layer on one machine.

    Args:
        hardware: the machine; `hardware.preset(name)`, or `Hardware(...)` with numbers of one's own.
        tp: ranks that share the heads.
        num_heads: query heads of the model; divisible by tp.
        query_dim: elements of one head of the query that is gathered (576 of MLA's absorbed query).
        value_dim: elements of one head of the partial output (512 of MLA's latent).
        row_bytes: of one token in one layer's cache, for one KV head: 576 of MLA in fp8; of GQA keys and values
            together, 2 * head_dim * bytes of an element.
        num_kv_heads: 1 for MLA. A rank holds ceil(num_kv_heads / tp) of them; DCP shards what would be copies, so a
            group has at most tp / num_kv_heads ranks.
        num_layers: layers with such attention, for times of a whole step.
        query_item_bytes: of an element of the gathered query: 1 in fp8, 2 in bf16.
        output_item_bytes: of an element of the partial output.
        tokens_per_sequence: rows of one sequence in a step: 1 + draft tokens.

    Raises DcpInvalidArgument for counts that are no whole numbers >= 1, or do not divide.
    """

    hardware: Hardware
    tp: int
    num_heads: int
    query_dim: int
    value_dim: int
    row_bytes: int
    num_layers: int
    num_kv_heads: int = 1
    query_item_bytes: int = 1
    output_item_bytes: int = 2
    tokens_per_sequence: int = 1

    def __post_init__(self) -> None:
        for name in (
            *("tp", "num_heads", "query_dim", "value_dim", "row_bytes", "num_layers", "num_kv_heads"),
            *("query_item_bytes", "output_item_bytes", "tokens_per_sequence"),
        ):
            check_count("step_time", name, getattr(self, name))
        if self.tp > MAX_TP:
            raise DcpInvalidArgument(f"step_time: tp must be at most {MAX_TP} (got {self.tp})")
        if not isinstance(self.hardware, Hardware):
            raise DcpInvalidArgument(f"step_time: hardware must be a Hardware (got {self.hardware!r})")
        if self.num_heads % self.tp:
            raise DcpInvalidArgument(f"step_time: num_heads must be divisible by tp={self.tp} (got {self.num_heads})")

    # -- bytes, exact

    @property
    def num_local_heads(self) -> int:
        return self.num_heads // self.tp

    @property
    def rank_row_bytes(self) -> int:
        """Of one token in one layer's cache, on a rank that holds it."""
        return -(-self.num_kv_heads // self.tp) * self.row_bytes

    @property
    def query_row_bytes(self) -> int:
        """What a query gather sends of one token to one peer."""
        return self.num_local_heads * self.query_dim * self.query_item_bytes

    @property
    def merge_row_bytes(self) -> int:
        """What a merge sends of one token to one peer: its heads of the partial output, and their LSEs."""
        return self.num_local_heads * (self.value_dim * self.output_item_bytes + LSE_BYTES)

    def dcp_sizes(self) -> tuple[int, ...]:
        """The sizes that a group may have: divisors of how often TP alone would copy a KV head."""
        copies = max(1, self.tp // self.num_kv_heads)
        most = self.hardware.num_links + 1 if self.hardware.link == "mesh" else copies
        return tuple(size for size in range(1, min(copies, most) + 1) if copies % size == 0 and self.tp % size == 0)

    # -- times at one point

    @property
    def _extremes(self) -> tuple[Point, Point]:
        """(best for DCP, worst for DCP): the head of this file says why these two are enough."""
        machine, peak = self.hardware, self.hardware.memory_bandwidth
        best = Point(
            machine.memory_share.low * peak, machine.sequence_share.low * peak, machine.attention_s.low,
            machine.gather_s.low, machine.merge_s.low, machine.link_share.high,
        )  # fmt: skip
        worst = Point(
            machine.memory_share.high * peak, machine.sequence_share.high * peak, machine.attention_s.high,
            machine.gather_s.high, machine.merge_s.high, machine.link_share.low,
        )  # fmt: skip
        return best, worst

    def _seconds_per_position(self, point: Point, num_tokens: int) -> float:
        """To read one more token of every sequence of the batch."""
        num_sequences = -(-num_tokens // self.tokens_per_sequence)
        return self.rank_row_bytes * max(num_sequences / point.memory_bandwidth, 1 / point.sequence_bandwidth)

    def attention_s(self, point: Point, num_tokens: int, context: float, dcp: int) -> float:
        return max(point.attention_s, context / dcp * self._seconds_per_position(point, num_tokens))

    def collectives_s(self, point: Point, num_tokens: int, dcp: int) -> float:
        """Query gather and merge."""
        if dcp == 1:
            return 0.0
        bytes_of_peer = num_tokens * (self.query_row_bytes + self.merge_row_bytes)
        link = self.hardware.link_seconds(bytes_of_peer, dcp - 1, point.link_share)
        return point.gather_s + point.merge_s + link

    def layer_s(self, point: Point, num_tokens: int, context: float, dcp: int) -> float:
        """One layer's attention section."""
        return self.attention_s(point, num_tokens, context, dcp) + self.collectives_s(point, num_tokens, dcp)

    # -- answers

    def compare(self, num_tokens: int, context: int, dcp: int) -> Comparison:
        """TP alone against a DCP group of `dcp` ranks, for a batch of `num_tokens` tokens with `context` tokens each
        in the cache. Raises DcpInvalidArgument for what is no whole number >= 1, or a dcp that is not in `dcp_sizes()`.
        """
        self._check(num_tokens, dcp, context)
        best, worst = self._extremes
        collectives = [self.collectives_s(point, num_tokens, dcp) for point in (best, worst)]
        saving = Range(*(self._saving_s(point, num_tokens, context, dcp) for point in (worst, best)))
        return Comparison(
            num_tokens=num_tokens,
            context=context,
            dcp=dcp,
            tp_us=self._time_us(num_tokens, context, 1),
            dcp_us=self._time_us(num_tokens, context, dcp),
            collectives_us=Range(*collectives).scaled(1e6),
            saving_us=saving.scaled(1e6),
            saving_ms_per_step=saving.scaled(1e3 * self.num_layers),
            query_bytes=num_tokens * (dcp - 1) * self.query_row_bytes,
            merge_bytes=num_tokens * (dcp - 1) * self.merge_row_bytes,
        )

    def break_even(self, num_tokens: int, dcp: int) -> Range:
        """The context at which both are equally fast, in tokens. Below its low end TP wins, above its high end DCP
        does.

        With k seconds per position and C of the collectives: max(floor, context k) = max(floor, context k / D) + C.
        The left side must be above the floor; then context k is floor + C, or C D / (D - 1) where DCP is above the
        floor, too.
        """
        self._check(num_tokens, dcp)
        if dcp == 1:
            raise DcpInvalidArgument("step_time: dcp must be at least 2, to break even (got 1)")
        ends = []
        for point in self._extremes:
            collectives = self.collectives_s(point, num_tokens, dcp)
            reading = max(point.attention_s + collectives, collectives * dcp / (dcp - 1))
            ends.append(reading / self._seconds_per_position(point, num_tokens))
        return Range(*ends)

    def map(self, tokens: Sequence[int], contexts: Sequence[int], dcp: int) -> tuple[tuple[str, ...], ...]:
        """Verdicts, a row for each number of tokens."""
        return tuple(tuple(self.compare(count, context, dcp).verdict for context in contexts) for count in tokens)

    def best_dcp(self, num_tokens: int, context: int) -> BestDcp:
        """Which of `dcp_sizes()` is the fastest, as far as it can be said. A larger one holds more tokens."""
        sizes = self.dcp_sizes()
        self._check(num_tokens, 1, context)
        best, worst = ([self.layer_s(point, num_tokens, context, size) for size in sizes] for point in self._extremes)
        # Whether of two sizes the larger one pays is decided at the same two corners.
        surely_slower = {
            i
            for i, j in itertools.permutations(range(len(sizes)), 2)
            if min(best[i] - best[j], worst[i] - worst[j]) > RESOLUTION_S
        }
        times = {size: self._time_us(num_tokens, context, size) for size in sizes}
        left = tuple(size for i, size in enumerate(sizes) if i not in surely_slower)
        return BestDcp(num_tokens, context, left, times)

    def to_dict(self) -> dict[str, Any]:
        """The assumptions, for JSON."""
        return {
            "hardware": self.hardware.to_dict(),
            **{
                name: getattr(self, name)
                for name in (
                    "tp",
                    "num_heads",
                    "num_local_heads",
                    "query_dim",
                    "value_dim",
                    "num_kv_heads",
                    "num_layers",
                )
            },
            "rank_row_bytes": self.rank_row_bytes,
            "query_row_bytes": self.query_row_bytes,
            "merge_row_bytes": self.merge_row_bytes,
            "tokens_per_sequence": self.tokens_per_sequence,
            "dcp_sizes": list(self.dcp_sizes()),
            "caveats": list(CAVEATS),
        }

    # -- what they rest on

    def _saving_s(self, point: Point, num_tokens: int, context: float, dcp: int) -> float:
        return self.layer_s(point, num_tokens, context, 1) - self.layer_s(point, num_tokens, context, dcp)

    def _time_us(self, num_tokens: int, context: int, dcp: int) -> Range:
        """Of one arm by itself: all of it fast, all of it slow."""
        best, worst = self._extremes
        fast = replace(best, memory_bandwidth=worst.memory_bandwidth, sequence_bandwidth=worst.sequence_bandwidth)
        slow = replace(worst, memory_bandwidth=best.memory_bandwidth, sequence_bandwidth=best.sequence_bandwidth)
        return Range(*(self.layer_s(point, num_tokens, context, dcp) for point in (fast, slow))).scaled(1e6)

    def _check(self, num_tokens: int, dcp: int, context: int = 1) -> None:
        for name, value in (("num_tokens", num_tokens), ("dcp", dcp), ("context", context)):
            check_count("step_time", name, value)
        if dcp not in self.dcp_sizes():
            sizes = ", ".join(map(str, self.dcp_sizes()))
            raise DcpInvalidArgument(
                f"step_time: dcp must be one of {sizes}, for tp={self.tp}, num_kv_heads={self.num_kv_heads} (got {dcp})"
            )
