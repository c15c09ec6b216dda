"""The command line: `dcpkernels demo`, `bench OP`, `plan` and `doctor`. Only this package and bench/ print.

Exit codes: 0 all well, 1 a check failed or a rank did, or the result could not be written, 2 the request cannot be served
(as argparse does), 130 Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dcpkernels import __version__
from dcpkernels.cli import bench_parser, doctor, plan_parser
from dcpkernels.cli.parsing import count, ratio, seed
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported

DEFAULT_PNG = "dcpkernels-demo.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `--help`, `--version` and bad options end by SystemExit."""
    try:
        with _ended_as_by_ctrl_c():
            _print_any_name()
            args = parser().parse_args(argv)
            exit_code = args.run(args)
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()  # here, where a reader that has gone is found, or a disk that is full
            return exit_code
    except (DcpInvalidArgument, DcpUnsupported) as error:
        return _complain(error, 2)
    except DcpError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # of `| head`; there is nobody to tell
        _drop_stdout()
        return 1
    except OSError as error:
        if error.errno not in (*_NO_ROOM, *_NO_DESCRIPTORS):
            raise
        _drop_stdout()
        what = "the result must be written" if error.errno in _NO_ROOM else "there must be descriptors left (ulimit -n)"
        return _complain(f"{what} (got {error.strerror})", 1)


def _print_any_name() -> None:
    """Names of files are bytes, and terminals may know few letters: what cannot be printed is escaped, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


# Of stdout in a file: those of other files are output.writing's.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def _drop_stdout() -> None:
    """Python would try again at exit."""
    with suppress(OSError):  # there may be no descriptor left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """By SIGTERM and SIGHUP too: a command that these just end would leave folders behind. Where somebody handles or
    ignores them already, as nohup does, that stays."""
    signals = [signum for signum in _ENDING if signal.getsignal(signum) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        signals = []
    for signum in signals:
        signal.signal(signum, signal.default_int_handler)
    try:
        yield
    finally:
        for signum in signals:
            signal.signal(signum, signal.SIG_DFL)


_ENDING = (signal.SIGTERM, signal.SIGHUP)


def _complain(what: object, exit_code: int) -> int:
    print(f"dcpkernels: error: {what}", file=sys.stderr)
    return exit_code


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcpkernels",
        description="Fused collectives for decode context parallelism: tried and timed on this machine, and what a "
        "KV cache holds with it.",
    )
    parser.add_argument("--version", action="version", version=f"dcpkernels {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    bench_parser.add(commands, _run_bench, _compare)
    plan_parser.add(commands, _run_plan)
    doctor.add(commands, _run_doctor)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="Kimi-K3's MLA layer on rank processes, its KV cache on every rank or sharded",
        description="One MLA layer of Kimi-K3 in full size (7168 wide, 96 heads, 232M random parameters, bf16) takes a decode "
        "step on rank processes: with all of the KV cache on every rank (tensor parallelism alone), and with a shard on "
        "each (decode context parallelism: query_gather, attention, a2a_lse_reduce). The two must agree, and with "
        "unsharded attention in fp32; both are timed in turns. Exit code 1 when a check fails.",
    )
    demo.add_argument("--ranks", type=count, default=8, help="rank processes; 96 must be divisible by it (default 8)")
    demo.add_argument("--context", type=count, help="tokens of the longest sequence (default 120000)")
    demo.add_argument("--batch", type=count, default=8, help="requests, from the longest sequence down to one that "
                      "is shorter than the number of ranks (default 8)")  # fmt: skip
    demo.add_argument("--interleave", type=count, default=1, help="consecutive tokens that a rank holds (default 1)")
    demo.add_argument("--seed", type=seed, default=0, help="of parameters and inputs (default 0)")
    demo.add_argument("--iters", type=count, help="timed steps (default 9)")
    demo.add_argument("--quick", action="store_true", help="a context of 4096 and 3 steps, for tests")
    demo.add_argument("--device", default="cpu", help="cpu (default), or cuda: a GPU for each rank, which nobody has "
                      "run yet")  # fmt: skip
    demo.add_argument("--min-ratio", type=ratio, default=0.0, metavar="X", help="fail when the attention section is not X "
                      "times as fast with the cache sharded (default: any)")  # fmt: skip
    demo.add_argument("--json", type=Path, metavar="FILE", nargs="?", const=Path("-"),
                      help="write the result there; without FILE to stdout, in place of the table")  # fmt: skip
    demo.add_argument("--png", type=Path, metavar="FILE", help=f"the chart (default {DEFAULT_PNG}; needs matplotlib)")
    demo.add_argument("--no-png", action="store_true", help="no chart")
    demo.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    from dcpkernels.cli.demo import DemoOptions, run

    options = DemoOptions(
        num_ranks=args.ranks,
        context=args.context or (4096 if args.quick else 120_000),
        batch=args.batch,
        interleave=args.interleave,
        seed=args.seed,
        iters=args.iters or (3 if args.quick else 9),
        device=args.device,
        min_ratio=args.min_ratio,
    )
    png = None if args.no_png else args.png or Path(DEFAULT_PNG)
    return _with_ranks(lambda: run(options, json_path=args.json, png_path=png, png_required=args.png is not None))


def _run_bench(args: argparse.Namespace) -> int:
    from dcpkernels.cli.bench import from_args, run
    from dcpkernels.cli.bench_report import Outputs

    outputs = Outputs(json=args.json, plot=args.plot, markdown=args.markdown)
    return _with_ranks(lambda: run(from_args(args), outputs))


def _compare(args: argparse.Namespace) -> int:
    from dcpkernels.cli.bench_compare import run
    from dcpkernels.cli.bench_report import Outputs

    outputs = Outputs(json=args.compare_json, markdown=args.compare_markdown)
    return run(*args.compare, outputs, fail_above=args.fail_above)


def _run_plan(args: argparse.Namespace) -> int:
    from dcpkernels.cli.plan import run

    return run(args)


def _run_doctor(args: argparse.Namespace) -> int:
    from dcpkernels.cli.doctor.run import run

    return run(json_path=args.json, with_collective=args.collective, num_ranks=args.ranks)


def _with_ranks(command: Callable[[], int]) -> int:
    from dcpkernels.testing import RankFailure  # imports torch, which --help can do without

    try:
        return command()
    except RankFailure as failure:
        return _complain(failure, 1)
