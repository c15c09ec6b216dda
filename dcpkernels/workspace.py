"""The workspace of a group of ranks: what the ops run on. Making and closing it, and `self_check`, are the only
collective calls besides the ops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from dcpkernels import _backend, _check, env
from dcpkernels._channels import ParallelFor
from dcpkernels._cpu_device import CpuDevice
from dcpkernels._direct import DirectBackend
from dcpkernels.collective import CollectiveBackend
from dcpkernels.config import WorkspaceConfig, WorkspaceSize
from dcpkernels.errors import DcpDeviceError, DcpError, DcpInvalidArgument, DcpMismatch, DcpTimeout, DcpUnsupported
from dcpkernels.heap.group import Deadline, as_group
from dcpkernels.heap.verdict import agree, require_same
from dcpkernels.region_layout import RegionLayout

_log = logging.getLogger("dcpkernels")

BACKENDS = ("auto", "direct", "collective")
_MAX_PLANS = 4096  # shapes remembered; an engine has a few per captured batch size


class Workspace:
    """What the ops of one group of ranks run on: symmetric memory on one host, or torch.distributed.

        with dcpkernels.Workspace(group, config=dcpkernels.WorkspaceConfig(96, 512, 64)) as workspace:
            out = dcpkernels.a2a_lse_reduce(partial_out, partial_lse, workspace=workspace, lse_base="e")

    Making one is collective: all ranks of `group` call it, with equal configurations, and all succeed or all raise the
    same error. `close()` and `self_check()` are collective too; nothing else is. Ranks are ranks inside the group, in
    the group's order.

    Args:
        group: a torch.distributed process group of any backend; None = the default group.
        device: "cpu", or "cuda", "cuda:1", ...: a GPU, of AMD where torch is a ROCm build. Ops then take tensors there,
            enqueue one kernel on the caller's current stream and return; errors of a kernel come at the next call, or
            from `check`.
        config: what it is made for.
        backend: "direct" is symmetric memory; "collective" is torch.distributed (gloo), slower, with equal results, also
            over several hosts; "auto" is direct where all ranks can, else collective on all of them. The log says which
            and why. The same on all ranks.
        parallel_for: with config.num_channels > 1, what runs the channels of a call: `parallel_for(n, body)` calls
            `body(first, end)` for ranges that cover 0 .. n - 1, each once: at the same time in threads that nothing
            else occupies, or in increasing order. It returns when all have returned, and lets an exception of `body`
            through. None: a thread for each channel but the first, of each op and lane, made with the workspace. May differ
            between ranks. Lanes that are used at the same time call it at the same time.

    Attributes: rank, num_ranks, num_local_heads, device, config, backend ("direct" or "collective"), backend_reason (why
    this one, in words), isa, num_bytes.

    Raises (the same on all ranks):
        DcpInvalidArgument: a count is wrong, or heads do not divide by the ranks.
        DcpUnsupported: configurations, builds or `backend` differ; a device without a built target; a cpu_isa that the
            processor lacks; more than 64 ranks; with backend="direct" also ranks on several hosts or of several users.
        DcpError: another step failed; the text names rank and reason. With backend="direct" also no room (with the
            bytes needed and available).
        DcpTimeout, DcpPeerLost: a rank did not come, or died.
    """

    def __init__(
        self,
        group: Any = None,
        device: str | torch.device = "cpu",
        config: WorkspaceConfig | None = None,
        backend: str = "auto",
        *,
        parallel_for: ParallelFor | None = None,
    ) -> None:
        self._impl: DirectBackend | CollectiveBackend | None = None  # first, so that a half-made object can be closed
        self._group = as_group(group)
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        # What is wrong on one rank alone must not leave the others waiting: all learn of it.
        prepared, error = None, None
        try:
            prepared = _prepare(device, config, backend, self.num_ranks)
        except Exception as failure:
            error = failure
        deadline = Deadline(prepared.first_call_timeout_s if prepared else WorkspaceConfig.first_call_timeout_s)
        card = None if prepared is None else (prepared.shared, _backend.affinity())
        cards = agree(self._group, "workspace: check arguments", card, error, timeout_s=deadline.for_call())
        require_same("workspace", [shared for shared, _ in cards])
        self.device, self.config = prepared.device, config
        self._module, self._layout, self._timeout_s = prepared.module, prepared.layout, prepared.timeout_s
        self.num_local_heads = self._layout.num_local_heads
        self._plans: dict[Any, Any] = {}
        # kv_gather, by lane: the checked chunks of the plan used last; the chunk that was started and not waited for.
        self._chunks: dict[int, Any] = {}
        self._started_chunks: dict[int, Any] = {}
        cpus = _backend.num_usable_cpus(cpus for _, cpus in cards)
        self._impl, reason = self._make_backend(backend, prepared, deadline, cpus, parallel_for)
        self.backend, self.backend_reason, self._closed_impl = self._impl.name, reason, self._impl
        _log.info(
            "workspace: target %s (%s), rank %d of %d, backend %s (%s), %.1f MiB per rank, wire %s, multicast %s",
            self.device, self._impl.isa, self.rank, self.num_ranks, self.backend, reason,
            self._impl.num_bytes / 2**20, self._impl.wire, self._impl.multicast,
        )  # fmt: skip

    def _make_backend(
        self, backend: str, prepared: _Prepared, deadline: Deadline, num_cpus: int, parallel_for: ParallelFor | None
    ) -> tuple[DirectBackend | CollectiveBackend, str]:
        """The backend, and why this one."""
        timeouts = {"timeout_s": prepared.timeout_s, "first_call_timeout_s": prepared.first_call_timeout_s}
        common = (self._group, self.config, self._layout, self._module)
        reason = "as asked"
        if backend != "collective":
            try:
                device = prepared.make_device(num_cpus, parallel_for)
                direct = DirectBackend(
                    *common, device, isa=prepared.isa, payload=prepared.shared, deadline=deadline, **timeouts
                )
                return direct, reason if backend == "direct" else device.reach
            except (DcpTimeout, DcpInvalidArgument):
                raise  # a rank that is not there, or a mistake: another backend would not help
            except DcpError as failure:
                # The same on all ranks, so that all come to this line, or none. The collective backend has CPU tensors.
                if backend == "direct" or prepared.device != "cpu":
                    raise
                reason = str(failure)
        collective, error = None, None
        try:
            collective = CollectiveBackend(*common, isa=prepared.isa, deadline=deadline, **timeouts)
        except Exception as failure:
            error = failure
        try:
            agree(self._group, "workspace: connect by torch.distributed", error=error, timeout_s=deadline.for_call())
        except BaseException:
            if collective is not None:
                collective.close(wait=False)
            raise
        return collective, reason

    # -- size

    @staticmethod
    def size(config: WorkspaceConfig, num_ranks: int, device: str | torch.device = "cpu") -> WorkspaceSize:
        """Exact bytes of one rank's region, by part, before anything is allocated. (The collective backend has no
        region: the buffers of the gathers have the same sizes, others grow with the largest call. A GPU's driver rounds
        the sum up, usually to 2 MiB.)

        Raises DcpInvalidArgument where the workspace would.
        """
        if not isinstance(config, WorkspaceConfig):
            raise DcpInvalidArgument(f"workspace: config must be a WorkspaceConfig (got {type(config).__name__})")
        layout = config.region_layout(num_ranks, _torch_device(device, "workspace: ").type)
        parts, shared = (
            {name: part.num_bytes for name, part in parts.items()} for parts in (layout.parts, layout.shared_parts)
        )
        return WorkspaceSize(parts, layout.num_bytes, shared, layout.shared_num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank's workspace holds: its region, or the buffers of the collective backend so far. The region
        that all ranks share is not counted: `Workspace.size` has it."""
        return self._closed_impl.num_bytes

    @property
    def isa(self) -> str:
        """The CPU variant that runs: "v4_bf16", "v4", "v3" or "baseline"."""
        return self._open_impl("isa").isa

    # -- life

    def close(self) -> None:
        """Gives the memory back. Collective on a healthy workspace: waits, at most timeout_s, until all ranks close.

        May be called again, at interpreter exit, and after the process group is gone. On a faulted workspace it is local
        and does not wait, nor with timeout_s = 0, nor with the collective backend. Tensors of `partial_out` stay valid
        memory as long as they are referred to.

        Raises DcpError when a call is in flight (in another thread); the workspace stays open.
        """
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        if self._impl is None:
            return
        try:
            self._impl.close(wait=wait)
        finally:
            if self._impl.closed:  # else a call is in flight; but Ctrl-C may have ended the wait for the peers
                self._impl = None
                self._plans, self._chunks, self._started_chunks = {}, {}, {}

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        # A rank that leaves by an exception does not wait for the others: they may be inside a call that waits for it.
        # They see its sockets close.
        self._close(wait=exc_type is None)

    # -- zero copy

    def partial_out(self, num_tokens: int, *, lane: int = 0) -> torch.Tensor:
        """A tensor [num_tokens, num_heads, head_dim], config.dtype, contiguous, contents undefined, for the attention
        kernel to write its partial output into.

        Pass it, or any view of it with unit last stride, to the lane's next `a2a_lse_reduce` as `partial_out`: with
        config.zero_copy peers read it where it is. There are two buffers a lane: one can be written while peers still
        read the other. The one that was used last is handed out when they have read it (it is still in the cache);
        else, or when the last tensor was not used, the other one. This waits while peers still read that one. Ask for
        one before each call: a tensor serves one call, and one that peers may still read raises DcpInvalidArgument
        there. After the call it may be read, not written.

        Not collective. Without zero_copy, and with the collective backend, it is an ordinary new tensor.

        Raises:
            DcpInvalidArgument: num_tokens is above config.max_num_tokens (pass a tensor of your own, which is copied, in
                rounds), or a wrong lane.
            DcpTimeout, DcpPeerLost: a peer did not read the last call's in time, or is gone. On every rank.
            DcpMismatch, DcpTimeout, DcpPeerLost: an earlier fault of the workspace.
            DcpError: a call is in flight on the lane, or the workspace is closed.
        """
        op = "partial_out"
        impl, config = self._open_impl(op), self.config
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= config.max_num_tokens:
            _check.fail(op, f"num_tokens must be in 0 .. max_num_tokens={config.max_num_tokens}", repr(num_tokens))
        _check.lane(op, lane, config.num_lanes)
        if not config.zero_copy:
            impl.check_fault(op)
            shape = (num_tokens, config.num_heads, config.head_dim)
            return torch.empty(shape, dtype=config.dtype, device=self.device)
        status, tensor = impl.hand_out_partial_out(lane, num_tokens)
        if status != 0:
            self._raise_status(op, status, lane)
        return tensor

    # -- health

    def check(self) -> None:
        """Raises what an op would raise now: a fault that was reported, or a rank whose process is gone. Never waits for
        another rank; on a GPU, not within a graph that is being captured, for a small copy, which may have to wait for a kernel
        whose stream shares a hardware queue with the copy's: that ends at its deadline at the latest.

        The collective backend knows only of faults that this rank has met in a call.
        """
        self._open_impl("check").check("check")

    def stats(self) -> dict[str, int]:
        """Counters of this rank since the workspace was made.

        num_calls: completed calls, of all ops and lanes, those of `self_check` included.
        nonfinite_lse: LSEs that were not finite although seq_lens called the shard non-empty. The op treats such a shard
            as empty; a count above 0 means that the attention kernel returns no real LSE there.
        """
        return self._open_impl("stats").counters()

    def warmup(self) -> None:
        """Local: loads and starts all that a first call would have to. No rank waits for another one.

        On a CPU the memory is there when the workspace is made; this starts the threads of `num_channels`.
        """
        self._open_impl("warmup").warmup()

    def self_check(self) -> None:
        """Collective: runs every op on every lane on known data (at most 3 rows), compares with the reference, and votes
        over the group that the workspace was made with, which must still be there. timeout_s bounds the vote.

        With config.zero_copy it asks for tensors of `partial_out` itself: not between that and its call. Nor while a query
        is open, or a chunk is started or in use.

        Raises, the same on all ranks: DcpError that names rank and lane where a result was wrong; what the op raised.
        """
        from dcpkernels._self_check import check_ops

        self._open_impl("self_check")
        error = None
        try:
            check_ops(self)
        except (DcpTimeout, DcpMismatch):
            raise  # every rank raises it, or will; some may not come to a vote
        except Exception as failure:
            error = failure
        agree(self._group, "self_check", error=error, timeout_s=self._timeout_s)

    # -- for the ops

    def _open_impl(self, op: str) -> Any:
        if self._impl is None:
            raise _closed_error(op)
        return self._impl

    def _raise_status(self, op: str, status: int, lane: int) -> NoReturn:
        module = self._module
        if status == module.STATUS_FAULTED:
            raise self._closed_impl.fault_error(op)
        if status == module.STATUS_BUSY:
            raise DcpError(
                f"{op}: calls on one lane must come one after the other (a call on lane {lane} is in flight)"
            )
        if status == module.STATUS_OVERLAP:
            raise DcpInvalidArgument(
                f"{op}: outputs must not share memory with each other, with the inputs or with tensors that the workspace "
                "handed out, nor inputs with the latter (byte ranges overlap)"
            )
        if status == module.STATUS_NO_MEMORY:
            raise DcpInvalidArgument(f"{op}: every tensor must have memory of its own (a data pointer is null)")
        if status == module.STATUS_STALE_BUFFER:
            raise DcpInvalidArgument(
                f"{op}: partial_out must lie in the tensor that Workspace.partial_out handed out last on this lane, and "
                "which no call has taken yet (given an older or a used one: peers may still read it)"
            )
        if status == module.STATUS_NOT_WAITED:
            self._closed_impl.check_fault(op)  # after one it cannot be waited for
            raise DcpInvalidArgument(f"{op}: the chunk started before on lane {lane} must be waited for first (it was not)")
        if status == module.STATUS_NOT_STARTED:
            self._closed_impl.check_fault(op)  # a fault ended it
            raise DcpInvalidArgument(f"{op}: the chunk must be the one started last on lane {lane} (it is not, or has been waited for)")
        if status == module.STATUS_CHANNELS_MISSING:
            raise DcpError(f"{op}: parallel_for must have run all {self._layout.num_channels} channels when it returns")
        if status == module.STATUS_CLOSED:
            raise _closed_error(op)
        if status == module.STATUS_LAUNCH_FAILED:
            raise DcpDeviceError(
                f"{op}: the device must take the kernel (it refused the launch on {self.device}: "
                f"{module.launch_fault(self.isa)}; a kernel before may have failed: "
                "CUDA_LAUNCH_BLOCKING=1 or AMD_SERIALIZE_KERNEL=3 shows which)"
            )
        raise DcpError(f"{op}: status must be known (got {status})")

    def _keep_plan(self, key: Any, plan: Any) -> Any:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


