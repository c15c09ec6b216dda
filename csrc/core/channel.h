// One channel of one call on an epoch stream: the only code that touches flags, epochs and deadlines.
//
// A channel's life, in the names of docs/protocol.md: enter, then per round signal (once per peer, or all at
// once) and wait (once), then confirm and leave. Where callers see a buffer of the region, acquire comes
// before it is written, and release after the last read. All of it is called by every thread of the CTA.
#pragma once

#include "arch/target.h"
#include "core/digest.h"
#include "core/fault.h"
#include "core/symm.h"

namespace dcp::DCP_NS {

// The epoch after `epoch`. Low halves 0 and 1 are skipped together: 0 would look like a flag that was never
// raised, and skipping one of them alone would use the same parity twice in a row.
DCP_FN uint64_t next_epoch(uint64_t epoch) { return uint32_t(epoch) == 0xffffffffu ? epoch + 3 : epoch + 1; }
DCP_FN uint64_t previous_epoch(uint64_t epoch) { return uint32_t(epoch) == 2 ? epoch - 3 : epoch - 1; }

DCP_FN uint64_t flag_value(uint64_t epoch, uint32_t digest) {
  return uint64_t(digest) << 32 | uint32_t(epoch);
}

// The one place that knows how long a wait may take.
DCP_FN int64_t deadline_ns(const WaitPolicy& policy, bool is_first_call) {
  return is_first_call ? policy.first_timeout_ns : policy.timeout_ns;
}

DCP_FN StreamState* stream_state(const SymmView& symm, const ControlLayout& control, int rank,
                                 int stream_idx) {
  return symm_at<StreamState>(symm, rank, control.streams_offset + control.stream_bytes * stream_idx);
}
DCP_FN ChannelState* channel_state(const SymmView& symm, const ControlLayout& control, int rank,
                                   int stream_idx, int channel_idx) {
  return reinterpret_cast<ChannelState*>(stream_state(symm, control, rank, stream_idx) + 1) + channel_idx;
}
DCP_FN Doorbell* stream_doorbell(const SymmView& symm, const ControlLayout& control, int owner,
                                 int stream_idx, int channel_idx) {
  return reinterpret_cast<Doorbell*>(channel_state(symm, control, owner, stream_idx, control.num_channels)) +
         channel_idx;
}
// The flag in `owner`'s region that `source` raises.
DCP_FN Flag* stream_flag(const SymmView& symm, const ControlLayout& control, int owner, int stream_idx,
                         uint64_t epoch, int channel_idx, int source) {
  Flag* flags = symm_at<Flag>(symm, owner, control.flags_offset + control.flags_bytes * stream_idx);
  return flags + ((epoch & 1) * control.num_channels + channel_idx) * symm.num_ranks + source;
}

// Where the payload of a round lies in a region: row 0, head 0. Strides in elements.
struct PayloadPlace {
  uint64_t offset;
  int64_t token_stride, head_stride;
};

// Which part of its rounds a call makes. A split round is started by one call, which signals, and ended by a
// later one, which waits.
enum class Phase { kBoth, kStart, kWait };

class Channel {
 public:
  // What StreamState.channels_left counts a faulted channel for, above the channels that are done.
  static constexpr uint32_t kOneFaulted = 1u << 16;

  DCP_FN Channel(const arch::Cta& cta, const SymmView& symm, const ControlLayout& control,
                 const WaitPolicy& policy, int stream_idx, uint64_t call, Phase phase = Phase::kBoth)
      : cta_(cta),
        symm_(symm),
        control_(control),
        policy_(policy),
        stream_idx_(stream_idx),
        call_(call),
        phase_(phase),
        digest_(call_digest(call)),
        state_(stream_state(symm, control, symm.rank, stream_idx)),
        mine_(channel_state(symm, control, symm.rank, stream_idx, cta.index())) {}

  DCP_FN int parity() const { return int(epoch_ & 1); }
  DCP_FN uint32_t epoch_low() const { return uint32_t(epoch_); }
  DCP_FN uint64_t* store_hint() const { return &mine_->store_hint; }

