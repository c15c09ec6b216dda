"""What breaks an argument: things of every other kind, and for a tensor all that can be wrong with one. `broken(value, ...)`
gives something that may be wrong, or happens to be right."""

from __future__ import annotations

import decimal
import fractions
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

INT_EDGES = [0, 1, -1, 2, 3, 7, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64]
INT_EDGES += [-(2**31), -(2**63), -(2**63) - 1, 10**30]
FLOATS = [0.0, -0.0, 1.0, 1.5, -2.5, 1e-46, 1e39, 1e300, math.inf, -math.inf, math.nan]
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


class Subclass(torch.Tensor):
    """Of torch.Tensor, with memory."""


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantisation and distribution libraries have them."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"this wrapper has no {function}")


class HashRaises:
    def __hash__(self) -> int:
        raise ValueError("no hash")


def _generator():
    yield torch.zeros(1)


JUNK: list[Callable[[], Any]] = [
    *[
        lambda value=value: value
        for value in (None, True, False, "", "e", "2", "cpu", "cuda:0", "meta", "auto", "\ud800")
    ],
    *[lambda value=value: value for value in INT_EDGES],
    *[lambda value=value: value for value in FLOATS],
    *[
        lambda value=value: value
        for value in (1j, b"e", b"", (), Ellipsis, NotImplemented, slice(1), range(3), int, object)
    ],
    *[lambda kind=kind: kind(1) for kind in (np.int8, np.int32, np.int64, np.uint64, np.float32, np.float64, np.bool_)],
    *[list, dict, set, object, _generator, HashRaises, lambda: len, lambda: lambda: 0, lambda: iter([])],
    *[lambda: [1, 2], lambda: (0.5, "x"), lambda: {"a": 1}, lambda: {0, 1}, lambda: [None], lambda: [[1], [2, 3]]],
    *[lambda: decimal.Decimal("1.5"), lambda: fractions.Fraction(1, 3), lambda: "0", lambda: memoryview(b"1234")],
    *[
        lambda: np.zeros((3, 4, 16), np.float32),
        lambda: np.array(["e", "2"]),
        lambda: np.array(2),
        lambda: np.array([]),
    ],
    *[lambda: np.ma.masked, lambda: np.datetime64("2020-01-01"), lambda: np.array([2**63], np.uint64)],
    *[lambda: torch.float32, lambda: torch.device("cpu"), lambda: torch.Size([1]), lambda: torch.strided],
    *[lambda: torch.tensor(1), lambda: torch.zeros(()), lambda: torch.zeros(0), lambda: torch.zeros(3, 4, 16)],
    lambda: torch.tensor([0, 1, 2], dtype=torch.int32),
]


def junk(dice: random.Random) -> Any:
    return dice.choice(JUNK)()


