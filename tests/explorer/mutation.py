"""What a planted fault is: a change of the kernel source, and the explorations that must find it.

A killer is a scenario with its arguments (world.h and scenario_*.cpp), and how its verdict begins: the kind, then the
message. Every killer is fine without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.explorer.schema import Edit

CPU, CHANNEL, WAIT, FAULT, REGION = "arch/cpu.h", "core/channel.h", "core/wait.h", "core/fault.h", "host/region.h"
A2A, QUERY, KV = "ops/a2a_lse_reduce.cc", "ops/query_gather.cc", "ops/kv_gather.cc"

PUSH, PULL = "a2a wire=0", "a2a wire=1"
PACKET8, PACKET16 = "a2a wire=2", "a2a wire=3"


# Every execution, and where that takes longer than a test may.
ALL, SAMPLED = "--max-states 300000", "--random 3000"


@dataclass(frozen=True)
class Killer:
    scenario: str
    verdict: str  # a regular expression that matches the beginning of "KIND: MESSAGE"
    options: str = ALL
    fine: str = ALL  # how it is shown that nothing is wrong without the fault


@dataclass(frozen=True)
class Mutation:
    name: str
    edits: tuple[Edit, ...]
    killers: tuple[Killer, ...] = ()
    # Of what is not found: why, and what it was looked for in.
    reason: str = ""
    looked_in: tuple[str, ...] = ()


def one(name: str, file: str, old: str, new: str, *killers: tuple[str, ...], behind: str = "") -> Mutation:
    return Mutation(name, (Edit(file, old, new, behind),), tuple(Killer(*killer) for killer in killers))


def not_found(name: str, file: str, old: str, new: str, reason: str, *looked_in: str, behind: str = "") -> Mutation:
    return Mutation(name, (Edit(file, old, new, behind),), (), reason, looked_in)
