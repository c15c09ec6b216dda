"""bench/ has the cases of `dcpkernels bench`, which have one home: the defaults of the ops' classes."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from itertools import groupby

import pytest

from bench import replay
from dcpkernels import cli
from dcpkernels.cli import bench
from dcpkernels.cli.bench_op import BenchOp

KINDS = list(bench.OPS.values())


def ops_of(*command: str) -> list[BenchOp]:
    return bench.from_args(cli.parser().parse_args(["bench", *command]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.NAME)
def test_cases_of_a_suite(kind: type[BenchOp]) -> None:
    function = getattr(importlib.import_module(f"bench.bench_{kind.NAME}"), f"test_{kind.NAME}")
    cases = {mark.args[0]: mark.args[1] for mark in function.pytestmark if mark.name == "parametrize"}
    assert cases == {"num_ranks": (2, 8), kind.SIZE: kind().sizes, "candidate": replay.CANDIDATES}


def test_the_command_has_the_defaults_of_the_classes() -> None:
    every = {name: list(ops) for name, ops in groupby(ops_of("all"), key=lambda op: op.NAME)}
    for kind in KINDS:
        first, *others = ops_of(kind.NAME)
        assert first == kind().canonical()
        assert [replace(op, zero_copy=False) for op in others] == [first] * (kind.NAME == "a2a_lse_reduce")
        assert every[kind.NAME] == [first, *others]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.NAME)
def test_an_op_of_a_case(kind: type[BenchOp]) -> None:
    op = replay.op_of(kind, 8, 5)
    assert (op.ranks, op.sizes, op.baselines) == ((8,), (5,), replay.CANDIDATES[1:])
    assert op.iters == min(100, kind().iters) and set(op.baselines) <= set(op.BASELINES)


def test_peers_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert replay.peers() == ("gloo",)
    monkeypatch.setattr(replay.baselines, "require", lambda names: {})
    assert replay.peers() == ("gloo", "openmpi")