  // Step `enter`: reads the epoch and says what this rank is about to do.
  DCP_FN Status enter() {
    // One thread's acquire will do where others cost: all sync with it in `confirm`.
    const bool leads = cta_.thread_rank() == 0;
    const uint64_t last = arch::load_acquire_if_sys(last_epoch(), [&](uint64_t) { return leads; });
    first_epoch_ = epoch_ = next_epoch(last);
    is_first_call_ = arch::load_relaxed_sys(&state_->num_calls) == 0;
    if (leads) {
      arch::store_relaxed_sys(&state_->call, call_);
      // Peers look there for who waits for whom. A round that is only started waits for no signal.
      if (phase_ != Phase::kStart) arch::store_behind_sys(&mine_->in_flight, epoch_);
    }
    return confirm();
  }

  // Ends the call on all ranks: this rank, which may be in it with others, must not make it now.
  // `other_call`: what is in its way.
  DCP_FN Status refuse(FaultKind kind, uint64_t other_call) const {
    if (cta_.thread_rank() == 0) report({kind, rank_bit(symm_.rank), other_call}, 0);
    cta_.sync();
    return Status::kFaulted;
  }

  // Step `acquire`: returns when every peer has read what was last put into buffer `buffer_idx`, so that it
  // may be written again. Pairs with `release` there. In the first round of a call the last use may have been
  // a caller's tensor, any view of the buffer: other channels' readers count too. In later rounds it was this
  // channel's copy; to await other channels then would be to wait for channels that come after this one in
  // its thread.
  DCP_FN Status acquire(int buffer_idx) const {
    const uint64_t epoch = mine_->buffer_epochs[buffer_idx];
    if (epoch == 0) return confirm();  // never lent
    const bool all_channels = epoch < first_epoch_;
    const int first_channel = all_channels ? 0 : cta_.index();
    const int end_channel = all_channels ? control_.num_channels : cta_.index() + 1;
    int64_t start_ns = 0;
    Status status = Status::kOk;
    DCP_NO_UNROLL
    for (int channel_idx = first_channel; channel_idx < end_channel && status == Status::kOk; ++channel_idx) {
      DCP_NO_UNROLL
      for (int i = 1 + cta_.thread_rank(); i < symm_.num_ranks && status == Status::kOk; i += cta_.size()) {
        const Released released = {{}, *this, channel_idx, peer_order(symm_, i), epoch};
        if (released.there()) continue;
        arch::store_relaxed_sys(&mine_->awaited_release, epoch);
        status = wait_slow(i, released, start_ns);
      }
    }
    cta_.sync();
    if (cta_.thread_rank() == 0) arch::store_relaxed_sys(&mine_->awaited_release, uint64_t(0));
    return confirm();
  }
  // The same between two calls, for a host that is about to write into the buffer.
  DCP_FN Status acquire_between_calls(int buffer_idx) {
    epoch_ = arch::load_acquire_sys(&state_->epoch);
    return acquire(buffer_idx);
  }

  // Whether the calls of a split round take turns: a start when every started round has been waited for, a
  // wait when one has not. Otherwise it would return a round without this rank's own rows, or wait for
  // itself.
  DCP_FN bool is_in_turn() const {
    const uint64_t started = arch::load_relaxed_sys(&state_->epoch);
    const uint64_t waited = arch::load_relaxed_sys(&state_->waited_epoch);
    return started == (phase_ == Phase::kWait ? next_epoch(waited) : waited);
  }
  // Whether buffer `buffer_idx` was lent in the round before this one: its reader is this rank's own caller,
  // of whom `acquire` does not ask.
  DCP_FN bool was_lent_before(int buffer_idx) const {
    return mine_->buffer_epochs[buffer_idx] != 0 &&
           mine_->buffer_epochs[buffer_idx] == previous_epoch(epoch_);
  }

  // This round's payload lies in buffer `buffer_idx`; peers are about to read it.
  DCP_FN void lend(int buffer_idx) const {
    if (cta_.thread_rank() == 0) mine_->buffer_epochs[buffer_idx] = epoch_;
  }

