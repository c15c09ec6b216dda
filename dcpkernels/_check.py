"""User mistakes, found before anything is written. Text: `op: what must hold (what was given)`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dcpkernels.errors import DcpInvalidArgument

# csrc/core/types.h: DType and LseBase.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LSE_BASE_CODES = {"e": 0, "2": 1}


def fail(op: str, rule: str, given: Any) -> NoReturn:
    raise DcpInvalidArgument(f"{op}: {rule} (got {given})")


def lane(op: str, value: Any, num_lanes: int) -> None:
    if not isinstance(value, int) or not 0 <= value < num_lanes:
        fail(op, f"lane must be in 0 .. {num_lanes - 1} (num_lanes={num_lanes})", repr(value))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: Any, *, device: str) -> None:
    if not isinstance(value, torch.Tensor):
        fail(op, f"{name} must be a torch.Tensor", type(value).__name__)
    if value.layout is not torch.strided:
        fail(op, f"{name} must be a strided tensor", value.layout)
    if value.is_neg():  # torch negates on read what the memory holds; a kernel would see the other sign
        fail(op, f"{name} must hold its values as they are", "a lazily negated view: pass resolve_neg()")
    if value.device.type != device:
        fail(op, f"{name} must be on the workspace's device {device!r}", repr(str(value.device)))


def shape(op: str, name: str, value: torch.Tensor, dims: str, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        fail(op, f"{name} must have shape {dims} = {list(expected)}", list(value.shape))


def dtype(op: str, name: str, value: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if value.dtype not in allowed:
        fail(op, f"{name} must be {' or '.join(name_of(a) for a in allowed)}", name_of(value.dtype))


def last_stride(op: str, name: str, value: torch.Tensor) -> None:
    if value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        fail(op, f"{name} must have stride 1 in its last dim", value.stride(-1))


def writable(op: str, name: str, value: torch.Tensor) -> None:
    """No two indices of an output may mean one element."""
    reached = 1  # elements that the dims seen so far span
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape) if size > 1):
        if stride < reached:
            fail(
                op,
                f"{name} must not overlap itself",
                f"strides {value.stride()} for shape {list(value.shape)}",
            )
        reached = stride * (size - 1) + reached
