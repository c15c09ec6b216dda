"""The HIP heap where it cannot be: machines, groups and arguments that do not fit; other ways where one does not work; ranks
that die, are late, give up."""

import os
import signal
import time
from dataclasses import dataclass, field

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap import sockets
from dcpkernels.testing import run_ranks
from tests.fake_gpu.heap_calls import NBYTES, held, meet, on_hosts, outcome, read, same_everywhere, write
from tests.hip.fake_hip import FakeHip
from tests.hip.heap_calls import make


@dataclass
class Case:
    """What ranks are given, by rank: of the runtime, of `make`. `hosts` has a letter for each."""

    machines: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    hosts: str = ""
    uids: tuple = ()
    num_allocations: int = 0  # that a rank may make before it is refused


def _refuse(group, cases):
    """What `make` raises in each case; and that nothing is left."""
    rank, host_id, geteuid = group.rank(), sockets.host_id, os.geteuid
    results = {}
    for name, case in cases.items():
        sockets.host_id = host_id
        if case.hosts:
            on_hosts(case.hosts[rank])
        if case.uids:
            os.geteuid = lambda uid=case.uids[rank]: uid
        fake = FakeHip(**case.machines.get(rank, {}))
        before = held(fake)
        results[name] = outcome(lambda: make(group, fake, **case.options.get(rank, {})))  # noqa: B023
        os.geteuid = geteuid
        meet(group)
        num_allocations = fake.calls.count("hipExtMallocWithFlags") + fake.calls.count("hipMemCreate")
        assert held(fake) == before and num_allocations <= case.num_allocations, (name, num_allocations)
        assert fake.last_error() == 0, name
    return results


def refused(num_ranks, cases):
    return same_everywhere(run_ranks(_refuse, num_ranks, cases, mode="process"))


def _fail(address):
    raise ValueError("no")


def everywhere(options, num_ranks=2):
    return dict.fromkeys(range(num_ranks), options)


@pytest.fixture(scope="module")
def refusals():
    """All cases of two ranks, in one pair of processes: (class, text, ranks) by name."""
    seen_apart = {0: {"devices": [0], "cut": [(0, 1)]}, 1: {"devices": [1]}}
    first_of_each = everywhere({"device": 0})
    return refused(
        2,
        {
            "payload": Case(options={1: {"payload": {"isa": "x"}}}),
            "nbytes differ": Case(options={1: {"nbytes": NBYTES + 1}}),
            "control_nbytes differ": Case(options={1: {"control_nbytes": 8}}),
            "no nbytes": Case(options={1: {"nbytes": 0}}),
            "no control_nbytes": Case(options={1: {"control_nbytes": 0}}),
            "much control_nbytes": Case(options={1: {"control_nbytes": NBYTES + 1}}),
            "device 8": Case(options={1: {"device": 8}}),
            "device -1": Case(options={1: {"device": -1}}),
            "handles": Case(options={1: {"handles": "fabric"}}),
            "handles differ": Case(options={1: {"handles": "ipc"}}),
            "users": Case(uids=(10, 11)),
            "hosts": Case(hosts="ab"),
            "no device": Case({1: {"devices": []}}),
            "old runtime": Case({1: {"version": 6_01_40091}}),
            "no descriptors": Case({1: {"has_vmm": False}}, everywhere({"handles": "vmm"})),
            "old for descriptors": Case({0: {"version": 6_04_43482}}, everywhere({"handles": "vmm"})),
            "no links": Case(everywhere({"cut": [(0, 1)]})),
            # Each process sees its own device only: nobody knows before it is tried.
            "unseen": Case(seen_apart, first_of_each, num_allocations=2),
            "unseen, by descriptors": Case(seen_apart, everywhere({"device": 0, "handles": "vmm"}), num_allocations=1),
            "unseen, by handles": Case(seen_apart, everywhere({"device": 0, "handles": "ipc"}), num_allocations=1),
            "no export": Case({1: {"no_export": 1}}, everywhere({"handles": "ipc"}), num_allocations=1),
            "no open": Case({1: {"no_open": 17}}, everywhere({"handles": "ipc"}), num_allocations=1),
            "neither": Case({0: {"has_vmm": False}, 1: {"no_export": 1}}, num_allocations=1),
            "neither, old": Case({0: {"version": 6_04_43482}, 1: {"no_open": 1}}, num_allocations=1),
            "memory": Case({1: {"memory_bytes": 50_000}}, num_allocations=1),
            "memory, by descriptors": Case(
                {1: {"memory_bytes": 50_000}}, everywhere({"handles": "vmm"}), num_allocations=1
            ),
            "two addresses": Case({1: {"unified": False}}, num_allocations=1),
            "init": Case(options={1: {"init": _fail}}, num_allocations=1),
        },
    )


