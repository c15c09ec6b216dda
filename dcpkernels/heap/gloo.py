"""Exchanges of bytes between processes that share no memory: a gloo group of our own, and a board with notes.

Not one of `torch.distributed.new_group`: its name comes from the number of groups that this very process is in. Ranks
that are in different groups besides would wait for each other under different names, and after a group has been
destroyed the next one finds the addresses of the old one under its name. Here the ranks agree on a name nobody had.

Gloo says that a rank did not come, or that some connection broke, and not which. So ranks that wait leave notes on a
board, which a rank can read that nobody answers; and the first of them to find a cause writes it down for all. Groups
of one workspace share a second board, on who is alive and who is lost: when a rank dies, some of the others may wait for
it in one group and some in another one.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dcpkernels.errors import DcpPeerLost, DcpTimeout, DcpUnsupported
from dcpkernels.heap.group import SLICE_S, Deadline
from dcpkernels.heap.verdict import describe, rank_list, restore

_PATIENCE_S = 0.5  # for an answer of the board
_LOOK_EVERY = 4  # slices between two looks at the board
_GRACE_S = 3 * SLICE_S  # until the note of a rank that came just now is there
_NO_TIMEOUT = timedelta(days=3650)
_LOST_S = 30.0  # how long to find out who is lost, where nothing else bounds it
_UNUSED_TAG = 1 << 20
_CLOSE_S = 1.0  # for gloo's threads to end


class GlooGroup:
    """One rank's end. All ranks make the same exchanges in the same order."""

    def __init__(
        self, store: Any, rank: int, num_ranks: int, *, timeout_s: float, beside: GlooGroup | None = None
    ) -> None:
        """Collective. `store`: one that nobody else writes to. `beside`: as in heap/group.py. Raises DcpTimeout."""
        import torch.distributed as dist

        if not dist.is_gloo_available():
            raise DcpUnsupported("torch must have been built with gloo (it was not)")
        self.rank, self.num_ranks = rank, num_ranks
        self._board = _Board(store)
        self._shared_board = self._board if beside is None else beside._shared_board
        # Those of one workspace, by weak reference: they go when the workspace does.
        self._together: weakref.WeakSet[GlooGroup] = weakref.WeakSet() if beside is None else beside._together
        self._index = len(self._together)  # the same on all ranks
        self._together.add(self)
        self._num_exchanges, self._is_waiting = 0, False
        self._cause: tuple[str, str, tuple[int, ...]] | None = None
        deadline = Deadline(timeout_s)
        try:
            most = timedelta(seconds=timeout_s) if timeout_s > 0 else _NO_TIMEOUT
            self._gloo: Any = dist.ProcessGroupGloo(store, rank, num_ranks, most)
        except RuntimeError as error:
            if not deadline.expired:
                raise
            raise DcpTimeout(f"not all ranks connected within {timeout_s:.3g} s ({error})") from error

    def all_to_all(
        self,
        receive: Any,
        send: Any,
        receive_sizes: list[int],
        send_sizes: list[int],
        *,
        timeout_s: float = 0.0,
        note: int = 0,
    ) -> None:
        """As in heap/group.py. The first failure is for good, and all ranks raise it that can read the board."""
        import torch.distributed as dist

        options = dist.AllToAllOptions()
        options.timeout = _NO_TIMEOUT  # an expiry inside gloo would break the connections of ranks with time left
        sizes = (receive_sizes, send_sizes)
        self._exchange(lambda: [self._gloo.alltoall_base(receive, send, *sizes, options)], timeout_s, note)

    def all_gather(self, buffer: Any, sizes: list[int], *, timeout_s: float = 0.0, note: int = 0) -> None:
        """As in heap/group.py; failures as in `all_to_all`.

        A broadcast of each chunk, all in flight together: gloo's own all_gather takes chunks of one size only, and a
        copy of all of them besides. (4 ranks, 2 MB each: 10 ms, and 16 ms by that one.)
        """
        self._exchange(lambda: self._broadcasts(buffer, sizes), timeout_s, note)

    def _broadcasts(self, buffer: Any, sizes: list[int]) -> list[Any]:
        import torch.distributed as dist

        works, start = [], 0
        for rank, size in enumerate(sizes):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = rank, 0, _NO_TIMEOUT
            if size > 0 and self.num_ranks > 1:
                works.append(self._gloo.broadcast([buffer[start : start + size]], options))
            start += size
        return works

    def _exchange(self, start: Callable[[], list[Any]], timeout_s: float, note: int) -> None:
        """Starts what is to be exchanged, and waits for all of it."""
        self._num_exchanges += 1
        self._is_waiting = True
        try:
            self._exchange_or_fail(start, Deadline(timeout_s), note)
        finally:
            self._is_waiting = False

    def _exchange_or_fail(self, start: Callable[[], list[Any]], deadline: Deadline, note: int) -> None:
        if self._cause is None:
            try:
                try:
                    works = start()
                except RuntimeError as error:
                    raise self._first_cause(self._lost(error, deadline)) from error
                return self._finish(works, deadline, note)
            except DcpTimeout:
                pass
            except BaseException as error:  # Ctrl-C: what this rank owes the others will not come any more
                self._first_cause(DcpPeerLost(f"rank {self.rank} gave up: {describe(error)[1]}", ranks=(self.rank,)))
                raise
        assert self._cause is not None
        raise restore(self._cause)

    def _finish(self, works: list[Any], deadline: Deadline, note: int) -> None:
        num_slices = 0
        for work in works:
            while not self._is_done(work, deadline):
                if num_slices == 0:
                    self._leave_note(self._num_exchanges, note)
                num_slices += 1
                if num_slices % _LOOK_EVERY == 0:
                    self._raise_known_cause()
                if deadline.expired:
                    raise self._first_cause(self._late(deadline))
        if num_slices > 0:  # the note stays true: this rank has been here, and does not wait any more
            self._leave_note(-self._num_exchanges, note)

    def _leave_note(self, number: int, note: int) -> None:
        """Where this rank waits, and how many exchanges of each group it has come to."""
        counts = sorted((group._index, group._num_exchanges) for group in list(self._together))
        self._board.post(f"waits/{self.rank}", f"{number} {note} " + " ".join(str(count) for _, count in counts))

    def _is_done(self, work: Any, deadline: Deadline) -> bool:
        """Waits for a slice only, because Ctrl-C is not seen inside a wait."""
        try:
            # Never 0, which is the group's default to torch.
            work.wait(timedelta(seconds=max(min(deadline.remaining_s(), SLICE_S), 1e-3)))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it may have ended well just after the slice
            except RuntimeError as error:
                raise self._first_cause(self._lost(error, deadline)) from error
        return True

    def awaited_by(self, rank: int) -> tuple[int, int] | None:
        """The exchange in which `rank` waits, if it does so in one that this rank has not come to, and its note."""
        number, note = (*_note_on(self._board, rank), 0, 0)[:2]
        return (number, note) if number > self._num_exchanges else None

    def close(self) -> None:
        """Local, and waits for nobody.

        gloo ends with its threads, and they may never end (seen once, on a loaded machine, in a rank that was
        stopped when the others left). Then they are left behind.
        """
        if self._gloo is None:
            return
        held = [self._gloo]
        self._gloo = None
        end = threading.Thread(target=held.clear, name="gloo-end", daemon=True)  # drops the last reference
        try:
            end.start()
        except RuntimeError:  # the interpreter is on its way out
            held.clear()
        else:
            end.join(_CLOSE_S)

    # ---- causes

    def _late(self, deadline: Deadline) -> DcpTimeout:
        grace = Deadline(_GRACE_S)
        while True:
            late = [peer for peer in self._peers() if not self._has_come(peer)]
            if not late or grace.expired:
                break
            time.sleep(SLICE_S)
        # One that waits in an exchange that this rank has got through is held up by the same rank as this one.
        together = list(self._together) if self._board.answers else []
        held_up = [peer for peer in late if any(group._waits_behind(peer) for group in together)]
        if len(held_up) < len(late):
            late = [peer for peer in late if peer not in held_up]
        late = late if self._board.answers else []
        who = f"no answer from {rank_list(late)}" if late else "not all ranks answered"
        return DcpTimeout(f"{who} within {deadline.timeout_s:.3g} s", ranks=late)

    def _has_come(self, peer: int) -> bool:
        """Whether `peer` has come to the exchange that this rank waits in. Where it got through that at once it left no
        note here, but perhaps where it waits now."""
        for board in (self._board, *(group._board for group in list(self._together) if group is not self)):
            counts = _note_on(board, peer)[2:]
            if counts[self._index : self._index + 1] >= [self._num_exchanges]:
                return True
            if not board.answers:
                break
        return False

    def _waits_behind(self, peer: int) -> bool:
        """Whether `peer` waits in an exchange that this rank has got through."""
        number = (*_note_on(self._board, peer), 0)[0]
        return 0 < number < self._num_exchanges + (not self._is_waiting)

    def _lost(self, error: RuntimeError, deadline: Deadline) -> DcpTimeout:
        """Every rank notices that a connection broke, at its next exchange at the latest, and says that it is alive.
        One that is the only one not to say so is lost."""
        board = self._shared_board
        board.post(f"alive/{self.rank}", "yes")
        self._break_connections()  # who waits for another rank has not noticed
        most = Deadline(min(deadline.for_call() or _LOST_S, _LOST_S))
        while True:
            self._raise_known_cause()
            self._raise_cause_elsewhere()
            silent = [peer for peer in self._peers() if not board.read(f"alive/{peer}")]
            if len(silent) <= 1 or most.expired or not board.answers:
                break
            time.sleep(SLICE_S)
        silent = silent if board.answers else []
        who = f"{rank_list(silent)} gone" if silent else "a rank is gone or the group is broken"
        return DcpPeerLost(f"{who} ({error})", ranks=silent)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def _raise_known_cause(self) -> None:
        text = self._board.read("cause")
        if not text and (lost := self._shared_board.read("lost")):
            text = self._board.post_first("cause", lost)
        if text:
            raise self._keep(text)

    def _raise_cause_elsewhere(self) -> None:
        """A rank that gave up in another group has closed this one as well."""
        for group in list(self._together) if self._board.answers else ():
            if text := group._board.read("cause"):
                raise self._keep(self._board.post_first("cause", text))

    def _first_cause(self, error: DcpTimeout) -> DcpTimeout:
        text = json.dumps(describe(error))
        if isinstance(error, DcpPeerLost):
            text = self._shared_board.post_first("lost", text)
        return self._keep(self._board.post_first("cause", text))

    def _keep(self, text: str) -> DcpTimeout:
        name, message, ranks = json.loads(text)
        self._cause = (name, message, tuple(ranks))
        self._break_connections()
        error = restore(self._cause)
        assert isinstance(error, DcpTimeout)
        return error

    def _break_connections(self) -> None:
        """Ends what is in flight, here and, where ranks still wait for it, at the peers. Otherwise gloo's destructor
        would wait for it, at the end of the process at the latest. Only an expired receive makes gloo do this."""
        import torch

        for peer in self._peers():  # a receive from one whose connection is closed already fails without this effect
            with suppress(RuntimeError):
                self._gloo.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class _Board:
    """Short notes that all ranks can read, those of a late rank too: they lie in torch's store.

    The store is kept by one of the processes, perhaps the one that is stopped or dead. So a question that takes long
    has failed, and is the last.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.answers = True

    def post(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def post_first(self, key: str, text: str) -> str:
        """The text that was posted first."""
        return self._ask(lambda: self._store.compare_set(key, "", text).decode()) or text

    def read(self, key: str) -> str:
        """ "" when there is none."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "") or ""

    def _ask(self, question: Callable[[], Any]) -> Any:
        if not self.answers:
            return None
        answers: list[Any] = []

        def ask() -> None:
            with suppress(Exception):  # whatever a store that is gone raises
                answers.append(question())

        thread = threading.Thread(target=ask, name="dcpkernels-board", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        self.answers = bool(answers)
        return answers[0] if answers else None


def _note_on(board: _Board, rank: int) -> list[int]:
    """What `rank` left there: the number of an exchange, negative when it has ended; its note; the rank's counts."""
    return [int(word) for word in board.read(f"waits/{rank}").split()]
