"""`--collective`: every op between real rank processes, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcpkernels.cli.doctor.check import Facts, Finding, Result, fail, ok, result_of
from dcpkernels.cli.doctor.probe import describe
from dcpkernels.cli.doctor.targets import VENDORS, states
from dcpkernels.cli.table import status

_TIMEOUT_S = 60.0
_WORKSPACE_S = 30.0
_FIX = "see docs/errors.md; with DcpUnsupported or no room the text says what to do, else report it with these lines"
MAX_RANKS = 64


def check_rank(group: Any, device: str) -> str:
    """One rank: makes a workspace on `device`, checks every op there, and says which kernel variant it was."""
    import torch

    import dcpkernels

    rank, num_ranks = group.rank(), group.size()
    if device != "cpu":
        torch.cuda.set_device(rank)
    config = dcpkernels.WorkspaceConfig(
        num_heads=2 * num_ranks,
        head_dim=64,
        max_num_tokens=8,
        query_head_dim=64,
        kv_chunk_rows=64,
        kv_dim=64,
        timeout_s=_WORKSPACE_S,
        first_call_timeout_s=_WORKSPACE_S,
    )
    with dcpkernels.Workspace(group, device=device, config=config, backend="direct") as workspace:
        workspace.self_check()
        return str(workspace.isa)


def collective(
    target: str,
    device: str,
    num_ranks: int,
    *,
    body: Callable[[Any, str], str] = check_rank,
    timeout_s: float = _TIMEOUT_S,
) -> Finding:
    from dcpkernels.testing import RankFailure, run_ranks

    with status(f"all ops on {num_ranks} ranks ({target})"):
        try:
            isas = run_ranks(body, num_ranks, device, mode="process", timeout_s=timeout_s)
        except RankFailure as failure:
            return fail(_what_failed(failure.fates), _FIX)
        except OSError as error:  # no descriptor, process or memory left: what was asked for has not been checked
            return fail(f"{num_ranks} rank processes must start ({describe(error)})", "see 'open files' and 'memory'")
    ranks = f"{num_ranks} rank process{'es' if num_ranks != 1 else ''}"
    return ok(f"all ops are right on {ranks} ({', '.join(sorted(set(isas)))})")


def _what_failed(fates: dict[int, str]) -> str:
    """The first rank that raised, else the first that did not return; what a rank says of others is an echo mostly."""
    for begins in ("raised DcpUnsupported", "raised Dcp", "raised", "killed", ""):
        for rank, fate in sorted(fates.items()):
            is_echo = "DcpTimeout" in fate or "DcpPeerLost" in fate
            if fate.startswith(begins) and fate != "returned" and (not is_echo or not begins):
                return f"rank {rank} of {len(fates)} {fate}"
    return "a rank failed"


def run(facts: Facts, num_ranks: int) -> list[Result]:
    """On CPUs, and on each kind of GPU that is ready with a rank a device."""
    jobs = {"cpu": ("cpu", num_ranks)}
    jobs |= {vendor.target: ("cuda", min(vendor.num_devices(facts), MAX_RANKS)) for vendor in VENDORS}
    found = [
        result_of(f"collective {target}", lambda target=target: collective(target, *jobs[target]), facts.scrubber)
        for target, (is_ready, _) in states(facts).items()
        if is_ready
    ]
    return [result for result in found if result is not None]
