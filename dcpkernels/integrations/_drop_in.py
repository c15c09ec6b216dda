"""What the modules that carry other libraries' names have in common: their arguments, checked in their words, become
those of a `dcpkernels.Workspace` and of `dcpkernels.a2a_lse_reduce`. No state of the module's own: all of it is in the
objects that callers hold."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import dcpkernels
from dcpkernels.errors import DcpInvalidArgument

MAX_RANKS = 64  # of a group


def fail(op: str, rule: str, given: Any) -> NoReturn:
    raise DcpInvalidArgument(f"{op}: {rule} (got {given})")


def require_counts(op: str, **counts: Any) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            fail(op, f"{name} must be a whole number >= 1", repr(value))


def require_tensor(op: str, name: str, value: Any, dims: str | None = None) -> None:
    """A tensor, with as many dims as `dims` names; their sizes are the op's to check."""
    if not isinstance(value, torch.Tensor):
        fail(op, f"{name} must be a torch.Tensor", type(value).__name__)
    if value.layout is not torch.strided or value.is_nested:  # has no view that could be looked for
        fail(op, f"{name} must be a strided tensor", "a nested tensor" if value.is_nested else value.layout)
    if dims is not None and value.dim() != dims.count(",") + 1:
        fail(op, f"{name} must have shape {dims}", list(value.shape))


def lse_base(op: str, is_lse_base_on_e: Any) -> str:
    # Not by its truth: "2" and "basee" are true both, and a wrong base shows nowhere but in the answer.
    if is_lse_base_on_e is not True and is_lse_base_on_e is not False:
        fail(op, "is_lse_base_on_e must be True or False", repr(is_lse_base_on_e))
    return "e" if is_lse_base_on_e else "2"


def default_device() -> str:
    """The present GPU, which is all that these libraries know; a CPU where there is none."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def process_group(group: Any) -> Any:
    """A group that was given by its name, or inside an engine's own object for one, of which the one for CPU tensors is
    taken: making a workspace exchanges objects."""
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    inner = getattr(group, "cpu_group", None)
    return group if inner is None else inner


def make_config(
    op: str,
    num_heads: int,
    head_dim: int,
    max_num_tokens: int,
    dtype: torch.dtype,
    fields: dict[str, Any],
    **fixed: Any,
) -> dcpkernels.WorkspaceConfig:
    try:
        return dcpkernels.WorkspaceConfig(num_heads, head_dim, max_num_tokens, dtype, **fixed, **fields)
    except TypeError as error:  # of Python: a name that is none, or that the arguments have decided
        raise DcpInvalidArgument(
            f"{op}: other keywords must be fields of WorkspaceConfig that are left open ({error})"
        ) from None


def make_workspace(
    group: Any, device: Any, config: dcpkernels.WorkspaceConfig, backend: str
) -> dcpkernels.Workspace:
    """Collective."""
    device = default_device() if device is None else device
    return dcpkernels.Workspace(process_group(group), device, config, backend)


def region_bytes(config: dcpkernels.WorkspaceConfig, num_ranks: int, device: Any) -> int:
    size = dcpkernels.Workspace.size(config, num_ranks, default_device() if device is None else device)
    return size.total + size.shared_total


class Slots:
    """A workspace with an output for each of its lanes, into which a call goes that brings none: so that it allocates
    nothing, and returns the same address every time. Valid until the next call of that slot.

    Attributes: workspace, output [slots, T, H/W, D], lse [slots, T, H/W].
    """

    def __init__(self, group: Any, device: Any, config: dcpkernels.WorkspaceConfig, backend: str) -> None:
        self.workspace = make_workspace(group, device, config, backend)
        shape = (config.num_lanes, config.max_num_tokens, self.workspace.num_local_heads)
        # Compiled or inference code may write into what it is given only if this was made outside of inference mode.
        with torch.inference_mode(False):
            self.output = torch.empty(*shape, config.head_dim, dtype=config.dtype, device=self.workspace.device)
            self.lse = torch.empty(shape, dtype=torch.float32, device=self.workspace.device)

    def merge(
        self,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        slot: int,
        base: str,
        out: torch.Tensor | None,
        lse_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = partial_out.shape[0]
        if num_tokens <= self.workspace.config.max_num_tokens:  # else tensors of the call's own
            out = self.output[slot, :num_tokens] if out is None else out
            lse_out = self.lse[slot, :num_tokens] if lse_out is None else lse_out
        return dcpkernels.a2a_lse_reduce(
            partial_out,
            partial_lse,
            workspace=self.workspace,
            lse_base=base,
            out=out,
            lse_out=lse_out,
            return_lse=True,
            lane=slot,
        )

    def require_slot(self, op: str, name: str, slot: Any) -> None:
        num_slots = self.workspace.config.num_lanes
        if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < num_slots:
            fail(op, f"{name} must be in 0 .. {num_slots - 1}", repr(slot))
