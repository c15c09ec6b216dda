"""`dcpkernels demo`: rank processes share one long context, attend to it in shards, and merge."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dcpkernels
from dcpkernels.cli import context, machine, table
from dcpkernels.cli.demo_check import Verdict, check
from dcpkernels.cli.demo_rank import GLOO, OURS, WARMUP, Progress, RankResult, RankTask, run_rank, workspace_config
from dcpkernels.errors import DcpUnsupported
from dcpkernels.testing import run_ranks
from dcpkernels.testing.timing import max_over_ranks, summarize

_TIMEOUT_S = 1800.0  # of the ranks, whatever the context; a run that gets there is stuck
_POLL_S = 0.1


@dataclass(frozen=True)
class DemoOptions:
    """`lse_base` is what the op is told; the LSEs are natural. Tests tell it a wrong one, to see the check fail."""

    num_ranks: int = 8
    context: int = 120_000
    batch: int = 8
    interleave: int = 1
    seed: int = 0
    iters: int = 40
    lse_base: str = "e"


class Outcome(NamedTuple):
    """`report` is what --json writes. `times_us` are the slowest rank's, call by call, by candidate."""

    report: dict[str, Any]
    times_us: dict[str, list[float]]


def run(options: DemoOptions, *, json_path: Path | None, png_path: Path | None, png_required: bool = False) -> int:
    """The command. Returns 1 when a check failed; the result is shown and written all the same."""
    machine.require_writable("--json", json_path)
    machine.require_writable("--png", png_path)
    if png_path is not None and importlib.util.find_spec("matplotlib") is None:
        if png_required:
            raise DcpUnsupported("--png: matplotlib must be installed, by `pip install 'dcpkernels[cli]'` (not found)")
        print("no chart: matplotlib is not installed (pip install 'dcpkernels[cli]')")
        png_path = None
    outcome = perform(options)
    report = outcome.report
    print(machine.one_line(report["machine"], report["isa"]))
    table.show(*_table_of(report))
    if png_path is not None:
        from dcpkernels.cli.plot import draw

        draw(report, outcome.times_us, png_path)
    if json_path is not None:
        machine.write_json(json_path, report)
    written = ", ".join(str(path) for path in (png_path, json_path) if path is not None)
    if written:
        print(f"wrote {written}")
    print(_summary(report))
    return 0 if report["passed"] else 1


def perform(options: DemoOptions) -> Outcome:
    """Runs and checks it. Raises DcpInvalidArgument for ranks that do not divide the heads, RankFailure."""
    dcpkernels.Workspace.size(workspace_config(options.batch), options.num_ranks)  # a bad number of ranks ends here
    lengths = context.sequence_lengths(options.context, options.batch, options.num_ranks)
    start = time.monotonic()
    ranks = _run_ranks(options, lengths)
    with table.Bar("attention over the unsharded cache, rows", len(lengths)) as bar:
        verdict = check(ranks, lengths, options.seed, bar.update)
    times = {name: max_over_ranks([rank.times_us[name] for rank in ranks]) for name in (OURS, GLOO)}
    return Outcome(_report(options, lengths, ranks, verdict, times, time.monotonic() - start), times)


def _run_ranks(options: DemoOptions, lengths: list[int]) -> list[RankResult]:
    with tempfile.TemporaryDirectory(prefix="dcpkernels-demo-") as folder:
        path = str(Path(folder, "progress"))
        Progress.create(path, options.num_ranks)
        task = RankTask(lengths, options.interleave, options.seed, options.iters, options.lse_base, path)
        num_calls = len((OURS, GLOO)) * (options.iters + WARMUP)
        with _shown_progress(Progress(path), sum(lengths), num_calls):
            return run_ranks(run_rank, options.num_ranks, task, mode="process", timeout_s=_TIMEOUT_S)