@dataclass(frozen=True)
class _Prepared:
    """What one rank can find out on its own."""

    device: str
    module: Any
    layout: RegionLayout
    isa: str
    timeout_s: float
    first_call_timeout_s: float
    make_device: Callable[[int, ParallelFor | None], Any]  # (CPUs, parallel_for) -> what DirectBackend runs on
    shared: dict[str, Any]  # must be equal on all ranks


def _prepare(device: str | torch.device, config: WorkspaceConfig | None, backend: str, num_ranks: int) -> _Prepared:
    if not isinstance(config, WorkspaceConfig):
        raise DcpInvalidArgument(f"config must be a WorkspaceConfig (got {type(config).__name__})")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise DcpInvalidArgument(f"backend must be one of {BACKENDS} (got {backend!r})")
    asked = _torch_device(device)
    prepare = {"cpu": _prepare_cpu, "cuda": _prepare_gpu}.get(asked.type)
    if prepare is None:
        raise DcpUnsupported(f"device must have a target: cpu or cuda (got {str(device)!r})")
    target, name, isa, layout, make_device = prepare(asked, config, backend, num_ranks)
    module = _backend.load(target)
    if num_ranks > module.MAX_RANKS:
        raise DcpUnsupported(f"a group must have at most {module.MAX_RANKS} ranks (got {num_ranks})")
    return _Prepared(
        name,
        module,
        layout,
        isa,
        _first_given(env.timeout_s(), config.timeout_s),
        _first_given(env.first_call_timeout_s(), config.first_call_timeout_s),
        make_device,
        {
            "protocol": module.PROTOCOL_VERSION,
            "build": module.BUILD_ID,
            "target": target,
            "backend": backend,
            **config.shared_fields(),
        },
    )


