"""`dcpkernels doctor`: what this machine can do, and what it lacks, in lines that can be pasted into a bug report.

A check is a function of `Facts` (check.py), one file a topic. What needs the compiled modules, torch or a driver is asked in
a child process (probe.py): a driver that hangs or dies costs its own lines and nothing else. docs/doctor.md has a row for
each check.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from dcpkernels.cli.parsing import count


def add(commands: argparse._SubParsersAction, run: Callable[[argparse.Namespace], int]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and what it lacks",
        description="Looks at what is built, torch, drivers and devices, how devices reach each other, limits and "
        "containers. One line a check: ok, warn or fail, and what to do. The text has no names, addresses or paths of this "
        "machine in it and can be pasted into a bug report. Nothing is changed. Exit code 1 when a check fails.",
        epilog="Each check, and why it is made: docs/doctor.md.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", nargs="?", const=Path("-"),
                        help="write the result there; without FILE to stdout, in place of the text")  # fmt: skip
    parser.add_argument("--collective", action="store_true", help="run every op between rank processes and check what "
                        "comes out: on CPUs, and with a rank for each GPU")  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="W", help="rank processes of --collective on CPUs (default 2)")
    parser.set_defaults(run=run)
