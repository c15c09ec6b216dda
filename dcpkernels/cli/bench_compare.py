"""`dcpkernels bench --compare OLD NEW`: what has changed between two runs, and what of it is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpkernels.cli import bench_rows
from dcpkernels.cli.baselines import is_exchange
from dcpkernels.cli.bench_report import Outputs, Section
from dcpkernels.cli.bench_rows import DEFAULTS, Row, in_words, value_of
from dcpkernels.errors import DcpError, DcpInvalidArgument

_SOFTWARE = ("python", "torch", "dcpkernels", "mpi", "nccl", "isa", "num_iters", "warmup_turns", "seed")
_LEAST_NOISE = 1.05  # never is less called a change
_FEW = 3  # ratios of peers of which a common part cannot be told from their spread

Case = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Pair:
    """The same case in two runs. Ratios are new / old: above 1 is slower."""

    case: Case
    old: Row
    new: Row
    peer: str | None = None  # a baseline that both have

    def _ratio(self, of: str | None) -> float:
        """Of the op, or of a baseline."""
        old, new = (row if of is None else row["baselines"][of] for row in (self.old, self.new))
        return new["median_us"] / old["median_us"]

    @property
    def ratio(self) -> float:
        return self._ratio(None)

    @property
    def peer_ratio(self) -> float | None:
        return None if self.peer is None else self._ratio(self.peer)

    @property
    def floor_ratio(self) -> float | None:
        floors = [row.get("floor_us") for row in (self.old, self.new)]
        return floors[1] / floors[0] if all(floors) else None

    @property
    def ratio_by_peer(self) -> float | None:
        return None if self.peer is None else self.ratio / self.peer_ratio

    @property
    def ratio_by_floor(self) -> float | None:
        return None if self.floor_ratio is None else self.ratio / self.floor_ratio

    @property
    def judged(self) -> float:
        return self.ratio if self.peer is None else self.ratio_by_peer

    def own_noise(self) -> float:
        """In logarithms, about twice the standard error of `judged`, from the spread of each run's samples: a median of n
        samples has 1.25 / sqrt(n) of their standard deviation. Samples of one turn, which are neighbours in time, count
        as one.
        """
        errors = []
        for row in (self.old, self.new):
            timed = [row, *([row["baselines"][self.peer]] if self.peer is not None else [])]
            errors += [2 * 1.25 * _spread(entry) / math.sqrt(_num_turns(row)) for entry in timed]
        return math.hypot(*errors)


def _spread(entry: Mapping[str, Any]) -> float:
    """In logarithms, the standard deviation of samples about their median, as the middle half of them has it: a median
    does not feel how far the others are out. Files from before that was written have the p99 alone, at 2.3 standard
    deviations."""
    if entry.get("iqr_us") is not None:
        return entry["iqr_us"] / entry["median_us"] / 1.349
    return math.log(entry["p99_us"] / entry["median_us"]) / 2.33


@dataclass(frozen=True)
class Comparison:
    pairs: list[Pair]
    only_old: list[Case]
    only_new: list[Case]
    drift: float  # in logarithms: see `drift_of`

    def noise(self, pair: Pair) -> float:
        """The factor up to which `judged` may be off 1, either way, when nothing has changed."""
        return max(_LEAST_NOISE, math.exp(math.hypot(pair.own_noise(), 2 * self.drift)))

    def verdict(self, pair: Pair) -> str:
        """Nothing is claimed by the peer alone: it may be the one that has changed. So the op's own ratio has to go as
        far, and as a price an op that became faster on a machine that became slower is none that is known to be."""
        noise = self.noise(pair)
        ratios = (pair.ratio, pair.judged)
        return "slower" if min(ratios) > noise else "faster" if max(ratios) < 1 / noise else "noise"


def compare(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """Raises DcpInvalidArgument for rows of one run that are of the same case."""
    cases = {op: _keys_of_case(op, old, new) for op in {row["op"] for row in (*old, *new)}}
    old_by_case, new_by_case = (_by_case(rows, cases, name) for rows, name in ((old, "old"), (new, "new")))
    pairs = [_pair_of(case, row, new_by_case[case]) for case, row in old_by_case.items() if case in new_by_case]
    only_old = [case for case in old_by_case if case not in new_by_case]
    only_new = [case for case in new_by_case if case not in old_by_case]
    return Comparison(pairs, only_old, only_new, drift_of(pairs))


def drift_of(pairs: Sequence[Pair]) -> float:
    """How far a ratio of the same code goes between the runs: standard deviation of the logarithm of the peers' ratios.

    About their mean, for `judged` is free of what all have in common; about no change where they are too few to tell.
    Without peers, of the floor's ratios about no change.
    """
    logs = [math.log(pair.peer_ratio) for pair in pairs if pair.peer is not None]
    if not logs:
        logs = [math.log(pair.floor_ratio) for pair in pairs if pair.floor_ratio is not None]
    elif len(logs) >= _FEW:
        return statistics.stdev(logs)
    return math.sqrt(statistics.fmean(log * log for log in logs)) if logs else 0.0


def _keys_of_case(op: str, old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """What one of the files alone has is no reason for a row to be another case, unless it is known what the other one's
    rows were."""
    rows = [[row for row in file if row["op"] == op] for file in (old, new)]
    in_both = set.intersection(*({key for row in file for key in row} for file in rows if file))
    return [key for key in bench_rows.parameters([*rows[0], *rows[1]]) if key in in_both or key in DEFAULTS]


def _by_case(rows: Sequence[Row], keys: Mapping[str, Sequence[str]], name: str) -> dict[Case, Row]:
    found: dict[Case, int] = {}
    for index, row in enumerate(rows):
        case = tuple((key, value_of(row, key)) for key in keys[row["op"]])
        if case in found:
            raise DcpInvalidArgument(
                f"bench: --compare: each row of a file must be another case (got rows {found[case]} and {index} alike in "
                f"the {name} one: {words_of(case)})"
            )
        found[case] = index
    return {case: rows[index] for case, index in found.items()}


def _pair_of(case: Case, old: Row, new: Row) -> Pair:
    """With the peer that does all of the op rather than a bare exchange, and of those the one with the least noise."""
    both = [name for name in old.get("baselines", {}) if name in new.get("baselines", {})]
    choices = [Pair(case, old, new, name) for name in both] or [Pair(case, old, new)]
    return min(choices, key=lambda pair: (pair.peer is not None and is_exchange(pair.peer), pair.own_noise()))


def _num_turns(row: Row) -> float:
    turn = row.get("samples_per_turn") or 1
    return max(1.0, (row.get("num_iters") or 1) / (turn - turn // 2))


def words_of(case: Case, keys: Sequence[str] | None = None) -> str:
    return ", ".join(
        words for key, value in case if keys is None or key in keys for words in [in_words(key, value)] if words
    )


def run(old_path: Path, new_path: Path, outputs: Outputs, *, fail_above: float | None = None) -> int:
    """The command. Raises DcpInvalidArgument for files that are none of the bench's, and with `fail_above` for those that
    have nothing in common; DcpError for a ratio above `fail_above` that is beyond the noise."""
    outputs.require()
    old, new = bench_rows.load(old_path), bench_rows.load(new_path)
    comparison = compare(old, new)
    names = (str(old_path), str(new_path))
    differences = differences_of(old, new)
    where = "\n".join([f"old: {names[0]}, new: {names[1]}", *_about_differences(differences, names)])
    outputs.say(where)
    section = table_of(comparison)
    if comparison.pairs:
        outputs.say(section.about)
        outputs.show(section)
    else:
        outputs.say("no row is of the same case in both")
    only = [
        f"only in {name}: {words_of(case)}"
        for name, cases in zip(names, (comparison.only_old, comparison.only_new), strict=True)
        for case in cases
    ]
    for line in only:
        outputs.say(line)
    outputs.write("\n\n".join([*where.splitlines(), *only]), [section], _as_json(comparison, differences))
    if fail_above is not None and not comparison.pairs:  # or a gate would be open for good once a case has a new name
        raise DcpInvalidArgument("bench: --compare: with --fail-above, files must have a case in common (got none)")
    worse = [pair for pair in comparison.pairs if comparison.verdict(pair) == "slower"]
    if fail_above is not None and (above := [pair for pair in worse if pair.judged > fail_above]):
        worst = max(above, key=lambda pair: pair.judged)
        raise DcpError(
            f"bench: --compare: ratios must be at most {fail_above:g} or within the noise (got {worst.judged:.2f}, "
            f"noise {comparison.noise(worst):.2f}, for {words_of(worst.case)})"
        )
    return 0


def table_of(comparison: Comparison) -> Section:
    pairs = comparison.pairs
    differ = [key for key in dict.fromkeys(key for pair in pairs for key, _ in pair.case)
              if len({dict(pair.case).get(key) for pair in pairs}) > 1]  # fmt: skip
    always = ("op", "num_ranks", *bench_rows.SIZES)
    common = (
        words_of(pairs[0].case, [key for key, _ in pairs[0].case if key not in (*differ, *always)]) if pairs else ""
    )
    about = (
        f"{common}{'; ' if common else ''}ratios are new / old, above 1 is slower; noise: how far ratio / peer, or the ratio "
        "where there is no peer, may be off 1 either way when nothing has changed"
    )
    columns = ["case", "old us", "new us", "ratio", "old p99", "new p99", "peer", "peer's ratio", "ratio / peer",
               "ratio / floor", "noise", "judged"]  # fmt: skip
    lines = []
    for pair in pairs:
        times = (pair.old["median_us"], pair.new["median_us"], pair.old["p99_us"], pair.new["p99_us"])
        old, new, old_p99, new_p99 = (f"{time:,.1f}" for time in times)
        lines.append(
            [words_of(pair.case, (*always, *differ)), old, new, _two(pair.ratio), old_p99, new_p99, pair.peer or "-",
             _two(pair.peer_ratio), _two(pair.ratio_by_peer), _two(pair.ratio_by_floor), _two(comparison.noise(pair)),
             comparison.verdict(pair)]
        )  # fmt: skip
    return Section(about, columns, lines)


def _two(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def differences_of(old: Sequence[Row], new: Sequence[Row]) -> dict[str, list[list[Any]]]:
    """By key of the machine or of the circumstances: its values in the two files, where they are not the same."""
    values: list[dict[str, list[Any]]] = [{}, {}]
    for found, rows in zip(values, (old, new), strict=True):
        for row in rows:
            machine = row.get("machine")
            told = {key: row[key] for key in sorted(bench_rows.CIRCUMSTANCES) if key in row and key != "machine"}
            for key, value in ((machine if isinstance(machine, dict) else {}) | told).items():
                if value not in found.setdefault(key, []):
                    found[key].append(value)
    keys = dict.fromkeys([*values[0], *values[1]])
    pairs = {key: [found.get(key, []) for found in values] for key in keys}
    return {key: both for key, both in pairs.items() if sorted(map(str, both[0])) != sorted(map(str, both[1]))}


def _about_differences(differences: Mapping[str, list[list[Any]]], names: Sequence[str]) -> list[str]:
    told = {
        key: f"{key} {' against '.join(', '.join(map(str, found)) or 'unknown' for found in both)}"
        for key, both in differences.items()
    }
    hardware = [text for key, text in told.items() if key not in _SOFTWARE]
    software = [text for key, text in told.items() if key in _SOFTWARE]
    lines = []
    if hardware:
        lines.append(
            f"THE MACHINES DIFFER ({'; '.join(hardware)}): these ratios compare machines, not what has changed in the op"
        )
    if software:
        lines.append(f"not the same in both: {'; '.join(software)}")
    return lines


def _as_json(comparison: Comparison, differences: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {
            "case": dict(pair.case),
            "old": {key: pair.old[key] for key in ("median_us", "p99_us")},
            "new": {key: pair.new[key] for key in ("median_us", "p99_us")},
            "ratio": pair.ratio,
            "peer": pair.peer,
            "peer_ratio": pair.peer_ratio,
            "ratio_by_peer": pair.ratio_by_peer,
            "ratio_by_floor": pair.ratio_by_floor,
            "noise": comparison.noise(pair),
            "judged": comparison.verdict(pair),
            "differences": differences,
        }
        for pair in comparison.pairs
    ]
    for name, cases in (("old", comparison.only_old), ("new", comparison.only_new)):
        rows += [{"case": dict(case), "only_in": name} for case in cases]
    return rows
