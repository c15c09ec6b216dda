"""Planted faults, all in one compilation: a copy of csrc/ in which every mutated place asks which fault is on.

A compilation for each of them would take minutes. The programs that hold no fault are made from csrc/ itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new`, where it stands behind `behind`: this must be the only such place in the file.

    Statements (they end in a semicolon) and expressions can be mutated; a declaration only by its expression.
    """

    file: str  # in csrc/
    old: str
    new: str
    behind: str = ""

    def span(self, text: str) -> tuple[int, int]:
        place = self.behind + self.old
        if text.count(place) != 1:
            raise ValueError(f"{self.file}: {text.count(place)} places, not 1: {place}")
        first = text.index(place) + len(self.behind)
        return first, first + len(self.old)

    def either(self, number: int, old: str) -> str:
        """The text that behaves as `new` when fault `number` is on, else as `old`."""
        if self.old.endswith(";"):
            return f"{{ if (explorer_mutation == {number}) {{ {self.new} }} else {{ {old} }} }}"
        return f"(explorer_mutation == {number} ? ({self.new}) : ({old}))"


def write_copy(csrc: Path, folder: Path, mutations: Iterable[tuple[int, Sequence[Edit]]]) -> Path:
    """A copy of csrc/ in `folder` that holds all mutations. They may share a place, but not overlap."""
    copy = folder / "csrc"
    shutil.copytree(csrc, copy)
    texts: dict[str, str] = {}
    spans: dict[str, dict[tuple[int, int], str]] = {}
    for number, edits in mutations:
        for edit in edits:
            text = texts.setdefault(edit.file, (csrc / edit.file).read_text())
            span = edit.span(text)
            places = spans.setdefault(edit.file, {})
            places[span] = edit.either(number, places.get(span, edit.old))
    for file, places in spans.items():
        text, end = texts[file], len(texts[file])
        for span in sorted(places, reverse=True):
            if span[1] > end:
                raise ValueError(f"{file}: mutations overlap at {text[span[0] : span[1]]}")
            text = text[: span[0]] + places[span] + text[span[1] :]
            end = span[0]
        (copy / file).write_text(text)
    return copy
