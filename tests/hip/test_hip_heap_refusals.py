"""The HIP heap where it cannot be: machines, groups and arguments that do not fit."""

import pytest

from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpUnsupported
from tests.fake_gpu import peer_cases
from tests.fake_gpu.heap_calls import NBYTES
from tests.fake_gpu.peer_cases import Case, fails
from tests.hip.fake_hip import FakeHip
from tests.hip.heap_calls import make


def refused(num_ranks, cases):
    return peer_cases.refused(FakeHip, make, ["hipExtMallocWithFlags", "hipMemCreate"], num_ranks, cases)


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
            "old for descriptors": Case({0: {"version": 7_14_60850}}, everywhere({"handles": "vmm"})),
            "no links": Case(everywhere({"cut": [(0, 1)]})),
            # Each process sees its own device only: nobody knows before it is tried.
            "unseen": Case(seen_apart, first_of_each, num_allocations=2),
            "unseen, by descriptors": Case(seen_apart, everywhere({"device": 0, "handles": "vmm"}), num_allocations=1),
            "unseen, by handles": Case(seen_apart, everywhere({"device": 0, "handles": "ipc"}), num_allocations=1),
            "no export": Case({1: {"no_export": 1}}, everywhere({"handles": "ipc"}), num_allocations=1),
            "no open": Case({1: {"no_open": 17}}, everywhere({"handles": "ipc"}), num_allocations=1),
            "neither": Case({0: {"has_vmm": False}, 1: {"no_export": 1}}, num_allocations=1),
            "neither, old": Case({0: {"version": 7_14_60850}, 1: {"no_open": 1}}, num_allocations=1),
            "memory": Case({1: {"memory_bytes": 50_000}}, num_allocations=1),
            "memory, by descriptors": Case(
                {1: {"memory_bytes": 50_000}}, everywhere({"handles": "vmm"}), num_allocations=1
            ),
            "two addresses": Case({1: {"unified": False}}, num_allocations=1),
            "init": Case(options={1: {"init": fails}}, num_allocations=1),
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
    assert cls is DcpUnsupported and ranks == (0,) and "7.15 or later (got 7.14.60850)" in text


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
    assert cls is DcpUnsupported and "hipIpcOpenMemHandle" in text and "7.15 or later (got 7.14.60850)" in text, text


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
