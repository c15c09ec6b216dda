"""Captured calls replayed in any order, between calls that are not captured, on one set of regions: a graph finds its
epoch in memory, and nothing of an earlier call's."""

from __future__ import annotations

import random
from typing import Any

import torch

from dcpkernels.testing import assert_merge_close, merge_inputs

from .cases import Card, Cases
from .virtual import Merge, MergeCall, Ranks

TOKENS = (1, 8, 64)
NUM_INPUTS = 8


class Captured:
    """One T: a call over fixed tensors, its graph on every rank, and what it gives for each of several inputs."""

    def __init__(self, card: Card, ranks: Ranks, num_tokens: int, errors: torch.Tensor) -> None:
        self.card, self.ranks = card, ranks
        shape = (ranks.num_ranks, num_tokens, ranks.num_heads, ranks.head_dim)
        inputs = [Merge(*merge_inputs(*shape, ranks.dtype, kind="spread", seed=i)) for i in range(NUM_INPUTS)]
        self.call = MergeCall(ranks, inputs[0])
        poison_out, poison_lse = self.call.out.clone(), self.call.lse.clone()
        self.kept: list[Any] = [poison_out, poison_lse]
        at = [errors[rank].data_ptr() for rank in range(ranks.num_ranks)]
        self.prepare, self.compare = [], []
        for merge in inputs:
            truth = MergeCall(ranks, merge)
            ranks.run(truth.step)
            out, lse = truth.result()
            assert_merge_close(out.cpu(), lse.cpu(), merge.outs, merge.lses, lse_base="e")
            self.kept.append(truth)
            pairs = ((self.call.outs, truth.outs), (self.call.lses, truth.lses), (self.call.out, poison_out),
                     (self.call.lse, poison_lse))  # fmt: skip
            self.prepare.append([card.ext.copy_step(self._bytes(to, source)) for to, source in pairs])
            results = ((self.call.out, truth.out), (self.call.lse, truth.lse))
            self.compare.append([card.ext.compare_step(self._bytes(to, source), at) for to, source in results])
        ranks.run(self.call.step)
        self.graphs = []
        if card.device == "cuda":
            self.graphs = [card.ext.capture([self.call.step], r, ranks.streams[r]) for r in range(ranks.num_ranks)]

    @staticmethod
    def _bytes(to: torch.Tensor, source: torch.Tensor) -> list[tuple[int, int, int]]:
        return [(t.data_ptr(), s.data_ptr(), t.numel() * t.element_size()) for t, s in zip(to, source, strict=True)]

    def replay(self, index: int, by_graph: bool) -> None:
        """Enqueues: the input, the call, and a comparison of its result."""
        repeat, streams = self.card.ext.repeat, self.ranks.streams
        if not self.graphs:
            assert not any(repeat([*self.prepare[index], self.call.step, *self.compare[index]], streams, 1))
            return
        repeat(self.prepare[index], streams, 1)
        if by_graph:
            for graph, stream in zip(self.graphs, streams, strict=True):
                graph.launch(stream)
        else:
            assert not any(repeat([self.call.step], streams, 1))
        repeat(self.compare[index], streams, 1)


def replays(card: Card, num_ranks: int, wire: str, num_calls: int) -> dict[str, Any]:
    heads, dim = (12 * num_ranks, 512) if not card.quick else (2 * num_ranks, 64)
    ranks = card.ranks(num_ranks, num_heads=heads, head_dim=dim, max_num_tokens=max(TOKENS), wire=wire)
    errors = torch.zeros(num_ranks, 3, dtype=torch.int64).to(card.device)
    captured = {num_tokens: Captured(card, ranks, num_tokens, errors) for num_tokens in TOKENS}
    if card.device == "cuda":
        nodes = {graph.num_nodes for call in captured.values() for graph in call.graphs}
        assert nodes == {1}, f"a call must be one kernel (nodes: {nodes})"
    choose = random.Random(0)
    for i in range(num_calls):
        num_tokens, index = choose.choice(TOKENS), choose.randrange(NUM_INPUTS)
        captured[num_tokens].replay(index, by_graph=choose.random() < 0.7)
        if i % 50 == 49:  # the queues of a stream are not without end
            ranks.synchronize()
            ranks.require_no_fault([0] * num_ranks)
    ranks.synchronize()
    ranks.require_no_fault([0] * num_ranks)
    wrong = errors[:, 0].tolist()
    assert not any(wrong), f"elements of 2 bytes that differ, by rank: {wrong}"
    return {"calls": num_calls}


def run(card: Card) -> dict[str, Any]:
    cases, num_calls = Cases(), 2000 if not card.quick else 60
    for num_ranks, wire in ((4, "push"), (2, "packet16"), (8, "push"), (4, "packet8"), (4, "packet128"), (4, "pull")):
        if wire not in card.wires or (card.quick and num_ranks > 4):
            continue
        with cases.case(f"W={num_ranks} {wire}"):
            replays(card, num_ranks, wire, num_calls)
    return cases.result(calls_each=num_calls, tokens=list(TOKENS))
