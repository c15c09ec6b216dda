"""Any calls in any order: hypothesis chooses them, a model of a few words says what each has to come to, the reference says
which numbers. All ranks make the same call at a time; what may not be made now has to be refused as the manual says, and what
was handed out before has to stay as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dcpkernels import (
    WorkspaceConfig,
    a2a_lse_reduce,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    reference,
    release_query,
)
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch
from dcpkernels.testing import assert_merge_close, merge_inputs
from tests.a2a_calls import Raised, same_bits
from tests.gather_calls import Context, any_bits
from tests.torture.rank_team import Rank, Team

H, D, DQ, CAPACITY, LANES, CHUNK = 6, 16, 24, 4, 2, 8
COMMON = {"num_lanes": LANES, "query_head_dim": DQ, "kv_chunk_rows": CHUNK, "kv_dim": 16, "timeout_s": 20.0}
WAYS = {
    "bulk": ("direct", {}),
    "packets, two channels": ("direct", {"wire": "packet", "num_channels": 2, "multicast": False}),
    "zero copy": ("direct", {"zero_copy": True, "start_epoch": 2**32 - 5}),
    "collective": ("collective", {}),
}
LANE = st.integers(0, LANES - 1)
TOKENS = st.integers(0, CAPACITY)
ROWS = st.integers(0, 2 * CAPACITY + 1)  # larger than the workspace, too
CHUNKS = st.integers(-1, 3)  # there are 0, 1 and 2
PLANS = st.integers(0, 1)


@dataclass
class Handed:
    """A tensor of Workspace.partial_out on every rank."""

    tensors: list[torch.Tensor]
    num_tokens: int


@dataclass
class Lane:
    """What the model knows of a lane."""

    open_rows: int | None = None  # of the query that is open
    handed: Handed | None = None  # the last one, which no call has taken
    stale: Handed | None = None  # one that is older, or was taken
    started: tuple[int, int] | None = None  # plan, chunk
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)  # views, what they hold


class Calls(RuleBasedStateMachine):
    num_ranks = 1
    way = "bulk"
    counts: Counter[str] = Counter()  # of calls, by what they had to come to

    @initialize()
    def make(self) -> None:
        self.backend, fields = WAYS[self.way]
        self.config = WorkspaceConfig(H, D, CAPACITY, **COMMON, **fields)
        self.team = Team(self.num_ranks)
        self.contexts = [Context(lens, self.num_ranks, 16, torch.bfloat16, block_size=4) for lens in [(11, 9), (3, 17)]]
        self.plans = [[context.plan(r, CHUNK) for r in range(self.num_ranks)] for context in self.contexts]
        self.turn = 0
        self.open()

    def open(self) -> None:
        done = self.team.do(lambda rank: rank.open(self.config, self.backend))
        assert all(outcome.error is None for outcome in done), done
        self.lanes = [Lane() for _ in range(LANES)]
        self.fault: type[DcpError] | None = None
        self.is_closed = False
        self.num_calls = 0

    def teardown(self) -> None:
        if hasattr(self, "team"):
            self.team.do(lambda rank: rank.workspace.close())
            self.team.end()

    # -- what a call has to come to

    def expect(self, call: Any, refused: type[DcpError] | None = None, breach: type[DcpError] | None = None) -> Any:
        """Makes the call on all ranks. `refused`: by each rank on its own, and all is as it was. `breach`: found by all, and
        the end of the workspace. Returns the values of all ranks, or None where it had to raise."""
        self.turn += 1
        done = self.team.do(call)
        expected = DcpError if self.is_closed else refused or self.fault or breach
        kinds = {"closed": self.is_closed, "refused": refused, "faulted": self.fault, "breach": breach}
        self.counts[next((kind for kind, holds in kinds.items() if holds), "done")] += 1
        texts = [f"rank {r}: {type(x.error).__name__}: {x.error}" for r, x in enumerate(done)]
        assert all(type(outcome.error) is (expected or type(None)) for outcome in done), (expected, texts)
        if self.is_closed:
            assert all("must be open" in text for text in texts), texts
        elif refused is None and expected is not None:
            self.check_fault(done)
            if self.fault is None:
                self.fault = breach
                for lane in self.lanes:
                    lane.seen = {}
        return None if expected else [outcome.value for outcome in done]

    def check_fault(self, done: list[Raised]) -> None:
        assert len({outcome.error.ranks for outcome in done}) == 1, [outcome.error.ranks for outcome in done]

    # -- queries

    def queries(self, num_tokens: int) -> list[torch.Tensor]:
        shape = (num_tokens, H // self.num_ranks, DQ)
        return [any_bits(shape, torch.bfloat16, 10 * self.turn + r) for r in range(self.num_ranks)]

    @rule(lane=LANE, num_tokens=ROWS, has_out=st.booleans())
    def gather(self, lane: int, num_tokens: int, has_out: bool) -> None:
        queries, state = self.queries(num_tokens), self.lanes[lane]

        def call(rank: Rank) -> torch.Tensor:
            out = torch.empty(num_tokens, H, DQ, dtype=torch.bfloat16) if has_out else None
            return query_gather(queries[rank.rank], workspace=rank.workspace, out=out, lane=lane)

        is_too_large = num_tokens > CAPACITY and not has_out
        views = self.expect(
            call, DcpInvalidArgument if is_too_large else None, DcpError if state.open_rows is not None else None
        )
        if views is None:
            return
        self.num_calls += 1
        expected = reference.query_gather(queries)
        assert all(same_bits(view, expected) for view in views)
        if not has_out:
            state.open_rows = num_tokens
            state.seen["query"] = [(view, expected) for view in views]

    @rule(lane=LANE)
    def release(self, lane: int) -> None:
        if self.expect(lambda rank: release_query(workspace=rank.workspace, lane=lane)) is not None:
            self.num_calls += 1
            self.end_query(self.lanes[lane])

    def end_query(self, lane: Lane) -> None:
        lane.open_rows = None
        lane.seen.pop("query", None)

    # -- merges

    @rule(lane=LANE, num_tokens=ROWS, is_open=st.booleans())
    def merge(self, lane: int, num_tokens: int, is_open: bool) -> None:
        """Of tensors of the caller's; more often than not with the rows of an open query."""
        state = self.lanes[lane]
        if is_open and state.open_rows is not None:
            num_tokens = state.open_rows
        outs, lses = merge_inputs(self.num_ranks, num_tokens, H, D, torch.bfloat16, kind="empty", seed=self.turn)
        self.merge_of(lane, list(outs), outs, lses, None)

    @rule(lane=LANE, is_stale=st.booleans())
    def merge_handed(self, lane: int, is_stale: bool) -> None:
        """Of a tensor that was handed out: the last one, or one that is older or was taken."""
        state = self.lanes[lane]
        handed = state.stale if is_stale else state.handed
        if handed is None:
            return
        outs, lses = merge_inputs(
            self.num_ranks, handed.num_tokens, H, D, torch.bfloat16, kind="spread", seed=self.turn
        )
        is_refused = is_stale and self.config.zero_copy and handed.num_tokens > 0
        if not is_refused and not self.is_closed:
            for tensor, rows in zip(handed.tensors, outs, strict=True):
                tensor.copy_(rows)
        if self.merge_of(lane, handed.tensors, outs, lses, DcpInvalidArgument if is_refused else None):
            if not is_stale and handed.num_tokens > 0:  # a tensor without rows lies nowhere, and is not taken
                state.stale, state.handed = handed, None

    def merge_of(
        self, lane: int, tensors: list[torch.Tensor], outs: torch.Tensor, lses: torch.Tensor, refused: Any
    ) -> bool:
        state, base = self.lanes[lane], "e2"[self.turn % 2]

        def call(rank: Rank) -> Any:
            arguments = {"workspace": rank.workspace, "lse_base": base, "lane": lane, "return_lse": True}
            return a2a_lse_reduce(tensors[rank.rank], lses[rank.rank], **arguments)

        is_other = state.open_rows is not None and state.open_rows != outs.shape[1]
        merged = self.expect(call, refused, DcpMismatch if is_other else None)
        if merged is None:
            return False
        self.num_calls += 1
        self.end_query(state)
        for rank, (out, lse) in enumerate(merged):
            assert_merge_close(out, lse, outs, lses, lse_base=base, rank=rank)
        return True

    @rule(lane=LANE, num_tokens=st.integers(0, CAPACITY + 1))
    def hand_out(self, lane: int, num_tokens: int) -> None:
        refused = DcpInvalidArgument if num_tokens > CAPACITY else None
        tensors = self.expect(lambda rank: rank.workspace.partial_out(num_tokens, lane=lane), refused)
        if tensors is not None:
            state = self.lanes[lane]
            state.stale, state.handed = state.handed, Handed(tensors, num_tokens)

    # -- chunks

    @rule(lane=LANE, plan=PLANS, chunk=CHUNKS, is_whole=st.booleans())
    def start(self, lane: int, plan: int, chunk: int, is_whole: bool) -> None:
        """`is_whole`: kv_gather, which waits as well."""
        state, caches, plans = self.lanes[lane], self.contexts[plan].caches, self.plans[plan]
        # A chunk that was started before must be waited for first; after a fault it cannot be.
        is_refused = not 0 <= chunk < plans[0].num_chunks or (state.started is not None and self.fault is None)
        function = kv_gather if is_whole else kv_gather_start

        def call(rank: Rank) -> Any:
            return function(caches[rank.rank], plans[rank.rank], chunk, workspace=rank.workspace, lane=lane)

        chunks = self.expect(call, DcpInvalidArgument if is_refused else None)
        if chunks is None:
            return
        if is_whole:
            self.take(state, plan, chunk, chunks)
        else:
            state.started = plan, chunk

    @rule(lane=LANE, plan=PLANS, chunk=CHUNKS, is_right=st.sampled_from([True, True, False]))
    def wait(self, lane: int, plan: int, chunk: int, is_right: bool) -> None:
        state = self.lanes[lane]
        if is_right and state.started is not None:
            plan, chunk = state.started
        # Of another chunk than the one that was started: the fault, where there is one, else the caller's mistake.
        is_wrong = (plan, chunk) != state.started
        refused = (
            DcpInvalidArgument
            if is_wrong and (self.fault is None or self.is_out_of_range(plan, chunk, state))
            else None
        )
        plans = self.plans[plan]
        chunks = self.expect(
            lambda rank: kv_gather_wait(plans[rank.rank], chunk, workspace=rank.workspace, lane=lane), refused
        )
        if refused is None and not self.is_closed and not is_wrong:
            state.started = None
        if chunks is not None:
            self.take(state, plan, chunk, chunks)

    def is_out_of_range(self, plan: int, chunk: int, lane: Lane) -> bool:
        """No chunk of the plan that was started: the plan itself refuses."""
        return lane.started is not None and lane.started[0] == plan and not 0 <= chunk < self.plans[plan][0].num_chunks

    def take(self, lane: Lane, plan: int, chunk: int, chunks: list[torch.Tensor]) -> None:
        self.num_calls += 1
        expected = self.contexts[plan].reference_chunk(CHUNK, chunk)
        assert all(same_bits(rows, expected) for rows in chunks)
        lane.seen["chunk"] = [(rows, expected) for rows in chunks]  # the one before is over

    # -- the workspace

    @rule(
        lane=st.sampled_from([-1, LANES, 2**40]), op=st.sampled_from(["merge", "hand out", "gather", "release", "wait"])
    )
    def wrong_lane(self, lane: int, op: str) -> None:
        outs, lses = merge_inputs(1, 2, H, D, torch.bfloat16, kind="spread", seed=0)
        call = {
            "merge": lambda rank: a2a_lse_reduce(outs[0], lses[0], workspace=rank.workspace, lse_base="e", lane=lane),
            "hand out": lambda rank: rank.workspace.partial_out(1, lane=lane),
            "gather": lambda rank: query_gather(self.queries(2)[rank.rank], workspace=rank.workspace, lane=lane),
            "release": lambda rank: release_query(workspace=rank.workspace, lane=lane),
            "wait": lambda rank: kv_gather_wait(self.plans[0][rank.rank], 0, workspace=rank.workspace, lane=lane),
        }[op]
        self.expect(call, DcpInvalidArgument)

    @rule()
    def check(self) -> None:
        self.expect(lambda rank: rank.workspace.check())

    @precondition(lambda self: self.fault is None)
    @rule()
    def stats(self) -> None:
        counted = self.expect(lambda rank: rank.workspace.stats()["num_calls"])
        assert counted is None or counted == [self.num_calls] * self.num_ranks, (counted, self.num_calls)

    @precondition(lambda self: self.is_closed or all(x.open_rows is x.started is x.handed is None for x in self.lanes))
    @rule()
    def self_check(self) -> None:
        if self.expect(lambda rank: rank.workspace.self_check()) is not None:
            self.num_calls = self.team.do(lambda rank: rank.workspace.stats()["num_calls"])[0].value
            for lane in self.lanes:
                lane.seen, lane.stale = {}, None

    @precondition(lambda self: self.fault is not None or self.turn % 8 == 0)
    @rule()
    def close(self) -> None:
        """At any time, and again."""
        done = self.team.do(lambda rank: rank.workspace.close())
        assert all(outcome.error is None for outcome in done), done
        self.is_closed = True
        for lane in self.lanes:
            lane.seen = {}

    @precondition(lambda self: self.is_closed)
    @rule()
    def reopen(self) -> None:
        self.open()

    @invariant()
    def views_stay(self) -> None:
        for lane in getattr(self, "lanes", []):
            for what, views in lane.seen.items():
                assert all(same_bits(view, expected) for view, expected in views), f"a {what} has changed"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_any_calls_in_any_order(way, num_ranks, torture, capsys):
    counts: Counter[str] = Counter()
    machine = type("Calls", (Calls,), {"way": way, "num_ranks": num_ranks, "counts": counts})
    if not torture:  # other sequences for each, and the same ones every time
        hypothesis.seed(10 * list(WAYS).index(way) + num_ranks)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1000 if torture else 25,
            stateful_step_count=60 if torture else 40,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    assert min(counts[kind] for kind in ("done", "refused", "breach", "faulted", "closed")) > 0, counts
    assert counts["done"] > sum(counts.values()) / 4, counts
    if torture:
        with capsys.disabled():
            print(f"\n[{way}, {num_ranks} ranks: {dict(counts)}]")