# ---- before anything is allocated


@pytest.mark.parametrize(
    ("name", "cls", "parts"),
    [
        ("payload", DcpUnsupported, ["isa", "rank 0: not given; rank 1: 'x'"]),
        ("nbytes differ", DcpUnsupported, [f"nbytes (rank 0: {NBYTES}; rank 1: {NBYTES + 1})"]),
        ("control_nbytes differ", DcpUnsupported, ["control_nbytes (rank 0: 1000; rank 1: 8)"]),
        ("no nbytes", DcpInvalidArgument, ["check failed on rank 1: nbytes must be positive (got 0)"]),
        ("no control_nbytes", DcpInvalidArgument, ["control_nbytes must be from 1 to nbytes=12388 (got 0)"]),
        ("much control_nbytes", DcpInvalidArgument, ["(got 12389)"]),
        (
            "device 8",
            DcpUnsupported,
            ["device must be one of the 8 that this process sees (got 8)", "HIP_VISIBLE_DEVICES"],
        ),
        ("device -1", DcpUnsupported, ["(got -1)"]),
        ("handles", DcpInvalidArgument, ["handles must be 'auto', 'ipc' or 'vmm' (got 'fabric')"]),
        ("handles differ", DcpUnsupported, ["handles (rank 0: 'auto'; rank 1: 'ipc')"]),
        ("users", DcpUnsupported, ["user id (rank 0: 10; rank 1: 11)"]),
        ("hosts", DcpUnsupported, ["all ranks must be on one host", "rank 0; rank 1"]),
        ("no device", DcpUnsupported, ["hipGetDeviceCount", "hipErrorNoDevice, error 100", "/dev/kfd", "render"]),
        ("old runtime", DcpUnsupported, ["must be of version 6.2 or later (got 6.1.40091)"]),
        ("no descriptors", DcpUnsupported, ["rank 1: ", "hipDeviceAttributeVirtualMemoryManagementSupported is 0"]),
        ("no export", DcpUnsupported, ["hipIpcGetMemHandle of 65536 bytes", "error 1)", "--ipc=host"]),
        ("no open", DcpUnsupported, ["rank 1: the region of rank 0 (device 0, ", "hipIpcOpenMemHandle", "error 17)"]),
    ],
)
def test_what_ranks_ask_for_and_run_on_must_fit(refusals, name, cls, parts):
    got, text, ranks = refusals[name]
    assert got is cls and ranks == (1,) and text.startswith("workspace: ") and all(part in text for part in parts), text


def test_devices_that_cannot_reach_each_other_are_named_before_anything_is_tried():
    case = Case(everywhere({"cut": [(0, 2), (2, 1)]}, 3))
    cls, text, ranks = refused(3, {"": case})[""]
    assert cls is DcpUnsupported and ranks == (0, 1, 2)
    assert "by hipDeviceCanAccessPeer (no: rank 0 (device 0, Fake MI300X 0, 0000:00:00.0" in text
    assert text.count(" to rank ") == 2 and "amd-smi topology" in text


def test_old_runtimes_have_no_descriptors(refusals):
    cls, text, ranks = refusals["old for descriptors"]
    assert cls is DcpUnsupported and ranks == (0,) and "7.0 or later (got 6.4.43482)" in text


def test_a_pair_that_nobody_could_ask_about_is_named_by_the_runtime(refusals):
    for name, call in (("unseen, by descriptors", "hipMemSetAccess"), ("unseen, by handles", "hipIpcOpenMemHandle")):
        cls, text, ranks = refusals[name]
        assert cls is DcpUnsupported and ranks == (0,) and f"{call} of 65536 bytes" in text, text
        assert "the region of rank 1 (device 0, Fake MI300X 1, 0000:01:00.0" in text
    cls, text, ranks = refusals["unseen"]  # tried one after the other; both are told
    assert cls is DcpUnsupported and ranks == (0,) and "hipIpcOpenMemHandle" in text and "hipMemSetAccess" in text


