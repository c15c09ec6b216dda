"""The command: asks, checks, shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcpkernels import _backend
from dcpkernels.cli import output
from dcpkernels.cli.doctor import build, collective, container, engines, host, render, torch_match
from dcpkernels.cli.doctor.check import Check, Facts, Result, results
from dcpkernels.cli.doctor.gpu import cells
from dcpkernels.cli.doctor.privacy import Scrubber
from dcpkernels.cli.doctor.probe import ask
from dcpkernels.cli.doctor.targets import CHECKS, SECTIONS, TARGETS, VENDORS, states
from dcpkernels.cli.output import STDOUT
from dcpkernels.cli.table import status
from dcpkernels.errors import DcpInvalidArgument

ALL_CHECKS: tuple[Check, ...] = (
    *CHECKS,
    *build.checks(TARGETS),
    *torch_match.CHECKS,
    *engines.CHECKS,
    *host.CHECKS,
    *container.CHECKS,
    *(check for vendor in VENDORS for check in vendor.checks),
)
LABELS = {"cpu": "CPU", **{vendor.target: vendor.label for vendor in VENDORS}}


def run(*, json_path: Path | None, with_collective: bool, num_ranks: int | None) -> int:
    """Prints or writes what was found, and returns the exit code. Raises DcpInvalidArgument."""
    _require_options(json_path, with_collective, num_ranks)
    with status("asking drivers and torch"):
        facts = this_machine()
    found = results(ALL_CHECKS, facts)
    if with_collective:
        found += collective.run(facts, num_ranks or 2)
    show(facts, found, json_path)
    return render.exit_code(found)


def _require_options(json_path: Path | None, with_collective: bool, num_ranks: int | None) -> None:
    """Before the work, not after."""
    if num_ranks is not None and not with_collective:
        raise DcpInvalidArgument(f"--ranks: must come with --collective (got --ranks {num_ranks})")
    if num_ranks is not None and num_ranks > collective.MAX_RANKS:
        raise DcpInvalidArgument(f"--ranks: must be at most {collective.MAX_RANKS} (got {num_ranks})")
    output.require_writable("--json", None if json_path == STDOUT else json_path)


def this_machine() -> Facts:
    public = [path for vendor in VENDORS for path in vendor.public_paths]
    return Facts(
        ask(list(SECTIONS)), num_cpus=_backend.num_usable_cpus(), scrubber=Scrubber.of_this_machine(public=public)
    )


def show(facts: Facts, found: Sequence[Result], json_path: Path | None) -> None:
    peers = {vendor.target: matrix for vendor in VENDORS if len(matrix := cells(facts, vendor.target)) > 1}
    if json_path is not None:
        report = render.as_object(states(facts), found, peers)
        if json_path == STDOUT:
            print(output.to_json(report))
            return
        output.write_json(json_path, report)
    print(render.text(LABELS, states(facts), found, peers))
