"""Messages of rank processes of one machine by way of rank 0, for tests in which a heap is made hundreds of times. By gloo
each goes once around all ranks: half of the processor time of eight ranks, on what is not under test."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import tempfile
from typing import Any

from dcpkernels.errors import DcpTimeout
from dcpkernels.heap.group import Exchange, TorchGroup

_PATIENCE_S = 60.0  # where the caller has no deadline of its own


class QuickGroup:
    """A `Group` (dcpkernels/heap/group.py) of the same ranks as a TorchGroup. Collective."""

    def __init__(self, group: Any) -> None:
        self._torch = TorchGroup(group)
        self.rank, self.num_ranks = self._torch.rank, self._torch.num_ranks
        self._peers: list[socket.socket] = []  # rank 0: the others, in rank order; these: rank 0
        with tempfile.TemporaryDirectory() as own, socket.socket(socket.AF_UNIX) as door:
            path = os.path.join(self._torch.all_gather_object(own)[0], "door")
            if self.rank == 0:
                door.bind(path)
                door.listen(self.num_ranks)
            self._torch.all_gather_object(None)
            if self.rank == 0:
                came = [door.accept()[0] for _ in range(1, self.num_ranks)]
                by_rank = {_receive(peer): peer for peer in came}
                self._peers = [by_rank[rank] for rank in range(1, self.num_ranks)]
            else:
                self._peers = [socket.socket(socket.AF_UNIX)]
                self._peers[0].connect(path)
                _send(self._peers[0], pickle.dumps(self.rank))
            self._torch.all_gather_object(None)  # the folder may go

    def all_gather_object(self, obj: Any, *, timeout_s: float = 0.0) -> list[Any]:
        for peer in self._peers:
            peer.settimeout(timeout_s or _PATIENCE_S)
        try:
            if self.rank != 0:
                _send(self._peers[0], pickle.dumps(obj))
                return _receive(self._peers[0])
            # Its own by a pickle too: nobody gets the very object.
            gathered = [pickle.loads(pickle.dumps(obj)), *map(_receive, self._peers)]
            data = pickle.dumps(gathered)
            for peer in self._peers:
                _send(peer, data)
            return gathered
        except TimeoutError as error:
            raise DcpTimeout(f"not all ranks answered within {timeout_s or _PATIENCE_S:.3g} s") from error

    def exchange_regions(self, region: Any, *, timeout_s: float = 0.0) -> None:
        return None

    def duplicate(self, *, timeout_s: float = 0.0, beside: Exchange | None = None) -> Exchange:
        return self._torch.duplicate(timeout_s=timeout_s, beside=beside)


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(struct.pack("<Q", len(data)) + data)


def _receive(peer: socket.socket) -> Any:
    (size,) = struct.unpack("<Q", _read(peer, 8))
    return pickle.loads(_read(peer, size))


def _read(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionResetError("a rank is gone")
        data += part
    return bytes(data)
