"""The CUDA heap where it cannot be: machines, groups and arguments that do not fit; ranks that die or are late."""

import time

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap.mesh import Mesh
from dcpkernels.testing import run_ranks
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.heap_calls import make
from tests.fake_gpu import peer_cases
from tests.fake_gpu.heap_calls import NBYTES, held, meet, outcome, read, same_everywhere, write
from tests.fake_gpu.peer_cases import Case, dies_at, fails, interrupted, killed


def refused(num_ranks, cases):
    return peer_cases.refused(FakeDriver, make, ["cuMemCreate"], num_ranks, cases)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """All cases of two ranks, in one pair of processes: (class, text, ranks) by name."""
    folder = tmp_path_factory.mktemp("fabric")
    apart = {rank: {"fabric": folder / str(rank)} for rank in range(2)}
    for driver in apart.values():
        driver["fabric"].mkdir()
    cases = {
        "payload": Case(options={1: {"payload": {"isa": "x"}}}),
        "nbytes differ": Case(options={1: {"nbytes": NBYTES + 1}}),
        "control_nbytes differ": Case(options={1: {"control_nbytes": 8}}),
        "no nbytes": Case(options={1: {"nbytes": 0}}),
        "no control_nbytes": Case(options={1: {"control_nbytes": 0}}),
        "much control_nbytes": Case(options={1: {"control_nbytes": NBYTES + 1}}),
        "device 8": Case(options={1: {"device": 8}}),
        "device -1": Case(options={1: {"device": -1}}),
        "users": Case(uids=(10, 11)),
        "no device": Case({1: {"devices": []}}),
        "old driver": Case({1: {"version": 12020}}),
        "unseen": Case(
            {0: {"devices": [0], "cut": [(0, 1)]}, 1: {"devices": [1]}},
            {0: {"device": 0}, 1: {"device": 0}},
            num_allocations=1,
        ),
        "fabric 800": Case({rank: {"no_fabric": 800} for rank in range(2)}, hosts="ab", num_allocations=1),
        "fabric 801": Case({rank: {"no_fabric": 801} for rank in range(2)}, hosts="ab", num_allocations=1),
        "fabric on one": Case({0: apart[0]}, hosts="ab", num_allocations=1),
        "two domains": Case(apart, hosts="ab", num_allocations=1),
        "memory": Case({1: {"memory_bytes": 100_000}}, num_allocations=1),
        "two addresses": Case({1: {"unified": False}}, num_allocations=1),
        "init": Case(options={1: {"init": fails}}, num_allocations=1),
    }
    results = refused(2, cases)
    assert not list(folder.glob("*/*"))
    return results


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
        ("device 8", DcpUnsupported, ["device must be one of the 8 that this process sees (got 8)", "VISIBLE"]),
        ("device -1", DcpUnsupported, ["(got -1)"]),
        ("users", DcpUnsupported, ["user id (rank 0: 10; rank 1: 11)"]),
        ("no device", DcpUnsupported, ["cuInit", "CUDA_ERROR_NO_DEVICE, error 100", "nvidia-smi -L"]),
        ("old driver", DcpUnsupported, ["must be of version 12.3 or later (got 12.2)"]),
    ],
)
def test_what_ranks_ask_for_and_run_on_must_fit(refusals, name, cls, parts):
    got, text, ranks = refusals[name]
    assert got is cls and ranks == (1,) and text.startswith("workspace: ") and all(part in text for part in parts), text


def test_devices_that_cannot_reach_each_other_are_named_before_anything_is_tried():
    case = Case({rank: {"cut": [(0, 2), (2, 1)]} for rank in range(3)})
    cls, text, ranks = refused(3, {"": case})[""]
    assert cls is DcpUnsupported and ranks == (0, 1, 2)
    assert text == (
        "workspace: every device must reach the memory of every other, by cuDeviceCanAccessPeer (no: "
        "rank 0 (device 0, Fake H100 0, 0000:00:00.0) to rank 2 (device 2, Fake H100 2, 0000:02:00.0); "
        "rank 2 (device 2, Fake H100 2, 0000:02:00.0) to rank 1 (device 1, Fake H100 1, 0000:01:00.0)): "
        "see `nvidia-smi topo -p2p rw`"
    )


def test_mig_devices_are_told_apart_from_broken_links():
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    mig = {rank: {"cut": pairs, "name": "NVIDIA H100 MIG 1g.10gb"} for rank in range(4)}
    cls, text, _ = refused(4, {"": Case(mig)})[""]
    assert cls is DcpUnsupported and "MIG devices have no peer access" in text and "and 4 more" in text


