// Between calls, on the host: one call at a time on an epoch stream, and who may write a buffer of pull mode.
#pragma once

#include "core/channel.h"

namespace dcp::DCP_NS {

// Calls on one epoch stream come one after the other. Two threads of an engine may break that rule on a CPU:
// the second one is turned away before it has touched anything.
inline bool claim_call(const SymmView& symm, const ControlLayout& control, int stream_idx) {
  return arch::compare_exchange_sys(&stream_state(symm, control, symm.rank, stream_idx)->in_flight, 0u, 1u);
}
inline void release_call(const SymmView& symm, const ControlLayout& control, int stream_idx) {
  arch::store_release_sys(&stream_state(symm, control, symm.rank, stream_idx)->in_flight, 0u);
}

// This rank breaks off the call in flight on the stream, unless a fault is known already: no peer waits for
// it.
inline void abandon_call(const SymmView& symm, const ControlLayout& control, int stream_idx, uint64_t call) {
  // Channels may be running: the last one stores the epoch.
  const uint64_t epoch = arch::load_acquire_sys(&stream_state(symm, control, symm.rank, stream_idx)->epoch);
  report_fault(symm, control,
               {FaultKind::kInterrupted, Op(call >> 56), int(call >> 48 & 0xff), rank_bit(symm.rank),
                next_epoch(epoch), call, 0, 0});
}

// Whether all peers have read what they were to read in buffer `buffer_idx`. Does not wait.
inline bool is_released(const SymmView& symm, const ControlLayout& control, int stream_idx, int buffer_idx) {
  for (int channel_idx = 0; channel_idx < control.num_channels; ++channel_idx) {
    const uint64_t epoch =
        channel_state(symm, control, symm.rank, stream_idx, channel_idx)->buffer_epochs[buffer_idx];
    for (int i = 1; epoch != 0 && i < symm.num_ranks; ++i) {
      const Flag* flag =
          stream_flag(symm, control, symm.rank, stream_idx, epoch, channel_idx, peer_order(symm, i));
      if (arch::load_acquire_sys(&flag->released) < epoch) return false;
    }
  }
  return true;
}

// Returns when all peers have read what they were to read in buffer `buffer_idx`, or with kFaulted. Whoever
// returns from a fault has told all peers: they may still read what this caller is free to overwrite now.
inline Status acquire_buffer(const SymmView& symm, const ControlLayout& control, const WaitPolicy& wait,
                             int stream_idx, int buffer_idx) {
  const uint64_t last_call = stream_state(symm, control, symm.rank, stream_idx)->call;
  for (int channel_idx = 0; channel_idx < control.num_channels; ++channel_idx) {
    const arch::Cta host(channel_idx, nullptr);
    Channel channel(host, symm, control, wait, stream_idx, last_call);
    const Status status = channel.acquire_between_calls(buffer_idx);
    if (status != Status::kOk) {
      forward_fault(symm, control);
      return status;
    }
  }
  return Status::kOk;
}

}  // namespace dcp::DCP_NS
