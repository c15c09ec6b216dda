"""The ways in which a2a_lse_reduce can be told to move payload, and tensors as engines lay them out. All ways give the
same bits for all layouts; what goes over these tables says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.testing import Guarded
from tests.a2a_calls import Call, config_for


@dataclass(frozen=True)
class Way:
    """`fields` of WorkspaceConfig; with `hands_out` the partial output lies in a tensor of Workspace.partial_out."""

    fields: dict[str, Any] = field(default_factory=dict)
    backend: str = "direct"
    hands_out: bool = False

    def open(self, group: Any, config: WorkspaceConfig) -> Workspace:
        return Workspace(group, config=config, backend=self.backend)

    def config(self, call: Call, **fields: Any) -> WorkspaceConfig:
        return config_for(call, **self.fields | fields)


WAYS = {
    "bulk": Way(),
    "bulk, 2 channels": Way({"num_channels": 2}),
    "bulk, 3 channels": Way({"num_channels": 3}),
    "packets of 8": Way({"wire": "packet", "packet_bytes": 8}),
    "packets of 16": Way({"wire": "packet", "packet_bytes": 16}),
    "packets of 128": Way({"wire": "packet", "packet_bytes": 128}),
    "packets of 16, 2 channels": Way({"wire": "packet", "packet_bytes": 16, "num_channels": 2}),
    "zero copy": Way({"zero_copy": True}, hands_out=True),
    "zero copy, 3 channels": Way({"zero_copy": True, "num_channels": 3}, hands_out=True),
    "zero copy of ordinary tensors": Way({"zero_copy": True}),
    "zero copy of ordinary tensors, 2 channels": Way({"zero_copy": True, "num_channels": 2}),
    "collective": Way(backend="collective"),
}


@dataclass(frozen=True)
class Layout:
    """Strides of all dims but a last one of stride 1, and where the first element is, in elements. With `repeats`, some
    elements are at the same address."""

    strides: Callable[..., tuple[int, ...]]
    offset: Callable[..., int] = lambda *shape: 0
    repeats: bool = False


PAYLOADS = {
    "contiguous": Layout(lambda t, h, d: (h * d, d)),
    "head-major": Layout(lambda t, h, d: (d, t * d)),
    "head-major, rows 4 .. of a larger capacity": Layout(lambda t, h, d: (d, (t + 9) * d), lambda t, h, d: 4 * d),
    "[T, H, 3, D][:, :, 1]": Layout(lambda t, h, d: (h * 3 * d, 3 * d), lambda t, h, d: d),
    "[T, 3, H, D][:, 1]": Layout(lambda t, h, d: (3 * h * d, d), lambda t, h, d: h * d),
    "rows 3 .. of a larger capacity": Layout(lambda t, h, d: (h * d, d), lambda t, h, d: 3 * h * d),
    "padded tokens": Layout(lambda t, h, d: (h * d + 64, d)),
    "tokens an odd pitch apart": Layout(lambda t, h, d: (h * d + 1, d)),
    "padded heads": Layout(lambda t, h, d: (h * (d + 16), d + 16)),
    "padded heads, all odd": Layout(lambda t, h, d: (h * (d + 3) + 5, d + 3), lambda t, h, d: 1),
    "contiguous from an odd element": Layout(lambda t, h, d: (h * d, d), lambda t, h, d: 1),
    "one row for all heads": Layout(lambda t, h, d: (d, 0), lambda t, h, d: 3, repeats=True),
    "one token for all": Layout(lambda t, h, d: (0, d), repeats=True),
    "rows that overlap": Layout(lambda t, h, d: (1, 2), repeats=True),
}
LSES = {
    "contiguous": Layout(lambda t, h: (h, 1)),
    "transposed": Layout(lambda t, h: (1, t)),
    "transposed, rows 4 .. of a larger capacity": Layout(lambda t, h: (1, t + 9), lambda t, h: 4),
    "padded, from an odd element": Layout(lambda t, h: (h + 5, 1), lambda t, h: 1),
    "every third": Layout(lambda t, h: (3 * h, 3)),
    "one for all heads": Layout(lambda t, h: (1, 0), repeats=True),
    "one for all tokens": Layout(lambda t, h: (0, 1), repeats=True),
    "one for all": Layout(lambda t, h: (0, 0), repeats=True),
}
OUTS = [layout for layout in PAYLOADS.values() if not layout.repeats]
LSES_OUT = [layout for layout in LSES.values() if not layout.repeats]


def strides_of(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    return layout.strides(*shape) + ((1,) if len(shape) == 3 else ())


def num_elements(layout: Layout, shape: tuple[int, ...]) -> int:
    """Of the memory that a tensor of this layout lies in, from the start."""
    if 0 in shape:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(shape, strides_of(layout, shape), strict=True))
    return layout.offset(*shape) + last + 1


def lay_in(memory: torch.Tensor, layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """The values in this layout inside `memory`, a flat tensor, and NaN in all of it that the layout leaves out. Where
    elements repeat, the first (or in overlapping rows the last) values stand for all."""
    shape = tuple(values.shape)
    memory.fill_(float("nan"))
    if 0 in shape:
        return memory[:0].view(shape)
    strides = strides_of(layout, shape)
    tensor = memory.as_strided(shape, strides, memory.storage_offset() + layout.offset(*shape))
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    tensor[distinct].copy_(values[distinct])
    return tensor


def lay_out(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """`lay_in` memory of its own, aligned to 64 bytes, with NaN before and behind."""
    span = num_elements(layout, tuple(values.shape))
    memory = torch.full((span + 256,), float("nan"), dtype=values.dtype)
    return lay_in(memory[128 : 128 + span], layout, values)


def guarded_output(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
    """An output in this layout with watched bytes before, between and behind."""
    offset = layout.offset(*shape) if 0 not in shape else 0
    return Guarded(shape, dtype, strides=strides_of(layout, shape), offset=offset)
