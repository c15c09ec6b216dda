"""A decode step in one graph: the example of docs/torch_compile.md, compiled by Inductor on two ranks, against the same
step without compilation and against attention over the whole cache.

Gather and merge are looked at where they run: there, compiled code has called the functions of `dcpkernels`, as often and
in the order that the step has them, and they have given the bits that they give anybody.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import torch

import dcpkernels
from dcpkernels import Workspace, WorkspaceConfig, reference
from dcpkernels.integrations.torch_ops import TraceableWorkspace
from dcpkernels.testing import assert_merge_close, run_ranks
from tests.a2a_calls import meet, same_bits
from tests.torch_ops_calls import INDUCTOR

ROOT = Path(__file__).parents[1]
RANKS, HEADS, HIDDEN, QUERY_DIM, VALUE_DIM, BLOCK_SIZE, MAX_TOKENS = 2, 6, 24, 20, 16, 4, 8
SCALE = QUERY_DIM**-0.5
NAMES = ["query_gather", "a2a_lse_reduce"]
CONFIG = WorkspaceConfig(
    HEADS, VALUE_DIM, MAX_TOKENS, torch.float32, query_head_dim=QUERY_DIM, query_dtype=torch.float32,
    timeout_s=120.0, first_call_timeout_s=120.0,  # the other rank may still be compiling
)  # fmt: skip


def make_step(*arguments):
    """That of the page."""
    page = (ROOT / "docs/torch_compile.md").read_text()
    (example,) = re.findall(r"^```python\n(# compiled_step\.py.*?)^```$", page, re.DOTALL | re.MULTILINE)
    scope = {}
    exec(compile(example, "compiled_step.py", "exec"), scope)
    return scope["make_step"](*arguments)


class Model:
    """Weights, and the sequences of a step, of which a rank has every other token: of the shortest one, rank 1 none."""

    def __init__(self, num_tokens):
        generator = torch.Generator().manual_seed(num_tokens)

        def numbers(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).float()

        self.query_weights = numbers(RANKS, HIDDEN, HEADS // RANKS * QUERY_DIM) / math.sqrt(HIDDEN)
        self.out_weights = numbers(RANKS, HEADS // RANKS * VALUE_DIM, HIDDEN)
        self.hidden = numbers(num_tokens, HIDDEN)
        self.lens = [1 + 5 * t % 24 for t in range(num_tokens)]
        self.rows = [numbers(n, QUERY_DIM) for n in self.lens]

    def inputs(self, rank):
        """Of the step. Blocks are dealt out backwards; what no token has written is NaN."""
        locals_ = [rows[rank::RANKS] for rows in self.rows]
        most = math.ceil(24 / RANKS / BLOCK_SIZE)
        # Block 0 is nobody's, of zeros: a table names it where a sequence has no block.
        cache = torch.zeros(1 + 20 * most, BLOCK_SIZE, QUERY_DIM)
        tables = torch.zeros(len(locals_), most, dtype=torch.int64)
        for t, rows in enumerate(locals_):
            for k, part in enumerate(rows.split(BLOCK_SIZE)):
                tables[t, k] = len(cache) - 1 - t * most - k
                cache[tables[t, k], : len(part)] = part
        lens = torch.tensor([len(rows) for rows in locals_])
        return self.hidden, self.query_weights[rank], cache, tables, lens, self.out_weights[rank]

    def expected(self, rank):
        """The rank's share of the output, by attention over whole sequences, in fp64."""
        hidden = self.hidden.double()
        query = torch.cat([(hidden @ w.double()).unflatten(1, (-1, QUERY_DIM)) for w in self.query_weights], dim=1)
        merged = torch.stack(
            [
                (query[t] @ rows.double().T * SCALE).softmax(-1) @ rows[:, :VALUE_DIM].double()
                for t, rows in enumerate(self.rows)
            ]
        )
        return merged.chunk(RANKS, dim=1)[rank].flatten(1) @ self.out_weights[rank].double()


def watched(workspace, step, *inputs):
    """Its result, and what `dcpkernels`' functions were given and gave: (name, inputs, result) for each call."""
    calls = []

    def watch(name, function):
        def call(*arguments, **keywords):
            given = [part.clone() for part in (arguments[0] if name == "query_gather" else arguments)]
            result = function(*arguments, **keywords)
            calls.append((name, given, result.clone()))
            return result

        return call

    before = workspace.stats()["num_calls"]
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setattr(dcpkernels, name, watch(name, getattr(dcpkernels, name)))
        result = step(*inputs)
    return result, calls, workspace.stats()["num_calls"] - before


def gathered_of(group, tensor):
    """That tensor of every rank."""
    from dcpkernels.heap.group import as_group

    return as_group(group).all_gather_object(tensor, timeout_s=60)


def check(group, workspace, step, eager, num_tokens):
    rank, model = workspace.rank, Model(num_tokens)
    inputs = model.inputs(rank)
    for tensor in (inputs[0], *inputs[3:5]):
        torch._dynamo.mark_dynamic(tensor, 0)
    out, calls, count = watched(workspace, step, *inputs)
    expected, eager_calls, eager_count = watched(workspace, eager, *inputs)
    # As many as in the text, once each, in its order.
    assert count == eager_count and count >= 2, (count, eager_count)
    assert [name for name, *_ in calls] == [name for name, *_ in eager_calls] == NAMES

    # The projection before the gather is one product: its bits are the same, and so are those of the gather.
    (_, (query,), gathered), (_, (partial_out, lse), merged) = calls
    assert same_bits(query, eager_calls[0][1][0]) and same_bits(gathered, eager_calls[0][2])
    assert same_bits(gathered, reference.query_gather(gathered_of(group, query)))
    # The merge of what compiled attention has brought: within its own bound, and the bits of the function.
    outs, lses = torch.stack(gathered_of(group, partial_out)), torch.stack(gathered_of(group, lse))
    assert_merge_close(merged, None, outs, lses, lse_base="e", rank=rank)
    again = dcpkernels.a2a_lse_reduce(partial_out, lse, workspace=workspace, lse_base="e")
    assert same_bits(merged, again)
    empty = lses[1].isneginf()
    assert empty.any() and not empty.all() and outs[1][empty].isnan().all()

    # Sums of at most 24, 20 and 48 products, in fp32.
    assert out.shape == (num_tokens, HIDDEN) and out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.double(), model.expected(rank), rtol=1e-5, atol=2e-5)


def compiled_steps(group, cache):
    os.environ.update(INDUCTOR, TORCHINDUCTOR_CACHE_DIR=cache)
    import torch._inductor.config
    from torch._dynamo.utils import counters

    torch._inductor.config.compile_threads = 1  # no pool of processes besides the ranks
    with Workspace(group, config=CONFIG) as workspace:
        eager = make_step(TraceableWorkspace(workspace), VALUE_DIM, SCALE)
        step = torch.compile(eager, fullgraph=True)
        check(group, workspace, step, eager, 5)
        with torch.compiler.set_stance("fail_on_recompile"):
            for num_tokens in (3, 2 * MAX_TOKENS + 3, 5):
                check(group, workspace, step, eager, num_tokens)
        meet(group)
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_a_compiled_step(tmp_path):
    found = run_ranks(compiled_steps, RANKS, str(tmp_path), mode="process", timeout_s=240)
    assert found == [(1, 0)] * RANKS
