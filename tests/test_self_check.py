"""Health of a workspace: self_check and its vote, warmup, stats; the configuration of an engine; the fields that say how
payload travels; the end, also when it is interrupted."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from dcpkernels import Workspace, WorkspaceConfig, _self_check, a2a_lse_reduce
from dcpkernels.errors import DcpError, DcpInvalidArgument, DcpMismatch, DcpPeerLost, DcpTimeout
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import attempt, check_with_peers, make_call, meet, merge, own_mappings

CONFIG = WorkspaceConfig(12, 64, 8, dtype=torch.float32, num_lanes=2, timeout_s=2.0, first_call_timeout_s=5.0)
WAYS = {
    "bulk": ("direct", {}),
    "zero copy": ("direct", {"zero_copy": True}),
    "packets of 8": ("direct", {"wire": "packet", "packet_bytes": 8}),
    "packets of 16": ("direct", {"wire": "packet", "packet_bytes": 16}),
    "packets of 128": ("direct", {"wire": "packet", "packet_bytes": 128}),
    "channels": ("direct", {"num_channels": 3}),
    "zero copy, channels": ("direct", {"zero_copy": True, "num_channels": 3}),
    "collective": ("collective", {}),
    "collective, zero copy": ("collective", {"zero_copy": True}),
}


# -- self_check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_self_check_passes(way, dtype):
    """On every way that payload travels, with one rank and with several, between calls, with one token of room, and again;
    it counts as calls of all lanes."""
    backend, fields = WAYS[way]

    def body(group, num_ranks, max_num_tokens):
        config = dataclasses.replace(CONFIG, dtype=dtype, max_num_tokens=max_num_tokens, **fields)
        with Workspace(group, config=config, backend=backend) as workspace:
            workspace.self_check()
            merge(workspace, make_call(num_ranks, 3, 12, 64, dtype))
            workspace.self_check()
            return workspace.stats()

    for num_ranks, max_num_tokens in ((1, 8), (2, 1), (3, 8)):
        stats = run_ranks(body, num_ranks, num_ranks, max_num_tokens)
        assert stats == [{"num_calls": 5, "nonfinite_lse": 0}] * num_ranks


def checked(group, backend):
    with Workspace(group, config=CONFIG, backend=backend) as workspace:
        workspace.self_check()
        return workspace.backend


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_self_check_between_processes(backend):
    assert run_ranks(checked, 3, backend, mode="process") == [backend] * 3


WRONG = {
    "one element": lambda out, lse: out[0, 0, 0].add_(0.5),
    "a head of another rank": lambda out, lse: out.copy_(out.roll(1, dims=1)),
    "an empty row that is not 0": lambda out, lse: out[1, 0, 3].fill_(1.0),
    "NaN": lambda out, lse: out[2, 1, 5].fill_(float("nan")),
    "the LSE": lambda out, lse: lse[0, 1].add_(0.1),
    "nothing written": lambda out, lse: out.zero_(),
}


@pytest.mark.parametrize("backend", ["direct", "collective"])
@pytest.mark.parametrize("ranks, lane", [([1], 0), ([1], 1), ([0], 0), ([0, 2], 0), ([0, 1, 2], 1)], ids=str)
@pytest.mark.parametrize("wrong", ["one element", "the LSE"])
def test_a_wrong_result_is_reported_on_all_ranks(wrong, ranks, lane, backend, monkeypatch):
    """DcpError, the same on all, with rank and lane; at once, though the others go on to the next lane meanwhile. The
    workspace is as before, and passes when the result is right again."""
    texts = report_of(wrong, ranks, lane, backend, monkeypatch)
    assert len(set(texts)) == 1
    cls, text, named, in_time = texts[0]
    assert cls is DcpError and ranks[0] in named and in_time
    assert f"rank {ranks[0]}, lane {lane}: largest error" in text, text
    assert all(f" {rank}" in text.partition("largest error")[2] for rank in ranks[1:]), text


@pytest.mark.parametrize("wrong", WRONG)
def test_what_counts_as_wrong(wrong, monkeypatch):
    texts = report_of(wrong, [1], 0, "direct", monkeypatch)
    assert {(cls, named) for cls, _, named, _ in texts} == {(DcpError, (1,))}


def report_of(wrong, ranks, lane, backend, monkeypatch):
    is_wrong = threading.Event()

    def planted(*args, workspace, **kwargs):
        out, lse = a2a_lse_reduce(*args, workspace=workspace, **kwargs)
        if is_wrong.is_set() and workspace.rank in ranks and kwargs["lane"] == lane:
            WRONG[wrong](out, lse)
        return out, lse

    monkeypatch.setattr(_self_check, "a2a_lse_reduce", planted)

    def body(group):
        with Workspace(group, config=CONFIG, backend=backend) as workspace:
            workspace.self_check()
            meet(group)
            is_wrong.set()
            meet(group)
            raised = attempt(workspace.self_check)
            meet(group)
            is_wrong.clear()
            meet(group)
            workspace.check()
            workspace.self_check()
            return type(raised.error), str(raised.error), raised.error.ranks, raised.seconds < 1.0

    return run_ranks(body, 3)


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_self_check_without_a_rank(backend):
    """What the op raises, on all ranks that came and on the late one, within one deadline."""

    def body(group):
        with Workspace(group, config=CONFIG, backend=backend) as workspace:
            workspace.self_check()
            meet(group)
            if group.rank == 1:
                time.sleep(CONFIG.timeout_s + 1)
            raised = attempt(workspace.self_check)
            meet(group)
            return raised

    for raised in run_ranks(body, 3):
        assert type(raised.error) is DcpTimeout and raised.error.ranks == (1,), raised
        assert raised.seconds < CONFIG.timeout_s + 1


def without_a_dead_rank(group):
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=20.0))
    workspace.self_check()
    meet(group)
    if workspace.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(workspace.self_check)


def test_self_check_without_a_dead_rank():
    """At once, with its name: there is nobody to vote with."""
    for raised in run_ranks(without_a_dead_rank, 3, mode="process", expect_exit={1: -9})[::2]:
        assert type(raised.error) is DcpPeerLost and raised.error.ranks == (1,) and raised.seconds < 2, raised


def test_self_check_of_a_faulted_or_closed_workspace():
    def body(group):
        workspace = Workspace(group, config=CONFIG)
        first = attempt(merge, workspace, make_call(2, 3 + group.rank, 12, 64, torch.float32))
        again = attempt(workspace.self_check)
        assert type(first.error) is type(again.error) is DcpMismatch and again.seconds < 0.5
        workspace.close()
        with pytest.raises(DcpError, match="self_check: the workspace must be open"):
            workspace.self_check()
        with pytest.raises(DcpError, match="warmup: the workspace must be open"):
            workspace.warmup()
        with pytest.raises(DcpError, match="stats: the workspace must be open"):
            workspace.stats()

    run_ranks(body, 2)


# -- warmup


@pytest.mark.parametrize("way", WAYS)
def test_warmup_is_local(way):
    """One rank does it, or several times, or none: no rank waits for another, no call is counted."""
    backend, fields = WAYS[way]

    def body(group):
        with Workspace(group, config=dataclasses.replace(CONFIG, **fields), backend=backend) as workspace:
            for _ in range([2, 0, 1][group.rank]):
                done = attempt(workspace.warmup)
                assert done.error is None and done.seconds < 1.0
            assert workspace.stats() == {"num_calls": 0, "nonfinite_lse": 0}
            meet(group)
            check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))

    run_ranks(body, 3)


# -- the configuration


def test_for_engine():
    """Rows of a decode batch: each sequence has its next token and the drafts that are verified with it."""
    config = WorkspaceConfig.for_engine(128, 10, num_heads=96, head_dim=512)
    assert config == WorkspaceConfig(96, 512, 1408) and config.dtype == torch.bfloat16
    assert WorkspaceConfig.for_engine(1, num_heads=8, head_dim=64).max_num_tokens == 1
    assert WorkspaceConfig.for_engine(256, num_heads=8, head_dim=64).max_num_tokens == 256
    assert WorkspaceConfig.for_engine(3, draft_tokens=1, num_heads=8, head_dim=64).max_num_tokens == 6
    fields = {"num_lanes": 2, "zero_copy": True, "dtype": torch.float16, "timeout_s": 3.0, "num_channels": 2}
    config = WorkspaceConfig.for_engine(4, 2, num_heads=8, head_dim=64, **fields)
    assert config == WorkspaceConfig(8, 64, 12, **fields)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0,), "max_num_seqs must be a whole number >= 1 (got 0)"),
        ((-1,), "max_num_seqs must be a whole number >= 1 (got -1)"),
        ((1.5,), "max_num_seqs must be a whole number >= 1 (got 1.5)"),
        ((True,), "max_num_seqs must be a whole number >= 1 (got True)"),
        ((None,), "max_num_seqs must be a whole number >= 1 (got None)"),
        ((4, -1), "draft_tokens must be a whole number >= 0 (got -1)"),
        ((4, 0.0), "draft_tokens must be a whole number >= 0 (got 0.0)"),
        ((4, None), "draft_tokens must be a whole number >= 0 (got None)"),
        ((2**30, 2**30), "max_num_tokens must be a whole number in 1 .. "),
    ],
    ids=str,
)
def test_for_engine_of_wrong_numbers(arguments, text):
    with pytest.raises(DcpInvalidArgument) as raised:
        WorkspaceConfig.for_engine(*arguments, num_heads=8, head_dim=64)
    assert str(raised.value).startswith("workspace: ") and text in str(raised.value)


def test_for_engine_computes_max_num_tokens():
    with pytest.raises(DcpInvalidArgument, match="max_num_tokens must not be given here"):
        WorkspaceConfig.for_engine(4, num_heads=8, head_dim=64, max_num_tokens=9)
    with pytest.raises(TypeError):
        WorkspaceConfig.for_engine(4, num_heads=8, head_dim=64, no_such_field=1)
    with pytest.raises(DcpInvalidArgument, match="num_lanes must"):
        WorkspaceConfig.for_engine(4, num_heads=8, head_dim=64, num_lanes=0)


@pytest.mark.parametrize(
    "changed",
    [
        *({"num_channels": value} for value in (0, -1, 1025, 1.0, True, "2")),
        *({"zero_copy": value} for value in (1, 0, None, "yes", torch.tensor(True))),
        *({"wire": value} for value in ("", "pull", None, 1, ["bulk"])),
        *({"packet_bytes": value} for value in (0, 4, 12, 64, 8.0, True, None, "8")),
        {"num_lanes": True},
        {"num_lanes": 257},
        {"zero_copy": True, "wire": "packet"},
    ],
    ids=str,
)
def test_wrong_fields(changed):
    """Refused where they are written, in the documented form."""
    with pytest.raises(DcpInvalidArgument, match=rf"^workspace: {[*changed][0]} must "):
        dataclasses.replace(CONFIG, **changed)


def test_fields_at_their_limits():
    for changed in (
        {"num_channels": 1024},
        {"num_lanes": 256},
        {"packet_bytes": 128},
        {"zero_copy": True, "wire": "bulk"},
    ):
        size = Workspace.size(dataclasses.replace(CONFIG, **changed), 2)
        assert size.total >= sum(size.parts.values()) and all(isinstance(part, int) for part in size.parts.values())
    (group,) = ThreadGroup.create(1)
    with Workspace(group, config=dataclasses.replace(CONFIG, num_channels=40)) as workspace:
        merge(workspace, make_call(1, 3, 12, 64, torch.float32))  # more channels than rows


def test_packet_bytes_do_not_matter_without_packets():
    """A field of another way takes no room."""
    plain = Workspace.size(CONFIG, 2)
    assert Workspace.size(dataclasses.replace(CONFIG, packet_bytes=128), 2) == plain
    assert plain.parts["a2a_lse_reduce.unpacked"] == plain.parts["a2a_lse_reduce.partial_out"] == 0


# -- the end


def interrupted_close(group):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workspace = Workspace(group, config=dataclasses.replace(CONFIG, timeout_s=20.0))
    call = make_call(2, 3, 12, 64, torch.float32)
    merge(workspace, call)
    meet(group)
    if workspace.rank == 1:
        time.sleep(1.0)
        return attempt(workspace.close).error, None, None, len(own_mappings())
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    first = attempt(workspace.close)
    again = attempt(workspace.close)
    used = attempt(merge, workspace, call)
    return first.error, again.error, used.error, len(own_mappings())


def test_ctrl_c_inside_close():
    """It ends the wait for the peers; the workspace is closed all the same."""
    (error, again, used, mappings), (other, _, _, others) = run_ranks(interrupted_close, 2, mode="process")
    assert type(error) is KeyboardInterrupt and again is None and other is None
    assert type(used) is DcpError and str(used).startswith("a2a_lse_reduce: the workspace must be open"), used
    assert mappings == others == 0


@pytest.mark.parametrize("backend", ["direct", "collective"])
def test_a_process_ends_after_a_fault(backend, tmp_path):
    """Without close, by an ordinary exit: nothing that is still in flight holds up the interpreter, and its exit code is
    its own."""
    script = f"""
        import os, sys, time
        import torch, torch.distributed as dist
        from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
        from dcpkernels.errors import DcpTimeout
        child = os.fork()
        rank = 1 if child == 0 else 0
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 2), rank=rank, world_size=2)
        config = WorkspaceConfig(4, 64, 8, timeout_s=0.5, first_call_timeout_s=100.0)
        workspace = Workspace(None, config=config, backend={backend!r})
        call = lambda: a2a_lse_reduce(torch.ones(2, 4, 64).bfloat16(), torch.zeros(2, 4), workspace=workspace, lse_base="e")
        call()
        if rank == 1:
            time.sleep(6)
            os._exit(0)
        try:
            call()
        except DcpTimeout as error:
            print(error.ranks, flush=True)
        sys.exit(3)
    """
    start = time.monotonic()
    done = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    said = done.stdout.readline()
    from_fault = time.monotonic()
    assert done.wait(60) == 3 and said == "(1,)\n", said
    assert time.monotonic() - from_fault < 4, time.monotonic() - start
    done.stdout.close()
