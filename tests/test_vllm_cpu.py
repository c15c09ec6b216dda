"""What the plugin adds to vLLM on CPUs, without vLLM: slots, gather of context and decode attention against plain loops, and
what is replaced where. The engine itself runs in tests/vllm."""

from __future__ import annotations

import math
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dcpkernels import layout
from dcpkernels.errors import DcpUnsupported
from dcpkernels.integrations import vllm_cpu
from dcpkernels.integrations.vllm_cpu_context import across_ranks
from dcpkernels.integrations.vllm_cpu_ops import CHUNK, gather_context, mla_decode, slot_mapping

BLOCK = 16
SHARDING = [(2, 1), (2, 16), (3, 4), (4, 16), (1, 1)]


# -- slots


@pytest.mark.parametrize(("num_ranks", "interleave"), SHARDING)
def test_every_token_has_one_slot_on_one_rank(num_ranks, interleave):
    """Requests in mid-prefill, in decode and without tokens, their positions from `layout`."""
    spans = [(0, 100), (37, 38), (5, 5), (250, 261)]  # first, end of the new tokens
    positions = torch.tensor([p for first, end in spans for p in range(first, end)])
    query_start_loc = torch.tensor([0, 100, 101, 101, 112], dtype=torch.int32)
    tables = torch.randperm(4 * 32).to(torch.int32).view(4, 32)
    for rank in range(num_ranks):
        out = torch.full((len(positions) + 5,), 12345)
        sharding = {"block_size": BLOCK, "num_ranks": num_ranks, "rank": rank, "interleave": interleave}
        slot_mapping(query_start_loc, positions, tables, out, **sharding)
        expected = []
        for s, (first, end) in enumerate(spans):
            for p in range(first, end):
                slot = layout.local_slot(p, num_ranks, interleave)
                row = int(tables[s, slot // BLOCK]) * BLOCK + slot % BLOCK
                expected.append(row if layout.owner(p, num_ranks, interleave) == rank else -1)
        assert out.tolist() == [*expected, *[-1] * 5]


# -- context


def test_context_is_gathered_from_where_it_starts():
    cache = torch.randn(40, BLOCK, 24)
    tables = torch.randperm(40)[:18].to(torch.int32).view(3, 6)
    starts, lengths = torch.tensor([0, 32, 5], dtype=torch.int32), [20, 0, 91]
    cu = torch.tensor([0, 20, 20, 111], dtype=torch.int32)
    out = torch.full((120, 24), math.nan)
    gather_context(cache, out, tables, cu, starts)
    rows = [cache[tables[s].long()].flatten(0, 1)[starts[s] : starts[s] + lengths[s]] for s in range(3)]
    assert torch.equal(out[:111], torch.cat(rows))
    assert out[111:].isnan().all()
    gather_context(cache, out, tables, cu)
    assert torch.equal(out[:20], rows[0])


def test_rows_past_the_last_block_are_padding():
    cache, tables = torch.randn(8, BLOCK, 8), torch.tensor([[3, 5]], dtype=torch.int32)
    out = torch.empty(40, 8)
    gather_context(cache, out, tables, torch.tensor([0, 40], dtype=torch.int32))  # 8 more than there are
    assert torch.equal(out[:32], cache[[3, 5]].flatten(0, 1))


# -- attention


def softmax_attention(query, keys, scale, value_dim):
    scores = scale * query.double() @ keys.double().T
    return scores.softmax(1) @ keys.double()[:, :value_dim], scores.logsumexp(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [[1], [0, 17, CHUNK, 0], [CHUNK + 1, 3], [4 * CHUNK + 100, 16, 0, 33], [0], []])
def test_attention_over_pages(dtype, lens):
    torch.manual_seed(0)
    heads, dim, value_dim, scale = 5, 24, 16, 0.3
    num_blocks = [-(-n // BLOCK) for n in lens]
    cache = torch.full((sum(num_blocks) + 2, BLOCK, dim), math.nan, dtype=dtype)
    numbers = torch.randperm(len(cache))
    tables = torch.zeros(len(lens), max(num_blocks, default=0) + 3, dtype=torch.int32)
    query = torch.randn(len(lens), heads, dim).to(dtype)
    before, keys = query.clone(), []
    for t, n in enumerate(lens):  # what no request has stays NaN: the rest of its last block, too
        first = sum(num_blocks[:t])
        tables[t, : num_blocks[t]] = numbers[first : first + num_blocks[t]]
        keys.append(torch.randn(n, dim).to(dtype))
        keys[t][:1] *= 20  # now and then the largest score comes first, or last
        for p in range(n):
            cache[tables[t, p // BLOCK], p % BLOCK] = keys[t][p]
    out, lse = mla_decode(query, cache, tables, torch.tensor(lens), scale=scale, value_dim=value_dim)
    assert out.dtype == dtype and out.shape == (len(lens), heads, value_dim)
    assert lse.dtype == torch.float32 and lse.shape == (len(lens), heads)
    assert torch.equal(query, before)
    for t, n in enumerate(lens):
        if n == 0:
            assert (lse[t] == -torch.inf).all()
            continue
        expected, expected_lse = softmax_attention(query[t], keys[t], scale, value_dim)
        torch.testing.assert_close(lse[t].double(), expected_lse, rtol=2e-6, atol=2e-6)
        bits = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        # A score is off by some 1e-7 of itself, and so by more than that is each weight of a value.
        torch.testing.assert_close(out[t].double(), expected, rtol=bits, atol=2e-6 * float(keys[t].abs().max()))


def test_a_first_chunk_that_outweighs_the_second_by_more_than_fp32_can_say():
    keys = torch.randn(2 * CHUNK, 8) * 0.01
    keys[3] = 15.0
    query = torch.full((1, 2, 8), 1.0)  # scores of 120 and of about 0: their ratio, e^120, is infinite
    tables = torch.arange(2 * CHUNK // BLOCK, dtype=torch.int32)[None]
    cache = keys.view(-1, BLOCK, 8)
    out, lse = mla_decode(query, cache, tables, torch.tensor([2 * CHUNK]), scale=1.0, value_dim=4)
    torch.testing.assert_close(out, torch.full((1, 2, 4), 15.0))
    torch.testing.assert_close(lse, torch.full((1, 2), 120.0))


# -- what is replaced


@pytest.fixture
def modules(monkeypatch):
    """Modules with the names that `register` looks for."""
    seen = SimpleNamespace(registered=[], slots=[], updated=[], gathered=[])

    class BlockTable:
        slot_mapping_mode = SimpleNamespace(name="TOKEN_TO_KV_SLOT")
        block_size, dcp_rank, cp_kv_cache_interleave_size = BLOCK, 1, 1

        def __init__(self, dcp_world_size):
            self.dcp_world_size = dcp_world_size
            self.block_table = SimpleNamespace(gpu=torch.tensor([[7, 9]], dtype=torch.int32))
            self.slot_mapping = SimpleNamespace(gpu=torch.full((6,), 99))

        def compute_slot_mapping(self, num_reqs, query_start_loc, positions):
            seen.slots.append(num_reqs)

    class CpuPlatform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            seen.updated.append(cls)
            vllm_config.scheduler_config.enable_chunked_prefill = False
            vllm_config.scheduler_config.max_num_batched_tokens = 2048
            vllm_config.cache_config.enable_prefix_caching = False

    class CPUMLABackend:
        @staticmethod
        def get_impl_cls():
            return None

    class CPUMLAImpl:
        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...
        def _compute_prefill_context(self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale): ...

    def register_backend(backend, class_path=None, is_mamba=False):
        seen.registered.append((backend, class_path))

    def cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None):
        raise AttributeError("no such op")

    def gather_mla_context_cache_cpu(*, src_cache, dst, block_table, starts, cu_seq_lens):
        seen.gathered.append(dst)

    contents = {
        "vllm.v1.attention.backends.registry": {
            "register_backend": register_backend,
            "AttentionBackendEnum": SimpleNamespace(CPU_MLA="cpu_mla"),
        },
        "vllm.v1.attention.backends.mla.cpu_mla": {"CPUMLABackend": CPUMLABackend, "CPUMLAImpl": CPUMLAImpl},
        "vllm.v1.worker.block_table": {"BlockTable": BlockTable},
        "vllm._custom_ops": {
            "cp_gather_cache": cp_gather_cache,
            "gather_mla_context_cache_cpu": gather_mla_context_cache_cpu,
        },
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
    }
    for name in contents:
        for depth in range(1, name.count(".") + 1):  # its packages
            package = ".".join(name.split(".")[:depth])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(seen=seen, block_table=BlockTable, platform=CpuPlatform, named=sys.modules)


def config(num_ranks, *, use_mla=True, backend=None):
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        parallel_config=SimpleNamespace(decode_context_parallel_size=num_ranks),
        attention_config=SimpleNamespace(backend=backend),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def chunks_of(configured):
    scheduler = configured.scheduler_config
    return scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, configured.cache_config.enable_prefix_caching


def test_what_is_registered_and_once(modules):
    vllm_cpu.register()
    vllm_cpu.register()
    assert modules.seen.registered == [("cpu_mla", vllm_cpu.BACKEND)]


def test_slots_are_ours_with_dcp_only(modules):
    vllm_cpu.register()
    new = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([31, 32, 33])
    modules.block_table(1).compute_slot_mapping(1, *new)
    assert modules.seen.slots == [1]
    sharded = modules.block_table(2)
    sharded.compute_slot_mapping(1, *new)
    assert modules.seen.slots == [1]
    assert sharded.slot_mapping.gpu.tolist() == [7 * BLOCK + 15, -1, 9 * BLOCK, -1, -1, -1]
    sharded.slot_mapping_mode = SimpleNamespace(name="NONE")  # of a cache that has no slots
    sharded.compute_slot_mapping(1, *new)
    assert modules.seen.slots == [1, 1]


def test_the_gather_takes_the_requests_that_it_is_told(modules):
    vllm_cpu.register()
    cache, out = torch.randn(4, BLOCK, 8), torch.zeros(8, 8)
    tables, cu = torch.tensor([[2], [3]], dtype=torch.int32), torch.tensor([0, 5, 8], dtype=torch.int32)
    modules.named["vllm._custom_ops"].cp_gather_cache(cache, out, tables, cu, batch_size=1)
    assert torch.equal(out[:5], cache[2, :5]) and not out[5:].any()


def test_context_is_gathered_across_ranks_where_it_is_asked_for(modules):
    """Chunk by chunk, in this thread; before, behind and after an error vLLM's own gather runs."""
    vllm_cpu.register()
    gather = modules.named["vllm._custom_ops"].gather_mla_context_cache_cpu
    plans, taken = [SimpleNamespace(), SimpleNamespace()], []
    ours = SimpleNamespace(gather_in_order=lambda out, cache, plan: taken.append((out, cache, plan)))
    chunks = [
        SimpleNamespace(request_slice=slice(i, i + 1), _dcpkernels_plan=((ours, BLOCK, 1), plan))
        for i, plan in enumerate(plans)
    ]
    cache, outs = torch.zeros(4, BLOCK, 8), [torch.zeros(3, 8) for _ in range(4)]
    unused = {"block_table": None, "starts": None, "cu_seq_lens": None}
    gather(src_cache=cache, dst=outs[0], **unused)
    with across_ranks(SimpleNamespace(chunks=chunks), torch.zeros(2, 4, dtype=torch.int32), ours, 1):
        gather(src_cache=cache, dst=outs[1], **unused)
        gather(src_cache=cache, dst=outs[2], **unused)
        other = threading.Thread(target=gather, kwargs={"src_cache": cache, "dst": outs[0], **unused})
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), across_ranks(SimpleNamespace(chunks=chunks), None, ours, 1):
        _ = 1 / 0
    gather(src_cache=cache, dst=outs[3], **unused)
    assert [(out is outs[i + 1], plan is plans[i]) for i, (out, _, plan) in enumerate(taken)] == [(True, True)] * 2
    assert [next(i for i, out in enumerate(outs) if out is dst) for dst in modules.seen.gathered] == [0, 0, 3]


def test_chunks_stay_as_asked_with_dcp_only(modules):
    vllm_cpu.register()
    sharded, whole, other = config(2), config(1), config(2, use_mla=False)
    for configured in (sharded, whole, other):
        modules.platform.check_and_update_config(configured)
    assert modules.seen.updated == [modules.platform] * 3
    assert chunks_of(sharded) == (True, 64, True)
    assert chunks_of(whole) == chunks_of(other) == (False, 2048, False)
    assert (sharded.attention_config.backend, whole.attention_config.backend) == ("cpu_mla", None)
    named = config(2, backend="another")
    modules.platform.check_and_update_config(named)
    assert named.attention_config.backend == "another"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("vllm.v1.attention.backends.registry", None, "register_backend"),
        ("vllm.v1.worker.block_table", "BlockTable", "compute_slot_mapping"),
        ("vllm._custom_ops", None, "cp_gather_cache"),
        ("vllm._custom_ops", None, "gather_mla_context_cache_cpu"),
        ("vllm.platforms.cpu", "CpuPlatform", "check_and_update_config"),
        ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl", "forward_mqa"),
        ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl", "_compute_prefill_context"),
    ],
)
def test_nothing_is_replaced_where_a_signature_differs(modules, monkeypatch, module, owner, name):
    of = modules.named[module] if owner is None else getattr(modules.named[module], owner)
    monkeypatch.setattr(of, name, lambda new_parameter: None)
    before = modules.block_table.compute_slot_mapping
    with pytest.raises(DcpUnsupported, match=f"{name} must have the parameters"):
        vllm_cpu.register()
    assert modules.block_table.compute_slot_mapping is before and modules.seen.registered == []


def test_nothing_is_replaced_where_a_module_is_gone(modules, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.block_table", None)
    with pytest.raises(DcpUnsupported, match="block_table must be importable"):
        vllm_cpu.register()
    assert modules.seen.registered == []