  // Step `signal`: tells `peer` that this channel's rows of this round are there. Pairs with `wait` there.
  DCP_FN void signal(int peer) const {
    arch::publish_done(cta_);
    if (cta_.thread_rank() == 0) raise(peer);
  }
  // The same in pull mode, where the payload is at `payload` of this rank's region.
  DCP_FN void signal(int peer, const PayloadPlace& payload) const {
    arch::publish_done(cta_);
    if (cta_.thread_rank() != 0) return;
    describe(peer, payload);
    raise(peer);
  }
  // The same where packets say for themselves that they are there.
  DCP_FN void signal_unordered(int peer) const {
    if (cta_.thread_rank() == 0) raise_unordered(peer);
  }
  // The same for all peers at once, by a thread for each: one wait for the stores of all, and not one a peer.
  DCP_FN void signal_each() const {
    arch::publish_done(cta_);
    each_peer([&](int peer) { raise(peer); });
  }
  DCP_FN void signal_each(const PayloadPlace& payload) const {
    arch::publish_done(cta_);
    each_peer([&](int peer) {
      describe(peer, payload);
      raise(peer);
    });
  }
  DCP_FN void signal_each_unordered() const {
    each_peer([&](int peer) { raise_unordered(peer); });
  }
  // The same after stores that went to all of them (core/broadcast.h).
  DCP_FN void signal_all(bool uses_multicast) const {
    arch::broadcast_done(cta_, uses_multicast);
    if (has_multicast(symm_)) {
      const uint64_t at_rank = reinterpret_cast<uint64_t>(flag_at(symm_.rank, symm_.rank));
      Flag* flag = reinterpret_cast<Flag*>(symm_.multicast + (at_rank - symm_.bases[symm_.rank]));
      if (cta_.thread_rank() == 0) arch::multicast_flag(flag, expected_flag());
      return;
    }
    each_peer([&](int peer) { raise(peer); });
  }
  // Where `source` said that its payload is; after `wait`.
  DCP_FN PayloadPlace payload_of(int source) const {
    const Flag* flag = flag_at(symm_.rank, source);
    return {arch::load_relaxed_sys(&flag->payload_offset), arch::load_relaxed_sys(&flag->token_stride),
            arch::load_relaxed_sys(&flag->head_stride)};
  }

  // Step `wait`: returns when every peer's `signal` of this round has been seen, or with kFaulted. A channel
  // that reads what other channels of its peers wrote waits for `all_channels`: in a phase of its own, where
  // no channel of this rank has to signal any more.
  DCP_FN Status wait(bool all_channels = false) const {
    const int first_channel = all_channels ? 0 : cta_.index();
    const int end_channel = all_channels ? control_.num_channels : cta_.index() + 1;
    int64_t start_ns = 0;  // of the first look that found nothing: one deadline for all peers
    Status status = Status::kOk;
    DCP_NO_UNROLL
    for (int channel_idx = first_channel; channel_idx < end_channel && status == Status::kOk; ++channel_idx) {
      DCP_NO_UNROLL
      for (int i = 1 + cta_.thread_rank(); i < symm_.num_ranks && status == Status::kOk; i += cta_.size()) {
        status = wait_for(i, Signalled{{}, *this, channel_idx, peer_order(symm_, i)}, start_ns);
      }
    }
    cta_.sync();
    if (cta_.thread_rank() == 0) ++mine_->num_rounds;
    return confirm();
  }

  // Returns when packets are `there()` (core/packet.h), or with kFaulted: they come with a signal of the peer
  // at place `order_idx`, but without waiting for its flag. By all threads of `packets.lanes`, which return
  // the same.
  template <class Packets>
  DCP_FN Status wait_for_packets(int order_idx, const Packets& packets, int64_t& start_ns) const {
    return wait_for(order_idx, OfSignal<Packets>{*this, peer_order(symm_, order_idx), packets}, start_ns);
  }

  // Step `release`: this channel has read all that it wanted of the peers' buffers. Pairs with `acquire`
  // there.
  DCP_FN void release() const { release(epoch_); }
  // The same for the round before, in whose buffer the caller has read what he wanted.
  DCP_FN void release_previous() const { release(previous_epoch(epoch_)); }

  // Goes on to the next round of the same call.
  DCP_FN void next_round() {
    epoch_ = next_epoch(epoch_);
    if (cta_.thread_rank() == 0) arch::store_behind_sys(&mine_->in_flight, epoch_);
  }

