"""Layouts x dtypes x ranks x rows x ways of travelling: the truth within its bound, the bits of a plain call, and no byte
changed that the call was not given to write.

Not the full product: every value of every axis, and every pair that test_the_plan_has_every_pair names. A session is a
workspace of one way, one number of ranks, one dtype and one capacity; in it the calls of ROWS follow each other, so
each one meets the staging and the flags that the others left behind.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import pytest
import torch

from dcpkernels import Workspace, a2a_lse_reduce
from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.testing import merge_inputs, run_ranks, unchanged
from dcpkernels.testing.inputs import KINDS
from tests.a2a_calls import Call, assemble, bits, config_for, make_call, merge, run_calls, same_bits
from tests.a2a_ways import LSES, LSES_OUT, OUTS, PAYLOADS, WAYS, guarded_output, lay_in, lay_out, num_elements

# Number of ranks -> the rows of the calls in a session: large ones with few ranks, for the sake of the truth in fp64.
ROWS = {
    1: (8192, 0, 127, 1409),
    2: (1409, 8192, 1, 128, 1408),
    3: (1408, 129, 7),
    4: (2, 0, 128),
    6: (127, 1, 7),
    8: (129, 0, 2),
    12: (7, 2, 127),
    16: (1, 129, 128),
}
CAPACITIES = (128, 1408)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Heads of a rank, head_dim.
SHAPES = [(12, 64), (3, 17), (1, 576), (11, 72), (2, 8), (1, 40), (2, 33), (3, 128), (1, 8)]
MAX_ELEMENTS = 600_000  # of a call, all ranks together; (1, 8) may exceed it


@dataclass(frozen=True)
class Session:
    way: str
    num_ranks: int
    dtype: torch.dtype
    capacity: int
    num_local_heads: int
    head_dim: int
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Case:
    num_tokens: int
    payloads: tuple[str, ...]  # the layout on each rank
    serial: int  # what has no pairs to make takes its turn by this

    def pick(self, values, every: int = 1):
        values = list(values)
        return values[self.serial // every % len(values)]


def session(way: str, num_ranks: int, capacity: int) -> Session:
    i, j, k = list(WAYS).index(way), list(ROWS).index(num_ranks), CAPACITIES.index(capacity)
    largest = max(ROWS[num_ranks])
    fitting = [s for s in SHAPES if num_ranks**2 * largest * s[0] * s[1] <= MAX_ELEMENTS] or SHAPES[-1:]
    first = sum(len(rows) for rows in list(ROWS.values())[:j])
    cases = []
    for n, num_tokens in enumerate(ROWS[num_ranks], first):
        # In every other call each rank has a layout of its own: what one rank's strides say must not be used for another.
        turn = i + n + 7 * k
        names = [list(PAYLOADS)[(turn + turn % 2 * rank) % len(PAYLOADS)] for rank in range(num_ranks)]
        cases.append(Case(num_tokens, tuple(names), serial=100 + 100 * k + 3 * i + n))
    heads, head_dim = fitting[(i + j + k) % len(fitting)]
    return Session(way, num_ranks, DTYPES[(i + j + k) % 3], capacity, heads, head_dim, tuple(cases))


def test_the_plan_has_every_pair():
    sessions = [session(*axes) for axes in itertools.product(WAYS, ROWS, CAPACITIES)]
    calls = [(s, c, layout) for s in sessions for c in s.cases for layout in c.payloads]
    axes = {
        "way": (WAYS, lambda s, c, layout: s.way),
        "ranks": (ROWS, lambda s, c, layout: s.num_ranks),
        "dtype": (DTYPES, lambda s, c, layout: s.dtype),
        "capacity": (CAPACITIES, lambda s, c, layout: s.capacity),
        "rows": ([0, 1, 2, 7, 127, 128, 129, 1408, 1409, 8192], lambda s, c, layout: c.num_tokens),
        "layout": (PAYLOADS, lambda s, c, layout: layout),
        "lse dtype": (DTYPES, lambda s, c, layout: c.pick(DTYPES)),
        "lse layout": (LSES, lambda s, c, layout: c.pick(LSES)),
    }
    pairs = ["layout rows", "layout ranks", "dtype ranks", "capacity rows", "way rows", "way layout", "way ranks"]
    pairs += ["way dtype", "way capacity", "layout dtype", "rows dtype", "layout capacity"]
    pairs += ["lse layout-way", "lse layout-lse dtype", "lse layout-rows"]
    for pair in pairs:
        a, b = pair.split("-") if "-" in pair else pair.split()
        (values_a, of_a), (values_b, of_b) = axes[a], axes[b]
        missing = set(itertools.product(values_a, values_b)) - {(of_a(*call), of_b(*call)) for call in calls}
        assert not missing, (pair, missing)
    # In a workspace that hands out tensors every layout is also laid in one of them, not only passed to be copied.
    handed_out = {(s.way, layout) for s, c, layout in calls if WAYS[s.way].hands_out and rows_to_ask_for(s, c, layout)}
    assert handed_out == {(way, layout) for way in WAYS if WAYS[way].hands_out for layout in PAYLOADS}


def rows_to_ask_for(s: Session, case: Case, layout: str) -> int:
    """Of Workspace.partial_out, for this layout to have room in it; 0: more than it hands out."""
    num_heads = s.num_local_heads * s.num_ranks
    span = num_elements(PAYLOADS[layout], (case.num_tokens, num_heads, s.head_dim))
    rows = max(1, -(-span // (num_heads * s.head_dim)))
    return rows if rows <= s.capacity else 0


def lengths_of(case: Case, num_ranks: int):
    """seq_lens [W, 3] and query_start_loc for every third call: a sequence that is empty on every other rank, and rows of
    padding at the end. Else none."""
    if case.serial % 3:
        return None, None
    n = case.num_tokens
    seq_lens = torch.tensor([[5, rank % 2, 9] for rank in range(num_ranks)], dtype=torch.int32)
    return seq_lens, torch.tensor([0, n // 3, n // 2, n - n // 4], dtype=torch.int32)


def arguments_of(s: Session, case: Case, rank: int, call: Call) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """What the rank passes: values of its payload, LSEs as they are laid out, the rest. Empty rows are NaN."""
    arguments = call.arguments(rank)
    lse = lay_out(LSES[case.pick(LSES)], arguments.pop("partial_lse"))
    values = arguments.pop("partial_out").nan_to_num(nan=0.5)
    if not PAYLOADS[case.payloads[rank]].repeats:
        empty = ~lse.isfinite()
        if call.seq_lens is not None:
            lengths = call.seq_lens[rank].repeat_interleave(call.query_start_loc.diff().long())
            empty[: len(lengths)] |= lengths[:, None] <= 0
            empty[len(lengths) :] = True
        values = torch.where(empty[..., None], torch.nan, values)
    return values, lse, arguments


def lay_payload(s: Session, case: Case, workspace: Workspace, values: torch.Tensor) -> torch.Tensor:
    name = case.payloads[workspace.rank]
    rows = rows_to_ask_for(s, case, name) if WAYS[s.way].hands_out else 0
    if rows:
        return lay_in(workspace.partial_out(rows).view(-1), PAYLOADS[name], values)
    if WAYS[s.way].hands_out and case.num_tokens > s.capacity:
        with pytest.raises(DcpInvalidArgument, match="num_tokens must be in"):
            workspace.partial_out(case.num_tokens)
    return lay_out(PAYLOADS[name], values)


def make(s: Session, case: Case, workspace: Workspace, plain: Workspace, call: Call):
    """The call, twice into the same guarded outputs. Returns what went in and came out on this rank."""
    values, lse, arguments = arguments_of(s, case, workspace.rank, call)
    out_shape = (case.num_tokens, s.num_local_heads, s.head_dim)
    out = guarded_output(case.pick(OUTS), out_shape, s.dtype)
    lse_out = guarded_output(case.pick(LSES_OUT), out_shape[:2], torch.float32)
    expected = None
    for leftover in (None, 3.0):
        payload = lay_payload(s, case, workspace, values)
        if expected is None:
            truth = payload.clone(memory_format=torch.contiguous_format), lse.contiguous()
            expected = a2a_lse_reduce(*truth, workspace=plain, return_lse=True, **arguments)
        else:
            out.tensor.fill_(leftover), lse_out.tensor.fill_(leftover)
        # Of the workspace's own memory only what was handed out is ours to watch.
        ours = not WAYS[s.way].hands_out or not rows_to_ask_for(s, case, case.payloads[workspace.rank])
        watched = [lse, payload] if ours else [lse]
        before = bits(payload)
        with unchanged(*watched):
            returned = a2a_lse_reduce(
                payload, lse, workspace=workspace, out=out.tensor, lse_out=lse_out.tensor, **arguments
            )
        assert torch.equal(bits(payload), before), "the partial output was written to"
        assert returned[0] is out.tensor and returned[1] is lse_out.tensor
        out.check(), lse_out.check()
        for name, got, wanted in zip(("out", "lse"), returned, expected, strict=True):
            assert same_bits(got, wanted), (name, case, s)
    return *truth, *expected


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("num_ranks", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_matrix(way, num_ranks, capacity):
    s = session(way, num_ranks, capacity)
    num_heads = s.num_local_heads * num_ranks
    calls = []
    for case in s.cases:
        kind, shape = case.pick(KINDS), (num_ranks, case.num_tokens, num_heads, s.head_dim)
        outs, lses = merge_inputs(*shape, s.dtype, kind=kind, seed=case.serial)
        lengths = lengths_of(case, num_ranks)
        calls.append(Call(outs, lses.to(case.pick(DTYPES)), case.pick("e2", every=2), *lengths))

    def body(group):
        config = WAYS[way].config(calls[0], max_num_tokens=s.capacity)
        plain = config_for(calls[0], max_num_tokens=max(ROWS[num_ranks]))
        with WAYS[way].open(group, config) as workspace, Workspace(group, config=plain, backend="direct") as other:
            return [make(s, case, workspace, other, call) for case, call in zip(s.cases, calls, strict=True)]

    for call, ranks in zip(calls, zip(*run_ranks(body, num_ranks), strict=True), strict=True):
        outs, lses, out, lse = zip(*ranks, strict=True)
        truth = Call(torch.stack(outs), torch.stack(lses), call.lse_base, call.seq_lens, call.query_start_loc)
        truth.check(torch.cat(out, dim=1), torch.cat(lse, dim=1))


# -- what runs the channels


def one_after_the_other(num_channels, body):
    for channel in range(num_channels):
        body(channel, channel + 1)


def in_two_parts(num_channels, body):
    threads = [
        threading.Thread(target=body, args=part) for part in ((num_channels // 3, num_channels), (0, num_channels // 3))
    ]
    [thread.start() for thread in threads], [thread.join() for thread in threads]


def backwards_at_the_same_time(num_channels, body):
    threads = [threading.Thread(target=body, args=(channel, channel + 1)) for channel in reversed(range(num_channels))]
    [thread.start() for thread in threads], [thread.join() for thread in threads]


PARALLEL_FORS = [None, lambda n, body: body(0, n), one_after_the_other, in_two_parts, backwards_at_the_same_time]


@pytest.mark.parametrize("num_channels", [2, 7])
@pytest.mark.parametrize("fields", [{}, {"zero_copy": True}, {"wire": "packet", "packet_bytes": 128}], ids=str)
def test_channels_in_threads_of_any_kind(fields, num_channels):
    """Each rank its own parallel_for; fewer rows than channels, and several rounds, among the calls."""
    calls = [make_call(5, n, 5, 40, torch.bfloat16, kind="empty", seed=n) for n in (9, 1, 0, 16, 3, 40)]

    def body(group):
        config = config_for(calls[0], max_num_tokens=16, num_channels=num_channels, **fields)
        with Workspace(group, config=config, parallel_for=PARALLEL_FORS[group.rank]) as workspace:
            return [merge(workspace, call) for call in calls]

    for got, wanted in zip(assemble(run_ranks(body, 5)), run_calls(calls), strict=True):
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