def test_a_pair_that_nobody_could_ask_about_is_named_by_the_driver(refusals):
    # Each process sees its own device only; so nobody knows before it is tried.
    cls, text, ranks = refusals["unseen"]
    assert cls is DcpUnsupported and ranks == (0,)
    assert "topo -p2p" in text
    pair = "the region of rank 1 (device 0, Fake H100 1, 0000:01:00.0, driver 13.0): cuMemSetAccess"
    assert f"map peers failed on rank 0: {pair} of 131072 bytes must succeed on device 0, Fake H100 0 " in text


# ---- hosts


@pytest.mark.parametrize("number", [800, 801])
def test_several_hosts_without_fabric_handles_are_refused(refusals, number):
    cls, text, _ = refusals[f"fabric {number}"]
    assert cls is DcpUnsupported and "cuMemCreate of 131072 bytes" in text and f"error {number}" in text
    assert "nvidia-imex" in text and "/dev/nvidia-caps-imex-channels" in text and "several hosts" in text


def test_one_host_of_several_without_fabric_handles_is_named(refusals):
    cls, text, ranks = refusals["fabric on one"]
    assert cls is DcpUnsupported and ranks == (1,) and "create region failed on rank 1: cuMemCreate" in text


def test_hosts_that_do_not_share_a_domain_are_refused(refusals):
    cls, text, _ = refusals["two domains"]
    assert issubclass(cls, DcpError) and "cuMemImportFromShareableHandle" in text
    assert "the region of rank 1 (device 1, " in text


# ---- memory


def test_too_little_memory_says_how_much_is_needed_and_there(refusals):
    cls, text, ranks = refusals["memory"]
    assert cls is DcpDeviceError and ranks == (1,)
    assert "cuMemCreate of 131072 bytes" in text and "CUDA_ERROR_OUT_OF_MEMORY, error 2" in text
    assert "(100000 of 100000 bytes are free)" in text and "expandable" in text


def test_host_memory_must_have_one_address(refusals):
    cls, text, ranks = refusals["two addresses"]
    assert cls is DcpUnsupported and ranks == (1,) and "unified addressing" in text


def test_an_init_that_raises_is_everybodys_error(refusals):
    assert refusals["init"] == (DcpError, "workspace: create region failed on rank 1: ValueError: no", (1,))


# ---- multicast


def _without_multicast(group, cases):
    rank, results = group.rank(), []
    for drivers, options, faults, _ in cases:
        fake = FakeDriver(**drivers.get(rank, {}))
        for name, number in faults.get(rank, {}).items():
            fake.fail(name, 1, number)
        before = held(fake)
        heap = make(group, fake, init=lambda address: write(address, b"abc"), **options.get(rank, {}))
        assert heap.multicast == 0 and all(read(base, 4) == b"abc\0" for base in heap.bases)
        results.append((heap.multicast_reason, fake.calls.count("cuMulticastCreate")))
        meet(group)
        heap.close(timeout_s=10)
        assert held(fake) == before
    return results


def test_multicast_is_not_tried_where_a_rank_cannot_or_will_not():
    cases = [
        ({}, {1: {"multicast": False}}, {}, ["no: rank 1 asked for none"]),
        ({}, {rank: {"multicast": False} for rank in range(3)}, {}, ["no: ranks 0, 1, 2 asked for none"]),
        ({2: {"multicast": False}}, {}, {}, ["no: rank 2: device 2, Fake H100 2 has none", "MULTICAST_SUPPORTED is 0"]),
        ({}, {}, {1: {"cuMulticastGetGranularity": 801}}, ["no: rank 1: cuMulticastGetGranularity", "error 801"]),
    ]
    results = same_everywhere(run_ranks(_without_multicast, 3, cases, mode="process"))
    for (reason, created), case in zip(results, cases, strict=True):
        assert created == 0 and all(part in reason for part in case[-1]), reason


def test_multicast_that_fails_on_a_rank_says_where_and_what_to_do():
    faults = [
        (0, "cuMulticastCreate", 801, ["cuMulticastCreate of 131072 bytes", "CUDA_ERROR_NOT_SUPPORTED", "3 devices"]),
        (1, "cuMulticastAddDevice", 401, ["CUDA_ERROR_ILLEGAL_STATE, error 401", "nvidia-fabricmanager"]),
        (2, "cuMulticastBindMem", 802, ["CUDA_ERROR_SYSTEM_NOT_READY, error 802", "nvidia-fabricmanager"]),
        (2, "cuMulticastBindMem", 2, ["CUDA_ERROR_OUT_OF_MEMORY", "131072 bytes"]),
    ]
    cases = [({}, {}, {rank: {name: number}}, parts) for rank, name, number, parts in faults]
    results = run_ranks(_without_multicast, 3, cases, mode="process")
    reasons = same_everywhere([[reason for reason, _ in result] for result in results])
    for reason, (rank, name, _, parts) in zip(reasons, faults, strict=True):
        assert reason.startswith(f"no: rank {rank}: {name}") and all(part in reason for part in parts), reason


