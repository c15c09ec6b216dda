"""The life of a workspace: groups and their order, late ranks, several at once, closing in every way, nothing left.

Sizes and configurations are in test_workspace_config.py.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.errors import DcpError, DcpInvalidArgument
from dcpkernels.testing import run_ranks
from tests.a2a_calls import (
    attempt,
    check_with_peers,
    config_for,
    make_call,
    meet,
    merge,
    own_mappings,
    run_calls,
    same_bits,
)

CONFIG = WorkspaceConfig(12, 64, 8, dtype=torch.float32, num_lanes=2, timeout_s=2.0, first_call_timeout_s=5.0)


# -- groups


def in_groups(_):
    """Four processes; groups [2, 0] and [3, 1] at the same time, then all of them in reverse, and WORLD by None."""
    me, results = dist.get_rank(), {}
    groups = [(ranks, dist.new_group(ranks, sort_ranks=False)) for ranks in ([2, 0], [3, 1], [3, 2, 1, 0])]
    for ranks, group in [*groups, ([0, 1, 2, 3], None)]:
        if me not in ranks:
            continue
        call = make_call(len(ranks), 3, 12, 64, torch.float32, seed=len(results))
        with Workspace(group, config=config_for(call)) as workspace:
            assert (workspace.rank, workspace.num_ranks) == (ranks.index(me), len(ranks))
            out, lse = merge(workspace, call)
            heads = 12 // len(ranks)
            results[tuple(ranks)] = (ranks.index(me) * heads, out, lse)
    return results


def test_heads_follow_the_order_of_the_group():
    """Rank r of the group, in the group's own order, gets heads r*H/W ..; not in the order of the global ranks."""
    by_rank = run_ranks(in_groups, 4, mode="process")
    for ranks in [(2, 0), (3, 1), (3, 2, 1, 0), (0, 1, 2, 3)]:
        call = make_call(len(ranks), 3, 12, 64, torch.float32, seed=0 if len(ranks) == 2 else 1 if ranks[0] else 2)
        ((expected, expected_lse),) = run_calls([call])
        for rank in ranks:
            first_head, out, lse = by_rank[rank][ranks]
            heads = slice(first_head, first_head + 12 // len(ranks))
            assert same_bits(out, expected[:, heads]) and same_bits(lse, expected_lse[:, heads]), (ranks, rank)


@pytest.mark.parametrize("num_ranks", [64, 65])
def test_the_largest_group(num_ranks):
    """64 ranks work, one more is refused on all of them."""
    call = make_call(num_ranks, 2, num_ranks, 64, torch.float32)
    if num_ranks > 64:
        with pytest.raises(Exception, match="rank 64: raised DcpUnsupported: workspace: .* at most 64 ranks"):
            run_calls([call])
    else:
        ((out, lse),) = run_calls([call])
        call.check(out, lse)


@pytest.mark.parametrize("late", ["before", "after"])
def test_ranks_may_be_late(late):
    """A rank that comes 0.3 s later than the others to the creation, or to the first call after it, loses nothing: the
    flags are ready before a peer can write to them."""

    def body(group):
        if late == "before" and group.rank == 1:
            time.sleep(0.3)
        with Workspace(group, config=CONFIG) as workspace:
            if late == "after" and group.rank == 1:
                time.sleep(0.3)
            check_with_peers(group, workspace, make_call(3, 2, 12, 64, torch.float32))

    run_ranks(body, 3)


def test_two_workspaces_in_one_process():
    """A target model and a draft model: other heads, sizes and dtypes, calls in turn; one goes on without the other."""
    target = make_call(2, 8, 12, 576, torch.bfloat16)
    draft = make_call(2, 5, 6, 72, torch.float16, lse_base="2")

    def body(group):
        first, second = (Workspace(group, config=config_for(call)) for call in (target, draft))
        for _ in range(3):
            check_with_peers(group, first, target)
            check_with_peers(group, second, draft)
        first.close()
        check_with_peers(group, second, draft)
        second.close()

    run_ranks(body, 2)


# -- the end


def close_in_turn(group):
    workspace = Workspace(group, config=CONFIG)
    rank = workspace.rank
    merge(workspace, make_call(2, 2, 12, 64, torch.float32))
    meet(group)
    time.sleep(0.4 * rank)
    first = attempt(workspace.close)
    again = attempt(workspace.close)
    dist.destroy_process_group()
    last = attempt(workspace.close)
    return first, again, last, len(own_mappings()), descriptors()


def descriptors() -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in names if "memfd:dcpkernels" in name and "dcpkernels-ranks" not in name]  # the runner's own


def test_close_waits_for_the_peers_and_may_be_repeated():
    """The first rank waits for the second; a second close, and one without the process group, do nothing. Mapping and
    descriptors are gone."""
    early, late = run_ranks(close_in_turn, 2, mode="process")
    assert 0.3 < early[0].seconds < CONFIG.timeout_s - 0.2 and late[0].seconds < 0.3
    for *closes, mappings, files in (early, late):
        assert [closed.error for closed in closes] == [None] * 3 and mappings == 0 and files == []
        assert all(closed.seconds < 0.3 for closed in closes[1:])


