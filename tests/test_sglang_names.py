"""The calls of SGLang's DCP code: signatures as published, shapes and bases of each, against the fp64 reference.

Published are sgl-project/sglang's `layers/dcp/comm.py`, and `symm_a2a` of its PR 33364.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dcpkernels import reference
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.integrations import flashinfer, sglang
from dcpkernels.integrations.sglang import DcpComm, DirectSymmA2AWorkspace, estimate_symm_a2a_workspace_nbytes
from dcpkernels.testing import assert_merge_close, run_ranks
from tests.a2a_calls import same_bits
from tests.drop_in_calls import containers, copies, crossed, partials
from tests.test_readme import blocks, run_script, script

empty = inspect.Parameter.empty
BASES = {True: "e", False: "2"}
GEOMETRY = ("max_num_tokens", "heads_per_rank", "head_dim", "dtype")


def coordinator(group):
    """What of SGLang's GroupCoordinator is used, around a group of threads."""
    return SimpleNamespace(world_size=group.num_ranks, rank_in_group=group.rank, cpu_group=group, device_group=group)


def make(group, outs, max_num_tokens, cls=DcpComm, num_ubatches=1, **fields):
    num_ranks, _, num_heads, head_dim = outs.shape
    sizes = (max_num_tokens, num_heads // num_ranks, head_dim, outs.dtype)
    return cls(coordinator(group), "cpu", *sizes, num_ubatches, timeout_s=60, **fields)


# -- as published


def signature(function):
    """Without self."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


ATTENTION = [("cp_attn_out", empty), ("cp_attn_lse", empty), ("cp_group", empty)]
PUBLISHED = {
    DcpComm.dcp_a2a_lse_reduce: [
        *ATTENTION, ("is_lse_base_on_e", True), ("cuda_graph_buffers", None), ("comm_backend", "a2a"), ("ubatch_id", 0)
    ],
    DcpComm.cp_lse_ag_out_rs_mha: [*ATTENTION, ("return_lse", False)],
    DcpComm.cp_lse_ag_out_rs_mla: [*ATTENTION, ("ctx", None), ("is_lse_base_on_e", False)],
    DcpComm.all_gather_q_for_mla_decode: [("q_nope_out", empty), ("q_pe", empty)],
    DcpComm.gather_q_heads: [("q", empty)],
    DirectSymmA2AWorkspace.__init__: [
        ("cp_group", empty), ("device", empty), *((name, empty) for name in GEOMETRY), ("num_ubatches", 1)
    ],
    DirectSymmA2AWorkspace.lse_reduce: [
        ("attn_out", empty), ("lse", empty), ("is_lse_base_on_e", True), ("ubatch_id", 0), ("output", None)
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", PUBLISHED, ids=lambda function: function.__qualname__)
def test_signatures(function):
    assert signature(function) == PUBLISHED[function]
    more = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is not empty for p in more)


def test_the_signature_of_the_estimate():
    parameters = list(inspect.signature(estimate_symm_a2a_workspace_nbytes).parameters.values())
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
    expected = [("world_size", empty), *((name, empty) for name in GEOMETRY), ("num_ubatches", 1)]
    assert [(p.name, p.default) for p in parameters][:6] == expected


# -- merges


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a2a(dtype, num_ranks):
    """dcp_a2a_lse_reduce as MLA and as GQA call it, by place and by name; no copy on the way, of views neither."""
    outs, lses = partials(num_ranks, 7, 3 * num_ranks, 64, dtype, kind="all_empty")

    def body(group):
        comm, rank = make(group, outs, 5), group.rank
        head_major = outs[rank].transpose(0, 1).contiguous().transpose(0, 1)
        for is_lse_base_on_e, base in BASES.items():
            symm = {"comm_backend": "symm_a2a", "ubatch_id": 0}
            ways = [
                ((outs[rank], lses[rank], comm.cp_group, is_lse_base_on_e, {"send_combined": None}, "fi_a2a"), {}),
                ((head_major, lses[rank], comm.cp_group), {"is_lse_base_on_e": is_lse_base_on_e}),
                ((outs[rank], lses[rank], comm.cp_group, is_lse_base_on_e), symm),
            ]
            if is_lse_base_on_e:  # GQA
                ways.append(((outs[rank].contiguous(), lses[rank].contiguous(), comm.cp_group), {}))
            results = [copies(comm.dcp_a2a_lse_reduce, *arguments, **keywords) for arguments, keywords in ways]
            for out, copied in results:
                assert out.shape == (7, 3, 64) and same_bits(out, results[0][0]) and copied == []
            assert_merge_close(results[0][0], None, outs, lses, lse_base=base, rank=rank)
            mine = torch.full((7, 3, 64), math.nan, dtype=dtype)
            asked = {"is_lse_base_on_e": is_lse_base_on_e, "return_lse": True, "out": mine}
            found, lse = comm.dcp_a2a_lse_reduce(outs[rank], lses[rank], comm.cp_group, **asked)
            assert found is mine and same_bits(found, results[0][0])
            assert_merge_close(found, lse, outs, lses, lse_base=base, rank=rank)

    run_ranks(body, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ag_rs(num_ranks):
    """The two functions of `ag_rs`: GQA's with the merged LSE, MLA's with heads first. Inputs stay as they are."""
    outs, lses = partials(num_ranks, 5, 4 * num_ranks, 64, torch.bfloat16, kind="empty")
    before = outs.clone(), lses.clone()

    def body(group):
        comm, rank = make(group, outs, 5), group.rank
        inputs = (outs[rank], lses[rank], comm.cp_group)
        out, lse = comm.cp_lse_ag_out_rs_mha(*inputs, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == ((5, 4, 64), (5, 4), torch.float32)
        assert_merge_close(out, lse, outs, lses, lse_base="e", rank=rank)
        assert same_bits(comm.cp_lse_ag_out_rs_mha(*inputs), out)
        for is_lse_base_on_e, base in BASES.items():
            by_head = comm.cp_lse_ag_out_rs_mla(*inputs, None, is_lse_base_on_e)
            assert by_head.shape == (4, 5, 64)
            # As the call site goes on: what it transposes is flat then.
            flat = by_head.transpose(0, 1).view(-1, 4 * 64)
            assert_merge_close(flat.view(5, 4, 64), None, outs, lses, lse_base=base, rank=rank)
        default = comm.cp_lse_ag_out_rs_mla(*inputs)
        assert same_bits(default, comm.cp_lse_ag_out_rs_mla(*inputs, is_lse_base_on_e=False))

    run_ranks(body, num_ranks)
    assert same_bits(outs, before[0]) and same_bits(lses, before[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_symm_a2a(dtype, num_ranks):
    """Micro-batches with a buffer each; an output of the caller's; empty shards with NaN in them."""
    cases = [partials(num_ranks, 7, 2 * num_ranks, 64, dtype, kind=kind) for kind in ("spread", "all_empty")]

    def body(group):
        workspace, rank = make(group, cases[0][0], 7, DirectSymmA2AWorkspace, num_ubatches=2), group.rank
        assert workspace.combined_output.shape == (2, 7, 2, 64)
        for is_lse_base_on_e, base in BASES.items():
            results = []
            for ubatch_id, (outs, lses) in enumerate(cases):
                arguments = (outs[rank], lses[rank], is_lse_base_on_e, ubatch_id)
                out, copied = copies(workspace.lse_reduce, *arguments)
                assert copied == [] and out.data_ptr() == workspace.combined_output[ubatch_id].data_ptr()
                results.append((out, out.clone()))
                mine = torch.full((7, 2, 64), math.nan, dtype=dtype)
                assert workspace.lse_reduce(*arguments, mine) is mine and same_bits(mine, out)
                found, lse = workspace.lse_reduce(*arguments, output=mine, return_lse=True)
                assert found is mine
                assert_merge_close(found, lse, outs, lses, lse_base=base, rank=rank)
            assert all(same_bits(now, then) for now, then in results)
        default = workspace.lse_reduce(cases[0][0][rank], cases[0][1][rank])
        assert_merge_close(default, None, *cases[0], lse_base="e", rank=rank)
        workspace.close()

    run_ranks(body, num_ranks)


def test_micro_batches_do_not_wait_for_each_other():
    cases = [partials(2, 8, 8, 64, torch.float16, seed=seed) for seed in (1, 2)]

    def body(group):
        rank, outs = group.rank, cases[0][0]
        comm = make(group, outs, 8, num_ubatches=2, query_head_dim=64)
        workspace = make(group, outs, 8, DirectSymmA2AWorkspace, num_ubatches=2)

        def merges(ubatch_id):
            outs, lses = cases[ubatch_id]
            heads = comm.gather_q_heads(outs[0, :, 4 * rank : 4 * rank + 4], ubatch_id=ubatch_id)
            assert same_bits(heads, outs[0])
            parts = heads[:, 4 * rank : 4 * rank + 4].split(32, -1)
            latent, rope = comm.all_gather_q_for_mla_decode(*parts, ubatch_id=ubatch_id)
            assert same_bits(torch.cat((latent, rope), -1), outs[0])
            out = comm.dcp_a2a_lse_reduce(outs[rank], lses[rank], comm.cp_group, ubatch_id=ubatch_id)
            assert_merge_close(out, None, outs, lses, lse_base="e", rank=rank)
            assert same_bits(workspace.lse_reduce(outs[rank], lses[rank], ubatch_id=ubatch_id), out)

        for _ in range(20):
            crossed(rank, lambda: merges(0), lambda: merges(1))

    run_ranks(body, 2)


def test_more_tokens_than_it_was_made_for():
    def body(group):
        workspace = comm = None
        for num_tokens in (0, 3, 11):
            outs, lses = partials(2, num_tokens, 4, 16, torch.bfloat16, seed=num_tokens)
            workspace = workspace or make(group, outs, 4, DirectSymmA2AWorkspace)
            comm = comm or make(group, outs, 4)
            inputs = (outs[group.rank], lses[group.rank])
            by_comm = comm.cp_lse_ag_out_rs_mha(*inputs, comm.cp_group, True)
            found = (workspace.lse_reduce(*inputs, return_lse=True), by_comm)
            for out, lse in found:
                assert out.shape == (num_tokens, 2, 16)
                assert_merge_close(out, lse, outs, lses, lse_base="e", rank=group.rank)

    run_ranks(body, 2)


def test_one_rank_gives_back_what_it_got():
    """As SGLang's functions, whatever else they are given."""

    def body(group):
        outs, lses = partials(1, 3, 6, 8, torch.float16)
        comm, (out, lse) = make(group, outs, 4, query_head_dim=8), (outs[0], lses[0])
        assert comm.dcp_a2a_lse_reduce(out, lse, comm.cp_group, comm_backend="symm_a2a", ubatch_id=99) is out
        assert comm.cp_lse_ag_out_rs_mha(out, lse, comm.cp_group) is out
        assert comm.cp_lse_ag_out_rs_mha(out, lse, comm.cp_group, return_lse=True) == (out, lse)
        assert comm.cp_lse_ag_out_rs_mla(out, lse, comm.cp_group) is out
        assert comm.gather_q_heads(out) is out
        assert all(a is b for a, b in zip(comm.all_gather_q_for_mla_decode(out, out), (out, out), strict=True))
        assert comm.workspace.stats()["num_calls"] == 0

    run_ranks(body, 1)


# -- gathers


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathers(num_ranks):
    """Latent and rope of MLA, whole heads of GQA; strided as they come from a projection; any number of tokens, with
    and without a merge behind them."""

    def body(group):
        outs, lses = partials(num_ranks, 4, 2 * num_ranks, 24, torch.bfloat16)
        comm = make(group, outs, 4, query_head_dim=24, num_ubatches=2)
        for num_tokens in (4, 0, 1, 9):
            whole = torch.randn(num_tokens, 2 * num_ranks, 32, generator=torch.Generator().manual_seed(num_tokens))
            whole = whole.bfloat16()
            mine = whole[:, 2 * group.rank : 2 * group.rank + 2]
            for ubatch_id in (0, 1):
                latent, rope = comm.all_gather_q_for_mla_decode(mine[..., :16], mine[..., 20:28], ubatch_id=ubatch_id)
                assert (latent.shape[2], rope.shape[2]) == (16, 8)
                parts = [(q[..., :16].contiguous(), q[..., 20:28].contiguous()) for q in whole.split(2, dim=1)]
                assert same_bits(torch.cat((latent, rope), dim=-1), reference.query_gather(parts))
                heads = comm.gather_q_heads(mine[..., :24], ubatch_id=ubatch_id)
                assert same_bits(heads, whole[..., :24].contiguous())
        out = comm.dcp_a2a_lse_reduce(outs[group.rank], lses[group.rank], comm.cp_group)
        assert_merge_close(out, None, outs, lses, lse_base="e", rank=group.rank)

    run_ranks(body, num_ranks)


def test_a_decode_step_of_gqa():
    """Query heads gathered, attention over an interleaved shard of the cache with fewer KV heads, merged: the attention
    over all of it. Then a chunk more, by the merged LSE, as chunked prefill goes on."""
    generator = torch.Generator().manual_seed(1)
    num_ranks, num_tokens, num_heads, num_kv_heads, dim, lengths = 2, 3, 8, 2, 16, (50, 1, 33)
    query = torch.randn(num_tokens, num_heads, dim, generator=generator)
    keys, values = torch.randn(2, num_tokens, 60, num_kv_heads, dim, generator=generator)

    def attend(q, tokens):
        """[T, H, D] and LSE [T, H] of the positions that `tokens` gives for each length."""
        results = []
        for t, n in enumerate(lengths):
            k, v = (x[t, tokens(n)].repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,nhd->hn", q[t], k) / math.sqrt(dim)
            results.append((torch.einsum("hn,nhd->hd", scores.softmax(-1), v), scores.logsumexp(-1)))
        return tuple(torch.stack(x) for x in zip(*results, strict=True))

    def body(group):
        comm, rank = make(group, torch.empty(num_ranks, 0, num_heads, dim), 4, query_head_dim=dim), group.rank
        mine = slice(4 * rank, 4 * rank + 4)
        partial = attend(comm.gather_q_heads(query[:, mine]), lambda n: torch.arange(rank, n, num_ranks))
        out, lse = comm.dcp_a2a_lse_reduce(*partial, comm.cp_group, return_lse=True)
        whole, whole_lse = attend(query, torch.arange)
        torch.testing.assert_close(out, whole[:, mine], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse, whole_lse[:, mine], rtol=1e-6, atol=1e-6)
        chunk = attend(query, lambda n: torch.arange(n, n + 5))
        both = reference.a2a_lse_reduce(
            torch.stack([out, chunk[0][:, mine]]), torch.stack([lse, chunk[1][:, mine]]), lse_base="e"
        )
        expected = attend(query, lambda n: torch.arange(n + 5))
        torch.testing.assert_close(both[0].float(), expected[0][:, mine], rtol=0, atol=1e-5)

    run_ranks(body, num_ranks)


# -- what SGLang makes of FlashInfer's names


def test_fi_a2a():
    """As SGLang's fi_a2a calls FlashInfer: all by name, packed, in chunks of the workspace's rows where the batch is
    larger than it, nothing for an empty one."""

    def body(group):
        num_ranks, local_heads, head_dim, dtype, max_tokens = 2, 3, 16, torch.bfloat16, 4
        geometry = {"max_tokens": max_tokens, "local_heads": local_heads, "cp_size": num_ranks}
        geometry |= {"head_dim": head_dim, "dtype": dtype}
        workspace = flashinfer.decode_cp_a2a_lse_reduce_create_workspace(**geometry, group=group, device="cpu")
        assert workspace.numel() == flashinfer.decode_cp_a2a_lse_reduce_workspace_size(**geometry, device="cpu")
        capacity = max_tokens * local_heads
        for num_tokens in (1, 4, 11):
            outs, lses = partials(num_ranks, num_tokens, num_ranks * local_heads, head_dim, dtype, seed=num_tokens)
            partial_o = outs[group.rank].view(-1, num_ranks, local_heads, head_dim).transpose(1, 2).contiguous()
            partial_lse = lses[group.rank].view(-1, num_ranks, local_heads).transpose(1, 2).contiguous()
            rows = num_tokens * local_heads
            o_rows, lse_rows = partial_o.view(rows, num_ranks, head_dim), partial_lse.view(rows, num_ranks)
            for is_lse_base_on_e, base in BASES.items():
                out = partial_o.new_empty(rows, head_dim)
                for start in range(0, rows, capacity):
                    chunk = slice(start, min(start + capacity, rows))
                    out[chunk] = flashinfer.decode_cp_a2a_lse_reduce(
                        partial_o=o_rows[chunk], partial_lse=lse_rows[chunk], workspace=workspace, cp_rank=group.rank,
                        cp_size=num_ranks, lse_mode="basee" if is_lse_base_on_e else "base2",
                    )  # fmt: skip
                out = out.view(num_tokens, local_heads, head_dim)
                assert_merge_close(out, None, outs, lses, lse_base=base, rank=group.rank)

    run_ranks(body, 2)


def in_processes(group):
    """With process groups inside the coordinator, one that is handed on by a copy, and a process group as it is."""
    outs, lses = partials(2, 3, 4, 32, torch.bfloat16)
    rank = dist.get_rank()
    groups = {"world_size": 2, "rank_in_group": rank, "cpu_group": group, "device_group": dist.group.WORLD}
    first, copied, other = (SimpleNamespace(**groups) for _ in range(3))
    other.cpu_group = dist.new_group([0, 1])
    for cp_group, same in ((first, copied), (dist.group.WORLD, dist.group.WORLD)):
        comm = DcpComm(cp_group, "cpu", 4, 2, 32, torch.bfloat16, timeout_s=60)
        out = comm.dcp_a2a_lse_reduce(outs[rank], lses[rank], same)
        assert_merge_close(out, None, outs, lses, lse_base="e", rank=rank)
        with pytest.raises(DcpInvalidArgument, match="cp_group must be the group that this was made for"):
            comm.dcp_a2a_lse_reduce(outs[rank], lses[rank], other)
        comm.close()


def test_processes():
    run_ranks(in_processes, 2, mode="process", timeout_s=120)


def test_no_state_of_the_module():
    assert containers(sglang) == []


def test_the_example_of_the_page(tmp_path):
    assert run_script(tmp_path, script("docs/sglang.md", "sglang_step.py")) in blocks("docs/sglang.md", "text")
