"""What FlashInfer's names refuse, and what stands for its tensor of a workspace."""

from __future__ import annotations

import pytest
import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch, DcpUnsupported
from dcpkernels.integrations.flashinfer import (
    DecodeCpWorkspace,
    decode_cp_a2a_lse_reduce,
    decode_cp_a2a_lse_reduce_create_workspace,
    decode_cp_a2a_lse_reduce_workspace_size,
)
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt
from tests.drop_in_calls import partials
from tests.test_flashinfer_names import by_peer, make, merge

GEOMETRY = {"max_tokens": 8, "local_heads": 2, "cp_size": 4, "head_dim": 128, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number >= 1"),
        ({"local_heads": 0}, "local_heads must be a whole number >= 1"),
        ({"local_heads": True}, "local_heads must be a whole number >= 1"),
        ({"cp_size": 65}, "cp_size must be at most 64"),
        ({"head_dim": 0}, "head_dim must be a whole number >= 1"),
        ({"dtype": torch.int32}, "dtype must be one of"),
        ({"dtype": "bfloat16"}, "dtype must be one of"),
        ({"no_such_field": 1}, "other keywords must be fields of WorkspaceConfig"),
        ({"num_heads": 8}, "other keywords must be fields of WorkspaceConfig"),
        ({"timeout_s": -1}, "timeout_s must be a number of seconds"),
    ],
    ids=str,
)
def test_wrong_geometry(wrong, text):
    with pytest.raises(DcpInvalidArgument, match=text):
        decode_cp_a2a_lse_reduce_workspace_size(**(GEOMETRY | wrong))
    with pytest.raises(ValueError, match=text):
        decode_cp_a2a_lse_reduce_create_workspace(**(GEOMETRY | wrong), group=None)


def test_lse_mode_is_looked_at_first():
    for wrong in ("invalid", "2", None, 1):
        with pytest.raises(ValueError, match="lse_mode must be 'base2' or 'basee'"):
            decode_cp_a2a_lse_reduce(torch.empty(0), torch.empty(0), torch.empty(0), 0, 1, lse_mode=wrong)


def test_what_stands_for_the_tensor(monkeypatch):
    """What callers ask of FlashInfer's tensor; and the size is known before."""

    def body(group):
        sizes = (8, 2, 4, 128, torch.bfloat16)
        workspace = decode_cp_a2a_lse_reduce_create_workspace(*sizes, group)  # exactly as in FlashInfer
        assert isinstance(workspace, DecodeCpWorkspace)
        expected = decode_cp_a2a_lse_reduce_workspace_size(*sizes)
        assert workspace.numel() == workspace.nbytes == workspace.size(0) == expected == workspace.workspace.num_bytes
        assert workspace.shape == workspace.size() == (expected,) and workspace.dim() == workspace.element_size() == 1
        assert (workspace.dtype, workspace.device, workspace.is_cuda) == (torch.uint8, torch.device("cpu"), False)
        assert f"rank {group.rank} of 4, max_tokens=8, local_heads=2, head_dim=128" in repr(workspace)
        workspace.close()
        partial_o, partial_lse = torch.zeros(1, 2, 4, 128).bfloat16(), torch.zeros(1, 2, 4)
        with pytest.raises(DcpError, match="the workspace must be open"):
            merge((partial_o, partial_lse), workspace)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else a GPU is what it takes
    run_ranks(body, 4)


def test_cp_size_is_that_of_the_group():
    def body(group):
        for wrong in (1, 4):
            with pytest.raises(DcpInvalidArgument, match=rf"cp_size must be the size of the group, 2 \(got {wrong}\)"):
                decode_cp_a2a_lse_reduce_create_workspace(4, 2, wrong, 16, torch.float32, group, device="cpu")
        # On one rank alone: all learn of it.
        with pytest.raises(DcpUnsupported, match="num_heads"):
            cp_size = 2 + 2 * group.rank
            decode_cp_a2a_lse_reduce_create_workspace(4, 2, cp_size, 16, torch.float32, group, device="cpu")

    run_ranks(body, 2)


