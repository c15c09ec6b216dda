"""`dcpkernels bench`: check, then time, one row per number of ranks and size. `measure_row` is also what bench/ calls."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from itertools import groupby, product
from typing import Any, NamedTuple

import torch

import dcpkernels
from dcpkernels.cli import baselines, bench_report, bench_table, machine, measure, openmpi
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.cli.bench_device import Times, for_device
from dcpkernels.cli.bench_kv_gather import KvGather
from dcpkernels.cli.bench_op import OURS, BenchOp, Kept, Subject
from dcpkernels.cli.bench_query_gather import QueryGather
from dcpkernels.cli.progress import Progress, RowBars
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import run_ranks
from dcpkernels.testing.timing import max_over_ranks, summarize

OPS: dict[str, type[BenchOp]] = {op.NAME: op for op in (A2aLseReduce, QueryGather, KvGather)}
ALL = "all"

_TIMEOUT_S = 900.0  # of one row; a run that gets there is stuck
_BASELINES = {"cpu": ("gloo",), "cuda": ("nccl",)}  # where none is named
_MAX_SKEW_US = 1e6  # far from the time after which a rank that waits in a call gives the others up


class Samples(NamedTuple):
    """One rank's part of one row, by candidate. Where the results are wrong before they are timed, there are no times."""

    times: dict[str, Times]
    floor_us: list[float]
    errors: dict[str, float]  # before, the largest of all ranks
    last_errors: dict[str, float]  # after, of this rank


def from_args(args: argparse.Namespace) -> list[BenchOp]:
    """The op, or all of them, with the options of a command line: one for each combination of what is swept over.

    Raises DcpInvalidArgument for a list without a value.
    """
    kinds = list(OPS.values()) if args.op == ALL else [OPS[args.op]]
    return list(dict.fromkeys(op for kind in kinds for op in _sweep(kind, args)))


def _sweep(kind: type[BenchOp], args: argparse.Namespace) -> list[BenchOp]:
    given = {field.name: getattr(args, field.name, None) for field in fields(kind)}
    options = {name: value for name, value in given.items() if value is not None} | {
        "baselines": tuple(
            name for name in dict.fromkeys(args.baselines or _BASELINES.get(args.device, ())) if name != "none"
        ),
        "isa": None if args.isa == "auto" else args.isa,
        "warmup": max(args.warmup, 1),
    }
    for name in {"ranks", kind.SIZES} & options.keys():  # named twice it is one row still
        options[name] = tuple(dict.fromkeys(options[name]))
    options = kind.sweeps_unasked(args.device, options) | options
    swept = {name: options.pop(name) for name in kind.SWEEPS if name in options}
    for name, values in swept.items():
        _require_some(name, values)
    return [kind(**options, **dict(zip(swept, values, strict=True))).canonical() for values in product(*swept.values())]


def run(ops: Sequence[BenchOp], outputs: bench_report.Outputs) -> int:
    """The command: prints a header, and a table for each op; writes the rows. Raises DcpError when a result is wrong."""
    outputs.require()
    isas = [check(op) for op in ops]
    used = [name for op in ops for name in op.baselines]
    host = machine.describe() | for_device(ops[0].device).describe() | baselines.require(used)
    where = machine.one_line(host, isas[0])
    outputs.say(where)
    rows: list[dict[str, Any]] = []
    sections = []
    with RowBars(sum(len(op.ranks) * len(op.sizes) for op in ops)) as bars:
        for _, group in groupby(zip(ops, isas, strict=True), key=lambda pair: pair[0].NAME):
            variants = list(group)
            about = _headline([op for op, _ in variants])
            with bars.aside():
                outputs.say(about)
            of_op = [row | {"machine": host} for op, isa in variants for row in _rows(op, isa, bars)]
            for shown in bench_table.tables_of(of_op):
                sections.append(bench_report.Section(about, shown.columns, shown.lines))
                with bars.aside():
                    outputs.show(sections[-1])
            rows += of_op
    outputs.write(where, sections, rows)
    return 0


