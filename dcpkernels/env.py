"""Environment variables: the only module that reads a `DCPKERNELS_*` variable; VARIABLES lists them all.

Every function reads the environment when it is called, so a value may be set until the object that it shapes
is made. An empty value counts as not set. A bad value raises DcpInvalidArgument that names the variable.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from dcpkernels.errors import DcpInvalidArgument

# 30 years: what still fits the nanoseconds of a 64-bit clock.
MAX_TIMEOUT_S = 1e9

CPU_ISAS = ("auto", "v4_bf16", "v4", "v3", "baseline")


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "DCPKERNELS_CPU_ISA",
        "auto",
        "CPU kernel variant: auto (the best that this CPU runs), v4_bf16 (x86-64-v4 with AVX512-BF16), v4, v3, baseline",
    ),
    Variable(
        "DCPKERNELS_TIMEOUT_S",
        "the configuration's timeout_s",
        "deadline of a wait in seconds, 0 = for ever; replaces WorkspaceConfig.timeout_s",
    ),
    Variable(
        "DCPKERNELS_FIRST_CALL_TIMEOUT_S",
        "the configuration's first_call_timeout_s",
        "the same for the first call of each stream; replaces WorkspaceConfig.first_call_timeout_s",
    ),
    Variable(
        "DCPKERNELS_READ_ONLY_VIEWS",
        "0",
        "1: gathered views are mapped read-only (with multicast), so that a write into one is a SIGSEGV at the instruction",
    ),
    Variable(
        "DCPKERNELS_VLLM",
        "0",
        "what vLLM's decode context parallelism runs on: 0 its own collectives; 1 ours; direct, collective: that backend of ours",
    ),
)


def cpu_isa() -> str:
    """The CPU kernel variant asked for: one of CPU_ISAS, "auto" when none is."""
    name = "DCPKERNELS_CPU_ISA"
    value = os.environ.get(name, "").strip() or "auto"
    if value not in CPU_ISAS:
        raise DcpInvalidArgument(f"{name}: must be one of {', '.join(CPU_ISAS)} (got {value!r})")
    return value


def timeout_s() -> float | None:
    """Seconds that a wait may take (0 = for ever), or None when the configuration decides."""
    return _seconds("DCPKERNELS_TIMEOUT_S")


def first_call_timeout_s() -> float | None:
    """The same for the waits of the first call."""
    return _seconds("DCPKERNELS_FIRST_CALL_TIMEOUT_S")


def read_only_views() -> bool:
    """Whether views of shared memory are to be mapped read-only, to find who writes into one."""
    name = "DCPKERNELS_READ_ONLY_VIEWS"
    value = os.environ.get(name, "").strip() or "0"
    if value not in ("0", "1"):
        raise DcpInvalidArgument(f"{name}: must be 0 or 1 (got {value!r})")
    return value == "1"


def vllm_backend() -> str | None:
    """The backend of the workspaces that vLLM's collectives run on; None when vLLM is to be left alone."""
    name = "DCPKERNELS_VLLM"
    value = os.environ.get(name, "").strip() or "0"
    backends = {"0": None, "1": "auto", "direct": "direct", "collective": "collective"}
    if value not in backends:
        raise DcpInvalidArgument(f"{name}: must be one of {', '.join(backends)} (got {value!r})")
    return backends[value]


def _seconds(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_TIMEOUT_S:  # NaN fails too
        raise DcpInvalidArgument(f"{name}: must be a number of seconds in 0 .. {MAX_TIMEOUT_S:.0e} (got {text!r})")
    return value