WRONG = {
    "no workspace": ({"workspace": torch.empty(8)}, "workspace must be what .*create_workspace returned .got Tensor"),
    "the other rank": ({"cp_rank": 1}, r"cp_rank and cp_size must be those of the workspace, 0 and 1 \(got 1 and 1\)"),
    "two ranks": ({"cp_size": 2}, r"must be those of the workspace, 0 and 1 \(got 0 and 2\)"),
    "no tensor": ({"partial_o": [1.0]}, r"partial_o must be a torch.Tensor \(got list\)"),
    "no LSE": ({"partial_lse": None}, r"partial_lse must be a torch.Tensor \(got NoneType\)"),
    "one dim": ({"partial_o": torch.zeros(8)}, r"partial_o must have shape \[..., cp_size, head_dim\] = \[..., 1, 8\]"),
    "peers": ({"partial_o": torch.zeros(3, 2, 2, 8)}, r"must have shape .* \[..., 1, 8\] \(got \[3, 2, 2, 8\]\)"),
    "head_dim": ({"partial_o": torch.zeros(3, 2, 1, 16)}, r"must have shape .* \[..., 1, 8\] \(got \[3, 2, 1, 16\]\)"),
    "shape of the LSE": ({"partial_lse": torch.zeros(2, 3, 1)}, r"partial_lse must have partial_o's shape .*3, 2, 1\]"),
    # Neither is converted on the way.
    "dtype": ({"partial_o": torch.zeros(3, 2, 1, 8).half()}, r"partial_out must be float32 \(got float16\)"),
    "dtype of the LSE": ({"partial_lse": torch.zeros(3, 2, 1).double()}, r"partial_lse must be .* \(got float64\)"),
    "integers, filled up": (
        {"partial_o": torch.zeros(3, 1, 8), "partial_lse": torch.zeros(3, 1).int()},
        "partial_lse must be float32 or .*torch.int32",
    ),
    "sparse": ({"partial_o": torch.zeros(3, 2, 1, 8).to_sparse()}, "must be a strided tensor .got torch.sparse_coo"),
    "last stride": ({"partial_o": torch.zeros(3, 2, 1, 16)[..., ::2]}, "must have stride 1 in its last dim"),
    "device": ({"partial_o": torch.zeros(3, 2, 1, 8, device="meta")}, "must be on the workspace's device"),
    "out": ({"out": torch.zeros(3, 2, 1, 8)}, r"out must be \[3, 2, 8\], torch.float32, cpu \(got \[3, 2, 1, 8\]"),
    "out no tensor": ({"out": 1}, r"out must be a torch.Tensor \(got int\)"),
    "dtype of out": ({"out": torch.zeros(3, 2, 8).half()}, r"out must be .*torch.float16"),
    "lse_out": ({"lse_out": torch.zeros(3, 2).double()}, r"lse_out must be \[3, 2\], torch.float32, cpu"),
    "out over itself": ({"out": torch.zeros(1, 1, 8).expand(3, 2, 8)}, "out must not overlap itself"),
    "strides of out": (
        {
            "partial_o": torch.zeros(2, 3, 1, 8), "partial_lse": torch.zeros(2, 3, 1),
            "out": torch.zeros(3, 2, 8).transpose(0, 1),
        },
        r"out must be contiguous where its leading dims are not \[T, 2\]",
    ),
    "lane": ({"lane": 1}, "lane must be in 0 .. 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """Found before anything is sent: the workspace is as before."""
    wrong, text = WRONG[name]

    def body(group):
        workspace = decode_cp_a2a_lse_reduce_create_workspace(4, 2, 1, 8, torch.float32, group, device="cpu")
        right = {"partial_o": torch.ones(3, 2, 1, 8), "partial_lse": torch.zeros(3, 2, 1)}
        right |= {"workspace": workspace, "cp_rank": 0, "cp_size": 1}
        with pytest.raises(DcpInvalidArgument, match=text):
            decode_cp_a2a_lse_reduce(**(right | wrong))
        assert workspace.workspace.stats()["num_calls"] == 0
        assert decode_cp_a2a_lse_reduce(**right).eq(1).all()

    run_ranks(body, 1)


def test_ranks_that_differ_learn_of_it():
    """In the base, where FlashInfer's ranks would merge all the same, or in the rows."""
    outs, lses = partials(2, 3, 4, 16, torch.float32)

    def body(group, differ):
        workspace = make(group, outs, 3)
        inputs = by_peer(outs, lses, group.rank)
        raised = attempt(merge, inputs if differ == "base" else [t[: 2 + group.rank] for t in inputs], workspace,
                         lse_mode="base2" if differ == "rows" or group.rank else "basee")  # fmt: skip
        assert isinstance(raised.error, DcpMismatch) and raised.seconds < 20

    for differ in ("base", "rows"):
        run_ranks(body, 2, differ)
