"""What ranks do in tests of lifetimes, the same for the heaps of all GPUs. `make(group, fake, ...)` makes a heap."""

import gc
import os
from unittest import mock

import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.heap import gpu_later
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


# ---- captures of graphs, in a mode in which anybody's call for memory breaks them


def at_work_during_a_capture(group, fake, make):
    """Of another thread of the process."""
    old = make(group, fake)
    fake.capture = "going on"
    heap = make(group, fake)
    assert heap.read(0, 10) == old.read(0, 10)
    assert fake.capture == "going on" and fake.minds_capture()  # as it was
    fake.capture = ""
    meet(group)
    for each in (heap, old):
        each.close(timeout_s=10)
    return fake.live()


def gone_during_a_capture(group, fake, make):
    """Of another thread. What each way of going leaves: a view that is dropped, a heap that is closed, one that is dropped.
    It breaks the capture; and all is released when a heap is made, or is closed, after the capture."""
    before, lefts = held(fake), []

    def drop_view():
        heap = make(group, fake)
        memory = heap.own_memory(0, 10)
        heap.close(timeout_s=10)
        fake.capture = "going on"
        del memory

    def close():
        heap = make(group, fake)
        meet(group)
        fake.capture = "going on"
        heap.close(timeout_s=10)

    def drop():
        heap = make(group, fake)
        meet(group)
        fake.capture = "going on"
        del heap

    for go in (drop_view, close, drop):
        for end in ("make", "close"):
            other = make(group, fake)
            start = fake.live()
            go()
            gc.collect()
            assert fake.capture == "broken" and gpu_later.num_put_off() == 1, (go, end)
            fake.capture = ""
            lefts.append({kind: n - start[kind] for kind, n in fake.live().items() if n != start[kind]})
            meet(group)
            if end == "make":
                outcome(lambda: make(group, fake, nbytes=0))
            else:
                other.close(timeout_s=10)
            assert gpu_later.num_put_off() == 0
            meet(group)
            other.close(timeout_s=10)
            meet(group)
            live = fake.live()
            live.pop("broken", None)  # peers did not wait for what was put off
            assert set(live.values()) == {0} and held(fake)[1:] == before[1:], (go, end, live)
    return lefts


def gone_during_an_own_capture(group, fake, make):
    """PyTorch captures on this thread: that can be seen, and the capture stays whole."""
    heap, other = make(group, fake), make(group, fake)
    memory = other.own_memory(0, 10)
    other.close(timeout_s=10)
    fake.capture = "going on"
    seen = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: fake.capture == "going on"}
    with mock.patch.multiple(torch.cuda, **seen):
        del heap, memory
        gc.collect()
        assert fake.capture == "going on" and gpu_later.num_put_off() == 2
        fake.capture = ""
        meet(group)
        gpu_later.try_again()
    assert gpu_later.num_put_off() == 0
    live = fake.live()
    live.pop("broken", None)
    assert set(live.values()) == {0}, live


def put_off_again(group, fake, make):
    """The device cannot tell for long, and does so in the middle of garbage collection: nothing is lost, nothing twice."""
    heap = make(group, fake)
    fake.capture = "going on"
    heap.close(timeout_s=10)
    for _ in range(3):
        fake.capture = "going on"
        gpu_later.try_again()
        assert fake.capture == "broken" and gpu_later.num_put_off() == 1
    fake.capture = ""
    gpu_later.try_again()
    gpu_later.try_again()
    assert gpu_later.num_put_off() == 0
    return fake.live()
