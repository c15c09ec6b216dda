"""Whether torch, the compiled modules, drivers and devices are of one kind."""

from __future__ import annotations

import re

from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section, ok, warn
from dcpkernels.cli.doctor.gpu import Vendor
from dcpkernels.cli.doctor.targets import VENDORS, any_device

_INSTALL = "install the build of torch for it: https://pytorch.org/get-started/locally"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True", re.IGNORECASE)


def _vendor(section: Section) -> Vendor | None:
    """Whose devices this build of torch has."""
    build = section.get("build")
    return next((vendor for vendor in VENDORS if build.get(vendor.torch_version)), None)


def check_build(facts: Facts) -> Finding | None:
    section = facts.section("torch")
    if section.error("version"):
        return None
    vendor, there = _vendor(section), [vendor for vendor in VENDORS if vendor.is_there(facts)]
    if vendor is None:
        if there:
            return warn(f"for CPUs only, and there are devices of {there[0].label}", _INSTALL)
        return ok("for CPUs only")
    named = f"for {vendor.label} {section.get('build')[vendor.torch_version]}"
    if there and vendor not in there:
        return warn(f"{named}, and the devices are of {there[0].label}", _INSTALL)
    if facts.section(vendor.target).known("built") is False:
        return warn(
            f"{named}, and the module '{vendor.target}' is not built",
            f"build it: DCPKERNELS_TARGETS=cpu,{vendor.target} make build",
        )
    if not there:
        return ok(f"{named}; there is no such device")
    if unfit := vendor.fits_torch(facts):
        return unfit
    device = facts.section("torch device")
    if device.known("count", 0) == 0 and vendor.num_devices(facts):
        why = device.error("count") or "torch.cuda.is_available() is False"
        return warn(f"{named}, and does not see the devices that the {vendor.software} has ({why})", _INSTALL)
    return ok(named)


def check_allocator(facts: Facts) -> Finding:
    names = [name for vendor in VENDORS for name in vendor.alloc_variables]
    on = [name for name in names if _EXPANDABLE.search(facts.environ.get(name, ""))]
    if not on:
        return ok("expandable segments are not asked for")
    text = f"expandable segments are on ({', '.join(on)}): dcpkernels has memory of its own and does not mind"
    if any_device(facts):
        return warn(
            f"{text}, other libraries that hand tensors to other processes do",
            "where those fail with 'invalid argument': take expandable_segments:True out",
        )
    return ok(text)


CHECKS = [
    Check("torch build", check_build),
    Check("allocator", check_allocator),
]
