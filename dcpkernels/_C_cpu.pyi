"""What csrc/bindings offers. Addresses and sizes are plain integers; Python owns all memory."""

from typing import Any

BUILD_ID: str
PROTOCOL_VERSION: int
MAX_RANKS: int
FLAG_BYTES: int
FAULT_BYTES: int
STREAM_BYTES: int
CHANNEL_BYTES: int
STATUS_FAULTED: int
STATUS_BUSY: int
STATUS_OVERLAP: int
STATUS_NO_MEMORY: int
STATUS_CLOSED: int
NO_ADDRESS: int
built_variants: list[str]
runnable_variants: list[str]

class ControlLayout:
    def __init__(
        self,
        *,
        fault_offset: int,
        streams_offset: int,
        stream_bytes: int,
        flags_offset: int,
        flags_bytes: int,
        num_streams: int,
        num_channels: int,
    ) -> None: ...

class Endpoint:
    def __init__(
        self,
        *,
        rank: int,
        bases: list[int],
        socket_fds: list[int],
        control: ControlLayout,
        timeout_ns: int,
        first_timeout_ns: int,
        num_spins: int,
        num_yields: int,
        isa: str,
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    def is_poisoned(self) -> bool: ...
    def close(self) -> bool: ...
    def fault(self) -> dict[str, Any]: ...
    def stream_counters(self, stream_idx: int) -> tuple[int, int, int]: ...

class A2aLseReducePlan:
    def __init__(
        self,
        *,
        endpoint: Endpoint,
        dtype: int,
        lse_dtype: int,
        lse_base: int,
        lane: int,
        stream_idx: int,
        num_tokens: int,
        num_local_heads: int,
        head_dim: int,
        max_round_rows: int,
        num_seqs: int,
        payload_offset: int,
        row_bytes: int,
        lse_offset: int,
        lse_row_bytes: int,
        strides: tuple[int, int, int, int, int, int, int, int],
    ) -> None: ...
    def __call__(
        self, partial_out: int, partial_lse: int, out: int, out_lse: int, seq_lens: int, query_start_loc: int
    ) -> int: ...

def init_region(base: int, control: ControlLayout, num_ranks: int, start_epoch: int) -> None: ...
