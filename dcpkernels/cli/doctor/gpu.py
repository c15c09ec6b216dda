"""What the checks of all GPUs have in common: a vendor as data, the matrix of peers, whether a target is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpkernels.cli.doctor.check import Check, Facts, Finding, Section, ok, split_advice, warn

_MAX_NAMED = 8
_NO_DEVICE = "error 100"  # of every vendor's calls


@dataclass(frozen=True)
class Vendor:
    """One kind of GPU. `facts` is for the child. Of its section these are known to all: `devices`, a list with `name`; `peers`, and `links`:
    matrices, from row to column, of whether and by what; `usable`: the module's own word on the first device, "" when it
    will do."""

    target: str
    label: str
    software: str  # what has to be installed on the machine, in a word
    torch_version: str  # the attribute of torch.version that such a build of torch has
    facts: Callable[[], dict[str, Any]]
    has_node: Callable[[Facts], bool]  # whether the machine shows such a device, whatever drivers say
    checks: Sequence[Check]
    # A warning where the driver is too old for what torch is built for.
    fits_torch: Callable[[Facts], Finding | None] = field(default=lambda facts: None)
    alloc_variables: Sequence[str] = ()
    public_paths: Sequence[str] = ()

    def num_devices(self, facts: Facts) -> int:
        return len(facts.section(self.target).known("devices", ()))

    def is_there(self, facts: Facts) -> bool:
        return self.has_node(facts) or self.num_devices(facts) > 0

    def why_not_ready(self, facts: Facts) -> str:
        """ "" when a workspace can be made there."""
        section = facts.section(self.target)
        if section.known("built") is False:
            return "not built"
        if section.error("module"):
            return f"its module does not load (see '{self.target} module')"
        if not self.is_there(facts):
            return f"built, no {self.software} here" if section.error("driver") else "built, no device here"
        if sees_no_device(section):
            return f"built, no device to be seen (see '{self.target} devices')"
        if section.error("driver") or not self.num_devices(facts):
            return f"built, not usable (see '{self.target} {self.software}')"
        if not facts.section("torch").known("build", {}).get(self.torch_version):
            return "built, but torch is not built for it (see 'torch build')"
        if section.known("usable", ""):
            return f"built, not usable (see '{self.target} devices')"
        return ""


def sees_no_device(section: Section) -> bool:
    """The driver is there, and shows none."""
    return _NO_DEVICE in section.error("driver")


def check_software(vendor: Vendor, facts: Facts, shown: str) -> Finding:
    """The driver or runtime; `shown` is what the machine says of it by itself."""
    section = facts.section(vendor.target)
    if not section.error("driver"):
        return ok(f"{section.get('driver')}{shown}")
    if not vendor.is_there(facts):
        return ok("none here")
    if sees_no_device(section):
        return ok(f"there, but it shows no device{shown}")
    text, advice = split_advice(section.error("driver"))
    return warn(f"{text}{shown}", advice or "update it; see docs/doctor.md")


def pairs(matrix: Sequence[Sequence[Any]]) -> list[tuple[int, int, Any]]:
    """(from, to, value) of every two devices."""
    return [(i, j, value) for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]


def check_peers(vendor: Vendor, advice: str, facts: Facts) -> Finding | None:
    section, count = facts.section(vendor.target), vendor.num_devices(facts)
    if count < 2:
        return None
    reach = pairs(section.get("peers"))
    apart = [f"{i} to {j}" for i, j, reaches in reach if not reaches]
    if apart:
        more = f" and {len(apart) - _MAX_NAMED} more" if len(apart) > _MAX_NAMED else ""
        return warn(f"devices cannot reach others' memory: {', '.join(apart[:_MAX_NAMED])}{more}", advice)
    links = sorted({str(link) for _, _, link in pairs(section.known("links", ())) if link})
    return ok(f"{count} devices, each reaches each other's memory ({', '.join(links) or 'links not known'})")


def cells(facts: Facts, target: str) -> list[list[str]]:
    """The matrix of peers for people: `.` the device itself, `--` out of reach, else the link, or `yes`."""
    section = facts.section(target)
    reach, links = section.known("peers", []), section.known("links", [])

    def cell(i: int, j: int) -> str:
        if i == j:
            return "."
        if not reach[i][j]:
            return "--"
        return (links[i][j] if links else "") or "yes"

    return [[cell(i, j) for j in range(len(reach))] for i in range(len(reach))]
