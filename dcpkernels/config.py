"""What a workspace is made for, and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from dcpkernels import _check, env
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.region_layout import RegionLayout, engine_rows

WIRES = ("auto", "bulk", "packet")
PACKET_BYTES = (8, 16, 128)
CUDA_HEAPS = ("driver", "torch")
HIP_HANDLES = ("auto", "ipc", "vmm")
# Fields that may differ between ranks.
_LOCAL_FIELDS = ("timeout_s", "first_call_timeout_s", "cpu_isa")


@dataclass(frozen=True)
class WorkspaceConfig:
    """What a workspace is made for. All fields but the timeouts and cpu_isa must be equal on all ranks.

    Args:
        num_heads: query heads of the model, H; those of all ranks together.
        head_dim: elements of one head's partial output, D (512 for MLA's latent).
        max_num_tokens: rows of the usual largest call. Staging is made for one round of rows, and a round has no more
            rows than this, and no more than what a CPU cache holds; a call with more rows takes several rounds.
        dtype: of the partial output: float32, float16 or bfloat16.
        num_lanes: independent streams with their own staging, for micro-batches that run at the same time.
        num_channels: parts of a call that a rank runs side by side: on a CPU in threads of its own
            (`Workspace(parallel_for=...)`), on a GPU one block of threads each. All that may wait at the same time need a
            multiprocessor each: num_channels * num_lanes * ops. None: 1 on a CPU; on a GPU 24 // num_lanes, at least 1.
        zero_copy: peers read partial outputs where they are, in memory of the workspace that `Workspace.partial_out`
            hands out; only LSEs are copied, and each rank holds two buffers [max_num_tokens, num_heads, head_dim] a
            lane. Not with wire="packet".
        wire: "bulk" moves rows, then raises a flag; "packet" puts a flag into every packet, which saves a trip on some
            hardware; "auto" is what is faster on the device: bulk on a CPU. Results are equal in every bit.
        packet_bytes: size of a packet, with wire="packet": 8 (4 bytes of payload), 16 (12) or 128 (120).
        query_head_dim: elements of one head of the query, Dq (576 for MLA: latent and rope), for `query_gather`; 0 = the
            workspace gathers no query.
        query_dtype: the largest type of a gathered query: float32, float16, bfloat16, float8_e4m3fn, e5m2, e4m3fnuz or
            e5m2fnuz. Narrower ones fit too. float8_e4m3fnuz also says what `query_gather` quantises to.
        padded_num_heads: the query's buffer has room for as many rows of so many heads, at least num_heads; 0 =
            num_heads. For consumers that read up to 128 heads of each row: rows of the view have num_heads, and the bytes
            behind the last one exist.
        kv_chunk_rows: rows of the largest chunk of `kv_gather`; 0 = the workspace gathers no KV.
        kv_dim: elements of one row of the KV cache (576 for MLA). Rows have a multiple of 16 bytes.
        kv_dtype: the largest type of a row; as query_dtype.
        multicast: a gathered byte is stored once for all ranks where the device can do that (on a CPU all ranks map one
            physical buffer). False: each rank has buffers of its own, and every rank stores into each of them.
        cuda_heap: whose memory a GPU's regions are: "driver" makes them with the CUDA driver (needs the extra `cuda`),
            "torch" takes torch's symmetric memory, for engines that rendezvous there anyway. NVIDIA only.
        hip_handles: how ranks reach each other's regions on AMD GPUs (needs the extra `hip`): "ipc" by the runtime's
            handles for other processes, "vmm" by descriptors of virtual memory, of ROCm 7 and later; "auto": by the
            first, and where a rank cannot, all by the second.
        timeout_s: seconds that a wait for another rank may take; 0 = for ever. DCPKERNELS_TIMEOUT_S replaces it.
        first_call_timeout_s: the same for the first call of an op on a lane, and for making the workspace: ranks start at
            different times. DCPKERNELS_FIRST_CALL_TIMEOUT_S replaces it.
        cpu_isa: "v4_bf16", "v4", "v3" or "baseline"; None = DCPKERNELS_CPU_ISA, else the best that the processor runs.
            All give the same bits.
        start_epoch: where the 64-bit epochs start, at least 2 in the low 32 bits; for tests of the wrap at 2**32.

    num_channels, zero_copy, wire, packet_bytes and multicast have no effect on the collective backend.

    Raises:
        DcpInvalidArgument: a field has a value outside of these. On this rank, at once. (That heads divide by the ranks
            is checked where the ranks are known: by Workspace and Workspace.size.)
    """

    num_heads: int
    head_dim: int
    max_num_tokens: int
    dtype: torch.dtype = torch.bfloat16
    num_lanes: int = 1
    num_channels: int | None = None
    zero_copy: bool = False
    wire: str = "auto"
    packet_bytes: int = 8
    query_head_dim: int = 0
    query_dtype: torch.dtype = torch.bfloat16
    padded_num_heads: int = 0
    kv_chunk_rows: int = 0
    kv_dim: int = 0
    kv_dtype: torch.dtype = torch.bfloat16
    multicast: bool = True
    cuda_heap: str = "driver"
    hip_handles: str = "auto"
    timeout_s: float = 30.0
    first_call_timeout_s: float = 300.0
    cpu_isa: str | None = None
    start_epoch: int = 3

    def __post_init__(self) -> None:
        for name, allowed in {
            "dtype": _check.DTYPE_CODES,
            "query_dtype": _check.GATHER_DTYPE_CODES,
            "kv_dtype": _check.GATHER_DTYPE_CODES,
        }.items():
            if not isinstance(getattr(self, name), torch.dtype) or getattr(self, name) not in allowed:
                names = ", ".join(_check.name_of(dtype) for dtype in allowed)
                raise DcpInvalidArgument(f"workspace: {name} must be one of {names} (got {getattr(self, name)})")
        for name in ("timeout_s", "first_call_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= env.MAX_TIMEOUT_S:
                most = f"{env.MAX_TIMEOUT_S:.0e}"
                raise DcpInvalidArgument(
                    f"workspace: {name} must be a number of seconds in 0 .. {most} (got {value!r})"
                )
        # What the C++ side holds in 32 and 64 bits.
        limits = {
            "num_heads": (1, 2**31),
            "head_dim": (1, 2**31),
            "max_num_tokens": (1, 2**40),
            "num_lanes": (1, 257),
            **({} if self.num_channels is None else {"num_channels": (1, 1025)}),
            "start_epoch": (1, 2**63),
            "query_head_dim": (0, 2**31),
            "padded_num_heads": (0, 2**31),
            "kv_chunk_rows": (0, 2**31),
            "kv_dim": (0, 2**31),
        }
        for name, (least, limit) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < limit:
                raise DcpInvalidArgument(
                    f"workspace: {name} must be a whole number in {least} .. {limit - 1} (got {value!r})"
                )
        if 0 < self.padded_num_heads < self.num_heads:
            raise DcpInvalidArgument(
                f"workspace: padded_num_heads must be 0 or at least num_heads={self.num_heads} (got {self.padded_num_heads})"
            )
        if (self.kv_chunk_rows > 0) != (self.kv_dim > 0):
            given = f"{self.kv_chunk_rows} and {self.kv_dim}"
            raise DcpInvalidArgument(f"workspace: kv_chunk_rows and kv_dim must be given together (got {given})")
        if self.kv_dim * self.kv_dtype.itemsize % _check.KV_ROW_ALIGNMENT:
            raise DcpInvalidArgument(
                f"workspace: a row of kv_dim elements must have a multiple of {_check.KV_ROW_ALIGNMENT} bytes "
                f"(got {self.kv_dim * self.kv_dtype.itemsize})"
            )
        for name, names in {"wire": WIRES, "cuda_heap": CUDA_HEAPS, "hip_handles": HIP_HANDLES}.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in names:  # an array compares with each of them to an array
                raise DcpInvalidArgument(f"workspace: {name} must be one of {names} (got {value!r})")
        if not isinstance(self.packet_bytes, int) or self.packet_bytes not in PACKET_BYTES:
            raise DcpInvalidArgument(f"workspace: packet_bytes must be one of {PACKET_BYTES} (got {self.packet_bytes!r})")
        for name in ("zero_copy", "multicast"):
            if not isinstance(getattr(self, name), bool):
                raise DcpInvalidArgument(f"workspace: {name} must be True or False (got {getattr(self, name)!r})")
        if self.zero_copy and self.wire == "packet":
            raise DcpInvalidArgument('workspace: zero_copy must not come with wire="packet" (nothing would be sent)')
        if self.cpu_isa is not None and (not isinstance(self.cpu_isa, str) or self.cpu_isa not in env.CPU_ISAS):
            raise DcpInvalidArgument(f"workspace: cpu_isa must be None or one of {env.CPU_ISAS} (got {self.cpu_isa!r})")
        if self.start_epoch % 2**32 < 2:
            raise DcpInvalidArgument(f"workspace: start_epoch must be >= 2 in its low 32 bits (got {self.start_epoch})")

    @classmethod
    def for_engine(
        cls, max_num_seqs: int, draft_tokens: int = 0, *, num_heads: int, head_dim: int, **fields: Any
    ) -> WorkspaceConfig:
        """The configuration for an engine's decode batches: `max_num_seqs` sequences of 1 + `draft_tokens` rows each
        (speculative decoding verifies the drafts with the next token). Other fields as in WorkspaceConfig; num_lanes =
        micro-batches that run at the same time, each of which may hold the whole batch.

        128 sequences with 10 draft tokens: max_num_tokens = 128 * 11 = 1408. Larger calls, as from a mixed batch with
        prefill rows, take several rounds.

        Raises DcpInvalidArgument for a wrong count, or a max_num_tokens among `fields`.
        """
        max_num_tokens = engine_rows(max_num_seqs, draft_tokens)
        if "max_num_tokens" in fields:
            raise DcpInvalidArgument("workspace: max_num_tokens must not be given here (it is max_num_seqs * (1 + draft_tokens))")
        return cls(num_heads, head_dim, max_num_tokens, **fields)

    def region_layout(self, num_ranks: int, device_type: str = "cpu") -> RegionLayout:
        """Where everything lies in each rank's region. Raises DcpInvalidArgument for counts that do not fit together."""
        return RegionLayout.for_device(
            device_type,
            num_ranks=num_ranks,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            max_num_tokens=self.max_num_tokens,
            item_bytes=self.dtype.itemsize,
            num_lanes=self.num_lanes,
            num_channels=self.num_channels,
            zero_copy=self.zero_copy,
            packet_bytes=self.packet_bytes if self.wire == "packet" else 0,
            query_head_bytes=self.query_head_dim * self.query_dtype.itemsize,
            padded_num_heads=self.padded_num_heads,
            kv_chunk_rows=self.kv_chunk_rows,
            kv_row_bytes=self.kv_dim * self.kv_dtype.itemsize,
            multicast=self.multicast,
        )

    @property
    def wire_code(self) -> int:
        """csrc/core/types.h: Wire."""
        if self.zero_copy:
            return 1
        return {8: 2, 16: 3, 128: 4}[self.packet_bytes] if self.wire == "packet" else 0

    @property
    def quantised_dtype(self) -> torch.dtype:
        """What `query_gather` with a scale gives, where no `out` says otherwise."""
        fnuz = torch.float8_e4m3fnuz
        return fnuz if self.query_dtype is fnuz else torch.float8_e4m3fn

    def shared_fields(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name not in _LOCAL_FIELDS}


@dataclass(frozen=True)
class WorkspaceSize:
    """Bytes of one rank's region: `parts` by name, and `total` with the padding between them. The same of the region that
    all ranks of a host share (config.multicast): `shared_parts` and `shared_total`, which exist once and not per rank."""

    parts: dict[str, int]
    total: int
    shared_parts: dict[str, int]
    shared_total: int
