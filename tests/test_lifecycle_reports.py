"""What users of other libraries reported about the start and the end: of a workspace, of a process, of one rank of several,
and what a CPU does with it. Ends of whole interpreters are in test_exit_reports.py."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcpkernels import (
    Workspace,
    WorkspaceConfig,
    kv_gather,
    kv_gather_start,
    kv_gather_wait,
    query_gather,
    release_query,
)
from dcpkernels.errors import DcpPeerLost, DcpUnsupported
from dcpkernels.heap import memory, sockets
from dcpkernels.heap.mesh import Mesh
from dcpkernels.testing import ThreadGroup, run_ranks
from tests.a2a_calls import attempt, check_with_peers, config_for, make_call, meet, merge, own_mappings
from tests.gather_calls import Context

# ../shared/reading/user-reports.md, section A5, by its numbers: who reported it, and what tries it here.
REPORTS = {
    106: ("TensorRT-LLM#10533", "test_only_making_a_workspace_is_collective"),
    108: ("pytorch#195500", "tests/test_exit_reports.py::test_how_interpreters_end"),
    109: ("pytorch#196003", "tests/test_exit_reports.py::test_how_interpreters_end"),
    110: ("pytorch#137643", "test_a_rank_is_killed_in_the_middle"),
    111: ("vllm#46509", "tests/test_exit_reports.py::test_how_interpreters_end"),
    113: ("vllm#46716", "test_ranks_on_two_hosts"),
    114: ("vllm#34169", "test_a_rank_that_tells_a_wrong_name"),
    115: ("vllm#27858", "tests/core/test_core.py::test_aarch64_runs_the_protocol"),
    116: ("sglang#40723", "test_a_rank_is_killed_in_the_middle"),
    117: ("vllm#54002", "test_twenty_restarts_after_a_kill"),
    119: ("sglang#34910", "test_a_probe_that_fails_on_any_rank"),
    120: ("sglang#3226", "test_no_address_is_looked_up"),
    121: ("vllm#8756", "test_two_to_eight_processes_on_two_cpus"),
}
# What of them cannot be shown on any machine at hand, and what stands for it.
NOT_HERE = {
    109: "a device assert; here a fault of a call has its place",
    113: "two machines; one machine tells two boot ids",
    115: "the weak order of a real aarch64, which its emulator does not have; ThreadSanitizer finds what it would break "
    "(tests/core/test_core.py::test_no_race)",
    120: "the collective backend's gloo, which finds its interface as torch does",
}
NUMBERS = {*range(106, 122)} - {107, 112, 118}

# Section C, where a CPU can show it.
FAILURE_MODES = {
    "C1": "tests/test_exit_reports.py::test_importing_touches_nothing",
    "C2": "tests/test_exit_reports.py::test_importing_touches_nothing",
    "C5": "tests/test_backend_choice.py::test_one_rank_cannot_share_memory",
    "C6": "tests/test_order_reports.py::test_producers_that_are_late",
    "C7": "tests/test_graph_reports.py::test_every_repeat_is_a_new_call",
    "C8": "tests/core/test_core.py::test_a_planted_fault_is_reported",
    "C9": "tests/test_a2a_matrix.py::test_matrix",
    "C10": "tests/test_architecture.py::test_csrc_rule",
    "C11": "test_a_rank_is_killed_in_the_middle",
    "C12": "tests/test_exit_reports.py::test_how_interpreters_end",
    "C13": "tests/test_a2a_reports.py::test_two_workspaces_of_different_geometry",
    "C14": "tests/test_workspace_config.py::test_size_is_what_is_mapped",
    "C16": "tests/test_doctor.py::test_a_bare_machine_is_well",
    "C17": "tests/test_order_reports.py::test_producers_that_are_late",
}
# Of the rest: C3, modules are built against one torch; C4, its private names are used in heap/ only; C15, a CPU has none
# of these modes.

PATIENT = {"timeout_s": 20.0, "first_call_timeout_s": 20.0}
CONFIG = WorkspaceConfig(12, 64, 8, dtype=torch.float32, **PATIENT)


def test_every_report_has_a_test_or_a_reason():
    """The tables name all rows, and tests that exist."""
    assert set(REPORTS) == NUMBERS and set(NOT_HERE) <= NUMBERS
    root, others = Path(__file__).parents[1], ["tests/core/test_core.py::test_no_race"]
    for test in [*[test for _, test in REPORTS.values()], *FAILURE_MODES.values(), *others]:
        file, _, name = test.rpartition("::")
        assert f"def {name}(" in (root / file if file else Path(__file__)).read_text(), test


def same(errors: list[BaseException | None]) -> BaseException:
    """The error that all ranks raised."""
    assert None not in errors and len({(type(error), str(error), error.ranks) for error in errors}) == 1, errors
    return errors[0]


# -- making one


class Silent(ThreadGroup):
    """A group that does not answer any more once it is told so."""

    def __init__(self, group: ThreadGroup) -> None:
        self.__dict__.update(group.__dict__)
        self.over = False

    def _meet(self, *arguments):
        assert not self.over, "the group was asked"
        return super()._meet(*arguments)


GATHERS = {"query_head_dim": 24, "query_dtype": torch.bfloat16, "kv_chunk_rows": 64, "kv_dim": 16}


def all_ops(workspace: Workspace, context: Context) -> list:
    rank, results = workspace.rank, []
    for lane in (0, 1):
        for num_tokens in (3, 0, 29, 3):  # 29 in several rounds
            call = make_call(2, num_tokens, 12, 64, torch.float32, lane=lane)
            results.append(merge(workspace, call))
        view = query_gather(torch.full((2, 6, 24), 1.0 + rank).bfloat16(), workspace=workspace, lane=lane)
        assert view.eq(torch.arange(1, 3).repeat_interleave(6).view(1, 12, 1)).all()
        release_query(workspace=workspace, lane=lane)
        plan = context.plan(rank, 64)
        kv_gather(context.caches[rank], plan, 0, workspace=workspace, lane=lane)
        kv_gather_start(context.caches[rank], plan, 1, workspace=workspace, lane=lane)
        chunk = kv_gather_wait(plan, 1, workspace=workspace, lane=lane)
        assert torch.equal(chunk.view(torch.int16), context.chunk(64, 1).view(torch.int16))
    workspace.check(), workspace.stats(), workspace.warmup()
    return results


def test_only_making_a_workspace_is_collective():
    """TensorRT-LLM#10533. The first call of each op and lane, and a size that was not seen before, ask the group for
    nothing; nor does the end."""
    context = Context((150,), 2, 16, torch.bfloat16)

    def body(group):
        group = Silent(group)
        workspace = Workspace(
            group, config=config_for(make_call(2, 8, 12, 64, torch.float32), num_lanes=2, **GATHERS, **PATIENT)
        )
        group.over = True
        results = all_ops(workspace, context)
        workspace.close()
        return results

    for ranks in zip(*run_ranks(body, 2), strict=True):
        out, lse = (torch.cat([result[i] for result in ranks], dim=1) for i in (0, 1))
        make_call(2, out.shape[0], 12, 64, torch.float32).check(out, lse)


def two_hosts(group):
    host, network = sockets.host_id()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, "host_id", lambda: (f"{host}-{group.rank() // 2}", network))
        patch.setattr(Mesh, "connect", lambda *arguments: pytest.fail("a rank of another host was called"))
        direct = attempt(Workspace, group, config=CONFIG, backend="direct")
        with Workspace(group, config=CONFIG) as workspace:
            check_with_peers(group, workspace, make_call(4, 3, 12, 64, torch.float32))
            return direct, workspace.backend


def test_ranks_on_two_hosts():
    """vllm#46716. Found by what the ranks tell each other, before anything is tried: an error on all, or the backend that
    works between hosts."""
    results = run_ranks(two_hosts, 4, mode="process")
    error = same([direct.error for direct, _ in results])
    assert type(error) is DcpUnsupported and "host (boot id)" in str(error) and "ranks 0, 1: " in str(error), error
    assert all(direct.seconds < 5 and backend == "collective" for direct, backend in results)


def wrong_name(group, liar):
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == liar:
            init = sockets.Listener.__init__

            def init_and_lie(listener, backlog):
                init(listener, backlog)
                listener.address = sockets.Address(b"\0dcpkernels-another", listener.address.nonce)

            patch.setattr(sockets.Listener, "__init__", init_and_lie)
        raised = attempt(Workspace, group, config=CONFIG, backend="direct")
    with Workspace(group, config=CONFIG, backend="direct") as workspace:
        check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
    return raised


@pytest.mark.parametrize("liar", [0, 1])
def test_a_rank_that_tells_a_wrong_name(liar):
    """vllm#34169. Names are made by the library and told through the group, so engines cannot give unequal ones. Were one
    wrong, all ranks would raise the same at once, and could go on."""
    results = run_ranks(wrong_name, 3, liar, mode="process")
    error = same([raised.error for raised in results])
    assert type(error) is DcpPeerLost and str(error).startswith("workspace: connect failed on rank "), error
    assert all(raised.seconds < 5 for raised in results)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_probe_that_fails_on_any_rank(rank, monkeypatch):
    """sglang#34910. What a rank cannot find out about its machine is everybody's verdict, whichever rank it is; nobody is
    left in a step that the others do not reach."""
    limits, chosen = memory.limits, threading.local()

    def probe():
        if getattr(chosen, "fails", False):
            raise OSError(5, "no answer from the machine")
        return limits()

    monkeypatch.setattr(memory, "limits", probe)

    def body(group):
        chosen.fails = group.rank == rank
        direct = attempt(Workspace, group, config=CONFIG, backend="direct")
        with Workspace(group, config=CONFIG) as workspace:
            check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
            return direct, workspace.backend

    results = run_ranks(body, 3)
    error = same([direct.error for direct, _ in results])
    assert error.ranks == (rank,) and "no answer from the machine" in str(error)
    assert all(direct.seconds < 5 and backend == "collective" for direct, backend in results)


def watched(group):
    meet(group)
    events = []
    asked = (
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "socket.getnameinfo",
        "socket.gethostname",
    )
    used = ("socket.connect", "socket.bind", "socket.sendto")
    sys.addaudithook(lambda name, given: events.append((name, given[-1])) if name in asked + used else None)
    with Workspace(group, config=CONFIG, backend="direct") as workspace:
        check_with_peers(group, workspace, make_call(3, 3, 12, 64, torch.float32))
    return events


def test_no_address_is_looked_up():
    """sglang#3226. The group that the engine gives is the bootstrap. The direct backend has sockets of one host only, and
    asks for no name of it."""
    seen = [event for events in run_ranks(watched, 3, mode="process") for event in events]
    names = [name for name, _ in seen]
    assert set(names) == {"socket.bind", "socket.connect"}, seen
    assert names.count("socket.bind") == 3 and names.count("socket.connect") >= 3
    assert all(address.startswith(b"\0dcpkernels-") for _, address in seen), seen


def on_two_cpus(world):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for num_ranks in range(2, 9):
        group = dist.new_group(range(num_ranks))
        if world.rank() < num_ranks:
            config = WorkspaceConfig(2 * num_ranks, 64, 4, **GATHERS, **PATIENT)
            with Workspace(group, config=config, backend="direct") as workspace:
                workspace.self_check()
                for num_tokens in (1, 7):
                    call = make_call(num_ranks, num_tokens, 2 * num_ranks, 64, torch.bfloat16)
                    check_with_peers(group, workspace, call)
    return True


def test_two_to_eight_processes_on_two_cpus():
    """vllm#8756. All ops, in processes that share two CPUs."""
    assert run_ranks(on_two_cpus, 8, mode="process") == [True] * 8


