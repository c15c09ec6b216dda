"""The checks of NVIDIA GPUs, on what cuda_facts.py has found. Nothing of this has run on a GPU."""

from __future__ import annotations

import re

from dcpkernels.cli.doctor import cuda_facts
from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section, ok, split_advice, warn
from dcpkernels.cli.doctor.gpu import Vendor, check_peers, check_software, pairs, sees_no_device
from dcpkernels.heap.cuda_errors import advice

_INSTALL = "pip install 'dcpkernels[cuda]'"
BINDINGS = (13, 14)  # cuda-python from the first on, below the second: as in pyproject.toml
_OLDEST_CAPABILITY = [9, 0]
_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_COMPLETED = 3
_IMEX_NODES = "/dev/nvidia-caps-imex-channels/channel*"


def _section(facts: Facts) -> Section:
    return facts.section("cuda")


def has_node(facts: Facts) -> bool:
    return facts.exists("/dev/nvidia[0-9]*") or facts.exists("/proc/driver/nvidia/version") or facts.exists("/dev/dxg")


def check_python(facts: Facts) -> Finding:
    version = _section(facts).known("python")
    if version is None:
        is_needed = CUDA.is_there(facts)
        return warn("cuda-python is not installed", _INSTALL) if is_needed else ok("not installed, and not needed")
    if not BINDINGS[0] <= int(version.partition(".")[0]) < BINDINGS[1]:
        return warn(f"cuda-python must be of version {BINDINGS[0]} (got {version})", _INSTALL)
    return ok(version)


def check_driver(facts: Facts) -> Finding:
    kernel = re.search(r"Kernel Module .*?(\d+\.\d+(?:\.\d+)?)\s", facts.read("/proc/driver/nvidia/version") or "")
    shown = f"; kernel module {kernel.group(1)}" if kernel else ""
    found = check_software(CUDA, facts, shown)
    return found if _section(facts).error("driver") else found._replace(text=f"for CUDA {found.text}")


def _visible(facts: Facts) -> str:
    value = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return ""
    count = len([part for part in value.split(",") if part.strip() not in ("", "-1")])
    return f"; CUDA_VISIBLE_DEVICES names {count or 'none'}"  # a count: what it names may be identities


def check_devices(facts: Facts) -> Finding | None:
    section = _section(facts)
    if section.error("driver"):
        is_hidden = sees_no_device(section) and has_node(facts)
        return warn(f"none is visible{_visible(facts)}", advice(100)) if is_hidden else None
    devices = section.get("devices")
    names = [f"{device['name']} (sm_{''.join(map(str, device['capability']))})" for device in devices]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if any(device["capability"] < _OLDEST_CAPABILITY for device in devices):
        return warn(f"{kinds}{_visible(facts)}", "there is code for compute capability 9.0 and later only")
    if usable := section.known("usable", ""):
        return warn(f"{kinds}{_visible(facts)}: {usable}", "see 'Requirements' in docs/targets/cuda.md")
    return ok(f"{kinds}{_visible(facts)}")


def check_mig(facts: Facts) -> Finding | None:
    devices = _section(facts).known("devices", [])
    if not devices:
        return None
    if any("MIG" in device["name"] for device in devices):
        return warn(
            "instances, which cannot reach each other's memory", "switch MIG off, or give all ranks one instance"
        )
    return ok("off")


def check_links(facts: Facts) -> Finding | None:
    found = check_peers(CUDA, advice(217), facts)
    if found is None or found.fix:
        return found
    atomics = pairs(_section(facts).known("atomics", ()))
    if not all(has for _, _, has in atomics):
        return warn(
            f"{found.text}, some without atomics",
            "faults reach other ranks at their deadlines only; packets of 128 bytes must not be used there",
        )
    return found


def check_handles(facts: Facts) -> Finding | None:
    if not CUDA.num_devices(facts):
        return None
    errors = [error for error in _section(facts).get("handles") if error]
    if errors:
        text, fix = split_advice(errors[0])
        return warn(text, fix)
    return ok("memory of each device can be handed over by a descriptor")


def check_multicast(facts: Facts) -> Finding | None:
    if CUDA.num_devices(facts) < 2:
        return None
    has = _section(facts).get("multicast")
    if all(has):
        return ok("on all devices")
    why = "no NVLink switch, a MIG device, or a confidential virtual machine"
    return ok(f"on {sum(has)} of {len(has)} devices ({why}); gathers store to each rank instead")


def check_fabric(facts: Facts) -> Finding | None:
    section = _section(facts)
    if not CUDA.num_devices(facts):
        return None
    if why := section.error("fabric"):
        return ok(f"not known ({why})")
    states = section.get("fabric")
    bad = [(i, state, status) for i, (state, status) in enumerate(states) if state and (state != _COMPLETED or status)]
    if bad:
        i, state, status = bad[0]
        text = f"{len(bad)} of {len(states)} devices are not set up (device {i}: {_STATES.get(state, state)}, status {status})"
        return warn(text, advice(802))
    return ok("completed" if any(state for state, _ in states) else "there is none")


def check_imex(facts: Facts) -> Finding | None:
    section = _section(facts)
    if not CUDA.num_devices(facts):
        return None
    if not all(section.get("has_fabric")):
        return ok("these devices have no handles for other hosts")
    nodes = "with" if facts.exists(_IMEX_NODES) else "without"
    if error := section.get("fabric_handle"):
        text, _ = split_advice(error)
        return warn(
            f"no handle for other hosts can be made, {nodes} channel nodes: {text}; one host needs none",
            advice(800, fabric=True),
        )
    return ok(f"a handle for other hosts can be made, {nodes} channel nodes")


def fits_torch(facts: Facts) -> Finding | None:
    """Within a major version an older driver will do."""
    built, driver = facts.section("torch").known("build", {}).get("cuda"), _section(facts).known("driver")
    if not built or not driver or int(driver.partition(".")[0]) >= int(built.partition(".")[0]):
        return None
    return warn(f"for CUDA {built}, and the driver is for CUDA {driver}", advice(35))


CUDA = Vendor(
    target="cuda",
    label="CUDA",
    software="driver",
    torch_version="cuda",
    facts=cuda_facts.facts,
    has_node=has_node,
    checks=[
        Check("cuda python", check_python),
        Check("cuda driver", check_driver),
        Check("cuda devices", check_devices),
        Check("cuda mig", check_mig),
        Check("cuda peers", check_links),
        Check("cuda handles", check_handles),
        Check("cuda multicast", check_multicast),
        Check("cuda fabric", check_fabric),
        Check("cuda imex", check_imex),
    ],
    fits_torch=fits_torch,
    alloc_variables=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    public_paths=("/usr/local/cuda",),
)
