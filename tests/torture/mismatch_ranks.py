"""Makes the calls of a program on one rank, with payload that says at which place of whose program it was sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from dcpkernels import (
    KVGatherPlan,
    Workspace,
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels.errors import DcpError
from tests.a2a_calls import attempt, meet
from tests.torture.mismatch_programs import LANES, MAX_TOKENS, NUM_PLANS, Call, Program

NUM_HEADS, HEAD_DIM, QUERY_DIM, KV_DIM, CHUNK_ROWS = 12, 16, 24, 32, 64
CONTEXT_LENS = (150, 140)  # of the plans
CONFIG = WorkspaceConfig(
    NUM_HEADS,
    HEAD_DIM,
    MAX_TOKENS,
    dtype=torch.float32,
    num_lanes=len(LANES),
    query_head_dim=QUERY_DIM,
    query_dtype=torch.float32,
    kv_chunk_rows=CHUNK_ROWS,
    kv_dim=KV_DIM,
    first_call_timeout_s=20.0,
)
WARM_UP = [
    call
    for lane in LANES
    for call in (Call("query", lane, 1, "float32"), Call("reduce", lane, 1, "e"), Call("chunk", lane, 0, 0))
]
Places = tuple[int | None, ...]


class Mixed(AssertionError):
    """A result whose rows are not all of one call, or that has changed while it was to be read."""


@dataclass
class Made:
    """What came of a program: of each call that returned and has rows, the places that its rows name, rank by rank; and
    what ended it. `check` is what `Workspace.check` raised at the very end."""

    places: dict[int, Places] = field(default_factory=dict)
    error: DcpError | None = None
    seconds: float = 0.0  # of the call that raised
    check: DcpError | None = None


class Maker:
    """Of one rank."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.rank, self.num_ranks = workspace, workspace.rank, workspace.num_ranks
        self.plans = [self._plan(length) for length in CONTEXT_LENS[:NUM_PLANS]]
        self._views: dict[tuple[str, int], tuple[Call, torch.Tensor, Places]] = {}

    def _plan(self, context_len: int) -> KVGatherPlan:
        blocks, num_ranks = range(-(-context_len // self.num_ranks // 16) + 1), self.num_ranks
        return KVGatherPlan(
            [context_len], [blocks], block_size=16, num_ranks=num_ranks, rank=self.rank, chunk_size=CHUNK_ROWS
        )

    def __call__(self, call: Call, place: int) -> Places:
        """Makes the call, and says of which places the rows of the result are: of each rank; None where it has none."""
        self._look_again(call)
        return getattr(self, f"_{call.op}")(call, place)

    def _look_again(self, call: Call) -> None:
        """Views stay what they were until the call that ends them."""
        ends = {"reduce": "query", "release": "query", "query": "query", "query_out": "query"}
        ended = ends.get(call.op, "chunk" if call.is_chunk and call.op != "start" else "")
        for stream, (of, view, places) in list(self._views.items()):
            if self._places_in(of, view) != places:
                raise Mixed(f"the view of {of} has changed before {call}")
            if stream == (ended, call.lane):
                del self._views[stream]

    def _reduce(self, call: Call, place: int) -> Places:
        payload = torch.zeros(call.number, NUM_HEADS, HEAD_DIM)
        payload[..., self.rank] = (place + 1) * self.num_ranks
        local_heads = NUM_HEADS // self.num_ranks
        out, lse_out = (
            torch.full((call.number, local_heads, HEAD_DIM), 7.0),
            torch.full((call.number, local_heads), 7.0),
        )
        try:
            a2a_lse_reduce(
                payload,
                torch.zeros(call.number, NUM_HEADS),
                workspace=self.workspace,
                lse_base=str(call.what),
                out=out,
                lse_out=lse_out,
                lane=call.lane,
            )
        except DcpError:
            if not (out.isnan().all() and lse_out.isnan().all()):
                raise Mixed(f"{call} has raised, and left numbers") from None
            raise
        return self._places(out[..., rank] for rank in range(self.num_ranks))

    def _query(self, call: Call, place: int) -> Places:
        dtype = getattr(torch, str(call.what))
        query = torch.full((call.number, NUM_HEADS // self.num_ranks, QUERY_DIM), place + 1.0, dtype=dtype)
        out = torch.empty(call.number, NUM_HEADS, QUERY_DIM, dtype=dtype) if call.op == "query_out" else None
        got = query_gather(query, workspace=self.workspace, lane=call.lane, out=out)
        return self._keep(call, got, out is None)

    _query_out = _query

    def _release(self, call: Call, place: int) -> Places:
        release_query(workspace=self.workspace, lane=call.lane)
        return (None,) * self.num_ranks

    def _cache(self, place: int) -> torch.Tensor:
        return torch.full((16, 16, KV_DIM), place + 1.0, dtype=torch.bfloat16)

    def _chunk(self, call: Call, place: int) -> Places:
        plan = self.plans[int(call.what)]
        return self._keep(
            call, kv_gather(self._cache(place), plan, call.number, workspace=self.workspace, lane=call.lane), True
        )

    def _start(self, call: Call, place: int) -> Places:
        plan = self.plans[int(call.what)]
        kv_gather_start(self._cache(place), plan, call.number, workspace=self.workspace, lane=call.lane)
        return (None,) * self.num_ranks

    def _wait(self, call: Call, place: int) -> Places:
        got = kv_gather_wait(self.plans[int(call.what)], call.number, workspace=self.workspace, lane=call.lane)
        return self._keep(call, got, True)

    def _keep(self, call: Call, got: torch.Tensor, is_view: bool) -> Places:
        places = self._places_in(call, got)
        if is_view:
            self._views[call.stream] = call, got, places
        return places

    def _places_in(self, call: Call, got: torch.Tensor) -> Places:
        if call.is_chunk:
            first = call.number * CHUNK_ROWS  # token p belongs to rank p % W
            return self._places(
                got[(rank - first) % self.num_ranks :: self.num_ranks] for rank in range(self.num_ranks)
            )
        return self._places(got.chunk(self.num_ranks, dim=1))

    def _places(self, of_ranks: Any) -> Places:
        found: list[int | None] = []
        for values in of_ranks:
            values = values.float().round()
            if values.numel() and not (values == values.flatten()[0]).all():
                raise Mixed(f"rows of several calls: {values.unique().tolist()}")
            found.append(int(values.flatten()[0]) - 1 if values.numel() else None)
        return tuple(found)


def make_program(group: Any, config: WorkspaceConfig, backend: str, programs: list[Program], closes: bool) -> Made:
    """This rank's program, to its end or up to the call that raises; then this rank closes, or stays until all are done."""
    made = Made()
    with Workspace(group, config=config, backend=backend) as workspace:
        maker = Maker(workspace)
        for call in WARM_UP:
            maker(call, 0)
        meet(group)
        for place, call in enumerate(programs[workspace.rank]):
            start = time.monotonic()
            result = attempt(maker, call, place)
            if result.error is not None:
                made.error, made.seconds = result.error, time.monotonic() - start
                break
            made.places[place] = result.value
        if not closes and not (made.error is not None and "Invalid" in type(made.error).__name__):
            meet_or_gone(group)
            made.check = attempt(workspace.check).error
    return made


def meet_or_gone(group: Any) -> None:
    """Until all that stay are here."""
    try:
        meet(group)
    except DcpError:
        pass
