"""The split form's credit: a consumer that is slow with a chunk still reads that chunk, however far its peers are ahead. And
the same without the credit, which goes wrong: the test can tell."""

from __future__ import annotations

import struct
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, kv_gather_start, kv_gather_wait
from dcpkernels.region_layout import STREAM_BYTES
from dcpkernels.testing import run_ranks
from tests.a2a_calls import meet, same_bits
from tests.gather_calls import Context

CHANNEL_STATE = struct.Struct("=8Q")  # csrc/core/types.h: ChannelState
BUFFER_EPOCHS = slice(3, 5)  # in_flight, num_rounds, store_hint, buffer_epochs[2]
ROWS = 64
WAYS = pytest.mark.parametrize("fields", [{}, {"multicast": False}, {"num_channels": 3}], ids=str)


def take_away_the_credit(workspace) -> None:
    """The rank forgets who was to read its two buffers, and so waits for nobody's release."""
    impl = workspace._impl
    layout = impl._layout
    first = layout.parts["streams"].offset + layout.stream_idx("kv_gather", 0) * layout.stream_bytes + STREAM_BYTES
    for channel in range(layout.num_channels):
        memory = impl._heap.own_memory(first + channel * CHANNEL_STATE.size, CHANNEL_STATE.size)
        state = list(CHANNEL_STATE.unpack_from(memory))
        state[BUFFER_EPOCHS] = 0, 0
        CHANNEL_STATE.pack_into(memory, 0, *state)


def slow_consumer(group, fields, credit):
    """Rank 0 sleeps 50 ms on each chunk before it looks at it; its peers start the two chunks behind it as soon as they may.
    Returns whether every chunk was what it had to be."""
    config = WorkspaceConfig(6, 8, 4, kv_chunk_rows=ROWS, kv_dim=64, timeout_s=20, first_call_timeout_s=20, **fields)
    with Workspace(group, config=config, backend="direct") as workspace:
        context = Context((3 * ROWS,), workspace.num_ranks, 64, torch.bfloat16, interleave=2)
        plan, cache = context.plan(workspace.rank, ROWS), context.caches[workspace.rank]
        right = True

        def start(chunk_idx):
            if not credit:
                take_away_the_credit(workspace)
            kv_gather_start(cache, plan, chunk_idx, workspace=workspace)

        start(0)
        for i in range(plan.num_chunks):
            chunk = kv_gather_wait(plan, i, workspace=workspace)
            if i + 1 < plan.num_chunks:
                start(i + 1)
            if workspace.rank == 0 and i == 0:
                time.sleep(0.05)
            right &= same_bits(chunk, context.chunk(ROWS, i))
        meet(group)
        return right


@WAYS
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_slow_consumer_reads_its_chunk(num_ranks, mode, fields):
    assert run_ranks(slow_consumer, num_ranks, fields, True, mode=mode) == [True] * num_ranks


@WAYS
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_without_the_credit_it_does_not(num_ranks, mode, fields):
    """Once in a few tries, that is: a peer may come too late to do harm."""
    assert any(not run_ranks(slow_consumer, num_ranks, fields, False, mode=mode)[0] for _ in range(20))
