"""Which lines of csrc stand for which ordered instructions: the protocol's order, as it must be found in every kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.isa.compiled import (
    ACQUIRE_LOAD,
    ALIAS_FENCE,
    COMPARE_EXCHANGE,
    CSRC,
    FETCH_ADD,
    LOAD_128,
    LOAD_AFTER_READS,
    MULTICAST_STORE,
    PUBLISH_BARRIER,
    RELEASE_STORE,
    STORE_128,
    STORE_BEHIND,
    Kernel,
    places,
)
from tests.isa.ordered import unexpected

# Kernels that take part in rounds. PackKernel, MergeKernel and DiscardKernel order nothing.
REDUCES = r"Kernel<\w+, k|Probe<"
PUSHES = r"Kernel<\w+, kPush>|Probe<"
PULLS = r"Kernel<\w+, kPull>|Probe<"
COPIES_QUERY, QUANTISES, GATHERS_QUERY = r"Kernel<CopyBytes>", r"Kernel<Quantise<", r"Kernel<(CopyBytes|Quantise<)"
STARTS_KV, WAITS_KV, DEQUANTISES = r"StartKernel|WholeKernel", r"WaitKernel|WholeKernel", r"WaitKernel"
BROADCASTS = rf"{GATHERS_QUERY}|{STARTS_KV}"  # stores that go to the buffers of all ranks
SIGNALS = rf"{REDUCES}|{BROADCASTS}"
WAITS = rf"{REDUCES}|{GATHERS_QUERY}|{WAITS_KV}"
EXCHANGES = rf"{SIGNALS}|{WAITS}"
CHECKS_LINKS = r"LinkKernel"  # outside of rounds, with flags of its own
NVIDIA, AMD = r"sm_", r"gfx"
ORDERED, PACKETS = rf"Kernel<\w+, kPu|Probe<|{BROADCASTS}", r"Kernel<\w+, kPacket"
STORE_16_TO_ALL, STORE_FLAG_TO_ALL = "multimem.st.relaxed.sys.global.v4.f32", "multimem.st.release.sys.global.u64"


@dataclass(frozen=True)
class Site:
    step: str  # of docs/protocol.md, and what the order is for
    kind: str
    path: str
    text: str  # of the line
    kernels: str = EXCHANGES
    archs: str = ""  # all
    ptx: str = ""  # the PTX instruction that it must have been, where the instruction alone does not tell
    at_least: int = 1  # so many of them

    def holds_for(self, kernel: Kernel) -> bool:
        return bool(re.match(self.kernels, kernel.name) and re.match(self.archs, kernel.arch))


def behind(step: str, path: str, text: str, kernels: str = EXCHANGES) -> tuple[Site, ...]:
    """A store for which AMD needs no release."""
    kinds = {NVIDIA: RELEASE_STORE, AMD: STORE_BEHIND}
    return tuple(Site(step, kind, path, text, kernels, archs) for archs, kind in kinds.items())


SITES = (
    *behind("enter: whoever sees this channel in a round sees the call, too",
            "core/channel.h", "arch::store_behind_sys(&mine_->in_flight, epoch_);", WAITS),
    Site("signal: the stores of all threads are in the peer's memory ...",
         PUBLISH_BARRIER, "core/channel.h", "arch::publish_done(cta_);", rf"{PUSHES}|{PULLS}"),
    Site("signal: ... before the flag",
         RELEASE_STORE, "core/channel.h", "arch::signal_flag(flag_at(peer, symm_.rank)", ORDERED),
    *behind("signal: what earlier rounds have read has been read before the flag",
            "core/channel.h", "arch::signal_flag_behind(flag_at(peer, symm_.rank)", PACKETS),
    Site("publish to all: a row, by one store",
         MULTICAST_STORE, "core/broadcast.h", "stores_.copy_multicast(threads,", rf"{COPIES_QUERY}|{STARTS_KV}", NVIDIA,
         STORE_16_TO_ALL),
    Site("publish to all: 16 rounded elements, by one store",
         MULTICAST_STORE, "core/broadcast.h", "arch::store_multicast(", QUANTISES, NVIDIA, STORE_16_TO_ALL),
    Site("signal to all: readers load at another address than the one that was stored to ...",
         ALIAS_FENCE, "core/channel.h", "arch::broadcast_done(cta_,", BROADCASTS, NVIDIA, "fence.proxy.alias"),
    Site("signal to all: ... the stores of all threads are in the peers' memory ...",
         PUBLISH_BARRIER, "core/channel.h", "arch::broadcast_done(cta_,", BROADCASTS),
    Site("signal to all: ... before the flags, by one store",
         RELEASE_STORE, "core/channel.h", "arch::multicast_flag(flag, expected_flag());", BROADCASTS, NVIDIA, STORE_FLAG_TO_ALL),
    Site("wait: what the flag announces is read after the flag",
         ACQUIRE_LOAD, "core/channel.h", "return arch::load_acquire_if_sys(&flag->value, ", WAITS),
    Site("wait for all of the query: it was stored to another address than the one that is read",
         ALIAS_FENCE, "ops/query_gather.cc", "arch::broadcast_arrived(", GATHERS_QUERY, NVIDIA, "fence.proxy.alias"),
    Site("wait for all of the chunk: it was stored to another address than the one that is read",
         ALIAS_FENCE, "ops/kv_gather.cc", "arch::broadcast_arrived(", WAITS_KV, NVIDIA, "fence.proxy.alias"),
    *behind("release: all reads of the peer's buffer are over",
            "core/channel.h", "arch::store_behind_sys(&flag->released, epoch);", rf"{PULLS}|{WAITS_KV}"),
    Site("acquire: the buffer is written after its last reader has said so",
         ACQUIRE_LOAD, "core/channel.h", "return arch::load_acquire_if_sys(&flag->released, ",
         rf"Kernel<\w+, kPull>|{STARTS_KV}"),
    Site("confirm: poison is read after the payload",
         LOAD_AFTER_READS, "core/channel.h", "arch::load_after_reads_sys(own_poison(", rf"{PULLS}|{DEQUANTISES}"),
    Site("leave: what all threads of a channel have stored is there ...",
         PUBLISH_BARRIER, "core/channel.h", "arch::stores_done(cta_);"),
    Site("leave: ... before the last channel of the call sees what the others did",
         FETCH_ADD, "core/channel.h", "arch::fetch_add(&state_->channels_left, mine)"),
    Site("leave: the next call finds everything of this one",
         RELEASE_STORE, "core/channel.h", "arch::store_release_sys(last_epoch(), epoch_);"),
    Site("a fault: whoever sees the poison word ...",
         COMPARE_EXCHANGE, "core/fault.h", "arch::compare_exchange_sys(&theirs->poison"),
    Site("a fault: ... can read its record",
         RELEASE_STORE, "core/fault.h", "arch::store_release_sys(&record->ready"),
    Site("links: the pattern of all threads is in the peer's memory ...",
         PUBLISH_BARRIER, "ops/link_check.cc", "arch::publish_done(cta);", CHECKS_LINKS),
    Site("links: ... before the flag",
         RELEASE_STORE, "ops/link_check.cc", "arch::store_release_sys(&slot->line.value, p.nonce);", CHECKS_LINKS),
    Site("links: the pattern is read after the flag",
         ACQUIRE_LOAD, "ops/link_check.cc", "return arch::load_acquire_if_sys(word, ", CHECKS_LINKS),
    Site("links: the echo comes after the last read of the pattern",
         RELEASE_STORE, "ops/link_check.cc", "arch::store_release_sys(&mine->line.released, p_.nonce);", CHECKS_LINKS),
    Site("links: who sees the nonce of a result sees the result",
         RELEASE_STORE, "ops/link_check.cc", "arch::store_release_sys(&p.result->nonce, p.nonce);", CHECKS_LINKS),
    Site("links to all: the pattern, by one store",
         MULTICAST_STORE, "ops/link_check.cc", "arch::store_multicast(slot->words", CHECKS_LINKS, NVIDIA, STORE_16_TO_ALL),
    Site("links to all: readers load at another address than the one that was stored to ...",
         ALIAS_FENCE, "ops/link_check.cc", "arch::broadcast_done(cta, true);", CHECKS_LINKS, NVIDIA, "fence.proxy.alias"),
    Site("links to all: ... the pattern of all threads is in the peers' memory ...",
         PUBLISH_BARRIER, "ops/link_check.cc", "arch::broadcast_done(cta, true);", CHECKS_LINKS, NVIDIA),
    Site("links to all: ... before the flags, by one store",
         RELEASE_STORE, "ops/link_check.cc", "arch::multicast_flag(&slot->line, p.nonce);", CHECKS_LINKS, NVIDIA,
         STORE_FLAG_TO_ALL),
    Site("links to all: the pattern was stored to another address than the one that is read",
         ALIAS_FENCE, "ops/link_check.cc", "arch::broadcast_arrived(true);", CHECKS_LINKS, NVIDIA, "fence.proxy.alias"),
)  # fmt: skip

# Where payload goes through registers: 16 bytes an instruction, wherever addresses allow it. All of a loop's loads are to
# be in flight at once; of packets of 128 bytes, and of long copies, those of 4 turns.
COPIES = r"Kernel<\w+, k(Push|Pull)>|PackKernel"
MERGES = rf"{REDUCES}|MergeKernel"
LINES, PACKETS_16 = r"Kernel<\w+, kPacket128>", r"Kernel<\w+, kPacket16>"


def wide(
    step: str, path: str, text: str, kernels: str, at_least: int = 1, kinds: str = "load store", archs: str = NVIDIA
) -> tuple[Site, ...]:
    each = {"load": LOAD_128, "store": STORE_128}
    return tuple(Site(step, each[kind], path, text, kernels, archs, at_least=at_least) for kind in kinds.split())


SITES += (
    *wide("publish: heads side by side", "ops/a2a_lse_reduce.cc",
          "stores.copy(cta, to, own_head<T>(p, token, first_head), head_bytes * num_heads);", COPIES),
    *wide("publish: heads apart", "ops/a2a_lse_reduce.cc", "stores.copy(cta, to + h * head_bytes,", COPIES),
    # Their loops are the same code on some architectures.
    *wide("publish: 4 in flight, and the rest", "ops/a2a_lse_reduce.cc", "stores.copy(cta, to", COPIES, 5),
    *wide("publish: packets of 128, from the source", "core/packet.h", "return arch::load_words<4>(from);", LINES, 4, "load"),
    *wide("publish: packets of 128, to the peer", "arch/cuda_line.h", "store_relaxed_16(static_cast<char*>(packets)", LINES, 4,
          "store"),
    *wide("receive: packets of 128", "arch/cuda_line.h", "load_relaxed_16(static_cast<const char*>(packets)", LINES, 4, "load"),
    *wide("receive: packets of 128, into a plain row", "core/packet.h", "arch::store_words<4>(plain + at, words);", LINES, 4,
          "store"),
    *wide("publish: packets of 16", "arch/cuda.h", "store_relaxed_16(packet, words);", PACKETS_16, 1, "store"),
    *wide("receive: packets of 16", "arch/cuda.h", "const Words16 words = load_relaxed_16(packet);", PACKETS_16, 1, "load"),
    *wide("reduce: rows of all shards", "core/tile.h", "Vec::load(source + v * Vec::kElements)", MERGES, 1, "load"),
    *wide("reduce: rows of four shards at once", "core/tile.h", "weighted_sum_block<arch::kRowBlock, false>(", MERGES, 4, "load",
          AMD),
    *wide("reduce: the output", "core/tile.h", "kStream ? sum[v].stream(to) : sum[v].store(to);", MERGES, 1, "store"),
    *wide("publish to all: a row, by multicast", "core/broadcast.h", "stores_.copy_multicast(threads,",
          rf"{COPIES_QUERY}|{STARTS_KV}", 4),
    *wide("publish to all: a row, to one after the other", "core/broadcast.h", "stores_.copy_to_all(threads,",
          rf"{COPIES_QUERY}|{STARTS_KV}", 4),
    *wide("publish to all: elements to round", "ops/query_gather.cc", "arch::load_elements(from + at, values);", QUANTISES, 1,
          "load"),
    *wide("publish to all: rounded elements, to one after the other", "core/broadcast.h", "arch::store_16(symm_at<void>(buffers_",
          QUANTISES, 1, "store"),
    *wide("copy the query out", "ops/query_gather.cc", "stores.copy(lanes, to, symm_own<char>(p.buffers", GATHERS_QUERY, 5),
    *wide("dequantise", "ops/kv_gather.cc", "arch::map_elements(lanes, to, from, p.row_bytes,", DEQUANTISES),
)  # fmt: skip

# Where a target has no multicast, the question whether a call uses it is no code.
ASKS_FOR_MULTICAST = "core/symm.h", "arch::kHasMulticast && symm.multicast != 0;"


def missing_sites(kernel: Kernel, csrc: Path = CSRC) -> list[str]:
    """The sites of this kernel whose line did not become the instruction that it stands for."""
    missing = []
    for site in SITES:
        if not site.holds_for(kernel):
            continue
        lines = places(site.path, site.text, f"the {site.kind} of `{site.step}`", csrc)
        count = sum(event.kind == site.kind and bool(lines & set(event.lines)) for event in kernel.events)
        if count == 0 or (site.ptx and kernel.ptx[site.ptx] == 0):
            missing.append(f"{kernel.arch} {kernel.name}: {site.step}: no {site.kind} at {site.path}: {site.text}")
        elif count < site.at_least:
            few = f"{count} {site.kind} and not {site.at_least}"
            missing.append(f"{kernel.arch} {kernel.name}: {site.step}: {few} at {site.path}: {site.text}")
    if not re.match(NVIDIA, kernel.arch):
        path, text = ASKS_FOR_MULTICAST
        if places(path, text, "the question for multicast", csrc) & kernel.lines:
            missing.append(f"{kernel.arch} {kernel.name}: code for multicast, which this target does not have")
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
        found += unexpected(kernel, csrc)
    return found
