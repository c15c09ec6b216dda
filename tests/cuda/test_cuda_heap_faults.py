"""The CUDA heap when a call of the driver fails, each of them, on one rank: all ranks say the same, and nothing is left."""

import re
from collections import Counter
from pathlib import Path

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError
from dcpkernels.heap import cuda_driver, gpu_later
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.heap_calls import make
from tests.fake_gpu.heap_calls import NBYTES, held, meet, on_hosts, outcome, read, same_everywhere, write
from tests.fake_gpu.quick_group import QuickGroup

# Every function of the driver that the layer names: a new one is in the sweeps below, or fails them.
FUNCTIONS = set(re.findall(r'"(cu[A-Z]\w+)"', Path(cuda_driver.__file__).read_text()))


def attempt(call):
    """What came of it, as plain data: ("up", reason), or (class, text, ranks)."""
    try:
        heap = call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    reason = heap.multicast_reason
    assert (heap.multicast != 0) == (reason == "yes")
    heap.close(timeout_s=10)
    return "up", reason


def works(group, fake, multicast):
    """That ranks of the same processes can have a heap, and all of it works."""
    heap = make(group, fake, init=lambda address: write(address, b"init"))
    assert [read(base, 5) for base in heap.bases] == [b"init\0"] * heap.num_ranks
    meet(group)
    for base in heap.bases:
        write(base + NBYTES - 1 - heap.rank, bytes([heap.rank + 1]))
    meet(group)
    expected = bytes(range(heap.num_ranks, 0, -1))
    assert heap.read(NBYTES - heap.num_ranks, heap.num_ranks) == expected
    assert (heap.multicast != 0) == multicast, heap.multicast_reason
    meet(group)
    heap.close(timeout_s=10)


