"""Tables and progress: rich's where it is installed and somebody is watching, plain lines otherwise."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from dcpkernels.errors import DcpInvalidArgument


def is_rich(stream: object) -> bool:
    """Not on a dumb terminal, which rich takes to have 80 columns whatever it is told."""
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    return bool(getattr(stream, "isatty", lambda: False)()) and importlib.util.find_spec("rich") is not None


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of numbers to stdout."""
    if not is_rich(sys.stdout):
        print(plain(columns, rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        # A narrow terminal may break a heading between words; a number never.
        table.add_column(column, justify="right", min_width=max(map(len, [*cells, *column.split()])))
    for row in rows:
        table.add_row(*row)
    # A table that is wider than the terminal is broken by it. Rich would cut it off, at the edge of what it takes for the
    # terminal, and columns do not always come out as narrow as they may be.
    least = sum(column.min_width + 1 for column in table.columns) + 1
    width = max(Console().width, least)
    Console(width=2 * width).print(table, width=width)


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In GitHub's form, aligned as in `plain`, so that it can be read as it is."""
    columns, *rows = [[cell.replace("|", "\\|") for cell in line] for line in (columns, *rows)]
    widths = [max(2, *map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * (width - 1) + ":" for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner while the block runs; nothing where nobody is watching. On stderr: stdout is for results."""
    if not is_rich(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


class Bar:
    """One step of a command: a progress bar on stderr, or one line there at its end, which says how far it got.

    `update(done)` may be called from any thread.
    """

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self._progress = None

    def __enter__(self) -> Bar:  # noqa: PYI034  typing has Self from Python 3.11 on
        if is_rich(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task(self._text, total=self._total)
        return self

    def update(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif not isinstance(error, DcpInvalidArgument):  # of which one line is all there is to say
            print(f"{self._text}: {self._done:,} of {self._total:,}", file=sys.stderr)
