"""The options of `dcpkernels plan`. One function for each part of the help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from dcpkernels.cli import plan_step_time, plan_trace
from dcpkernels.planner.cache_layout import BLOCK_ALIGNMENT, BLOCK_SIZE, MLA_BLOCK_SIZE
from dcpkernels.planner.memory import CHUNK_TOKENS, DEFAULT_MAX_NUM_SEQS
from dcpkernels.planner.models import KV_DTYPES, MODELS, STATE_DTYPES

_DESCRIPTION = (
    "How many tokens and requests the KV cache of each GPU holds, in vLLM's blocks: the number that vLLM prints as \"GPU "
    'KV cache size", for every size of DCP group that the TP ranks can make, and how much of a difference is memory and '
    "how much is DCP. Computed, not measured: needs no GPU. docs/planner.md has the formulas."
)
_EPILOG = (
    "Kimi-K3 on 8 GPUs, as published:  dcpkernels plan --model kimi-k3 --tp 8 --dcp 8 --available-gib 34.28 "
    "--baseline-gib 25.12"
)


def add(commands: argparse._SubParsersAction, run: Callable[[argparse.Namespace], int]) -> None:
    plan = commands.add_parser(
        "plan", help="tokens and requests that a KV cache holds, by size of DCP group", description=_DESCRIPTION,
        epilog=_EPILOG,
    )  # fmt: skip
    plan.set_defaults(run=run)
    _add_model(plan.add_argument_group("model"))
    _add_parallel(plan.add_argument_group("how it is served"))
    _add_memory(plan.add_argument_group("memory of each GPU: one of four ways to say it"))
    _add_budget(plan.add_argument_group("what --hbm-gib is shared with"))
    plan_step_time.add_options(plan.add_argument_group("where DCP is faster"))
    plan_trace.add_options(plan.add_argument_group("a real mix of requests"))
    _add_output(plan.add_argument_group("output"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", required=True, metavar="NAME",
        help=f"{', '.join(MODELS)}; or mla or gqa, by the numbers below")  # fmt: skip
    add("--num-layers", type=int, metavar="N",
        help="attention layers; of a built-in model too, for a stage of pipeline parallelism")  # fmt: skip
    add("--state-layers", type=int, metavar="N", help="KDA layers of a built-in model, for such a stage")
    add("--num-heads", type=int, metavar="N", help="query heads (mla, gqa; for checks and for --hbm-gib)")
    add("--kv-lora-rank", type=int, metavar="N", help="mla: elements of the latent that a token keeps")
    add("--qk-rope-head-dim", type=int, metavar="N", help="mla: elements with position that it keeps besides")
    add("--num-kv-heads", type=int, metavar="N", help="gqa: KV heads of the model")
    add("--head-dim", type=int, metavar="N", help="gqa: elements of a key, and of a value")
    add("--draft-layers", type=int, default=0, metavar="N",
        help="layers of a draft model that join the attention layers (DSpark: 5; default 0)")  # fmt: skip


def _add_parallel(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tp", type=int, required=True, metavar="N", help="ranks of tensor parallelism")
    add("--dcp", type=int, default=1, metavar="N", help="how many of them share the tokens of a request (default 1)")
    add("--interleave", type=int, default=1, metavar="N", help="consecutive tokens that a rank holds (default 1)")
    add("--max-model-len", type=int, metavar="N", help="tokens of the longest request (default: the model's own)")
    add("--kv-dtype", default="fp8", metavar="TYPE", help=f"{', '.join(KV_DTYPES)} (default %(default)s)")
    add("--state-dtype", default="fp32", metavar="TYPE",
        help=f"of the recurrent state: {', '.join(STATE_DTYPES)} (default %(default)s)")  # fmt: skip
    add("--no-prefix-caching", action="store_true", help="prefix caching is off: one state fewer per request and group")
    add("--speculative-tokens", type=int, default=0, metavar="N", help="drafts that a step verifies (default 0)")
    add("--state-blocks", type=int, metavar="N",
        help="states of a request in each group (default: 2 + N speculative tokens, 1 + N without prefix caching; vLLM "
        "0.33 has 3 + N where its prefill kernel exports checkpoints)")  # fmt: skip
    add("--block-size", type=int, metavar="N",
        help=f"tokens of a block on a rank (default: {MLA_BLOCK_SIZE} for MLA, {BLOCK_SIZE} for GQA; of a model with state layers, the smallest "
        "whose page holds a state)")  # fmt: skip
    add("--block-alignment", type=int, default=BLOCK_ALIGNMENT, metavar="N",
        help="tokens that such a block is a multiple of (default %(default)s)")  # fmt: skip


def _add_memory(group: argparse._ArgumentGroup) -> None:
    one_of = group.add_mutually_exclusive_group(required=True)
    one_of.add_argument("--available-gib", metavar="GIB",
                        help='for the KV cache (vLLM: "Available KV cache memory"); with two decimals, the most that is printed so')  # fmt: skip
    one_of.add_argument("--available-bytes", type=int, metavar="N", help="the same in bytes")
    one_of.add_argument("--num-blocks", type=int, metavar="N", help="blocks, in place of memory")
    one_of.add_argument("--hbm-gib", metavar="GIB", help="the GPU's own memory; the next part says what is taken off")
    group.add_argument("--baseline-gib", metavar="GIB",
                       help="compare with another run, which had so much for its KV cache (default: the same memory)")  # fmt: skip
    group.add_argument(
        "--baseline-dcp", type=int, default=1, metavar="N", help="and this size of DCP groups (default 1)"
    )


# By `dest`: what only --hbm-gib can do something with.
BUDGET_OPTIONS = ("utilisation", "weights_gib", "other_gib", "max_num_seqs", "num_lanes", "chunk_tokens")


def _add_budget(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--utilisation", metavar="X", help="share that the engine may take, in 0 .. 1 (default 0.9)")
    add("--weights-gib", metavar="GIB", help="weights of a rank (default: known for kimi-k3 at --tp 8)")
    add("--other-gib", metavar="GIB",
        help="activations, graphs and other buffers, as the engine's log has them (default 0: an upper bound)")  # fmt: skip
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"sequences of a decode batch, for our workspace (default {DEFAULT_MAX_NUM_SEQS}); of --trace too, which has "
        "no limit by default",
    )
    add("--num-lanes", type=int, metavar="N", help="micro-batches at the same time, for our workspace (default 1)")
    add("--chunk-tokens", type=int, metavar="N",
        help=f"chunk of kv_gather, for our workspace; 0 = not used (default {CHUNK_TOKENS})")  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", nargs="?", const=Path("-"),
        help="write the result there; without FILE or with - to stdout, in place of the table")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="a chart as PNG (needs matplotlib)")
