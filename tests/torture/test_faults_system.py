"""What the operating system may deny a rank: descriptors, address space, file sizes, memory of a cgroup, system calls,
/dev/shm, an uninterrupted call, sockets that stay open, a steady clock. Typed errors on all ranks, or none at all."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import dcpkernels
from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.errors import DcpPeerLost
from dcpkernels.heap.group import as_group
from dcpkernels.testing import run_ranks
from tests.a2a_calls import attempt, meet
from tests.torture import faults_refused
from tests.torture.faults_instruction import CXX
from tests.torture.faults_mix import Mix, config_for
from tests.torture.faults_resources import resources, settled

SHORT = {"timeout_s": 5.0, "first_call_timeout_s": 5.0}
LARGE = WorkspaceConfig(6, 512, 256, zero_copy=True, query_head_dim=512, **SHORT)


def try_to_make(group, config, backend="direct"):
    """How it went, in plain data: class, text, ranks; an empty class where it was made, and works."""
    result = attempt(Workspace, group, config=config, backend=backend)
    if result.error is not None:
        return type(result.error).__name__, str(result.error), result.error.ranks
    if config is not LARGE:
        Mix(result.value, 1).play(most=3)
    made = result.value.backend
    result.value.close()
    return "", made, ()


def same_on_all(outcomes):
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


# -- limits of a process


def under_limits(group, which, limits):
    """Rank 1 makes a workspace under each limit in turn; afterwards it has none, and all make one more."""
    config = LARGE if which != "NOFILE" else config_for(3, "zero copy", num_channels=2, **SHORT)
    kind, outcomes = getattr(resource, f"RLIMIT_{which}"), []
    soft, hard = resource.getrlimit(kind)
    assert try_to_make(group, config)[0] == ""  # loads what is loaded once
    for limit in limits:
        before = resources()
        if group.rank() == 1:
            resource.setrlimit(kind, (limit_of(which, limit), hard))
        outcomes.append(try_to_make(group, config))
        resource.setrlimit(kind, (soft, hard))
        gc.collect()
        assert (left := settled(before)) == "", (limit, left)
        meet(group)
    return [*outcomes, try_to_make(group, config)]


def limit_of(which, limit):
    if which == "NOFILE":  # so many more than are open
        return [fd for fd in range(4096) if not os.path.lexists(f"/proc/self/fd/{fd}")][limit]
    if which == "AS":  # so many bytes more than are mapped
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGESIZE") + limit
    return limit


MIB = 1 << 20


@pytest.mark.parametrize(
    ("which", "limits", "what"),
    [
        ("NOFILE", tuple(range(7)), "Too many open files|limit of open files"),
        ("AS", (1 * MIB, 5 * MIB, 10 * MIB, 15 * MIB, 20 * MIB, 30 * MIB, 45 * MIB), "Cannot allocate memory|memory"),
        ("FSIZE", (1 * MIB, 2 * MIB), "File too large"),
    ],
)
def test_limits_of_one_rank(which, limits, what):
    """All raise the same, and name it; with more and more room at last all have a workspace."""
    by_rank = run_ranks(under_limits, 3, which, limits, mode="process", timeout_s=120)
    outcomes = [same_on_all(outcomes) for outcomes in zip(*by_rank, strict=True)]
    assert outcomes[-1] == ("", "direct", ()), outcomes
    failed = [outcome for outcome in outcomes if outcome[0]]
    assert len(failed) >= 2, outcomes
    assert outcomes[: len(failed)] == failed, "what fails with some room does not succeed with less"
    for name, text, _ in failed:
        assert name == "DcpError" and "rank 1" in text and re.search(what, text), text


CGROUP = Path("/sys/fs/cgroup/memory")


def in_small_cgroup(group):
    if group.rank() == 1:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        own = CGROUP / line.split(":", 2)[2].lstrip("/")
        small = own / f"dcpkernels-torture-{os.getpid()}"
        small.mkdir()
        try:
            (small / "memory.limit_in_bytes").write_text(str(4 * MIB))
            (small / "cgroup.procs").write_text(str(os.getpid()))
            outcome = try_to_make(group, LARGE)
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))
            small.rmdir()
    else:
        outcome = try_to_make(group, LARGE)
    return [outcome, try_to_make(group, LARGE)]


@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="needs cgroups (v1) that can be made")
def test_a_small_cgroup_of_one_rank():
    """The limit is found before anything is allocated: nobody is killed by the kernel."""
    by_rank = run_ranks(in_small_cgroup, 2, mode="process")
    small, afterwards = [same_on_all(outcomes) for outcomes in zip(*by_rank, strict=True)]
    assert small[0] == "DcpError" and "dcpkernels-torture" in small[1] and small[2] == (1,), small
    assert afterwards == ("", "direct", ())


# -- system calls that are refused


def refused(group, calls):
    """In turn, rank 0 and another one, to which one call is refused from then on. The others do not take part."""
    rank, outcomes, store = group.rank(), {}, dist.distributed_c10d._get_default_store()
    # All groups before anything is refused. torch names a group after the number of groups that a process is in, so all
    # have to make as many.
    pairs = [[0, i] if rank in (0, i) else [rank] for i in range(1, 1 + len(calls))]
    groups = [[dist.new_group(pair, use_local_synchronization=True) for _ in range(2)] for pair in pairs]
    for i, (call, (pair, again)) in enumerate(zip(calls, groups, strict=True), start=1):
        if rank not in (0, i):
            continue
        if rank == 0:
            store.set(f"turn of {i}", "yes")
        else:
            store.wait([f"turn of {i}"])
        before = resources()
        if rank == i:
            faults_refused.refuse(call)
        config = config_for(2, "zero copy", **SHORT)
        outcomes[call] = [try_to_make(pair, config), try_to_make(again, config, "auto")]
        gc.collect()
        assert (left := settled(before)) == "", (call, left)
    return outcomes


@pytest.mark.skipif(not faults_refused.HERE, reason="system calls are numbered for x86-64")
def test_refused_system_calls():
    """With backend="direct" both raise, with the reason; with "auto" both fall back. (Where torch's own connections are
    refused as well, both raise again.)"""
    calls = [*faults_refused.CALLS]
    by_rank = run_ranks(refused, 1 + len(calls), calls, mode="process", timeout_s=120)
    for i, call in enumerate(calls, start=1):
        direct, auto = zip(by_rank[0][call], by_rank[i][call], strict=True)
        assert {name for name, *_ in direct} <= {"DcpError", "DcpPeerLost"}, (call, direct)
        assert any("Operation not permitted" in text for _, text, _ in direct), (call, direct)
        if call in ("bind", "listen", "connect", "recvmsg"):
            assert {name for name, *_ in auto} <= {"DcpError", "DcpTimeout"}, (call, auto)
        else:
            assert {outcome[:2] for outcome in auto} == {("", "collective")}, (call, auto)


# -- /dev/shm


def without_room_in_shm(group, how):
    libc = ctypes.CDLL(None, use_errno=True)
    clone_new_mounts, private, read_only = 0x00020000, 0x40000 | 0x4000, 1
    assert libc.unshare(clone_new_mounts) == 0 and libc.mount(b"none", b"/", None, private, None) == 0
    flags, data = (read_only, b"") if how == "read-only" else (0, b"size=4096")
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, data) == 0
    if how == "full":
        Path("/dev/shm/full").write_bytes(bytes(4096))
    with contextlib.suppress(OSError):
        Path("/dev/shm/probe").write_bytes(bytes(4096))
        return "there is room"
    return try_to_make(group, config_for(2, "bulk")), try_to_make(group, LARGE)


def can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(["unshare", "-m", "-T", "true"], check=False, capture_output=True).returncode
    )


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="needs namespaces that may be made (root)")


@needs_namespaces
@pytest.mark.parametrize("how", ["full", "read-only"])
def test_dev_shm_is_not_used(how):
    for outcome in run_ranks(without_room_in_shm, 2, how, mode="process"):
        assert outcome == (("", "direct", ()), ("", "direct", ()))


# -- interrupted calls, and sockets that close


def in_a_storm_of_signals(group):
    """Every millisecond one, on all ranks, from before the creation until after the close."""
    handled = []
    signal.signal(signal.SIGALRM, lambda *_: handled.append(None))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    for variant in ("bulk", "packets of 128"):
        workspace = Workspace(group, config=config_for(3, variant, timeout_s=20.0), backend="direct")
        mix = Mix(workspace, 5, pause_s=1e-3)
        mix.play_lanes(most=60)
        workspace.close()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(handled)


def test_interrupted_system_calls_are_made_again():
    assert min(run_ranks(in_a_storm_of_signals, 3, mode="process")) > 20


def socket_closes(group, how):
    workspace = Workspace(group, config=config_for(3, "bulk", timeout_s=20.0), backend="direct")
    mix = Mix(workspace, 6)
    mix.warm_up()
    meet(group)
    if group.rank() == 1:
        fd = workspace._impl._heap.socket_fds[2]
        if how == "closed":
            os.dup2(os.open("/dev/null", os.O_RDWR), fd)
        else:
            with socket.socket(fileno=os.dup(fd)) as same:
                same.shutdown({"half": socket.SHUT_WR, "both": socket.SHUT_RDWR}[how])
        time.sleep(1)  # nobody looks at sockets who does not have to wait
    result = attempt(mix.play)
    workspace.close()
    return type(result.error), result.error.ranks, result.seconds


@pytest.mark.parametrize("how", ["half", "both", "closed"])
def test_a_socket_that_closes_while_both_ranks_live(how):
    """Rank 1 looks lost to rank 2, which waits for it. That one says so, and all raise it, rank 1 too."""
    results = run_ranks(socket_closes, 3, how, mode="process")
    assert {(cls, ranks) for cls, ranks, _ in results} == {(DcpPeerLost, (1,))}, results
    assert all(seconds < 5 for *_, seconds in results)


# -- clocks


def test_nothing_reads_the_clock_of_the_day():
    """Deadlines and waits are on the monotonic clock; the other one is for what people read."""
    root, found = Path(dcpkernels.__file__).parent, []
    pattern = re.compile(
        r"time\.time\(|CLOCK_REALTIME|system_clock|datetime\.(now|utcnow|today)|gettimeofday|\btime\(nullptr\)"
    )
    sources = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ("cli", "testing")]
    for path in [*sources, *(root.parent / "csrc").rglob("*.[hc]*")]:
        if pattern.search(path.read_text()):
            found.append(str(path.relative_to(root.parent)))
    assert found == [], found


JUMPING_CLOCK = r"""
#include <cstdlib>
#include <ctime>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
static long jump() {
  static unsigned seed = unsigned(getpid());
  return long(rand_r(&seed) % 7200) - 3600;
}
extern "C" int clock_gettime(clockid_t clock, struct timespec* now) noexcept {
  const int result = int(syscall(SYS_clock_gettime, clock, now));
  if (clock == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}
extern "C" int gettimeofday(struct timeval* now, void*) noexcept {
  struct timespec spec;
  clock_gettime(CLOCK_REALTIME, &spec);
  *now = {spec.tv_sec, spec.tv_nsec / 1000};
  return 0;
}
extern "C" time_t time(time_t* out) noexcept {
  struct timespec spec;
  clock_gettime(CLOCK_REALTIME, &spec);
  return out ? *out = spec.tv_sec : spec.tv_sec;
}
"""


def under_bad_clocks(group):
    jumps = {round(time.time() / 60) for _ in range(20)}
    moments = as_group(group).all_gather_object(time.monotonic(), timeout_s=20)
    workspace = Workspace(group, config=config_for(2, "zero copy", timeout_s=1.5, first_call_timeout_s=20.0))
    mix = Mix(workspace, 7)
    mix.warm_up()
    mix.play(most=60)
    meet(group)
    late = attempt(mix.play, most=1) if group.rank() == 0 else time.sleep(2.5)
    meet(group)
    late = late or attempt(workspace.check)
    workspace.close()
    return len(jumps), max(moments) - min(moments), type(late.error).__name__, late.error.ranks, late.seconds


@needs_namespaces
def test_clocks_that_jump_and_clocks_that_differ(tmp_path, monkeypatch):
    """The clock of the day jumps by up to an hour at every look; the monotonic clocks of the ranks are days apart."""
    source, library, python = tmp_path / "clock.cpp", tmp_path / "clock.so", tmp_path / "python"
    source.write_text(JUMPING_CLOCK)
    subprocess.run([CXX, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    python.write_text(
        f"#!/bin/sh\nexec unshare --time --monotonic $(($$ * 100)) --fork "
        f'env LD_PRELOAD={library} {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    results = run_ranks(under_bad_clocks, 2, mode="process", start="spawn", timeout_s=120)
    for jumps, apart_s, name, ranks, _ in results:
        assert jumps > 5 and apart_s > 50, results  # the clocks are as bad as meant
        assert (name, ranks) == ("DcpTimeout", (1,)), results
    assert 1.4 < results[0][-1] < 1.5 + 1, results
