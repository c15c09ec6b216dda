"""Every line of csrc that may become an instruction that orders memory, or that the whole system sees, on NVIDIA. What
becomes one at another line is a failure: an access that is stronger than its protocol asks for costs a trip to memory,
and one that no list names has been thought through by nobody."""

from __future__ import annotations

import re
from pathlib import Path

from tests.isa.compiled import CSRC, Instruction, Kernel, places

FENCE, LOAD, STORE, ATOMIC, INVALIDATE = "fence", "load", "store", "atomic", "flush of the L1"

# What a call into arch/ may become.
RELEASE_STORES, ACQUIRE_LOADS, LOADS, STORES = {FENCE, STORE}, {LOAD, INVALIDATE}, {LOAD}, {STORE}
ATOMICS, LOADS_AFTER_READS, ALIAS_FENCES = {FENCE, ATOMIC, INVALIDATE}, {FENCE, LOAD, INVALIDATE}, {FENCE, INVALIDATE}

LINES = (
    # epochs and flags: sites.py says which of these order what
    ("core/channel.h", "next_epoch(arch::load_acquire_sys(last_epoch()))", ACQUIRE_LOADS),
    ("core/channel.h", "arch::store_release_sys(&state_->waited_epoch, epoch_);", RELEASE_STORES),
    ("ops/kv_gather.cc", "Status status = channel.enter();", ACQUIRE_LOADS),  # the same: on sm_100a it bears this line
    ("core/channel.h", "arch::store_release_sys(&mine_->in_flight,", RELEASE_STORES),
    ("core/channel.h", "arch::signal_flag(flag_at(peer, symm_.rank)", RELEASE_STORES),
    ("core/channel.h", "arch::multicast_flag(flag, expected_flag());", RELEASE_STORES),
    ("core/channel.h", "arch::broadcast_done(cta_, uses_multicast);", ALIAS_FENCES),
    ("core/channel.h", "return arch::load_acquire_sys(&flag->value) == channel.expected_flag();", ACQUIRE_LOADS),
    ("core/channel.h", "arch::store_release_sys(&flag->released, epoch);", RELEASE_STORES),
    ("core/channel.h", "return arch::load_acquire_sys(&flag->released) >= epoch;", ACQUIRE_LOADS),
    ("core/channel.h", "arch::load_after_reads_sys(own_poison(", LOADS_AFTER_READS),
    ("core/channel.h", "arch::fetch_add(&state_->channels_left, mine)", ATOMICS),
    ("core/channel.h", "arch::store_release_sys(last_epoch(), epoch_);", RELEASE_STORES),
    ("ops/kv_gather.cc", "arch::broadcast_arrived(", ALIAS_FENCES),
    ("ops/query_gather.cc", "arch::broadcast_arrived(", ALIAS_FENCES),
    # the check of the links: the same orders, and a result that a host reads
    ("ops/link_check.cc", "return arch::load_acquire_sys(word) == nonce;", ACQUIRE_LOADS),
    ("ops/link_check.cc", "arch::store_release_sys(&slot->line.value, p.nonce);", RELEASE_STORES),
    ("ops/link_check.cc", "arch::store_release_sys(&mine->line.released, p_.nonce);", RELEASE_STORES),
    ("ops/link_check.cc", "arch::store_multicast(slot->words", STORES),
    ("ops/link_check.cc", "arch::broadcast_done(cta, true);", ALIAS_FENCES),
    ("ops/link_check.cc", "arch::multicast_flag(&slot->line, p.nonce);", RELEASE_STORES),
    ("ops/link_check.cc", "arch::broadcast_arrived(true);", ALIAS_FENCES),
    ("ops/link_check.cc", "arch::store_relaxed_sys(&p.result->", STORES),
    ("ops/link_check.cc", "arch::store_release_sys(&p.result->nonce", RELEASE_STORES),
    # words that others may read at any time, and that order nothing
    ("core/channel.h", "arch::store_relaxed_sys(&state_->call, call_);", STORES),
    ("core/channel.h", "arch::load_relaxed_sys(&state_->num_calls)", LOADS),
    ("core/channel.h", "arch::store_relaxed_sys(&state_->num_calls, num_calls + 1);", STORES),
    ("core/channel.h", "arch::store_relaxed_sys(&state_->channels_left, 0u);", STORES),
    ("core/channel.h", "arch::load_relaxed_sys(&state_->epoch);", LOADS),
    ("core/channel.h", "arch::load_relaxed_sys(&state_->waited_epoch);", LOADS),
    ("core/channel.h", "arch::store_relaxed_sys(&mine_->awaited_release,", STORES),
    ("core/channel.h", "arch::store_relaxed_sys(&flag->payload_offset", STORES),  # a descriptor: before its flag
    ("core/channel.h", "arch::store_relaxed_sys(&flag->token_stride", STORES),
    ("core/channel.h", "arch::store_relaxed_sys(&flag->head_stride", STORES),
    ("core/channel.h", "return {arch::load_relaxed_sys(&flag->payload_offset)", LOADS),
    ("core/channel.h", "arch::load_relaxed_sys(&flag->head_stride)};", LOADS),
    ("ops/a2a_lse_reduce.cc", "arch::load_relaxed_sys(&query_state(p)->open_rows);", LOADS),
    ("ops/a2a_lse_reduce.cc", "arch::store_relaxed_sys(&query_state(p)->open_rows", STORES),
    ("ops/a2a_lse_reduce.cc", "arch::load_relaxed_sys(&query_state(p)->call)", LOADS),
    ("ops/a2a_lse_reduce.cc", "arch::fetch_add(p.num_nonfinite_lse, num_nonfinite);", ATOMICS),
    ("ops/query_gather.cc", "arch::load_relaxed_sys(&state->open_rows)", LOADS),
    ("ops/query_gather.cc", "arch::store_relaxed_sys(&state->open_rows", STORES),
    # payload that the system sees: packets, and stores to all ranks
    ("core/packet.h", "Packet::store(lanes,", STORES),
    ("core/packet.h", "return Packet::try_load(lanes,", LOADS),
    ("core/packet.h", "return Packet::bear(", LOADS),
    ("core/broadcast.h", "stores_.copy_multicast(threads,", STORES),
    ("core/broadcast.h", "arch::store_multicast(", STORES),
    # long waits, and faults
    ("core/wait.h", "arch::load_acquire_sys(&flag->value);", ACQUIRE_LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&theirs->call)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&flag->value)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&theirs->awaited_release)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&stream_state(", LOADS),
    ("core/wait.h", "arch::load_acquire_sys(&theirs->in_flight)", ACQUIRE_LOADS),
    ("core/wait.h", "arch::load_acquire_sys(&mine->in_flight)", ACQUIRE_LOADS),
    ("core/fault.h", "arch::load_acquire_sys(own_poison(", ACQUIRE_LOADS),
    ("core/fault.h", "arch::compare_exchange_sys(", ATOMICS),
    ("core/fault.h", "arch::store_relaxed_sys(&record->", STORES),
    ("core/fault.h", "arch::store_release_sys(&record->ready", RELEASE_STORES),
    # what a host learns of them
    ("core/fault.h", "arch::load_acquire_sys(&record->ready);", ACQUIRE_LOADS),
    ("core/fault.h", "arch::load_relaxed_sys(&record->", LOADS | STORES),  # and the store around it
    ("core/fault.h", "arch::store_relaxed_sys(&host_fault->ready", STORES),
    ("core/fault.h", "arch::store_release_sys(&host_fault->poison", RELEASE_STORES),
)  # fmt: skip


