"""The baselines of the bench on GPUs: NCCL, and torch's symmetric memory. (torch calls RCCL `nccl` too.)

Nobody has run this on a GPU yet; tests/test_baselines_gpu.py runs it on a CPU, with gloo and with memory files in place
of the two.

All work of a call is enqueued on the current stream, and a graph can hold it. The steps are those of `baselines` and of
the gathers' baselines, with everything allocated beforehand on the device, but for the merge: on a GPU each torch op is
a launch, so here it is few launches and not few passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dcpkernels.cli.baselines import PackedAllToAll
from dcpkernels.cli.exact import all_gather, words_of
from dcpkernels.errors import DcpUnsupported

_NCCL, _SYMMETRIC, _EXCHANGE = "nccl", "symm_mem", "-exchange"
BASELINES = (_NCCL, _NCCL + _EXCHANGE, _SYMMETRIC, _SYMMETRIC + _EXCHANGE)
_BACKEND = "nccl"  # of torch.distributed


def require(names: Sequence[str]) -> dict[str, str]:
    """Versions of the libraries that these need besides torch. Raises DcpUnsupported when one is missing."""
    if not _uses(_NCCL, names):
        return {}
    if not dist.is_nccl_available():
        raise DcpUnsupported(f"bench: baseline nccl must come with a torch that has it (got {torch.__version__})")
    return {_NCCL: ".".join(map(str, torch.cuda.nccl.version()))}


@contextmanager
def opened(
    names: Sequence[str],
    group: dist.ProcessGroup,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
) -> Iterator[dict[str, PackedAllToAll | AlternatingAllToAll]]:
    """In a rank process, collective: the merge's baselines of these names, each with buffers of its own on `device`."""
    shape = (num_tokens, num_heads, head_dim, dtype)
    with _nccl_group(names, group) as nccl:
        with device:  # no longer than that: a default device costs every call of torch some microseconds
            baselines = {
                name: FewLaunches(nccl, *shape) if _uses(_NCCL, [name]) else AlternatingAllToAll(group, *shape)
                for name in names
            }
        yield baselines


@contextmanager
def exchanges(
    names: Sequence[str], group: dist.ProcessGroup
) -> Iterator[dict[str, Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]]]:
    """In a rank process, collective: how the gathers' baselines of these names exchange. Who makes such a baseline does so
    with the GPU as torch's default device (`with device:`): there its tensors are, and its symmetric memory."""
    with _nccl_group(names, group) as nccl:
        yield {
            name: partial(_nccl_all_gather, nccl) if _uses(_NCCL, [name]) else partial(_symmetric_all_gather, group)
            for name in names
        }


def _uses(library: str, names: Sequence[str]) -> bool:
    return any(name.removesuffix(_EXCHANGE) == library for name in names)


@contextmanager
def _nccl_group(names: Sequence[str], group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup | None]:
    """Of the ranks of `group`. It has no device yet: the first call makes the connections."""
    if not _uses(_NCCL, names):
        yield None
        return
    nccl = dist.new_group(dist.get_process_group_ranks(group), backend=_BACKEND)
    try:
        yield nccl
    finally:
        dist.destroy_process_group(nccl)


