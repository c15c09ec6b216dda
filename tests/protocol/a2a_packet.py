"""The packet way of a2a_lse_reduce: every packet of staging brings a flag of its own along.

What a2a_lse_reduce.py says holds, with these differences:

    publish  packets into the peer's staging: those with the LSEs of a row, then those with its payload. Of a row
             that is empty here only the first. Each carries the low half of the epoch
    receive  for each peer: until the packets of this channel's rows bear this epoch; then unpack them into a row of
             its own. The LSEs say whether payload follows
    reduce   read the unpacked rows
    wait     comes after reduce

A row is two packets here, one with its LSEs and one with its payload.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from a2a_lse_reduce import A2aLseReduce, State, Step, Thread
from a2a_rules import MISMATCH, TIMEOUT, Call, Case, Rules, low32
from explorer import Move


def flag_of_parity(epoch: int) -> int:
    return 2 + (epoch & 1)


@dataclass(frozen=True)
class PacketRules(Rules):
    packet_flag: Callable[[int], int] = low32
    waits: str = "last"  # "none": no wait in a round. "first": before receive
    lses_tell: bool = True  # False: payload is awaited whatever the LSEs say
    sends_empty: bool = False  # True: payload of empty rows too
    receive_finds_poison: bool = True
    receive_looks_at_flag: bool = True  # False: only wait finds out that a peer makes another call


class A2aPacket(A2aLseReduce):
    def __init__(self, case: Case, rules: Rules = PacketRules()) -> None:
        assert isinstance(rules, PacketRules)
        self.packet = rules
        super().__init__(case, rules)

    # ---- memory and programs

    def _declare_region(self, rank: int) -> None:
        super()._declare_region(rank)
        rows = [(word, cell) for word, cell in self._cell.items() if word[:2] == ("staging", rank)]
        for (_, _, parity, src, row), cell in rows:
            self._memory[cell] = (0, None, False)  # flag, name, whether payload follows
            self._declare(("payload", rank, parity, src, row), (0, None))  # flag, name
            if parity == 0:
                self._declare(("unpacked", rank, src, row), None)

    def _payload(self, owner: int, src: int, row: int) -> tuple[int, int]:
        return (self._cell["payload", owner, 0, src, row],
                self._cell["payload", owner, int(self.rules.staging_by_parity), src, row])

    def _round(self, rank: int, ch: int, index: int, call: Call, number: int, num_rows: int) -> list[Step]:
        name, num_channels = (call.number, number), len(self.channels)
        rows = [row for row in range(num_rows) if self.rules.row_channel(row, num_rows, num_channels) == ch]
        has_rows = call.senders is None or rank in call.senders
        steps: list[Step] = []
        for peer in self._peers(rank):
            publish = []
            for row in rows:
                publish.append(Step("publish", index, 0, peer, row, name, self._staging(peer, rank, row)))
                if has_rows or self.packet.sends_empty:
                    publish.append(Step("publish", index, 0, peer, row, name, self._payload(peer, rank, row)))
            signal = [Step("signal", index, peer=peer, cells=self._flag(peer, ch, rank))]
            steps += publish + signal if self.rules.publish_first else signal + publish
        waits = [Step("wait", index, peer=peer, cells=self._flag(rank, ch, peer)) for peer in self._peers(rank)]
        receives = [Step("receive", index, peer=peer, cells=tuple(rows)) for peer in self._peers(rank)]
        reads = tuple((row, src, self._cell["unpacked", rank, src, row]) for row in rows for src in self._peers(rank))
        reduce = [Step("reduce", index, name=name, cells=(reads, reads))]
        if self.packet.waits == "first":
            return [*steps, *waits, *receives, *reduce]
        return [*steps, *receives, *reduce, *(waits if self.packet.waits == "last" else [])]

    # ---- steps

    def _publish(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank = self.threads[index][0]
        cell, flag = step.cells[thread.epoch & 1], self.packet.packet_flag(thread.epoch)
        senders = self.case.calls[rank][step.call].senders
        is_lse = len(state.memory[cell]) == 3
        value = (flag, step.name, senders is None or rank in senders) if is_lse else (flag, step.name)
        yield self._move(state, index, thread._replace(pc=step.after), {cell: value})

    def _receive(self, state: State, index: int, thread: Thread, step: Step) -> Iterator[Move]:
        rank, ch = self.threads[index]
        flag, peer = state.memory[self._flag(rank, ch, step.peer)[thread.epoch & 1]], step.peer
        rows = self._unpack(state, rank, step, thread.epoch)
        mine = (low32(thread.epoch), self.case.calls[rank][step.call].digest)
        if rows is not None:
            writes = {self._cell["unpacked", rank, peer, row]: found for row, found in rows.items()}
            yield self._move(state, index, thread._replace(pc=step.after), writes)
        elif self.packet.receive_finds_poison and (cause := self._poison_word(state, rank)):
            yield self._fault(state, index, thread, step, cause, "adopts poison")
        elif (self.packet.receive_looks_at_flag and flag != mine
              and flag[0] != low32(self.rules.old_epoch(thread.epoch))):
            yield self._fault(state, index, thread, step, MISMATCH, "mismatch")
        elif self._gives_up(state, rank, self._lacks_flag_of_0(state, index, thread)):
            yield self._fault(state, index, thread, step, TIMEOUT, "expire")

    def _unpack(self, state: State, rank: int, step: Step, epoch: int) -> dict[int, Any] | None:
        """What the rows hold; None as long as a packet is missing."""
        wanted, rows = self.packet.packet_flag(epoch), {}
        for row in step.cells:
            flag, name, has_payload = state.memory[self._staging(rank, step.peer, row)[epoch & 1]]
            if flag != wanted:
                return None
            if has_payload or not self.packet.lses_tell:
                payload_flag, payload = state.memory[self._payload(rank, step.peer, row)[epoch & 1]]
                if payload_flag != wanted:
                    return None
                name = payload if has_payload and payload != name else name
            rows[row] = name
        return rows

    def _words(self, step: Step) -> str:
        if step.kind == "publish":
            is_lse = self._memory[step.cells[0]] == (0, None, False)
            return f" {'LSEs' if is_lse else 'payload'} of row {step.row} to rank {step.peer}"
        return f" from rank {step.peer}" if step.kind == "receive" else super()._words(step)
