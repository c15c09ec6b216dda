"""Which lines of csrc stand for which ordered instructions: the protocol's order, as it must be found in every kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.isa.compiled import (
    ACQUIRE_LOAD,
    COMPARE_EXCHANGE,
    CSRC,
    FETCH_ADD,
    LOAD_AFTER_READS,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    Kernel,
)

EXCHANGES = r"Kernel<|Probe<"  # kernels that run a round; PackKernel, MergeKernel and DiscardKernel order nothing
PUSHES = r"Kernel<\w+, kPush>|Probe<"
PULLS = r"Kernel<\w+, kPull>|Probe<"


@dataclass(frozen=True)
class Site:
    step: str  # of docs/protocol.md, and what the order is for
    kind: str
    path: str
    text: str  # of the line
    kernels: str = EXCHANGES

    def holds_for(self, kernel: Kernel) -> bool:
        return re.match(self.kernels, kernel.name) is not None


SITES = (
    Site("enter: whoever sees this channel in a round sees the call, too",
         RELEASE_STORE, "core/channel.h", "arch::store_release_sys(&mine_->in_flight, epoch_);"),
    Site("signal: the stores of all threads are in the peer's memory ...",
         PUBLISH_BARRIER, "core/channel.h", "arch::publish_done(cta_);", rf"{PUSHES}|{PULLS}"),
    Site("signal: ... before the flag",
         RELEASE_STORE, "core/channel.h", "arch::signal_flag(flag_at(peer, symm_.rank)"),
    Site("wait: what the flag announces is read after the flag",
         ACQUIRE_LOAD, "core/channel.h", "return arch::load_acquire_sys(&flag->value) == channel.expected_flag();"),
    Site("release: all reads of the peer's buffer are over",
         RELEASE_STORE, "core/channel.h", "->released, epoch_);", PULLS),
    Site("acquire: the buffer is written after its last reader has said so",
         ACQUIRE_LOAD, "core/channel.h", "return arch::load_acquire_sys(&flag->released) >= epoch;", r"Kernel<\w+, kPull>"),
    Site("confirm: poison is read after the payload",
         LOAD_AFTER_READS, "core/channel.h", "arch::load_after_reads_sys(own_poison(", PULLS),
    Site("leave: the last channel of the call sees what the others did",
         FETCH_ADD, "core/channel.h", "arch::fetch_add(&state_->channels_left, 1u)"),
    Site("leave: the next call finds everything of this one",
         RELEASE_STORE, "core/channel.h", "arch::store_release_sys(&state_->epoch, epoch_);"),
    Site("a fault: whoever sees the poison word ...",
         COMPARE_EXCHANGE, "core/fault.h", "arch::compare_exchange_sys(&theirs->poison"),
    Site("a fault: ... can read its record",
         RELEASE_STORE, "core/fault.h", "arch::store_release_sys(&record->ready"),
)  # fmt: skip


def missing_sites(kernel: Kernel, csrc: Path = CSRC) -> list[str]:
    """The sites of this kernel whose line did not become the instruction that it stands for."""
    missing = []
    for site in SITES:
        if not site.holds_for(kernel):
            continue
        source = (csrc / site.path).read_text().splitlines()
        places = {f"{site.path}:{number}" for number, line in enumerate(source, 1) if site.text in line}
        assert places, f"{site.path} has no line with `{site.text}`; where is the {site.kind} of `{site.step}` now?"
        if not any(event.kind == site.kind and places & set(event.lines) for event in kernel.events):
            missing.append(f"{kernel.arch} {kernel.name}: {site.step}: no {site.kind} at {site.path}: {site.text}")
    return missing


def faults(kernels: list[Kernel], csrc: Path = CSRC) -> list[str]:
    """All that is wrong with these kernels."""
    found = []
    for kernel in kernels:
        where = f"{kernel.arch} {kernel.name}"
        if kernel.spills or kernel.local_bytes:
            found.append(f"{where}: {kernel.spills} spilled, {kernel.local_bytes} bytes of local memory a thread")
        found += [f"{where}: {finding}" for finding in kernel.findings]
        found += missing_sites(kernel, csrc)
    return found
