"""Open MPI in the rank processes of the bench, so that it takes turns with the others in one process.

MPI's ranks come from mpirun, ours from `run_ranks`. Here mpirun starts processes that only keep a place each
(`openmpi_place`): they write down the environment that mpirun gave them and do no MPI. A rank process takes over the
environment of the place of its number, and MPI_Init finds the job by it as it would in a child of mpirun.

All is left as Open MPI chooses it but for two things: ranks may share CPUs, and then an idle one yields; and nothing
is bound by mpirun, because the ranks bind themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dcpkernels import _backend
from dcpkernels.cli import openmpi_place
from dcpkernels.errors import DcpUnsupported

_START_S = 60.0  # mpirun has started all places
_END_S = 20.0  # mpirun ends by itself when the places have

_INSTALL = "pip install 'mpi4py>=4.1' openmpi, or mpi4py and the openmpi of the system"


def require() -> str:
    """Version of the Open MPI that is there, for example "Open MPI v5.0.11". Raises DcpUnsupported where it is not."""
    try:
        version = _mpi().Get_library_version()
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        raise _unsupported(str(error)) from None
    if not version.startswith("Open MPI"):
        raise _unsupported(f"mpi4py of {_first(version)}")
    _mpirun()
    return _first(version)


@contextmanager
def job(num_ranks: int) -> Iterator[str]:
    """An MPI job with a place for each rank: the folder that the ranks give to `joined`.

    It ends with the block, and when this process is killed. Raises DcpUnsupported when mpirun cannot start it.
    """
    with tempfile.TemporaryDirectory(prefix="dcpkernels-mpi-") as folder:
        command = _command(num_ranks, folder)
        stay_path = os.path.join(folder, openmpi_place.STAY)
        os.mkfifo(stay_path)
        stay = os.open(stay_path, os.O_RDWR)  # no process that is started from here inherits it
        with open(os.path.join(folder, "output"), "w") as output:
            # In a session of its own: Ctrl-C at a terminal goes to this process, which ends the job. An mpirun that ends
            # before the ranks lets each of them complain of a lost server.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        try:
            _wait_for_places(process, num_ranks, Path(folder))
            yield folder
        finally:
            os.close(stay)  # the places end, and mpirun with them
            _end(process)


@contextmanager
def joined(folder: str, rank: int, num_ranks: int) -> Iterator[Any]:
    """In a rank process: mpi4py's communicator of the job. Once in a process; it is of no use after the block."""
    os.environ.update(json.loads(Path(folder, str(rank)).read_text()))
    mpi = _mpi()
    mpi.Init()
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) != (rank, num_ranks):
        raise DcpUnsupported(
            f"bench: mpirun must be of the Open MPI that mpi4py has loaded: rank {rank} of {num_ranks} must have its "
            f"place (got rank {comm.rank} of {comm.size} from {_mpirun()})"
        )
    yield comm
    mpi.Finalize()  # not after an exception: it waits for the other ranks, which may wait for this one


def all_to_all(comm: Any, recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
    """MPI_Alltoall of equal parts of two contiguous uint8 tensors, prepared: what is returned does one exchange."""
    byte = _mpi().BYTE
    send_spec, recv_spec = [send.numpy(), byte], [recv.numpy(), byte]
    return lambda: comm.Alltoall(send_spec, recv_spec)


def all_gather(comm: Any, recv: torch.Tensor, send: torch.Tensor) -> Callable[[], object]:
    """MPI_Allgather of contiguous tensors of one integer type, prepared. Its counts are in elements and 32 bits wide:
    with 8 bytes each, as `exact.words_of` makes them, a rank's part may have 16 GiB.
    """
    send_array, recv_array = send.numpy(), recv.numpy()
    return lambda: comm.Allgather(send_array, recv_array)


def _mpi() -> Any:
    """mpi4py.MPI, neither initialized by being imported nor finalized at exit."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _mpirun() -> str:
    """The one beside this Python comes first: mpi4py, too, looks there first for the library."""
    found = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
    if found is None:
        raise _unsupported("no mpirun on PATH")
    return found


def _command(num_ranks: int, folder: str) -> list[str]:
    yield_when_idle = int(num_ranks > _backend.num_usable_cpus())
    return [
        *(_mpirun(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("--host", f"localhost:{num_ranks}", "--mca", "mpi_yield_when_idle", str(yield_when_idle)),
        *("-n", str(num_ranks), sys.executable, openmpi_place.__file__, folder),
    ]


def _wait_for_places(process: subprocess.Popen, num_ranks: int, folder: Path) -> None:
    until = time.monotonic() + _START_S
    while not all((folder / str(rank)).exists() for rank in range(num_ranks)):
        if process.poll() is not None or time.monotonic() > until:
            said = " ".join((folder / "output").read_text().split())
            raise DcpUnsupported(
                f"bench: mpirun must start {num_ranks} processes within {_START_S:g} s (got exit code "
                f"{process.returncode} from {_mpirun()}: {said[-500:]})"
            )
        time.sleep(0.01)


def _end(process: subprocess.Popen) -> None:
    """Waits for mpirun, then tells it to end, when it still removes its processes and files, and kills it at last."""
    for stop in (process.terminate, process.kill, lambda: None):
        try:
            process.wait(_END_S)
            return
        except subprocess.TimeoutExpired:
            stop()


def _unsupported(got: str) -> DcpUnsupported:
    return DcpUnsupported(f"bench: baselines openmpi need Open MPI and mpi4py: {_INSTALL} (got {_first(got)})")


def _first(text: str) -> str:
    """For example "Open MPI v5.0.11", of what Open MPI says of itself, which goes on with who built it."""
    return text.splitlines()[0].split(",")[0].strip() if text.strip() else "nothing"
