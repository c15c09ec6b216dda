"""The shared region when a step towards it fails: the same on every rank, in time, and nothing is left."""

import contextlib
import os
import resource
import signal
import threading
import time

import pytest

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap import region, shared
from dcpkernels.heap.group import as_group
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.region import Region, create_file
from dcpkernels.testing import run_ranks
from tests.test_heap import BOTH, meet, outcome, resources, same_everywhere
from tests.test_heap_shared import SHARED, make

chosen = threading.local()  # .fault: what is to fail on this rank, which may be a thread


@contextlib.contextmanager
def faults():
    """Makes the steps fail for a rank that has chosen so. In force for all threads of the process."""
    create, map_file, read_only, exchange_fds = create_file, region._map_file, Region.read_only, Mesh.exchange_fds

    def strike(step, nbytes=SHARED):
        name, _, how = (getattr(chosen, "fault", None) or "").partition(": ")
        if name != step or nbytes != SHARED:  # another region's
            return
        if how == "fails":
            raise OSError(28, "no room")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(2.5)
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        if how == "no descriptors":
            free = min(fd for fd in range(1024) if not os.path.lexists(f"/proc/self/fd/{fd}"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def create_file_(nbytes):
        strike("create", nbytes)
        if getattr(chosen, "fault", None) == "create: unsealed":
            fd = os.memfd_create("dcpkernels-heap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            return fd
        return create(nbytes + 4096 * (getattr(chosen, "fault", None) == "create: too large"))

    def map_file_(fd, nbytes):
        strike("map", nbytes)
        return map_file(fd, nbytes)

    def read_only_(mapping):
        strike("view", mapping.nbytes)
        return read_only(mapping)

    def exchange_fds_(mesh, *arguments, **keywords):
        if keywords:  # the shared region's
            strike("exchange")
        exchange_fds(mesh, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "create_file", create_file_)
        patch.setattr(region, "_map_file", map_file_)
        patch.setattr(Region, "read_only", read_only_)
        patch.setattr(Mesh, "exchange_fds", exchange_fds_)
        yield


def _fail(group, victim, fault, timeout_s):
    group = as_group(group)
    before, hard = resources(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    chosen.fault = fault if group.rank == victim else None
    start = time.monotonic()
    with faults() if group.exchange_regions(None) is None else contextlib.nullcontext():
        try:
            result = outcome(lambda: make(group, read_only_views=True, timeout_s=timeout_s))
        except KeyboardInterrupt:
            result = "interrupted"
    seconds = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    after = resources()
    chosen.fault = None
    if result != "interrupted" and result[0] is DcpError:
        meet(group)  # the group is still in step,
        make(group).close(timeout_s=10)  # and can build a heap
    else:
        time.sleep(0.5)  # a rank that exits now would wake others that are stuck
    return result, seconds, before, after


def fail(mode, num_ranks, victim, fault, *, timeout_s=20.0, expect_exit=None):
    """Each survivor's outcome. What a thread has before and after is other threads' as well, so look from outside."""
    before = resources()
    with faults() if mode == "thread" else contextlib.nullcontext():
        results = run_ranks(_fail, num_ranks, victim, fault, timeout_s, mode=mode, expect_exit=expect_exit or {})
    there = [result for result in results if result is not None]
    assert resources() == before if mode == "thread" else all(start == end for _, _, start, end in there)
    assert all(seconds < timeout_s + 3 if timeout_s < 5 else seconds < 5 for _, seconds, *_ in there)
    return [result for result, *_ in there]


@BOTH
@pytest.mark.parametrize(
    ("victim", "fault", "step"),
    [
        (0, "create: fails", "create shared region"),
        (0, "map: fails", "create shared region"),
        (0, "view: fails", "map shared region"),
        (2, "view: fails", "map shared region"),
    ],
)
def test_a_step_that_fails_on_one_rank_fails_on_all(mode, victim, fault, step):
    error = same_everywhere(fail(mode, 3, victim, fault))
    text = f"workspace: {step} failed on rank {victim}: OSError: [Errno 28] no room"
    assert error == (DcpError, text, (victim,))


@pytest.mark.parametrize(
    ("victim", "fault", "text", "ranks"),
    [
        (2, "map: fails", "failed on rank 2: OSError: [Errno 28] no room", (2,)),
        (
            0,
            "create: unsealed",
            "failed on rank 1: the shared region of rank 0 must be sealed against resizing (got 0x0) "
            "(also failed on rank 2)",
            (0,),
        ),
        (
            0,
            "create: too large",
            f"failed on rank 1: the shared region of rank 0 must have {SHARED} bytes (got {SHARED + 4096}) "
            "(also failed on rank 2)",
            (0,),
        ),
        (
            1,
            "exchange: no descriptors",
            "failed on rank 1: rank 0's file must fit under the limit of open files (ulimit -n)",
            (1,),
        ),
    ],
)
def test_a_file_that_a_receiver_cannot_take_fails_on_all(victim, fault, text, ranks):
    error = same_everywhere(fail("process", 3, victim, fault))
    assert error == (DcpError, f"workspace: map shared region {text}", ranks)


@pytest.mark.parametrize(
    ("victim", "fault"), [(0, "create: dies"), (0, "exchange: dies"), (2, "exchange: dies"), (2, "map: dies")]
)
def test_a_death_is_seen_by_all_at_once(victim, fault):
    error = same_everywhere(fail("process", 4, victim, fault, expect_exit={victim: -9}))
    step = "create" if fault.startswith("create") else "map"
    text = f"workspace: {step} shared region: rank {victim} is gone: its process ended, or it gave up"
    assert error == (DcpPeerLost, text, (victim,))


@BOTH
@pytest.mark.parametrize(("victim", "fault"), [(0, "create: late"), (2, "view: late")])
def test_a_late_rank_is_named_by_all(mode, victim, fault):
    errors = fail(mode, 4, victim, fault, timeout_s=1.5)
    assert {(cls, ranks) for cls, _, ranks in errors} == {(DcpTimeout, (victim,))}, errors
    step = "create" if fault.startswith("create") else "map"
    assert all(text.startswith(f"workspace: {step} shared region: ") for _, text, _ in errors)


@pytest.mark.parametrize(
    ("victim", "fault"), [(0, "create: Ctrl-C"), (0, "exchange: Ctrl-C"), (2, "map: Ctrl-C"), (2, "view: Ctrl-C")]
)
def test_ctrl_c_on_one_rank_ends_the_others(victim, fault):
    errors = fail("process", 4, victim, fault)
    assert errors.pop(victim) == "interrupted"
    step = "create" if fault.startswith("create") else "map"
    text = f"workspace: {step} shared region: rank {victim} gave up: KeyboardInterrupt"
    assert same_everywhere(errors) == (DcpPeerLost, text, (victim,))


def _sizes(group, sizes):
    before = resources()
    result = outcome(lambda: make(group, sizes[as_group(group).rank]))
    assert resources() == before
    return result


@BOTH
@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        (
            (0, 0, 4096),
            (DcpUnsupported, "workspace: all ranks must agree on shared_nbytes (ranks 0, 1: 0; rank 2: 4096)", (2,)),
        ),
        (
            (4096, -1, 4096),
            (DcpInvalidArgument, "workspace: check failed on rank 1: shared_nbytes must be at least 0 (got -1)", (1,)),
        ),
    ],
)
def test_sizes_that_differ_or_make_no_sense_are_refused_by_all(mode, sizes, error):
    assert same_everywhere(run_ranks(_sizes, 3, sizes, mode=mode)) == error


def _descriptors(group, spare):
    if group.rank() in (0, 1):
        free = [fd for fd in range(1024) if not os.path.lexists(f"/proc/self/fd/{fd}")]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
    make(group, read_only_views=True).close(timeout_s=10)


def test_no_more_descriptors_are_needed_than_for_the_regions():
    run_ranks(_descriptors, 4, 5, mode="process")
