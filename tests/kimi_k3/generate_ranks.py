"""What the ranks of the generation test run: greedy decoding by the tiny model, with the cache on every rank or
sharded."""

from __future__ import annotations

from typing import Any

import torch

import dcpkernels
from dcpkernels.kimi_k3.cache import RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import workspace_config
from dcpkernels.kimi_k3.model import KimiK3Model
from dcpkernels.kimi_k3.parallel import TensorParallel

BLOCK_SIZE = 8
MAX_QUERY_LEN = 4


class Engine:
    """The model, and the requests of one batch."""

    def __init__(
        self, tp: TensorParallel, workspace: Any, config: KimiK3Config, num_requests: int, **options: Any
    ) -> None:
        sharding = {} if workspace is None else {"num_ranks": workspace.num_ranks, "rank": workspace.rank}
        blocks = (num_requests * 20, BLOCK_SIZE)
        self.table = RequestTable(*blocks, num_requests, **sharding)
        self.slots = [self.table.add() for _ in range(num_requests)]
        self.model = KimiK3Model(
            config, tp, num_blocks=blocks[0], block_size=BLOCK_SIZE, max_requests=num_requests,
            max_query_len=MAX_QUERY_LEN, workspace=workspace, **options,
        )  # fmt: skip

    def step(self, tokens: dict[int, list[int]], padding: int = 0) -> dict[int, list[int]]:
        """Feeds tokens to requests, by index; for each of them the most likely token behind it."""
        flat = [token for some in tokens.values() for token in some]
        counts = [len(some) for some in tokens.values()]
        batch = self.table.extend([self.slots[i] for i in tokens], counts, num_rows=len(flat) + padding)
        best = self.model(torch.tensor(flat + [0] * padding), batch)[: len(flat)].argmax(1).split(counts)
        return {i: some.tolist() for i, some in zip(tokens, best, strict=True)}

    def forget(self, request: int, num_tokens: int, of: int) -> None:
        """Rejects the last num_tokens of the `of` tokens that the last step fed to a request."""
        self.table.rewind(self.slots[request], num_tokens)
        self.model.keep(self.slots[request], of - num_tokens)


def prefill(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Feeds all prompts, several tokens a step; the first generated token of each."""
    first, place = [0] * len(prompts), 0
    while True:
        tokens = {i: prompt[place : place + MAX_QUERY_LEN] for i, prompt in enumerate(prompts) if prompt[place:]}
        if not tokens:
            return first
        for i, best in engine.step(tokens).items():
            first[i] = best[-1]
        place += MAX_QUERY_LEN


def greedy(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """num_tokens of each, one a step."""
    outs = [[token] for token in prefill(engine, prompts)]
    for i in range(num_tokens - 1):
        # Padding rows in some of the steps: they must change nothing.
        best = engine.step({r: out[-1:] for r, out in enumerate(outs)}, padding=i % 3)
        for r, out in enumerate(outs):
            out.append(best[r][0])
    return outs


def speculative(engine: Engine, prompts: list[list[int]], drafts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The same by verifying drafts: each step feeds the last token and up to three of `drafts`, which are the right
    tokens with some wrong ones among them, and keeps what was right."""
    outs = [[token] for token in prefill(engine, prompts)]
    while any(len(out) < num_tokens for out in outs):
        fed = {
            r: [out[-1], *drafts[r][len(out) : min(len(out) + (r % MAX_QUERY_LEN), num_tokens - 1)]]
            for r, out in enumerate(outs)
            if len(out) < num_tokens
        }
        for r, best in engine.step(fed).items():
            right = 0
            while right + 1 < len(fed[r]) and fed[r][right + 1] == best[right]:
                right += 1
            outs[r] += best[: right + 1]
            engine.forget(r, len(fed[r]) - right - 1, len(fed[r]))
    return outs


def generate(group: Any, config: KimiK3Config, prompts: list[list[int]], num_tokens: int) -> dict[str, list[list[int]]]:
    """By way of doing it: tokens with DCP 1 and with DCP of all ranks; and with drafts, for the first requests."""
    tp = TensorParallel.of(group)
    options = {"seed": 0, "dtype": torch.float32}
    outs = {"dcp1": greedy(Engine(tp, None, config, len(prompts), **options), prompts, num_tokens)}
    rows = max(len(prompts) * MAX_QUERY_LEN, 8)
    needs = workspace_config(config, tp, tp.size, max_num_tokens=rows, dtype=torch.float32)
    with dcpkernels.Workspace(group, config=needs) as workspace:
        outs["dcp"] = greedy(Engine(tp, workspace, config, len(prompts), **options), prompts, num_tokens)
        some = prompts[:12]
        # Every fifth draft is wrong.
        drafts = [
            [(token + (i % 5 == 4)) % config.vocab_size for i, token in enumerate(out)]
            for out in outs["dcp1"][: len(some)]
        ]
        outs["drafts"] = speculative(Engine(tp, workspace, config, len(some), **options), some, drafts, num_tokens)
    return outs
