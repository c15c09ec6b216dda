"""Which wire to try: rows with a flag behind them (bulk), or packets that bring their flags along.

Only a2a_lse_reduce has the choice; the gathers store straight into the buffer that is read. Bytes are those of
docs/protocol.md#packets. A packet saves a trip of the flag and costs bytes, so few rows speak for packets, many for
bulk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.ranges import Range
from dcpkernels.planner.step_time import LSE_BYTES, TOO_CLOSE, StepTimeModel

OPS = ("query_gather", "a2a_lse_reduce")
BULK, PACKET = "bulk", "packet"
_FLAG_BYTES = {8: 4, 16: 4, 128: 8}
_LSE_ALIGNMENT = 16

AUTO_NOTE = (
    'WorkspaceConfig(wire="auto") is bulk on every device today, for nothing has been measured on a GPU; packets come '
    'by wire="packet" alone'
)
ONE_WIRE_NOTE = "query_gather has one wire: it stores into the buffer that attention reads"


@dataclass(frozen=True)
class WireAdvice:
    """What to try for one op, and why.

    wire: "bulk", "packet" (of packet_bytes each) or "too close to call". row_bytes: what goes to one peer of one
    token, by wire. gain_us: bulk's time minus that of packets.
    """

    op: str
    num_tokens: int
    wire: str
    packet_bytes: int
    row_bytes: dict[str, int]
    gain_us: Range
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "gain_us": self.gain_us.to_dict()}


def packed_row_bytes(model: StepTimeModel, packet_bytes: int) -> int:
    """One token's row of a merge, to one peer, in packets: payload up to a multiple of 16 bytes, LSEs, zeros to the
    end of the last packet."""
    heads = model.num_local_heads
    payload = heads * model.value_dim * model.output_item_bytes
    in_row = -(-payload // _LSE_ALIGNMENT) * _LSE_ALIGNMENT + heads * LSE_BYTES
    return packet_bytes * -(-in_row // (packet_bytes - _FLAG_BYTES[packet_bytes]))


def advise(model: StepTimeModel, op: str, num_tokens: int, dcp: int) -> WireAdvice:
    """The wire to try for `op` in calls of `num_tokens` rows. Raises DcpInvalidArgument for an unknown op, or counts
    that the model does not take; dcp must be at least 2."""
    if op not in OPS:
        raise DcpInvalidArgument(f"wire: op must be one of {OPS} (got {op!r})")
    model.break_even(num_tokens, dcp)  # the model's own checks
    size = model.hardware.packet_bytes
    if op == "query_gather":
        rows = {BULK: model.query_row_bytes}
        return WireAdvice(op, num_tokens, BULK, 0, rows, Range.exact(0.0), ONE_WIRE_NOTE)
    rows = {BULK: model.merge_row_bytes, **{f"packet {each}": packed_row_bytes(model, each) for each in _FLAG_BYTES}}
    extra_bytes = num_tokens * (rows[f"packet {size}"] - rows[BULK])
    share, trip = model.hardware.link_share, model.hardware.packet_trip_s
    # The longer a byte takes, the less there is to gain.
    gain = Range(
        trip.low - model.hardware.link_seconds(extra_bytes, dcp - 1, share.low),
        trip.high - model.hardware.link_seconds(extra_bytes, dcp - 1, share.high),
    )
    wire = PACKET if gain.low > 0 else BULK if gain.high < 0 else TOO_CLOSE
    return WireAdvice(op, num_tokens, wire, size, rows, gain.scaled(1e6), AUTO_NOTE)
