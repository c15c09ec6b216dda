"""decode_cp_a2a_lse_reduce under FlashInfer's names: signatures as published, and the cases that the public tests of
flashinfer-ai/flashinfer PR 4929 cover, against the fp64 reference and our own bound. (Those tests allow rtol 1e-2, atol
1e-3.) The class of PR 4586 is in test_flashinfer_direct_reduce.py."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.integrations import _direct_reduce, _drop_in, flashinfer
from dcpkernels.integrations.flashinfer import (
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_create_workspace,
    decode_cp_a2a_lse_reduce_workspace_size,
)
from dcpkernels.testing import assert_merge_close, run_ranks
from tests.a2a_calls import same_bits
from tests.drop_in_calls import BASES, containers, copies, crossed, partials
from tests.test_readme import blocks, run_script, script

EMPTY = {"all ranks, -inf": (None, -math.inf), "rank 0, NaN": (0, math.nan), "rank 1, +inf": (1, math.inf)}


def by_peer(outs, lses, rank):
    """This rank's attention [T, cp * h, D] and [T, cp * h] as views [T, h, cp, D] and [T, h, cp]."""
    num_ranks = outs.shape[0]
    return (
        outs[rank].unflatten(1, (num_ranks, -1)).transpose(1, 2),
        lses[rank].unflatten(1, (num_ranks, -1)).transpose(1, 2),
    )