def _headline(variants: Sequence[BenchOp]) -> str:
    """What is about to be measured, of the variants of one op."""
    first = variants[0]
    what = "; or ".join(dict.fromkeys(op.describe() for op in variants))
    dtypes = " and ".join(dict.fromkeys(op.dtype for op in variants))
    skews = ", ".join(f"{op.skew_us:g}" for op in {op.skew_us: op for op in variants}.values())
    late = f"; ranks up to {skews} us late, timed from the entry of the last one" if skews != "0" else ""
    calls = " or ".join(dict.fromkeys(f"{op.num_calls} call{'s' if op.num_calls > 1 else ''}" for op in variants))
    against = ", in turns with " + ", ".join(first.baselines) if first.baselines else ""
    return (
        f"{first.NAME}: {what}, {dtypes}, {first.iters} samples of {calls} "
        f"each{against}; a call's time is that of its slowest rank{late}"
    )


def _rows(op: BenchOp, isa: str, bars: RowBars) -> list[dict[str, Any]]:
    num_calls = (1 + len(op.baselines)) * measure.num_samples(op.iters, op.warmup, op.turn)
    told = op.fields()  # of what is swept over, also what says nothing here: the bytes of packets where none are sent
    values = {name: told.get(name, getattr(op, name)) for name in op.SWEEPS[1:]}
    swept = ", ".join([op.NAME, op.dtype, *(name if value is True else f"{name} {value}" for name, value in values.items() if value)])
    rows = []
    for num_ranks in op.ranks:
        for size in op.sizes:
            text = f"{swept}, {num_ranks} ranks, {size:,} {op.SIZES}"
            with bars.row(text, num_ranks, num_calls) as path:
                rows.append(measure_row(op, num_ranks, size, isa, progress_path=path)[0])
    return rows


def check(op: BenchOp) -> str:
    """What would fail in every rank fails here, as one clean error. Returns the kernel variant that will run."""
    device = for_device(op.device, op.mode)
    unknown = [name for name in op.baselines if name not in op.known_baselines]
    if unknown:
        known = ", ".join(op.known_baselines)
        where = "" if op.device == "cpu" else f" with device {op.device}"
        raise DcpUnsupported(f"bench: baselines must be of {known}{where} (got {', '.join(unknown)})")
    for option in ("ranks", op.SIZES):
        _require_some(option, getattr(op, option))
    if not op.skew_us <= _MAX_SKEW_US:
        raise DcpInvalidArgument(f"bench: skew_us must be at most {_MAX_SKEW_US:g} (got {op.skew_us:g})")
    device.require_samples(op.num_calls, op.skew_us)
    op.require()
    for num_ranks in op.ranks:
        dcpkernels.Workspace.size(op.config(num_ranks, max(op.sizes)), num_ranks, op.device)
        machine.require_memory("bench: inputs", op.input_bytes(num_ranks, max(op.sizes)))
    isa = device.require(op.isa, op.ranks)
    baselines.require(op.baselines)
    return isa


def _require_some(option: str, values: Sequence[object]) -> None:
    if not values:
        raise DcpInvalidArgument(f"bench: {option} must name at least one {_KINDS.get(option, 'number')} (got none)")


_KINDS = {"dtype": "type", "mode": "mode", "wire": "wire", "zero_copy": "answer"}