def test_where_there_is_no_way_both_reasons_are_told(refusals):
    cls, text, _ = refusals["neither"]
    assert cls is DcpUnsupported and "rank 1: hipIpcGetMemHandle" in text and "rank 0: device 0" in text, text
    assert "VirtualMemoryManagementSupported is 0" in text
    cls, text, _ = refusals["neither, old"]
    assert cls is DcpUnsupported and "hipIpcOpenMemHandle" in text and "7.0 or later (got 6.4.43482)" in text, text


# ---- memory


@pytest.mark.parametrize(
    ("name", "call"), [("memory", "hipExtMallocWithFlags"), ("memory, by descriptors", "hipMemCreate")]
)
def test_too_little_memory_says_how_much_is_needed_and_there(refusals, name, call):
    cls, text, ranks = refusals[name]
    assert cls is DcpDeviceError and ranks == (1,)
    assert f"{call} of 65536 bytes" in text and "hipErrorOutOfMemory, error 2" in text
    assert "(50000 of 50000 bytes are free)" in text and "amd-smi process" in text


def test_host_memory_must_have_one_address(refusals):
    cls, text, ranks = refusals["two addresses"]
    assert cls is DcpUnsupported and ranks == (1,) and "unified addressing" in text


def test_an_init_that_raises_is_everybodys_error(refusals):
    assert refusals["init"] == (DcpError, "workspace: create region failed on rank 1: ValueError: no", (1,))


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
        (everywhere({"no_open": 801}, 3), ["rank 0: ", "hipErrorNotSupported"]),
        (everywhere({"no_export": 999}, 3) | {1: {}}, ["rank 0: hipIpcGetMemHandle", "error 999)"]),
        (everywhere({"no_export": 1, "version": 7_00_51831}, 3), ["rank 0: "]),  # descriptors go by their addresses
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


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_at(group, victim, name, nth, machine):
    fake = FakeHip(**machine)
    before = held(fake)
    if group.rank() == victim:
        fake.act(name, nth, _die)
    start = time.monotonic()
    result = outcome(lambda: make(group, fake))
    assert held(fake) == before
    seconds = time.monotonic() - start
    time.sleep(0.3)  # a rank that exits now would wake others that are stuck
    return result, seconds


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
    results = run_ranks(_dies_at, 3, victim, name, nth, machine, mode="process", expect_exit={victim: -9})
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


def _interrupted(group):
    fake = FakeHip()
    before = held(fake)

    def init(address):
        if group.rank() == 1:
            raise KeyboardInterrupt

    try:
        result = outcome(lambda: make(group, fake, init=init))
    except KeyboardInterrupt:
        result = "interrupted"
    assert held(fake) == before
    return result


def test_ctrl_c_on_one_rank_ends_the_others():
    other, interrupted = run_ranks(_interrupted, 2, mode="process")
    assert interrupted == "interrupted"
    assert other == (DcpPeerLost, "workspace: create region: rank 1 gave up: KeyboardInterrupt", (1,))


def _killed(group, machine):
    fake = FakeHip(**machine)
    before = held(fake)
    heap = make(group, fake)
    assert heap.lost_peers() == ()
    meet(group)
    if heap.rank == 1:
        write(heap.bases[0], b"last words")
        _die()
    while not (lost := heap.lost_peers()):
        time.sleep(0.001)
    assert heap.rank or heap.read(0, 10) == b"last words"
    write(heap.bases[1], b"x")  # its memory lives as long as somebody maps it
    start = time.monotonic()
    heap.close(timeout_s=10)  # waits for the survivors, not for the dead
    assert held(fake) == before and heap.lost_peers() == (1,)
    return lost, time.monotonic() - start


@pytest.mark.parametrize("machine", [{}, {"no_export": 1}], ids=["ipc", "fd"])
def test_a_killed_rank_is_named_and_not_waited_for(machine):
    results = run_ranks(_killed, 3, machine, mode="process", expect_exit={1: -9})
    for lost, seconds in (result for result in results if result):
        assert lost == (1,) and seconds < 8
