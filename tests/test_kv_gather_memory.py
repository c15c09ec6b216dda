"""What the gathers take: the bytes that `Workspace.size` names and no more; no temporary of the gathered size in a call."""

from __future__ import annotations

import os

import pytest
import torch

from dcpkernels import KVGatherPlan, Workspace, WorkspaceConfig, kv_gather, query_gather, release_query
from dcpkernels.testing import run_ranks
from tests.test_a2a_memory import ALLOWED, MIB, memory_bytes, peak_growth

ROWS, DIM = 66_048, 576
CHUNK_BYTES = ROWS * DIM * 2  # 72.6 MiB in bfloat16
TOKENS, HEADS, QUERY_DIM = 512, 96, 576
QUERY_BYTES = TOKENS * HEADS * QUERY_DIM * 2  # 54 MiB
NO_HIGH_WATER = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="no high-water mark that starts anew"
)
MULTICAST = pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "each rank's own"])


def mapped_bytes() -> dict[str, int]:
    """Of the files that this process maps from its workspaces: size by inode, each once."""
    sizes = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:dcpkernels" in line:
                place, _, _, _, inode, *_ = line.split()
                first, end = (int(part, 16) for part in place.split("-"))
                sizes[inode] = max(sizes.get(inode, 0), end - first)
    return sizes


CONFIGS = {
    "both gathers": {"query_head_dim": 576, "padded_num_heads": 128, "kv_chunk_rows": 5000, "kv_dim": 576},
    "query": {"query_head_dim": 33, "query_dtype": torch.float8_e4m3fn, "num_lanes": 3},
    "kv": {"kv_chunk_rows": 77, "kv_dim": 24, "num_lanes": 2, "num_channels": 3},
    "none": {},
}


def sizes(group, fields, multicast):
    config = WorkspaceConfig(12, 64, 16, multicast=multicast, **fields)
    told = Workspace.size(config, 3)
    with Workspace(group, config=config, backend="direct") as workspace:
        return told, workspace.num_bytes, sorted(mapped_bytes().values())


@MULTICAST
@pytest.mark.parametrize("name", CONFIGS)
def test_exactly_the_bytes_of_size(name, multicast):
    """Each rank maps the regions of all ranks and, once, the shared one; nothing else is shared memory of the library's."""
    for told, num_bytes, mapped in run_ranks(sizes, 3, CONFIGS[name], multicast, mode="process"):
        expected = sorted([told.total] * 3 + [told.shared_total] * (told.shared_total > 0))
        assert mapped == expected and num_bytes == told.total, (mapped, told)
        assert sum(told.parts.values()) <= told.total and sum(told.shared_parts.values()) <= told.shared_total
        in_use = told.shared_parts if multicast else told.parts
        wanted = {"both gathers": 2, "query": 1, "kv": 1, "none": 0}[name]
        assert sum(part in in_use for part in ("query_gather.buffer", "kv_gather.buffers")) == wanted
        assert (told.shared_total > 0) == (multicast and wanted > 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 6])
