"""User mistakes, found before anything is written. Text: `op: what must hold (what was given)`."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported

if TYPE_CHECKING:
    from dcpkernels.kv_gather_plan import KVGatherPlan

# csrc/core/types.h: DType and LseBase.
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# What a gather can move: bytes, but the name of the type must be the same on all ranks.
GATHER_DTYPE_CODES = {
    **DTYPE_CODES,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.float8_e4m3fnuz: 5,
    torch.float8_e5m2fnuz: 6,
}
# What a query is quantised to, and a chunk dequantised from.
SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
MAX_QUERY_PARTS = 4  # csrc/ops/query_gather.h
KV_ROW_ALIGNMENT = 16  # bytes; of a multicast store
LSE_BASE_CODES = {"e": 0, "2": 1}


class Chunk(NamedTuple):
    """A chunk of a plan, as it is gathered from a cache that has been checked."""

    plan: KVGatherPlan
    index: int
    shape: tuple[int, int]  # of the result
    dtype: torch.dtype  # of the cache
    digest: int  # of all that must be equal on all ranks


def fail(op: str, rule: str, given: Any) -> NoReturn:
    raise DcpInvalidArgument(f"{op}: {rule} (got {given})")


def open_impl(op: str, workspace: Any) -> Any:
    """The backend of a Workspace, which must be open."""
    if not hasattr(workspace, "_open_impl"):
        fail(op, "workspace must be a dcpkernels.Workspace", type(workspace).__name__)
    return workspace._open_impl(op)


def has_part(op: str, has: bool, field: str) -> None:
    if not has:
        raise DcpUnsupported(f"{op}: the workspace must have been made with {field} (got 0)")


def signature(value: torch.Tensor) -> tuple[Any, ...]:
    """Everything of a tensor that a check looks at: a call whose like has been checked goes straight to C++. The bytes of
    the storage, because it may be freed or made smaller under a tensor, which stays as it was; of a tensor that begins
    further on, whether it ends in there. No strides where the shape says what they are: torch takes longest for these.
    Raises anything for what is no such tensor."""
    storage_bytes = len(value.untyped_storage())
    # Not True and False: True is equal to the one byte of another storage.
    room = storage_bytes if value.storage_offset() == 0 else "ends" if end_in_storage(value) <= storage_bytes else "cut"
    if value.is_contiguous():
        return value.shape, value.dtype, value.device, value.is_neg(), room
    return value.shape, value.dtype, value.device, value.is_neg(), room, value.stride()


def end_in_storage(value: torch.Tensor) -> int:
    """Bytes from the start of its storage to the end of its last element; of a tensor of no elements, 0."""
    if value.is_contiguous():
        num_elements = value.numel()
    else:
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (value.storage_offset() + num_elements) * value.itemsize if value.numel() > 0 else 0


def scale(op: str, value: Any, device: str) -> None:
    if isinstance(value, torch.Tensor):
        tensor(op, "scale", value, device=device)
        dtype(op, "scale", value, (torch.float32,))
        if value.numel() != 1:
            fail(op, "scale must have one element", list(value.shape))
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_positive_fp32(value):
        fail(op, "scale must be a positive number (in fp32) or an fp32 tensor of one element", repr(value))


def _is_positive_fp32(value: float) -> bool:
    try:
        return 0 < ctypes.c_float(value).value < math.inf
    except OverflowError:  # an int that no float holds
        return False


def flag(op: str, name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except Exception:  # an array of several elements
        fail(op, f"{name} must be True or False", type(value).__name__)


def lane(op: str, value: Any, num_lanes: int) -> None:
    if not isinstance(value, int) or not 0 <= value < num_lanes:
        fail(op, f"lane must be in 0 .. {num_lanes - 1} (num_lanes={num_lanes})", repr(value))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: Any, *, device: str) -> None:
    if not isinstance(value, torch.Tensor):
        fail(op, f"{name} must be a torch.Tensor", type(value).__name__)
    if value.layout is not torch.strided or value.is_nested:
        fail(op, f"{name} must be a strided tensor", "a nested tensor" if value.is_nested else value.layout)
    if value.is_neg():  # torch negates on read what the memory holds; a kernel would see the other sign
        fail(op, f"{name} must hold its values as they are", "a lazily negated view: pass resolve_neg()")
    place = value.device
    if place.type != device and f"{place.type}:{place.index}" != device:
        fail(op, f"{name} must be on the workspace's device {device!r}", repr(str(value.device)))
    has_memory(op, name, value)


def shape(op: str, name: str, value: torch.Tensor, dims: str, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        fail(op, f"{name} must have shape {dims} = {list(expected)}", list(value.shape))


def dtype(op: str, name: str, value: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if value.dtype not in allowed:
        fail(op, f"{name} must be {' or '.join(name_of(a) for a in allowed)}", name_of(value.dtype))


def last_stride(op: str, name: str, value: torch.Tensor) -> None:
    if value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        fail(op, f"{name} must have stride 1 in its last dim", value.stride(-1))


def byte_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Of a dim of one element: 0. There a stride may be any number, and times the size of an element too large for one."""
    size = value.element_size()
    return tuple(stride * size if length > 1 else 0 for stride, length in zip(value.stride(), value.shape))


def has_memory(op: str, name: str, value: torch.Tensor) -> None:
    """Tensors whose storage was freed or made smaller, wrapper subclasses, and what stands for a tensor while code is
    traced have none of their own, or not all."""
    try:
        address, storage_bytes = value.data_ptr(), value.untyped_storage().nbytes()
    except Exception as error:  # of whatever class that subclass raises
        fail(op, f"{name} must have memory of its own", f"{type(value).__name__}: {type(error).__name__}")
    if value.numel() == 0:
        return
    end = end_in_storage(value)
    # A view into freed storage has an address: its offset.
    if address == 0 or end > storage_bytes:
        given = (
            "a null data pointer" if address == 0 else f"a storage of {storage_bytes} bytes, of which it needs {end}"
        )
        fail(op, f"{name} must have memory of its own", given)


def apart(op: str, scale: torch.Tensor, out: torch.Tensor | None) -> None:
    """A scale that is read during the call must not lie where the call writes."""
    if out is None or out.numel() == 0:
        return
    first, place = out.data_ptr(), scale.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True))
    if first - scale.element_size() < place < first + (last + 1) * out.element_size():
        fail(op, "outputs must not share memory with the inputs", "scale lies in out")


def new_empty(op: str, name: str, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A result, made as argument `name` is. Its rows may have no memory of their own (stride 0): then there can be more of
    them than a result can hold."""
    try:
        return like.new_empty(shape, dtype=dtype)
    except torch.OutOfMemoryError:  # of a GPU: engines catch this one
        raise
    except RuntimeError as error:
        has_memory(op, name, like)  # a wrapper subclass need not know how to make another one
        raise DcpError(
            f"{op}: there must be memory for a result {list(shape)} of {name_of(dtype)} ({error})"
        ) from error


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
