"""Reads a trace of requests: when each arrived, how long its prompt and its answer were.

Two forms, told apart by what is in the file:

- JSON lines, as published with Mooncake: {"timestamp": ms, "input_length": n, "output_length": n}; other keys, such as
  hash_ids, do not matter.
- CSV with a header: timestamp,input_length,output_length or timestamp_ms,input_tokens,output_tokens in milliseconds, or
  BurstGPT's Timestamp,Request tokens,Response tokens in seconds; other columns do not matter.

Lines may be in any order: requests are sorted by arrival, equal ones stay in the order of the file. Time begins with
the first of them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import Any, NamedTuple, TextIO

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.planner.ranges import is_number

MAX_LINE = 2**22  # characters; hash_ids of a long prompt take some thousand
MAX_TOKENS = 2**31  # of a prompt or an answer: no model's context comes near
MAX_ARRIVAL_S = 1e10  # 300 years: later ones are in another unit


class Form(NamedTuple):
    """Names of the fields, and units of time in a second."""

    arrival: str
    input: str
    output: str
    per_second: float


FORMS = (
    Form("timestamp", "input_length", "output_length", 1000),
    Form("timestamp_ms", "input_tokens", "output_tokens", 1000),
    Form("Timestamp", "Request tokens", "Response tokens", 1),
)


@dataclass(frozen=True)
class Request:
    """Arrives `arrival_s` seconds after the first one, with input_tokens >= 1 and output_tokens >= 0."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: str | PathLike[str]) -> list[Request]:
    """The requests of a file, by arrival.

    Raises DcpInvalidArgument for a file that cannot be read, is not of these forms, or has no request; the text names
    the line.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            requests = list(_requests(_lines(file, str(path)), str(path)))
    except UnicodeDecodeError as error:
        raise DcpInvalidArgument(
            f"trace: a file must be UTF-8 text (got {path}, byte {error.start}: {error.reason})"
        ) from None
    except OSError as error:
        raise DcpInvalidArgument(f"trace: a file must be readable (got {path}: {error.strerror or error})") from None
    if not requests:
        raise DcpInvalidArgument(f"trace: a file must have at least one request (got {path}, which has none)")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [Request(request.arrival_s - first_s, request.input_tokens, request.output_tokens) for request in requests]


def _lines(file: TextIO, path: str) -> Iterator[str]:
    """A file without an end, /dev/zero say, has no line either."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise _error(path, number, f"a line must have at most {MAX_LINE:,} characters", line)
        yield line


def _requests(lines: Iterable[str], path: str) -> Iterator[Request]:
    numbered = ((number, line) for number, line in enumerate(lines, 1))
    for number, line in numbered:
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            raise _error(path, number, "a JSON file must have one object a line", line)
        if line.lstrip().startswith("{"):
            yield from _from_json(chain([(number, line)], numbered), path)
        else:
            yield from _from_csv(line, (rest for _, rest in numbered), number, path)


def _from_json(numbered: Iterable[tuple[int, str]], path: str) -> Iterator[Request]:
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _error(path, number, f"a line must be a JSON object ({error})", line) from None
        if not isinstance(fields, dict):
            raise _error(path, number, "a line must be a JSON object", line)
        form = next((form for form in FORMS if all(name in fields for name in form[:3])), None)
        if form is None:
            names = ", ".join(FORMS[0][:3])
            raise _error(path, number, f"a request must have the fields {names}", ", ".join(map(str, fields)) or "none")
        yield _request(*(fields[name] for name in form[:3]), form.per_second, path, number)


def _from_csv(header: str, lines: Iterable[str], line_number: int, path: str) -> Iterator[Request]:
    reader = csv.reader(chain([header], lines), strict=True)
    form: Form | None = None
    places: list[int] = []
    try:
        for row in reader:
            number = line_number + reader.line_num - 1
            if form is None:
                columns = [name.strip() for name in row]
                form = next((form for form in FORMS if all(name in columns for name in form[:3])), None)
                if form is None:
                    known = " or ".join(",".join(form[:3]) for form in FORMS)
                    raise _error(path, number, f"the first line must be a JSON object or a header with {known}", header)
                if twice := [name for name in form[:3] if columns.count(name) > 1]:
                    raise _error(path, number, f"a header must have {twice[0]} once", header)
                places = [columns.index(name) for name in form[:3]]
            elif any(cell.strip() for cell in row):
                if len(row) <= max(places):
                    raise _error(path, number, f"a line must have at least {max(places) + 1} columns", str(len(row)))
                yield _request(*(_parsed(row[place]) for place in places), form.per_second, path, number)
    except csv.Error as error:
        raise _error(path, line_number + reader.line_num - 1, "a line must be CSV", str(error)) from None


def _parsed(cell: str) -> int | float | str:
    """A number where it is one. float() alone would round what is above 2**53."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _request(arrival: Any, input_tokens: Any, output_tokens: Any, per_second: float, path: str, number: int) -> Request:
    most = MAX_ARRIVAL_S * per_second
    if not is_number(arrival) or not 0 <= arrival <= most:
        raise _error(path, number, f"the time must be a number in 0 .. {most:.0e}", arrival)
    counts = []
    for name, value, least in (("input length", input_tokens, 1), ("output length", output_tokens, 0)):
        if not is_number(value) or value != math.floor(value) or not least <= value <= MAX_TOKENS:
            raise _error(path, number, f"the {name} must be a whole number in {least} .. {MAX_TOKENS}", value)
        counts.append(int(value))
    return Request(arrival / per_second, *counts)


def _error(path: str, number: int, rule: str, given: Any) -> DcpInvalidArgument:
    # One line, and nothing in it that a terminal would take for a command.
    text = "".join(char if char.isprintable() else " " for char in str(given)).strip()
    return DcpInvalidArgument(
        f"trace: {path}, line {number}: {rule} (got {text[:60] + '...' if len(text) > 60 else text})"
    )