def test_what_the_buffers_need(num_ranks):
    """The arithmetic of the manual, rounded up to pages."""
    page, fields = 4096, CONFIGS["both gathers"]
    for multicast in (True, False):
        told = Workspace.size(WorkspaceConfig(12, 64, 16, num_lanes=2, multicast=multicast, **fields), num_ranks)
        parts = told.shared_parts if multicast else told.parts
        one = 5000 * 576 * 2
        # Room for 16 rows of 12 heads at least, and at most for 16 rows of all 128.
        assert 2 * (16 * 12 + 116) * 576 * 2 <= parts["query_gather.buffer"] <= 2 * (16 * 128 * 576 * 2 + page)
        assert parts["kv_gather.buffers"] == 4 * -(-one // page) * page


def measure_kv(group, multicast):
    config = WorkspaceConfig(2, 8, 4, kv_chunk_rows=ROWS, kv_dim=DIM, multicast=multicast, timeout_s=60)
    with Workspace(group, config=config, backend="direct") as workspace:
        # One block that stands for all, so that the cache itself is small.
        table = torch.zeros(1, -(-ROWS // 2 // 64), dtype=torch.int64)
        fields = {"block_size": 64, "num_ranks": 2, "rank": workspace.rank, "chunk_size": ROWS}
        plan = KVGatherPlan([ROWS], table, **fields)
        cache = torch.ones(1, 64, DIM, dtype=torch.bfloat16)
        for _ in range(2):  # so that the pages of both buffers are there
            chunk = kv_gather(cache, plan, 0, workspace=workspace)
        assert chunk.eq(1).all()
        anonymous = memory_bytes("RssAnon")
        grown = {"call": peak_growth(lambda: kv_gather(cache, plan, 0, workspace=workspace))}
        grown["kept"] = memory_bytes("RssAnon") - anonymous
        chunk = kv_gather(cache, plan, 0, workspace=workspace)
        grown["a copy"] = peak_growth(lambda: chunk.clone())
        return grown


@NO_HIGH_WATER
@MULTICAST
def test_no_temporary_in_kv_gather(multicast):
    """A chunk of 66,048 rows of 576 in bfloat16. That the measurement would see a copy is measured too."""
    for grown in run_ranks(measure_kv, 2, multicast, mode="process"):
        assert grown["a copy"] > CHUNK_BYTES - ALLOWED, grown
        assert grown["call"] < ALLOWED and grown["kept"] < ALLOWED, grown


def measure_dequantised(group):
    config = WorkspaceConfig(2, 8, 4, kv_chunk_rows=ROWS, kv_dim=DIM, kv_dtype=torch.float8_e4m3fn, timeout_s=60)
    with Workspace(group, config=config, backend="direct") as workspace:
        table = torch.zeros(1, -(-ROWS // 2 // 64), dtype=torch.int64)
        plan = KVGatherPlan([ROWS], table, block_size=64, num_ranks=2, rank=workspace.rank, chunk_size=ROWS)
        cache = torch.ones(1, 64, DIM).to(torch.float8_e4m3fn)
        out = torch.zeros(ROWS, DIM, dtype=torch.bfloat16)
        for _ in range(2):
            kv_gather(cache, plan, 0, workspace=workspace, scale=2.0, out=out)
        grown = peak_growth(lambda: kv_gather(cache, plan, 0, workspace=workspace, scale=2.0, out=out))
        assert out.eq(2).all()
        return grown, peak_growth(lambda: kv_gather(cache, plan, 0, workspace=workspace, scale=2.0))


@NO_HIGH_WATER
def test_no_temporary_where_the_reader_dequantises():
    for with_out, without_out in run_ranks(measure_dequantised, 2, mode="process"):
        assert with_out < ALLOWED, with_out
        assert CHUNK_BYTES - ALLOWED < without_out < CHUNK_BYTES + ALLOWED, without_out


def measure_query(group, multicast):
    fields = {"query_head_dim": QUERY_DIM, "multicast": multicast, "timeout_s": 60}
    config = WorkspaceConfig(HEADS, 8, TOKENS, **fields)
    with Workspace(group, config=config, backend="direct") as workspace:
        mine = (TOKENS, HEADS // 2)
        query = (torch.ones(*mine, 512).bfloat16(), torch.ones(mine[1], TOKENS, 64).bfloat16().transpose(0, 1))
        out = torch.zeros(TOKENS, HEADS, QUERY_DIM, dtype=torch.bfloat16)

        def call(**arguments):
            result = query_gather(query, workspace=workspace, **arguments)
            if "out" not in arguments:
                release_query(workspace=workspace)
            return result

        view = call()
        assert view.eq(1).all()
        grown = {"call": peak_growth(call), "a copy": peak_growth(lambda: view.clone())}
        call(out=out)
        grown["out"] = peak_growth(lambda: call(out=out))
        assert out.eq(1).all()
        call(scale=0.5)
        grown["fp8"] = peak_growth(lambda: call(scale=0.5))
        return grown


@NO_HIGH_WATER
@MULTICAST
def test_no_temporary_in_query_gather(multicast):
    """512 tokens of 96 heads of 576 in bfloat16, in two parts: nobody concatenates them first."""
    for grown in run_ranks(measure_query, 2, multicast, mode="process"):
        assert grown["a copy"] > QUERY_BYTES - ALLOWED, grown
        assert max(grown[name] for name in ("call", "out", "fp8")) < ALLOWED, grown


def test_the_measure_is_fine_enough():
    assert ALLOWED <= 4 * MIB < QUERY_BYTES / 10 < CHUNK_BYTES / 10
