"""Cases of test_torch_ops.py and test_torch_ops_kv_gather.py, on ops that lack one of the protections: each has to
fail, on every rank. One that passes here shows nothing there.

Seen with torch 2.13: what `state` prevents is that calls are dropped and swapped; what a mutated `out` prevents is that
it is read too early; either prevents that equal calls are merged, which torch does in graphs with a backward only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dcpkernels
from dcpkernels.integrations import torch_ops
from dcpkernels.integrations.torch_ops import TraceableWorkspace
from dcpkernels.testing import run_ranks
from tests.test_torch_ops import (
    in_place_after_a_gather,
    two_equal_calls_into_one_tensor,
    two_equal_calls_where_gradients_flow,
    unused_results,
)
from tests.test_torch_ops_kv_gather import (
    an_unused_kv_gather,
    in_place_after_a_kv_gather,
    two_equal_kv_gathers_into_one_tensor,
)
from tests.torch_ops_calls import run_cases

# What each op declares, and what it declares instead.
DECLARED = {
    "a2a_lse_reduce": ("out", "lse_out", "state"),
    "query_gather": ("out", "state"),
    "kv_gather": ("out", "state"),
}
BREAKS = {"no state": lambda names: names[:-1], "no output": lambda names: names[-1:], "nothing": lambda names: ()}
# Who must see it.
SEEN_BY = {
    "no state": (unused_results, an_unused_kv_gather),
    "no output": (in_place_after_a_gather, in_place_after_a_kv_gather),
    "nothing": (two_equal_calls_into_one_tensor, two_equal_kv_gathers_into_one_tensor),
}
RETURNING = (two_equal_calls_where_gradients_flow, unused_results)
CASES = {case.__name__: case for pair in (*SEEN_BY.values(), RETURNING) for case in pair}


def broken(op, what, folder):
    """torch_ops with one line changed, whose ops have names of their own."""
    name = f"broken_{op}_{what.replace(' ', '_')}"
    source, declared = Path(torch_ops.__file__).read_text(), DECLARED[op]
    line = f'"dcpkernels::{op}", mutates_args={declared!r}'.replace("'", '"')
    assert source.count(line) == 1
    changed = f'"dcpkernels::{op}", mutates_args={BREAKS[what](declared)!r}'
    source = (
        source.replace(line, changed).replace("dcpkernels::", f"{name}::").replace("ops.dcpkernels.", f"ops.{name}.")
    )
    file = folder / f"{name}_{os.getpid()}.py"  # each rank its own: another one would read it half written
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._plans = torch_ops._plans  # in which the cases register
    return module


@torch.library.custom_op("broken_returning::a2a_lse_reduce", mutates_args=(), device_types="cpu")
def _merge(partial_out: Tensor, partial_lse: Tensor, heads: int, handle: int, lse_base: str, lane: int) -> Tensor:
    workspace = torch_ops._registry.find("broken", handle)
    return dcpkernels.a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base=lse_base, lane=lane)


@torch.library.custom_op("broken_returning::query_gather", mutates_args=(), device_types="cpu")
def _gather(query: Tensor, heads: int, handle: int, lane: int) -> Tensor:
    workspace, out = torch_ops._registry.find("broken", handle), with_heads(query, heads)
    return dcpkernels.query_gather(query, workspace=workspace, out=out, lane=lane)


def with_heads(tensor, heads):
    return tensor.new_empty((tensor.shape[0], heads, tensor.shape[2]))


@_merge.register_fake
def _(partial_out, partial_lse, heads, handle, lse_base, lane):
    return with_heads(partial_out, heads)


@_gather.register_fake
def _(query, heads, handle, lane):
    return with_heads(query, heads)


class Returning(TraceableWorkspace):
    """Of ops that write nothing and return what they compute. `state` counts what was asked for."""

    def a2a_lse_reduce(self, partial_out, partial_lse, *, lse_base, return_lse=False, lane=0):
        self.state[lane].add_(1)
        arguments = (self.num_local_heads, self.handle, lse_base, lane)
        return torch.ops.broken_returning.a2a_lse_reduce(partial_out, partial_lse, *arguments)

    def query_gather(self, query, *, lane=0):
        self.state[lane].add_(1)
        return torch.ops.broken_returning.query_gather(query, self.num_heads, self.handle, lane)


class Case:
    """A case on a broken workspace, by the name under which its error is to be found."""

    def __init__(self, name, make, *arguments):
        self.__name__, self._make, self._arguments = name, make, arguments

    def __call__(self, rank):
        rank.traceable = self._make(rank.workspace, *self._arguments)
        CASES[self.__name__.split(", ")[-1]](rank)


def make_broken(workspace, op, what, folder):
    return broken(op, what, Path(folder)).TraceableWorkspace(workspace)


def make_returning(workspace):
    return Returning(workspace)


NAMES = [
    *(f"{op}, {what}, {SEEN_BY[what][op == 'kv_gather'].__name__}" for op in DECLARED for what in BREAKS),
    *(f"both, returning, {case.__name__}" for case in RETURNING),
]


def run_broken(group, folder):
    wrong = {}
    for name in NAMES:
        op, what, _ = name.split(", ")
        case = Case(name, make_returning) if op == "both" else Case(name, make_broken, op, what, folder)
        # A workspace for each: a rank that stops in the middle of a case leaves the other one in a call.
        wrong |= run_cases(group, [case], folder)
    return wrong


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    folders = tmp_path_factory.mktemp("broken")
    return run_ranks(run_broken, 2, str(folders), mode="process", timeout_s=300)


@pytest.mark.parametrize("name", NAMES)
def test_a_case_sees_what_it_is_for(wrong, name):
    for rank, found in enumerate(wrong):
        assert name in found, f"rank {rank} saw nothing"
        # The case's own assertion, about results or calls, or that the other rank has come to one.
        assert re.search(r"\n(AssertionError|dcpkernels\.errors\.Dcp(Mismatch|PeerLost|Timeout))", found[name]), found[name]
    assert any("\nAssertionError" in found[name] for found in wrong), wrong[0][name]
