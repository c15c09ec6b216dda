"""The far side of `run_ranks` in process mode: a server that forks ranks, and what a rank does.

A rank costs a fork, not an import of torch, because the server has imported it. Two facts make this safe and
keep processes from piling up: the server runs no thread besides its own, so a fork copies no lock that
somebody holds; and each generation watches the one before it. The server ends its ranks and itself when the
caller's socket closes, and the kernel kills a rank when the server is gone, so that no SIGKILL, of whomever,
leaves a rank behind.

Messages are pickled tuples over one SOCK_SEQPACKET Unix socket, descriptors ride along:
    caller -> server   ("start", rank) with the descriptors of RankFds    ("kill", rank, signal)
    server -> caller   ("ready",) once, when it can fork    ("exit", rank, exit code, negative for a signal)
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 4096
MAIN_ALIAS = "__rank_main__"  # __name__ of the caller's script in a rank

loading = False  # true in a rank while it imports the module of its fn


class RankFds(NamedTuple):
    job: int  # in: pickled Job, the same file for all ranks
    store: int  # the file through which gloo's ranks find each other, the same for all ranks
    result: int  # out: pickled ("returned", value) or ("raised", one line, traceback)
    stacks: int  # out: stacks of all threads, at SIGUSR1 and at a fatal signal
    stdout: int
    stderr: int


class Job(NamedTuple):
    num_ranks: int
    timeout_s: float
    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    module: str  # where fn lives, and its file if it has one
    module_file: str | None
    main_name: str | None  # of a `__main__` that was started as `python -m NAME`
    call: bytes  # pickled (fn, args): to be unpickled when the module is there


def serve(control_fd: int, preload: Sequence[str]) -> None:
    """Runs the server until the caller's end of the socket closes. Ranks find `preload` imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the caller decides
    for name in preload:
        importlib.import_module(name)
    # A collection in a rank would write to the pages of every object here, and so copy them all (0.1 s a rank).
    gc.collect()
    gc.freeze()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up pipe
    running: dict[int, int] = {}  # pid -> rank
    # A caller that is gone shows as the end of what it sends, or as a broken pipe.
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError):
        control.send(pickle.dumps(("ready",)))
        while True:
            ready, _, _ = select.select([control, wake_r], [], [])
            if wake_r in ready:
                os.read(wake_r, MESSAGE_BYTES)
                for rank, exit_code in _reap(running):
                    control.send(pickle.dumps(("exit", rank, exit_code)))
            if control in ready:
                data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, len(RankFds._fields))
                if not data:
                    break
                kind, rank, *rest = pickle.loads(data)
                if kind == "start":
                    pid = os.fork()
                    if pid == 0:
                        for fd in (control.fileno(), wake_r, wake_w):
                            os.close(fd)
                        _run_rank(rank, RankFds(*fds))
                    running[pid] = rank
                    for fd in fds:
                        os.close(fd)
                else:
                    for pid in [pid for pid, other in running.items() if other == rank]:
                        os.kill(pid, *rest)  # not reaped yet, so the pid cannot be anybody else's
    # Leaving ends the ranks that still run, here and on any exception: they die with their parent.


def _reap(running: dict[int, int]) -> list[tuple[int, int]]:
    ended = []
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append((running.pop(pid), os.waitstatus_to_exitcode(status)))
    return ended


def _run_rank(rank: int, fds: RankFds) -> NoReturn:
    """The whole life of a rank, from the fork to `_exit`: no clean-up of the server's may run here."""
    code = 1
    try:
        _die_with(os.getppid())
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the server was started with it blocked
        faulthandler.register(signal.SIGUSR1, file=fds.stacks, all_threads=True)
        faulthandler.enable(file=fds.stacks, all_threads=True)
        os.dup2(fds.stdout, 1)
        os.dup2(fds.stderr, 2)
        try:
            outcome = pickle.dumps(("returned", _call(rank, pickle.loads(read_file(fds.job)), fds.store)))
            code = 0
        except BaseException as error:  # noqa: BLE001  also SystemExit: the caller sees whatever ended fn
            outcome = pickle.dumps(("raised", one_line(error), traceback.format_exc()))
        write_file(fds.result, outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # The process group goes down with the process; a tidy destroy could wait for a rank that is dead.
        os._exit(code)


def _die_with(server_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server_pid:  # it died before the kernel knew
        os._exit(1)


def _call(rank: int, job: Job, store_fd: int) -> Any:
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    fn, args = _load_call(job)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        # A path to a file without a name: no killed process leaves it behind.
        store=dist.FileStore(f"/proc/self/fd/{store_fd}", job.num_ranks),
        rank=rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=job.timeout_s),
    )
    dist.barrier()  # a short fn could end this process while others still connect to it
    return fn(dist.group.WORLD, *args)


def _load_call(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fn` and its arguments, after having made the module of `fn` importable by the name in the pickle."""
    global loading
    loading = True
    if job.module == "__main__":
        _run_main(job)
    elif job.module_file is not None and not _is_found_by_name(job.module, job.module_file):
        # Test modules need not be on sys.path, and two of them may share a name.
        spec = importlib.util.spec_from_file_location(job.module, job.module_file)
        assert spec is not None and spec.loader is not None
        sys.modules[job.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[job.module])
    call = pickle.loads(job.call)
    loading = False
    return call


def _run_main(job: Job) -> None:
    """The caller's script once more, under a name that keeps the block behind its guard from running."""
    module = sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = ModuleType(MAIN_ALIAS)
    if job.main_name is not None:
        names = runpy.run_module(job.main_name, run_name=MAIN_ALIAS, alter_sys=True)
    else:
        assert job.module_file is not None
        names = runpy.run_path(job.module_file, run_name=MAIN_ALIAS)
    vars(module).update(names)
    sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = module  # runpy has put back what it found


def _is_found_by_name(name: str, file: str) -> bool:
    """Whether importing `name` gives the very file that the caller runs."""
    if name in sys.modules:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def one_line(error: BaseException) -> str:
    """Type and first line of the text of an exception."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def read_file(fd: int) -> bytes:
    """A file from its start; the position is shared with other processes, so it is neither used nor moved."""
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)


def write_file(fd: int, data: bytes) -> None:
    """All of `data`, from the position on."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
