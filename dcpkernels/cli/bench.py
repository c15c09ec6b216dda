"""`dcpkernels bench`: check, then time, one row per number of tokens. `measure` is also what bench/ calls."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dcpkernels
from dcpkernels.cli import baselines, floor, machine, measure, openmpi, table
from dcpkernels.cli.verify import rank_inputs, verify_hard_inputs, verify_timed_inputs
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import run_ranks
from dcpkernels.testing.timing import max_over_ranks, summarize

OPS = ("a2a_lse_reduce",)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_OURS = "dcpkernels"
_TIMEOUT_S = 900.0  # of one row; a run that gets there is stuck


@dataclass(frozen=True)
class BenchOptions:
    """`lse_base` is what the op is told; the LSEs are natural. Tests tell it a wrong one, to see the check fail."""

    op: str = "a2a_lse_reduce"
    device: str = "cpu"
    num_ranks: int = 2
    tokens: tuple[int, ...] = (1, 8, 64)
    num_heads: int = 96
    head_dim: int = 512
    dtype: str = "bf16"
    baselines: tuple[str, ...] = ("gloo",)
    isa: str | None = None
    iters: int = 200
    warmup: int = 3
    turn: int = 8
    seed: int = 0
    burst: int = 1
    wire: str = "auto"
    packet_bytes: int = 8
    zero_copy: bool = False
    lse_base: str = "e"


class Samples(NamedTuple):
    """One rank's part of one row. Times in microseconds, by candidate; errors are the largest of all ranks."""

    times_us: dict[str, list[float]]
    memcpy_us: list[float]
    max_err_over_bound: dict[str, float]


def run(options: BenchOptions, *, json_path: Path | None = None) -> int:
    """The command: prints header and table, writes the rows. Raises DcpError when a result is outside its bound."""
    machine.require_writable("--json", json_path)
    isa = check(options)
    host = machine.describe() | baselines.require(options.baselines)
    print(machine.one_line(host, isa))
    against = ", in turns with " + ", ".join(options.baselines) if options.baselines else ""
    wire = "zero copy" if options.zero_copy else f"wire {options.wire}"
    print(
        f"{options.op}: {wire}, {options.num_ranks} rank processes, {options.num_heads} heads, head_dim {options.head_dim}, "
        f"{options.dtype}, {options.iters} samples of {options.burst} calls each{against}; a call's time is that of its slowest rank"
    )
    rows = []
    for num_tokens in options.tokens:
        with table.status(f"{num_tokens} tokens"):
            rows.append(measure_row(options, num_tokens, isa)[0] | {"machine": host})
    table.show(*_table_of(rows, options.baselines))
    if json_path is not None:
        machine.write_json(json_path, rows)
        print(f"wrote {json_path}")
    return 0


def check(options: BenchOptions) -> str:
    """What would fail in every rank fails here, as one clean error. Returns the CPU variant that will run."""
    if options.op not in OPS:
        raise DcpUnsupported(f"bench: op must be one of {', '.join(OPS)} (got {options.op!r})")
    if options.device != "cpu":
        raise DcpUnsupported(f"bench: device must have a built target: cpu (got {options.device!r})")
    unknown = [name for name in options.baselines if name not in baselines.BASELINES]
    if unknown:
        raise DcpUnsupported(f"bench: baselines must be of {', '.join(baselines.BASELINES)} (got {', '.join(unknown)})")
    baselines.require(options.baselines)
    if not options.tokens:
        raise DcpInvalidArgument("bench: tokens must name at least one number (got none)")
    dcpkernels.Workspace.size(_config(options, max(options.tokens)), options.num_ranks)
    return machine.chosen_isa(options.isa)


