"""The rank runner: results, every way in which a rank can fail, and that nothing is left behind.

Functions that run in processes are at the top level: they are pickled by name.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.testing import RankFailure, ThreadGroup, _processes, run_ranks

MODES = ["thread", "process"]


def rank_of(group):
    return group.rank if isinstance(group, ThreadGroup) else dist.get_rank(group)


def gather(group, obj):
    if isinstance(group, ThreadGroup):
        return group.all_gather_object(obj)
    out = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, obj, group=group)
    return out


# -- results


def gather_and_return(group, offset, tensor):
    return gather(group, rank_of(group) + offset), tensor * rank_of(group)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_in_rank_order(mode, num_ranks):
    results = run_ranks(gather_and_return, num_ranks, 10, torch.ones(4, dtype=torch.bfloat16), mode=mode)
    assert [gathered for gathered, _ in results] == [[10 + i for i in range(num_ranks)]] * num_ranks
    for rank, (_, tensor) in enumerate(results):
        assert torch.equal(tensor, torch.full((4,), rank, dtype=torch.bfloat16))


def test_threads_get_the_very_objects():
    token = object()
    assert run_ranks(lambda group, arg: arg, 2, token) == [token, token]


def big(group, num_bytes):
    return torch.full((num_bytes,), rank_of(group), dtype=torch.uint8)


def test_large_results_come_by_value():
    """Larger than any pipe or socket buffer, from all ranks at once, and nothing of it in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    results = run_ranks(big, 3, 20_000_000, mode="process")
    assert [(t.numel(), int(t.min()), int(t.max())) for t in results] == [(20_000_000, i, i) for i in range(3)]
    assert not any(tensor.is_shared() for tensor in results)
    assert set(os.listdir("/dev/shm")) == before


def surroundings(group):
    return (
        os.environ.get("DCPKERNELS_PROBE"),
        os.getcwd(),
        sys.path,
        torch.get_num_threads(),
        os.environ["GLOO_SOCKET_IFNAME"],
    )


def test_a_process_has_the_callers_surroundings_of_now(monkeypatch, tmp_path):
    run_ranks(surroundings, 1, mode="process")  # the server is running before anything changes
    monkeypatch.setenv("DCPKERNELS_PROBE", "set later")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    probe, cwd, path, num_threads, interface = run_ranks(surroundings, 1, mode="process")[0]
    assert (probe, cwd, path[0]) == ("set later", str(tmp_path), str(tmp_path))
    assert (num_threads, interface) == (1, "lo")


def talk(group):
    print("to stdout")
    print("to stderr", file=sys.stderr)


def test_output_goes_where_the_callers_goes(capfd):
    run_ranks(talk, 1, mode="process")
    out, err = capfd.readouterr()
    assert "to stdout" in out
    assert "to stderr" in err


def pids(group):
    return os.getpid(), os.getppid()


def test_fork_shares_a_server_and_spawn_does_not():
    first, second = run_ranks(pids, 2, mode="process"), run_ranks(pids, 2, mode="process")
    assert len({pid for pid, _ in first + second}) == 4
    assert len({parent for _, parent in first + second}) == 1
    spawned = run_ranks(pids, 2, mode="process", start="spawn")
    assert len({parent for _, parent in spawned}) == 2
    assert not {parent for _, parent in spawned} & {parent for _, parent in first}


def test_the_server_has_no_threads_that_a_fork_would_lose():
    """Before the first fork: OpenBLAS ends its threads at a fork, and would hide them."""
    server = _processes._Server()
    server.wait_ready()
    tasks = os.listdir(f"/proc/{server._process.pid}/task")
    server.close()
    assert len(tasks) == 1


# -- failures


def rank_1_raises(group):
    if rank_of(group) == 1:
        raise LookupError("nothing here\nsecond line")
    if rank_of(group) == 2:
        gather(group, None)  # waits for rank 1 in vain


@pytest.mark.parametrize("mode", MODES)
def test_every_ranks_fate_is_told(mode):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(rank_1_raises, 3, mode=mode)
    assert time.monotonic() - start < 30  # not the 60 s of the deadline
    failure, text = caught.value, str(caught.value)
    assert failure.fates[0] == "returned"
    assert failure.fates[1] == "raised LookupError: nothing here"
    assert failure.fates[2].startswith("raised DcpPeerLost" if mode == "thread" else "raised RuntimeError")
    assert text.startswith("run_ranks: every rank must end well within 60 s (failed: 1, 2)\n--- rank 1: ")
    assert 'raise LookupError("nothing here\\nsecond line")' in text
    assert "gather(group, None)  # waits for rank 1 in vain" in text
    assert text.index("--- rank 2") < text.index("--- rank 0: returned")