def kind_of(instruction: Instruction) -> str | None:
    """None of one that orders nothing and that only this device sees."""
    op = instruction.text.split()[1 if instruction.text.startswith("@") else 0]
    if op.startswith(("MEMBAR", "FENCE")):
        return FENCE
    if op.startswith(("ATOM", "RED.", "REDG")) and not op.startswith("ATOMS"):
        return ATOMIC
    if op.startswith("CCTL"):
        return INVALIDATE
    if "STRONG" in op:
        return LOAD if op.startswith("LD") else STORE
    return None


def unexpected(kernel: Kernel, csrc: Path = CSRC) -> list[str]:
    """Ordered instructions of this kernel that no line above explains."""
    allowed: dict[str, set[str]] = {}
    for path, text, kinds in LINES:
        for line in places(path, text, "the ordered access", csrc):
            allowed[line] = allowed.get(line, set()) | kinds
    found = []
    for instruction in kernel.ordered:
        line = instruction.site[0] if instruction.site else instruction.lines[-1]
        kind = kind_of(instruction)
        if kind not in allowed.get(line, set()):
            op = re.sub(r"^@\S+ ", "", instruction.text).split()[0]
            found.append(f"{kernel.arch} {kernel.name}: a {kind} that no list names, at {line}: {op}")
    return sorted(set(found))
