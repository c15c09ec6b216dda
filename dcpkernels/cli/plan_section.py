"""A part of `dcpkernels plan` besides capacity, which options ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcpkernels.cli import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Section:
    """Args:
    key: of the JSON's top level.
    report: what stands there.
    about: a line above the tables.
    tables: columns, and rows.
    notes: lines below them.
    panels: what it draws, each on axes of its own.
    """

    key: str
    report: dict[str, Any]
    about: str
    tables: Sequence[Table]
    notes: Sequence[str]
    panels: Sequence[Callable[[Axes], None]]

    def show(self) -> None:
        print(f"\n{self.about}\n")
        for columns, rows in self.tables:
            table.show(columns, rows)
            print()
        print("\n".join(self.notes))
