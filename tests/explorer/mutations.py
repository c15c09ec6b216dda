"""All planted faults: of order (mutations_order.py), of mismatches, faults and blame, and those that make no difference."""

from __future__ import annotations

from tests.explorer import mutations_order
from tests.explorer.mutation import A2A, ALL, CHANNEL, CPU, FAULT, PULL, PUSH, REGION, SAMPLED, WAIT, not_found, one

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
        (f"{PUSH} ranks=3 calls=2 tokens=11 deaths=4", "blame: "),
    ),
    one(
        "a peer that waits in another call is only late",
        WAIT,
        "(blamed & rank_bit(peer)) != 0 && waits_elsewhere(peer, &call)",
        "false",
        (f"{PUSH} lanes=2 one_thread=1 swap=1", "fault: .*ended with kind 1, not 2"),
    ),
    one(
        "no one is told who waits for whom",
        CHANNEL,
        "if (phase_ != Phase::kStart) arch::store_behind_sys(&mine_->in_flight, epoch_);",
        "",
        (f"{PUSH} ranks=3 calls=2 tokens=11 deaths=4", "blame: "),
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

# Numbered from 1, in this order.
MUTATIONS = [*mutations_order.MUTATIONS, *FAULTS]
