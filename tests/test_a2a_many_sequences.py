"""As many sequences as an int32 can count: no sum on the way to their bytes, or to a row's sequence, may be larger."""

from __future__ import annotations

import mmap

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing.thread_group import ThreadGroup

NUM_SEQS = 2**31 - 1
BACKENDS = pytest.mark.parametrize("backend", ["direct", "collective"])


def alone(backend: str) -> Workspace:
    (group,) = ThreadGroup.create(1)
    return Workspace(group, config=WorkspaceConfig(4, 8, 8, dtype=torch.float32), backend=backend)


def zeros(count: int) -> torch.Tensor:
    """They take no memory until they are touched (torch.zeros touches all)."""
    return torch.frombuffer(mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.int32)


@BACKENDS
def test_a_row_of_the_last_sequence(backend: str) -> None:
    query_start_loc = zeros(NUM_SEQS + 1)
    query_start_loc[-1] = 1
    partial, lse = torch.arange(32.0).view(1, 4, 8), torch.zeros(1, 4)
    with alone(backend) as workspace:
        # In the same memory. The length of the row's sequence is the last element.
        for last, seq_lens in ((1, query_start_loc[1:]), (0, query_start_loc[:-1])):
            out = a2a_lse_reduce(
                partial, lse, workspace=workspace, lse_base="e", seq_lens=seq_lens, query_start_loc=query_start_loc
            )
            assert torch.equal(out, partial * last)


@BACKENDS
def test_an_output_among_them_is_refused(backend: str) -> None:
    seq_lens, query_start_loc = zeros(NUM_SEQS), zeros(NUM_SEQS + 1)
    out = query_start_loc[-64:-32].view(torch.float32).view(1, 4, 8)
    partial, lse = torch.ones(1, 4, 8), torch.zeros(1, 4)
    with alone(backend) as workspace, pytest.raises(ValueError, match="overlap"):
        a2a_lse_reduce(
            partial,
            lse,
            workspace=workspace,
            lse_base="e",
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            out=out,
        )
