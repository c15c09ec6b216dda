"""`dcpkernels demo`: Kimi-K3's MLA layer in full size on rank processes, its KV cache on every rank or sharded."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dcpkernels
from dcpkernels.cli import context, machine, output, table
from dcpkernels.cli.demo_rank import DCP, DTYPE, NUM_TIMED, TP, WARMUP, RankResult, RankTask, run_rank
from dcpkernels.cli.progress import Progress
from dcpkernels.errors import DcpInvalidArgument, DcpUnsupported
from dcpkernels.kimi_k3.config import KimiK3Config
from dcpkernels.kimi_k3.mla import workspace_config
from dcpkernels.kimi_k3.parallel import TensorParallel
from dcpkernels.testing import run_ranks
from dcpkernels.testing.timing import max_over_ranks, summarize

COLLECTIVES = ("query_gather", "a2a_lse_reduce")
_MAX_BATCH = 65_536
_TIMEOUT_S = 1800.0  # of the ranks, whatever the context; a run that gets there is stuck


@dataclass(frozen=True)
class DemoOptions:
    """`lse_base` is that of the LSEs which attention returns, while the layer takes them for natural. Tests set a wrong
    one, to see the check fail."""

    num_ranks: int = 8
    context: int = 120_000
    batch: int = 8
    interleave: int = 1
    seed: int = 0
    iters: int = 9
    device: str = "cpu"
    min_ratio: float = 0.0
    lse_base: str = "e"
    config: KimiK3Config = KimiK3Config()


class Outcome(NamedTuple):
    """`report` is what --json writes. `times_us` are the slowest rank's, call by call, by what was timed."""

    report: dict[str, Any]
    times_us: dict[str, list[float]]


def run(options: DemoOptions, *, json_path: Path | None, png_path: Path | None, png_required: bool = False) -> int:
    """The command. Returns 1 when a check failed; the result is shown and written all the same. json_path "-": the JSON
    goes to stdout and nothing else does."""
    to_stdout = json_path == output.STDOUT
    output.require_writable("--json", None if to_stdout else json_path)
    output.require_writable("--png", png_path)
    if png_path is not None and not output.has_matplotlib():
        if png_required:
            output.require_matplotlib("--png")
        print("no chart: matplotlib is not installed (pip install 'dcpkernels[cli]')", file=sys.stderr)
        png_path = None
    outcome = perform(options)
    report = outcome.report
    # First what was found: a file may fail yet, on a disk that is full.
    if to_stdout:
        print(output.to_json(report))
    else:
        print(machine.one_line(report["machine"], report["isa"]))
        table.show(*_table_of(report))
        print(_summary(report))
    if png_path is not None:
        from dcpkernels.cli.plot import draw

        draw(report, outcome.times_us, png_path)
    if json_path is not None and not to_stdout:
        output.write_json(json_path, report)
    written = ", ".join(str(path) for path in (png_path, json_path) if path not in (None, output.STDOUT))
    if written and not to_stdout:
        print(f"wrote {written}")
    return 0 if report["passed"] else 1


def perform(options: DemoOptions) -> Outcome:
    """Runs and checks it. Raises DcpInvalidArgument for ranks that do not divide the heads, DcpUnsupported for a device
    that is not there, RankFailure."""
    num_ranks = options.num_ranks
    if options.batch > _MAX_BATCH:
        raise DcpInvalidArgument(f"--batch: must be at most {_MAX_BATCH:,} (got {options.batch:,})")
    tp = TensorParallel(0, num_ranks)
    config = workspace_config(options.config, tp, num_ranks, max_num_tokens=options.batch, dtype=DTYPE)
    dcpkernels.Workspace.size(config, num_ranks)  # a bad number of ranks ends here
    _require_device(options)
    lengths = context.sequence_lengths(options.context, options.batch, num_ranks)
    start = time.monotonic()
    num_rows = (sum(lengths) - len(lengths)) * (num_ranks + 1)
    machine.require_memory(
        "demo: caches", num_rows * (options.config.kv_lora_rank + options.config.qk_rope_head_dim) * DTYPE.itemsize
    )
    with Progress.shown(num_ranks, num_rows, NUM_TIMED * (options.iters + WARMUP)) as path:
        task = RankTask(
            options.config,
            lengths,
            options.interleave,
            options.seed,
            options.iters,
            options.lse_base,
            options.device,
            path,
        )
        ranks = run_ranks(run_rank, num_ranks, task, mode="process", timeout_s=_TIMEOUT_S)
    times = {name: max_over_ranks([rank.times_us[name] for rank in ranks]) for name in ranks[0].times_us}
    return Outcome(_report(options, lengths, ranks, times, time.monotonic() - start), times)


