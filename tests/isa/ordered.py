"""Every line of csrc that may become an instruction that orders memory, or that the whole system sees, . What
becomes one at another line is a failure: an access that is stronger than its protocol asks for costs a trip to memory,
and one that no list names has been thought through by nobody."""

from __future__ import annotations

import re
from pathlib import Path

from tests.isa.compiled import CSRC, Instruction, Kernel, places

FENCE, LOAD, STORE, ATOMIC, INVALIDATE = "fence", "load", "store", "atomic", "flush of the L1"  # NVIDIA
WRITE_BACK, INVALIDATE_L2 = "write-back of the L2", "invalidation of the L2"  # AMD

# What a call into arch/ may become: on NVIDIA, on AMD.
RELEASE_STORES = {FENCE, STORE}, {WRITE_BACK, STORE}
STORES_BEHIND = {FENCE, STORE}, {STORE}
STORES = {STORE}, {STORE}
ACQUIRE_LOADS = {LOAD, INVALIDATE}, {LOAD, INVALIDATE_L2}
LOADS_AFTER_READS = {FENCE, LOAD, INVALIDATE}, {LOAD}
LOADS = {LOAD}, {LOAD}
LOADS_AND_STORES = {LOAD, STORE}, {LOAD, STORE}
ATOMICS = {FENCE, ATOMIC, INVALIDATE}, {WRITE_BACK, ATOMIC, INVALIDATE_L2}
ALIAS_FENCES: tuple[set[str], set[str]] = {FENCE, INVALIDATE}, set()

LINES = (
    # epochs and flags: sites.py says which of these order what
    ("core/channel.h", "arch::load_acquire_if_sys(last_epoch(), ", ACQUIRE_LOADS),
    ("core/channel.h", "arch::store_behind_sys(&state_->waited_epoch, epoch_);", STORES_BEHIND),
    ("ops/kv_gather.cc", "Status status = channel.enter();", ACQUIRE_LOADS),  # the same: on sm_100a it bears this line
    ("core/channel.h", "arch::store_behind_sys(&mine_->in_flight,", STORES_BEHIND),
    ("core/channel.h", "arch::signal_flag(flag_at(peer, symm_.rank)", RELEASE_STORES),
    ("core/channel.h", "arch::signal_flag_behind(flag_at(peer, symm_.rank)", STORES_BEHIND),
    ("core/channel.h", "arch::multicast_flag(flag, expected_flag());", RELEASE_STORES),
    ("core/channel.h", "arch::broadcast_done(cta_, uses_multicast);", ALIAS_FENCES),
    ("core/channel.h", "return arch::load_acquire_if_sys(&flag->value, ", ACQUIRE_LOADS),
    ("core/channel.h", "arch::store_behind_sys(&flag->released, epoch);", STORES_BEHIND),
    ("core/channel.h", "return arch::load_acquire_if_sys(&flag->released, ", ACQUIRE_LOADS),
    ("core/channel.h", "arch::load_after_reads_sys(own_poison(", LOADS_AFTER_READS),
    ("core/channel.h", "arch::fetch_add(&state_->channels_left, mine)", ATOMICS),
    ("core/channel.h", "arch::store_release_sys(last_epoch(), epoch_);", RELEASE_STORES),
    ("ops/kv_gather.cc", "arch::broadcast_arrived(", ALIAS_FENCES),
    ("ops/query_gather.cc", "arch::broadcast_arrived(", ALIAS_FENCES),
    # the check of the links: the same orders, and a result that a host reads
    ("ops/link_check.cc", "return arch::load_acquire_if_sys(word, ", ACQUIRE_LOADS),
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
    ("core/wait.h", "arch::load_acquire_if_sys(&flag->value, ", ACQUIRE_LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&theirs->call)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&flag->value)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&theirs->awaited_release)", LOADS),
    ("core/wait.h", "arch::load_relaxed_sys(&stream_state(", LOADS),
    ("core/wait.h", "arch::load_acquire_sys(&theirs->in_flight)", ACQUIRE_LOADS),
    ("core/wait.h", "arch::load_acquire_sys(&mine->in_flight)", ACQUIRE_LOADS),
    ("core/fault.h", "arch::load_acquire_if_sys(own_poison(", ACQUIRE_LOADS),
    ("core/fault.h", "arch::load_acquire_sys(own_poison(", ACQUIRE_LOADS),
    ("core/fault.h", "arch::compare_exchange_sys(", ATOMICS),
    ("core/fault.h", "arch::store_relaxed_sys(&record->", STORES),
    ("core/fault.h", "arch::store_release_sys(&record->ready", RELEASE_STORES),
    # what a host learns of them
    ("core/fault.h", "arch::load_acquire_sys(&record->ready);", ACQUIRE_LOADS),
    ("core/fault.h", "arch::load_relaxed_sys(&record->", LOADS_AND_STORES),  # and the store around it
    ("core/fault.h", "arch::store_relaxed_sys(&host_fault->ready", STORES),
    ("core/fault.h", "arch::store_release_sys(&host_fault->poison", RELEASE_STORES),
)  # fmt: skip


def kind_on_nvidia(instruction: Instruction) -> str | None:
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


def kind_on_amd(instruction: Instruction) -> str | None:
    """The same. Waits are not asked about: compilers put them where values are needed."""
    text = instruction.text
    if text.startswith("buffer_wbl2"):
        return WRITE_BACK
    if text.startswith("buffer_inv"):
        return INVALIDATE_L2
    if re.match(r"(asm: )?(global|flat|buffer)_atomic", text):
        return ATOMIC
    if re.search(r"\bsc[01]\b", text):
        return LOAD if "_load" in text else STORE
    return None


def unexpected(kernel: Kernel, csrc: Path = CSRC) -> list[str]:
    """Ordered instructions of this kernel that no line above explains."""
    is_amd = kernel.arch.startswith("gfx")
    allowed: dict[str, set[str]] = {}
    for path, text, kinds in LINES:
        for line in places(path, text, "the ordered access", csrc):
            allowed[line] = allowed.get(line, set()) | kinds[is_amd]
    found = []
    for instruction in kernel.ordered:
        line = instruction.site[0] if instruction.site else instruction.lines[-1]
        kind = kind_on_amd(instruction) if is_amd else kind_on_nvidia(instruction)
        if kind not in allowed.get(line, set()):
            op = re.sub(r"^@\S+ ", "", instruction.text).split()[0]
            article = "an" if kind and kind[0] in "ai" else "a"
            found.append(f"{kernel.arch} {kernel.name}: {article} {kind} that no list names, at {line}: {op}")
    return sorted(set(found))
