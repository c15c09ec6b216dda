"""`dcpkernels bench`: check, then time, one row per number of ranks and size. `measure_row` is also what bench/ calls."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dcpkernels
from dcpkernels.cli import baselines, floor, machine, measure, openmpi, table
from dcpkernels.cli.bench_a2a_lse_reduce import A2aLseReduce
from dcpkernels.cli.bench_kv_gather import KvGather
from dcpkernels.cli.bench_op import OURS, BenchOp
from dcpkernels.cli.bench_query_gather import QueryGather
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import run_ranks
from dcpkernels.testing.timing import max_over_ranks, summarize

OPS: dict[str, type[BenchOp]] = {op.NAME: op for op in (A2aLseReduce, QueryGather, KvGather)}

_TIMEOUT_S = 900.0  # of one row; a run that gets there is stuck


class Samples(NamedTuple):
    """One rank's part of one row. Times in microseconds, by candidate; errors are the largest of all ranks."""

    times_us: dict[str, list[float]]
    memcpy_us: list[float]
    errors: dict[str, float]


def from_args(args: argparse.Namespace) -> BenchOp:
    """The op with the options of a command line."""
    op = OPS[args.op]
    options = {field.name: getattr(args, field.name) for field in fields(op) if hasattr(args, field.name)}
    return op(
        **options
        | {
            "baselines": tuple(name for name in args.baselines if name != "none"),
            "isa": None if args.isa == "auto" else args.isa,
            "warmup": max(args.warmup, 1),
        }
    )


def run(op: BenchOp, *, json_path: Path | None = None) -> int:
    """The command: prints header and table, writes the rows. Raises DcpError when a result is wrong."""
    machine.require_writable("--json", json_path)
    isa = check(op)
    host = machine.describe() | baselines.require(op.baselines)
    print(machine.one_line(host, isa))
    against = ", in turns with " + ", ".join(op.baselines) if op.baselines else ""
    print(
        f"{op.NAME}: {op.describe()}, {op.dtype}, {op.iters} samples of {op.burst} call{'s' if op.burst > 1 else ''} "
        f"each{against}; a call's time is that of its slowest rank"
    )
    rows = []
    for num_ranks in op.ranks:
        for size in op.sizes:
            with table.status(f"{num_ranks} ranks, {size} {op.SIZES}"):
                rows.append(measure_row(op, num_ranks, size, isa)[0] | {"machine": host})
    table.show(*_table_of(op, rows))
    if json_path is not None:
        machine.write_json(json_path, rows)
        print(f"wrote {json_path}")
    return 0


def check(op: BenchOp) -> str:
    """What would fail in every rank fails here, as one clean error. Returns the CPU variant that will run."""
    if op.device != "cpu":
        raise DcpUnsupported(f"bench: device must have a built target: cpu (got {op.device!r})")
    unknown = [name for name in op.baselines if name not in op.BASELINES]
    if unknown:
        raise DcpUnsupported(f"bench: baselines must be of {', '.join(op.BASELINES)} (got {', '.join(unknown)})")
    baselines.require(op.baselines)
    for option in ("ranks", op.SIZES):
        if not getattr(op, option):
            raise DcpInvalidArgument(f"bench: {option} must name at least one number (got none)")
    op.require()
    for num_ranks in op.ranks:
        dcpkernels.Workspace.size(op.config(num_ranks, max(op.sizes)), num_ranks)
    return machine.chosen_isa(op.isa)


def measure_row(op: BenchOp, num_ranks: int, size: int, isa: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One row, and behind it the times in microseconds of each call of each candidate, the slowest rank's.

    Raises DcpError when a result, ours or a baseline's, is wrong; then nothing has been timed.
    """
    with openmpi.job(num_ranks) if baselines.uses_openmpi(op.baselines) else nullcontext() as mpi_job:
        per_rank = run_ranks(_rank, num_ranks, op, size, mpi_job, mode="process", timeout_s=_TIMEOUT_S)
    errors = per_rank[0].errors
    for name, error in errors.items():
        if not error <= op.MAX_ERROR:
            raise DcpError(f"bench: {op.wrong(name, error)} at {op.SIZE}={size}, {num_ranks} ranks)")
    times = {name: max_over_ranks([rank.times_us[name] for rank in per_rank]) for name in errors}
    num_bytes = op.num_bytes(num_ranks, size)
    floor_us = floor.of_all_ranks_us([rank.memcpy_us for rank in per_rank]) if num_bytes else 0.0
    ours = summarize(times[OURS])
    row = {
        "op": op.NAME,
        "device": op.device,
        "isa": isa,
        "num_ranks": num_ranks,
        op.SIZE: size,
        **op.fields(),
        "dtype": op.dtype,
        "num_iters": op.iters,
        "calls_per_sample": op.burst,
        "samples_per_turn": op.turn,
        "median_us": round(ours.median_us, 3),
        "p99_us": round(ours.p99_us, 3),
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


def _baseline_entry(op: BenchOp, times_us: list[float], error: float) -> dict[str, float]:
    summary = summarize(times_us)
    return {"median_us": round(summary.median_us, 3), "p99_us": round(summary.p99_us, 3), op.ERROR: error}


def _rank(group: torch.distributed.ProcessGroup, op: BenchOp, size: int, mpi_job: str | None) -> Samples:
    """What every rank process does for one row."""
    rank, num_ranks = group.rank(), group.size()
    measure.use_spare_cpus(num_ranks)
    with (
        dcpkernels.Workspace(group, op.device, op.config(num_ranks, size)) as workspace,
        op.opened(workspace, group, size, mpi_job) as subject,
    ):
        measure.bind_to_own_cpus(rank, num_ranks)
        errors = _largest_of_all_ranks(subject.check(), group)
        if any(error > op.MAX_ERROR for error in errors.values()):
            return Samples({}, [], errors)
        barrier = measure.Barrier(workspace)
        times = measure.take_turns(
            subject.candidates,
            barrier,
            iters=op.iters,
            warmup=op.warmup,
            num_calls=op.burst,
            turn=op.turn,
            produce=subject.produce,
        )
        return Samples(times, floor.memcpy_samples_us(op.num_bytes(num_ranks, size), barrier), errors)


def _largest_of_all_ranks(errors: dict[str, float], group: torch.distributed.ProcessGroup) -> dict[str, float]:
    """Also the agreement whether to go on: no rank may time what another has found wrong."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return dict(zip(errors, values.tolist(), strict=True))


def _table_of(op: BenchOp, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = ["ranks", op.SIZES, "median us", "p99 us", "MiB moved", "floor us", "% of floor", op.ERROR_COLUMN]
    for name in op.baselines:
        columns += [f"{name} median us", f"{name} p99 us", "ratio"]
    lines = []
    for row in rows:
        line = [
            str(row["num_ranks"]),
            f"{row[op.SIZE]:,}",
            f"{row['median_us']:,.1f}",
            f"{row['p99_us']:,.1f}",
            f"{row['bytes'] / 2**20:.3f}",
            f"{row['floor_us']:,.1f}",
            "-" if row["pct_of_floor"] is None else f"{row['pct_of_floor']:.0f}",
            f"{row[op.ERROR]:.4g}",
        ]
        for name in op.baselines:
            entry = row["baselines"][name]
            ratio = entry["median_us"] / row["median_us"]
            line += [f"{entry['median_us']:,.1f}", f"{entry['p99_us']:,.1f}", f"{ratio:.1f}x"]
        lines.append(line)
    return columns, lines
