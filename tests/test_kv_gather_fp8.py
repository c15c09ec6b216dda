"""kv_gather that dequantises: fp8 travels, and the reader gets the bytes that torch gives for
`(row.float() * scale).to(torch.bfloat16)`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, _backend, kv_gather, kv_gather_start, kv_gather_wait
from dcpkernels.testing import run_ranks, unchanged
from tests.a2a_calls import same_bits
from tests.a2a_ways import Layout, guarded_output
from tests.gather_calls import Buffers, Context

E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FORMATS = pytest.mark.parametrize("dtype", [E4M3, FNUZ], ids=str)
CONFIG = WorkspaceConfig(
    12, 8, 4, kv_chunk_rows=512, kv_dim=64, kv_dtype=E4M3, timeout_s=10.0, first_call_timeout_s=10.0
)
SCALES = [0.5, 2.0, 1.0, 0.1, 3.7e-3, 1e-30, 1e38, 1e-40]
OUTS = {
    "contiguous": Layout(lambda n, d: (d, 1)),
    "padded": Layout(lambda n, d: (d + 24, 1)),
    "an odd pitch, from an odd element": Layout(lambda n, d: (d + 3, 1), lambda n, d: 1),
}


def context_of(num_ranks, lens=(300, 0, 77, 500), dim=64, dtype=E4M3, **fields):
    return Context(lens, num_ranks, dim, dtype, **{"interleave": 2} | fields)


def assert_as_torch(got: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    """Every bit, but for those of a NaN."""
    truth = (rows.float() * torch.tensor(scale, dtype=torch.float32)).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16 and got.shape == truth.shape
    same = (got.contiguous().view(torch.int16) == truth.view(torch.int16)) | (got.isnan() & truth.isnan())
    assert same.all(), (scale, rows.float()[~same][:4], got[~same][:4], truth[~same][:4])


@FORMATS
def test_the_truth_here_is_the_reference_s(dtype):
    context = context_of(2, dtype=dtype)
    for scale in SCALES:
        reference = context.reference_chunk(256, 1, scale)
        assert_as_torch(reference, context.chunk(256, 1), scale)


@FORMATS
@pytest.mark.parametrize("isa", _backend.load("cpu").runnable_variants)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_codes_and_scales(num_ranks, isa, dtype):
    """Numbers and tensors as the scale; the result is the caller's own."""
    context = context_of(num_ranks, dtype=dtype)
    for i in range(2):
        assert len(context.chunk(512, i).view(torch.uint8).unique()) == 256

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, cpu_isa=isa)) as workspace:
            rank = workspace.rank
            plan, cache = context.plan(rank, 512), context.caches[rank]
            kept = []
            for turn, scale in enumerate(SCALES):
                i = turn % 2
                given = scale if turn % 3 else torch.full(((), (1,), (1, 1))[turn // 3], scale)
                result = kv_gather(cache, plan, i, workspace=workspace, scale=given)
                rows = context.chunk(512, i)
                assert result.is_contiguous()
                kept.append((result, rows, scale))
            for result, rows, scale in kept:
                assert_as_torch(result, rows, scale)

    run_ranks(body, num_ranks)


@pytest.mark.parametrize("multicast, num_channels", [(True, 1), (True, 3), (False, 1), (False, 3)])
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_out(dim, multicast, num_channels):
    """Strided, guarded; what lies in the buffers is the fp8 chunk and no byte more; plain calls in between."""
    dtype = FNUZ if dim == 48 else E4M3
    context = context_of(2, dim=dim, dtype=dtype, cache="layers inside of blocks")
    config = dataclasses.replace(CONFIG, multicast=multicast, num_channels=num_channels)

    def body(group):
        with Workspace(group, config=config) as workspace:
            rank = workspace.rank
            plan, cache = context.plan(rank, 256), context.caches[rank]
            buffers = Buffers(group, workspace, "kv_gather")
            for turn, layout in enumerate(OUTS.values()):
                i = turn % plan.num_chunks
                rows = context.chunk(256, i)
                out = guarded_output(layout, (len(rows), dim), torch.bfloat16)
                buffers.fill()
                with unchanged(cache):
                    assert kv_gather(cache, plan, i, workspace=workspace, scale=2.0, out=out.tensor) is out.tensor
                out.check()
                assert_as_torch(out.tensor, rows, 2.0)
                # Every other chunk lies in the first of the two buffers.
                assert same_bits(buffers.bytes[: len(rows) * dim].view(dtype).view(-1, dim), rows)
                buffers.check(0, len(rows) * dim)
                assert same_bits(kv_gather(cache, plan, i, workspace=workspace), rows)

    run_ranks(body, 2)


@FORMATS
def test_in_the_split_form(dtype):
    """The scale comes with wait, is that of the layer, and may differ between ranks as the reader's own business; a tensor
    is read in the call."""
    context = context_of(3, dtype=dtype)

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            rank = workspace.rank
            plan, cache, scale = context.plan(rank, 100), context.caches[rank], torch.tensor([7.0])
            kv_gather_start(cache, plan, 0, workspace=workspace)
            for i in range(plan.num_chunks):
                scale.fill_(0.25 * (1 + i) + rank)
                result = kv_gather_wait(plan, i, workspace=workspace, scale=scale)
                value = scale.item()
                scale.fill_(1000.0)
                if i + 1 < plan.num_chunks:
                    kv_gather_start(cache, plan, i + 1, workspace=workspace)
                assert_as_torch(result, context.chunk(100, i), value)

    run_ranks(body, 3)


def between_processes(group, dtype):
    context = context_of(2, dtype=dtype)
    with Workspace(group, config=CONFIG) as workspace:
        plan = context.plan(workspace.rank, 512)
        result = kv_gather(context.caches[workspace.rank], plan, 0, workspace=workspace, scale=0.5)
        assert_as_torch(result, context.chunk(512, 0), 0.5)


@FORMATS
def test_between_processes(dtype):
    run_ranks(between_processes, 2, dtype, mode="process")
