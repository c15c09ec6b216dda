"""What is fuzzed of the ops: workspaces of one rank, calls that are right, and all that a refused call has to leave as it was."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    reference,
    release_query,
)
from dcpkernels._gathers import span_bytes
from dcpkernels.integrations import torch_ops
from dcpkernels.testing import ThreadGroup

H, D, DQ, DKV, CAPACITY, CHUNK = 4, 16, 24, 32, 4, 8
LENS, BLOCK = (11, 0, 6), 4
TABLES = [[2, 0, 4], [], [1, 3]]
E4M3 = torch.float8_e4m3fn
BOTH = {"query_head_dim": DQ, "kv_chunk_rows": CHUNK, "kv_dim": DKV, "kv_dtype": E4M3}
WORKSPACES = [
    ("direct", {"num_lanes": 2, **BOTH}),
    ("direct", {"zero_copy": True, "num_channels": 2, **BOTH, "multicast": False}),
    ("direct", {"wire": "packet", "query_head_dim": DQ}),
    ("collective", {"num_lanes": 2, **BOTH}),
    ("collective", {}),
]


def plan_of(**changed: Any) -> KVGatherPlan:
    fields = {"block_size": BLOCK, "num_ranks": 1, "rank": 0, "chunk_size": CHUNK} | changed
    return KVGatherPlan(LENS, TABLES, **fields)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    (first, end), (other, other_end) = ((x.data_ptr(), x.data_ptr() + span_bytes(x)) for x in (a, b))
    return first < end and other < other_end and first < other_end and other < end


def numbers(*shape: int) -> torch.Tensor:
    """All different within some rows, and exact in each type that is used here."""
    return (torch.arange(torch.Size(shape).numel()) % 13 + 1).bfloat16().view(shape)


@dataclass
class Target:
    """A call by keywords. `right()` gives arguments that are right; `lenient`: torch may refuse in its own words."""

    name: str
    call: Callable[..., Any]
    right: Callable[[random.Random], dict[str, Any]]
    stage: Stage | None = None
    lenient: bool = False


class Stage:
    """A workspace, and what a refused call may not change."""

    def __init__(self, backend: str, fields: dict[str, Any]) -> None:
        (group,) = ThreadGroup.create(1)
        self.config = WorkspaceConfig(H, D, CAPACITY, dtype=torch.bfloat16, **fields)
        self.workspace = Workspace(group, config=self.config, backend=backend)
        self.traceable = torch_ops.TraceableWorkspace(self.workspace)
        self.plan = plan_of()
        self.traced_plan = torch_ops.TraceablePlan(self.plan)
        self.memory = list(self._memory())
        self.handed_out = list(self._handed_out())
        num_gathers = self.config.num_lanes * ((self.config.query_head_dim > 0) + 2 * (self.config.kv_dim > 0))
        self.gathers = self.handed_out[:num_gathers]  # their buffers; those of partial_out follow

    def _memory(self) -> Iterator[torch.Tensor]:
        impl = self.workspace._impl
        if self.workspace.backend == "collective":
            for lane in itertools.chain(impl.gathers._query, impl.gathers._kv):
                yield from lane.buffers
            return
        layout = impl._layout
        yield torch.frombuffer(impl._heap.own_memory(0, layout.num_bytes), dtype=torch.uint8)
        if layout.shared_num_bytes:
            memory = impl._heap.shared_memory(0, layout.shared_num_bytes)
            yield torch.frombuffer(memory, dtype=torch.uint8)

    def _handed_out(self) -> Iterator[torch.Tensor]:
        """What a caller can get hold of, as bytes."""
        impl = self.workspace._impl
        if self.workspace.backend == "collective":
            yield from self.memory
            return
        yield from impl.gathers._query
        for buffers in impl.gathers._kv:
            yield from buffers
        for buffers in impl._buffers:
            yield from (buffer.view(-1).view(torch.uint8) for buffer in buffers if buffer is not None)

    def state(self) -> Any:
        """All that Python holds, and the counters."""
        this = self.workspace
        started = {lane: chunk for lane, chunk in this._started_chunks.items() if chunk is not None}
        return this.stats(), started, self.traceable.state.tolist()

    def settle(self) -> None:
        """Ends what a call that was right after all has opened."""
        for lane in range(self.config.num_lanes):
            if self.config.query_head_dim:
                release_query(workspace=self.workspace, lane=lane)
            chunk = self.workspace._started_chunks.get(lane)
            if chunk is not None:
                kv_gather_wait(chunk.plan, chunk.index, workspace=self.workspace, lane=lane)

    def check_works(self) -> None:
        """A right call of each op, with what has to come of it."""
        dice = random.Random(0)
        for target in self.targets():
            if target.name in ("a2a_lse_reduce", "query_gather", "kv_gather"):
                arguments = target.right(dice)
                result = target.call(**arguments)
                expected = self.expected(target.name, arguments)
                result = result[0] if isinstance(result, tuple) else result
                assert torch.equal(result.float(), expected.float()), f"{target.name} is wrong"
                self.settle()
        self.workspace.check()

    def expected(self, name: str, arguments: dict[str, Any]) -> torch.Tensor | None:
        """What the call, which was taken, has to give; None where that is not known. With one rank a merge is a choice
        between a row and zeros, and exact."""
        expected = {"a2a_lse_reduce": self._merged, "query_gather": self._gathered, "kv_gather": self._chunk}
        try:
            if any(isinstance(value, torch.Tensor) and value.numel() > 10**6 for value in arguments.values()):
                return None
            function = expected.get(name.rpartition(".")[2])
            return None if function is None else function(**arguments)
        except TypeError:  # what only the dispatcher takes for a number
            return None

    def overlap(self, name: str, arguments: dict[str, Any]) -> str:
        """Which output of a call, which was taken, lies where it must not: in an input, or in a buffer of the gathers."""
        outputs = {key: arguments[key] for key in ("out", "lse_out") if arguments.get(key) is not None}
        # kv_gather has read its cache when it writes.
        inputs = {key: value for key, value in arguments.items() if key not in outputs and key != "kv_cache"}
        for output in outputs:
            if any(_meet(outputs[output], buffer) for buffer in self.gathers):
                return f"{output} lies in the workspace"
            for key, value in inputs.items():
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor) and _meet(outputs[output], tensor):
                        return f"{output} lies in {key}"
        return ""

    def _merged(
        self,
        partial_out: Any,
        partial_lse: Any,
        lse_base: Any,
        seq_lens: Any = None,
        query_start_loc: Any = None,
        **_: Any,
    ) -> torch.Tensor | None:
        if query_start_loc is not None and (query_start_loc.min() < 0 or query_start_loc.diff().min() < 0):
            return None  # the reference takes them for places from the end, or refuses them; the op reads what there is
        masks = {"seq_lens": None if seq_lens is None else seq_lens[None], "query_start_loc": query_start_loc}
        out, _ = reference.a2a_lse_reduce(
            partial_out.detach().resolve_neg()[None],
            partial_lse.detach().resolve_neg()[None],
            lse_base=lse_base,
            **masks,
        )
        return out.to(torch.bfloat16)

    def _gathered(self, query: Any, scale: Any = None, out: Any = None, **_: Any) -> torch.Tensor | None:
        parts = query if isinstance(query, (list, tuple)) else (query,)
        number = None if scale is None else float(scale)
        if number is not None and not 0 < number < math.inf:
            return None  # in a tensor, which is read during the call
        dtype = E4M3 if out is None else out.dtype
        return reference.query_gather(
            [[part.detach().resolve_neg() for part in parts]], scale=number, scaled_dtype=dtype if number else E4M3
        )

    def _chunk(
        self, kv_cache: Any, chunk_idx: Any, scale: Any = None, out: Any = None, **_: Any
    ) -> torch.Tensor | None:
        if out is not None and _meet(out, kv_cache):
            return None  # which the call has read before: it is another one now
        number = None if scale is None else float(scale)
        if number is not None and not 0 < number < math.inf:
            return None  # in a tensor, which is read during the call
        where = {"chunk_size": CHUNK, "chunk_idx": operator.index(chunk_idx), "scale": number}
        return reference.kv_gather([kv_cache.detach().resolve_neg()], LENS, [TABLES], **where)

    # -- what is called

    def targets(self) -> list[Target]:
        targets = [
            Target("a2a_lse_reduce", a2a_lse_reduce, self._merge, self),
            Target("partial_out", self.workspace.partial_out, lambda dice: {"num_tokens": 3, "lane": 0}, self),
            Target("query_gather", query_gather, self._query, self),
            Target("release_query", release_query, lambda dice: {"workspace": self.workspace, "lane": 0}, self),
            Target("kv_gather", kv_gather, self._kv, self),
            Target("kv_gather_start", kv_gather_start, self._kv_start, self),
            Target("kv_gather_wait", self._started_wait, self._kv_wait, self),
            Target("torch_ops.a2a_lse_reduce", torch_ops.a2a_lse_reduce, self._traced(self._merge), self, True),
            Target("torch_ops.query_gather", torch_ops.query_gather, self._traced(self._query), self, True),
        ]
        if self.config.kv_dim:
            targets.append(Target("torch_ops.kv_gather", torch_ops.kv_gather, self._traced(self._kv_plain), self, True))
        has_query, has_kv = self.config.query_head_dim > 0, self.config.kv_dim > 0
        skipped = {"query": not has_query, "kv": not has_kv}
        return [target for target in targets if not any(no and word in target.name for word, no in skipped.items())]

    def _merge(self, dice: random.Random) -> dict[str, Any]:
        num_tokens = dice.choice([1, 3, 3, 6])
        partial_out = numbers(num_tokens, H, D)
        if num_tokens <= CAPACITY and dice.random() < 0.5:
            partial_out = self.workspace.partial_out(num_tokens).copy_(partial_out)
        arguments: dict[str, Any] = {
            "partial_out": partial_out,
            "partial_lse": torch.zeros(num_tokens, H),
            "workspace": self.workspace,
            "lse_base": "e",
            "lane": 0,
            "return_lse": dice.random() < 0.5,
        }
        if dice.random() < 0.5:
            arguments["out"] = torch.zeros(num_tokens, H, D, dtype=torch.bfloat16)
        if dice.random() < 0.5:
            arguments["lse_out"] = torch.zeros(num_tokens, H)
        if dice.random() < 0.5:
            arguments["seq_lens"] = torch.ones(2, dtype=torch.int32)
            arguments["query_start_loc"] = torch.tensor([0, 1, 2], dtype=torch.int32)
        return arguments

    def _query(self, dice: random.Random) -> dict[str, Any]:
        num_tokens = dice.choice([1, 3, 3, 6])
        query = numbers(num_tokens, H, DQ)
        arguments: dict[str, Any] = {"query": query, "workspace": self.workspace, "lane": 0}
        dtype = torch.bfloat16
        if dice.random() < 0.4:
            arguments["scale"] = dice.choice([0.5, torch.tensor([0.5])])
            dtype = E4M3
        if num_tokens > CAPACITY or dice.random() < 0.5:
            arguments["out"] = torch.zeros(num_tokens, H, DQ).to(dtype)
        return arguments

    def _parts(self, dice: random.Random) -> dict[str, Any]:
        arguments = self._query(dice)
        query = arguments["query"]
        return arguments | {"query": (query[..., :16], query[..., 16:])}

    def _kv_plain(self, dice: random.Random) -> dict[str, Any]:
        arguments = self._kv(dice)
        arguments.pop("out", None)
        return arguments

    def _kv_start(self, dice: random.Random) -> dict[str, Any]:
        cache = numbers(5, BLOCK, DKV).to(E4M3)
        lane = {"workspace": self.workspace, "lane": 0}
        return {"kv_cache": cache, "plan": self.plan, "chunk_idx": dice.choice([0, 1, 2])} | lane

    def _kv(self, dice: random.Random) -> dict[str, Any]:
        return self._kv_start(dice) | self._kv_output(dice, dice.choice([0, 1, 2]))

    def _kv_output(self, dice: random.Random, chunk_idx: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"chunk_idx": chunk_idx}
        if dice.random() < 0.5:
            arguments["scale"] = dice.choice([0.5, torch.tensor([0.5])])
            if dice.random() < 0.6:
                rows = self.plan.num_rows(chunk_idx)
                arguments["out"] = torch.zeros(rows, DKV, dtype=torch.bfloat16)
        return arguments

    def _kv_wait(self, dice: random.Random) -> dict[str, Any]:
        if not self.workspace._started_chunks and dice.random() < 0.9:
            kv_gather_start(**self._kv_start(random.Random(1)))
        chunk = self.workspace._started_chunks.get(0)
        idx = 0 if chunk is None else chunk.index
        return {"plan": self.plan, "workspace": self.workspace, "lane": 0} | self._kv_output(dice, idx)

    @staticmethod
    def _started_wait(**arguments: Any) -> Any:
        return kv_gather_wait(**arguments)

    def _traced(self, right: Callable[[random.Random], dict[str, Any]]) -> Callable[[random.Random], dict[str, Any]]:
        def traced(dice: random.Random) -> dict[str, Any]:
            arguments = right(dice) | {"workspace": self.traceable}
            return arguments | ({"plan": self.traced_plan} if "plan" in arguments else {})

        return traced