def _torch_device(device: Any, prefix: str = "") -> torch.device:
    try:
        return torch.device(device)
    except Exception:  # of whatever class: there are several
        raise DcpInvalidArgument(f"{prefix}device must name a torch device (got {device!r})") from None


def _prepare_cpu(
    device: torch.device, config: WorkspaceConfig, backend: str, num_ranks: int
) -> tuple[str, str, str, RegionLayout, Callable[[int, ParallelFor | None], Any]]:
    """Target, name of the device, compilation, layout, and what makes the device."""
    module = _backend.load("cpu")
    isa = config.cpu_isa or env.cpu_isa()
    if isa != "auto" and isa not in module.runnable_variants:
        usable = ", ".join(module.runnable_variants)
        raise DcpUnsupported(f"cpu_isa must be one that this build and processor have: {usable} (got {isa!r})")
    layout, read_only_views = config.region_layout(num_ranks), env.read_only_views()

    def make_device(num_cpus: int, parallel_for: ParallelFor | None) -> CpuDevice:
        return CpuDevice(
            config, layout, num_cpus=num_cpus, parallel_for=parallel_for, read_only_views=read_only_views
        )

    return "cpu", "cpu", isa, layout, make_device


def _prepare_gpu(
    device: torch.device, config: WorkspaceConfig, backend: str, num_ranks: int
) -> tuple[str, str, str, RegionLayout, Callable[[int, ParallelFor | None], Any]]:
    """The same of a GPU. A ROCm build of torch calls its devices `cuda` too."""
    target = "cuda" if torch.version.hip is None else "hip"
    for name, is_fine in {
        'backend="collective"': backend != "collective",
        "zero_copy": not config.zero_copy,
    }.items():
        if not is_fine:
            raise DcpUnsupported(f"{name} must come with device cpu (got {str(device)!r})")
    if target == "hip" and config.cuda_heap != "driver":
        raise DcpUnsupported(f"cuda_heap must be 'driver' on AMD GPUs (got {config.cuda_heap!r})")
    if target == "hip" and config.wire == "packet" and config.packet_bytes > 16:
        raise DcpUnsupported(f"packet_bytes must be 8 or 16 on AMD GPUs (got {config.packet_bytes})")
    module = _backend.load(target)
    if not torch.cuda.is_available():
        module.require_device(0)  # says why, unless it is torch that lacks something
        raise DcpUnsupported(
            f"device {str(device)!r} needs a torch that was built for a GPU (got {torch.__version__})"
        )
    if torch.cuda.is_current_stream_capturing():
        raise DcpInvalidArgument("workspace: must be made before a graph is captured (a capture is going on)")
    from dcpkernels._gpu_device import require_room  # it needs much that a CPU does not

    device_class = _device_class(target)

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        module.require_device(index)
    layout = config.region_layout(num_ranks, "cuda")
    require_room(config, layout, index)
    return target, f"cuda:{index}", target, layout, lambda *_: device_class(config, layout, module, index)


def _device_class(target: str) -> Any:
    if target == "hip":
        from dcpkernels._hip_device import HipDevice

        return HipDevice
    from dcpkernels._cuda_device import CudaDevice

    return CudaDevice


def _closed_error(op: str) -> DcpError:
    return DcpError(f"{op}: the workspace must be open (it was closed)")


def _first_given(override: float | None, value: float) -> float:
    return value if override is None else override