# What stays where the device cannot tell that no kernel runs: all that one may use, or one region of it.
IN_USE = [
    {"bound": 1, "contexts": 1, "handles": 3, "host": 1, "mapped": 3, "reserved": 3, "streams": 1},
    {"contexts": 1, "handles": 1, "mapped": 1, "reserved": 1, "streams": 1},
]
# What may stay behind in `close` when this call fails: what it was to release, and what rests on that.
LEFT = {
    "cuCtxPopCurrent": [{}],
    "cuThreadExchangeStreamCaptureMode": [{}],
    "cuCtxPushCurrent": [{}, {"host": 1}, {"streams": 1}, *IN_USE],  # of what cannot be released without
    "cuCtxSynchronize": IN_USE,
    "cuMulticastUnbind": [{"bound": 1, "handles": 2}],
    "cuMemUnmap": [{"mapped": 1, "reserved": 1}],
    "cuMemAddressFree": [{"reserved": 1}],
    "cuMemRelease": [{"handles": 1}],
    "cuMemFreeHost": [{"host": 1}],
    "cuStreamDestroy": [{"streams": 1}],
    "cuDevicePrimaryCtxRelease": [{"contexts": 1}],
}
AROUND = {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
IN_READ = AROUND | {"cuMemcpyDtoHAsync", "cuStreamSynchronize"}
IN_CREATE = FUNCTIONS - set(LEFT) - IN_READ | AROUND | {"cuStreamSynchronize"}


# ---- each call of `create`


def _sweep(group, victims, hosts, folder):
    """On each rank, for each victim: the calls that a clean run makes there, without and with multicast, and what came of
    failing each of the latter. All in the same processes, so that a small leak adds up."""
    # Two ranks: by gloo.
    group = as_group(group) if group.size() == 2 else QuickGroup(group)
    rank = group.rank
    if hosts:
        on_hosts(hosts[rank])
    fake = FakeDriver(fabric=folder)

    def record(**options):
        start = len(fake.calls)
        heap = make(group, fake, **options)
        calls = fake.calls[start:]
        heap.close(timeout_s=10)
        return group.all_gather_object(calls)

    without, calls = record(multicast=False), record()
    before, swept = held(fake), []
    for victim in victims:
        results = []
        for name, count in Counter(calls[victim]).items():
            for nth in range(1, count + 1):
                if rank == victim:
                    fake.fail(name, nth)
                result = attempt(lambda: make(group, fake))
                meet(group)
                assert fake.heal(), (name, nth)  # it has happened
                assert held(fake) == before, (name, nth, result)
                results.append((name, result))
        swept.append((without[victim], calls[victim], results))
    works(group, fake, multicast=True)
    assert held(fake) == before
    return swept


def check_sweep(victim, without, calls, results):
    soft = Counter()
    for name, result in results:
        if result[0] == "up":
            soft[name] += 1
            assert result[1].startswith(f"no: rank {victim}: {name}"), result
            text = result[1]
        else:
            cls, text, ranks = result
            assert cls is DcpDeviceError and ranks == (victim,), (name, result)
            assert re.match(
                rf"workspace: [a-z ]+ failed on rank {victim}: (the region of rank \d \(.+?, driver 13.0\): )?{name} ",
                text,
            ), text
        assert "(got CUDA_ERROR_UNKNOWN, error 999" in text and "device " in text
    # What multicast adds may fail; nothing else may.
    assert soft == Counter(calls) - Counter(without), (soft, Counter(calls) - Counter(without))


@pytest.mark.parametrize(("num_ranks", "victims"), [(2, [1]), (3, [0, 2]), (4, [0]), (8, [5])])
def test_any_call_that_fails_on_one_rank_is_the_same_on_all(num_ranks, victims):
    sweeps = same_everywhere(run_ranks(_sweep, num_ranks, victims, None, None, mode="process", timeout_s=240))
    for victim, sweep in zip(victims, sweeps, strict=True):
        check_sweep(victim, *sweep)
        assert len(sweep[2]) >= 60
        assert {name for name, _ in sweep[2]} == IN_CREATE - (set() if victim == 0 else {"cuMulticastCreate"})


def test_any_call_that_fails_between_hosts_is_the_same_on_all(tmp_path):
    first, last = same_everywhere(run_ranks(_sweep, 2, [0, 1], "ab", tmp_path, mode="process", timeout_s=200))
    check_sweep(0, *first)
    check_sweep(1, *last)


def _thread_sweep(group, fake):
    """Thread ranks have one driver: the nth call of any of them fails."""
    before = held(fake)
    start = len(fake.calls)
    meet(group)
    heap = make(group, fake)
    meet(group)
    calls = fake.calls[start:]
    meet(group)
    heap.close(timeout_s=10)
    meet(group)
    results = []
    for name, count in sorted(Counter(calls).items()):
        for nth in range(1, count + 1):
            if group.rank == 0:
                fake.fail(name, nth)
            meet(group)
            result = attempt(lambda: make(group, fake))
            meet(group)
            assert fake.heal() or group.rank, (name, nth)
            assert held(fake) == before, (name, nth, result)
            meet(group)
            results.append((name, result))
    works(group, fake, multicast=True)
    return results


def test_any_call_that_fails_in_thread_ranks_is_the_same_on_all():
    fake = FakeDriver()
    results = same_everywhere(run_ranks(_thread_sweep, 3, fake, timeout_s=200))
    assert set(fake.live().values()) == {0}
    for name, result in results:
        text = result[1]
        assert (
            f" {name} " in text and "CUDA_ERROR_UNKNOWN" in text and (result[0] == "up" or result[0] is DcpDeviceError)
        )


# ---- each call of `close`


def _close_sweep(group, victim):
    fake, rank = FakeDriver(), group.rank()
    heap = make(group, fake)
    start = len(fake.calls)
    heap.close(timeout_s=10)
    calls = as_group(group).all_gather_object(fake.calls[start:])[victim]
    results = []
    for name, count in Counter(calls).items():
        for nth in range(1, count + 1):
            before = fake.live()
            heap = make(group, fake)
            if rank == victim:
                fake.fail(name, nth)
            heap.close(timeout_s=10)  # raises nothing
            left = {kind: n - before[kind] for kind, n in fake.live().items() if n != before[kind]}
            put_off = gpu_later.num_put_off()
            heap.close(timeout_s=10)
            assert fake.heal(), (name, nth)
            assert gpu_later.num_put_off() == 0 and (not put_off or fake.live() == before), (name, nth)
            assert bool(put_off) == (left in IN_USE), (name, nth, left)
            results.append((name, left))
            meet(group)
    works(group, fake, multicast=True)
    return calls, results


def test_close_releases_all_else_when_one_call_fails():
    peer, victim = run_ranks(_close_sweep, 2, 1, mode="process", timeout_s=120)
    assert all(left == {} for _, left in peer[1])
    assert {name for name, _ in victim[1]} == set(LEFT)
    for name, left in victim[1]:
        assert left in LEFT[name], (name, left)


def _all_of_close_fails(group):
    fake = FakeDriver()
    heap = make(group, fake)
    memory = heap.own_memory(0, 10)
    for name in LEFT:
        getattr(fake, name)  # all exist
        setattr(fake, name, lambda *_: (fake.CUresult(4), None))  # as in a process that is ending
    heap.close(timeout_s=10)
    del memory
    return heap.bases


def test_close_raises_nothing_when_the_driver_has_shut_down():
    assert run_ranks(_all_of_close_fails, 2, mode="process") == [[], []]


def _first_error(group):
    fake = FakeDriver()
    if group.rank() == 1:
        fake.fail("cuMemSetAccess", 1, 2)
        fake.fail("cuMemUnmap", 1, 700)
        fake.fail("cuDevicePrimaryCtxRelease", 1, 4)
    return outcome(lambda: make(group, fake))


def test_an_error_while_giving_back_does_not_hide_the_first():
    _, text, _ = same_everywhere(run_ranks(_first_error, 2, mode="process"))
    assert text.startswith("workspace: create region failed on rank 1: cuMemSetAccess of 131072 bytes")


# ---- `read`


def _read_fails(group):
    fake = FakeDriver()
    heap = make(group, fake)
    texts = []
    for name in sorted(IN_READ):
        fake.fail(name, 1, 719)
        texts.append(outcome(lambda: heap.read(0, 8))[1])
        fake.heal()
    assert heap.read(0, 8) == bytes(8)
    heap.close(timeout_s=1)
    return texts


def test_read_raises_what_its_calls_say():
    for name, text in zip(sorted(IN_READ), run_ranks(_read_fails, 1, mode="process")[0], strict=True):
        assert text.startswith(name) and "CUDA_ERROR_LAUNCH_FAILED, error 719" in text and "context is lost" in text
