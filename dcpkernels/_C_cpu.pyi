"""What csrc/bindings offers. Addresses and sizes are plain integers; Python owns all memory."""

from collections.abc import Callable
from typing import Any

BUILD_ID: str
SANITIZERS: str
PROTOCOL_VERSION: int
MAX_RANKS: int
FLAG_BYTES: int
FAULT_BYTES: int
STREAM_BYTES: int
CHANNEL_BYTES: int
LINK_SLOT_BYTES: int
STATUS_FAULTED: int
STATUS_BUSY: int
STATUS_LAUNCH_FAILED: int
STATUS_OVERLAP: int
STATUS_NO_MEMORY: int
STATUS_CLOSED: int
STATUS_STALE_BUFFER: int
STATUS_CHANNELS_MISSING: int
STATUS_NOT_STARTED: int
STATUS_NOT_WAITED: int
NO_ADDRESS: int
MAX_QUERY_PARTS: int
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
        gather_bases: list[int],
        multicast: int,
        bases_table: int = 0,
        host_control: int = 0,
        device: int = 0,
        reserved: list[tuple[int, int]],
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
    def is_reserved(self, address: int, num_bytes: int) -> bool: ...
    def refresh(self, control_words: bytes, record: bytes) -> None: ...
    def close(self) -> bool: ...
    def hand_out_buffer(self, stream_idx: int) -> tuple[int, int]: ...
    def fault(self) -> dict[str, Any]: ...
    def stream_counters(self, stream_idx: int) -> tuple[int, int, int]: ...

class StagingLayout:
    def __init__(self, *, offset: int, row_bytes: int, num_rows: int) -> None: ...

class A2aLseReduceGeometry:
    def __init__(
        self,
        *,
        wire: int,
        dtype: int,
        lane: int,
        stream_idx: int,
        num_ranks: int,
        num_local_heads: int,
        head_dim: int,
        max_round_rows: int,
        staging: StagingLayout,
        lse_in_row: int,
        unpacked: StagingLayout,
        buffer_offset: int,
        buffer_bytes: int,
        all_buffers_offset: int,
        all_buffers_bytes: int,
        query_stream_idx: int,
    ) -> None: ...

class A2aLseReducePlan:
    def __init__(
        self,
        *,
        endpoint: Endpoint,
        geometry: A2aLseReduceGeometry,
        lse_dtype: int,
        lse_base: int,
        num_tokens: int,
        num_seqs: int,
        strides: tuple[int, int, int, int, int, int, int, int],
    ) -> None: ...
    def __call__(
        self,
        partial_out: int,
        partial_lse: int,
        out: int,
        out_lse: int,
        seq_lens: int,
        query_start_loc: int,
        stream: int = 0,
    ) -> int: ...
    def run_in_threads(
        self,
        parallel_for: Callable[[int, Callable[[int, int], None]], None],
        partial_out: int,
        partial_lse: int,
        out: int,
        out_lse: int,
        seq_lens: int,
        query_start_loc: int,
    ) -> int: ...

class A2aLseReduceExchange:
    def __init__(
        self,
        *,
        isa: str,
        rank: int,
        geometry: A2aLseReduceGeometry,
        lse_dtype: int,
        lse_base: int,
        num_tokens: int,
        num_seqs: int,
        strides: tuple[int, int, int, int, int, int, int, int],
    ) -> None: ...
    @property
    def num_nonfinite_lse(self) -> int: ...
    def begin(
        self, partial_out: int, partial_lse: int, out: int, out_lse: int, seq_lens: int, query_start_loc: int
    ) -> int: ...
    def pack(self, send: int, first_row: int, num_rows: int) -> None: ...
    def merge(self, receive: int, first_row: int, num_rows: int) -> None: ...
    def discard(self) -> None: ...

class QueryGatherPlan:
    def __init__(
        self,
        *,
        endpoint: Endpoint,
        lane: int,
        stream_idx: int,
        num_local_heads: int,
        max_round_rows: int,
        buffer_offset: int,
        buffer_bytes: int,
        dtype: int,
        source_dtype: int,
        num_tokens: int,
        head_bytes: int,
        parts: list[tuple[int, int, int, int]],
        out: tuple[int, int] | None,
        releases: bool,
    ) -> None: ...
    def __call__(self, parts: list[int], out: int, scale: int, scale_value: float, stream: int = 0) -> int: ...
    def run_in_threads(
        self,
        parallel_for: Callable[[int, Callable[[int, int], None]], None],
        parts: list[int],
        out: int,
        scale: int,
        scale_value: float,
    ) -> int: ...

class KvGatherSource:
    def __init__(
        self,
        *,
        dtype: int,
        block_size: int,
        block_stride: int,
        row_stride: int,
        row_bytes: int,
        source_rows: int,
        final_rows: int,
        num_source_rows: int,
        cache_bytes: int,
    ) -> None: ...

class KvGatherLane:
    def __init__(
        self, *, endpoint: Endpoint, lane: int, stream_idx: int, buffer_offset: int, buffer_bytes: int
    ) -> None: ...
    @property
    def buffer_idx(self) -> int: ...
    def start(self, cache: int, source: KvGatherSource, chunk_idx: int, plan_digest: int, stream: int = 0) -> int: ...
    def start_in_threads(
        self,
        parallel_for: Callable[[int, Callable[[int, int], None]], None],
        cache: int,
        source: KvGatherSource,
        chunk_idx: int,
        plan_digest: int,
    ) -> int: ...
    def wait(
        self,
        chunk_idx: int,
        plan_digest: int,
        num_rows: int,
        out: int,
        out_stride: int,
        scale: int,
        scale_value: float,
        stream: int = 0,
    ) -> int: ...
    def whole(
        self, cache: int, source: KvGatherSource, chunk_idx: int, plan_digest: int, num_rows: int, stream: int = 0
    ) -> int: ...
    def wait_in_threads(
        self,
        parallel_for: Callable[[int, Callable[[int, int], None]], None],
        chunk_idx: int,
        plan_digest: int,
        num_rows: int,
        out: int,
        out_stride: int,
        scale: int,
        scale_value: float,
    ) -> int: ...

def require_device(device: int = 0, isa: str = "auto") -> None: ...
def launch_fault(isa: str = "auto") -> str: ...
def load_kernels(*, wire: int, dtype: int, device: int, isa: str = "auto") -> bool: ...
def query_descriptor(*, lane: int, dtype: int, has_out: bool, num_tokens: int) -> int: ...
def call_digest(descriptor: int) -> int: ...
def release_descriptor(*, lane: int) -> int: ...
def chunk_descriptor(*, lane: int, dtype: int, buffer_idx: int, chunk_idx: int, plan_digest: int) -> int: ...
def call_descriptor(*, op: int, lane: int, dtype: int, lse_base: int, num_tokens: int) -> int: ...
def init_region(base: int, control: ControlLayout, num_ranks: int, start_epoch: int) -> None: ...
def link_check(
    *,
    rank: int,
    bases: list[int],
    bases_table: int,
    multicast: int,
    multicast_view: int,
    offset: int,
    nonce: int,
    timeout_ns: int,
    num_spins: int,
    num_yields: int,
    result: int,
    isa: str,
    stream: int = 0,
    device: int = 0,
) -> int: ...
