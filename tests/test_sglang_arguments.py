"""Sizes of the workspaces with SGLang's names, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.integrations.sglang import DcpComm, DirectSymmA2AWorkspace, estimate_symm_a2a_workspace_nbytes
from dcpkernels.testing import run_ranks
from tests.drop_in_calls import partials
from tests.test_sglang_names import coordinator, make


def test_sizes_and_geometry():
    """The estimate is what is allocated; the geometry is that of workspaces one of which can stand for the other."""

    def body(group):
        sizes = {"max_num_tokens": 4, "heads_per_rank": 3, "head_dim": 8, "dtype": torch.float16, "device": "cpu"}
        cp_group = coordinator(group)
        made = [DirectSymmA2AWorkspace(cp_group, num_ubatches=n, **sizes) for n in (1, 1, 2)]
        for workspace in made:
            estimate = estimate_symm_a2a_workspace_nbytes(world_size=2, num_ubatches=workspace.num_ubatches, **sizes)
            buffers = (workspace.combined_output, workspace._slots.lse)
            assert estimate == workspace.workspace.num_bytes + sum(b.numel() * b.element_size() for b in buffers)
        assert made[0].geometry == made[1].geometry != made[2].geometry
        other = DirectSymmA2AWorkspace(coordinator(group), **sizes)
        assert other.geometry != made[0].geometry

    run_ranks(body, 2)


@pytest.mark.parametrize("cls", [DcpComm, DirectSymmA2AWorkspace])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_num_tokens": 0}, "max_num_tokens must be"),
        ({"heads_per_rank": 0}, "heads_per_rank must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"dtype": torch.int16}, "dtype must be"),
        ({"num_ubatches": 0}, "num_ubatches must be"),
        ({"cp_group": object()}, "cp_group must be a GroupCoordinator or a process group"),
        ({"device": "no such"}, "device must name a torch device"),
        ({"num_lanes": 1}, "other keywords must be fields of WorkspaceConfig"),
    ],
    ids=str,
)
def test_wrong_geometry(cls, wrong, text):
    def body(group):
        right = {"cp_group": coordinator(group), "device": "cpu", "max_num_tokens": 4, "heads_per_rank": 3}
        right |= {"head_dim": 8, "dtype": torch.float16}
        with pytest.raises(DcpInvalidArgument, match=text):
            cls(**(right | wrong))

    run_ranks(body, 2)


def test_wrong_arguments():
    outs, lses = partials(2, 3, 4, 8, torch.float16)

    def body(group):
        comm, workspace = make(group, outs, 4), make(group, outs, 4, DirectSymmA2AWorkspace, num_ubatches=2)
        out, lse, rank = outs[group.rank], lses[group.rank], group.rank
        other = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=group, device_group=group)
        for text, call in {
            "comm_backend must be": lambda: comm.dcp_a2a_lse_reduce(out, lse, comm.cp_group, comm_backend="ag_rs"),
            "is_lse_base_on_e must be True": lambda: comm.dcp_a2a_lse_reduce(out, lse, comm.cp_group, "2"),
            "lane must be in 0 .. 0": lambda: comm.dcp_a2a_lse_reduce(out, lse, comm.cp_group, ubatch_id=1),
            "cp_group must be the group that this was made for": lambda: comm.cp_lse_ag_out_rs_mha(out, lse, other),
            "partial_out must be float16": lambda: comm.cp_lse_ag_out_rs_mla(out.float(), lse, comm.cp_group),
            r"partial_lse must have shape \[T, num_heads\]": lambda: workspace.lse_reduce(out, lse[:2]),
            r"ubatch_id must be in 0 .. 1 \(got 2\)": lambda: workspace.lse_reduce(out, lse, ubatch_id=2),
            r"ubatch_id must be in 0 .. 1 \(got -1\)": lambda: workspace.lse_reduce(out, lse, ubatch_id=-1),
            r"attn_out must have shape \[T, H, D\]": lambda: workspace.lse_reduce(out[0], lse),
            "out must have shape": lambda: workspace.lse_reduce(out, lse, output=torch.empty_like(out)),
            "q_pe must be a torch.Tensor": lambda: comm.all_gather_q_for_mla_decode(out, None),
            r"q must have shape \[B, H, D\]": lambda: comm.gather_q_heads(lse),
        }.items():
            with pytest.raises(DcpInvalidArgument, match=text):
                call()
        with pytest.raises(DcpError, match="must have been made with query_head_dim"):
            comm.gather_q_heads(out[:, :2])
        assert comm.workspace.stats()["num_calls"] == workspace.workspace.stats()["num_calls"] == 0
        comm.close()
        with pytest.raises(DcpError, match="the workspace must be open"):
            comm.cp_lse_ag_out_rs_mha(out, lse, comm.cp_group)

    run_ranks(body, 2)