@contextmanager
def _shown_progress(progress: Progress, num_tokens: int, num_calls: int) -> Iterator[None]:
    """Bars of what the ranks do while the block waits for them."""
    over = threading.Event()

    def show() -> None:
        for text, total, which in (
            ("local attention of all ranks, tokens", num_tokens, 0),
            ("merges, ours and gloo in turns, calls", num_calls, 1),
        ):
            with table.Bar(text, total) as bar:
                done, ended = 0, False
                while done < total and not ended:
                    ended = over.wait(_POLL_S)  # first, so that what is read after the end is all there is
                    bar.update(done := progress.read()[which])

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _report(
    options: DemoOptions,
    lengths: list[int],
    ranks: list[RankResult],
    verdict: Verdict,
    times: dict[str, list[float]],
    wall_s: float,
) -> dict[str, Any]:
    ours, gloo = summarize(times[OURS]), summarize(times[GLOO])
    per_rank = [
        {
            "rank": rank,
            "local_tokens": sum(result.local_lengths),
            "kv_bytes": sum(result.local_lengths) * context.KV_ROW_BYTES,
            "empty_rows": result.local_lengths.count(0),
            "max_abs_error": verdict.max_abs_error[rank],
            "error_over_tolerance": verdict.error_over_tolerance[rank],
            "merge_err_over_bound": verdict.merge_err_over_bound[rank],
            "merge_median_us": summarize(result.times_us[OURS]).median_us,
            "gloo_median_us": summarize(result.times_us[GLOO]).median_us,
        }
        for rank, result in enumerate(ranks)
    ]
    return {
        "passed": verdict.passed,
        "options": asdict(options),
        "op": "a2a_lse_reduce",
        "device": "cpu",
        "isa": ranks[0].isa,
        "machine": machine.describe(),
        "sequence_lengths": lengths,
        "kv_bytes_unsharded": sum(lengths) * context.KV_ROW_BYTES,
        "workspace_bytes": ranks[0].workspace_bytes,
        "wall_s": round(wall_s, 2),
        "merge": {
            "median_us": ours.median_us,
            "p99_us": ours.p99_us,
            "baselines": {"gloo": {"median_us": gloo.median_us, "p99_us": gloo.p99_us}},
            "speedup": gloo.median_us / ours.median_us,
        },
        "max_abs_error": max(verdict.max_abs_error),
        "error_over_tolerance": max(verdict.error_over_tolerance),
        "merge_err_over_bound": max(verdict.merge_err_over_bound),
        "row_error_over_tolerance": verdict.row_error_over_tolerance,
        "gloo_error_over_tolerance": verdict.gloo_error_over_tolerance,
        "ranks": per_rank,
    }


def _table_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = [
        "rank",
        "local tokens",
        "KV MiB",
        "empty rows",
        "max error",
        "error / tolerance",
        "merge us",
        "gloo us",
        "ratio",
    ]

    def line(
        name: str, tokens: int, kv_bytes: int, empty: str, errors: dict[str, float], ours: float, gloo: float
    ) -> list[str]:
        return [
            name,
            f"{tokens:,}",
            f"{kv_bytes / 2**20:,.1f}",
            empty,
            f"{errors['max_abs_error']:.1e}",
            f"{errors['error_over_tolerance']:.2f}",
            f"{ours:,.0f}",
            f"{gloo:,.0f}",
            f"{gloo / ours:.1f}x",
        ]

    rows = [
        line(
            str(r["rank"]),
            r["local_tokens"],
            r["kv_bytes"],
            str(r["empty_rows"]),
            r,
            r["merge_median_us"],
            r["gloo_median_us"],
        )
        for r in report["ranks"]
    ]
    # The last line is of the whole: a merge is over when its slowest rank is.
    merge = report["merge"]
    rows.append(
        line("all", sum(report["sequence_lengths"]), report["kv_bytes_unsharded"], "", report, merge["median_us"],
             merge["baselines"]["gloo"]["median_us"])
    )  # fmt: skip
    return columns, rows


def _summary(report: dict[str, Any]) -> str:
    options, merge = report["options"], report["merge"]
    verdict = "PASS" if report["passed"] else "FAIL"
    return (
        f"{verdict}: {options['num_ranks']} ranks merged {options['batch']} decode rows over contexts up to "
        f"{options['context']:,} tokens; largest error {report['error_over_tolerance']:.2f} of the tolerance against "
        f"unsharded fp32 attention; merge {merge['median_us']:,.0f} us, gloo "
        f"{merge['baselines']['gloo']['median_us']:,.0f} us ({merge['speedup']:.1f}x), on cpu ({report['isa']})"
    )
