// The part of Channel::wait that runs when a peer is not there yet: patience, deadline, and the search for
// the culprit. Included by core/channel.h.
#pragma once

#include "core/channel.h"

namespace dcp::DCP_NS {

// Waits for the peer at place `order_idx`. Three answers end it: what is awaited is there, the peer's flag is
// one that cannot be (mismatch), or a fault (poison, deadline, a lost peer, an interrupt). Threads that wait
// together make the same number of looks, and end together with one answer: that of the one that leads.
template <class Awaited>
DCP_OUTLINE Status Channel::wait_slow(int order_idx, const Awaited& awaited, int64_t& start_ns) const {
  const int peer = peer_order(symm_, order_idx);
  const Flag* flag = flag_at(symm_.rank, peer);
  const uint32_t not_yet = uint32_t(previous_epoch(previous_epoch(epoch_)));
  const int64_t timeout_ns = deadline_ns(policy_, is_first_call_);
  int64_t next_host_poll_ns = 0;
  Doorbell* doorbell = stream_doorbell(symm_, control_, symm_.rank, stream_idx_, cta_.index());
  arch::Backoff backoff(policy_, doorbell, uint32_t((mine_->num_rounds + 1) * (symm_.num_ranks - 1)));
  enum Verdict { kGoOn, kIsPoisoned, kHasCause };
  Verdict verdict = kGoOn;
  Cause cause = {};
  int64_t waited_ns = 0;
  for (;;) {
    // Of another call; the one that is waited for has an acquire of its own, in there().
    const auto differs = [&](uint64_t v) { return uint32_t(v) != not_yet && v != expected_flag(); };
    const uint64_t seen = arch::load_acquire_if_sys(&flag->value, differs);
    if (awaited.there()) return Status::kOk;
    if (awaited.leads()) {
      if (differs(seen)) {
        // Same epoch and another digest, or an epoch that this rank is not in: the peer made another call.
        const StreamState* theirs = stream_state(symm_, control_, peer, stream_idx_);
        cause = {FaultKind::kMismatch, rank_bit(peer), arch::load_relaxed_sys(&theirs->call)};
        verdict = kHasCause;
      } else if (backoff.is_slow()) {
        if (is_poisoned(symm_, control_)) {
          verdict = kIsPoisoned;
        } else {
          const int64_t now_ns = arch::now_ns();
          if (start_ns == 0) start_ns = now_ns;
          if (next_host_poll_ns == 0) next_host_poll_ns = now_ns + arch::kHostPollNs;
          waited_ns = now_ns - start_ns;
          const bool is_over = timeout_ns > 0 && waited_ns > timeout_ns;
          if (is_over || now_ns > next_host_poll_ns) {
            next_host_poll_ns = now_ns + arch::kHostPollNs;
            cause = look_for_cause(awaited, is_over);
            if (cause.ranks != 0) verdict = kHasCause;
          }
        }
      }
    }
    verdict = Verdict(awaited.agree(verdict));
    if (verdict != kGoOn) break;
    backoff.pause(flag, seen);
  }
  // The only place that reports: where all of this is inlined, there is one copy of it.
  if (verdict == kHasCause && awaited.leads()) report(cause, waited_ns);
  return Status::kFaulted;
}

// Once in a while in a long wait, and when the deadline `is_over`: what has ended it. No ranks: nothing has.
template <class Awaited>
DCP_OUTLINE Channel::Cause Channel::look_for_cause(const Awaited& awaited, bool is_over) const {
  const HostEvents events = arch::poll_host(policy_);
  if (events.interrupted) return {FaultKind::kInterrupted, rank_bit(symm_.rank), 0};
  // A peer may have signalled, finished and left, and all may have come between the look at the flag and the
  // look at the clock: only what is missing now counts.
  const uint64_t missing = awaited.missing();
  if ((events.lost_peers & missing) != 0) return {FaultKind::kPeerLost, events.lost_peers & missing, 0};
  if (is_over && missing != 0) return expire(missing);
  return {};
}

// The deadline has passed: names the ranks at fault, and tells a late peer from one that waits in another
// call.
DCP_OUTLINE Channel::Cause Channel::expire(uint64_t missing) const {
  const uint64_t blamed = blame(missing);
  DCP_NO_UNROLL
  for (int peer = 0; peer < symm_.num_ranks; ++peer) {
    uint64_t call = 0;
    if ((blamed & rank_bit(peer)) != 0 && waits_elsewhere(peer, &call)) {
      return {FaultKind::kMismatch, rank_bit(peer), call};
    }
  }
  return {FaultKind::kTimeout, blamed, 0};
}

// The peers whose flag of round `epoch` has not reached `rank`, on one channel.
DCP_OUTLINE uint64_t Channel::missing_at(int rank, int stream_idx, uint64_t epoch, int channel_idx) const {
  uint64_t missing = 0;
  DCP_NO_UNROLL
  for (int source = 0; source < symm_.num_ranks; ++source) {
    if (source == rank) continue;
    Flag* flag = stream_flag(symm_, control_, rank, stream_idx, epoch, channel_idx, source);
    if (uint32_t(arch::load_relaxed_sys(&flag->value)) != uint32_t(epoch)) missing |= rank_bit(source);
  }
  return missing;
}

// The peers that have not read all that `owner` lent them in `epoch`, on some channel.
DCP_OUTLINE uint64_t Channel::not_released(int owner, int stream_idx, uint64_t epoch) const {
  uint64_t missing = 0;
  DCP_NO_UNROLL
  for (int channel_idx = 0; channel_idx < control_.num_channels; ++channel_idx) {
    DCP_NO_UNROLL
    for (int reader = 0; reader < symm_.num_ranks; ++reader) {
      if (reader == owner) continue;
      if (!has_released(owner, stream_idx, channel_idx, reader, epoch)) missing |= rank_bit(reader);
    }
  }
  return missing;
}

// The ranks that `peer` itself waits for, on any channel; none: it does not wait. Where its channels share a
// thread, it waits on another one than this rank does.
DCP_OUTLINE uint64_t Channel::unmet_waits(int peer) const {
  uint64_t unmet = 0;
  DCP_NO_UNROLL
  for (int channel_idx = 0; channel_idx < control_.num_channels; ++channel_idx) {
    const ChannelState* theirs = channel_state(symm_, control_, peer, stream_idx_, channel_idx);
    const uint64_t lent = arch::load_relaxed_sys(&theirs->awaited_release);
    const uint64_t unread = lent == 0 ? 0 : not_released(peer, stream_idx_, lent);
    const uint64_t epoch = arch::load_acquire_sys(&theirs->in_flight);
    if (unread != 0) {
      unmet |= unread;
    } else if (epoch != 0) {
      unmet |= missing_at(peer, stream_idx_, epoch, channel_idx);
    }
  }
  return unmet;
}

// Follows the chain of waits: a missing peer that is itself in a call and has unmet waits is a victim, not a
// culprit. Without this, a rank whose deadline happens to end first would name its neighbour instead of the
// rank that stopped.
DCP_OUTLINE uint64_t Channel::blame(uint64_t missing) const {
  uint64_t blamed = 0, visited = rank_bit(symm_.rank), frontier = missing;
  DCP_NO_UNROLL
  while (frontier != 0) {
    int peer = 0;
    while ((frontier & rank_bit(peer)) == 0) ++peer;
    frontier &= ~rank_bit(peer);
    visited |= rank_bit(peer);
    const uint64_t unmet = unmet_waits(peer);
    if (unmet == 0) {
      blamed |= rank_bit(peer);
    } else {
      frontier |= unmet & ~visited;
    }
  }
  return blamed != 0 ? blamed : missing;
}

// True when `peer` waits in another epoch stream for this rank, which does not come there: the two made
// different calls. With lanes in several threads a peer waits elsewhere for moments all the time; so it must
// still be the same round after a while, and where it is not, other streams are looked at. Any channel of the
// peer counts: where its channels share a thread, the first one alone may wait, and this one may be another.
DCP_OUTLINE bool Channel::waits_elsewhere(int peer, uint64_t* call) const {
  DCP_NO_UNROLL
  for (int stream_idx = 0; stream_idx < control_.num_streams; ++stream_idx) {
    if (stream_idx == stream_idx_) continue;
    DCP_NO_UNROLL
    for (int channel_idx = 0; channel_idx < control_.num_channels; ++channel_idx) {
      const uint64_t epoch = awaited_in(stream_idx, channel_idx, peer);
      if (epoch == 0) continue;
      const int64_t second_look_ns = arch::now_ns() + arch::kHostPollNs;
      while (arch::now_ns() < second_look_ns) arch::spin_pause();
      if (awaited_in(stream_idx, channel_idx, peer) != epoch) break;
      *call = arch::load_relaxed_sys(&stream_state(symm_, control_, peer, stream_idx)->call);
      return true;
    }
  }
  return false;
}

// The epoch that a channel of `peer` waits for this rank to signal, or to release (a start of chunks waits
// for no signal), in an epoch stream; 0: it does not, or this rank is in that round.
DCP_OUTLINE uint64_t Channel::awaited_in(int stream_idx, int channel_idx, int peer) const {
  const ChannelState* theirs = channel_state(symm_, control_, peer, stream_idx, channel_idx);
  const ChannelState* mine = channel_state(symm_, control_, symm_.rank, stream_idx, channel_idx);
  const uint64_t lent = arch::load_relaxed_sys(&theirs->awaited_release);
  if (lent != 0 && (not_released(peer, stream_idx, lent) & rank_bit(symm_.rank)) != 0) return lent;
  const uint64_t epoch = arch::load_acquire_sys(&theirs->in_flight);
  if (epoch == 0 || epoch == arch::load_acquire_sys(&mine->in_flight)) return 0;
  return (missing_at(peer, stream_idx, epoch, channel_idx) & rank_bit(symm_.rank)) != 0 ? epoch : 0;
}

DCP_OUTLINE void Channel::report(const Cause& cause, int64_t waited_ns) const {
  report_fault(symm_, control_,
               {cause.kind, Op(call_ >> 56), int(call_ >> 48 & 0xff), cause.ranks, epoch_, call_,
                cause.peer_call, uint64_t(waited_ns)});
}

}  // namespace dcp::DCP_NS
