"""The workspace of a group of ranks: symmetric memory, epoch streams, faults. Making and closing it are the only
collective calls; everything in between is an op."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch

from dcpkernels import _backend, _check, env
from dcpkernels._faults import fault_error, lost_error
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.heap.cpu import CpuHeap
from dcpkernels.heap.group import Deadline, as_group
from dcpkernels.heap.verdict import agree
from dcpkernels.region_layout import RegionLayout

_log = logging.getLogger("dcpkernels")

_MAX_PLANS = 4096  # shapes remembered; an engine has a few per captured batch size


@dataclass(frozen=True)
class WorkspaceConfig:
    """What a workspace is made for. All fields but the timeouts and cpu_isa must be equal on all ranks.

    Args:
        num_heads: query heads of the model, H; those of all ranks together.
        head_dim: elements of one head's partial output, D (512 for MLA's latent).
        max_num_tokens: rows of the usual largest call. Staging is made for one round of rows, and a round has no more
            rows than this, and no more than what a CPU cache holds; a call with more rows takes several rounds.
        dtype: of the partial output: float32, float16 or bfloat16.
        num_lanes: independent streams with their own staging, for micro-batches that run at the same time.
        timeout_s: seconds that a wait for another rank may take; 0 = for ever. DCPKERNELS_TIMEOUT_S replaces it.
        first_call_timeout_s: the same for the first call of a lane, and for making the workspace: ranks start at
            different times. DCPKERNELS_FIRST_CALL_TIMEOUT_S replaces it.
        cpu_isa: "v4", "v3" or "baseline"; None = DCPKERNELS_CPU_ISA, else the best that the processor runs. All give
            the same bits.
        start_epoch: where the 64-bit epochs start, at least 2 in the low 32 bits; for tests of the wrap at 2**32.
    """

    num_heads: int
    head_dim: int
    max_num_tokens: int
    dtype: torch.dtype = torch.bfloat16
    num_lanes: int = 1
    timeout_s: float = 30.0
    first_call_timeout_s: float = 300.0
    cpu_isa: str | None = None
    start_epoch: int = 3

    def __post_init__(self) -> None:
        if self.dtype not in _check.DTYPE_CODES:
            allowed = ", ".join(_check.name_of(dtype) for dtype in _check.DTYPE_CODES)
            raise DcpInvalidArgument(f"workspace: dtype must be one of {allowed} (got {self.dtype})")
        for name in ("timeout_s", "first_call_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= env.MAX_TIMEOUT_S:
                most = f"{env.MAX_TIMEOUT_S:.0e}"
                raise DcpInvalidArgument(
                    f"workspace: {name} must be a number of seconds in 0 .. {most} (got {value!r})"
                )
        # What the C++ side holds in 32 and 64 bits.
        limits = {
            "num_heads": 2**31,
            "head_dim": 2**31,
            "max_num_tokens": 2**40,
            "num_lanes": 257,
            "start_epoch": 2**63,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < limit:
                raise DcpInvalidArgument(
                    f"workspace: {name} must be a whole number in 1 .. {limit - 1} (got {value!r})"
                )
        if self.cpu_isa not in (None, *env.CPU_ISAS):
            raise DcpInvalidArgument(f"workspace: cpu_isa must be None or one of {env.CPU_ISAS} (got {self.cpu_isa!r})")
        if self.start_epoch % 2**32 < 2:
            raise DcpInvalidArgument(f"workspace: start_epoch must be >= 2 in its low 32 bits (got {self.start_epoch})")

    def region_layout(self, num_ranks: int) -> RegionLayout:
        """Where everything lies in each rank's region. Raises DcpInvalidArgument for counts that do not fit together."""
        return RegionLayout(
            num_ranks=num_ranks,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            max_num_tokens=self.max_num_tokens,
            item_bytes=self.dtype.itemsize,
            num_lanes=self.num_lanes,
        )

    def _shared_fields(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        local = ("timeout_s", "first_call_timeout_s", "cpu_isa")
        return {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name not in local}


@dataclass(frozen=True)
class WorkspaceSize:
    """Bytes of one rank's region: `parts` by name, and `total` with the padding between them."""

    parts: dict[str, int]
    total: int


class Workspace:
    """Symmetric memory for the ops of one group of ranks, on one host.

        with dcpkernels.Workspace(group, config=dcpkernels.WorkspaceConfig(96, 512, 64)) as workspace:
            out = dcpkernels.a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e")

    Making one is collective: all ranks of `group` call it, with equal configurations, and all succeed or all raise the
    same error. `close()` is collective too; nothing else is. Ranks are ranks inside the group, in the group's order.

    Args:
        group: a torch.distributed process group of any backend; None = the default group.
        device: "cpu".
        config: what it is made for.

    Raises (the same on all ranks):
        DcpInvalidArgument: a count is wrong, or heads do not divide by the ranks.
        DcpUnsupported: configurations or builds differ; ranks on several hosts; a device without a built target.
        DcpError: no room (with the bytes needed and available), or another step failed; the text names rank and reason.
        DcpTimeout, DcpPeerLost: a rank did not come, or died.
    """

    def __init__(self, group: Any = None, device: str | torch.device = "cpu", config: WorkspaceConfig | None = None):
        self._heap: CpuHeap | None = None  # first, so that a half-made object can be closed
        self._fault: dict[str, Any] | None = None
        self._group = as_group(group)
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        # What is wrong on one rank alone must not leave the others waiting: all learn of it.
        prepared, error = None, None
        try:
            prepared = _prepare(device, config, self.num_ranks)
        except Exception as failure:
            error = failure
        deadline = Deadline(prepared.first_call_timeout_s if prepared else WorkspaceConfig.first_call_timeout_s)
        cpus = agree(
            self._group, "workspace: check arguments", _backend.affinity(), error, timeout_s=deadline.for_call()
        )
        self._num_cpus = _backend.num_usable_cpus(cpus)
        self.device, self.config = "cpu", config
        self._module, self._layout, self._timeout_s = prepared.module, prepared.layout, prepared.timeout_s
        self.num_local_heads = self._layout.num_local_heads
        self._plans: dict[Any, Any] = {}
        self._endpoint = self._make_endpoint(prepared, deadline)
        _log.info(
            "workspace: target cpu (%s), rank %d of %d, %.1f MiB per rank, wire bulk, multicast no (nothing to broadcast)",
            self._endpoint.isa, self.rank, self.num_ranks, self.num_bytes / 2**20,
        )  # fmt: skip

    # -- size

    @staticmethod
    def size(config: WorkspaceConfig, num_ranks: int) -> WorkspaceSize:
        """Exact bytes of one rank's region, by part, before anything is allocated."""
        layout = config.region_layout(num_ranks)
        return WorkspaceSize({name: part.num_bytes for name, part in layout.parts.items()}, layout.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's region."""
        return self._layout.num_bytes

    @property
    def isa(self) -> str:
        """The CPU variant that runs: "v4", "v3" or "baseline"."""
        self._check_usable("isa")
        return self._endpoint.isa

    # -- life

    def _make_endpoint(self, prepared: _Prepared, deadline: Deadline) -> Any:
        module, config, layout = self._module, self.config, self._layout
        parts = layout.parts
        control = module.ControlLayout(
            fault_offset=parts["fault"].offset,
            streams_offset=parts["streams"].offset,
            stream_bytes=layout.stream_bytes,
            flags_offset=parts["flags"].offset,
            flags_bytes=layout.flags_bytes,
            num_streams=layout.num_streams,
            num_channels=layout.num_channels,
        )
        self._heap = CpuHeap.create(
            self._group,
            layout.num_bytes,
            init=lambda base: module.init_region(base, control, self.num_ranks, config.start_epoch),
            payload={"protocol": module.PROTOCOL_VERSION, "build": module.BUILD_ID, **config._shared_fields()},
            timeout_s=deadline.for_call(),
        )
        num_spins, num_yields = _backend.wait_budget(self.num_ranks, self._num_cpus)
        return module.Endpoint(
            rank=self.rank,
            bases=self._heap.bases,
            socket_fds=self._heap.socket_fds,
            control=control,
            timeout_ns=math.ceil(prepared.timeout_s * 1e9),
            first_timeout_ns=math.ceil(prepared.first_call_timeout_s * 1e9),
            num_spins=num_spins,
            num_yields=num_yields,
            isa=prepared.isa,
        )

    def close(self) -> None:
        """Gives the memory back. Collective on a healthy workspace: waits, at most timeout_s, until all ranks close.

        May be called again, at interpreter exit, and after the process group is gone. On a faulted workspace it is local
        and does not wait, nor with timeout_s = 0. No call may be in flight.
        """
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        if self._heap is None:
            return
        fault = self._endpoint.fault() if self._endpoint.is_poisoned() else None
        if not self._endpoint.close():
            raise DcpError("close: no call may be in flight (another thread is inside an op of this workspace)")
        heap, self._heap = self._heap, None
        wait = wait and fault is None
        self._fault = fault  # for a thread that comes out of a faulted call only now
        self._plans = {}
        heap.close(timeout_s=self._timeout_s if wait else 0)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        # A rank that leaves by an exception does not wait for the others: they may be inside a call that waits for it.
        # They see its sockets close.
        self._close(wait=exc_type is None)

    # -- health

    def check(self) -> None:
        """Raises what an op would raise now: a fault that was reported, or a rank whose process is gone. Never waits."""
        self._check_usable("check")
        if self._endpoint.is_poisoned():
            raise fault_error("check", self._endpoint.fault())
        lost = self._heap.lost_peers()
        if lost:
            raise lost_error("check", lost)

    def stats(self) -> dict[str, int]:
        """Counters of this rank since the workspace was made.

        num_calls: completed calls, of all ops and lanes.
        nonfinite_lse: LSEs that were not finite although seq_lens called the shard non-empty. The op treats such a shard
            as empty; a count above 0 means that the attention kernel returns no real LSE there.
        """
        self._check_usable("stats")
        counters = [self._endpoint.stream_counters(stream_idx) for stream_idx in range(self._layout.num_streams)]
        return {"num_calls": sum(c[1] for c in counters), "nonfinite_lse": sum(c[2] for c in counters)}

    # -- for the ops

    def _check_usable(self, op: str) -> None:
        if self._heap is None:
            raise DcpError(f"{op}: the workspace must be open (it was closed)")

    def _raise_status(self, op: str, status: int, lane: int) -> NoReturn:
        if status == self._module.STATUS_FAULTED:
            raise fault_error(op, self._fault or self._endpoint.fault())
        if status == self._module.STATUS_BUSY:
            raise DcpError(
                f"{op}: calls on one lane must come one after the other (a call on lane {lane} is in flight)"
            )
        if status == self._module.STATUS_OVERLAP:
            raise DcpInvalidArgument(
                f"{op}: out and lse_out must not share memory with each other or with the inputs (byte ranges overlap)"
            )
        if status == self._module.STATUS_NO_MEMORY:
            raise DcpInvalidArgument(f"{op}: every tensor must have memory of its own (a data pointer is null)")
        if status == self._module.STATUS_CLOSED:
            self._check_usable(op)
        raise DcpError(f"{op}: status must be known (got {status})")

    def _a2a_lse_reduce_plan(self, *, lane: int, **call: Any) -> Any:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        layout, lane_rows = self._layout, self._layout.num_staging_rows
        payload, lse = (layout.parts[f"a2a_lse_reduce.{part}"].offset for part in ("payload", "lse"))
        return self._module.A2aLseReducePlan(
            endpoint=self._endpoint,
            dtype=_check.DTYPE_CODES[self.config.dtype],
            lane=lane,
            stream_idx=layout.stream_idx("a2a_lse_reduce", lane),
            num_local_heads=self.num_local_heads,
            head_dim=self.config.head_dim,
            max_round_rows=layout.max_round_rows,
            payload_offset=payload + lane * lane_rows * layout.row_bytes,
            row_bytes=layout.row_bytes,
            lse_offset=lse + lane * lane_rows * layout.lse_row_bytes,
            lse_row_bytes=layout.lse_row_bytes,
            **call,
        )


@dataclass(frozen=True)
class _Prepared:
    """What one rank can find out on its own."""

    module: Any
    layout: RegionLayout
    isa: str
    timeout_s: float
    first_call_timeout_s: float


def _prepare(device: str | torch.device, config: WorkspaceConfig | None, num_ranks: int) -> _Prepared:
    if not isinstance(config, WorkspaceConfig):
        raise DcpInvalidArgument(f"config must be a WorkspaceConfig (got {type(config).__name__})")
    try:
        device_type = torch.device(device).type
    except (RuntimeError, TypeError):
        raise DcpInvalidArgument(f"device must name a torch device (got {device!r})") from None
    if device_type != "cpu":
        raise DcpUnsupported(f"device must have a built target: cpu (got {str(device)!r})")
    module = _backend.load("cpu")
    if num_ranks > module.MAX_RANKS:
        raise DcpUnsupported(f"a group must have at most {module.MAX_RANKS} ranks (got {num_ranks})")
    isa = config.cpu_isa or env.cpu_isa()
    if isa != "auto" and isa not in module.runnable_variants:
        usable = ", ".join(module.runnable_variants)
        raise DcpUnsupported(f"cpu_isa must be one that this build and processor have: {usable} (got {isa!r})")
    return _Prepared(
        module,
        config.region_layout(num_ranks),
        isa,
        _first_given(env.timeout_s(), config.timeout_s),
        _first_given(env.first_call_timeout_s(), config.first_call_timeout_s),
    )


def _first_given(override: float | None, value: float) -> float:
    return value if override is None else override
