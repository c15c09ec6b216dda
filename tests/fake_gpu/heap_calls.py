"""What the tests of the heaps of GPUs share: making one over a fake driver, and what must be gone afterwards."""

import contextlib
import ctypes
import os
from pathlib import Path

from dcpkernels.errors import DcpError
from dcpkernels.heap import sockets
from dcpkernels.heap.group import as_group
from tests.fake_gpu import pages

NBYTES = 3 * 4096 + 100
CONTROL_NBYTES = 1000


def make_heap(heap_class, group, fake, nbytes=NBYTES, **options):
    group = as_group(group)
    given = {
        "device": group.rank,
        "control_nbytes": CONTROL_NBYTES,
        "init": lambda address: None,
        "payload": {},
        "timeout_s": 20.0,
    }
    return heap_class.create(group, nbytes, driver_api=fake, **given | options)


def meet(group):
    as_group(group).all_gather_object(None, timeout_s=20.0)


def write(address, data):
    ctypes.memmove(address, data, len(data))


def read(address, nbytes):
    return ctypes.string_at(address, nbytes)


def on_hosts(host):
    """Has this process live on a host of that name, as far as the heap can tell."""
    sockets.host_id = lambda: (host, 1)


def held(fake):
    """All that a heap could leave behind: of the driver, mappings and files of its memory, Unix sockets."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    num_sockets = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            num_sockets += os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]") in unix
    return fake.live(), pages.mappings(), pages.files(), num_sockets


def outcome(call):
    """(class, text, ranks) of what `call` raises; fails when it raises nothing."""
    try:
        call()
    except DcpError as error:
        return type(error), str(error), error.ranks
    raise AssertionError("must raise")


def same_everywhere(results):
    assert all(result == results[0] for result in results), results
    return results[0]
