"""Symmetric CUDA memory that torch.distributed allocates and maps, for engines that have a rendezvous there anyway.

The only file that knows `torch.distributed._symmetric_memory`, which is private to torch and changes with it. Setting
up takes these steps. Each ends in a group verdict, so that it succeeds on all ranks or raises the same on all:

1. `check`: same payload, sizes, torch and backend; a torch process group. Nothing is allocated before.
2. `allocate`: a rank without memory shows here, and not inside torch's rendezvous, where the others wait for it.
3. `rendezvous`: torch maps every rank's memory into this process.
4. `fill`: the own region is written, and the writes have arrived. No peer stores to it before all have been here.
5. `check links`: the caller's test of what was mapped.

Three facts about torch (2.13) decide the details:

- `symm_mem.empty` takes from a pool. What goes back to it is still mapped by peers, and its rendezvous is remembered: a
  tensor of the engine's could get memory that a late peer writes, and after a failure a rank that remembers would not
  come to the rendezvous of those that do not. So the region is an allocation of its own, which is gone when dropped.
- `buffer_ptrs` are where the *allocations* start, on which the ranks of a pool may be at different offsets.
- Memory is released after a wait for the device, in a destructor: a driver's error there ends the process.
"""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpTimeout, DcpUnsupported
from dcpkernels.heap.group import Deadline, Group, TorchGroup
from dcpkernels.heap.verdict import agree, attempt, rank_list, require_same

_OP = "workspace"  # the collective call that users know; heads every text
_BACKEND = "CUDA"


@dataclass(frozen=True)
class _Card:
    """What each rank shows the others in step 1."""

    torch: str  # another version of torch has another rendezvous
    payload: dict[str, Any]
    nbytes: int
    control_nbytes: int
    wants_multicast: bool


@dataclass(frozen=True)
class _Mapped:
    """What a rendezvous gave."""

    bases: list[int]
    table: int
    multicast: int  # 0 = torch has none


class _Held:
    """What a rank holds of torch. Apart from TorchSymmetricHeap, so that its finaliser can release it."""

    def __init__(self) -> None:
        self.region: Any = None
        self.handle: Any = None  # its mappings go with it
        self.table: Any = None  # where torch has none
        self.control: Any = None

    def release(self) -> None:
        """Local, waits for the device, may be called again."""
        held = (self.handle, self.table, self.control, self.region)
        if self.region is not None and not _idle(self.region):
            # The device is lost, or a graph is being captured. Freed now, memory would end the process in a destructor.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self.handle = self.table = self.control = self.region = None


def _idle(region: Any) -> bool:
    """Waits until no kernel uses the memory any more; False when the device cannot tell."""
    try:
        if region.is_cuda:
            torch.cuda.synchronize(region.device)
    except RuntimeError:
        return False
    return True


class _Memory:
    """A part of a region for whoever reads `__cuda_array_interface__`; refers to the region."""

    def __init__(self, part: Any) -> None:
        self._part = part
        data = (part.data_ptr(), False)  # not read-only
        self.__cuda_array_interface__ = {"shape": tuple(part.shape), "typestr": "|u1", "data": data, "version": 3}


