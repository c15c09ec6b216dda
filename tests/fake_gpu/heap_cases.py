"""What ranks do in tests of lifetimes, the same for the heaps of all GPUs. `make(group, fake, ...)` makes a heap."""

import gc
import os

from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.testing import run_ranks
from tests.fake_gpu.heap_calls import NBYTES, held, meet, outcome, read, write


def run_over(fake_class, fn, num_ranks, *args, mode="process", **options):
    """`fn(group, fake, *args)` on ranks; thread ranks have one driver, as they are one process."""
    fake = fake_class(**options) if mode == "thread" else None
    return run_ranks(_with_driver, num_ranks, fn, fake_class, fake, options, *args, mode=mode)


def _with_driver(group, fn, fake_class, fake, options, *args):
    return fn(group, fake or fake_class(**options), *args)


def own_memory(group, fake, make):
    before = held(fake)
    heap = make(group, fake)
    memory = heap.own_memory(4096, 100)
    interface = memory.__cuda_array_interface__
    address = heap.bases[heap.rank] + 4096
    assert interface["data"] == (address, False) and interface["shape"] == (100,) and interface["typestr"] == "|u1"
    meet(group)
    heap.close(timeout_s=10)
    meet(group)
    write(address, b"still there")
    assert read(address, 11) == b"still there" and outcome(lambda: heap.own_memory(0, 1))[0] is DcpError
    meet(group)
    del memory
    meet(group)
    assert held(fake) == before


def close_in_turn(group, fake, make):
    heap = make(group, fake)
    bases, rank = heap.bases[:], heap.rank
    for turn in range(heap.num_ranks):
        if rank == turn:
            heap.close(timeout_s=0)
        meet(group)
        if rank > turn:  # what a peer has closed stays mapped for those who have not
            for peer, base in enumerate(bases):
                write(base + 10 + rank, bytes([peer]))
                assert read(base + 10 + rank, 1) == bytes([peer])
            assert heap.read(10 + rank, 1) == bytes([rank]) and heap.lost_peers() == ()
        meet(group)
    return fake.live()


def dropped(group, fake, make):
    before = held(fake)
    heap = make(group, fake)
    meet(group)
    del heap
    gc.collect()
    meet(group)
    assert held(fake) == before


def forked(group, fake, make):
    heap = make(group, fake)
    write(heap.bases[heap.rank], b"mine")
    meet(group)
    if heap.rank == 0:
        if (child := os.fork()) == 0:
            num_calls = len(fake.calls)
            refused = outcome(lambda: heap.read(0, 4))
            heap.close(timeout_s=5)
            os._exit(0 if len(fake.calls) == num_calls and "fork" in refused[1] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    meet(group)
    assert heap.read(0, 4) == b"mine" and heap.lost_peers() == ()
    meet(group)
    heap.close(timeout_s=10)
    return fake.live()


def ranges(group, fake, make):
    heap = make(group, fake)
    for offset, nbytes in ((-1, 2), (0, NBYTES + 1), (NBYTES, 1), (5, -1)):
        for op in (heap.read, heap.own_memory):
            cls, text, _ = outcome(lambda: op(offset, nbytes))  # noqa: B023
            assert cls is DcpInvalidArgument and f"got {nbytes} bytes at {offset}" in text
    heap.close(timeout_s=1)
    assert "closed" in outcome(lambda: heap.read(0, 1))[1]