def _nccl_all_gather(group: dist.ProcessGroup, recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
    # As bytes: NCCL has no integers of 16 bits.
    return partial(all_gather, recv.view(torch.uint8), send.view(torch.uint8), group=group)


class FewLaunches(PackedAllToAll):
    """The merge by one product of all shards in fp32 and one sum. On a CPU that is the slower way, for it writes and
    reads the products; on a GPU they stay in the L2, and the loop over the shards would be 2 * W launches."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_tokens: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        super().__init__(group, num_tokens, num_heads, head_dim, dtype, **options)
        self._products = torch.empty(*self._weight.shape, head_dim)

    def merge(self, out: torch.Tensor) -> None:
        torch.softmax(self._recv_lse, 0, out=self._weight)
        torch.mul(self._recv_payload, self._weight[..., None], out=self._products)
        torch.sum(self._products, 0, out=self._sum)
        out.copy_(self._sum)


class SymmetricBuffer:
    """A tensor on each rank, which all ranks can load: torch's symmetric memory, private to torch up to 2.13 at least.

    It is an allocation of its own, as `heap.torch_symmetric` has it: `symm_mem.empty` may take from a pool, and
    `get_buffer` counts from the beginning of an allocation. (That is the tensor's while pools are not split, as in 2.13.)

    One kernel for the barrier; it orders what was stored before it on one rank before what is loaded after it on another,
    as torch's own all-gather needs it (`_low_contention_all_gather` in torch/distributed/_symmetric_memory).
    """

    def __init__(self, group: dist.ProcessGroup, shape: Sequence[int]) -> None:
        """Collective: uint8, zeros, on torch's default device."""
        symm_mem = _symmetric_memory()
        self.rank, self.num_ranks = group.rank(), group.size()
        own = symm_mem._SymmetricMemory.empty_strided_p2p(
            (math.prod(shape),), (1,), torch.uint8, torch.get_default_device()
        )
        self.own = own.zero_().view(tuple(shape))
        try:
            self._handle = symm_mem.rendezvous(self.own, group)
        except RuntimeError as error:
            raise DcpUnsupported(f"bench: baseline symm_mem must have memory that all ranks reach ({error})") from None

    def of(self, rank: int) -> torch.Tensor:
        """That rank's tensor, as this rank's device loads it."""
        return self._handle.get_buffer(rank, self.own.shape, torch.uint8)

    def barrier(self) -> None:
        self._handle.barrier()


def _symmetric_memory() -> Any:
    import torch.distributed._symmetric_memory as symm_mem  # not with torch.distributed: it registers operators

    return symm_mem


class AlternatingAllToAll:
    """`a2a_lse_reduce` over symmetric memory: pack into the own buffer, barrier, one `cat` that loads this rank's part
    of every rank's buffer, merge. That is one launch where copies to the peers' buffers would be W; which of the two is
    faster between GPUs has not been measured.

    Two buffers take turns, so that one barrier a call is enough: a rank that packs into a buffer again has been let
    through the other one's barrier, and so all ranks have loaded what they need of this one. Calls that do not alternate,
    as in a graph of an odd number of them that is replayed, need a barrier of their caller's in between.

    `exchange`, and what goes with it, is of the first buffer alone: nobody packs between bare exchanges.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self._both = [self._of_one_buffer(group, num_tokens, num_heads, head_dim, dtype) for _ in range(2)]
        self._turns = itertools.cycle(self._both)
        first = self._both[0]
        self.packed, self.exchange, self.received, self.merge = (
            first.packed,
            first.exchange,
            first.received,
            first.merge,
        )

    @staticmethod
    def _of_one_buffer(group: dist.ProcessGroup, *shape: Any) -> FewLaunches:
        buffers = []

        def zeros(*size: int) -> torch.Tensor:
            buffers.append(SymmetricBuffer(group, size))
            return buffers[0].own

        def all_to_all(recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
            buffer = buffers[0]
            return _pull(buffer, recv, [buffer.of(peer)[buffer.rank] for peer in range(buffer.num_ranks)])

        return FewLaunches(group, *shape, zeros=zeros, all_to_all=all_to_all)

    def __call__(self, partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> None:
        """As PackedAllToAll."""
        next(self._turns)(partial_out, partial_lse, out)


def _symmetric_all_gather(group: dist.ProcessGroup, recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
    """Two buffers take turns, as in AlternatingAllToAll: a copy to the own one, a barrier, one `cat`."""
    source = send.view(torch.uint8).view(-1)
    steps = []
    for _ in range(2):
        buffer = SymmetricBuffer(group, source.shape)
        pull = _pull(buffer, recv, [buffer.of(peer) for peer in range(buffer.num_ranks)])
        steps.append((buffer.own, pull))
    turns = itertools.cycle(steps)

    def exchange() -> None:
        own, pull = next(turns)
        own.copy_(source)
        pull()

    return exchange


def _pull(buffer: SymmetricBuffer, recv: torch.Tensor, parts: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Behind a barrier, the ranks' parts one after the other to `recv`."""
    num_bytes = parts[0].numel()
    sources = [words_of(part.view(-1), num_bytes) for part in parts]
    target = words_of(recv.view(torch.uint8).view(-1), num_bytes)

    def pull() -> None:
        buffer.barrier()
        torch.cat(sources, out=target)

    return pull
