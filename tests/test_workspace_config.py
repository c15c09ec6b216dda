"""What a workspace is made for: its size, its configuration, and that all ranks agree on both."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpUnsupported
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import attempt, check_with_peers, make_call, own_mappings

CONFIG = WorkspaceConfig(12, 64, 8, dtype=torch.float32, num_lanes=2, timeout_s=2.0, first_call_timeout_s=5.0)


# -- sizes


def mapped_bytes(group, config):
    with Workspace(group, config=config) as workspace:
        ends = [line.split()[0].split("-") for line in own_mappings()]
        sizes = [int(end, 16) - int(start, 16) for start, end in ends]
        return sizes, workspace.num_bytes, workspace.size(config, workspace.num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_size_is_what_is_mapped(num_ranks):
    """Workspace.size says before the creation what a rank's region takes, to the byte, and by part."""
    for sizes, num_bytes, size in run_ranks(mapped_bytes, num_ranks, CONFIG, mode="process"):
        assert sizes == [size.total] * num_ranks and num_bytes == size.total
        assert size == Workspace.size(CONFIG, num_ranks)
        assert all(part >= 0 for part in size.parts.values())
        assert sum(size.parts.values()) <= size.total < sum(size.parts.values()) + len(size.parts) * 4096


def test_sizes_do_not_wrap():
    """Integers beyond 2**32, and nothing is allocated for them. Own shards do not travel: W - 1 of W are staged."""
    config = WorkspaceConfig(64, 2**24, 1, dtype=torch.bfloat16, num_lanes=8)
    size = Workspace.size(config, 8)
    staged = 8 * 2 * 7 * (64 // 8) * 2**24 * 2  # lanes, parities, peers, heads, elements, bytes
    lses = 8 * 2 * 7 * 64  # a line each
    assert size.parts["a2a_lse_reduce.staging"] == staged + lses > 2**32
    twice = Workspace.size(dataclasses.replace(config, head_dim=2**25), 8)
    assert twice.parts["a2a_lse_reduce.staging"] == 2 * staged + lses
    pulled = Workspace.size(dataclasses.replace(config, zero_copy=True, max_num_tokens=16384), 8)
    assert pulled.parts["a2a_lse_reduce.partial_out"] == 8 * 2 * 16384 * 64 * 2**24 * 2 > 2**48


def test_a_row_of_packets_is_counted_in_32_bits():
    config = WorkspaceConfig(8, 2**30 - 1024, 1, wire="packet", packet_bytes=128)
    assert Workspace.size(config, 8).parts["a2a_lse_reduce.staging"] > 2**31
    with pytest.raises(DcpInvalidArgument, match="region: a row of packets must have at most 2147482624 bytes"):
        Workspace.size(dataclasses.replace(config, head_dim=2**30), 8)
    assert Workspace.size(dataclasses.replace(config, head_dim=2**30, wire="bulk"), 8).total > 2**31


def test_staging_is_that_of_one_round_however_many_rows_a_call_may_have():
    """A round sends at most 1 MiB a rank, or one row; a call with more rows takes more rounds."""
    config = WorkspaceConfig(96, 512, 64, dtype=torch.bfloat16)
    sizes = [Workspace.size(dataclasses.replace(config, max_num_tokens=n), 8) for n in (1, 12, 13, 64, 16384)]
    staged = [size.parts["a2a_lse_reduce.staging"] for size in sizes]
    assert staged == [2 * 7 * rows * (12 * 512 * 2 + 64) for rows in (1, 12, 12, 12, 12)]
    assert max(staged) <= 2 * 2**20


def test_no_room_is_said_at_creation():
    """On all ranks, at once, with the bytes needed and available; the group is good for another try."""

    def body(group):
        huge = attempt(Workspace, group, config=dataclasses.replace(CONFIG, head_dim=2**30), backend="direct")
        assert type(huge.error) is DcpError and huge.seconds < 5, huge
        with Workspace(group, config=CONFIG) as workspace:
            check_with_peers(group, workspace, make_call(2, 3, 12, 64, torch.float32))
        return str(huge.error)

    texts = run_ranks(body, 2)
    needed = Workspace.size(dataclasses.replace(CONFIG, head_dim=2**30), 2).total
    assert texts[0] == texts[1] and "available" in texts[0] and str(2 * needed) in texts[0].replace(",", ""), texts[0]


# -- configurations


@pytest.mark.parametrize(
    "changed",
    [
        *(
            {name: value}
            for name in ("num_heads", "head_dim", "max_num_tokens", "num_lanes")
            for value in (0, -1, 1.5, None)
        ),
        {"num_heads": 13},
        {"dtype": torch.float64},
        {"dtype": "bfloat16"},
        *({name: value} for name in ("timeout_s", "first_call_timeout_s") for value in (-1, math.nan, None, "1")),
        {"cpu_isa": "v5"},
        {"start_epoch": 1},
        {"start_epoch": 2**32 + 1},
    ],
    ids=str,
)
def test_wrong_configurations(changed):
    """Refused on every rank, whether at the configuration or at the workspace; the text names the field."""

    def body(group):
        with pytest.raises(DcpInvalidArgument, match=rf"workspace: .*{[*changed][0]} must"):
            Workspace(group, config=dataclasses.replace(CONFIG, **changed))

    run_ranks(body, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_heads": 24},
        {"head_dim": 128},
        {"max_num_tokens": 9},
        {"dtype": torch.float16},
        {"num_lanes": 3},
        {"start_epoch": 9},
    ],
    ids=lambda changed: [*changed][0],
)
def test_configurations_that_differ_are_refused_on_all_ranks(changed):
    """With the field, both values and the rank that differs; a new try with equal ones works."""

    def body(group):
        config = dataclasses.replace(CONFIG, **changed) if group.rank == 1 else CONFIG
        result = attempt(Workspace, group, config=config)
        assert type(result.error) is DcpUnsupported, result
        with Workspace(group, config=CONFIG) as workspace:
            check_with_peers(group, workspace, make_call(3, 2, 12, 64, torch.float32))
        return str(result.error)

    texts = run_ranks(body, 3)
    ((name, value),) = changed.items()
    assert len(set(texts)) == 1
    for part in (f"agree on {name} ", f"ranks 0, 2: '{getattr(CONFIG, name)}'", f"rank 1: '{value}'"):
        assert part in texts[0], texts[0]


def test_timeouts_and_cpu_variants_may_differ():
    def body(group):
        changed = {"timeout_s": 3.0 + group.rank, "first_call_timeout_s": 0, "cpu_isa": ["baseline", None][group.rank]}
        with Workspace(group, config=dataclasses.replace(CONFIG, **changed)) as workspace:
            check_with_peers(group, workspace, make_call(2, 2, 12, 64, torch.float32))

    run_ranks(body, 2)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", torch.device("meta")])
def test_a_device_without_a_target(device):
    (group,) = ThreadGroup.create(1)
    text = "target cuda: " if "cuda" in str(device) else "device must have a target: cpu or cuda"
    with pytest.raises(DcpUnsupported, match=text):
        Workspace(group, device=device, config=CONFIG)
    for config in ({"zero_copy": True}, {"cuda_heap": "torch"}):
        with pytest.raises(DcpUnsupported):
            Workspace(group, device=device, config=dataclasses.replace(CONFIG, **config))
    with pytest.raises(DcpInvalidArgument, match="config must be a WorkspaceConfig"):
        Workspace(group)
    with pytest.raises(DcpInvalidArgument, match="group"):
        Workspace(object(), config=CONFIG)
