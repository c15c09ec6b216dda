"""What engines run: prompts, engines, and what is done in each. Ranks and tests read the same lists."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

NUM_NEW_TOKENS = 24
CHUNK = 64  # tokens a step, in engines with chunked prefill: two prompts are longer


def _prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 512) for _ in range(length)] for length in lengths]


PROMPTS = _prompts(0, [5, 17, 40, 83, 150])
MANY_PROMPTS = _prompts(1, [1 + 77 * i % 300 for i in range(40)])
TIMED_PROMPTS = _prompts(3, [16] * 8)


@dataclass(frozen=True)
class Run:
    """Prompts that an engine answers. `change`: a name in tests.vllm.changes, of what is different meanwhile."""

    name: str
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    num_new_tokens: int = NUM_NEW_TOKENS
    change: str = ""


@dataclass(frozen=True)
class Engine:
    """options: of vllm.LLM. poisoned: what attention returns for a row without local tokens is made as bad as it may be."""

    name: str
    options: dict[str, Any]
    runs: tuple[Run, ...] = (Run("greedy"),)
    poisoned: bool = False


CPU_MLA = {"attention_config": {"backend": "CPU_MLA"}}  # or vLLM takes another one where the processor has AMX
WHOLE = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
CHUNKED = WHOLE | {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK}


def dcp(num_ranks: int, interleave: int, comm: str = "a2a") -> dict[str, Any]:
    return {
        "decode_context_parallel_size": num_ranks,
        "cp_kv_cache_interleave_size": interleave,
        "dcp_comm_backend": comm,
    }


# Each of them makes the answers wrong, or the test would not notice what it stands for.
SABOTAGE = ("merge_own_part_only", "query_of_wrong_ranks", "context_of_own_rank_only", "slab_of_wrong_ranks")

_MANY = Run("many", MANY_PROMPTS, 40)
NUM_TURNS = 5
# Turn by turn, so that both meet the machine in the same moods.
_TIMED = tuple(
    Run(f"timed_{who}_{turn}", TIMED_PROMPTS, 30, change)
    for turn in range(NUM_TURNS)
    for who, change in (("ours", ""), ("vllms", "vllms_collectives"))
)
_VLLMS = Run("vllms", change="vllms_collectives")
_SLAB = Run("slab", change="context_by_slab")
_SABOTAGE = tuple(Run(name, change=name) for name in SABOTAGE)

TWO_RANKS = (
    Engine("tp2", CPU_MLA | WHOLE),
    Engine("dcp2", dcp(2, 1) | WHOLE, (Run("greedy"), *_TIMED)),
    Engine("dcp2_ag_rs_interleave_16", dcp(2, 16, "ag_rs") | WHOLE, poisoned=True),
    Engine("dcp2_chunked", dcp(2, 1) | CHUNKED, (Run("greedy"), _SLAB, _VLLMS, *_SABOTAGE, Run("again"))),
    Engine(
        "dcp2_chunked_interleave_16",
        dcp(2, 16) | CHUNKED | {"enable_prefix_caching": True},
        (Run("greedy"), Run("cached")),
        poisoned=True,
    ),
    Engine("tp2_many", CPU_MLA | WHOLE | {"num_gpu_blocks_override": 80}, (_MANY,)),
    Engine(
        "dcp2_many",
        dcp(2, 16) | CHUNKED | {"num_gpu_blocks_override": 36, "max_num_batched_tokens": 96},
        (_MANY,),
        poisoned=True,
    ),
    Engine(
        "dcp2_bf16",
        dcp(2, 1) | CHUNKED | {"dtype": "bfloat16"},
        (Run("greedy"), _VLLMS, Run("compared", change="compared"), _SABOTAGE[0]),
    ),
)
FOUR_RANKS = (
    Engine("tp4", CPU_MLA | WHOLE),
    Engine("dcp4_chunked", dcp(4, 1) | CHUNKED),
    Engine("dcp4_chunked_interleave_16", dcp(4, 16) | CHUNKED, poisoned=True),
)
# Started without DCPKERNELS_VLLM. The second one does not start.
WITHOUT_US = (Engine("tp2", CPU_MLA | WHOLE), Engine("dcp2", CPU_MLA | dcp(2, 1) | WHOLE))

# By the name of a group of processes: how many, what they run, and whether DCPKERNELS_VLLM is set.
GROUPS = {"two": (2, TWO_RANKS, True), "four": (4, FOUR_RANKS, True), "without": (2, WITHOUT_US, False)}
