// One channel of one call on an epoch stream: the only code that touches flags, epochs and deadlines.
//
// A channel's life, in the names of docs/protocol.md: enter, then per round signal (once per peer) and wait
// (once), then confirm and leave. All of it is called by every thread of the CTA.
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

class Channel {
 public:
  DCP_FN Channel(const arch::Cta& cta, const SymmView& symm, const ControlLayout& control,
                 const WaitPolicy& policy, int stream_idx, uint64_t call)
      : cta_(cta),
        symm_(symm),
        control_(control),
        policy_(policy),
        stream_idx_(stream_idx),
        call_(call),
        digest_(call_digest(call)),
        state_(stream_state(symm, control, symm.rank, stream_idx)),
        mine_(channel_state(symm, control, symm.rank, stream_idx, cta.index())) {}

  DCP_FN int parity() const { return int(epoch_ & 1); }
  DCP_FN uint64_t* store_hint() const { return &mine_->store_hint; }

  // Step `enter`: reads the epoch and says what this rank is about to do.
  DCP_FN Status enter() {
    epoch_ = next_epoch(arch::load_acquire_sys(&state_->epoch));
    is_first_call_ = arch::load_relaxed_sys(&state_->num_calls) == 0;
    if (cta_.thread_rank() == 0) {
      arch::store_relaxed_sys(&state_->call, call_);
      arch::store_release_sys(&mine_->in_flight, epoch_);
    }
    return confirm();
  }

  // Step `signal`: tells `peer` that this channel's rows of this round lie in its staging. Pairs with `wait`
  // there.
  DCP_FN void signal(int peer) const {
    arch::publish_done(cta_);
    if (cta_.thread_rank() == 0) {
      arch::signal_flag(stream_flag(symm_, control_, peer, stream_idx_, epoch_, cta_.index(), symm_.rank),
                        flag_value(epoch_, digest_),
                        stream_doorbell(symm_, control_, peer, stream_idx_, cta_.index()));
    }
  }

  // Step `wait`: returns when every peer's `signal` of this round has been seen, or with kFaulted.
  DCP_FN Status wait() const {
    const uint64_t expected = flag_value(epoch_, digest_);
    int64_t start_ns = 0;  // of the first look that found nothing: one deadline for all peers
    for (int i = 1 + cta_.thread_rank(); i < symm_.num_ranks; i += cta_.size()) {
      Flag* flag = own_flag(peer_order(symm_, i));
      if (arch::load_acquire_sys(&flag->value) != expected && wait_slow(i, expected, start_ns) != Status::kOk)
        break;
    }
    cta_.sync();
    if (cta_.thread_rank() == 0) ++mine_->num_rounds;
    return confirm();
  }

  // Goes on to the next round of the same call.
  DCP_FN void next_round() {
    epoch_ = next_epoch(epoch_);
    if (cta_.thread_rank() == 0) arch::store_release_sys(&mine_->in_flight, epoch_);
  }

  // Step `confirm`: after the last read of peer memory. A rank that was late must not trust what it read once
  // the others have given up on it. One thread looks, so that all threads of a CTA take the same way.
  DCP_FN Status confirm() const {
    const bool faulted = cta_.thread_rank() == 0 && is_poisoned(symm_, control_);
    return Status(cta_.broadcast(int(faulted ? Status::kFaulted : Status::kOk)));
  }

  // Step `leave`: the last channel to finish stores the epoch, so that the next call (or the next replay of a
  // captured one) finds it in memory. A faulted call tells every peer why.
  DCP_FN void leave(Status status) const {
    cta_.sync();
    if (cta_.thread_rank() != 0) return;
    if (status != Status::kOk) forward_fault(symm_, control_);
    arch::store_release_sys(&mine_->in_flight, uint64_t(0));
    if (arch::fetch_add(&state_->channels_left, 1u) + 1 == uint32_t(control_.num_channels)) {
      arch::store_relaxed_sys(&state_->channels_left, 0u);
      const uint64_t num_calls = arch::load_relaxed_sys(&state_->num_calls);
      if (status == Status::kOk) arch::store_relaxed_sys(&state_->num_calls, num_calls + 1);
      arch::store_release_sys(&state_->epoch, epoch_);
    }
  }

 private:
  DCP_FN Flag* own_flag(int source) const {
    return stream_flag(symm_, control_, symm_.rank, stream_idx_, epoch_, cta_.index(), source);
  }

  // core/wait.h
  Status wait_slow(int order_idx, uint64_t expected, int64_t& start_ns) const;
  void expire(uint64_t missing, int64_t waited_ns) const;
  uint64_t missing_at(int rank, int stream_idx, uint64_t epoch) const;
  uint64_t blame(uint64_t missing) const;
  bool waits_elsewhere(int peer, uint64_t* call) const;
  int stream_where_waiting(int peer, int first_stream) const;
  void report(FaultKind kind, uint64_t ranks, uint64_t peer_call, int64_t waited_ns) const;

  const arch::Cta& cta_;
  const SymmView& symm_;
  const ControlLayout& control_;
  const WaitPolicy& policy_;
  const int stream_idx_;
  const uint64_t call_;
  const uint32_t digest_;
  StreamState* const state_;
  ChannelState* const mine_;
  uint64_t epoch_ = 0;
  bool is_first_call_ = false;
};

}  // namespace dcp::DCP_NS

#include "core/wait.h"
