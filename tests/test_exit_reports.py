"""How interpreters begin and end with this library in them, as users of other libraries reported it: imports that touch
things, exits that hang, abort, or hide the first error. The table of reports is in test_lifecycle_reports.py."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

# Two ranks for each case, forked from a process that has imported all, and used nothing of it. Each ends as a script does.
ENDS = """
import gc, json, os, sys, time
import torch, torch.distributed as dist
import dcpkernels.collective, dcpkernels._backend
dcpkernels._backend.load("cpu")
gc.freeze()
folder, backend, cases = sys.argv[1], sys.argv[2], sys.argv[3:]

def begin(case, rank):
    from dcpkernels import Workspace, WorkspaceConfig
    store = dist.FileStore(f"{folder}/{case}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    config = WorkspaceConfig(4, 64, 8, timeout_s=2.0, first_call_timeout_s=2.0)
    return Workspace(config=config, backend=backend)

def call(workspace, num_tokens=2):
    from dcpkernels import a2a_lse_reduce
    payload, lse = torch.ones(num_tokens, 4, 64).bfloat16(), torch.zeros(num_tokens, 4)
    assert a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e").eq(1).all()

def run(case, rank):
    global kept
    kept = workspace = begin(case, rank)
    call(workspace)
    if case == "close":
        workspace.close()
    elif case == "close without the group":
        dist.destroy_process_group()
        workspace.close()
    elif case == "one drops it":
        if rank == 0:
            kept = workspace = None
            gc.collect()
        dist.barrier()
        for i in range(100):
            dist.all_reduce(torch.ones(8))
        dist.barrier()
    elif case == "a cycle with it":
        cycle = [workspace]
        cycle.append(cycle)
        kept = workspace = cycle = None
    elif case == "an error in a block":
        with workspace:
            call(workspace)
            if rank == 1:
                raise ValueError("the first error")
            call(workspace)
    elif case == "a mismatch":
        call(workspace, 2 + rank)
    elif case == "a timeout":
        if rank == 1:
            time.sleep(4)
        else:
            call(workspace)

for case in cases:
    pids, start = [], time.monotonic()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            said = os.open(f"{folder}/{case}-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1), os.dup2(said, 2)
            run(case, rank)
            sys.exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(json.dumps([case, codes, time.monotonic() - start]))
    sys.stdout.flush()
"""

# case -> exit codes, and what the last line on stderr begins with
CASES = {
    "close": ([0, 0], ["", ""]),
    "close without the group": ([0, 0], ["", ""]),
    "no close": ([0, 0], ["", ""]),
    "one drops it": ([0, 0], ["", ""]),
    "a cycle with it": ([0, 0], ["", ""]),
    "an error in a block": ([1, 1], ["dcpkernels.errors.DcpPeerLost: ", "ValueError: the first error"]),
    "a mismatch": ([1, 1], ["dcpkernels.errors.DcpMismatch: "] * 2),
    "a timeout": ([1, 0], ["dcpkernels.errors.DcpTimeout: ", ""]),
}
BACKENDS = {"direct": [*CASES], "collective": ["no close", "one drops it", "an error in a block"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_how_interpreters_end(backend, tmp_path):
    """pytorch#195500, pytorch#196003, vllm#46509. With and without close(), dropped on one rank while the other works on,
    after a fault and after an error of the caller's: at once, in silence or with the first error and nothing else."""
    command = [sys.executable, "-c", ENDS, str(tmp_path), backend, *BACKENDS[backend]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case, *_ in results] == BACKENDS[backend]
    for case, codes, seconds in results:
        expected, last_lines = CASES[case]
        said = [(tmp_path / f"{case}-{rank}").read_text() for rank in (0, 1)]
        assert codes == expected and seconds < 20, (case, codes, seconds, said)
        for rank, (text, begin) in enumerate(zip(said, last_lines, strict=True)):
            last = text.rstrip().rpartition("\n")[2]
            if begin:  # torch puts the rank before each line
                assert last.removeprefix(f"[rank{rank}]: ").startswith(begin), (case, text)
                assert "Fatal" not in text and "terminate" not in text and "Exception ignored" not in text, (case, text)
            else:
                assert text == "", (case, text)


IMPORTS = """
import importlib, os, sys, threading
import torch
events = []
quiet = ("import", "compile", "exec", "marshal.loads", "object.__getattr__", "code.__new__", "sys._getframe", "os.listdir",
         "object.__setattr__", "object.__delattr__", "function.__new__", "ctypes.cdata/buffer", "os.scandir")
def note(name, arguments):
    if watching and name not in quiet and not (name == "open" and is_read(*arguments)):
        events.append((name, [str(a)[:200] for a in arguments]))
def is_read(path, mode, flags):
    text = str(path)
    return not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and not text.startswith("/dev/")
watching = True
sys.addaudithook(note)
before, fds = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
import dcpkernels
for name in dcpkernels.__all__:
    getattr(dcpkernels, name)
import dcpkernels.testing, dcpkernels.reference, dcpkernels.planner
watching = False
events = [e for e in events if e[0] not in ("ctypes.dlsym", "builtins.id")]
assert events == [("ctypes.dlopen", ["None"])], events  # the C library that the process has
assert threading.active_count() == before and sorted(os.listdir("/proc/self/fd")) == fds
assert not torch.cuda.is_initialized()

def use(package):
    def body(group):
        with package.Workspace(group, config=package.WorkspaceConfig(4, 64, 8)) as workspace:
            payload, lse = torch.ones(2, 4, 64).bfloat16(), torch.zeros(2, 4)
            assert package.a2a_lse_reduce(payload, lse, workspace=workspace, lse_base="e").eq(1).all()
    importlib.import_module("dcpkernels.testing").run_ranks(body, 2)

def in_a_child(body):
    pid = os.fork()
    if pid == 0:
        body()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

in_a_child(lambda: use(dcpkernels))  # imported before the fork, used after it
use(dcpkernels)
in_a_child(lambda: use(dcpkernels))  # used on both sides

first = dcpkernels
for name in [name for name in sys.modules if name.startswith("dcpkernels") and "._C_" not in name]:
    del sys.modules[name]
again = importlib.import_module("dcpkernels")  # as a plugin that brings a copy of the package with it
assert again is not first
use(again)
print("done")
"""


def test_importing_touches_nothing():
    """Sections C1 and C2: an import opens no device, no socket and no file to write, starts nothing and says nothing; a
    child that was forked after it, or after use, can use all. A second import is none that ends the process."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(IMPORTS)], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
