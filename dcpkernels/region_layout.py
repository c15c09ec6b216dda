"""Where things lie in a rank's symmetric region: pure integers, the one place that adds up offsets and sizes.

The C++ side is handed the offsets; `_backend` compares the sizes of the control words with those it was compiled with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcpkernels.errors import DcpInvalidArgument

# csrc/core/types.h: a flag, a fault record, a stream's state fill a cache line each; a channel has its state and doorbell.
FLAG_BYTES = 64
FAULT_BYTES = 64
STREAM_BYTES = 64
CHANNEL_BYTES = 128
# csrc/ops/link_check.h: a pattern of 1 KiB and its line of flags.
LINK_SLOT_BYTES = 1024 + 64

# Parts start on pages: a part can then be handed to another memory policy, and no two share a line.
PART_ALIGNMENT = 4096
# Rows start on cache lines: a writer of one row shares no line with a writer of the next.
ROW_ALIGNMENT = 64
LSE_ALIGNMENT = 16
# csrc/core/packet.h counts the bytes of a row in 32 bits.
MAX_PACKET_ROW_BYTES = 2**31 - 1024

NUM_PARITIES = 2
GATHER_PARTS = ("query_gather.buffer", "kv_gather.buffers")  # side by side
# What one rank pushes in one round, at most (but a row at least). About an L2 cache: a call with more rows goes through
# the same staging several times while it is there, instead of once through memory. Measured with 2 ranks of 96 heads,
# D = 512, T = 64: 665 us in 4 rounds, 910 us in one.
ROUND_BYTES = 1 << 20
# On a GPU a round costs microseconds and staging lies in a memory that is fast all over: few rounds.
GPU_ROUND_BYTES = 32 << 20
_GPU_CHANNELS = 24  # of three ops, half of the multiprocessors of an H100, and all but a few of an H20


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def engine_rows(max_num_seqs: int, draft_tokens: int = 0) -> int:
    """Rows of an engine's largest decode batch: each sequence has one, and one for each draft that is verified."""
    for name, value, least in (("max_num_seqs", max_num_seqs, 1), ("draft_tokens", draft_tokens, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DcpInvalidArgument(f"workspace: {name} must be a whole number >= {least} (got {value!r})")
    return max_num_seqs * (1 + draft_tokens)


@dataclass(frozen=True)
class Part:
    """`num_bytes` at `offset` of every rank's region."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class RegionLayout:
    """The layout of one rank's region. All ranks of a workspace have the same one.

    Args (counts, bytes):
        num_ranks, num_heads (of all ranks), head_dim, max_num_tokens: the geometry of `WorkspaceConfig`.
        item_bytes: size of one element of the partial output.
        num_lanes: independent copies of staging, flags and epochs.
        num_channels: parts of a call that run on their own.
        zero_copy, packet_bytes: how payload travels (csrc/ops/a2a_lse_reduce.h).
        query_head_bytes, padded_num_heads: of the buffer of query_gather; 0 bytes: there is none.
        kv_chunk_rows, kv_row_bytes: of a buffer of kv_gather; 0 rows: there are none.
        multicast: the buffers of the gathers lie once, in the shared region, instead of in every rank's.
        round_bytes: what one rank pushes in one round of a2a_lse_reduce, at most.
        link_check: there is room for a check of the memory between ranks (csrc/ops/link_check.h).
    """

    num_ranks: int
    num_heads: int
    head_dim: int
    max_num_tokens: int
    item_bytes: int
    num_lanes: int
    num_channels: int = 1
    zero_copy: bool = False  # payload is read in the source's buffers, staging holds LSEs only
    packet_bytes: int = 0  # 0: plain rows; else staging rows are packets of so many bytes
    query_head_bytes: int = 0
    padded_num_heads: int = 0
    kv_chunk_rows: int = 0
    kv_row_bytes: int = 0
    multicast: bool = False
    round_bytes: int = ROUND_BYTES
    link_check: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_heads", "head_dim", "max_num_tokens", "num_lanes", "num_channels"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise DcpInvalidArgument(f"region: {name} must be a whole number >= 1 (got {getattr(self, name)!r})")
        if self.num_heads % self.num_ranks:
            raise DcpInvalidArgument(
                f"region: num_heads must be divisible by num_ranks={self.num_ranks} (got {self.num_heads})"
            )
        row_bytes = self.lse_in_row + self.num_local_heads * 4
        if self.packet_bytes and row_bytes > MAX_PACKET_ROW_BYTES:
            raise DcpInvalidArgument(
                f"region: a row of packets must have at most {MAX_PACKET_ROW_BYTES} bytes (got {row_bytes})"
            )

    @classmethod
    def for_device(
        cls, device_type: str, *, num_lanes: int, num_channels: int | None, multicast: bool, **fields: Any
    ) -> RegionLayout:
        """The layout on devices of one type, with what the type decides; `fields` are the other ones."""
        is_gpu = device_type != "cpu"
        return cls(
            num_lanes=num_lanes,
            num_channels=num_channels or (max(1, _GPU_CHANNELS // num_lanes) if is_gpu else 1),
            # A GPU's multicast reaches every rank's own region, at another address.
            multicast=multicast and not is_gpu,
            link_check=is_gpu,
            round_bytes=GPU_ROUND_BYTES if is_gpu else ROUND_BYTES,
            **fields,
        )

    @property
    def num_local_heads(self) -> int:
        return self.num_heads // self.num_ranks

    # -- control words

    @property
    def ops(self) -> tuple[str, ...]:
        """That have epoch streams."""
        gathers = {"query_gather": self.query_head_bytes > 0, "kv_gather": self.kv_chunk_rows > 0}
        return ("a2a_lse_reduce", *(op for op, is_there in gathers.items() if is_there))

    @property
    def num_streams(self) -> int:
        return len(self.ops) * self.num_lanes

    @property
    def stream_bytes(self) -> int:
        return STREAM_BYTES + self.num_channels * CHANNEL_BYTES

    @property
    def flags_bytes(self) -> int:
        """Flags of one stream: [parity][channel][peer]."""
        return NUM_PARITIES * self.num_channels * self.num_ranks * FLAG_BYTES

    def stream_idx(self, op: str, lane: int) -> int:
        return self.ops.index(op) * self.num_lanes + lane

    @property
    def link_check_bytes(self) -> int:
        """By source, a slot for what it stored to this rank alone and one for what it stored to all."""
        return 2 * self.num_ranks * LINK_SLOT_BYTES if self.link_check else 0

    # -- staging of a2a_lse_reduce

    @property
    def payload_row_bytes(self) -> int:
        """Of the heads of one owner."""
        return self.num_local_heads * self.head_dim * self.item_bytes

    @property
    def lse_in_row(self) -> int:
        """Where the LSEs begin in a plain row, behind the payload."""
        return 0 if self.zero_copy else align_up(self.payload_row_bytes, LSE_ALIGNMENT)

    @property
    def plain_row_bytes(self) -> int:
        return align_up(self.lse_in_row + self.num_local_heads * 4, ROW_ALIGNMENT)

    @property
    def staging_row_bytes(self) -> int:
        """Of a row as it travels: a plain row, or its packets (csrc/core/packet.h)."""
        if not self.packet_bytes:
            return self.plain_row_bytes
        payload = self.packet_bytes - (8 if self.packet_bytes == 128 else 4)
        num_packets = -(-(self.lse_in_row + self.num_local_heads * 4) // payload)
        return align_up(num_packets * self.packet_bytes, ROW_ALIGNMENT)

    @property
    def max_round_rows(self) -> int:
        """Rows of one round, at most; the same on all ranks."""
        if self.num_ranks == 1 or self.zero_copy:
            return self.max_num_tokens
        return min(self.max_num_tokens, max(1, self.round_bytes // ((self.num_ranks - 1) * self.staging_row_bytes)))

    @property
    def staging_bytes(self) -> int:
        """Of one lane. A rank never sends to itself: one slot per *other* rank."""
        return NUM_PARITIES * (self.num_ranks - 1) * self.max_round_rows * self.staging_row_bytes

    @property
    def unpacked_bytes(self) -> int:
        """Plain rows of one lane that packets are unpacked into; used within one round, so there is no parity."""
        return (self.num_ranks - 1) * self.max_round_rows * self.plain_row_bytes if self.packet_bytes else 0

    @property
    def buffer_bytes(self) -> int:
        """Of one of the two buffers [max_num_tokens, num_heads, head_dim] of a lane that peers read."""
        if not self.zero_copy:
            return 0
        return align_up(self.max_num_tokens * self.num_heads * self.head_dim * self.item_bytes, PART_ALIGNMENT)

    # -- buffers of the gathers

    @property
    def query_buffer_bytes(self) -> int:
        """Of the buffer of one lane. Padded heads lie behind the last row: some kernels read past it."""
        num_heads = max(self.num_heads, self.padded_num_heads)
        return align_up(self.max_num_tokens * num_heads * self.query_head_bytes, PART_ALIGNMENT)

    @property
    def kv_buffer_bytes(self) -> int:
        """Of one of the two buffers of a lane."""
        return align_up(self.kv_chunk_rows * self.kv_row_bytes, PART_ALIGNMENT)

    # -- the whole

    @property
    def parts(self) -> dict[str, Part]:
        """Name -> place in a rank's region, in order. Per-lane parts hold their lanes one after the other."""
        return _placed(
            {
                "fault": FAULT_BYTES,
                "streams": self.num_streams * self.stream_bytes,
                "flags": self.num_streams * self.flags_bytes,
                "link_check": self.link_check_bytes,
                "a2a_lse_reduce.staging": self.num_lanes * self.staging_bytes,
                "a2a_lse_reduce.unpacked": self.num_lanes * self.unpacked_bytes,
                "a2a_lse_reduce.partial_out": self.num_lanes * 2 * self.buffer_bytes,
                **({} if self.multicast else self._gather_sizes),
            }
        )

    @property
    def shared_parts(self) -> dict[str, Part]:
        """The same of the region that all ranks share."""
        return _placed(self._gather_sizes if self.multicast else {})

    @property
    def gather_parts(self) -> dict[str, Part]:
        """Where the buffers of the gathers lie, in the one or the other."""
        return self.shared_parts if self.multicast else self.parts

    @property
    def _gather_sizes(self) -> dict[str, int]:
        sizes = (self.num_lanes * self.query_buffer_bytes, self.num_lanes * 2 * self.kv_buffer_bytes)
        return {name: num_bytes for name, num_bytes in zip(GATHER_PARTS, sizes, strict=True) if num_bytes}

    @property
    def control_num_bytes(self) -> int:
        """Of the control words, which come first."""
        flags = self.parts["flags"]
        return align_up(flags.offset + flags.num_bytes, PART_ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        return _end(self.parts)

    @property
    def shared_num_bytes(self) -> int:
        return _end(self.shared_parts)


def _placed(sizes: dict[str, int]) -> dict[str, Part]:
    parts, offset = {}, 0
    for name, num_bytes in sizes.items():
        parts[name] = Part(offset, num_bytes)
        offset = align_up(offset + num_bytes, PART_ALIGNMENT)
    return parts


def _end(parts: dict[str, Part]) -> int:
    return max((align_up(part.offset + part.num_bytes, PART_ALIGNMENT) for part in parts.values()), default=0)
