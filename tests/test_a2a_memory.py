"""What a call takes: no copy of its tensors, measured; and sizes and strides past 32 bits."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os

import pytest
import torch

from dcpkernels import WorkspaceConfig, a2a_lse_reduce
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, make_call, same_bits
from tests.a2a_ways import PAYLOADS, WAYS, lay_in, num_elements

MIB = 2**20
ROWS, HEADS, HEAD_DIM = 4096, 16, 512  # 64 MiB in bfloat16
ALLOWED = 4 * MIB  # the counters of a process's pages are inexact by a few hundred; threads have stacks


def memory_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))


def peak_growth(fn) -> int:
    """Bytes by which the process's resident memory grew while fn ran, at most."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the high-water mark starts anew
    before = memory_bytes("VmRSS")
    fn()
    return memory_bytes("VmHWM") - before


def measure(group, way: str) -> dict[str, int]:
    num_rows = ROWS + 64 if WAYS[way].hands_out else 64
    config = WorkspaceConfig(HEADS, HEAD_DIM, num_rows, **WAYS[way].fields)
    layout, shape = PAYLOADS["head-major, rows 4 .. of a larger capacity"], (ROWS, HEADS, HEAD_DIM)
    values = torch.ones(1, dtype=torch.bfloat16).expand(shape)  # no memory of its own
    with WAYS[way].open(group, config) as workspace:
        own = torch.empty(num_elements(layout, shape) + 64, dtype=torch.bfloat16)
        lse = torch.zeros(HEADS, ROWS).T
        out = torch.full((HEADS // 2, ROWS, HEAD_DIM), 5.0, dtype=torch.bfloat16).transpose(0, 1)
        lse_out = torch.zeros(HEADS // 2, ROWS).T

        def payload():
            memory = workspace.partial_out(num_rows).view(-1) if WAYS[way].hands_out else own
            return lay_in(memory, layout, values)

        def call(partial_out, **outputs):
            rows = len(partial_out)
            return a2a_lse_reduce(partial_out, lse[:rows], workspace=workspace, lse_base="e", **outputs)

        [payload() for _ in range(2)]
        call(payload()[:1])
        workspace.warmup()
        anonymous, results = memory_bytes("RssAnon"), {}
        # Twice, for both buffers of zero copy and all of the peers' regions to be mapped: those bytes are the workspace's.
        for _ in range(2):
            returned = call(payload(), out=out, lse_out=lse_out)
            assert returned[0] is out and returned[1] is lse_out
        results["kept by calls"] = memory_bytes("RssAnon") - anonymous
        partial_out = payload()
        results["with out"] = peak_growth(lambda: call(partial_out, out=out, lse_out=lse_out))
        assert out.eq(1).all() and torch.allclose(lse_out, torch.full_like(lse_out, math.log(2.0)))
        partial_out = payload()
        results["without out"] = peak_growth(lambda: call(partial_out))
        results["a copy"] = peak_growth(lambda: partial_out.contiguous())
        return results


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no high-water mark that starts anew")
@pytest.mark.parametrize("way", WAYS)
def test_no_copy_of_a_strided_input(way):
    """64 MiB, head-major: with out= a call takes no memory to speak of, without it what it returns. That the measurement
    would see a copy is measured too."""
    for grown in run_ranks(measure, 2, way, mode="process", timeout_s=120):
        assert grown["a copy"] > 60 * MIB, grown
        assert grown["with out"] < ALLOWED and grown["kept by calls"] < ALLOWED, grown
        assert 30 * MIB < grown["without out"] < 32 * MIB + ALLOWED, grown


# -- the end of memory

LAST_PAGES = 4  # more than what any tensor below has


def at_the_end(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy of the values, whose last one is the last that this process may touch."""
    memory = mmap.mmap(-1, (LAST_PAGES + 1) * mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=values.dtype)
    behind = whole.data_ptr() + LAST_PAGES * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    span = sum((n - 1) * stride for n, stride in zip(values.shape, strides, strict=True)) + 1
    first = LAST_PAGES * mmap.PAGESIZE // values.dtype.itemsize - span
    return whole.as_strided(values.shape, strides, first).copy_(values)


def merge_at_the_end(group, way: str, dtype: torch.dtype):
    """Rows of 3 and more bytes short of 16, so that something lies between payload and LSEs in a staged row."""
    for head_dim in (1, 5, 6, 13, 20):
        call = make_call(2, 3, 4, head_dim, dtype, kind="empty")
        with WAYS[way].open(group, WAYS[way].config(call, max_num_tokens=2)) as workspace:
            arguments = call.arguments(workspace.rank)
            expected = a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments)
            for pitch in (head_dim, head_dim + 1, head_dim + 3, head_dim + 100):
                for strides in ((4 * pitch, pitch), (pitch, 3 * pitch)):
                    arguments["partial_out"] = at_the_end(call.outs[workspace.rank], (*strides, 1))
                    arguments["partial_lse"] = at_the_end(call.lses[workspace.rank], strides)
                    out, lse_out = (at_the_end(part, (2 * pitch, pitch, 1)[: part.ndim]) for part in expected)
                    out.fill_(7.0), lse_out.fill_(7.0)
                    a2a_lse_reduce(workspace=workspace, out=out, lse_out=lse_out, **arguments)
                    assert same_bits(out, expected[0]) and same_bits(lse_out, expected[1]), (head_dim, pitch, strides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_at_the_end_of_memory(way, dtype):
    """Ranks as processes: one that reads or writes behind an element that it was given ends by SIGSEGV."""
    run_ranks(merge_at_the_end, 2, way, dtype, mode="process", timeout_s=120)


# -- 64 bits

FAR = 2**31 + 16  # elements


def sparse(shape, strides, dtype) -> torch.Tensor:
    """A tensor in memory of which only touched pages exist."""
    span = (sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
    no_reserve = 0x4000  # MAP_NORESERVE, which Python 3.10 does not name
    memory = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@pytest.mark.parametrize("far", ["tokens", "heads", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_strides_past_32_bits(way, far):
    """Tokens, heads, or both, 2**31 + 16 elements apart in all four tensors, with fp32 2**33 bytes and more; 3 tokens in
    rounds of 2."""
    try:
        all_of_it = [sparse((3, 4), (4 * FAR, FAR), torch.float32) for _ in range(8)]
    except OSError as error:
        pytest.skip(f"this machine does not promise so much memory ({error})")
    del all_of_it
    call = make_call(2, 3, 4, 24, torch.float32, kind="empty")
    strides = {"tokens": (FAR, 24, 1), "heads": (24, FAR, 1), "both": (4 * FAR, FAR, 1)}[far]
    lse_strides = tuple(1 if stride == 24 else stride for stride in strides[:2])

    def body(group):
        with WAYS[way].open(group, WAYS[way].config(call, max_num_tokens=2)) as workspace:
            arguments = call.arguments(workspace.rank)
            expected = a2a_lse_reduce(workspace=workspace, return_lse=True, **arguments)
            arguments["partial_out"] = sparse((3, 4, 24), strides, torch.float32).copy_(arguments["partial_out"])
            arguments["partial_lse"] = sparse((3, 4), lse_strides, torch.float32).copy_(arguments["partial_lse"])
            arguments["out"] = sparse((3, 2, 24), strides, torch.float32)
            arguments["lse_out"] = sparse((3, 2), lse_strides, torch.float32)
            returned = a2a_lse_reduce(workspace=workspace, **arguments)
            assert returned[0] is arguments["out"] and returned[1] is arguments["lse_out"]
            assert same_bits(returned[0], expected[0]) and same_bits(returned[1], expected[1])
            return [expected]

    ((out, lse),) = assemble(run_ranks(body, 2))
    call.check(out, lse)
