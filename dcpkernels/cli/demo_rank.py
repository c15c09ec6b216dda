"""What one rank process of the demo does: the same MLA layer twice, once with all of the KV cache (tensor parallelism
alone) and once with its shard (decode context parallelism); the same step on both, checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

import dcpkernels
from dcpkernels import layout
from dcpkernels.cli import context, demo_check, measure
from dcpkernels.cli.progress import Progress
from dcpkernels.errors import DcpError
from dcpkernels.kimi_k3.attention import attention_for
from dcpkernels.kimi_k3.cache import DecodeBatch, LatentCache, RequestTable
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import MLALayer, MLAWeights, workspace_config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.kimi_k3.weights import draw

DTYPE = torch.bfloat16
TP, DCP = "tp", "dcp"
WARMUP = 2

_BLOCK_SIZE = 64
_AT_ONCE = 4096  # rows that are made at once
# Heads differ in how sharply they look: the sharpest puts most of its weight on a few tokens of 100,000, so that the
# shards of a row differ in weight by far and a wrong merge cannot hide in an average.
_SHARPNESS = (0.5, 4.0)


class RankTask(NamedTuple):
    config: KimiK3Config
    lengths: list[int]  # tokens of each sequence, the newest included
    interleave: int
    seed: int
    iters: int
    lse_base: str  # that attention returns; the layer takes it for natural
    device: str
    progress_path: str


class RankResult(NamedTuple):
    kv_bytes: dict[str, int]  # by arm: of the rows that this rank holds
    empty_rows: int  # of this rank's shard
    times_us: dict[str, list[float]]  # by name of what was timed
    errors: demo_check.Errors
    num_threads: dict[str, int]  # of torch while attention ran, by arm
    workspace_bytes: int
    isa: str


def run_rank(group: dist.ProcessGroup, task: RankTask) -> RankResult:
    progress = Progress(task.progress_path, group.rank())
    tp = TensorParallel.of(_with_device(group, task.device))
    measure.use_spare_cpus(tp.size)

    # 1. The layer's weights, this rank's heads; the caches of both arms, from the same rows.
    config, num_rows = task.config, len(task.lengths)
    weights = random_weights(config, tp, task.seed).to(task.device)
    needs = workspace_config(config, tp, tp.size, max_num_tokens=num_rows, dtype=DTYPE, num_lanes=measure.NUM_LANES)
    with dcpkernels.Workspace(group, device=task.device, config=needs) as workspace:
        measure.bind_to_own_cpus(tp.rank, tp.size)
        tp_cache, tp_batch = _fill(task, 1, 0, 1, progress)
        dcp_cache, dcp_batch = _fill(task, tp.size, tp.rank, task.interleave, progress)
        attention = _with_base(attention_for(torch.device(task.device)), task.lse_base)
        arms = {
            TP: Arm(MLALayer(config, weights, tp_cache, tp, attention=attention), tp_batch),
            DCP: Arm(MLALayer(config, weights, dcp_cache, tp, workspace, attention=attention), dcp_batch),
        }
        # 2. The newest tokens: one step of each, and what the two must agree in.
        x = draw(num_rows, config.hidden_size, key=(task.seed, "x"), dtype=DTYPE, std=1.0).to(task.device)
        errors = demo_check.check(arms[TP], arms[DCP], x)
        # 3. Their time, in turns.
        times = _time(arms, x, measure.Barrier(workspace), task, progress)
        return RankResult(
            {name: int(arm.batch.local_lens.sum()) * config.latent_dim * DTYPE.itemsize for name, arm in arms.items()},
            int((dcp_batch.local_lens == 0).sum()),
            times,
            errors,
            {name: arm.num_threads for name, arm in arms.items()},
            workspace.num_bytes,
            workspace.isa,
        )


@dataclass
class Arm:
    """One of the two ways to run the layer."""

    layer: MLALayer
    batch: DecodeBatch
    num_threads: int = 0  # of torch when its attention was timed


def random_weights(config: KimiK3Config, tp: TensorParallel, seed: int) -> MLAWeights:
    """This rank's part of the layer."""
    weights = MLAWeights.random(config, tp, key=seed, dtype=DTYPE)
    heads = tp.range("num_heads", config.num_heads)
    weights.q_b_proj.mul_(torch.linspace(*_SHARPNESS, config.num_heads)[heads.start : heads.stop, None, None])
    return weights


