"""Same inputs, same bits: whenever ranks arrive, however rows are batched, on every lane and CPU variant."""

from __future__ import annotations

import random
import time

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.errors import DcpUnsupported
from dcpkernels.testing import ThreadGroup, run_ranks
from dcpkernels.testing.inputs import KINDS
from tests.a2a_calls import Call, assemble, config_for, make_call, merge, run_calls, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU_ISAS = ["v4_bf16", "v4", "v3", "baseline"]


def executable_isas() -> list[str]:
    """The variants that this machine runs; baseline it always does."""
    found = []
    for isa in CPU_ISAS:
        (group,) = ThreadGroup.create(1)
        try:
            Workspace(group, config=config_for(make_call(1, 1, 1, 64, torch.float32), cpu_isa=isa)).close()
        except DcpUnsupported:
            continue
        found.append(isa)
    assert "baseline" in found
    return found


def assert_same(results, names) -> None:
    (first, first_lse), *others = results
    for name, (out, lse) in zip(names[1:], others, strict=True):
        assert same_bits(out, first) and same_bits(lse, first_lse), (names[0], name)


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_give_the_same_bits(dtype, num_ranks):
    """200 calls on the same tensors; ranks come in any order, some late by up to a millisecond. Two of the rows are
    tied: all ranks hold the same."""
    call = make_call(num_ranks, 4, num_ranks * 3, 72, dtype, kind="empty")
    call.lses[:, :2], call.outs[:, :2] = 1.5, call.outs[:1, :2].nan_to_num(0.5)

    def body(group):
        delays = random.Random(group.rank)
        with Workspace(group, config=config_for(call)) as workspace:
            for _ in range(200):
                if delays.random() < 0.2:
                    time.sleep(delays.random() * 1e-3)
                yield merge(workspace, call)

    results = assemble(run_ranks(lambda group: list(body(group)), num_ranks))
    call.check(*results[0])
    assert_same(results, range(200))


@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype, num_ranks):
    """128 rows together, 8 at a time, one at a time, in another order, and in another workspace's several rounds."""
    call = make_call(num_ranks, 128, num_ranks * 3, 64, dtype, kind="empty", seed=8)

    def part(rows):
        return Call(call.outs[:, rows].contiguous(), call.lses[:, rows].contiguous())

    def in_parts(parts, **fields):
        results = run_calls([part(rows) for rows in parts], **fields)
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    together = in_parts([range(128)])
    call.check(*together)
    assert_same(
        [
            together,
            in_parts([range(i, i + 8) for i in range(0, 128, 8)]),
            in_parts([[i] for i in range(128)]),
            in_parts([range(0, 1), range(1, 8), range(8, 128)]),
            in_parts([range(128)], max_num_tokens=7),
        ],
        ["together", "eights", "single", "1, 7, 120", "rounds of 7"],
    )
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    shuffled = in_parts([order.tolist()])
    assert same_bits(shuffled[0], together[0][order]) and same_bits(shuffled[1], together[1][order])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_variants_give_the_same_bits(dtype, num_ranks):
    """All that this machine can execute, in both bases and on every kind of input, for head sizes that do and do not
    fill the vectors. The ranks of one group may also run different ones."""
    isas = executable_isas()
    for i, head_dim in enumerate([1, 17, 64, 72, 576]):
        calls = [
            make_call(num_ranks, 5, num_ranks * 3, head_dim, dtype, kind=kind, lse_base=base, seed=i)
            for kind in KINDS
            for base in "e2"
        ]
        by_isa = [run_calls(calls, cpu_isa=isa) for isa in isas]
        for results in zip(*by_isa, strict=True):
            assert_same(results, isas)
        if head_dim < 64:  # the others are held to the truth in test_a2a_lse_reduce.py
            [call.check(*result) for call, result in zip(calls, by_isa[0], strict=True)]

    def body(group):
        isa = isas[group.rank % len(isas)]
        with Workspace(group, config=config_for(calls[0], cpu_isa=isa)) as workspace:
            return [merge(workspace, calls[0])]

    assert_same([by_isa[0][0], *assemble(run_ranks(body, num_ranks))], [isas[0], "mixed"])


def test_another_variant_or_base_would_be_seen():
    """The comparison is of bits: a result in which one bit differs, and -0 for +0, do not pass."""
    ((out, lse),) = run_calls([make_call(2, 2, 2, 64, torch.float32, kind="all_empty")])
    flipped, negative = out.clone(), out.clone()
    flipped.view(torch.int32)[1, 1, 5] ^= 1
    negative[out == 0] = -0.0
    for wrong in (flipped, negative):
        with pytest.raises(AssertionError):
            assert_same([(out, lse), (wrong, lse)], ["right", "wrong"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_give_the_same_bits(dtype):
    """One call on each of 5 lanes of one workspace."""
    call = make_call(3, 4, 9, 72, dtype)
    lanes = [Call(call.outs, call.lses, lane=lane) for lane in (3, 0, 4, 1, 2)]
    assert_same(run_calls(lanes, num_lanes=5), range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_large_output_past_the_caches(dtype: torch.dtype) -> None:
    """Above 1 MiB of output a call stores past the caches where rows are aligned; the bits are those of small calls, of
    rows that are not aligned, and of every variant."""
    call = make_call(2, 48, 48, 520, dtype, seed=7)
    assert call.outs[0].nbytes // 2 > 2**20
    results = [run_calls([call], cpu_isa=isa)[0] for isa in executable_isas()]
    parts = [Call(call.outs[:, first : first + 8], call.lses[:, first : first + 8]) for first in range(0, 48, 8)]
    small = run_calls(parts)
    results.append(tuple(torch.cat([part[i] for part in small]) for i in (0, 1)))

    def odd_rows(group):
        with Workspace(group, config=config_for(call)) as workspace:
            out = torch.empty(48 * 24 * 520 + 1, dtype=dtype)[1:].view(48, 24, 520)
            return a2a_lse_reduce(workspace=workspace, return_lse=True, out=out, **call.arguments(workspace.rank))

    (odd,) = assemble([[of_rank] for of_rank in run_ranks(odd_rows, 2)])
    results.append(odd)
    call.check(*results[0])
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0]) and same_bits(lse, results[0][1])