def rank_0_raises_others_sleep(group):
    if rank_of(group) == 0:
        raise ValueError("early")
    time.sleep(30)


@pytest.mark.parametrize("mode", MODES)
def test_the_others_get_a_grace_only(mode):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(rank_0_raises_others_sleep, 2, mode=mode)
    assert 2 < time.monotonic() - start < 20
    assert caught.value.fates[0] == "raised ValueError: early"
    assert caught.value.fates[1].startswith("still running after ")
    assert caught.value.fates[1].endswith("another rank having failed")


def a_rank_hangs(group, hanging):
    if rank_of(group) == hanging:
        a_place_to_find()
    return "fine"


def a_place_to_find():
    time.sleep(30)


@pytest.mark.parametrize("mode", MODES)
def test_the_deadline_shows_the_stack(mode):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(a_rank_hangs, 2, 1, mode=mode, timeout_s=4)
    assert 4 <= time.monotonic() - start < 24
    assert caught.value.fates[0] == "returned"
    assert caught.value.fates[1].startswith("still running after ")
    assert "in a_place_to_find" in str(caught.value)
    assert "in a_rank_hangs" in str(caught.value)


def stop_oneself(group):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)


def test_a_stopped_process_is_killed_too():
    with pytest.raises(RankFailure, match="in stop_oneself"):
        run_ranks(stop_oneself, 1, mode="process", timeout_s=1)


def deaf(group):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(30)


def test_a_process_that_shows_no_stack_is_killed_too():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0: still running after"):
        run_ranks(deaf, 1, mode="process", timeout_s=0.5)
    assert time.monotonic() - start < 20


def end_by(group, how, victim):
    if rank_of(group) == victim:
        if how == "exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(0)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(30)
    return "alive"


@pytest.mark.parametrize(
    ("how", "fate"),
    [
        ("SIGKILL", "killed by signal 9 (SIGKILL)"),
        ("SIGSEGV", "killed by signal 11 (SIGSEGV)"),
        ("exit", "ended by exit code 7"),
        ("sys.exit", "raised SystemExit: 0"),
    ],
)
def test_a_dead_process_is_reported_as_such(how, fate):
    with pytest.raises(RankFailure) as caught:
        run_ranks(end_by, 2, how, 1, mode="process")
    assert caught.value.fates == {0: "returned", 1: fate}
    if how == "SIGSEGV":
        assert "in end_by" in str(caught.value)


@pytest.mark.parametrize(("how", "code"), [("SIGKILL", -9), ("exit", 7)])
def test_expected_exit(how, code):
    assert run_ranks(end_by, 3, how, 1, mode="process", expect_exit={1: code}) == ["alive", None, "alive"]


@pytest.mark.parametrize(
    ("how", "victim", "expect_exit", "rank", "fate"),
    [
        ("exit", 1, {1: -9}, 1, "ended by exit code 7, but had to be killed by signal 9 (SIGKILL)"),
        ("exit", 1, {0: 7, 1: 7}, 0, "returned, but had to be ended by exit code 7"),
        ("exit", 1, {0: 0, 1: 7}, 0, "returned, but had to be ended by exit code 0"),
        ("sys.exit", 0, {0: 1}, 0, "raised SystemExit: 0, but had to be ended by exit code 1"),
    ],
)
def test_another_exit_than_expected(how, victim, expect_exit, rank, fate):
    with pytest.raises(RankFailure) as caught:
        run_ranks(end_by, 2, how, victim, mode="process", expect_exit=expect_exit)
    assert caught.value.fates[rank] == fate


def unpicklable(group):
    return threading.Lock()


class WontComeBack:
    def __reduce__(self):
        return int, ("not a number",)


def wont_come_back(group):
    return WontComeBack()


def test_results_that_do_not_travel():
    with pytest.raises(RankFailure, match=r"rank 0: raised TypeError: cannot pickle '_thread.lock'"):
        run_ranks(unpicklable, 1, mode="process")
    with pytest.raises(RankFailure, match="(?s)rank 0: returned what cannot be unpickled here.*not a number"):
        run_ranks(wont_come_back, 1, mode="process")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1 (got 0)"),
        ({"mode": "fiber"}, 'mode must be "thread" or "process" (got \'fiber\')'),
        ({"start": "forkserver"}, 'start must be "fork" or "spawn" (got \'forkserver\')'),
        ({"timeout_s": 0}, "timeout_s must be above 0 (got 0)"),
        ({"expect_exit": {0: 1}, "mode": "thread"}, "expect_exit needs mode='process' (got {0: 1})"),
        ({"expect_exit": {2: 1}}, "expect_exit must name ranks below num_ranks=2 (got [2])"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(DcpInvalidArgument) as caught:
        run_ranks(pids, **({"num_ranks": 2, "mode": "process"} | arguments))
    assert str(caught.value) == f"run_ranks: {text}"


def test_a_function_that_processes_cannot_find():
    with pytest.raises(DcpInvalidArgument, match="fn, at the top level of a module"):
        run_ranks(lambda group: None, 1, mode="process")


# -- where fn may live

SCRIPT = """
    import torch
    from dcpkernels.testing import run_ranks

    class Local:
        def __init__(self, rank):
            self.rank = rank

    def body(group):
        return Local(torch.distributed.get_rank())

    if __name__ == "__main__":
        results = run_ranks(body, 2, mode="process")
        assert all(type(local) is Local for local in results)
        print([local.rank for local in results])
"""


def run_python(*arguments, cwd):
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env, check=False)


