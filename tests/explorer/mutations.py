"""The planted faults: what each changes in the kernel source, and the explorations that must find it.

A killer is a scenario with its arguments (world.h and scenario_*.cpp), and how its verdict begins: the kind, then the
message. Every killer is fine without the fault. MUTATIONS are numbered from 1, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.explorer.schema import Edit

CPU, CHANNEL, WAIT, FAULT, REGION = "arch/cpu.h", "core/channel.h", "core/wait.h", "core/fault.h", "host/region.h"
A2A, QUERY, KV = "ops/a2a_lse_reduce.cc", "ops/query_gather.cc", "ops/kv_gather.cc"

PUSH, PULL = "a2a wire=0", "a2a wire=1"
PACKET8, PACKET16 = "a2a wire=2", "a2a wire=3"


# Every execution, and where that takes longer than a test may.
ALL, SAMPLED = "--max-states 300000", "--random 3000"


@dataclass(frozen=True)
class Killer:
    scenario: str
    verdict: str  # a regular expression that matches the beginning of "KIND: MESSAGE"
    options: str = ALL
    fine: str = ALL  # how it is shown that nothing is wrong without the fault


@dataclass(frozen=True)
class Mutation:
    name: str
    edits: tuple[Edit, ...]
    killers: tuple[Killer, ...] = ()
    # Of what is not found: why, and what it was looked for in.
    reason: str = ""
    looked_in: tuple[str, ...] = ()


def one(name: str, file: str, old: str, new: str, *killers: tuple[str, ...], behind: str = "") -> Mutation:
    return Mutation(name, (Edit(file, old, new, behind),), tuple(Killer(*killer) for killer in killers))


def not_found(name: str, file: str, old: str, new: str, reason: str, *looked_in: str, behind: str = "") -> Mutation:
    return Mutation(name, (Edit(file, old, new, behind),), (), reason, looked_in)


WEAKER_ORDER = [
    one(
        "a signal that releases nothing",
        CPU,
        "__atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST);",
        "__atomic_store_n(&flag->value, value, __ATOMIC_RELAXED);",
        (PUSH, "race: .*staging"),
        (PULL, "race: .*staging"),
        ("query", "race: .*query"),
        ("kv script=123", "race: .*chunk"),
    ),
    one(
        "a look that finds its flag and acquires nothing",
        CPU,
        "is(value) ? load_acquire_sys(word) : value",
        "value",
        (PUSH, "race: .*staging"),
        ("query", "race: .*query"),
        ("kv script=123", "race: .*chunk"),
        behind="const T value = load_relaxed_sys(word);\n  return ",
    ),
    one(
        "a credit that releases nothing",
        CPU,
        "store_release_sys(word, value);",
        "store_relaxed_sys(word, value);",
        (f"{PULL} calls=3 tokens=111 script0=1332 script1=333", "race: .*buffer"),
        ("kv script=12132132", "race: .*chunk"),
        behind="DCP_FN void store_behind_sys(T* word, T value) {\n  ",
    ),
    one(
        "release stores that are relaxed",
        CPU,
        "__atomic_store_n(word, value, __ATOMIC_RELEASE);",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED);",
        (PACKET16, "data: "),
        (f"{PUSH} channels=2 tokens=2 early=1", "record: ", SAMPLED, SAMPLED),
    ),
    one(
        "acquire loads that are relaxed",
        CPU,
        "return __atomic_load_n(word, __ATOMIC_ACQUIRE);",
        "return __atomic_load_n(word, __ATOMIC_RELAXED);",
        (PUSH, "race: .*staging"),
        (PACKET16, "data: "),
    ),
    one(
        "a compare-exchange that is relaxed",
        CPU,
        "return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);",
        "return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);",
        (f"{PUSH} early=1", "record: "),
    ),
    one(
        "a count of channels that is relaxed",
        CPU,
        "return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);",
        "return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);",
        (f"{PUSH} channels=2 tokens=2 early=1", "race: .*out", ALL, SAMPLED),
    ),
    one(
        "a last look at poison that may come before the reads",
        CPU,
        "return __atomic_fetch_add(word, T(0), __ATOMIC_ACQ_REL);",
        "return __atomic_load_n(word, __ATOMIC_ACQUIRE);",
        (f"{PULL} script0=12 script1=12 early=1", "race: (a call trusts|.*buffer)"),
    ),
    one(
        "a packet whose flag acquires nothing",
        CPU,
        "load_acquire_sys(words_of(packets, k) + kBytes / 4 - 1)",
        "load_relaxed_sys(words_of(packets, k) + kBytes / 4 - 1)",
        (PACKET16, "data: "),
    ),
    one(
        "a packet of 8 bytes in two stores, the flag first",
        CPU,
        "__atomic_store_n(static_cast<uint64_t*>(packets), both, __ATOMIC_RELAXED);",
        "__atomic_store_n(static_cast<uint32_t*>(packets) + 1, flag, __ATOMIC_RELAXED);\n"
        "      __atomic_store_n(static_cast<uint32_t*>(packets), uint32_t(both), __ATOMIC_RELAXED);",
        (PACKET8, "model: atomic accesses of different sizes"),
    ),
    one(
        "a sleeper whose word is only released",
        CPU,
        "__atomic_store_n(&doorbell_->awaited, awaited, __ATOMIC_SEQ_CST);",
        "__atomic_store_n(&doorbell_->awaited, awaited, __ATOMIC_RELEASE);",
        (f"{PUSH} sleep=1", "deadlock: "),
    ),
    one(
        "a signaller who looks for sleepers too early",
        CPU,
        "__atomic_load_n(&doorbell->awaited, __ATOMIC_SEQ_CST)",
        "__atomic_load_n(&doorbell->awaited, __ATOMIC_ACQUIRE)",
        (f"{PUSH} sleep=1", "deadlock: "),
    ),
    one(
        "a record that is ready before it is complete",
        FAULT,
        "arch::store_relaxed_sys(&record->ranks, report.ranks);",
        "arch::store_release_sys(&record->ready, uint64_t(1)); arch::store_relaxed_sys(&record->ranks, report.ranks);",
        (f"{PUSH} channels=2 tokens=2 early=1", "record: ", SAMPLED, SAMPLED),
    ),
    one(
        "peers that hear of a fault before its record is complete",
        FAULT,
        "if (!arch::compare_exchange_sys(&record->poison, uint64_t(0), word)) return;",
        "if (!arch::compare_exchange_sys(&record->poison, uint64_t(0), word)) return; forward_fault(symm, control);",
        (f"{PUSH} early=1", "record: "),
    ),
]

MISSING_WAIT = [
    one(
        "no wait in bulk and pull",
        A2A,
        "status = channel.wait();",
        "status = channel.confirm();",
        (PUSH, "race: .*staging"),
        (PULL, "race: .*staging"),
    ),
    one(
        "no wait at the end of a round of packets",
        A2A,
        "return channel.wait();",
        "return channel.confirm();",
        (f"{PACKET8} calls=3 tokens=101", "fault: .*a healthy call"),
    ),
    one(
        "packets that are taken as they are",
        A2A,
        "status = channel.wait_for_packets(i, arriving, start_ns);",
        "status = arriving.there() ? Status::kOk : channel.confirm();",
        (PACKET8, "data: "),
    ),
    one(
        "a wait for the first peer alone",
        CHANNEL,
        "status = wait_for(i, Signalled{{}, *this, channel_idx, peer_order(symm_, i)}, start_ns);",
        "if (i < 2) status = wait_for(i, Signalled{{}, *this, channel_idx, peer_order(symm_, i)}, start_ns);",
        (f"{PUSH} ranks=3", "race: .*staging"),
        ("query ranks=3 script=1", "race: .*query"),
    ),
    one(
        "a copy into a buffer that peers may still read",
        A2A,
        "if (kWire == Wire::kPull && copies) status = channel.acquire(p.buffer_idx);",
        "",
        (f"{PULL} calls=3 tokens=111 script0=1332 script1=333", "race: .*buffer"),
        (f"{PULL} tokens=2 capacity=1", "race: .*buffer"),
    ),
    one(
        "a chunk over one that peers may still read",
        KV,
        "channel.acquire(p.buffer_idx)",
        "channel.confirm()",
        ("kv script=12132132 shared=1", "race: .*chunk"),
        ("kv script=12132132 shared=0", "race: .*chunk"),
    ),
    one(
        "a query over one that attention may still read",
        QUERY,
        "status == Status::kOk",
        "status == Status::kOk && !p.releases",
        ("query script=121 tokens=11", "race: .*query"),
        behind="while (",
    ),
    one(
        "no epoch after the copy to `out`",
        QUERY,
        "status != Status::kOk || has_read",
        "status != Status::kOk || (p.out != nullptr && (copy_out(cta, p, round, stores), true))",
        ("query script=3 tokens=2 capacity=1", "race: .*query"),
    ),
    one(
        "a dequantise after the flags of its own channel",
        KV,
        "receive(p, channel, dequantises)",
        "receive(p, channel, false)",
        ("kv channels=2 rows=4 script=15", "race: .*chunk"),
    ),
    one(
        "T = 0 that runs no round",
        A2A,
        "status == Status::kOk",
        "status == Status::kOk && p.num_tokens > 0",
        (f"{PUSH} calls=3 tokens=101", "race: .*staging"),
        behind="while (",
    ),
]

SIGNAL_FIRST = [
    one(
        "bulk: signal before publish",
        A2A,
        "publish<T, kWire>(cta, p, round, peer, epoch, call, stores, num_nonfinite);",
        "if constexpr (kWire == Wire::kPush) channel.signal(peer);\n"
        "      publish<T, kWire>(cta, p, round, peer, epoch, call, stores, num_nonfinite);",
        (PUSH, "race: .*staging"),
    ),
    one(
        "pull: the descriptor after the flag",
        CHANNEL,
        "describe(peer, payload);",
        "raise(peer); describe(peer, payload); return;",
        (f"{PULL} script0=12", "(race|data): "),
        behind="if (cta_.thread_rank() != 0) return;\n    ",
    ),
    one(
        "pull: a credit before the reads",
        A2A,
        "reduce<T, kWire>(cta, p, &channel, round, num_nonfinite);\n      if constexpr (kWire == Wire::kPull) channel.release();",
        "if constexpr (kWire == Wire::kPull) channel.release(); reduce<T, kWire>(cta, p, &channel, round, num_nonfinite);",
        (f"{PULL} calls=3 tokens=111 script0=1332 script1=333", "race: .*buffer"),
    ),
    one(
        "query_gather: signal before publish",
        QUERY,
        "publish<Convert>(cta, p, round, stores);",
        "channel.signal_all(has_multicast(p.publish_to)); publish<Convert>(cta, p, round, stores);",
        ("query", "race: .*query"),
    ),
    one(
        "kv_gather: signal before publish",
        KV,
        "publish(cta, p, stores);",
        "channel.signal_all(has_multicast(p.buffers)); publish(cta, p, stores);",
        ("kv script=123", "race: .*chunk"),
    ),
    one(
        "kv_gather: a credit for the chunk that is awaited",
        CHANNEL,
        "release(previous_epoch(epoch_));",
        "release(epoch_);",
        ("kv script=12132132", "race: .*chunk"),
    ),
]

PARITY = [
    one(
        "staging of one parity",
        "core/layout.h",
        "(uint64_t(parity) * (num_ranks - 1) + slot)",
        "uint64_t(slot)",
        (f"{PUSH} calls=2 tokens=11", "race: .*staging"),
        (f"{PACKET8} calls=2 tokens=11", "(fault|data|deadlock): "),
    ),
    one(
        "flags of one parity",
        CHANNEL,
        "((epoch & 1) * control.num_channels + channel_idx)",
        "channel_idx",
        (f"{PUSH} calls=2 tokens=11", "fault: .*a healthy call"),
    ),
    one(
        "a wrap that skips 0 alone",
        CHANNEL,
        "uint32_t(epoch) == 0xffffffffu ? epoch + 3 : epoch + 1",
        "uint32_t(epoch) == 0xffffffffu ? epoch + 2 : epoch + 1",
        (f"{PUSH} calls=3 tokens=111 start=4294967293", "(race|fault): "),
    ),
    one(
        "a packet flag that only says which parity",
        CPU,
        "uint32_t(both >> 32) != flag",
        "((uint32_t(both >> 32) ^ flag) & 1) != 0 || both >> 32 == 0",
        (f"{PACKET8} calls=3 tokens=111", "data: "),
    ),
    one(
        "a buffer chosen by parity",
        A2A,
        "p.buffer_offset + p.buffer_idx * p.buffer_bytes",
        "p.buffer_offset + round.parity * p.buffer_bytes",
        (f"{PULL} calls=3 tokens=111 script0=1332 script1=333", "(race|data): .*"),
    ),
]

REUSE = [
    one(
        "an old flag is that of one round back",
        WAIT,
        "uint32_t(previous_epoch(previous_epoch(epoch_)))",
        "uint32_t(previous_epoch(epoch_))",
        (PUSH, "fault: .*a healthy call"),
    ),
    one(
        "an old flag is two less, after the wrap too",
        CHANNEL,
        "uint32_t(epoch) == 2 ? epoch - 3 : epoch - 1",
        "epoch - 1",
        (f"{PUSH} calls=3 tokens=111 start=4294967293", "fault: .*a healthy call"),
    ),
    one(
        "a credit of the use before",
        CHANNEL,
        "arch::load_acquire_if_sys(&flag->released, [&](uint64_t v) { return v >= epoch; }) >= epoch",
        "arch::load_acquire_sys(&flag->released) + 2 >= epoch",
        ("kv script=12132132132", "race: .*chunk"),
        (f"{PULL} tokens=4 capacity=1", "race: .*buffer"),
    ),
    one(
        "a credit of 32 bits",
        CHANNEL,
        "arch::load_acquire_if_sys(&flag->released, [&](uint64_t v) { return v >= epoch; }) >= epoch",
        "uint32_t(arch::load_acquire_sys(&flag->released)) >= uint32_t(epoch)",
        (f"{PULL} tokens=5 capacity=1 start=4294967293", "race: .*buffer"),
    ),
    one(
        "credits of the own channel alone",
        CHANNEL,
        "epoch < first_epoch_",
        "epoch == 0",
        (f"{PULL} channels=2 calls=2 tokens=22 script0=1413 script1=33", "race: .*buffer", ALL, SAMPLED),
        behind="const bool all_channels = ",
    ),
    one(
        "credits of all channels in every round",
        CHANNEL,
        "epoch < first_epoch_",
        "epoch != 0",
        (f"{PULL} channels=2 one_thread=1 tokens=4 capacity=2", "deadlock: "),
        behind="const bool all_channels = ",
    ),
    one(
        "a release in the line of the next chunk",
        CHANNEL,
        "epoch",
        "epoch_",
        ("kv script=12132132", "deadlock: "),
        behind="Flag* flag = stream_flag(symm_, control_, peer, stream_idx_, ",
    ),
    one(
        "a reduce of other rows than were gathered",
        A2A,
        "rows != 0 && rows != uint64_t(p.num_tokens) + 1",
        "rows == 99",
        ("query script=14 other_rows=1 expect=6", "fault: .*ended well"),
    ),
    one(
        "a reduce that does not close the view",
        A2A,
        "arch::store_relaxed_sys(&query_state(p)->open_rows, uint64_t(0));",
        "",
        ("query script=141 tokens=11", "fault: .*a healthy call"),
    ),
    one(
        "a start into the buffer that this rank has in use",
        CHANNEL,
        "mine_->buffer_epochs[buffer_idx] == previous_epoch(epoch_)",
        "mine_->buffer_epochs[buffer_idx] == 0",
        ("kv script=121 same_buffer=1 expect=7", "(fault|deadlock): "),
    ),
    one(
        "a gather that does not look whether a view is open",
        QUERY,
        "arch::load_relaxed_sys(&state->open_rows) != 0",
        "arch::load_relaxed_sys(&state->open_rows) == 99",
        ("query script=11 tokens=11 expect=5", "(fault|race): "),
    ),
    one(
        "a wait without its start",
        CHANNEL,
        "started == (phase_ == Phase::kWait ? next_epoch(waited) : waited)",
        "started == waited || phase_ == Phase::kWait",
        ("kv script=123 script1=23 expect=7", "data: "),
    ),
]

TOO_EARLY = [
    one(
        "the first channel to leave stores the epoch",
        CHANNEL,
        "arch::store_behind_sys(&mine_->in_flight, uint64_t(0));",
        "arch::store_release_sys(last_epoch(), epoch_); arch::store_behind_sys(&mine_->in_flight, uint64_t(0));",
        (f"{PUSH} channels=2 tokens=2", "unordered: .*epoch"),
        (f"{PUSH} channels=2 tokens=2 unordered=1", "deadlock: "),
        ("query channels=2 script=1", "unordered: .*epoch"),
        ("kv channels=2", "unordered: .*epoch"),
    ),
    one(
        "the epoch is stored when a call begins",
        CHANNEL,
        "arch::store_relaxed_sys(&state_->call, call_);",
        "arch::store_release_sys(last_epoch(), epoch_); arch::store_relaxed_sys(&state_->call, call_);",
        (f"{PUSH} channels=2 tokens=2", "unordered: .*epoch"),
        (f"{PUSH} channels=2 tokens=2 unordered=1", "deadlock: "),
    ),
    one(
        "a view is open before all channels have looked",
        QUERY,
        "publish<Convert>(cta, p, round, stores);",
        "arch::store_relaxed_sys(&stream_state(p.symm, p.control, p.symm.rank, p.stream_idx)->open_rows, uint64_t(9));\n"
        "    publish<Convert>(cta, p, round, stores);",
        ("query channels=2 script=1", "fault: .*a healthy call"),
    ),
    one(
        "a whole chunk that counts as awaited by its first channel",
        KV,
        "if (channel.leave(status) != Channel::Left::kLeft) channel.count_as_waited();",
        "channel.count_as_waited(); channel.leave(status);",
        ("kv channels=2 script=4", "unordered: .*waited_epoch"),
    ),
    one(
        "a late rank whose last look comes before its reads",
        A2A,
        "channel.confirm_reads()",
        "Status::kOk",
        (f"{PULL} script0=12 script1=12 early=1", "race: (a call trusts|.*buffer)"),
    ),
]

FAULTS = [
    one(
        "fresh flags all hold the start epoch",
        REGION,
        "flag_value(epoch, 0)",
        "flag_value(start_epoch, 0)",
        (PUSH, "fault: .*a healthy call"),
    ),
    one(
        "any digest will do",
        CHANNEL,
        "flag_value(epoch_, digest_)",
        "flag_value(epoch_, 0)",
        (f"{PUSH} tokens=1 tokens1=2", "(fault|race): "),
    ),
    one(
        "T is not in the digest",
        "core/digest.h",
        "uint64_t(num_tokens)",
        "uint64_t(0)",
        (f"{PUSH} tokens=1 tokens1=2", "(fault|race): "),
        behind="return pack_call(op, lane, uint32_t(dtype), uint32_t(base) << 8, ",
    ),
    one(
        "who adopts a fault keeps it to himself",
        CHANNEL,
        "forward_fault(symm_, control_);",
        "",
        (f"{PUSH} ranks=3 calls=2 tokens=11 interrupt=1 early=1 forever=1 lost=1 deaths=1", "deadlock: ", ALL, SAMPLED),
    ),
    one(
        "a wait that does not look at poison",
        WAIT,
        "is_poisoned(symm_, control_)",
        "false",
        (f"{PUSH} calls=2 tokens=11 forever=1 interrupt=1 early=1", "deadlock: "),
    ),
    one(
        "blame ends with the first peer that is missing",
        WAIT,
        "unmet == 0",
        "true",
        (f"{PUSH} ranks=3 calls=2 tokens=11 deaths=4", "blame: ", SAMPLED, SAMPLED),
    ),
    one(
        "a peer that waits in another call is only late",
        WAIT,
        "(blamed & rank_bit(peer)) != 0 && waits_elsewhere(peer, &call)",
        "false",
        (f"{PUSH} lanes=2 one_thread=1 swap=1", "fault: .*ended with kind 1, not 2", SAMPLED, SAMPLED),
    ),
    one(
        "no one is told who waits for whom",
        CHANNEL,
        "if (phase_ != Phase::kStart) arch::store_behind_sys(&mine_->in_flight, epoch_);",
        "",
        (f"{PUSH} ranks=3 calls=2 tokens=11 deaths=4", "blame: ", SAMPLED, SAMPLED),
    ),
    one(
        "no one is told in the second round",
        CHANNEL,
        "if (cta_.thread_rank() == 0) arch::store_behind_sys(&mine_->in_flight, epoch_);",
        "",
        (f"{PUSH} ranks=3 tokens=3 capacity=1 deaths=4", "blame: ", SAMPLED, SAMPLED),
    ),
    one(
        "who waits for a credit says nothing",
        CHANNEL,
        "arch::store_relaxed_sys(&mine_->awaited_release, epoch);",
        "",
        ("kv ranks=3 script=12132132 deaths=4", "blame: ", SAMPLED, SAMPLED),
    ),
    one(
        "a peer that has left is lost, whatever it has sent",
        WAIT,
        "return {FaultKind::kPeerLost, events.lost_peers & missing, 0};",
        "return {FaultKind::kPeerLost, events.lost_peers, 0};",
        (f"{PUSH} ranks=3 deaths=1 lost=1 leave=1 early=1", "blame: .*kind 3", ALL, SAMPLED),
        behind="if ((events.lost_peers & missing) != 0) ",
    ),
    one(
        "a lost reader is looked for by its flag",
        CHANNEL,
        "channel.not_released(channel.symm_.rank, channel.stream_idx_, epoch)",
        "channel.missing_on(channel_idx)",
        (f"{PULL} calls=3 tokens=111 script0=333 script1=121123 deaths=1 lost=1 forever=1", "deadlock: "),
    ),
    one(
        "a partial_out that returns from a fault and tells nobody",
        "host/call.h",
        "forward_fault(symm, control);",
        "",
        (
            f"{PULL} ranks=3 script0=121 script1=121 script2=121 early=1",
            "race: (a call trusts|.*buffer)",
            SAMPLED,
            SAMPLED,
        ),
    ),
    one(
        "the output of a faulted call stays as it is",
        A2A,
        "cta.broadcast(int(left)) == int(Channel::Left::kLastFaulted)",
        "cta.broadcast(int(left)) == 99",
        (f"{PUSH} early=1", "stale: "),
    ),
    one(
        "the last channel to leave alone decides whether a call has faulted",
        CHANNEL,
        "if (left >= kOneFaulted) status = Status::kFaulted;",
        "",
        (f"{PUSH} channels=2 tokens=2 early=1", "stale: ", ALL, SAMPLED),
    ),
    one(
        "a later cause replaces the first one",
        FAULT,
        "arch::compare_exchange_sys(&theirs->poison, uint64_t(0), word);",
        "arch::store_release_sys(&theirs->poison, word);",
        (f"{PUSH} early=2 unordered=1", "cause: "),
    ),
]

NOT_FOUND = [
    not_found(
        "bulk without a last look at poison",
        A2A,
        "channel.confirm()",
        "Status::kOk",
        "A second line of defence: staging stays as it is under a late reader, as a rank with a fault publishes no more.",
        f"{PUSH} calls=2 tokens=11 early=1",
        behind="kWire == Wire::kPull ? channel.confirm_reads() : ",
    ),
    not_found(
        "no barrier between the stores of a channel's threads and its flag",
        CPU,
        "cta.sync();",
        "",
        "A channel is one thread here. tests/core runs the kernels with several, under ThreadSanitizer, and finds it.",
        PUSH,
        behind="if (DCP_MUTATION != kNoPublishDone) ",
    ),
    not_found(
        "a signal that is a release and no more",
        CPU,
        "__atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST);",
        "__atomic_store_n(&flag->value, value, __ATOMIC_RELEASE);",
        "A sleeper is woken by the count of rings, which has a total order with his word; the flag needs none with it.",
        PUSH,
        f"{PUSH} sleep=1",
    ),
    not_found(
        "a sleeper who does not look at the rings once more",
        CPU,
        "__atomic_load_n(&doorbell_->rings, __ATOMIC_SEQ_CST)",
        "rings",
        "The system call compares the rings once more, by itself.",
        f"{PUSH} sleep=1",
        behind="__ATOMIC_SEQ_CST);\n    rings = ",
    ),
]

MUTATIONS = [*WEAKER_ORDER, *MISSING_WAIT, *SIGNAL_FIRST, *PARITY, *REUSE, *TOO_EARLY, *FAULTS]
