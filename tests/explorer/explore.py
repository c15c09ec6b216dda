"""Runs programs of the explorer and reads their verdicts."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WRONG, TOO_MANY = 0, 1, 3


@dataclass(frozen=True)
class Exploration:
    code: int
    numbers: dict[str, Any]  # the line of JSON
    trace: str

    @property
    def verdict(self) -> str:
        """ "" when all was right, else "KIND: MESSAGE"."""
        if self.numbers["verdict"] == "ok":
            return ""
        if self.numbers["verdict"] == "wrong":
            return f"{self.numbers['kind']}: {self.numbers['message']}"
        return self.numbers["verdict"]

    @property
    def replay(self) -> list[str]:
        """The arguments that repeat a wrong execution."""
        (line,) = [line for line in self.trace.splitlines() if line.startswith("replay: ")]
        return line.removeprefix("replay: ").split()

    @property
    def steps(self) -> str:
        """What threads did, without the replay line."""
        return "\n".join(line for line in self.trace.splitlines() if not line.startswith("replay: "))


def explore(program: Path, scenario: str, *options: str, timeout_s: float = 600) -> Exploration:
    command = [str(program), *scenario.split(), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode in (OK, WRONG, TOO_MANY), (command, done.returncode, done.stderr[-3000:])
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == OK) == (numbers["verdict"] == "ok"), numbers
    return Exploration(done.returncode, numbers, done.stderr)
