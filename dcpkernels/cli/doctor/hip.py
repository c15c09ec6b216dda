"""The checks of AMD GPUs, on what hip_facts.py has found. Nothing of this has run on a GPU."""

from __future__ import annotations

from dcpkernels.cli.doctor import hip_facts
from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section, ok, split_advice, warn
from dcpkernels.cli.doctor.gpu import Vendor, check_peers, check_software, sees_no_device
from dcpkernels.heap.hip_errors import advice

_INSTALL = "pip install 'dcpkernels[hip]'"
BINDINGS = (10, 11)  # hip-python from the first on, below the second: as in pyproject.toml
_LEGACY = "HSA_ENABLE_IPC_MODE_LEGACY"
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _section(facts: Facts) -> Section:
    return facts.section("hip")


def has_node(facts: Facts) -> bool:
    return facts.exists("/dev/kfd")


def check_python(facts: Facts) -> Finding:
    version = _section(facts).known("python")
    if version is None:
        is_needed = HIP.is_there(facts)
        return warn("hip-python is not installed", _INSTALL) if is_needed else ok("not installed, and not needed")
    if not BINDINGS[0] <= int(version.partition(".")[0]) < BINDINGS[1]:
        return warn(f"hip-python must be of version {BINDINGS[0]} (got {version})", _INSTALL)
    return ok(version)


def check_runtime(facts: Facts) -> Finding:
    return check_software(HIP, facts, "")


def check_devices(facts: Facts) -> Finding | None:
    section = _section(facts)
    if section.error("driver"):
        is_hidden = sees_no_device(section) and has_node(facts)
        return warn("none is visible", advice(100)) if is_hidden else None
    names = [device["name"] for device in section.get("devices")]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if usable := section.known("usable", ""):
        return warn(f"{kinds}: {usable}", "see 'Requirements' in docs/targets/hip.md")
    return ok(kinds)


def check_links(facts: Facts) -> Finding | None:
    return check_peers(HIP, advice(217), facts)


def check_handles(facts: Facts) -> Finding | None:
    if not HIP.num_devices(facts):
        return None
    section = _section(facts)
    vmm = section.known("vmm", "not asked")
    if errors := [error for error in section.get("ipc") if error]:
        text, fix = split_advice(errors[0])
        return warn(f"{text}; by descriptors instead: {vmm or 'yes'}", fix)
    return ok(f"IPC handles can be made; by descriptors as well: {vmm or 'yes'}")


def check_environment(facts: Facts) -> Finding | None:
    if not HIP.is_there(facts):
        return None
    if facts.environ.get(_LEGACY, "").strip() not in ("", "0"):
        return warn(f"{_LEGACY} is set", advice(1, ipc=True))
    given = [name for name in _VISIBLE if name in facts.environ]
    if "ROCR_VISIBLE_DEVICES" in given:
        text = f"{' and '.join(given)} choose devices: what the last hides is hidden from IPC, too"
        return warn(text, "give every rank all devices and choose by the device's number, or by HIP_VISIBLE_DEVICES")
    return ok(f"{' and '.join(given)} choose devices" if given else "all devices may be seen")


HIP = Vendor(
    target="hip",
    label="HIP",
    software="runtime",
    torch_version="hip",
    facts=hip_facts.facts,
    has_node=has_node,
    checks=[
        Check("hip python", check_python),
        Check("hip runtime", check_runtime),
        Check("hip devices", check_devices),
        Check("hip peers", check_links),
        Check("hip handles", check_handles),
        Check("hip environment", check_environment),
    ],
    alloc_variables=("PYTORCH_HIP_ALLOC_CONF",),
    public_paths=("/opt/rocm",),
)