def make(group, outs, max_tokens, **fields):
    num_ranks, _, num_heads, head_dim = outs.shape
    sizes = (max_tokens, num_heads // num_ranks, num_ranks, head_dim, outs.dtype)
    return decode_cp_a2a_lse_reduce_create_workspace(*sizes, group, device="cpu", timeout_s=60, **fields)


def merge(inputs, workspace, **arguments):
    return decode_cp_a2a_lse_reduce(*inputs, workspace, workspace.cp_rank, workspace.cp_size, **arguments)


# -- as published


def test_signatures():
    """Names, order and defaults; ours may follow."""
    empty = inspect.Parameter.empty
    geometry = [(name, empty) for name in ("max_tokens", "local_heads", "cp_size", "head_dim", "dtype")]
    published = {
        decode_cp_a2a_lse_reduce_workspace_size: geometry,
        decode_cp_a2a_lse_reduce_create_workspace: [*geometry, ("group", empty)],
        decode_cp_a2a_lse_reduce: [
            *((name, empty) for name in ("partial_o", "partial_lse", "workspace", "cp_rank", "cp_size")),
            ("lse_mode", "base2"),
            ("enable_pdl", None),  # of the earlier revision, in its place
        ],
    }
    for function, expected in published.items():
        found = list(inspect.signature(function).parameters.values())
        positional = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == expected, function.__name__
        assert all(p.default is not empty for p in found if p.kind is p.KEYWORD_ONLY)
        assert function.__name__ in flashinfer.__all__


# -- results


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lse_mode", BASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_merge(dtype, lse_mode, num_ranks):
    """Rows that are empty on all ranks, or on one of them, by every marker; three calls in one workspace."""
    outs, lses = partials(num_ranks, 4, 2 * num_ranks, 64, dtype)
    for row, (rank, marker) in enumerate(EMPTY.values()):
        where = slice(None) if rank is None else min(rank, num_ranks - 1)
        lses[where, row], outs[where, row] = marker, math.nan

    def body(group):
        workspace = make(group, outs, 5)
        inputs = by_peer(outs, lses, group.rank)
        results = [merge(inputs, workspace, lse_mode=lse_mode) for _ in range(3)]
        assert results[0].shape == (4, 2, 64) and results[0].dtype == dtype
        assert all(same_bits(results[0], other) for other in results[1:])
        with_lse = merge(inputs, workspace, lse_mode=lse_mode, return_lse=True)
        assert with_lse[1].shape == (4, 2) and same_bits(with_lse[0], results[0])
        assert_merge_close(*with_lse, outs, lses, lse_base=BASES[lse_mode], rank=group.rank)
        assert not with_lse[0][0].any() and with_lse[1][0].eq(-math.inf).all()

    run_ranks(body, num_ranks)


@pytest.mark.parametrize(("local_heads", "head_dim"), [(16, 512), (2, 128), (4, 64), (1, 8)])
@pytest.mark.parametrize("lse_mode", BASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_strided_is_packed_in_every_bit(dtype, lse_mode, local_heads, head_dim):
    """Attention's own output as a view, and the same as a tensor of its own; either kind on either rank. The view is
    not copied, nor is anything else on its way."""

    def body(group):
        workspace = None
        for num_tokens in (1, 3, 8):
            outs, lses = partials(2, num_tokens, 2 * local_heads, head_dim, dtype, seed=num_tokens)
            workspace = workspace or make(group, outs, 8)
            strided = by_peer(outs, lses, group.rank)
            packed = tuple(tensor.contiguous() for tensor in strided)
            assert packed[0].is_contiguous() and (strided[0].is_contiguous() == (local_heads == 1))
            first, copied = copies(merge, strided, workspace, lse_mode=lse_mode)
            assert copied == []
            second, copied = copies(merge, packed, workspace, lse_mode=lse_mode)
            assert len(copied) == (2 if local_heads > 1 else 0), copied
            mixed = merge(strided if group.rank else packed, workspace, lse_mode=lse_mode)
            assert same_bits(first, second) and same_bits(first, mixed)
            assert_merge_close(first, None, outs, lses, lse_base=BASES[lse_mode], rank=group.rank)

    run_ranks(body, 2)


def test_other_strides():
    """Padded rows, every other token, head-major storage, an LSE that lies the other way round."""

    def body(group):
        outs, lses = partials(3, 8, 6, 24, torch.float32)
        workspace = make(group, outs[:, :4], 4)
        partial_o, partial_lse = by_peer(outs, lses, group.rank)
        expected = merge((partial_o[::2].contiguous(), partial_lse[::2].contiguous()), workspace)
        padded = torch.nn.functional.pad(outs[group.rank], (0, 9), value=math.nan)[::2, :, :24]
        head_major = outs[group.rank, ::2].transpose(0, 1).contiguous().transpose(0, 1)
        for one in (outs[group.rank, ::2], padded, head_major):
            view = one.unflatten(1, (3, 2)).transpose(1, 2)
            lse = lses[group.rank, ::2].t().contiguous().t().unflatten(1, (3, 2)).transpose(1, 2)
            found, copied = copies(merge, (view, lse), workspace)
            assert copied == [] and same_bits(found, expected)

    run_ranks(body, 3)


LEADS = [(), (1,), (2,), (3,), (7,), (3, 3), (3, 2), (2, 3, 2), (2, 1, 5), (0,), (0, 2), (2, 0)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_leading_dims(lead):
    """Of any number and size: every point of them is a row of its own, whatever the workspace's heads are."""
    rows, num_ranks, head_dim = math.prod(lead), 3, 16
    outs, lses = partials(num_ranks, rows, num_ranks, head_dim, torch.float32)  # a row for each, a head for each rank

    def body(group):
        sizes = (4, 2, num_ranks, head_dim, torch.float32)
        workspace = decode_cp_a2a_lse_reduce_create_workspace(*sizes, group, device="cpu")
        partial_o = outs[group.rank].reshape(*lead, num_ranks, head_dim)
        partial_lse = lses[group.rank].reshape(*lead, num_ranks)
        out, lse = merge((partial_o, partial_lse), workspace, lse_mode="basee", return_lse=True)
        assert out.shape == (*lead, head_dim) and lse.shape == lead
        flat = (out.reshape(rows, 1, head_dim), lse.reshape(rows, 1))
        assert_merge_close(*flat, outs, lses, lse_base="e", rank=group.rank)
        targets = (torch.full_like(out, math.nan), torch.full_like(lse, math.nan))
        found = merge((partial_o, partial_lse), workspace, lse_mode="basee", out=targets[0], lse_out=targets[1])
        assert found[0] is targets[0] and found[1] is targets[1]
        assert same_bits(found[0], out) and same_bits(found[1], lse)

    run_ranks(body, num_ranks)


def test_any_number_of_rows_in_any_order():
    """None, and more than the workspace was made for, which FlashInfer refuses; also as the row chunks in which SGLang
    hands them on."""

    def body(group):
        workspace = None
        for i, num_tokens in enumerate((7, 1, 32, 0, 3, 1, 33, 2, 100)):
            outs, lses = partials(2, num_tokens, 8, 40, torch.bfloat16, seed=i)
            workspace = workspace or make(group, outs, 32)
            inputs = by_peer(outs, lses, group.rank)
            out = merge(inputs, workspace)
            assert_merge_close(out, None, outs, lses, lse_base="2", rank=group.rank)
            rows = [tensor.contiguous().flatten(0, 1) for tensor in inputs]
            parts = [merge([r[at : at + 128] for r in rows], workspace) for at in range(0, 4 * num_tokens, 128)]
            assert same_bits(torch.cat([*parts, out.new_empty(0, 40)]), out.flatten(0, 1))

    run_ranks(body, 2)


def test_the_counter_of_calls_wraps():
    """32 bits of it are in every flag; and new data in a slot that was used before."""

    def body(group):
        for start_epoch in (2**32 - 3, 2**33 - 2):
            workspace = None
            for i, num_tokens in enumerate((8, 1, 5, 8, 2, 8, 8)):
                outs, lses = partials(2, num_tokens, 8, 64, torch.bfloat16, seed=i)
                workspace = workspace or make(group, outs, 8, start_epoch=start_epoch)
                out = merge(by_peer(outs, lses, group.rank), workspace)
                assert_merge_close(out, None, outs, lses, lse_base="2", rank=group.rank)
            assert workspace.workspace.stats()["num_calls"] == 7

    run_ranks(body, 2)


def test_many_calls_of_many_sizes():
    """16 calls, 20 times over, as a graph that holds them is replayed; into the same tensors."""
    cases = [partials(2, 1 + i % 4, 8, 64, torch.float16, seed=i) for i in range(16)]

    def body(group):
        workspace = make(group, cases[0][0], 4)
        outs = [torch.empty(1 + i % 4, 4, 64, dtype=torch.float16) for i in range(16)]
        for _ in range(20):
            for case, out in zip(cases, outs, strict=True):
                assert merge(by_peer(*case, group.rank), workspace, out=out) is out
        for case, out in zip(cases, outs, strict=True):
            assert_merge_close(out, None, *case, lse_base="2", rank=group.rank)

    run_ranks(body, 2)


def test_the_earlier_revision():
    """is_lse_base_on_e, by its place or its name, and enable_pdl."""
    outs, lses = partials(2, 3, 4, 16, torch.bfloat16)

    def body(group):
        workspace = make(group, outs, 3)
        inputs, where = by_peer(outs, lses, group.rank), (workspace, group.rank, 2)
        base_e, base_2 = (merge(inputs, workspace, lse_mode=mode) for mode in ("basee", "base2"))
        assert not same_bits(base_e, base_2) and same_bits(merge(inputs, workspace), base_2)
        for expected, found in (
            (base_e, decode_cp_a2a_lse_reduce(*inputs, *where, True, None)),
            (base_2, decode_cp_a2a_lse_reduce(*inputs, *where, False, True)),
            (base_e, merge(inputs, workspace, is_lse_base_on_e=True)),
            (base_2, merge(inputs, workspace, is_lse_base_on_e=False, enable_pdl=False)),
            (base_e, merge(inputs, workspace, lse_mode="basee", is_lse_base_on_e=True)),
        ):
            assert same_bits(found, expected)
        with pytest.raises(DcpInvalidArgument, match="must say the same"):
            merge(inputs, workspace, lse_mode="basee", is_lse_base_on_e=False)
        for wrong in ("basee", 1, 0):
            with pytest.raises(DcpInvalidArgument, match="is_lse_base_on_e must be True or False"):
                merge(inputs, workspace, is_lse_base_on_e=wrong)

    run_ranks(body, 2)


def test_outputs_of_the_callers():
    """Written in place, with any token and head strides; without a copy."""
    outs, lses = partials(2, 4, 6, 16, torch.float16)

    def body(group):
        workspace = make(group, outs, 4)
        inputs = by_peer(outs, lses, group.rank)
        expected = merge(inputs, workspace, return_lse=True)
        out = torch.full((3, 4, 20), math.nan, dtype=torch.float16).transpose(0, 1)[..., :16]
        lse_out = torch.full((3, 4), math.nan).t()
        found, copied = copies(merge, inputs, workspace, out=out, lse_out=lse_out)
        assert copied == [] and found[0] is out and found[1] is lse_out
        assert same_bits(out, expected[0]) and same_bits(lse_out, expected[1])
        out.fill_(math.nan)
        assert merge(inputs, workspace, out=out) is out and same_bits(out, expected[0])

    run_ranks(body, 2)


def test_lanes_do_not_wait_for_each_other():
    cases = [partials(2, 8, 8, 64, torch.float32, seed=seed) for seed in (1, 2)]

    def body(group):
        workspace = make(group, cases[0][0], 8, num_lanes=2)

        def call(lane):
            out = merge(by_peer(*cases[lane], group.rank), workspace, lane=lane)
            assert_merge_close(out, None, *cases[lane], lse_base="2", rank=group.rank)

        for _ in range(20):
            crossed(group.rank, lambda: call(0), lambda: call(1))

    run_ranks(body, 2)


def by_name(group):
    """In processes, by the name of their group; and a workspace that is forgotten without being closed."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    outs, lses = partials(num_ranks, 3, 2 * num_ranks, 32, torch.bfloat16)
    for one in (group, dist.group.WORLD.group_name):
        workspace = make(one, outs, 3)
        for lse_mode, base in BASES.items():
            out = merge(by_peer(outs, lses, rank), workspace, lse_mode=lse_mode)
            assert_merge_close(out, None, outs, lses, lse_base=base, rank=rank)


def test_processes():
    run_ranks(by_name, 2, mode="process", timeout_s=120)


def test_no_state_of_the_module():
    """Two workspaces of different geometries, used in turns; and nothing in the module that could hold one."""
    assert containers(flashinfer) == ["_LSE_MODES"] and containers(_drop_in) == containers(_direct_reduce) == []

    def body(group):
        sizes = [(5, 2, 16), (3, 6, 8)]
        cases = [partials(2, tokens, 2 * heads, dim, torch.float32) for tokens, heads, dim in sizes]
        workspaces = [make(group, outs, 5) for outs, _ in cases]
        for _, (case, workspace) in itertools.product(range(3), zip(cases, workspaces, strict=True)):
            out = merge(by_peer(*case, group.rank), workspace)
            assert_merge_close(out, None, *case, lse_base="2", rank=group.rank)
        assert [w.workspace.stats()["num_calls"] for w in workspaces] == [3, 3]
        assert isinstance(workspaces[0].workspace, dcpkernels.Workspace)

    run_ranks(body, 2)


def test_the_example_of_the_page(tmp_path):
    assert run_script(tmp_path, script("docs/flashinfer.md", "drop_in.py")) in blocks("docs/flashinfer.md", "text")