def measure_row(
    op: BenchOp, num_ranks: int, size: int, isa: str, *, progress_path: str | None = None
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One row, and behind it the times in microseconds of each call of each candidate, of all ranks together.

    Raises DcpError when a result, ours or a baseline's, is wrong: before anything is timed, or the last one that was.
    """
    device = for_device(op.device, op.mode)
    with openmpi.job(num_ranks) if baselines.uses_openmpi(op.baselines) else nullcontext() as mpi_job:
        per_rank = run_ranks(_rank, num_ranks, op, size, mpi_job, progress_path, mode="process", timeout_s=_TIMEOUT_S)
    where = f"at {op.SIZE}={size}, {num_ranks} ranks)"
    first = per_rank[0].errors
    _require_right(op, first, "before it is timed", where)
    last = {name: _largest([rank.last_errors[name] for rank in per_rank]) for name in first}
    _require_right(op, last, "after it was timed", where)
    errors = {name: max(first[name], last[name]) for name in first}
    times = {
        name: device.collective_us([rank.times[name] for rank in per_rank], num_calls=op.num_calls, skew_us=op.skew_us)
        for name in errors
    }
    spread_us = device.entry_spread_us([rank.times[OURS] for rank in per_rank])
    num_bytes = op.num_bytes(num_ranks, size)
    floor_us = device.floor_us([rank.floor_us for rank in per_rank]) if num_bytes else 0.0
    ours = summarize(times[OURS])
    row = {
        "op": op.NAME,
        "device": op.device,
        "mode": device.mode,
        "isa": isa,
        "num_ranks": num_ranks,
        op.SIZE: size,
        **op.fields(),
        "dtype": op.dtype,
        "skew_us": op.skew_us,
        "timed_from": "last entry" if op.skew_us else "own entry",
        "entry_spread_us": round(summarize(spread_us).median_us, 3) if spread_us else None,
        "num_iters": op.iters,
        "calls_per_sample": op.num_calls,
        "samples_per_turn": op.turn,
        "warmup_turns": op.warmup,
        "seed": op.seed,
        "median_us": round(ours.median_us, 3),
        "p99_us": round(ours.p99_us, 3),
        "iqr_us": round(ours.iqr_us, 3),
        "host_us": _host_us([rank.times[OURS] for rank in per_rank]),
        "bytes": num_bytes,
        "floor_us": round(floor_us, 3),
        "pct_of_floor": round(100 * floor_us / ours.median_us, 2) if num_bytes else None,
        op.ERROR: errors[OURS],
        "baselines": {name: _baseline_entry(op, times[name], errors[name]) for name in op.baselines},
    }
    # Against the fastest baseline that does all of the op; with none there is nothing to compare with.
    medians = [entry["median_us"] for name, entry in row["baselines"].items() if not baselines.is_exchange(name)]
    row["speedup"] = round(min(medians) / ours.median_us, 2) if medians else None
    return row, times


def _host_us(per_rank: Sequence[Times]) -> float | None:
    """What a call keeps the slowest rank's host, the median; None where a call is over when it returns."""
    if not per_rank[0].host_us:
        return None
    return round(summarize(max_over_ranks([times.host_us for times in per_rank])).median_us, 3)


def _require_right(op: BenchOp, errors: Mapping[str, float], when: str, where: str) -> None:
    for name, error in errors.items():
        if not error <= op.MAX_ERROR:
            raise DcpError(f"bench: {op.wrong(name, error, when)} {where}")


def _largest(errors: Sequence[float]) -> float:
    """Also of what is not a number, which `max` may pass over."""
    return torch.tensor(errors, dtype=torch.float64).max().item()


def _baseline_entry(op: BenchOp, times_us: list[float], error: float) -> dict[str, float]:
    summary = summarize(times_us)
    times = {"median_us": summary.median_us, "p99_us": summary.p99_us, "iqr_us": summary.iqr_us}
    return {key: round(us, 3) for key, us in times.items()} | {op.ERROR: error}


def _rank(
    group: torch.distributed.ProcessGroup, op: BenchOp, size: int, mpi_job: str | None, progress_path: str | None
) -> Samples:
    """What every rank process does for one row."""
    rank, num_ranks = group.rank(), group.size()
    progress, device = Progress(progress_path, rank), for_device(op.device, op.mode)
    device.open_rank(rank, num_ranks)
    with (
        dcpkernels.Workspace(group, device.torch_device, op.config(num_ranks, size)) as workspace,
        op.opened(workspace, group, size, mpi_job) as subject,
    ):
        device.bind_rank()
        barrier = measure.Barrier(workspace)
        checks = subject.check(), _check_again(subject, barrier)
        errors = _largest_of_all_ranks({name: _largest([check[name] for check in checks]) for name in checks[0]}, group)
        if any(not error <= op.MAX_ERROR for error in errors.values()):
            return Samples({}, [], errors, {})
        candidates = {name: Kept(candidate) for name, candidate in subject.candidates.items()}
        times = device.take_turns(
            candidates,
            barrier,
            iters=op.iters,
            warmup=op.warmup,
            num_calls=op.num_calls,
            turn=op.turn,
            produce=subject.produce,
            skew_us=op.skew_us,
            progress=progress.add_call,
        )
        last_errors = subject.check_last({name: candidate.result for name, candidate in candidates.items()})
        return Samples(times, device.floor_samples_us(op.num_bytes(num_ranks, size), barrier), errors, last_errors)


def _check_again(subject: Subject, barrier: measure.Barrier) -> dict[str, float]:
    """Of the next input: where two buffers take turns, the last call that is timed has one of them, and this the other."""
    results = {}
    for name, candidate in subject.candidates.items():
        barrier()
        subject.produce(name)
        barrier()
        results[name] = candidate()
    return subject.check_last(results)


def _largest_of_all_ranks(errors: dict[str, float], group: torch.distributed.ProcessGroup) -> dict[str, float]:
    """Also the agreement whether to go on: no rank may time what another has found wrong."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return dict(zip(errors, values.tolist(), strict=True))
