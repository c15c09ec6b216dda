"""Many rounds of payload that says which round it is from: a row that is late, torn or another round's is found on the
device, in every 16 bytes of it."""

from __future__ import annotations

import time
from typing import Any

import torch

from .cases import Card
from .virtual import Merge, MergeCall, Ranks

WIRES = ("push", "packet8", "packet16", "packet128")
MAX_ROUNDS = 1_000_000
ROUNDS_A_GRAPH = 50


def make_steps(ranks: Ranks, num_tokens: int) -> tuple[list[Any], list[torch.Tensor]]:
    """[fill, merge, check], and of each rank what is wrong: count, epoch and index of the first 16 bytes."""
    ext, num_ranks, num_heads, head_dim = ranks.ext, ranks.num_ranks, ranks.num_heads, ranks.head_dim
    outs = torch.zeros(num_ranks, num_tokens, num_heads, head_dim)
    call = MergeCall(ranks, Merge(outs, torch.zeros(num_ranks, num_tokens, num_heads), "2"))
    errors = [ranks.keep(torch.zeros(3, dtype=torch.int64)) for _ in range(num_ranks)]
    patterns = []
    for rank in range(num_ranks):
        p = ext.Pattern()
        p.partial_out, p.partial_lse = call.outs[rank].data_ptr(), call.lses[rank].data_ptr()
        p.out, p.out_lse = call.out[rank].data_ptr(), call.lse[rank].data_ptr()
        p.epoch = ranks.stream_word(rank, "a2a_lse_reduce", ext.EPOCH_OFFSET)
        p.errors = errors[rank].data_ptr()
        p.num_tokens, p.num_heads, p.head_dim, p.rank, p.num_ranks = num_tokens, num_heads, head_dim, rank, num_ranks
        patterns.append(p)
    ranks.kept.append(call)
    return [ext.fill_step(patterns), call.step, ext.check_step(patterns)], errors


def run_pattern(card: Card, num_ranks: int, wire: str, seconds: float) -> dict[str, Any]:
    num_tokens, channels = 8, 4
    ranks = card.ranks(
        num_ranks, num_heads=2 * num_ranks, head_dim=64, max_num_tokens=num_tokens, dtype=torch.float32, wire=wire,
        num_channels=channels,
    )  # fmt: skip
    steps, errors = make_steps(ranks, num_tokens)
    ranks.run(*steps)
    rounds, start = 1, time.monotonic()
    # One rank's graph of many rounds; in a dry run the same rounds by threads.
    graphs = (
        [card.ext.capture(steps, r, ranks.streams[r], ROUNDS_A_GRAPH) for r in range(num_ranks)]
        if card.device == "cuda"
        else []
    )
    while rounds < MAX_ROUNDS and time.monotonic() - start < seconds:
        if graphs:
            for _ in range(10):
                for rank, graph in enumerate(graphs):
                    graph.launch(ranks.streams[rank])
            card.ext.synchronize()
            ranks.require_no_fault([0] * num_ranks)
            rounds += 10 * ROUNDS_A_GRAPH
        else:
            ranks.run(*steps, num_rounds=100)
            rounds += 100
        if any(int(error[0]) for error in errors):
            break
    took = time.monotonic() - start
    counts = [error.tolist() for error in errors]
    epochs = {int(ranks.regions[r][at : at + 8].cpu().view(torch.int64)) - 3 for r, at in epoch_places(ranks)}
    return {
        "passed": not any(count for count, _, _ in counts) and epochs == {rounds},
        "rounds": rounds,
        "wrong_units": sum(count for count, _, _ in counts),
        "first_wrong": [f"rank {r}: epoch {e}, unit {i}" for r, (n, e, i) in enumerate(counts) if n],
        "us_per_round": 1e6 * took / rounds,
    }


def epoch_places(ranks: Ranks) -> list[tuple[int, int]]:
    at = [ranks.stream_word(r, "a2a_lse_reduce", ranks.ext.EPOCH_OFFSET) for r in range(ranks.num_ranks)]
    return [(r, place - ranks.regions[r].data_ptr()) for r, place in enumerate(at)]


def run(card: Card) -> dict[str, Any]:
    shapes = [(num_ranks, wire) for wire in WIRES for num_ranks in (2, 8)]
    each = card.seconds / len(shapes)
    results = {f"W={num_ranks} {wire}": run_pattern(card, num_ranks, wire, each) for num_ranks, wire in shapes}
    return {"passed": all(result["passed"] for result in results.values()), **results}