def _freed(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """Its storage was given back, or is smaller now; it began at the storage's start or farther on."""
    memory = torch.zeros(t.numel() + 64, dtype=torch.float32).view(torch.uint8)[: (t.numel() + 8) * 4].view(torch.uint8)
    tensor = memory.view(t.dtype) if t.dtype.itemsize <= 4 else memory
    tensor = tensor[dice.choice([0, 4]) :][: t.numel()].view(t.shape)
    size = dice.choice([0, 0, 1, max(0, tensor.untyped_storage().nbytes() // 8)])
    tensor.untyped_storage().resize_(size)
    return tensor


def _strides(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """Any strides at all, over as much memory as they need."""
    strides = [dice.choice([0, 1, 2, 3, 7, *t.stride(), 64]) for _ in t.shape]
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True) if size > 0)
    memory = torch.zeros(max(1, span) + 3, dtype=t.dtype)
    return memory.as_strided(t.shape, strides, dice.choice([0, 1, 3]))


def _expanded(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """Far too many rows, of which none has memory of its own."""
    return t[:1].expand(dice.choice([2**31, 2**32 - 1, 2**32, 2**33, 2**45]), *t.shape[1:])


def _huge_and_empty(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """No elements, and sizes whose product no 64 bits hold."""
    sizes = [dice.choice([2**31, 2**32, 2**40, 2**62, *t.shape]) for _ in t.shape]
    sizes[dice.randrange(len(sizes))] = 0
    return torch.empty(0, dtype=t.dtype).as_strided(sizes, [1] * len(sizes))


def _values(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    c = t.clone()
    if c.dtype.is_floating_point and c.dtype.itemsize > 1:
        return c.fill_(dice.choice(FLOATS[:6] + FLOATS[-3:]))
    if c.dtype == torch.int32:
        return c.fill_(dice.choice([-1, -(2**31), 2**31 - 1, 0, 5])) if dice.random() < 0.5 else c.flip(0)
    return c.view(torch.uint8).fill_(0xFF).view(c.dtype)


def _quantised(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def _fake(t: torch.Tensor, dice: random.Random) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(t.shape, dtype=t.dtype)


TENSORS: list[Callable[[torch.Tensor, random.Random], Any]] = [
    lambda t, dice: t.to(dice.choice(DTYPES)),
    lambda t, dice: t.view(dice.choice([torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])),
    lambda t, dice: t[None],
    lambda t, dice: t[..., None],
    lambda t, dice: t.flatten(),
    lambda t, dice: t.reshape(-1)[0],
    lambda t, dice: t[:0],
    lambda t, dice: t[1:],
    lambda t, dice: t[..., :-1],
    lambda t, dice: t[..., 1:],
    lambda t, dice: t[0],
    lambda t, dice: torch.cat([t, t], dice.randrange(t.dim())),
    lambda t, dice: t.permute(*dice.sample(range(t.dim()), t.dim())),
    lambda t, dice: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t, dice: torch.stack([t, t], -1)[..., 0],
    lambda t, dice: t[:1].expand(t.shape),
    lambda t, dice: t[..., :1].expand(t.shape),
    lambda t, dice: t.to("meta"),
    lambda t, dice: t.to_sparse(),
    lambda t, dice: t.reshape(t.shape[0], -1).to_sparse_csr(),
    lambda t, dice: t.float().to_mkldnn(),
    lambda t, dice: torch.nested.nested_tensor([*t]),
    lambda t, dice: torch.nested.nested_tensor([*t], layout=torch.jagged),
    lambda t, dice: torch._neg_view(t),
    lambda t, dice: t.to(torch.complex64).conj(),
    lambda t, dice: t.to(torch.complex64).conj().imag,  # lazily negated
    lambda t, dice: t.clone().requires_grad_(),
    lambda t, dice: t.clone().requires_grad_() * 1,
    lambda t, dice: torch.nn.Parameter(t.clone(), requires_grad=t.dtype.is_floating_point),
    lambda t, dice: t.as_subclass(Subclass),
    lambda t, dice: Wrapper(t),
    lambda t, dice: torch._to_functional_tensor(t),
    lambda t, dice: t.numpy(),
    lambda t, dice: t.tolist(),
    lambda t, dice: [t],
    lambda t, dice: (t, t),
    *[_fake, _quantised, _values, _values, _strides, _strides, _freed, _freed, _expanded, _huge_and_empty],
]


def broken_tensor(t: torch.Tensor, others: list[torch.Tensor], dice: random.Random) -> Any:
    """`others`: memory that the call may not share, of its other arguments and of the workspace."""
    for _ in range(20):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if others and dice.random() < 0.12:
                    return _alias(t, dice.choice(others), dice)
                return dice.choice(TENSORS)(t, dice)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError):
            continue  # torch itself does not make this one
    return None


def _alias(t: torch.Tensor, other: torch.Tensor, dice: random.Random) -> torch.Tensor:
    """As `t` is, in the memory of another tensor, from its start or from any byte that `t` may begin at."""
    memory = other
    if other.dtype is not torch.uint8:  # all of what lies under it; the workspace's memory is given as bytes
        memory = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
    room, size = len(memory) - t.numel() * t.dtype.itemsize, t.dtype.itemsize
    if room < 0:
        raise ValueError("too small")
    first = dice.choice([0, room // size * size, dice.randint(0, room // size) * size])
    return memory[first : first + t.numel() * size].view(t.dtype).view(t.shape)


def broken_value(value: Any, others: list[torch.Tensor], dice: random.Random) -> Any:
    if isinstance(value, torch.Tensor) and dice.random() < 0.85:
        return broken_tensor(value, others, dice)
    if isinstance(value, (tuple, list)) and value and dice.random() < 0.8:
        parts = list(value)
        choice = dice.random()
        if choice < 0.5:
            at = dice.randrange(len(parts))
            parts[at] = broken_value(parts[at], others, dice)
        elif choice < 0.7:
            parts = parts[: dice.randrange(len(parts))]
        else:
            parts += [dice.choice(parts)] * dice.randint(1, 4)
        return parts if dice.random() < 0.5 else tuple(parts)
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.4:
        return value + dice.choice([-1, 1, -(2**32), 2**32, 2**31, 1000])
    return junk(dice)
