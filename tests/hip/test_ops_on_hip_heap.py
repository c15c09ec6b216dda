"""The three ops over the memory of a HIP heap, in real processes and as thread ranks: _hip_device.py between Workspace and the
runtime is real, runtime and kernels are not a GPU's (fake_device.py)."""

import pytest

from dcpkernels import DcpDeviceError, DcpInvalidArgument, DcpTimeout
from dcpkernels.testing import run_ranks
from tests.fake_gpu import op_cases
from tests.hip.fake_device import gpus, gpus_without_ipc


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "fields"),
    [
        (2, gpus, {"num_channels": 3}),
        (4, gpus_without_ipc, {"wire": "packet"}),
        (8, gpus, {}),
    ],
    ids=["2 by ipc", "4 by descriptors", "8 by ipc"],
)
def test_all_ops_in_processes(num_ranks, gpus, fields):
    for num_calls, num_launches, live in run_ranks(op_cases.run_all_ops, num_ranks, gpus, fields, mode="process"):
        # self_check: a merge, a query and its release, a chunk.
        assert (num_calls, num_launches) == (4 + 5, 4 + 5)
        assert set(live.values()) == {0}, live


def test_chunks_by_some_ranks_at_once_and_by_others_in_halves():
    args = op_cases.by_rank, False
    assert run_ranks(op_cases.gather_chunks, 3, gpus, *args, mode="process") == 3 * [DcpInvalidArgument]


def test_graphs_of_several_sizes_in_any_order():
    assert all(run_ranks(op_cases.replay, 2, gpus, 40, mode="process"))


@pytest.mark.parametrize(("num_ranks", "absent", "gpus"), [(2, 0, gpus), (3, 2, gpus_without_ipc)])
def test_a_rank_that_does_not_come(num_ranks, absent, gpus):
    """The cause is in the host's memory on every rank, also of one that only looks."""
    for found in run_ranks(op_cases.leave_one_out, num_ranks, gpus, absent, 1, mode="process"):
        assert found == (DcpTimeout, (absent,), DcpTimeout, (absent,))


def test_a_link_that_leads_elsewhere():
    found = run_ranks(op_cases.cut_a_link, 3, gpus, mode="process")
    assert len(set(found)) == 1, found
    kind, text = found[0]
    assert kind is DcpDeviceError and "rank 1 -> rank 0" in text, text
    assert "flag did not arrive" in text and "GPU_MAX_HW_QUEUES" in text
