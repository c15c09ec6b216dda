"""What one call really stores into a peer's region: bytes counted in memory, not a formula."""

from __future__ import annotations

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.testing import run_ranks
from tests.a2a_calls import assemble, config_for, make_call, meet, merge, same_bits

WIRES = {
    "bulk": {},
    "packets of 8": {"wire": "packet", "packet_bytes": 8},
    "packets of 16": {"wire": "packet", "packet_bytes": 16},
    "packets of 128": {"wire": "packet", "packet_bytes": 128},
}


def staging_of(workspace: Workspace) -> torch.Tensor:
    """The part of this rank's region that peers store rows into."""
    part = workspace._layout.parts["a2a_lse_reduce.staging"]
    return torch.frombuffer(workspace._impl._heap.own_memory(part.offset, part.num_bytes), dtype=torch.uint8)


def stored_bytes(num_ranks, num_tokens, num_heads, head_dim, dtype, **fields):
    """[owner][source] of one call, and what the call returned. A byte was stored when it is another one than before;
    the call is made twice, over two fillings, so that no byte can be the same by chance."""
    call = make_call(num_ranks, num_tokens, num_heads, head_dim, dtype, kind="spread")
    config = config_for(call, **fields)

    def body(group):
        stored = None
        for filling in (0xA5, 0x5A):
            with Workspace(group, config=config) as workspace:
                staging = staging_of(workspace)
                staging.fill_(filling)
                meet(group)
                result = merge(workspace, call)
                meet(group)  # every peer has stored all that it stores in this call
                changed = staging != filling
                stored = changed if stored is None else stored | changed
        slots = stored.view(2, num_ranks - 1, -1).sum(dim=(0, 2)).tolist()
        slots.insert(group.rank, 0)
        return slots, result

    ranks = run_ranks(body, num_ranks)
    return [slots for slots, _ in ranks], assemble([[result] for _, result in ranks])[0]


@pytest.mark.parametrize(
    ("wire", "num_bytes", "ratio"),
    [
        ("bulk", 12336, 1.0),
        ("packets of 128", 103 * 128, 1.07),
        ("packets of 16", 1028 * 16, 1.34),
        ("packets of 8", 3084 * 8, 2.0),
    ],
)
def test_a_row_of_kimi_k3(wire, num_bytes, ratio):
    """96 heads of 512 in bf16 on 8 ranks: a row is 12 * (1024 + 4) = 12336 bytes for each peer."""
    stored, got = stored_bytes(8, 1, 96, 512, torch.bfloat16, **WIRES[wire])
    assert stored == [[0 if source == owner else num_bytes for source in range(8)] for owner in range(8)]
    assert num_bytes <= ratio * 12336
    size = Workspace.size(WorkspaceConfig(96, 512, 1, **WIRES[wire]), 8).parts["a2a_lse_reduce.staging"]
    assert size == 2 * 7 * -(-num_bytes // 64) * 64
    _, bulk = stored_bytes(8, 1, 96, 512, torch.bfloat16)
    assert all(same_bits(a, b) for a, b in zip(got, bulk, strict=True))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [(15, 40, torch.bfloat16), (6, 7, torch.float16), (3, 1, torch.bfloat16), (12, 30, torch.float32), (6, 28, torch.float32),
     (6, 56, torch.bfloat16), (9, 128, torch.float16)],
)  # fmt: skip
def test_rows_end_where_the_layout_says(wire, num_heads, head_dim, dtype):
    """Two rows, in which payload, or the LSEs, end anywhere in a packet: each is stored whole, and nothing behind it."""
    stored, _ = stored_bytes(3, 2, num_heads, head_dim, dtype, **WIRES[wire])
    heads = num_heads // 3
    payload = heads * head_dim * dtype.itemsize
    num_bytes = payload + 4 * heads
    if packet_bytes := WIRES[wire].get("packet_bytes"):
        carried = packet_bytes - (8 if packet_bytes == 128 else 4)
        num_bytes = -(-(-(-payload // 16) * 16 + 4 * heads) // carried) * packet_bytes
    assert stored == [[0 if source == owner else 2 * num_bytes for source in range(3)] for owner in range(3)]