class TorchSymmetricHeap:
    """One region of CUDA memory per rank. `bases[r]` is where this process' kernels see rank r's region; `nbytes` is
    the size of each. All addresses are integers.

    `multicast`: a multimem store at `multicast + offset` reaches `offset` in every rank's region; 0 = there is none, on
    any rank, and `multicast_reason` says why. `bases_table`: where the device has `bases`, as uint64 [num_ranks].
    `host_control`: `control_nbytes` bytes of pinned host memory, zeroed, which the device reads at the same address.
    `socket_fds` is all -1: torch keeps the ranks' sockets to itself, so nothing here tells of a death.

    Once closed, `bases` is empty and the addresses are 0.
    """

    rank: int
    num_ranks: int
    nbytes: int
    bases: list[int]
    bases_table: int
    multicast: int
    multicast_reason: str
    host_control: int
    socket_fds: list[int]
    mesh = None

    def __init__(self, rank: int, mapped: _Mapped, nbytes: int, multicast_reason: str, held: _Held) -> None:
        """For `create` only."""
        self.rank, self.num_ranks, self.nbytes = rank, len(mapped.bases), nbytes
        self.bases, self.bases_table = mapped.bases, mapped.table
        self.multicast, self.multicast_reason = 0 if multicast_reason else mapped.multicast, multicast_reason
        self.host_control = held.control.data_ptr()
        self.socket_fds = [-1] * self.num_ranks
        self._held = held
        self._finalizer = weakref.finalize(self, held.release)
        # At exit torch leaves device memory to the driver; other threads may still use it.
        self._finalizer.atexit = False

    @classmethod
    def create(
        cls,
        group: Group,
        nbytes: int,
        *,
        device: int,
        control_nbytes: int,
        init: Callable[[int], None],
        payload: dict[str, Any],
        timeout_s: float,
        multicast: bool = True,
        symm_mem: Any = None,
        check_links: Callable[[TorchSymmetricHeap], None] | None = None,
    ) -> TorchSymmetricHeap:
        """Collective. Every rank gets `nbytes` (the same on all) of zeroed memory on its `cuda:device`, mapped by all.

        `init(address)` fills a zeroed host buffer of `control_nbytes`, which becomes the beginning of the own region
        before any other rank writes there. `payload` holds what must be equal on all ranks, as plain data.
        `check_links(heap)` raises when what was mapped is of no use. `multicast=False` on any rank: on none.
        `symm_mem` stands in for torch.distributed._symmetric_memory.

        `timeout_s` bounds the wait for other ranks before torch's rendezvous, and again after it (0 = for ever). The
        rendezvous itself has no deadline of its own, and cannot be interrupted: a rank that dies or fails inside it
        leaves the others there until the group's store gives up (`timeout` of init_process_group), or, where they wait
        for its descriptors, for ever.

        Raises, the same on every rank: DcpUnsupported (payloads or versions differ; no torch process group, or not one
        that torch has a backend for), DcpDeviceError (what torch raised, and what to do), DcpError (another step failed
        on some rank, with its error), DcpTimeout (a rank did not come). Then nothing is left behind.
        """
        held = _Held()
        try:
            arguments = (device, control_nbytes, init, payload, timeout_s, multicast, symm_mem, check_links)
            return cls._create(held, group, nbytes, *arguments)
        except BaseException:
            held.release()
            raise

    @classmethod
    def _create(
        cls,
        held: _Held,
        group: Group,
        nbytes: int,
        device: int,
        control_nbytes: int,
        init: Callable[[int], None],
        payload: dict[str, Any],
        timeout_s: float,
        multicast: bool,
        symm_mem: Any,
        check_links: Callable[[TorchSymmetricHeap], None] | None,
    ) -> TorchSymmetricHeap:
        rank, num_ranks, deadline = group.rank, group.num_ranks, Deadline(timeout_s)
        place = f"cuda:{device}"

        def check() -> _Card:
            nonlocal symm_mem
            if nbytes <= 0:
                raise DcpInvalidArgument(f"nbytes must be positive (got {nbytes})")
            if not 0 < control_nbytes <= nbytes:
                raise DcpInvalidArgument(f"control_nbytes must be in 1 .. nbytes={nbytes} (got {control_nbytes})")
            if not isinstance(group, TorchGroup):
                got = type(group).__name__
                raise DcpUnsupported(f"torch's symmetric memory needs a torch process group (got {got})")
            if symm_mem is None:
                import torch.distributed._symmetric_memory as symm_mem
            if (backend := symm_mem.get_backend(torch.device(place))) != _BACKEND:
                # NCCL's keeps freed memory registered; NVSHMEM's allocates and frees in collectives without a deadline.
                rule = f"torch's symmetric memory on {place} must be of the backend {_BACKEND}"
                raise DcpUnsupported(f"{rule} (got {backend}; symm_mem.set_backend chooses it, before any use)")
            return _Card(torch.__version__, payload, nbytes, control_nbytes, multicast)

        card, error = attempt(check)
        cards = agree(group, f"{_OP}: check", card, error, timeout_s=deadline.for_call())
        require_same(_OP, [{"torch": card.torch} for card in cards])
        require_same(_OP, [card.payload for card in cards])
        require_same(_OP, [{"nbytes": card.nbytes, "control_nbytes": card.control_nbytes} for card in cards])

        def allocate() -> None:
            held.region = symm_mem._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, torch.device(place))
            held.control = torch.zeros(control_nbytes, dtype=torch.uint8, pin_memory=held.region.is_cuda)

        what = f"torch must allocate {nbytes} bytes of symmetric memory on {place}, {control_nbytes} of the host"
        _, error = attempt(lambda: _in_torch(allocate, what, "free memory there, or make the workspace smaller"))
        agree(group, f"{_OP}: allocate", error=error, timeout_s=deadline.for_call())

        def rendezvous() -> _Mapped:
            process_group = group.process_group if group.process_group is not None else dist.group.WORLD
            held.handle = symm_mem.rendezvous(held.region, process_group)
            bases, table = _bases(held, rank, num_ranks), int(held.handle.buffer_ptrs_dev)
            if table == 0:
                held.table = torch.tensor(bases, dtype=torch.int64, device=held.region.device)
                table = held.table.data_ptr()
            return _Mapped(bases, table, int(held.handle.multicast_ptr))

        what = f"torch must map the memory of all {num_ranks} ranks"
        todo = (
            "ranks need a GPU each, NVLink or PCIe peer access between all of them (nvidia-smi topo -p2p r), and one "
            "container with a /tmp and process numbers in common, or fabric handles (IMEX)"
        )
        mapped, error = attempt(lambda: _in_torch(rendezvous, what, todo))
        deadline = Deadline(timeout_s)  # torch took as long as it took
        found = error is None and mapped.multicast != 0
        founds = agree(group, f"{_OP}: rendezvous", found, error, timeout_s=deadline.for_call())

        control = torch.zeros(control_nbytes, dtype=torch.uint8)

        def fill() -> None:
            held.region.zero_()
            held.region[:control_nbytes].copy_(control)
            if held.region.is_cuda:  # a peer's first store comes by another way than this stream
                torch.cuda.synchronize(held.region.device)

        def initialise() -> None:
            init(control.data_ptr())
            _in_torch(fill, f"torch must write the region on {place}", "an error of earlier work may show only now")

        _, error = attempt(initialise)
        agree(group, f"{_OP}: fill", error=error, timeout_s=deadline.for_call())

        heap = cls(rank, mapped, nbytes, _why_not([card.wants_multicast for card in cards], founds), held)
        _, error = attempt(lambda: check_links(heap) if check_links is not None else None)
        try:
            agree(group, f"{_OP}: check links", error=error, timeout_s=deadline.for_call())
        except BaseException:
            heap.close(timeout_s=0)
            raise
        return heap

    def own_memory(self, offset: int, nbytes: int) -> Any:
        """A part of this rank's region as an object with `__cuda_array_interface__` (uint8), which stays allocated as
        long as the object is referred to: of a tensor made from it, `torch.as_tensor` sees to that."""
        return _Memory(self._part("own_memory", offset, nbytes))

    def read(self, offset: int, nbytes: int, rank: int | None = None) -> bytes:
        """A copy of a part of this rank's region. Waits for no kernel. Of another rank's there is none: b""."""
        if rank not in (None, self.rank):
            return b""
        part = self._part("read", offset, nbytes)
        if not part.is_cuda:
            return part.numpy().tobytes()
        with torch.cuda.stream(torch.cuda.Stream(part.device)):  # the caller's may wait for a peer
            return part.cpu().numpy().tobytes()

    def lost_peers(self) -> tuple[int, ...]:
        """None that is known of: see `socket_fds`."""
        return ()

    def hang_up(self) -> None:
        """There is nothing by which peers could hear of it."""

    def close(self, *, timeout_s: float) -> None:
        """Waits for the device, so for kernels that still wait for a peer, and releases everything.

        May be called again. Waits for no other rank, whatever `timeout_s`: a peer that still uses this rank's region
        does so through its own mapping, which keeps the memory.
        """
        self.bases.clear()  # nobody can find an address that is about to be unmapped
        self.bases_table = self.multicast = self.host_control = 0
        self._finalizer()

    def _part(self, op: str, offset: int, nbytes: int) -> Any:
        if self._held.region is None:
            raise DcpError(f"{op}: the heap must be open (it was closed)")
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            rule = f"offset and nbytes must be a part of the region's {self.nbytes} bytes"
            raise DcpInvalidArgument(f"{op}: {rule} (got {offset}, {nbytes})")
        return self._held.region[offset : offset + nbytes]


