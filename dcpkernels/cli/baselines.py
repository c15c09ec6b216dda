"""What an engine runs without this library: pack, all-to-all, merge, by torch.distributed or MPI and torch ops.

Frozen: it is the yardstick of every number that this repository shows. Everything is allocated beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from dcpkernels.cli import openmpi

_OPENMPI = "openmpi"
_EXCHANGE = "-exchange"  # at the end of a name: the all-to-all alone, of what has been packed before
BASELINES = ("gloo", "gloo-exchange", _OPENMPI, _OPENMPI + _EXCHANGE)


def uses_openmpi(names: Sequence[str]) -> bool:
    return any(name.removesuffix(_EXCHANGE) == _OPENMPI for name in names)


def require(names: Sequence[str]) -> dict[str, str]:
    """Versions of the libraries that these need besides torch. Raises DcpUnsupported when one is missing."""
    from dcpkernels.cli import baselines_gpu  # which is made of this module

    return ({"mpi": openmpi.require()} if uses_openmpi(names) else {}) | baselines_gpu.require(names)


def is_exchange(name: str) -> bool:
    """Whether only the all-to-all is timed, which is less than the op."""
    return name.endswith(_EXCHANGE)


@contextmanager
def opened(
    names: Sequence[str],
    group: dist.ProcessGroup,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    mpi_job: str | None,
    device: torch.device | None = None,
) -> Iterator[dict[str, PackedAllToAll]]:
    """In a rank process: the baselines of these names, each with buffers of its own on `device`, by default the CPU.
    `mpi_job` is of `openmpi.job`."""
    if device is not None and device.type != "cpu":
        from dcpkernels.cli import baselines_gpu

        with baselines_gpu.opened(names, group, num_tokens, num_heads, head_dim, dtype, device=device) as others:
            yield others
        return
    mpi = openmpi.joined(mpi_job, group.rank(), group.size()) if mpi_job is not None else nullcontext()
    with mpi as comm:
        yield {
            name: PackedAllToAll(
                group,
                num_tokens,
                num_heads,
                head_dim,
                dtype,
                all_to_all=partial(openmpi.all_to_all, comm) if uses_openmpi([name]) else None,
            )
            for name in names
        }


_ALIGNMENT = 8  # of a peer's part of the buffer, so that its LSEs can be seen as fp32


class PackedAllToAll:
    """`a2a_lse_reduce` as one `all_to_all_single` of a packed buffer, and a merge in fp32 with torch ops.

    A peer's part of the buffer is its heads' payload [T, Hr, D] and behind that their LSEs [T, Hr] in fp32, so that one
    collective moves both and both are contiguous. Natural-log LSEs. With one rank as with many.

    Args:
        group: a torch.distributed group that can do all_to_all_single (gloo here).
        all_to_all: makes, of the tensors (recv, send), what exchanges them. Default: `group`'s all_to_all_single.
        zeros: makes the uint8 tensor that is sent, of its sizes. Default: where all else is, on torch's default device.
        empty_rows: int64 [n], the rows that are empty on this rank. Known per batch, as in an engine; their payload may
            be NaN, so it is replaced by 0 and the LSE by -inf. A row that is empty on all ranks comes out as NaN.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_tokens: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        all_to_all: Callable[[torch.Tensor, torch.Tensor], Callable[[], object]] | None = None,
        zeros: Callable[[int, int], torch.Tensor] | None = None,
        empty_rows: torch.Tensor | None = None,
    ) -> None:
        self._num_ranks = num_ranks = group.size()
        num_local_heads = num_heads // num_ranks
        self._heads = (num_tokens, num_ranks, num_local_heads)
        payload_bytes = num_tokens * num_local_heads * head_dim * dtype.itemsize
        lse_offset = -(-payload_bytes // _ALIGNMENT) * _ALIGNMENT
        part_bytes = -(-(lse_offset + num_tokens * num_local_heads * 4) // _ALIGNMENT) * _ALIGNMENT

        def views(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            payload = buffer[:, :payload_bytes].view(dtype).view(num_ranks, num_tokens, num_local_heads, head_dim)
            lse = buffer[:, lse_offset : lse_offset + num_tokens * num_local_heads * 4].view(torch.float32)
            return payload, lse.view(num_ranks, num_tokens, num_local_heads)

        self.packed = (
            zeros(num_ranks, part_bytes) if zeros is not None else torch.zeros(num_ranks, part_bytes, dtype=torch.uint8)
        )
        self._recv = torch.zeros_like(self.packed)
        self._send_payload, self._send_lse = views(self.packed)
        self._recv_payload, self._recv_lse = views(self._recv)
        self._weight = torch.empty(num_ranks, num_tokens, num_local_heads)
        self._shard = torch.empty(num_tokens, num_local_heads, head_dim)
        self._sum = torch.empty_like(self._shard)
        self._empty_rows = empty_rows if empty_rows is not None and len(empty_rows) else None
        self.exchange = (
            all_to_all(self._recv, self.packed)
            if all_to_all is not None
            else partial(dist.all_to_all_single, self._recv, self.packed, group=group)
        )

    @property
    def received(self) -> torch.Tensor:
        """uint8 [W, .]: of each peer what `packed` has for this rank, after an exchange."""
        return self._recv

    def __call__(self, partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> None:
        """partial_out [T, H, D] and partial_lse [T, H] to out [T, Hr, D], all contiguous."""
        self.pack(partial_out, partial_lse)
        self.exchange()
        self.merge(out)

    def pack(self, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        self._send_payload.copy_(partial_out.view(*self._heads, -1).transpose(0, 1))
        self._send_lse.copy_(partial_lse.view(self._heads).transpose(0, 1))
        if self._empty_rows is not None:
            self._send_payload.index_fill_(1, self._empty_rows, 0.0)
            self._send_lse.index_fill_(1, self._empty_rows, float("-inf"))

    def merge(self, out: torch.Tensor) -> None:
        torch.softmax(self._recv_lse, 0, out=self._weight)
        # Five ways were timed for 2 and 8 ranks and 1, 8 and 64 rows. This one is the fastest at 64 rows and at most a
        # sixth behind the best elsewhere. Relative to it: all shards to fp32 first, then addcmul, 0.95 to 1.4; addcmul
        # straight from the 16-bit payload 1.0 to 1.1; one product of everything in fp32 and a sum 0.86 to 2.0; the
        # same by type promotion 1.04 to 3; bmm with the weights 2.5 to 10.
        for i in range(self._num_ranks):
            self._shard.copy_(self._recv_payload[i])
            weight = self._weight[i, ..., None]
            if i == 0:
                torch.mul(self._shard, weight, out=self._sum)
            else:
                self._sum.addcmul_(self._shard, weight)
        out.copy_(self._sum)
