"""A stand-in for torch.distributed._symmetric_memory on machines without a GPU: its tensors are of the CPU, over memory
files that the ranks' processes map. It does what torch 2.13 does as far as TorchSymmetricHeap can tell: memory comes
dirty; the rendezvous goes through the group's store, and whoever misses a rank there hears of it from the store alone;
`buffer_ptrs` are the beginnings of allocations; an allocation is freed with its last tensor and handle.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "fake-symm-mem"
DIRT = 0xA5
MULTICAST = 0x7EEE_0000_0000  # nothing is there; each rank has another one
_STORE_S = 1.0


class _Block(mmap.mmap):
    """An allocation, or a mapping of another rank's. Unmapped when nothing refers to it."""

    file = -1

    @classmethod
    def new(cls, nbytes: int) -> _Block:
        file = os.memfd_create(NAME)
        os.ftruncate(file, nbytes)
        block = cls(file, nbytes)
        block.file = file
        weakref.finalize(block, os.close, file)
        block[:] = bytes([DIRT]) * nbytes
        return block

    @classmethod
    def of(cls, path: str, nbytes: int) -> _Block:
        with open(path, "r+b") as file:
            return cls(file.fileno(), nbytes)

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class FakeSymmMem:
    """One rank's module. `faults` has what goes wrong on this rank: names of methods, or of odd answers (below)."""

    def __init__(self, *faults: str, multicast: bool = False, pooled: int = 0) -> None:
        self.faults, self.multicast, self.pooled = set(faults), multicast, pooled
        self.asked: list[Any] = []
        self._SymmetricMemory = self  # torch has the functions in a class of this name
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._num_rendezvous = 0

    def allocations(self) -> list[int]:
        """Where they are."""
        return list(self._blocks)

    def _may_fail(self, what: str) -> None:
        if what in self.faults:
            raise RuntimeError(f"CUDA driver error: {what} is not what it was")

    def get_backend(self, device: Any) -> str | None:
        self._may_fail("get_backend")
        return "NVSHMEM" if "backend" in self.faults else "CUDA"

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any) -> Any:
        self.asked.append((tuple(size), tuple(stride), dtype, device))
        self._may_fail("empty_strided_p2p")
        block = _Block.new(size[0] + self.pooled)
        with torch.inference_mode("write" in self.faults):  # torch refuses to write to such a tensor outside of it
            whole = torch.frombuffer(block, dtype=dtype)
        self._blocks[whole.data_ptr()] = block
        return whole[self.pooled :]

    def rendezvous(self, tensor: Any, group: Any) -> Any:
        self._may_fail("rendezvous, before it")
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        time.sleep("slow rendezvous" in self.faults)
        if "no such tensor" in self.faults:
            return None
        start = tensor.data_ptr() - self.pooled
        block, self._num_rendezvous = self._blocks[start], self._num_rendezvous + 1
        store = dist.PrefixStore(f"{NAME}/{self._num_rendezvous}", dist.distributed_c10d._get_default_store())
        paths = self._exchange(store, rank, num_ranks, f"/proc/{os.getpid()}/fd/{block.file}")
        mapped = {peer: _Block.of(path, len(block)) for peer, path in enumerate(paths) if peer != rank}
        # Nobody goes on, and frees, before all have mapped.
        self._exchange(store, rank, num_ranks, "mapped")
        self._may_fail("rendezvous, at its end")
        bases = [start if peer == rank else mapped[peer].address() for peer in range(num_ranks)]
        table = (ctypes.c_uint64 * num_ranks)(*bases)
        if "an address less" in self.faults:
            bases.pop()
        if "no address of rank 1" in self.faults:
            bases[1] = 0
        return SimpleNamespace(
            rank=rank + ("another rank" in self.faults),
            world_size=num_ranks,
            buffer_ptrs=bases,
            buffer_ptrs_dev=0 if "no table" in self.faults else ctypes.addressof(table),
            multicast_ptr=MULTICAST + rank if self.multicast else 0,
            keeps=(block, mapped, table),
        )

    def _exchange(self, store: Any, rank: int, num_ranks: int, text: str) -> list[str]:
        step = "mapped" if text == "mapped" else "path"
        keys = [f"{step}/{peer}" for peer in range(num_ranks)]
        store.set(keys[rank], text)
        try:
            store.wait(keys, timedelta(seconds=_STORE_S))
        except RuntimeError as error:  # as TCPStore has it; this one is of files
            raise dist.DistStoreError(f"wait timeout after {_STORE_S:g} s, keys: {keys}") from error
        return [store.get(key).decode() for key in keys]