def _in_torch(step: Callable[[], Any], what: str, todo: str) -> Any:
    """A step that torch does; its errors say no more than which call failed."""
    try:
        return step()
    except DcpError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # torch's refer to the region as long as anybody keeps the error
        if isinstance(error, dist.DistStoreError):
            # A rank that did not come, most of the time because of its own error, which is then the one to be raised.
            raise DcpTimeout(f"{what} (the group's store: {error})") from error
        raise DcpDeviceError(f"{what} ({type(error).__name__}: {error}); {todo}") from error


def _bases(held: _Held, rank: int, num_ranks: int) -> list[int]:
    """The regions' addresses. Raises DcpUnsupported for a handle that does not mean what is written above."""
    # No reference to the handle in a local: an error that is kept would keep it.
    if held.handle is None:
        raise DcpUnsupported("torch must know the tensor as symmetric memory (its rendezvous returned None)")
    if (int(held.handle.rank), int(held.handle.world_size)) != (rank, num_ranks):
        got = f"rank {held.handle.rank} of {held.handle.world_size}"
        raise DcpUnsupported(f"torch's rendezvous must be one of rank {rank} of {num_ranks} (got {got})")
    bases = [int(base) for base in held.handle.buffer_ptrs]
    missing = [peer for peer in range(num_ranks) if peer >= len(bases) or bases[peer] == 0]
    if missing:
        rule = "every rank's region must be where kernels can load and store"
        raise DcpUnsupported(f"{rule} (torch has no address for {rank_list(missing)})", ranks=missing)
    if bases[rank] != held.region.data_ptr():
        got = f"buffer_ptrs[{rank}]={bases[rank]:#x}, region {held.region.data_ptr():#x}"
        raise DcpUnsupported(f"the region must be where its allocation starts (got {got})")
    return bases


def _why_not(wanted: list[bool], found: list[bool]) -> str:
    """Why there is no multicast, "" when there is: the same on every rank, since one that has none gets no stores."""
    refusing = [rank for rank, wants in enumerate(wanted) if not wants]
    lacking = [rank for rank, has in enumerate(found) if not has]
    if refusing:
        return f"not asked for on {rank_list(refusing)}"
    if lacking:
        return f"torch found none on {rank_list(lacking)}: all ranks must be on one NVSwitch, with a driver that has it"
    return ""