# -- the end of a rank


def merge_on_and_on(workspace, call):
    while True:
        merge(workspace, call)


def killed(group, victim):
    shm = set(os.listdir("/dev/shm"))
    workspace = Workspace(group, config=CONFIG)
    call = make_call(4, 2, 12, 64, torch.float32)
    for _ in range(20):
        merge(workspace, call)
    if workspace.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    raised = attempt(merge_on_and_on, workspace, call)
    checked, closed = attempt(workspace.check), attempt(workspace.close)
    del workspace
    gc.collect()
    return raised, checked, closed, own_mappings(), sorted(set(os.listdir("/dev/shm")) - shm)


def test_a_rank_is_killed_in_the_middle():
    """pytorch#137643, sglang#40723. The survivors learn which, in what and when, long before the deadline; they close, and
    nothing is left of the memory, whoever made it."""
    results = run_ranks(killed, 4, 3, mode="process", expect_exit={3: -9})
    for raised, checked, closed, mappings, shm in results[:3]:
        assert type(raised.error) is DcpPeerLost and raised.error.ranks == (3,) and raised.seconds < 5
        for part in ("a2a_lse_reduce: ", "rank 3", "epoch "):
            assert part in str(raised.error), raised.error
        assert type(checked.error) is DcpPeerLost and closed.error is None and closed.seconds < 5
        assert mappings == [] and not [name for name in shm if "dcp" in name]


def used_and_killed(group, seed):
    workspace = Workspace(group, config=CONFIG, backend="direct")
    call = make_call(2, 2, 12, 64, torch.float32)
    for _ in range(1 + random.Random(seed).randrange(20)):
        merge(workspace, call)
    os.kill(os.getpid(), signal.SIGKILL)


def used(group):
    with Workspace(group, config=CONFIG, backend="direct") as workspace:
        check_with_peers(group, workspace, make_call(2, 2, 12, 64, torch.float32))
    return sorted(os.listdir("/dev/shm"))


def test_twenty_restarts_after_a_kill():
    """vllm#54002. All ranks are killed in the middle of calls, and started again, twenty times: each start is as the first
    one, and /dev/shm, which may be small, has nothing in it that was not there."""
    before = sorted(os.listdir("/dev/shm"))
    for seed in range(20):
        run_ranks(used_and_killed, 2, seed, mode="process", expect_exit={0: -9, 1: -9})
    for names in run_ranks(used, 2, mode="process"):
        assert [name for name in names if name not in before and "dcp" in name] == []