@pytest.mark.parametrize("how", ["script", "module"])
def test_fn_in_a_script(tmp_path, how):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text("import torch\n")
    script = textwrap.dedent(SCRIPT)
    if how == "module":
        script = script.replace("import torch", "from .other import torch", 1)
    (tmp_path / "package" / "script.py").write_text(script)
    done = run_python(*(["-m", "package.script"] if how == "module" else ["package/script.py"]), cwd=tmp_path)
    assert done.stdout == "[0, 1]\n", done.stderr


def test_a_script_without_a_guard_does_not_multiply(tmp_path):
    script = textwrap.dedent(SCRIPT).replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "script.py").write_text(script)
    done = run_python("script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "run_ranks: a script must call it under `if __name__ ==" in done.stderr


def test_fn_in_a_module_that_is_not_on_the_path_or_shares_its_name(tmp_path, monkeypatch):
    """As pytest's importlib mode leaves test modules, and as two folders of tests may have them."""
    for folder, value in (("first", 1), ("second", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"def body(group):\n    return {value}\n")
    monkeypatch.syspath_prepend(tmp_path / "first")
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("same_name", tmp_path / "second" / "same_name.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "same_name", module)
    spec.loader.exec_module(module)
    assert run_ranks(module.body, 1, mode="process") == [2]


# -- nothing is left behind

LEAVE = """
    import os, sys, time
    from dcpkernels.testing import run_ranks

    def body(group, path):
        with open(path, "a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\\n")
        time.sleep(60)

    if __name__ == "__main__":
        run_ranks(body, 2, sys.argv[1], mode="process")
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"  # nobody may reap it here
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["caller", "server", "interrupt"])
def test_ranks_die_with_the_caller_and_with_the_server(tmp_path, victim):
    script, report, temporary = tmp_path / "leave.py", tmp_path / "pids", tmp_path / "tmp"
    temporary.mkdir()
    script.write_text(textwrap.dedent(LEAVE))
    report.touch()
    env = os.environ | {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(temporary)}
    caller = subprocess.Popen([sys.executable, str(script), str(report)], env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: report.read_text().count("\n") == 2, timeout_s=60)
        ranks_and_server = {int(word) for word in report.read_text().split()}
        server = int(report.read_text().split()[1])
        assert len(ranks_and_server) == 3
        assert not any(gone(pid) for pid in ranks_and_server)
        if victim == "server":
            os.kill(server, signal.SIGKILL)
        else:
            caller.send_signal(signal.SIGKILL if victim == "caller" else signal.SIGINT)
        _, errors = caller.communicate(timeout=10)
        wait_until(lambda: all(gone(pid) for pid in ranks_and_server))
        assert list(temporary.iterdir()) == []
    finally:
        caller.kill()
    if victim == "server":
        assert "lost with its fork server (run_ranks: the fork server must live (it ended by exit code -9))" in errors
    elif victim == "interrupt":
        assert "KeyboardInterrupt" in errors


def test_a_new_server_follows_one_that_died():
    ((_, server),) = run_ranks(pids, 1, mode="process")
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: gone(server))
    ((_, other),) = run_ranks(pids, 1, mode="process")
    assert other != server


def test_descriptors_are_closed():
    run_ranks(pids, 2, mode="process")
    before = set(os.listdir("/proc/self/fd"))
    run_ranks(pids, 2, mode="process")
    with pytest.raises(RankFailure):
        run_ranks(end_by, 2, "exit", 0, mode="process")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_fork_of_the_caller_does_not_own_the_server():
    ((_, server),) = run_ranks(pids, 1, mode="process")
    pid = os.fork()
    if pid == 0:
        os._exit(_processes._Shared.server is not None)
    assert os.waitpid(pid, 0)[1] == 0
    assert run_ranks(pids, 1, mode="process")[0][1] == server


def test_failures_survive_pickling():
    failure = RankFailure("text", {0: "returned", 1: "raised X"})
    again = pickle.loads(pickle.dumps(failure))
    assert (str(again), again.fates) == ("text", failure.fates)
