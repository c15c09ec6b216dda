"""DCPDirectReduceWorkspace: the signature as published, and the cases that the public tests of flashinfer-ai/flashinfer
PR 4586 cover, against the fp64 reference and our own bound. (Those tests allow 1e-2 for outputs, 1e-4 for LSEs.)"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.integrations.flashinfer import DCPDirectReduceWorkspace
from dcpkernels.testing import assert_merge_close, run_ranks
from tests.a2a_calls import same_bits
from tests.drop_in_calls import copies, crossed, partials

BASES = {True: "e", False: "2"}


def make(group, outs, max_tokens, num_slots=1, **fields):
    sizes = (max_tokens, outs.shape[2], outs.shape[3], outs.dtype)
    return DCPDirectReduceWorkspace(group, *sizes, num_slots, device="cpu", timeout_s=60, **fields)


def run_and_check(workspace, outs, lses, **arguments):
    rank = workspace.rank
    found = workspace.run(outs[rank], lses[rank], **arguments)
    base = BASES[arguments.get("is_lse_base_on_e", True)]
    assert_merge_close(*found, outs, lses, lse_base=base, rank=rank)
    return found


def test_signatures():
    empty = inspect.Parameter.empty
    expected = [(name, empty) for name in ("group", "max_tokens", "total_heads", "head_dim", "dtype")]
    parameters = inspect.signature(DCPDirectReduceWorkspace).parameters.values()
    found = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert found == [*expected, ("num_slots", 1)]
    _, *parameters = inspect.signature(DCPDirectReduceWorkspace.run).parameters.values()
    found = [(p.name, p.default, p.kind is p.KEYWORD_ONLY) for p in parameters]
    assert found == [
        ("partial_output", empty, False), ("partial_lse", empty, False), ("slot", 0, True),
        ("is_lse_base_on_e", True, True), ("out", None, True), ("lse_out", None, True),
    ]  # fmt: skip
    assert DCPDirectReduceWorkspace.supports_output_view is True


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [128, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_merge(dtype, head_dim, num_ranks):
    """Both bases, in one workspace, of any number of tokens; every other token of a larger tensor."""

    def body(group):
        workspace = None
        for is_lse_base_on_e in (True, False):
            for num_tokens in (1, 8, 0, 17):
                outs, lses = partials(num_ranks, 2 * num_tokens, 4 * num_ranks, head_dim, dtype, seed=num_tokens)
                workspace = workspace or make(group, outs, 17)
                run_and_check(workspace, outs[:, ::2], lses[:, ::2], is_lse_base_on_e=is_lse_base_on_e)
        assert workspace.combined_output.shape == (1, 17, 4, head_dim)
        assert workspace.combined_lse.shape == (1, 17, 4)

    run_ranks(body, num_ranks)


def empties(kind, num_ranks):
    """Payload and LSEs of all ranks, 8 tokens, 2 heads a rank, and what of it is empty on all of them."""
    outs, lses = partials(num_ranks, 8, 2 * num_ranks, 128, torch.bfloat16)
    if kind == "the heads of rank 0":
        lses[:, :, :2] = -math.inf
    elif kind == "all but rank 0":
        lses[1:] = -math.inf
    elif kind == "NaN of rank 0":
        lses[0, :, 0] = math.nan
    elif kind == "+inf of the last rank":
        lses[-1, :, 1] = math.inf
    else:
        lses[:] = -math.inf
    if kind == "NaN payload":
        outs[:] = math.nan
    return outs, lses


KINDS = ["the heads of rank 0", "all but rank 0", "NaN of rank 0", "+inf of the last rank", "all", "NaN payload"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_lse_base_on_e", BASES)
def test_empty_shards(is_lse_base_on_e, kind):
    outs, lses = empties(kind, 2)

    def body(group):
        workspace = make(group, outs, 8)
        out, lse = run_and_check(workspace, outs, lses, is_lse_base_on_e=is_lse_base_on_e)
        if kind in ("all", "NaN payload"):
            assert not out.any() and lse.eq(-math.inf).all()

    run_ranks(body, 2)


def test_who_owns_the_result():
    """Views of the slot's buffer, the same in every call and untouched by another slot; or the caller's tensors,
    written in place and by nobody else; without a copy."""
    first, second = (partials(2, 8, 8, 128, torch.bfloat16, seed=seed) for seed in (1, 2))

    def body(group):
        workspace = make(group, first[0], 32, 2)
        out, lse = run_and_check(workspace, *first)
        assert out.data_ptr() == workspace.combined_output[0].data_ptr() and out.shape == (8, 4, 128)
        assert lse.data_ptr() == workspace.combined_lse[0].data_ptr() and lse.shape == (8, 4)
        kept = out.clone(), lse.clone()
        other = run_and_check(workspace, *second, slot=1)
        assert other[0].data_ptr() == workspace.combined_output[1].data_ptr()
        assert same_bits(out, kept[0]) and same_bits(lse, kept[1])
        again, _ = run_and_check(workspace, *second)
        assert again.data_ptr() == out.data_ptr() and same_bits(again, other[0])
        mine = torch.full((8, 4, 128), math.nan, dtype=torch.bfloat16), torch.full((8, 4), math.nan)
        inputs = (first[0][group.rank], first[1][group.rank])
        found, copied = copies(workspace.run, *inputs, out=mine[0], lse_out=mine[1])
        assert found[0] is mine[0] and found[1] is mine[1] and copied == []
        assert same_bits(mine[0], kept[0]) and same_bits(mine[1], kept[1])
        assert same_bits(out, other[0])  # the buffer still holds what went there before
        _, copied = copies(workspace.run, second[0][group.rank], second[1][group.rank])
        assert copied == [] and same_bits(mine[0], kept[0])

    run_ranks(body, 2)


def test_more_tokens_than_it_was_made_for():
    """In tensors of their own, for the buffer has no room."""
    outs, lses = partials(2, 21, 4, 64, torch.float32)

    def body(group):
        workspace = make(group, outs, 8)
        out, lse = run_and_check(workspace, outs, lses)
        assert out.untyped_storage().data_ptr() != workspace.combined_output.untyped_storage().data_ptr()
        assert out.shape == (21, 2, 64) and lse.shape == (21, 2)

    run_ranks(body, 2)


def test_slots_do_not_wait_for_each_other():
    cases = [partials(2, 8, 8, 64, torch.float32, seed=seed) for seed in (1, 2)]

    def body(group):
        workspace = make(group, cases[0][0], 8, 2)
        calls = [lambda slot=slot: run_and_check(workspace, *cases[slot], slot=slot) for slot in (0, 1)]
        for _ in range(20):
            crossed(group.rank, *calls)

    run_ranks(body, 2)


def test_generations():
    """Many calls with new data; each slot counts its own."""
    cases = [partials(2, 8, 8, 128, torch.bfloat16, seed=seed) for seed in range(5)]

    def body(group):
        workspace = make(group, cases[0][0], 8, 2, start_epoch=2**32 - 100)
        expected = [[tensor.clone() for tensor in run_and_check(workspace, *case)] for case in cases]
        for i in range(1000):
            case, (out, lse) = cases[i % 5], expected[i % 5]
            found = workspace.run(case[0][group.rank], case[1][group.rank], slot=int(i % 3 == 0))
            assert same_bits(found[0], out) and same_bits(found[1], lse)
        assert workspace.workspace.stats()["num_calls"] == 1005
        workspace.close()
        with pytest.raises(DcpError, match="the workspace must be open"):
            workspace.run(cases[0][0][0], cases[0][1][0])

    run_ranks(body, 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"group": None}, "group must be a process group or its name"),
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1"),
        ({"total_heads": 0}, "total_heads must be a whole number >= 1"),
        ({"total_heads": 3}, "num_heads must be divisible by num_ranks=2"),
        ({"head_dim": -1}, "head_dim must be a whole number >= 1"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"num_slots": 0}, "num_slots must be a whole number >= 1"),
        ({"num_lanes": 2}, "other keywords must be fields of WorkspaceConfig"),
    ],
    ids=str,
)
def test_wrong_geometry(wrong, text):
    def body(group):
        right = {"group": group, "max_tokens": 4, "total_heads": 4, "head_dim": 128, "dtype": torch.float16}
        right |= {"device": "cpu"}
        with pytest.raises(DcpInvalidArgument, match=text):
            DCPDirectReduceWorkspace(**(right | wrong))

    run_ranks(body, 2)


WRONG = {
    "dims": ({"partial_output": torch.zeros(4, 128)}, r"partial_output must have shape \[T, total_heads, D\]"),
    "heads": ({"partial_output": torch.zeros(3, 2, 128)}, "must have shape"),
    "head_dim": ({"partial_output": torch.zeros(3, 4, 64)}, "must have shape"),
    "dtype": ({"partial_output": torch.zeros(3, 4, 128).half()}, "must be float32"),
    "no LSE": ({"partial_lse": None}, "partial_lse must be a torch.Tensor"),
    "shape of the LSE": ({"partial_lse": torch.zeros(3, 2)}, "partial_lse must have shape"),
    "negative slot": ({"slot": -1}, r"slot must be in 0 .. 1 \(got -1\)"),
    "slot": ({"slot": 2}, r"slot must be in 0 .. 1 \(got 2\)"),
    "slot of no number": ({"slot": True}, r"slot must be in 0 .. 1 \(got True\)"),
    "base": ({"is_lse_base_on_e": "2"}, "is_lse_base_on_e must be True or False"),
    "only out": ({"out": torch.zeros(3, 4, 128)}, r"must be given both, or neither \(got only out\)"),
    "only lse_out": ({"lse_out": torch.zeros(3, 4)}, r"must be given both, or neither \(got only lse_out\)"),
    "out": ({"out": torch.zeros(3, 4, 64), "lse_out": torch.zeros(3, 4)}, "out must have shape"),
    "lse_out": ({"out": torch.zeros(3, 4, 128), "lse_out": torch.zeros(3, 4).double()}, "lse_out must be float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    wrong, text = WRONG[name]

    def body(group):
        workspace = DCPDirectReduceWorkspace(group, 4, 4, 128, torch.float32, 2, device="cpu")
        right = {"partial_output": torch.ones(3, 4, 128), "partial_lse": torch.zeros(3, 4)}
        with pytest.raises(DcpInvalidArgument, match=text):
            workspace.run(**(right | wrong))
        assert workspace.workspace.stats()["num_calls"] == 0
        assert workspace.run(**right)[0].eq(1).all()

    run_ranks(body, 1)
