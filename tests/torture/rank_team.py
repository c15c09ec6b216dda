"""Thread ranks that make one call after the other together, each its own, as somebody else decides while they go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from dcpkernels import Workspace, WorkspaceConfig
from dcpkernels.testing import ThreadGroup
from tests.a2a_calls import Raised, attempt

DEADLINE_S = 60.0


class Rank:
    """What a call is given: the rank's group, and its workspace while one is open."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group, self.rank = group, group.rank
        self.workspace: Workspace | None = None

    def open(self, config: WorkspaceConfig, backend: str) -> None:
        self.workspace = Workspace(self.group, config=config, backend=backend)


class Team:
    def __init__(self, num_ranks: int) -> None:
        self.ranks = [Rank(group) for group in ThreadGroup.create(num_ranks)]
        self._todo: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in self.ranks]
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()

    def _run(self, rank: Rank) -> None:
        while (call := self._todo[rank.rank].get()) is not None:
            try:
                outcome = attempt(call, rank)
            except BaseException as error:  # noqa: BLE001  no Dcp error: the test says what it thinks of it
                outcome = Raised(error, 0.0)
            self._done.put((rank.rank, outcome))

    def do(self, call: Callable[[Rank], Any]) -> list[Raised]:
        """What `call(rank)` came to on every rank; they run at the same time."""
        for todo in self._todo:
            todo.put(call)
        try:
            done = dict(self._done.get(timeout=DEADLINE_S) for _ in self.ranks)
        except queue.Empty:
            raise AssertionError(f"not all ranks returned within {DEADLINE_S:g} s") from None
        return [done[rank] for rank in range(len(self.ranks))]

    def end(self) -> None:
        for todo in self._todo:
            todo.put(None)
