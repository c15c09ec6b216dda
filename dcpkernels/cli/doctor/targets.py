"""Which targets there are, what the child asks of each, and what this machine can do in one sentence a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcpkernels.cli.doctor import cuda, hip, torch_facts
from dcpkernels.cli.doctor.build import check_torch, isa_of, module_facts, num_cpus_text
from dcpkernels.cli.doctor.check import FAIL, Check, Facts, Finding, fail, ok
from dcpkernels.cli.doctor.gpu import Vendor

VENDORS: tuple[Vendor, ...] = (cuda.CUDA, hip.HIP)
TARGETS = ("cpu", *(vendor.target for vendor in VENDORS))

# What the child asks, in this order: a driver that hangs comes last.
SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "cpu": lambda: module_facts("cpu"),
    "torch": lambda: torch_facts.build([vendor.torch_version for vendor in VENDORS]),
    **{vendor.target: vendor.facts for vendor in VENDORS},
    "torch device": torch_facts.device,
}


def any_device(facts: Facts) -> bool:
    return any(vendor.is_there(facts) for vendor in VENDORS)


def states(facts: Facts) -> dict[str, tuple[bool, str]]:
    """Of each target whether a workspace can be made there, and that in words."""
    found = {"cpu": _cpu(facts)}
    for vendor in VENDORS:
        why_not, count = vendor.why_not_ready(facts), vendor.num_devices(facts)
        found[vendor.target] = not why_not, why_not or f"ready ({count} device{'s' if count != 1 else ''})"
    if check_torch(facts).status == FAIL:
        found = {target: _without_torch(*state) for target, state in found.items()}
    return found


def _without_torch(is_ready: bool, text: str) -> tuple[bool, str]:
    return False, "built, but this torch will not do (see 'torch')" if is_ready else text


def _cpu(facts: Facts) -> tuple[bool, str]:
    section = facts.section("cpu")
    if section.known("built") is False:
        return False, "not built"
    if section.error("module"):
        return False, "its module does not load (see 'cpu module')"
    isa, why = isa_of(facts)
    if why:
        return False, "built, not usable (see 'cpu')"
    if facts.shared_memory_error is not None:
        return False, "built, not usable (see 'shared memory')"
    return True, f"ready (variant {isa}, {num_cpus_text(facts)})"


def check_targets(facts: Facts) -> Finding:
    found = states(facts)
    usable = [target for target, (is_ready, _) in found.items() if is_ready]
    if not usable:
        return fail("no target can be used", "see the sentences at the top, and the lines that they name")
    return ok(f"usable: {', '.join(usable)}")


CHECKS = [Check("targets", check_targets)]
