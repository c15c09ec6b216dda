"""Strides of dims of one element, which mean nothing and may be any number: torch says nothing against 2**62. Times the size
of an element that is no 64-bit number any more."""

from __future__ import annotations

import pytest
import torch

from dcpkernels import KVGatherPlan, Workspace, WorkspaceConfig, a2a_lse_reduce, kv_gather, query_gather
from dcpkernels.testing.thread_group import ThreadGroup

FAR = 2**62
BACKENDS = pytest.mark.parametrize("backend", ["direct", "collective"])


def alone(backend: str) -> Workspace:
    (group,) = ThreadGroup.create(1)
    config = WorkspaceConfig(4, 8, 8, dtype=torch.float32, query_head_dim=16, kv_chunk_rows=16, kv_dim=32)
    return Workspace(group, config=config, backend=backend)


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, of one row."""
    assert tensor.shape[0] == 1
    return tensor.as_strided(tensor.shape, (FAR, *tensor.stride()[1:]))


@BACKENDS
def test_one_query(backend: str) -> None:
    query, out = torch.arange(64.0).view(1, 4, 16).bfloat16(), torch.zeros(1, 4, 16).bfloat16()
    with alone(backend) as workspace:
        assert torch.equal(query_gather(far(query), workspace=workspace, out=far(out)), query)
    assert torch.equal(out, query)


@BACKENDS
def test_one_block_and_one_row(backend: str) -> None:
    cache = torch.arange(512.0).view(1, 16, 32).to(torch.float8_e4m3fn)
    plan = KVGatherPlan((1,), [[0]], block_size=16, num_ranks=1, rank=0, chunk_size=16)
    out = torch.zeros(1, 32, dtype=torch.bfloat16)
    with alone(backend) as workspace:
        kv_gather(far(cache), plan, 0, workspace=workspace, scale=1.0, out=far(out))
    assert torch.equal(out, cache[0, :1].to(torch.bfloat16))


@BACKENDS
def test_one_row_is_merged(backend: str) -> None:
    partial, lse, out = torch.arange(32.0).view(1, 4, 8), torch.zeros(1, 4), torch.zeros(1, 4, 8)
    with alone(backend) as workspace:
        a2a_lse_reduce(far(partial), far(lse), workspace=workspace, lse_base="e", out=far(out))
    assert torch.equal(out, partial)
