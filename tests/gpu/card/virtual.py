"""W virtual ranks of one process: regions, streams, and the ops' parameters. On a device a region is plain memory of
it; in a dry run the host's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dcpkernels import _check
from dcpkernels.region_layout import RegionLayout

DTYPES = _check.GATHER_DTYPE_CODES  # csrc/core/types.h: DType
WIRES = {"push": 0, "pull": 1, "packet8": 2, "packet16": 3, "packet128": 4}  # Wire
FAULTS = ("none", "timeout", "mismatch", "peer lost", "interrupted", "query open", "query rows", "chunk turn")
LSE_BASES = {"e": 0, "2": 1}
OP_QUERY, OP_RELEASE, OP_KV = 2, 3, 4


@dataclass(frozen=True)
class Layout(RegionLayout):
    """With rounds as large as a test wants them: the package's are as large as a CPU's cache."""

    round_rows: int = 0

    @property
    def max_round_rows(self) -> int:
        return self.round_rows or super().max_round_rows


class Faulted(AssertionError):
    """A wait did not end as it should; the text has every rank's fault record."""


class Ranks:
    """The regions of W ranks and a stream for each.

    ext: the compiled module. device: "cuda" or, in a dry run, "cpu". The other arguments are those of `Layout`; wire: a
    key of WIRES. timeout_s: of every wait; short, because a kernel that waits in vain holds up all that comes after it.
    num_regions: 1 where one rank alone runs, and its peers need no memory.
    """

    def __init__(
        self,
        ext: ModuleType,
        device: str,
        num_ranks: int,
        *,
        num_heads: int,
        head_dim: int,
        max_num_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        wire: str = "push",
        num_channels: int = 4,
        round_rows: int = 0,
        start_epoch: int = 3,
        timeout_s: float = 5.0,
        streams: Sequence[int] | None = None,
        num_regions: int = 0,
        **gathers: int,
    ) -> None:
        self.ext, self.device, self.num_ranks = ext, device, num_ranks
        self.num_heads, self.head_dim, self.dtype, self.wire = num_heads, head_dim, dtype, wire
        self.layout = layout = Layout(
            num_ranks, num_heads, head_dim, max_num_tokens, dtype.itemsize, 1, num_channels,
            zero_copy=wire == "pull", packet_bytes=int(wire[6:]) if wire.startswith("packet") else 0,
            round_rows=round_rows or max_num_tokens, **gathers,
        )  # fmt: skip
        self.parts = layout.parts
        self.control = control = ext.ControlLayout()
        control.fault_offset = self.parts["fault"].offset
        control.streams_offset, control.stream_bytes = self.parts["streams"].offset, layout.stream_bytes
        control.flags_offset, control.flags_bytes = self.parts["flags"].offset, layout.flags_bytes
        control.num_streams, control.num_channels = layout.num_streams, layout.num_channels
        self.wait = ext.WaitPolicy()
        self.wait.timeout_ns = self.wait.first_timeout_ns = int(timeout_s * 1e9)
        self.wait.num_spins = 1000 if device == "cuda" else 0
        # Staging starts as NaN: a row that is read before it was written shows.
        fresh = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
        ext.init_region(fresh.data_ptr(), control, num_ranks, start_epoch)
        regions = [fresh.to(device, copy=True) for _ in range(num_regions or num_ranks)]
        self.regions = [regions[rank % len(regions)] for rank in range(num_ranks)]
        self.bases = torch.tensor([region.data_ptr() for region in self.regions], dtype=torch.int64).to(device)
        self._streams = [torch.cuda.Stream() for _ in range(num_ranks)] if device == "cuda" and streams is None else []
        self.streams = list(streams) if streams else [stream.cuda_stream for stream in self._streams] or [0] * num_ranks
        self.kept: list[Any] = []  # what parameters point to
        self.synchronize()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, for as long as these ranks."""
        self.kept.append(tensor.to(self.device))
        return self.kept[-1]

    # -- running

    def run(self, *steps: Any, num_rounds: int = 1, one_grid: bool = False) -> None:
        """Every rank makes the steps. Returns when all have, or raises Faulted."""
        if one_grid:
            for _ in range(num_rounds):
                for step in steps:
                    status = step.run_one_grid(self.streams[0])
                    assert status == 0, f"one grid: status {status}"
            statuses = [0] * self.num_ranks
        else:
            statuses = self.ext.repeat(list(steps), self.streams, num_rounds)
        self.synchronize()
        self.require_no_fault(statuses)

    def faults(self) -> list[str]:
        """Of each rank, "" when there is none."""
        first = self.parts["fault"].offset
        texts = []
        for region in self.regions:
            words = region[first : first + 64].cpu().view(torch.int64).tolist()
            poison = words[0] & (2**64 - 1)
            kind, reporter = poison >> 56, poison >> 48 & 0xFF
            name = FAULTS[kind] if kind < len(FAULTS) else str(kind)
            record = f" ranks {words[2]:#x} epoch {words[4]} waited {words[7] / 1e9:.2f} s" if words[1] else ""
            texts.append(f"{name}, reported by rank {reporter};{record}" if poison else "")
        return texts

    def require_no_fault(self, statuses: Sequence[int]) -> None:
        faults = self.faults()
        if any(faults) or any(statuses):
            texts = [
                f"rank {r}: status {s}, {f or 'no fault'}"
                for r, (s, f) in enumerate(zip(statuses, faults, strict=True))
            ]
            raise Faulted("; ".join(texts))

    def stream_word(self, rank: int, op: str, offset: int) -> int:
        """The address of a word of the op's StreamState in the rank's region."""
        at = self.parts["streams"].offset + self.layout.stream_bytes * self.layout.stream_idx(op, 0)
        return self.regions[rank].data_ptr() + at + offset

    def nonfinite(self, rank: int) -> int:
        at = self.stream_word(rank, "a2a_lse_reduce", self.ext.NONFINITE_OFFSET) - self.regions[rank].data_ptr()
        return int(self.regions[rank][at : at + 8].cpu().view(torch.int64))

    # -- parameters

    def symm(self, rank: int) -> Any:
        symm = self.ext.SymmView()
        symm.bases, symm.rank, symm.num_ranks = self.bases.data_ptr(), rank, self.num_ranks
        return symm

    def _staging(self, part: str, row_bytes: int) -> Any:
        staging = self.ext.StagingLayout()
        staging.offset, staging.row_bytes = self.parts[part].offset, row_bytes
        staging.num_rows = self.layout.max_round_rows
        return staging

    def a2a_params(
        self,
        rank: int,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        out: torch.Tensor,
        out_lse: torch.Tensor | None,
        *,
        lse_base: str = "e",
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        buffer_idx: int = 0,
    ) -> Any:
        """Of one rank's call. The tensors lie on the device, and stay there while the parameters are used."""
        layout, p = self.layout, self.ext.A2aParams()
        p.partial_out, p.partial_lse, p.out = partial_out.data_ptr(), partial_lse.data_ptr(), out.data_ptr()
        p.partial_out_token_stride, p.partial_out_head_stride = partial_out.stride()[:2]
        p.partial_lse_token_stride, p.partial_lse_head_stride = partial_lse.stride()
        p.out_token_stride, p.out_head_stride = out.stride()[:2]
        if out_lse is not None:
            p.out_lse = out_lse.data_ptr()
            p.out_lse_token_stride, p.out_lse_head_stride = out_lse.stride()
        p.num_seqs = -1
        if query_start_loc is not None:
            p.seq_lens, p.query_start_loc = seq_lens.data_ptr(), query_start_loc.data_ptr()
            p.num_seqs = len(seq_lens)
        p.num_tokens, p.lse_dtype, p.lse_base = len(partial_out), DTYPES[partial_lse.dtype], LSE_BASES[lse_base]
        p.num_nonfinite_lse = self.stream_word(rank, "a2a_lse_reduce", self.ext.NONFINITE_OFFSET)
        p.wire, p.dtype = WIRES[self.wire], DTYPES[self.dtype]
        p.num_local_heads, p.head_dim = layout.num_local_heads, self.head_dim
        p.max_round_rows = layout.max_round_rows
        p.staging = self._staging("a2a_lse_reduce.staging", layout.staging_row_bytes)
        p.unpacked = p.staging
        if layout.packet_bytes:
            p.unpacked = self._staging("a2a_lse_reduce.unpacked", layout.plain_row_bytes)
        p.lse_in_row = layout.lse_in_row
        p.buffer_offset, p.buffer_bytes = self.parts["a2a_lse_reduce.partial_out"].offset, layout.buffer_bytes
        p.copies_to_buffer, p.buffer_idx = self.wire == "pull", buffer_idx
        p.stream_idx = layout.stream_idx("a2a_lse_reduce", 0)
        p.query_stream_idx = layout.stream_idx("query_gather", 0) if "query_gather" in layout.ops else -1
        p.symm, p.control, p.wait = self.symm(rank), self.control, self.wait
        return p

    def query_params(
        self,
        rank: int,
        parts: Sequence[torch.Tensor],
        *,
        num_tokens: int | None = None,
        out: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        to: torch.dtype = torch.float8_e4m3fn,
    ) -> Any:
        """Of one rank's query_gather; without parts, of its release_query. `scale`: fp32 on the device, `to` its format."""
        layout, p = self.layout, self.ext.QueryParams()
        source = parts[0].dtype if parts else self.dtype
        size = 1 if scale is not None else source.itemsize
        p.num_parts, p.releases, p.quantises, p.has_units = len(parts), not parts, scale is not None, True
        p.source_dtype = DTYPES[source] if scale is not None else 0
        p.dtype = DTYPES[to] if scale is not None else DTYPES[source]
        p.num_tokens = len(parts[0]) if parts else 0
        offset = 0
        for i, part in enumerate(parts):
            token_stride, head_stride = (stride * part.element_size() for stride in part.stride()[:2])
            p.set_part(i, part.data_ptr(), token_stride, head_stride, part.shape[2] * part.element_size(), offset)
            p.has_units = p.has_units and offset % 16 == 0
            offset += part.shape[2] * size
        p.head_bytes = offset
        p.has_units = p.has_units and offset % 16 == 0
        if scale is not None:
            p.scale = scale.data_ptr()
        if out is not None:
            p.out = out.data_ptr() or 1  # one without rows has no memory, and is wanted all the same
            p.out_token_stride, p.out_head_stride = (stride * out.element_size() for stride in out.stride()[:2])
        p.num_local_heads, p.max_round_rows = layout.num_local_heads, layout.max_num_tokens
        p.buffer_offset = layout.gather_parts["query_gather.buffer"].offset
        p.stream_idx = layout.stream_idx("query_gather", 0)
        p.symm = p.buffers = p.publish_to = self.symm(rank)
        p.control, p.wait = self.control, self.wait
        return p

    def gathered_query(self, rank: int, num_tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The view that a caller would get."""
        first = self.layout.gather_parts["query_gather.buffer"].offset
        return self._view(rank, first, (num_tokens, self.num_heads, head_dim), dtype)

    def kv_params(
        self, rank: int, plan: Any, chunk_idx: int, turn: int, cache: torch.Tensor, *,
        out: torch.Tensor | None = None, scale: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Of one rank's kv_gather, start and wait alike. turn: how many chunks were gathered before on these ranks."""
        layout, p = self.layout, self.ext.KvParams()
        source_rows = self.keep(torch.tensor(plan.source_rows(chunk_idx)))
        final_rows = self.keep(torch.tensor(plan.final_rows(chunk_idx)))
        size = cache.element_size()
        p.cache, p.block_size = cache.data_ptr(), cache.shape[1]
        p.block_stride, p.row_stride = cache.stride(0) * size, cache.stride(1) * size
        p.source_rows, p.final_rows, p.num_source_rows = source_rows.data_ptr(), final_rows.data_ptr(), len(source_rows)
        if out is not None:
            p.out, p.out_stride, p.scale = out.data_ptr(), out.stride(0) * out.element_size(), scale.data_ptr()
        p.num_rows, p.row_bytes = plan.num_rows(chunk_idx), cache.shape[2] * size
        p.buffer_idx, p.dtype = turn % 2, DTYPES[cache.dtype]
        # csrc/core/digest.h: chunk_descriptor
        p.call = OP_KV << 56 | (p.dtype << 1 | p.buffer_idx) << 44 | (chunk_idx & 0xFFF) << 32 | plan.digest
        p.buffer_offset, p.buffer_bytes = layout.gather_parts["kv_gather.buffers"].offset, layout.kv_buffer_bytes
        p.stream_idx = layout.stream_idx("kv_gather", 0)
        p.symm = p.buffers = self.symm(rank)
        p.control, p.wait = self.control, self.wait
        return p

    def chunk(self, rank: int, turn: int, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        first = self.layout.gather_parts["kv_gather.buffers"].offset + turn % 2 * self.layout.kv_buffer_bytes
        return self._view(rank, first, (num_rows, dim), dtype)

    def _view(self, rank: int, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.regions[rank][first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass
class Merge:
    """A call of a2a_lse_reduce on all ranks: [W, T, H, D], [W, T, H]; lengths [W, S] and starts [S + 1]."""

    outs: torch.Tensor
    lses: torch.Tensor
    lse_base: str = "e"
    seq_lens: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None

    def lengths(self) -> dict[str, Any]:
        return {"seq_lens": self.seq_lens, "query_start_loc": self.query_start_loc}


class MergeCall:
    """The tensors of a `Merge` on the device, its outputs, and the step that makes it."""

    def __init__(self, ranks: Ranks, merge: Merge, *, turn: int = 0) -> None:
        device, num_local_heads = ranks.device, ranks.layout.num_local_heads
        num_ranks, num_tokens, _, head_dim = merge.outs.shape
        self.ranks, self.merge = ranks, merge
        self.outs, self.lses = merge.outs.to(device, copy=True), merge.lses.to(device, copy=True)
        # Poisoned: an element that nobody writes shows.
        nan = float("nan")
        self.out = torch.full((num_ranks, num_tokens, num_local_heads, head_dim), nan, dtype=ranks.dtype, device=device)
        self.lse = torch.full((num_ranks, num_tokens, num_local_heads), nan, device=device)
        seq_lens, starts = (None if t is None else t.int().to(device) for t in (merge.seq_lens, merge.query_start_loc))
        self._lengths = seq_lens, starts
        self.params = [
            ranks.a2a_params(
                rank, self.outs[rank], self.lses[rank], self.out[rank], self.lse[rank], lse_base=merge.lse_base,
                seq_lens=None if seq_lens is None else seq_lens[rank], query_start_loc=starts, buffer_idx=turn % 2,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        self.step = ranks.ext.a2a_step(self.params)
        ranks.synchronize()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H, D] and [T, H]: the heads of all ranks put together."""
        return torch.cat(tuple(self.out), 1), torch.cat(tuple(self.lse), 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))