  // A look at the own poison word. One thread looks, so that all threads of a CTA take the same way.
  DCP_FN Status confirm() const {
    const bool faulted = cta_.thread_rank() == 0 && is_poisoned(symm_, control_);
    return Status(cta_.broadcast(int(faulted ? Status::kFaulted : Status::kOk)));
  }
  // Step `confirm`: after the last read of peer memory. A rank that was late must not trust what it read once
  // the others have given up on it: they may write there again.
  DCP_FN Status confirm_reads() const {
    cta_.sync();
    const bool faulted =
        cta_.thread_rank() == 0 && arch::load_after_reads_sys(own_poison(symm_, control_)) != 0;
    return Status(cta_.broadcast(int(faulted ? Status::kFaulted : Status::kOk)));
  }

  // Step `leave`: the last channel to finish stores the epoch, so that the next call (or the next replay of a
  // captured one) finds it in memory. A faulted call tells every peer why, and its host. Not kLeft in one
  // thread of the rank: that of the last channel, when all are done.
  enum class Left { kLeft, kLast, kLastFaulted };
  DCP_FN Left leave(Status status) const {
    arch::stores_done(cta_);  // the last channel may overwrite the output of a faulted call
    if (cta_.thread_rank() != 0) return Left::kLeft;
    if (status != Status::kOk) {
      forward_fault(symm_, control_);
      if (policy_.host_fault != nullptr) show_fault(symm_, control_, policy_.host_fault);
    }
    arch::store_behind_sys(&mine_->in_flight, uint64_t(0));
    const uint32_t mine = status == Status::kOk ? 1 : 1 + kOneFaulted;
    const uint32_t left = arch::fetch_add(&state_->channels_left, mine) + mine;
    if (left % kOneFaulted != uint32_t(control_.num_channels)) return Left::kLeft;
    if (left >= kOneFaulted) status = Status::kFaulted;
    arch::store_relaxed_sys(&state_->channels_left, 0u);
    const uint64_t num_calls = arch::load_relaxed_sys(&state_->num_calls);
    if (status == Status::kOk && phase_ != Phase::kStart) {
      arch::store_relaxed_sys(&state_->num_calls, num_calls + 1);
    }
    arch::store_release_sys(last_epoch(), epoch_);
    return status == Status::kOk ? Left::kLast : Left::kLastFaulted;
  }

  // In the thread that `leave` told so, of a call that starts a split round and ends it: the next one finds
  // it waited for.
  DCP_FN void count_as_waited() const { arch::store_behind_sys(&state_->waited_epoch, epoch_); }

 private:
  // What a wait may be for. there(): is it there? missing(): which peers have not done their part? Where
  // threads wait together, they look together, and the one that leads decides for all: agree() is what it
  // says.
  struct Alone {
    DCP_FN bool leads() const { return true; }
    DCP_FN int agree(int value) const { return value; }
  };
  struct Signalled : Alone {
    const Channel& channel;
    int channel_idx, peer;
    DCP_FN bool there() const {
      const Flag* flag = channel.flag_at(channel.symm_.rank, peer, channel_idx);
      const uint64_t expected = channel.expected_flag();
      return arch::load_acquire_if_sys(&flag->value, [&](uint64_t v) { return v == expected; }) == expected;
    }
    DCP_FN uint64_t missing() const { return channel.missing_on(channel_idx); }
  };
  template <class Packets>
  struct OfSignal {
    const Channel& channel;
    int peer;
    const Packets& packets;
    DCP_FN bool there() const { return packets.there(); }
    DCP_FN bool leads() const { return packets.lanes.rank() == 0; }
    DCP_FN int agree(int value) const { return packets.lanes.broadcast(value); }
    DCP_FN uint64_t missing() const {
      // Also when the flag is there: it has no order with what comes with it.
      const uint64_t late = packets.bear_flag() ? 0 : rank_bit(peer);
      return late | channel.missing_on(channel.cta_.index());
    }
  };
  struct Released : Alone {
    const Channel& channel;
    int channel_idx, peer;
    uint64_t epoch;
    DCP_FN bool there() const {
      return channel.has_released(channel.symm_.rank, channel.stream_idx_, channel_idx, peer, epoch);
    }
    DCP_FN uint64_t missing() const {
      return channel.not_released(channel.symm_.rank, channel.stream_idx_, epoch);
    }
  };