def _require_device(options: DemoOptions) -> None:
    if options.device not in ("cpu", "cuda"):  # each rank takes a GPU of its own
        raise DcpInvalidArgument(f"--device: must be cpu or cuda (got {options.device!r})")
    if options.device == "cuda" and (found := torch.cuda.device_count()) < options.num_ranks:
        raise DcpUnsupported(
            f"--device cuda: there must be a GPU for each of the {options.num_ranks} ranks (found {found})"
        )


def _report(
    options: DemoOptions, lengths: list[int], ranks: list[RankResult], times: dict[str, list[float]], wall_s: float
) -> dict[str, Any]:
    arms = {TP: f"tp{options.num_ranks}", DCP: f"dcp{options.num_ranks}"}
    median = {name: summarize(samples).median_us for name, samples in times.items()}
    ratio, step_ratio = (median[f"{TP}_{what}"] / median[f"{DCP}_{what}"] for what in ("attention", "step"))

    def of_arms(what: str) -> dict[str, float]:
        return {arm: median[f"{name}_{what}"] for name, arm in arms.items()}

    errors = [rank.errors for rank in ranks]
    is_right = all(error.passed for error in errors)
    # Both ways on the same number of threads, or the ratio means nothing.
    threads = {number for rank in ranks for number in rank.num_threads.values()}
    return {
        "passed": is_right and len(threads) == 1 and ratio >= options.min_ratio,
        "is_right": is_right,
        "options": asdict(options),
        "device": options.device,
        "isa": ranks[0].isa,
        "machine": machine.describe(),
        "num_parameters": sum(options.config.mla_parameters().values()),
        "sequence_lengths": lengths,
        "kv_bytes_per_rank": {arm: max(rank.kv_bytes[name] for rank in ranks) for name, arm in arms.items()},
        "workspace_bytes": ranks[0].workspace_bytes,
        "threads_per_rank": {arm: max(rank.num_threads[name] for rank in ranks) for name, arm in arms.items()},
        "step_us": of_arms("step"),
        "step_ratio": step_ratio,
        "attention_us": of_arms("attention"),
        "ratio": ratio,
        "collectives": {
            # All ranks enter it together: what it takes by itself. In a step ranks also wait for each other's
            # attention.
            op: {
                "us": median[op],
                "p99_us": summarize(times[op]).p99_us,
                "share_of_step": median[op] / median[f"{DCP}_step"],
            }
            for op in COLLECTIVES
        },
        # Between the outputs of the two arms, and of each arm's attention against unsharded attention in fp32.
        "max_err_over_bound": max(max(error.output) for error in errors),
        "row_err_over_bound": [max(column) for column in zip(*(error.output for error in errors), strict=True)],
        "max_abs_error": max(error.max_abs for error in errors),
        "attention_error_over_tolerance": {
            arm: max(max(error.attention[name]) for error in errors) for name, arm in arms.items()
        },
        "empty_rows": [rank.empty_rows for rank in ranks],
        "wall_s": round(wall_s, 2),
    }


def _table_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = [
        "",
        "KV MiB a rank",
        "attention section us",
        "step us",
        "query_gather us",
        "a2a_lse_reduce us",
        "error / tolerance",
    ]
    rows = []
    for arm in report["step_us"]:
        sharded = arm.startswith(DCP)
        collectives = [f"{report['collectives'][op]['us']:,.0f}" if sharded else "" for op in COLLECTIVES]
        rows.append(
            [
                arm,
                f"{report['kv_bytes_per_rank'][arm] / 2**20:,.1f}",
                f"{report['attention_us'][arm]:,.0f}",
                f"{report['step_us'][arm]:,.0f}",
                *collectives,
                f"{report['attention_error_over_tolerance'][arm]:.2f}",
            ]
        )
    kv = list(report["kv_bytes_per_rank"].values())
    shares = [f"{100 * report['collectives'][op]['share_of_step']:.1f} % of step" for op in COLLECTIVES]
    rows.append(
        ["ratio", f"{kv[0] / kv[1]:.2f}x", f"{report['ratio']:.2f}x", f"{report['step_ratio']:.2f}x", *shares, ""]
    )
    return columns, rows


def _summary(report: dict[str, Any]) -> str:
    options = report["options"]
    verdict = "PASS" if report["passed"] else "FAIL"
    tp, dcp = report["step_us"]
    least = f" (asked: {options['min_ratio']:g}x)" if options["min_ratio"] else ""
    threads = report["threads_per_rank"][dcp]
    return (
        f"{verdict}: one MLA layer of Kimi-K3 ({report['num_parameters'] / 1e6:,.0f}M parameters, bf16) on "
        f"{options['num_ranks']} ranks, {options['batch']} requests of up to {options['context']:,} tokens: "
        f"the outputs of {tp} and {dcp} differ by at most {report['max_err_over_bound']:.2f} of the bound; "
        f"speed of {dcp} against {tp}: "
        f"attention section {report['ratio']:.2f}x{least}, step {report['step_ratio']:.2f}x (same attention function, "
        f"{threads} thread{'s' if threads > 1 else ''} a rank), on {report['device']} ({report['isa']})"
    )