def _fill(
    task: RankTask, num_ranks: int, rank: int, interleave: int, progress: Progress
) -> tuple[LatentCache, DecodeBatch]:
    """A cache that holds this rank's rows of every sequence but the newest, and the batch that adds those."""
    num_blocks = sum(-(-layout.local_length(n, num_ranks, 0, interleave) // _BLOCK_SIZE) for n in task.lengths)
    sharding = {"num_ranks": num_ranks, "rank": rank, "interleave": interleave}
    table = RequestTable(num_blocks, _BLOCK_SIZE, len(task.lengths), **sharding)
    cache = LatentCache(num_blocks, _BLOCK_SIZE, task.config.latent_dim, DTYPE)
    slots = [table.add() for _ in task.lengths]
    for seq, (slot, length) in enumerate(zip(slots, task.lengths, strict=True)):
        positions = torch.tensor(layout.local_positions(length - 1, num_ranks, rank, interleave), dtype=torch.int64)
        places = table.prefill(slot, length - 1)
        for some, where in zip(positions.split(_AT_ONCE), places.split(_AT_ONCE), strict=True):
            cache.append(context.latent_rows(some, seq, task.seed, task.config.latent_dim, DTYPE), where)
            progress.add_tokens(len(some))
    batch = table.extend(slots, [1] * len(slots))
    cache.blocks = cache.blocks.to(task.device)
    return cache, batch.to(task.device)


def _time(
    arms: dict[str, Arm], x: torch.Tensor, barrier: Callable[[], None], task: RankTask, progress: Progress
) -> dict[str, list[float]]:
    """Microseconds on this rank: of whole steps, of the attention section (query gather, attention, merge), and of each
    collective when all ranks enter it together."""
    synchronize = torch.cuda.synchronize if torch.device(task.device).type == "cuda" else _nothing
    dcp = arms[DCP]
    query, _ = dcp.layer.project(x)
    partial_out, partial_lse = dcp.layer.attend_to_shard(dcp.layer.gather_query(query), dcp.batch)
    partial_out = partial_out.clone()  # the workspace's memory is written anew for every merge
    dcp.layer.merge(partial_out, partial_lse, dcp.batch)
    state: dict[str, torch.Tensor | bool] = {"open": False}

    if arms[TP].layer.attention is not dcp.layer.attention:
        raise DcpError("demo: both ways must run the same attention function (they do not)")

    def attend(arm: Arm) -> None:
        arm.num_threads = torch.get_num_threads()
        arm.layer.attend(query, arm.batch)
        synchronize()

    def step(arm: Arm) -> None:
        arm.layer(x, arm.batch)
        synchronize()

    def gather() -> None:
        dcp.layer.gather_query(query)
        synchronize()
        state["open"] = True

    def merge() -> None:
        dcp.layer.merge(state["partial_out"], partial_lse, dcp.batch)
        synchronize()

    def produce(name: str) -> None:
        if state["open"]:
            dcpkernels.release_query(workspace=dcp.layer.workspace)
            state["open"] = False
        if name == "a2a_lse_reduce":
            state["partial_out"] = dcp.layer.workspace.partial_out(dcp.batch.num_rows).copy_(partial_out)
        synchronize()

    candidates = {
        **{f"{name}_attention": lambda arm=arm: attend(arm) for name, arm in arms.items()},
        **{f"{name}_step": lambda arm=arm: step(arm) for name, arm in arms.items()},
        "query_gather": gather,
        "a2a_lse_reduce": merge,
    }
    times = measure.take_turns(
        candidates, barrier, iters=task.iters, warmup=WARMUP, produce=produce, progress=progress.add_call
    )
    produce("")  # close what is open
    return {name: samples.own_us for name, samples in times.items()}


NUM_TIMED = 6  # candidates


def _nothing() -> None:
    pass


def _with_base(attention: Callable, lse_base: str) -> Callable:
    """Attention whose LSE is in that base: what a kernel with another convention would return."""
    if lse_base == "e":
        return attention

    def other(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(*args, **options)
        return out, lse / math.log(2.0)

    return other


def _with_device(group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """For sums on GPUs a group of their own library; each rank takes its GPU."""
    if torch.device(device).type == "cpu":
        return group
    torch.cuda.set_device(group.rank())
    return dist.new_group(backend="nccl")
