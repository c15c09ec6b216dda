"""The shared region: one memory for the whole group. A byte that any rank stores there is stored for all.

One rank makes it, all map it. Two steps, each with a group verdict:

1. `create shared region`: a sealed file as for any region, by one rank.
2. `map shared region`: its descriptor goes over the sockets; thread ranks take that rank's mapping itself.
"""

from __future__ import annotations

import os
from typing import Any

from dcpkernels.errors import DcpError
from dcpkernels.heap.group import Deadline, Group
from dcpkernels.heap.memory import SHARED_MAKER
from dcpkernels.heap.mesh import Mesh
from dcpkernels.heap.region import Region, check_file, collapse, create_file
from dcpkernels.heap.verdict import agree, attempt


class SharedRegion:
    """What one rank holds of it: nothing, until `make`."""

    def __init__(self) -> None:
        self._file = -1
        self._regions: list[Region] = []  # the writable one; behind it the read-only one, where there is one

    @property
    def address(self) -> int:
        """Where this process can write it, 0 when there is none."""
        return self._regions[0].address if self._regions else 0

    def make(
        self, op: str, group: Group, mesh: Mesh | None, nbytes: int, *, read_only_views: bool, deadline: Deadline
    ) -> None:
        """Collective, with the same `nbytes` > 0 on all ranks. `group` carries the verdicts; `mesh` is None for thread
        ranks and for a rank alone. Raises as `agree` does; `release` is then still to be called."""
        is_maker = group.rank == SHARED_MAKER

        def create() -> None:
            if is_maker:
                self._file = create_file(nbytes)
                self._regions.append(Region(self._file, nbytes))
                collapse(self._regions[0].address, nbytes)  # before anybody else maps the file

        _, error = attempt(create)
        agree(group, f"{op}: create shared region", error=error, timeout_s=deadline.for_call())

        def take_fd(maker: int, fd: int) -> None:
            check_file(fd, nbytes, maker, "shared region")
            self._regions.append(Region(fd, nbytes))

        def map_shared() -> None:
            if mesh is not None:
                mesh.exchange_fds(self._file, take_fd, deadline, only_from=SHARED_MAKER)
            else:
                theirs = group.exchange_regions(self._regions[0] if is_maker else None, timeout_s=deadline.for_call())
                if theirs is not None and not is_maker:
                    theirs[SHARED_MAKER].retain()
                    self._regions.append(theirs[SHARED_MAKER])
            if read_only_views:
                self._regions.append(self._regions[0].read_only())

        _, error = attempt(map_shared)
        # Also the moment from which every thread rank has retained the maker's mapping: only now may it be released.
        agree(group, f"{op}: map shared region", error=error, timeout_s=deadline.for_call())
        self._close_file()

    def memory(self, offset: int, nbytes: int) -> Any:
        """A part of what callers are to see, as Region.memory: the read-only mapping where there is one."""
        if not self._regions:
            raise DcpError("shared_memory: there must be a shared region (made without one, or closed)")
        return self._regions[-1].memory(offset, nbytes)

    def release(self) -> None:
        """Local, never blocks, may be called again."""
        try:
            self._close_file()
        finally:
            while self._regions:
                self._regions.pop().release()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