# ---- the caller's check of links


def _links(group, bad):
    fake, rank = FakeDriver(), group.rank()
    before, seen = held(fake), []

    def check(heap):
        assert heap.multicast_reason == "yes" and read(heap.bases[1 - rank], 1) == b"\0" and fake.stack() == [rank]
        seen.append(heap)
        if rank in bad:
            raise DcpDeviceError(f"device {rank} must see what device {1 - rank} stores", ranks=(1 - rank,))

    try:
        heap = make(group, fake, check_links=check)
    except DcpError as error:
        assert seen[0].bases == [] and seen[0].multicast == 0  # of no use to who has kept it
        seen.clear()
        assert held(fake) == before
        return type(error), str(error), error.ranks
    heap.close(timeout_s=10)
    return None


def test_a_link_that_does_not_carry_is_an_error_of_all():
    assert run_ranks(_links, 2, [], mode="process") == [None, None]
    text = "workspace: check links failed on rank {}: device {} must see what device {} stores{}"
    one = same_everywhere(run_ranks(_links, 2, [1], mode="process"))
    assert one == (DcpDeviceError, text.format(1, 1, 0, ""), (0,))
    both = same_everywhere(run_ranks(_links, 2, [0, 1], mode="process"))
    assert both == (DcpDeviceError, text.format(0, 0, 1, " (also failed on rank 1)"), (1,))


# ---- ranks that die, are late, give up


@pytest.mark.parametrize(
    ("victim", "name", "nth", "step"),
    [
        (2, "cuMemGetAllocationGranularity", 1, "measure"),
        (2, "cuMemCreate", 1, "create region"),
        (0, "cuMemImportFromShareableHandle", 1, "map peers"),
        (0, "cuMulticastCreate", 1, "create multicast"),
        (1, "cuMulticastAddDevice", 1, "join multicast"),
        (2, "cuMulticastBindMem", 1, "bind multicast"),
        (1, "cuMemAddressReserve", 4, "map multicast"),
    ],
)
def test_a_death_is_seen_by_all_at_once_in_every_step(victim, name, nth, step):
    results = run_ranks(dies_at, 3, FakeDriver, make, victim, name, nth, {}, mode="process", expect_exit={victim: -9})
    for result, seconds in (result for result in results if result):
        text = f"workspace: {step}: rank {victim} is gone: its process ended, or it gave up"
        assert result == (DcpPeerLost, text, (victim,)) and seconds < 10  # not the deadline


def _cannot_connect(group, victim):
    fake = FakeDriver()
    before = held(fake)
    if group.rank() == victim:

        def connect(*_):
            raise OSError(24, "Too many open files")

        Mesh.connect = connect
    start = time.monotonic()
    result = outcome(lambda: make(group, fake))
    assert held(fake) == before and "cuMemCreate" not in fake.calls
    return result, time.monotonic() - start


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_cannot_connect_is_named_at_once(victim):
    text = f"workspace: connect failed on rank {victim}: OSError: [Errno 24] Too many open files"
    for (cls, got, ranks), seconds in run_ranks(_cannot_connect, 3, victim, mode="process"):
        assert cls is DcpError and victim in ranks and got.startswith(text) and seconds < 10  # not the deadline


LATE = {"cuMemCreate": "create region", "cuMulticastBindMem": "bind multicast"}


def _late(group):
    results = []
    for name in LATE:
        fake = FakeDriver()
        before = held(fake)
        if group.rank() == 1:
            fake.act(name, 1, lambda: time.sleep(2))
        results.append(outcome(lambda: make(group, fake, timeout_s=1.0)))  # noqa: B023
        assert held(fake) == before
        meet(group)
    return results


def test_a_late_rank_is_named_and_raises_too():
    for results in run_ranks(_late, 2, mode="process"):
        for (cls, text, ranks), step in zip(results, LATE.values(), strict=True):
            assert cls is DcpTimeout and ranks == (1,) and text.startswith(f"workspace: {step}: no answer from rank 1")


def test_ctrl_c_on_one_rank_ends_the_others():
    other, own = run_ranks(interrupted, 2, FakeDriver, make, mode="process")
    assert own == "interrupted"
    assert other == (DcpPeerLost, "workspace: create region: rank 1 gave up: KeyboardInterrupt", (1,))


def test_a_killed_rank_is_named_and_not_waited_for():
    results = run_ranks(killed, 3, FakeDriver, make, {}, mode="process", expect_exit={1: -9})
    for lost, seconds in (result for result in results if result):
        assert lost == (1,) and seconds < 8
