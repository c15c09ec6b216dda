"""Whether ranks on CPUs could share memory here: done by the heap's own functions, not looked up."""

from __future__ import annotations

import ctypes
import os
import time

from dcpkernels.errors import DcpError
from dcpkernels.heap import sockets
from dcpkernels.heap.group import Deadline
from dcpkernels.heap.region import Region, check_file, create_file

_NBYTES = 1 << 20
_MARK = b"dcpkernels doctor"
_TIMEOUT_S = 5.0


def try_it() -> None:
    """A sealed file of 1 MiB goes through a socket with an abstract name, is checked and mapped, and what is written at one
    address is read at the other. Raises what fails."""
    sockets.host_id()  # by which ranks find out that they are on one host
    listener = sockets.Listener(backlog=2)
    file, files = create_file(_NBYTES), []
    regions: list[Region] = []
    ends = []
    try:
        deadline = Deadline(_TIMEOUT_S)
        ends.append(sockets.dial(1, listener.address, deadline))
        while (end := sockets.accept(listener.socket)) is None:
            if deadline.expired:
                raise DcpError("a connection to the own socket must arrive (it has not)")
            time.sleep(0.005)
        ends.append(end)
        sockets.send(ends[0], 1, b"region", deadline, file)
        while sockets.read(ends[1], files) is None:
            if deadline.expired:
                raise DcpError("a message to the own socket must arrive (it has not)")
            time.sleep(0.005)
        if not files:
            raise DcpError("a descriptor must arrive with its message (it has not)")
        check_file(files[0], _NBYTES, 0)
        regions = [Region(fd, _NBYTES) for fd in (file, files[0])]
        ctypes.memmove(regions[0].address, _MARK, len(_MARK))
        if ctypes.string_at(regions[1].address, len(_MARK)) != _MARK:
            raise DcpError("two mappings of one file must show the same bytes (they do not)")
    finally:
        for region in regions:
            region.release()
        for fd in (file, *files):
            os.close(fd)
        for end in ends:
            end.close()
        listener.close()
