"""dcpkernels.integrations.vllm against a stand-in for vLLM: what it replaces, when it leaves vLLM alone, and that what it
puts there keeps the contracts. The engine itself runs in tests/vllm."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dcpkernels import layout, reference
from dcpkernels.integrations import vllm as plugin
from dcpkernels.integrations.vllm_context import chunk_plan, context_gather
from dcpkernels.testing import ThreadGroup, assert_merge_close, merge_inputs
from tests import fake_vllm

HEADS, DQ, D = 3, 24, 16  # of one rank
WARNING = "dcpkernels: vLLM is left as it is"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(plugin, "_collectives", None)
    monkeypatch.setattr(plugin, "_tried", False)
    monkeypatch.setenv("DCPKERNELS_VLLM", "1")
    monkeypatch.setenv("DCPKERNELS_TIMEOUT_S", "20")


class Engine:
    """Thread ranks, each of which would be a process of vLLM: they share one module, and so the plugin in it."""

    def __init__(self, dcp, num_ranks, **config):
        self.dcp, self.num_ranks = dcp, num_ranks
        self.config = SimpleNamespace(**{"max_num_tokens": 8, "num_ubatches": 1, "use_a2a": True} | config)
        self.groups = [fake_vllm.FakeGroup(group) for group in ThreadGroup.create(num_ranks, timeout_s=30)]

    def run(self, body):
        """body(rank) on every rank; the results in rank order."""
        results, errors = [None] * self.num_ranks, []

        def one(rank):
            current.group = self.groups[rank]
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        return results

    def managers(self, **shape):
        fields = {
            "vllm_config": self.config,
            "device": torch.device("cpu"),
            "num_heads": HEADS,
            "query_head_dim": DQ,
            "output_head_dim": D,
            "query_dtype": torch.float32,
            "output_dtype": torch.float32,
            "padded_num_heads": None,
            "is_lse_base_on_e": True,
            "use_pcp": False,
        }
        return self.run(lambda rank: self.dcp.MLADCPManager(**fields | shape))


current = threading.local()


@contextmanager
def engine(num_ranks=2, *, version="0.32.0", lane=lambda: 0, break_it=None, **config):
    with fake_vllm.installed(lambda: current.group, version=version, lane=lane) as dcp:
        if break_it is not None:
            break_it(dcp)
        plugin.register()
        made = Engine(dcp, num_ranks, **config)
        yield made
        made.run(lambda rank: None)
        if plugin._collectives is not None:
            close(made)


def close(made):
    """Each rank closes what is its own: in a real engine the process has one rank."""
    groups = plugin._collectives._made
    by_rank = {group.rank_in_group: objects for group, objects in groups.items()}
    made.run(lambda rank: [each.workspace.close() for each in by_rank.get(rank, {}).values() if each is not None])


def inputs(num_ranks, num_tokens, *, dtype=torch.float32, seed=0):
    return merge_inputs(num_ranks, num_tokens, HEADS * num_ranks, D, dtype, kind="spread", seed=seed)


def check_merge(results, outs, lses, *, base="e", **lengths):
    assert_merge_close(torch.cat(list(results), 1), None, outs, lses, lse_base=base, **lengths)


# -- what a layer does


@pytest.mark.parametrize("use_a2a", [True, False], ids=["a2a", "ag_rs"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_layer_gathers_and_merges_by_ours(num_ranks, use_a2a):
    with engine(num_ranks, use_a2a=use_a2a) as ranks:
        managers = ranks.managers()
        for num_tokens, base in ((1, True), (8, True), (5, True)):
            outs, lses = inputs(num_ranks, num_tokens, seed=num_tokens)
            queries = torch.randn(num_ranks, num_tokens, HEADS, DQ)

            def step(rank, queries=queries, outs=outs, lses=lses):
                gathered = managers[rank].query_gather(queries[rank])
                copy = gathered.clone()
                return copy, managers[rank].combine(outs[rank], lses[rank], seq_lens=None, query_start_loc=None)

            results = ranks.run(step)
            expected = reference.query_gather(list(queries))
            assert all(torch.equal(gathered, expected) for gathered, _ in results)
            check_merge([merged for _, merged in results], outs, lses)
    assert plugin.calls() == {"query_gather": 3 * num_ranks, "a2a_lse_reduce": 3 * num_ranks, "kv_gather": 0}


@pytest.mark.parametrize("use_a2a", [True, False], ids=["a2a", "ag_rs"])
def test_base_two_and_lengths_are_passed_on(use_a2a):
    outs, lses = inputs(2, 6)
    lens = torch.tensor([[0, 3, 2], [4, 0, 1]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 3, 5], dtype=torch.int32)  # row 5 is padding
    poisoned = outs.clone()
    poisoned[0, :2], poisoned[1, 2:3] = float("nan"), float("nan")
    with engine(2, use_a2a=use_a2a) as ranks:
        managers = ranks.managers(is_lse_base_on_e=False)

        def step(rank):
            managers[rank].query_gather(torch.zeros(6, HEADS, DQ))
            return managers[rank].combine(poisoned[rank], lses[rank], seq_lens=lens[rank], query_start_loc=starts)

        check_merge(ranks.run(step), outs, lses, base="2", seq_lens=lens, query_start_loc=starts)


def test_more_rows_than_the_capacity():
    """vLLM gathers such a query by its own means, and merges by ours."""
    outs, lses = inputs(2, 50)
    with engine(2) as ranks:
        managers = ranks.managers()
        check_merge(ranks.run(lambda rank: managers[rank].combine(outs[rank], lses[rank])), outs, lses)


def test_layers_of_one_shape_share_a_workspace():
    with engine(2) as ranks:
        ranks.managers()
        ranks.managers()
        ranks.managers(query_head_dim=DQ * 2)
        made = [list(objects.values()) for objects in plugin._collectives._made.values()]
        assert [len(objects) for objects in made] == [2, 2]


def test_workspaces_go_with_their_group():
    with engine(2) as ranks:
        managers = ranks.managers()
        (objects,) = [
            objects for group, objects in plugin._collectives._made.items() if group.rank_in_group == 0
        ]
        gone = weakref.ref(next(iter(objects.values())).workspace)
        del managers, objects
        ranks.groups = [fake_vllm.FakeGroup(group) for group in ThreadGroup.create(2, timeout_s=30)]
        current.__dict__.clear()
        gc.collect()
        assert gone() is None


def test_padded_heads_lie_behind_the_view():
    with engine(2) as ranks:
        managers = ranks.managers(padded_num_heads=32)

        def step(rank):
            view = managers[rank].query_gather(torch.ones(8, HEADS, DQ))
            room = view.untyped_storage().nbytes() // 4 - view.storage_offset()
            managers[rank].combine(torch.zeros(8, 2 * HEADS, D), torch.zeros(8, 2 * HEADS))
            return view.stride(), room

        for stride, room in ranks.run(step):
            assert stride == (2 * HEADS * DQ, DQ, 1) and room >= 8 * 32 * DQ


def test_micro_batches_have_lanes_of_their_own():
    """Both queries are in use at a time: on one lane the second gather is an error."""
    lanes = threading.local()
    with engine(2, lane=lambda: getattr(lanes, "now", 0), num_ubatches=2) as ranks:
        managers = ranks.managers()
        outs, lses = inputs(2, 4)

        def step(rank):
            merged = []
            for _ in range(2):  # a merge on the wrong lane leaves that lane's query in use, which the next gather tells
                views = []
                for lanes.now in (0, 1):
                    views.append(managers[rank].query_gather(torch.full((4, HEADS, DQ), float(lanes.now))))
                assert [view.unique().tolist() for view in views] == [[0.0], [1.0]]
                merged = []
                for lanes.now in (0, 1):
                    merged.append(managers[rank].combine(outs[rank], lses[rank]))
            return merged

        results = ranks.run(step)
        for lane in (0, 1):
            check_merge([merged[lane] for merged in results], outs, lses)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_is_gathered_rank_by_rank(num_ranks):
    with engine(num_ranks) as ranks:
        managers = ranks.managers()
        buffer = [torch.zeros(40 * num_ranks + 40, DQ) for _ in range(num_ranks)]
        ranks.run(lambda rank: managers[rank].init_kv_gather(buffer[rank], 40 * num_ranks))
        for num_rows in (1, 40, 7, 7):
            local = torch.randn(num_ranks, num_rows, DQ)

            def step(rank, local=local, num_rows=num_rows):
                # As vLLM: one buffer has the own rows first, those of all ranks behind.
                buffer[rank][:num_rows] = local[rank]
                gathered = buffer[rank][40 : 40 + num_rows * num_ranks]
                managers[rank].kv_gather(gathered, buffer[rank][:num_rows])
                return gathered.clone()

            assert all(torch.equal(rows, local.flatten(0, 1)) for rows in ranks.run(step))
    assert plugin.calls()["kv_gather"] == 4 * num_ranks


def chunk_of(starts, lengths, num_ranks, interleave):
    """A ContextChunk with the fields that count, as vLLM's build_mla_chunked_context_metadata makes them: rows `starts[s]` ..
    of each request, where starts are whole turns over the ranks."""
    turn = num_ranks * interleave

    def padded(rows):
        return -(-rows // turn) * interleave

    local_starts = [padded(start) for start in starts]
    ends = [padded(start + length) for start, length in zip(starts, lengths, strict=True)]
    return SimpleNamespace(
        local_starts=local_starts,
        padded_local_seq_lens=[end - start for start, end in zip(local_starts, ends, strict=True)],
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_context_tokens=sum(lengths),
    )


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_is_gathered_in_sequence_order(num_ranks, interleave):
    """Whole requests, the middle of one and the end of one, from caches whose other rows are NaN. Tables are as wide as the
    rank's own rows need: vLLM counts as many as the fullest rank has."""
    block, totals = 16, [100, 385, 1]
    context = [torch.randn(total, DQ) for total in totals]
    caches, tables = [], []
    for rank in range(num_ranks):
        width = -(-layout.local_length(totals[1], num_ranks, rank, interleave) // block)
        cache, table = torch.full((80, block, DQ), float("nan")), torch.randperm(80)[: 3 * width].to(torch.int32)
        table = table.view(3, width)
        for rows, blocks in zip(context, table, strict=True):
            mine = rows[torch.arange(len(rows)) // interleave % num_ranks == rank]
            for slot, row in enumerate(mine):
                cache[blocks[slot // block], slot % block] = row
        caches.append(cache)
        tables.append(table)
    turn = num_ranks * interleave
    with engine(num_ranks) as ranks:
        managers = ranks.managers()
        buffer = torch.zeros(600 * num_ranks + 600, DQ)
        ranks.run(lambda rank: managers[rank].init_kv_gather(buffer, 600 * num_ranks))
        for starts, lengths in (([0, 0, 0], totals), ([turn, 3 * turn, 0], [7, 130, 1]), ([0, 2 * turn, 0], [1, 1, 1])):

            def step(rank, starts=starts, lengths=lengths):
                gather = context_gather(managers[rank])
                chunk = chunk_of(starts, lengths, num_ranks, interleave)
                out = torch.empty(chunk.num_context_tokens, DQ)
                plans = set()
                for _ in range(2):  # layers
                    plan = chunk_plan(chunk, tables[rank], block_size=block, interleave=interleave, gather=gather)
                    gather.gather_in_order(out, caches[rank], plan)
                    plans.add(id(plan))
                assert len(plans) == 1
                other = SimpleNamespace(workspace=gather.workspace)  # of a draft model
                assert chunk_plan(chunk, tables[rank], block_size=block, interleave=interleave, gather=other) is not plan
                return out

            parts = zip(context, starts, lengths, strict=True)
            expected = torch.cat([rows[start : start + length] for rows, start, length in parts])
            assert all(torch.equal(out, expected) for out in ranks.run(step))


# -- grouped-query attention, which has no manager


@pytest.mark.parametrize("function", ["dcp_a2a_lse_reduce", "cp_lse_ag_out_rs"])
def test_functions_that_are_taken_by_name(function):
    outs, lses = inputs(2, 5, dtype=torch.bfloat16)
    with engine(2) as ranks:
        import vllm.v1.attention.backends.flash_attn as flash_attn

        assert getattr(flash_attn, function) is getattr(ranks.dcp, function)
        merge = getattr(flash_attn, function)

        def step(rank):
            # The lse of flash attention is [H, T].
            lse = lses[rank].t().contiguous().transpose(0, 1)
            both = merge(outs[rank], lse, ranks.groups[rank], return_lse=True)
            alone = merge(outs[rank], lse, ranks.groups[rank], is_lse_base_on_e=True)
            assert torch.equal(alone, both[0])
            return both

        results = ranks.run(step)
        merged, lse = (torch.cat(parts, 1) for parts in zip(*results, strict=True))
        assert_merge_close(merged, lse, outs, lses, lse_base="e")


def test_heads_that_do_not_divide_and_single_ranks_stay_vllms():
    with engine(2) as ranks:
        merge = ranks.dcp.dcp_a2a_lse_reduce
        assert merge(torch.zeros(2, 5, 8), torch.zeros(2, 5), ranks.groups[0]) == "vllm's a2a"
        alone = SimpleNamespace(world_size=1)
        assert merge(torch.zeros(2, 4, 8), torch.zeros(2, 4), alone) == "vllm's a2a"


# -- vLLM's own path


def vllm_is_as_it_was(dcp):
    return dcp.dcp_a2a_lse_reduce is fake_vllm.dcp_a2a_lse_reduce and not hasattr(
        dcp.MLADCPManager.__init__, "__wrapped__"
    )


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_without_the_variable(monkeypatch, caplog, value):
    if value is None:
        monkeypatch.delenv("DCPKERNELS_VLLM")
    else:
        monkeypatch.setenv("DCPKERNELS_VLLM", value)
    with caplog.at_level(logging.DEBUG), engine() as ranks:
        assert vllm_is_as_it_was(ranks.dcp)
    assert caplog.text == ""


@pytest.mark.parametrize("version", ["0.28.0", "0.34.0", "1.0.0", "0.28.1rc2"])
def test_other_versions_are_left_alone(caplog, version):
    with engine(version=version) as ranks:
        assert vllm_is_as_it_was(ranks.dcp)
        plugin.register()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{WARNING} (vllm: version must be 0.29 to 0.33 (got {version}))"


@pytest.mark.parametrize("version", ["0.29.0", "0.33.1", "0.33.0rc1+cpu", "0.1.dev123+gabc", "dev"])
def test_known_versions_and_checkouts(version):
    with engine(version=version) as ranks:
        assert not vllm_is_as_it_was(ranks.dcp)


@pytest.mark.parametrize("name", plugin.SIGNATURES)
def test_one_other_signature_leaves_all_alone(caplog, name):
    def other(self, new_argument):
        raise AssertionError

    def break_it(dcp):
        owner, _, function = name.rpartition(".")
        setattr(getattr(dcp, owner) if owner else dcp, function, other)

    with engine(break_it=break_it) as ranks:
        dcp = ranks.dcp
        assert name.startswith("dcp_a2a") or dcp.dcp_a2a_lse_reduce is fake_vllm.dcp_a2a_lse_reduce
        assert not hasattr(dcp.MLADCPManager.__init__, "__wrapped__")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{WARNING} (vllm: vllm.v1.attention.ops.dcp.{name} must have the parameters ")
    assert line.endswith("(got self new_argument))")


def test_a_missing_name_and_a_missing_module(caplog, monkeypatch):
    with engine(break_it=lambda dcp: delattr(dcp, "cp_lse_ag_out_rs")):
        pass
    assert "dcp.cp_lse_ag_out_rs must exist" in caplog.text
    monkeypatch.setattr(plugin, "_tried", False)
    monkeypatch.setattr(plugin, "_DCP", "vllm.v1.attention.ops.dcp_utils")
    with engine():
        pass
    assert "dcp_utils must be importable" in caplog.text


def test_parameters_that_became_keyword_only_are_other_ones(caplog):
    def kv(*, group, device, max_gathered_tokens, token_dim, dtype, num_ubatches): ...

    with engine(break_it=lambda dcp: setattr(dcp, "get_direct_dcp_kv_gather_workspace", kv)) as ranks:
        assert vllm_is_as_it_was(ranks.dcp)
    assert "(got * group device" in caplog.text


def test_nothing_is_changed_where_a_later_piece_is_missing(caplog, monkeypatch):
    registered = []
    monkeypatch.setitem(sys.modules, "dcpkernels.integrations.vllm_cpu", SimpleNamespace(register=lambda: registered.append(1)))
    for cpu in (True, False):
        monkeypatch.setattr(plugin, "_tried", False)
        with fake_vllm.installed(lambda: None, cpu=cpu) as dcp:
            del sys.modules["vllm.v1.worker.ubatching"].dbo_current_ubatch_id
            plugin.register()
            assert vllm_is_as_it_was(dcp) and registered == []
    assert caplog.text.count(WARNING) == 2


def test_a_wrong_variable_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("DCPKERNELS_VLLM", "yes")
    with engine() as ranks:
        assert vllm_is_as_it_was(ranks.dcp)
    assert "DCPKERNELS_VLLM: must be one of 0, 1, direct, collective (got 'yes')" in caplog.text


def test_an_error_of_any_class_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(plugin.vllm_patch, "replace", lambda *_: 1 / 0)
    with engine():
        pass
    assert f"{WARNING} (division by zero)" in caplog.text


def test_the_second_time_does_nothing():
    with engine() as ranks:
        before = dict(vars(ranks.dcp)), ranks.dcp.MLADCPManager.__init__
        plugin.register()
        assert before == (dict(vars(ranks.dcp)), ranks.dcp.MLADCPManager.__init__)


def test_what_ours_cannot_do_stays_vllms_on_all_ranks(caplog):
    with engine(2) as ranks:
        managers = ranks.managers(output_dtype=torch.float64)
        assert [manager.query_gather(None) for manager in managers] == ["vllm's gather"] * 2
        assert [manager.combine(None, None) for manager in managers] == ["vllm's a2a"] * 2
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "dcpkernels: merge and query of 2 ranks: vLLM's own collectives (workspace: dtype must be one of "
        "float32, float16, bfloat16 (got torch.float64))"
    ] * 2  # fmt: skip


@pytest.mark.parametrize("use_a2a", [True, False], ids=["a2a", "ag_rs"])
def test_prefill_context_parallelism_stays_vllms(use_a2a):
    with engine(2, use_a2a=use_a2a) as ranks:
        managers = ranks.managers(use_pcp=True)
        own = "vllm's a2a" if use_a2a else "vllm's ag_rs"
        assert [manager.combine(None, None) for manager in managers] == [own] * 2
        buffer = torch.zeros(12, DQ)
        ranks.run(lambda rank: managers[rank].init_kv_gather(buffer, 8))
        assert [manager.kv_gather(None, None) for manager in managers] == ["vllm's kv"] * 2


def test_the_log_says_which_and_why(caplog, monkeypatch):
    monkeypatch.setenv("DCPKERNELS_VLLM", "collective")
    with caplog.at_level(logging.INFO, logger="vllm.dcpkernels"), engine(2) as ranks:
        ranks.managers()
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.dcpkernels"]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("dcpkernels: merge and query of 2 ranks on backend collective (as asked), ")


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    """To go on with vLLM's own would be to wait for it without an end."""
    monkeypatch.setenv("DCPKERNELS_FIRST_CALL_TIMEOUT_S", "0.5")
    with engine(2) as ranks:
        def only_the_first(rank):
            if rank == 0:
                with pytest.raises(TimeoutError):
                    ranks.dcp.MLADCPManager(
                        ranks.config, torch.device("cpu"), HEADS, DQ, D, torch.float32, torch.float32, None, True, False
                    )  # fmt: skip

        ranks.run(only_the_first)