def close_without_group(group):
    with Workspace(group, config=CONFIG) as workspace:
        merge(workspace, make_call(2, 2, 12, 64, torch.float32))
        dist.destroy_process_group()
    return len(own_mappings())


def test_close_does_not_need_the_process_group():
    assert run_ranks(close_without_group, 2, mode="process") == [0, 0]


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_close_does_not_wait_for_ever(mode):
    """A peer that does not close costs timeout_s and no more. That peer learns of it at its next call."""
    first, second = run_ranks(close_alone, 2, mode=mode)
    assert first.error is None and first.seconds < CONFIG.timeout_s + 1
    assert mode == "thread" or first.seconds > CONFIG.timeout_s - 0.1  # one mapping for all threads: nobody to wait for
    assert isinstance(second.error, DcpError) and second.error.ranks == (0,), second
    assert second.seconds < CONFIG.timeout_s + 1


def close_alone(group):
    workspace = Workspace(group, config=CONFIG)
    call = make_call(2, 2, 12, 64, torch.float32)
    merge(workspace, call)
    meet(group)
    result = attempt(workspace.close) if workspace.rank == 0 else None
    meet(group)
    if result is None:
        result = attempt(merge, workspace, call)
        workspace.close()
    return dataclasses.replace(result, value=None)


def test_an_exception_in_the_block_is_not_hidden():
    def body(group):
        with pytest.raises(ZeroDivisionError), Workspace(group, config=CONFIG):
            raise ZeroDivisionError

    run_ranks(body, 2)


def forget(group):
    workspace = Workspace(group, config=CONFIG)
    out, _ = merge(workspace, make_call(2, 2, 12, 64, torch.float32))
    meet(group)
    part = out[1]
    start = time.monotonic()
    if workspace.rank == 0:
        del workspace, out
        gc.collect()
    seconds = time.monotonic() - start
    meet(group)
    return seconds, bool(part.isfinite().all()), len(own_mappings())


def test_a_forgotten_workspace_frees_what_is_its_own():
    """The finaliser does not wait for anybody, and outputs do not live in the workspace."""
    (seconds, finite, mappings), (_, _, others) = run_ranks(forget, 2, mode="process")
    assert seconds < CONFIG.timeout_s - 0.2, "it waited for the other rank"
    assert finite and mappings == 0 and others == 2


def fork_a_child(group, end):
    workspace = Workspace(group, config=CONFIG)
    call = make_call(2, 2, 12, 64, torch.float32)
    merge(workspace, call)
    if workspace.rank == 0:
        child = os.fork()
        if child == 0:
            workspace.close() if end == "close" else None
            del workspace
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
    meet(group)
    check_with_peers(group, workspace, call)
    workspace.check(), workspace.close()


@pytest.mark.parametrize("end", ["finaliser", "close"])
def test_a_forked_child_takes_nothing_with_it(end):
    """Engines fork, for data loaders and the like. The copy that the child has is not a rank: its end, by finaliser or
    close, is neither a goodbye nor a death to the peers of the parent."""
    run_ranks(fork_a_child, 2, end, mode="process")


def test_exit_with_an_open_workspace():
    """The interpreter ends with code 0, without a word, at once."""
    script = """
        import threading, torch
        from dcpkernels import Workspace, WorkspaceConfig, a2a_lse_reduce
        from dcpkernels.testing import ThreadGroup
        keep = []
        def rank(group):
            workspace = Workspace(group, config=WorkspaceConfig(4, 64, 8))
            keep.append(workspace)
            a2a_lse_reduce(torch.ones(2, 4, 64).bfloat16(), torch.zeros(2, 4), workspace=workspace, lse_base="e")
        threads = [threading.Thread(target=rank, args=(group,)) for group in ThreadGroup.create(2)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert len(keep) == 2
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_num_calls():
    """Completed calls of all lanes, with and without tokens; calls that were refused do not count."""

    def body(group):
        with Workspace(group, config=CONFIG) as workspace:
            for lane, num_tokens in [(0, 3), (1, 0), (1, 5), (0, 20)]:
                merge(workspace, make_call(2, num_tokens, 12, 64, torch.float32, lane=lane))
            with pytest.raises(DcpInvalidArgument):
                merge(workspace, make_call(2, 3, 12, 72, torch.float32))
            return workspace.stats()

    assert run_ranks(body, 2) == [{"num_calls": 4, "nonfinite_lse": 0}] * 2


def test_nothing_is_left_in_dev_shm():
    """Not even while a workspace is alive: its memory has no name."""
    before = set(os.listdir("/dev/shm"))
    during = run_ranks(names_in_dev_shm, 2, mode="process")
    assert all(not [name for name in names - before if "dcp" in name] for names in during)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "dcp" in name]


def names_in_dev_shm(group):
    with Workspace(group, config=CONFIG):
        return set(os.listdir("/dev/shm"))
