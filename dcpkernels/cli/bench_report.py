"""What a run of the bench leaves behind: a table or its markdown, rows as JSON, a chart. Any of it is refused before
anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dcpkernels.cli import output, table
from dcpkernels.cli.output import STDOUT
from dcpkernels.errors import DcpInvalidArgument


class Section(NamedTuple):
    """A table, and what it is of."""

    about: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Paths. One of json and markdown may be "-", which is stdout; that has then nothing else."""

    json: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None

    def require(self) -> None:
        """Raises DcpInvalidArgument where one cannot be written, DcpUnsupported where there is no matplotlib."""
        if self.json == STDOUT == self.markdown:
            raise DcpInvalidArgument("--json: must be a file where --markdown goes to stdout (got stdout for both)")
        output.require_writable("--json", None if self.json == STDOUT else self.json)
        output.require_writable("--plot", self.plot)
        output.require_writable("--markdown", None if self.markdown == STDOUT else self.markdown)
        if self.plot is not None:
            output.require_matplotlib("--plot")

    @property
    def takes_stdout(self) -> bool:
        return STDOUT in (self.json, self.markdown)

    def say(self, text: str) -> None:
        """What is to be read while the bench runs, or beside the table."""
        print(text, file=sys.stderr if self.takes_stdout else sys.stdout, flush=True)

    def show(self, section: Section) -> None:
        """As soon as it is there, unless stdout is for something that comes at the end."""
        if not self.takes_stdout:
            table.show(section.columns, section.lines)

    def write(self, where: str, sections: Sequence[Section], rows: Sequence[Mapping[str, Any]]) -> None:
        """All but what has been shown. `where` is the line that says on which machine."""
        if self.markdown == STDOUT:
            print(markdown(where, sections), end="")
        elif self.markdown is not None:
            output.write_text(self.markdown, markdown(where, sections))
        if self.json == STDOUT:
            print(output.to_json(rows))
        elif self.json is not None:
            output.write_json(self.json, rows)
        if self.plot is not None and rows:
            from dcpkernels.cli import bench_plot

            bench_plot.draw(rows, [where, *(section.about for section in sections)], self.plot)
        for path in (self.json, self.plot if rows else None, self.markdown):
            if path not in (None, STDOUT):
                self.say(f"wrote {path}")


def markdown(where: str, sections: Sequence[Section]) -> str:
    """In GitHub's form: on which machine, and each table under what it is of."""
    parts = [_text(where)]
    for section in sections:
        parts += [_text(section.about), table.markdown(section.columns, section.lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(line: str) -> str:
    """What stands for itself in a line of the bench is no mark there."""
    return "".join(f"\\{char}" if char in "\\`*<|" else char for char in line)
