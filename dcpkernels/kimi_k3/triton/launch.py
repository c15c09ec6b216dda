"""A launch as a value: what runs it and what compiles it for an absent GPU see the same arguments. Imports no
triton."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from dcpkernels.errors import DcpInvalidArgument


class Launch(NamedTuple):
    """kernel[grid](*args, **constants, **options)."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors, ints, floats: the run-time parameters, in order
    constants: dict[str, Any]  # the tl.constexpr parameters
    options: dict[str, int]  # num_warps, num_stages

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.constants, **self.options)


def require(op: str, holds: bool, rule: str, given: object) -> None:
    if not holds:
        raise DcpInvalidArgument(f"{op}: {rule} (got {given})")


def require_tensors(
    op: str, tensors: Iterable[tuple[str, Any, tuple[int, ...] | int, tuple[torch.dtype, ...]]]
) -> None:
    """Each entry: name, value, its shape (or number of dims), its allowed dtypes. All on the first one's device."""
    device = None
    for name, value, shape, dtypes in tensors:
        require(op, isinstance(value, torch.Tensor), f"{name} must be a torch.Tensor", type(value).__name__)
        if isinstance(shape, int):
            require(op, value.dim() == shape, f"{name} must have {shape} dims", list(value.shape))
        else:
            require(op, tuple(value.shape) == shape, f"{name} must have shape {list(shape)}", list(value.shape))
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        require(op, value.dtype in dtypes, f"{name} must be {names}", str(value.dtype).removeprefix("torch."))
        device = value.device if device is None else device
        require(op, value.device == device, f"{name} must be on {device}, as the others", value.device)


def require_unit_stride(op: str, **tensors: torch.Tensor) -> None:
    """In the last dim."""
    for name, value in tensors.items():
        if value.numel() > 0 and value.shape[-1] > 1:
            require(op, value.stride(-1) == 1, f"{name} must have stride 1 in its last dim", value.stride(-1))


def require_writable(op: str, **tensors: torch.Tensor) -> None:
    """No two indices of an output may mean one element."""
    for name, value in tensors.items():
        reached = 1  # elements that the dims seen so far span
        for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
            require(op, stride >= reached, f"{name} must not overlap itself", f"strides {value.stride()}")
            reached += stride * (size - 1)
