"""The near side of `run_ranks` in process mode: starts ranks through a fork server, waits, and tidies up.

What goes to a rank and comes back lies in memory files (memfd): no pipe can fill up, a rank that stops
halfway blocks nobody, and a killed process leaves nothing behind.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dcpkernels.errors import DcpInvalidArgument
from dcpkernels.testing import _worker
from dcpkernels.testing._outcome import Clock, Outcome
from dcpkernels.testing._worker import MAIN_ALIAS, MESSAGE_BYTES, Job, RankFds, read_file, write_file

_READY_S = 300.0  # a server imports torch, from a cold disk at worst
_STACKS_S = 1.0  # a process writes its stacks
_KILLED_S = 10.0  # a killed process ends


class _ServerLost(RuntimeError):
    """A fork server is of no more use."""


class _Server:
    """A fork server (`_worker.serve`) and the socket to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {
            # The server has to import the very dcpkernels that the caller has, wherever that came from ...
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            # ... and no library in it may start threads, which a fork would not copy.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        preload = [
            "numpy",
            "torch",
            "torch.distributed",
            "dcpkernels.workspace",
            "dcpkernels.ops",
            "dcpkernels.heap.gloo",
        ]
        if "pytest" in sys.modules:  # a test module imports it, in every rank again unless the server has
            preload.append("pytest")
        command = f"from dcpkernels.testing._worker import serve; serve({theirs.fileno()}, {preload})"
        self._is_ready = False
        self._process: subprocess.Popen | None = None
        try:
            with theirs, _interrupts_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", command], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env
                )
        except KeyboardInterrupt:  # it came in between
            self.close()
            raise

    def wait_ready(self) -> None:
        if not select.select([self.socket], [], [], _READY_S)[0]:
            raise _ServerLost(f"run_ranks: the fork server must be ready within {_READY_S:g} s")
        self.receive()
        self._is_ready = True

    def send(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self.socket, [pickle.dumps(message)], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost() from None

    def receive(self) -> tuple[Any, ...]:
        try:
            data = self.socket.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._lost()
        return pickle.loads(data)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """The server ends when its socket closes, and the ranks that still run die with it."""
        self.socket.close()
        if self._process is None:
            return
        if not self._is_ready:  # it would see that when its imports are done, and has no ranks yet
            self._process.kill()
        self._wait()

    def _lost(self) -> _ServerLost:
        return _ServerLost(f"run_ranks: the fork server must live (it ended by exit code {self._wait()})")

    def _wait(self) -> int:
        try:
            return self._process.wait(_KILLED_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """SIGINT waits in this thread, and in processes that it starts here for as long as they want: Ctrl-C goes to the whole
    group, and a server that still imports would answer it with a traceback of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Shared:
    """The fork server that all calls share, one call at a time."""

    lock = threading.Lock()
    server: _Server | None = None

    @classmethod
    def drop(cls) -> None:
        if cls.server is not None:
            server, cls.server = cls.server, None
            server.close()

    @classmethod
    def forget(cls) -> None:
        """In a fork of the caller: the server is the parent's; it ends when no copy of the socket is open."""
        cls.lock = threading.Lock()
        if cls.server is not None:
            cls.server.socket.close()
            cls.server = None


atexit.register(_Shared.drop)
os.register_at_fork(after_in_child=_Shared.forget)


@contextmanager
def _servers(num_ranks: int, start: str) -> Iterator[list[_Server]]:
    """A server for each rank. Whatever ends the block by an exception, no rank is left running."""
    if start == "spawn":
        with ExitStack() as stack:
            servers = [_Server() for _ in range(num_ranks)]
            for server in servers:
                stack.callback(server.close)
            for server in servers:
                server.wait_ready()
            yield servers
        return
    with _Shared.lock:
        try:
            if _Shared.server is None or not _Shared.server.alive():
                _Shared.drop()
                _Shared.server = _Server()
                _Shared.server.wait_ready()
            yield [_Shared.server] * num_ranks
        except BaseException:
            _Shared.drop()
            raise


def run_processes(
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    timeout_s: float,
    expect_exit: dict[int, int],
    start: str,
) -> list[Outcome]:
    """Runs the ranks and returns when the last process has ended."""
    if _worker.loading:
        raise DcpInvalidArgument(
            'run_ranks: a script must call it under `if __name__ == "__main__":` (called while imported)'
        )
    with ExitStack() as stack:
        job = _job(fn, args, num_ranks, timeout_s)
        job_fd, store_fd = _memory_file(stack, "job"), _memory_file(stack, "store")
        write_file(job_fd, pickle.dumps(job))
        fds = [
            RankFds(job_fd, store_fd, _memory_file(stack, "result"), _memory_file(stack, "stacks"), stdout=1, stderr=2)
            for _ in range(num_ranks)
        ]
        run = _Run(stack.enter_context(_servers(num_ranks, start)), fds, expect_exit, Clock(timeout_s))
        return run.run()


class _Run:
    """One call of `run_processes`, from the start of the ranks on."""

    def __init__(self, servers: list[_Server], fds: list[RankFds], expect_exit: dict[int, int], clock: Clock) -> None:
        self._servers = servers
        self._fds = fds
        self._expect_exit = expect_exit
        self._clock = clock
        self._ranks = [Outcome() for _ in fds]
        self._running = set(range(len(fds)))  # their processes, whether given up or not

    def run(self) -> list[Outcome]:
        sys.stdout.flush()  # what the caller has written comes before what the ranks write
        sys.stderr.flush()
        try:
            for i, server in enumerate(self._servers):
                server.send("start", i, fds=self._fds[i])
            self._collect(self._clock.remaining_s)
            if self._running:
                self._give_up()
        except _ServerLost as lost:
            for rank in self._ranks:
                if not rank.ended:
                    rank.end(f"lost with its fork server ({lost})", failed=True)
        return self._ranks

    def _collect(self, remaining_s: Callable[[], float]) -> None:
        """Takes the exits of ranks until none is running or no time is left."""
        while self._running and remaining_s() > 0:
            by_socket = {self._servers[i].socket: self._servers[i] for i in self._running}
            for ready in select.select(list(by_socket), [], [], remaining_s())[0]:
                _, i, exit_code = by_socket[ready].receive()
                self._running.discard(i)
                if not self._ranks[i].ended:
                    self._settle(i, exit_code)

    def _settle(self, i: int, exit_code: int) -> None:
        """A process has ended: what that means for its rank."""
        rank, expected, data = self._ranks[i], self._expect_exit.get(i), read_file(self._fds[i].result)
        came_back = bool(data) and exit_code in (0, 1)
        if came_back:
            _end_with_result(rank, data)
        else:
            rank.end(_exit_text(exit_code), failed=exit_code != expected, detail=_text(self._fds[i].stacks))
        if expected is not None and (came_back or rank.failed):
            rank.end(f"{rank.fate}, but had to be {_exit_text(expected)}", failed=True, detail=rank.detail)
        if rank.failed:
            self._clock.first_failure()

    def _give_up(self) -> None:
        """Time is up: writes down where each rank is, and kills it."""
        for i in self._running:
            # A process that somebody has stopped shows no stack before it may go on.
            self._kill(i, signal.SIGCONT)
            self._kill(i, signal.SIGUSR1)
        self._wait_for_stacks()
        for i in self._running:
            self._ranks[i].end(self._clock.why_stopped(), failed=True, detail=_text(self._fds[i].stacks))
            self._kill(i, signal.SIGKILL)
        self._collect(Clock(_KILLED_S).remaining_s)
        if self._running:
            raise _ServerLost(f"run_ranks: a killed rank must end (still there: {sorted(self._running)})")

    def _wait_for_stacks(self) -> None:
        sizes, clock = None, Clock(_STACKS_S)
        while clock.remaining_s() > 0:
            time.sleep(0.02)
            before, sizes = sizes, [os.fstat(self._fds[i].stacks).st_size for i in sorted(self._running)]
            if all(sizes) and sizes == before:
                return

    def _kill(self, i: int, signum: int) -> None:
        self._servers[i].send("kill", i, int(signum))


def _end_with_result(rank: Outcome, data: bytes) -> None:
    try:
        kind, *rest = pickle.loads(data)
    except Exception:  # noqa: BLE001  whatever a class does when it is rebuilt
        rank.end("returned what cannot be unpickled here", failed=True, detail=traceback.format_exc())
        return
    if kind == "returned":
        rank.end("returned", result=rest[0])
    else:
        rank.end(f"raised {rest[0]}", failed=True, detail=rest[1])


def _exit_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended by exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = "?"
    return f"killed by signal {-exit_code} ({name})"


def _text(fd: int) -> str:
    return read_file(fd).decode(errors="replace")


def _memory_file(stack: ExitStack, name: str) -> int:
    fd = os.memfd_create(f"dcpkernels-ranks-{name}")
    stack.callback(os.close, fd)
    return fd


def _job(fn: Callable[..., Any], args: tuple[Any, ...], num_ranks: int, timeout_s: float) -> Job:
    name = getattr(fn, "__module__", None) or type(fn).__module__
    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    try:
        call = pickle.dumps((fn, args))
    except Exception as error:  # pickle, and any class on the way, raises what it likes
        raise DcpInvalidArgument(
            f"run_ranks: fn, at the top level of a module, and its arguments must be picklable (got {error})"
        ) from error
    spec = module.__spec__ if name == "__main__" else None
    if name == "__main__":
        if file is None:
            raise DcpInvalidArgument(f"run_ranks: fn must be in a file, for processes to import it (got {fn!r})")
        sys.modules[MAIN_ALIAS] = module  # what comes back of classes in it is called so
    return Job(
        num_ranks=num_ranks,
        timeout_s=timeout_s,
        environ=dict(os.environ),
        cwd=os.getcwd(),
        sys_path=[os.path.abspath(path) for path in sys.path],
        module=name,
        module_file=None if file is None else os.path.abspath(file),
        main_name=None if spec is None else spec.name,
        call=call,
    )