  DCP_FN uint64_t missing_on(int channel_idx) const {
    return missing_at(symm_.rank, stream_idx_, epoch_, channel_idx);
  }
  DCP_FN uint64_t expected_flag() const { return flag_value(epoch_, digest_); }
  // The word that holds the epoch of the last round that this phase has made.
  DCP_FN uint64_t* last_epoch() const {
    return phase_ == Phase::kWait ? &state_->waited_epoch : &state_->epoch;
  }
  // The flag of this round in `owner`'s region that `source` raises.
  DCP_FN Flag* flag_at(int owner, int source) const { return flag_at(owner, source, cta_.index()); }
  DCP_FN Flag* flag_at(int owner, int source, int channel_idx) const {
    return stream_flag(symm_, control_, owner, stream_idx_, epoch_, channel_idx, source);
  }
  DCP_FN void release(uint64_t epoch) const {
    cta_.sync();
    each_peer([&](int peer) {
      Flag* flag = stream_flag(symm_, control_, peer, stream_idx_, epoch, cta_.index(), symm_.rank);
      arch::store_behind_sys(&flag->released, epoch);
    });
  }
  // f(peer) by one thread, of each peer by another.
  template <class F>
  DCP_FN void each_peer(const F& f) const {
    DCP_NO_UNROLL
    for (int i = 1 + cta_.thread_rank(); i < symm_.num_ranks; i += cta_.size()) f(peer_order(symm_, i));
  }
  // What `payload_of` reads there.
  DCP_FN void describe(int peer, const PayloadPlace& payload) const {
    Flag* flag = flag_at(peer, symm_.rank);
    arch::store_relaxed_sys(&flag->payload_offset, payload.offset);
    arch::store_relaxed_sys(&flag->token_stride, payload.token_stride);
    arch::store_relaxed_sys(&flag->head_stride, payload.head_stride);
  }
  DCP_FN void raise(int peer) const {
    arch::signal_flag(flag_at(peer, symm_.rank), expected_flag(),
                      stream_doorbell(symm_, control_, peer, stream_idx_, cta_.index()));
  }
  // Behind what this rank has read; packets need no more.
  DCP_FN void raise_unordered(int peer) const {
    arch::signal_flag_behind(flag_at(peer, symm_.rank), expected_flag(),
                             stream_doorbell(symm_, control_, peer, stream_idx_, cta_.index()));
  }
  // Epochs of one parity only grow, so "at least" is exact, also long after.
  DCP_FN bool has_released(int owner, int stream_idx, int channel_idx, int reader, uint64_t epoch) const {
    const Flag* flag = stream_flag(symm_, control_, owner, stream_idx, epoch, channel_idx, reader);
    return arch::load_acquire_if_sys(&flag->released, [&](uint64_t v) { return v >= epoch; }) >= epoch;
  }

  template <class Awaited>
  DCP_FN Status wait_for(int order_idx, const Awaited& awaited, int64_t& start_ns) const {
    return awaited.there() ? Status::kOk : wait_slow(order_idx, awaited, start_ns);
  }
  // core/wait.h
  template <class Awaited>
  DCP_DECL Status wait_slow(int order_idx, const Awaited& awaited, int64_t& start_ns) const;
  struct Cause {
    FaultKind kind;
    uint64_t ranks, peer_call;
  };
  template <class Awaited>
  DCP_DECL Cause look_for_cause(const Awaited& awaited, bool is_over) const;
  DCP_DECL Cause expire(uint64_t missing) const;
  DCP_DECL uint64_t missing_at(int rank, int stream_idx, uint64_t epoch, int channel_idx) const;
  DCP_DECL uint64_t not_released(int owner, int stream_idx, uint64_t epoch) const;
  DCP_DECL uint64_t unmet_waits(int peer) const;
  DCP_DECL uint64_t blame(uint64_t missing) const;
  DCP_DECL bool waits_elsewhere(int peer, uint64_t* call) const;
  DCP_DECL uint64_t awaited_in(int stream_idx, int channel_idx, int peer) const;
  DCP_DECL void report(const Cause& cause, int64_t waited_ns) const;

  const arch::Cta& cta_;
  const SymmView& symm_;
  const ControlLayout& control_;
  const WaitPolicy& policy_;
  const int stream_idx_;
  const uint64_t call_;
  const Phase phase_;
  const uint32_t digest_;
  StreamState* const state_;
  ChannelState* const mine_;
  uint64_t epoch_ = 0;
  uint64_t first_epoch_ = 0;  // of this call; 0 between calls
  bool is_first_call_ = false;
};

}  // namespace dcp::DCP_NS

#include "core/wait.h"
