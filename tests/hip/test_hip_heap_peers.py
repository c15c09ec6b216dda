"""Ranks of a HIP heap that have not the ways that their peers have, whose links are broken, that die, are late, give up."""

import time

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError, DcpPeerLost, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.fake_gpu.heap_calls import held, meet, outcome, read, same_everywhere, write
from tests.fake_gpu.peer_cases import dies_at, interrupted, killed
from tests.hip.fake_hip import FakeHip
from tests.hip.heap_calls import make

# ---- another way


def _another_way(group, cases):
    rank, results = group.rank(), []
    for machines in cases:
        fake = FakeHip(**machines.get(rank, {}))
        before = held(fake)
        heap = make(group, fake, init=lambda address: write(address, bytes([rank + 1])))
        assert [read(base, 2) for base in heap.bases] == [bytes([r + 1, 0]) for r in range(3)]
        assert not fake.allocations and not fake.opened and len(fake.mapped) == 3
        meet(group)
        for base in heap.bases:
            write(base + 2000 + rank, bytes([rank + 1]))
        meet(group)
        assert heap.read(2000, 3) == b"\1\2\3"
        results.append((heap.handles, heap.handles_reason))
        meet(group)
        heap.close(timeout_s=10)
        assert held(fake) == before and fake.last_error() == 0
    return results


def test_where_one_rank_has_no_ipc_handles_all_take_descriptors():
    cases = [
        ({2: {"no_export": 1}}, ["rank 2: hipIpcGetMemHandle", "hipErrorInvalidValue, error 1)", "--ipc=host"]),
        ({1: {"no_open": 17}}, ["rank 1: the region of rank 0 (device 0, ", "hipIpcOpenMemHandle", "error 17)"]),
        ({0: {"no_open": 205}, 2: {"no_open": 1}}, ["rank 0: the region of rank 1", "error 205)"]),
        ({rank: {"no_open": 801} for rank in range(3)}, ["rank 0: ", "hipErrorNotSupported"]),
        ({0: {"no_export": 999}, 2: {"no_export": 999}}, ["rank 0: hipIpcGetMemHandle", "error 999)"]),
    ]
    results = same_everywhere(run_ranks(_another_way, 3, [machines for machines, _ in cases], mode="process"))
    for (handles, reason), (_, parts) in zip(results, cases, strict=True):
        assert handles == "vmm" and reason.startswith("no IPC handles: ") and all(part in reason for part in parts), (
            reason
        )


# ---- the caller's check of links


def _links(group, bad, machine):
    fake, rank = FakeHip(**machine), group.rank()
    before, seen = held(fake), []

    def check(heap):
        assert read(heap.bases[1 - rank], 1) == b"\0" and fake.current() == rank
        fake.busy.add(rank)  # a kernel looks at all regions
        seen.append(heap)
        if rank in bad:
            raise DcpDeviceError(f"device {rank} must see what device {1 - rank} stores", ranks=(1 - rank,))

    try:
        heap = make(group, fake, check_links=check)
    except DcpError as error:
        assert seen[0].bases == [] and seen[0].bases_table == 0  # of no use to who has kept it
        seen.clear()
        assert held(fake) == before
        return type(error), str(error), error.ranks
    heap.close(timeout_s=10)
    assert held(fake) == before
    return None


@pytest.mark.parametrize("machine", [{}, {"no_export": 1}], ids=["ipc", "fd"])
def test_what_the_check_of_links_finds_is_everybodys_error(machine):
    assert run_ranks(_links, 2, (), machine, mode="process") == [None, None]
    error = same_everywhere(run_ranks(_links, 2, (1,), machine, mode="process"))
    text = "workspace: check links failed on rank 1: device 1 must see what device 0 stores"
    assert error == (DcpDeviceError, text, (0,))


# ---- ranks that die, are late, give up


@pytest.mark.parametrize(
    ("victim", "name", "nth", "step", "machine"),
    [
        (2, "hipMemGetAllocationGranularity", 1, "measure", {}),
        (2, "hipExtMallocWithFlags", 1, "create region", {}),
        (0, "hipIpcOpenMemHandle", 2, "map peers", {}),
        (1, "hipMemCreate", 1, "create region", {"no_export": 1}),
        (0, "hipMemImportFromShareableHandle", 1, "map peers", {"no_open": 1}),
    ],
)
def test_a_death_is_seen_by_all_at_once_in_every_step(victim, name, nth, step, machine):
    results = run_ranks(dies_at, 3, FakeHip, make, victim, name, nth, machine, mode="process", expect_exit={victim: -9})
    for result, seconds in (result for result in results if result):
        text = f"workspace: {step}: rank {victim} is gone: its process ended, or it gave up"
        cls, got, ranks = result
        assert (cls, ranks) == (DcpPeerLost, (victim,)) and got.startswith(text) and seconds < 10, (
            got
        )  # not the deadline


LATE = {"hipExtMallocWithFlags": "create region", "hipIpcOpenMemHandle": "map peers"}


def _late(group):
    results = []
    for name in LATE:
        fake = FakeHip()
        before = held(fake)
        if group.rank() == 1:
            fake.act(name, 1, lambda: time.sleep(2))
        results.append(outcome(lambda: make(group, fake, timeout_s=1.0)))  # noqa: B023
        assert held(fake)[1:] == before[1:]
        meet(group)
    return results, fake.broken


def test_a_late_rank_is_named_and_raises_too():
    for results, broken in run_ranks(_late, 2, mode="process"):
        assert broken == []
        for (cls, text, ranks), step in zip(results, LATE.values(), strict=True):
            assert cls is DcpTimeout and ranks == (1,) and text.startswith(f"workspace: {step}: no answer from rank 1")


def test_ctrl_c_on_one_rank_ends_the_others():
    other, own = run_ranks(interrupted, 2, FakeHip, make, mode="process")
    assert own == "interrupted"
    assert other == (DcpPeerLost, "workspace: create region: rank 1 gave up: KeyboardInterrupt", (1,))


@pytest.mark.parametrize("machine", [{}, {"no_export": 1}], ids=["ipc", "fd"])
def test_a_killed_rank_is_named_and_not_waited_for(machine):
    results = run_ranks(killed, 3, FakeHip, make, machine, mode="process", expect_exit={1: -9})
    for lost, seconds in (result for result in results if result):
        assert lost == (1,) and seconds < 8
