"""What the random faults of the other files have found, each as a test that needs no luck."""

from __future__ import annotations

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce, kv_gather_start
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet
from tests.torture.faults_mix import CHUNK, HEAD_DIM, LOCAL_HEADS, config_for, tables


def fault_between_start_and_wait(group, backend):
    workspace = Workspace(group, config=config_for(2, "bulk", timeout_s=5.0, first_call_timeout_s=5.0), backend=backend)
    context = tables(2).context
    plan, cache = context.plan(workspace.rank, CHUNK), context.caches[workspace.rank]
    kv_gather_start(cache, plan, 0, workspace=workspace)
    num_tokens = 1 + workspace.rank  # not the same
    partial_out, lse = torch.zeros(num_tokens, 2 * LOCAL_HEADS, HEAD_DIM), torch.zeros(num_tokens, 2 * LOCAL_HEADS)
    first = attempt(a2a_lse_reduce, partial_out, lse, workspace=workspace, lse_base="e").error
    calls = (lambda: kv_gather_start(cache, plan, 1, workspace=workspace), workspace.check)
    later = [attempt(call).error for call in calls]
    meet(group)
    workspace.close()
    return [(type(error).__name__, error.ranks) for error in (first, *later)]


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_a_chunk_that_was_started_does_not_hide_the_fault(backend):
    """Every op raises the fault: the chunk cannot be waited for any more, so to ask for that would send nobody on."""
    for errors in run_ranks(fault_between_start_and_wait, 2, backend):
        assert errors == [("DcpMismatch", (0, 1))] * 3
