"""The three ops over the memory of a CUDA heap, in real processes and as thread ranks: device.py between Workspace and the
driver is real, driver and kernels are not a GPU's (fake_device.py)."""

import dataclasses

import pytest
import torch

from dcpkernels import DcpDeviceError, DcpInvalidArgument, DcpTimeout, Workspace
from dcpkernels.testing import run_ranks
from tests.a2a_calls import check_with_peers, make_call
from tests.cuda.fake_device import gpus, on_fake_gpus
from tests.cuda.fake_symm_mem import FakeSymmMem
from tests.fake_gpu import op_cases

NUM_RANKS = (2, 4, 8)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_all_ops_in_processes(num_ranks):
    for num_calls, num_launches, live in run_ranks(op_cases.run_all_ops, num_ranks, gpus, {}, mode="process"):
        # self_check: a merge, a query and its release, a chunk.
        assert (num_calls, num_launches) == (4 + 5, 4 + 5)
        assert set(live.values()) == {0}, live


@pytest.mark.parametrize("fields", [{"wire": "packet"}, {"num_channels": 3}, {"num_lanes": 2}], ids=str)
def test_ways(fields):
    for _, _, live in run_ranks(op_cases.run_all_ops, 2, gpus, fields, mode="process"):
        assert set(live.values()) == {0}, live


@pytest.mark.parametrize("scaled", [False, True], ids=["bytes", "dequantised"])
@pytest.mark.parametrize("by_halves", [op_cases.never, op_cases.by_chunk, op_cases.by_rank])
def test_chunks_at_once_and_in_halves(by_halves, scaled):
    assert run_ranks(op_cases.gather_chunks, 3, gpus, by_halves, scaled, mode="process") == 3 * [DcpInvalidArgument]


def run_all_ops_on_torch_memory(group):
    symm_mem = FakeSymmMem()
    config = dataclasses.replace(op_cases.CONFIG, cuda_heap="torch", multicast=False)
    with on_fake_gpus(symm_mem, 0), Workspace(group, config=config, backend="direct") as workspace:
        workspace.self_check()
        for num_tokens in (1, 0, 16, 200):
            check_with_peers(group, workspace, make_call(workspace.num_ranks, num_tokens, 24, 64, torch.bfloat16))
        workspace.check()
        return workspace._impl.multicast, workspace.stats()["num_calls"]


def test_all_ops_on_memory_of_torch():
    for multicast, num_calls in run_ranks(run_all_ops_on_torch_memory, 2, mode="process"):
        assert multicast.startswith("no (") and num_calls == 4 + 4


# -- captured calls


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs_of_several_sizes_in_any_order(num_ranks):
    assert all(run_ranks(op_cases.replay, num_ranks, gpus, 100, mode="process"))


# -- faults


@pytest.mark.parametrize(("num_ranks", "absent", "num_channels"), [(2, 0, 1), (4, 3, 3)])
def test_a_rank_that_does_not_come(num_ranks, absent, num_channels):
    """The cause is in the host's memory on every rank, also of one that only looks."""
    for found in run_ranks(op_cases.leave_one_out, num_ranks, gpus, absent, num_channels, mode="process"):
        assert found == (DcpTimeout, (absent,), DcpTimeout, (absent,))


def test_a_link_that_leads_elsewhere():
    found = run_ranks(op_cases.cut_a_link, 3, gpus, mode="process")
    assert len(set(found)) == 1, found
    kind, text = found[0]
    assert kind is DcpDeviceError and "rank 1 -> rank 0" in text and text.endswith(")"), text  # without an advice