def measure_row(options: BenchOptions, num_tokens: int, isa: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """One row, and behind it the times in microseconds of each call of each candidate, the slowest rank's.

    Raises DcpError when a result, ours or a baseline's, is outside its bound; then nothing has been timed.
    """
    with openmpi.job(options.num_ranks) if baselines.uses_openmpi(options.baselines) else nullcontext() as mpi_job:
        per_rank = run_ranks(
            _rank, options.num_ranks, options, num_tokens, mpi_job, mode="process", timeout_s=_TIMEOUT_S
        )
    errors = per_rank[0].max_err_over_bound
    for name, error in errors.items():
        if not error <= 1:
            raise DcpError(
                f"bench: {name} must be within the error bound before it is timed (got {error:.3g} times the bound at "
                f"num_tokens={num_tokens})"
            )
    times = {name: max_over_ranks([rank.times_us[name] for rank in per_rank]) for name in errors}
    dtype = DTYPES[options.dtype]
    num_bytes = floor.moved_bytes(options.num_ranks, num_tokens, options.num_heads, options.head_dim, dtype.itemsize)
    floor_us = min(max_over_ranks([rank.memcpy_us for rank in per_rank])) if num_bytes else 0.0
    ours = summarize(times[_OURS])
    row = {
        "op": options.op,
        "device": options.device,
        "isa": isa,
        "num_ranks": options.num_ranks,
        "num_tokens": num_tokens,
        "num_heads": options.num_heads,
        "head_dim": options.head_dim,
        "dtype": options.dtype,
        "num_iters": options.iters,
        "calls_per_sample": options.burst,
        "samples_per_turn": options.turn,
        "wire": options.wire,
        "zero_copy": options.zero_copy,
        "median_us": round(ours.median_us, 3),
        "p99_us": round(ours.p99_us, 3),
        "bytes": num_bytes,
        "floor_us": round(floor_us, 3),
        "pct_of_floor": round(100 * floor_us / ours.median_us, 2) if num_bytes else None,
        "max_err_over_bound": errors[_OURS],
        "baselines": {name: _baseline_entry(times[name], errors[name]) for name in options.baselines},
    }
    # Against the fastest baseline that does all of the op; with none there is nothing to compare with.
    medians = [entry["median_us"] for name, entry in row["baselines"].items() if not baselines.is_exchange(name)]
    row["speedup"] = round(min(medians) / ours.median_us, 2) if medians else None
    return row, times


def _baseline_entry(times_us: list[float], error: float) -> dict[str, float]:
    summary = summarize(times_us)
    return {
        "median_us": round(summary.median_us, 3),
        "p99_us": round(summary.p99_us, 3),
        "max_err_over_bound": error,
    }


def _config(options: BenchOptions, num_tokens: int) -> dcpkernels.WorkspaceConfig:
    return dcpkernels.WorkspaceConfig(
        num_heads=options.num_heads,
        head_dim=options.head_dim,
        max_num_tokens=num_tokens,
        dtype=DTYPES[options.dtype],
        num_lanes=measure.NUM_LANES,
        cpu_isa=options.isa,
        wire=options.wire,
        packet_bytes=options.packet_bytes,
        zero_copy=options.zero_copy,
    )


class _Ours:
    """The op on one rank's input, which lies where the configuration wants it."""

    def __init__(self, workspace: dcpkernels.Workspace, attention: torch.Tensor, lse: torch.Tensor,
                 out: torch.Tensor, lse_base: str) -> None:  # fmt: skip
        self._workspace, self._attention, self._lse, self._out, self._lse_base = workspace, attention, lse, out, lse_base
        self._zero_copy = workspace.config.zero_copy
        self._partial_out: torch.Tensor | None = attention
        self._filled = {attention.data_ptr()}  # buffers that hold the values already

    def _next(self) -> torch.Tensor:
        partial_out = self._workspace.partial_out(len(self._attention)) if self._zero_copy else self._attention
        if partial_out.data_ptr() not in self._filled:
            self._filled.add(partial_out.copy_(self._attention).data_ptr())
        return partial_out

    def produce(self) -> None:
        self._partial_out = self._next().add_(0)

    def __call__(self) -> None:
        # In a burst only the first call's tensor is written anew.
        partial_out = self._next() if self._partial_out is None else self._partial_out
        self._partial_out = None
        dcpkernels.a2a_lse_reduce(
            partial_out, self._lse, workspace=self._workspace, lse_base=self._lse_base, out=self._out
        )


def _rank(
    group: torch.distributed.ProcessGroup, options: BenchOptions, num_tokens: int, mpi_job: str | None
) -> Samples:
    """What every rank process does for one row."""
    rank, num_ranks = group.rank(), group.size()
    measure.use_spare_cpus(num_ranks)
    dtype = DTYPES[options.dtype]
    shape = (num_tokens, options.num_heads, options.head_dim)
    partial_out, partial_lse = rank_inputs(rank, *shape, dtype, seed=options.seed)
    outs = {
        name: torch.empty(num_tokens, options.num_heads // num_ranks, options.head_dim, dtype=dtype)
        for name in (_OURS, *options.baselines)
    }
    with (
        dcpkernels.Workspace(group, options.device, _config(options, num_tokens)) as workspace,
        baselines.opened(options.baselines, group, *shape, dtype, mpi_job=mpi_job) as others,
    ):
        measure.bind_to_own_cpus(rank, num_ranks)
        ours = _Ours(workspace, partial_out, partial_lse, outs[_OURS], options.lse_base)
        candidates = {_OURS: ours}
        ours.produce()
        ours()
        inputs = {}
        for name, other in others.items():
            other(partial_out, partial_lse, outs[name])  # for the check: also of one of which less is timed
            if baselines.is_exchange(name):
                candidates[name], inputs[name] = other.exchange, other.packed
            else:
                candidates[name], inputs[name] = partial(other, partial_out, partial_lse, outs[name]), partial_out
        errors = verify_timed_inputs(outs, rank, num_ranks, *shape, dtype, seed=options.seed)
        hard = verify_hard_inputs(workspace, num_tokens, lse_base=options.lse_base, seed=options.seed)
        errors[_OURS] = max(errors[_OURS], hard)
        errors = _largest_of_all_ranks(errors, group)
        if any(error > 1 for error in errors.values()):
            return Samples({}, [], errors)
        barrier = measure.Barrier(workspace)
        times = measure.take_turns(
            candidates,
            barrier,
            iters=options.iters,
            warmup=options.warmup,
            num_calls=options.burst,
            turn=options.turn,
            produce=lambda name: ours.produce() if name == _OURS else inputs[name].add_(0),
        )
        num_bytes = floor.moved_bytes(num_ranks, *shape, dtype.itemsize)
        return Samples(times, floor.memcpy_samples_us(num_bytes, barrier), errors)


def _largest_of_all_ranks(errors: dict[str, float], group: torch.distributed.ProcessGroup) -> dict[str, float]:
    """Also the agreement whether to go on: no rank may time what another has found wrong."""
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return dict(zip(errors, values.tolist(), strict=True))


def _table_of(rows: list[dict[str, Any]], baselines: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    columns = ["tokens", "median us", "p99 us", "MiB moved", "floor us", "% of floor", "err / bound"]
    for name in baselines:
        columns += [f"{name} median us", f"{name} p99 us", "ratio"]
    lines = []
    for row in rows:
        line = [
            str(row["num_tokens"]),
            f"{row['median_us']:,.1f}",
            f"{row['p99_us']:,.1f}",
            f"{row['bytes'] / 2**20:.3f}",
            f"{row['floor_us']:,.1f}",
            "-" if row["pct_of_floor"] is None else f"{row['pct_of_floor']:.0f}",
            f"{row['max_err_over_bound']:.3f}",
        ]
        for name in baselines:
            entry = row["baselines"][name]
            ratio = entry["median_us"] / row["median_us"]
            line += [f"{entry['median_us']:,.1f}", f"{entry['p99_us']:,.1f}", f"{ratio:.1f}x"]
        lines.append(line)
    return columns, lines
