// CPU target: threads. A CPU thread is a CTA of size 1; every loop over the CTA is then a plain loop. The
// test build has CTAs of several threads in its place (tests/core/cta_threads.h, chosen by DCP_CPU_CTA).
#pragma once

#include "core/types.h"

#define DCP_FN inline __attribute__((always_inline))
// Code that seldom runs.
#define DCP_OUTLINE inline __attribute__((noinline, cold))

namespace dcp::DCP_NS::arch {

class Cta {
 public:
  Cta(int index, void* shared) : index_(index), shared_(shared) {}
  DCP_FN int index() const { return index_; }
  DCP_FN int thread_rank() const { return 0; }
  DCP_FN int size() const { return 1; }
  DCP_FN void sync() const {}
  // The value that thread 0 holds; also a sync.
  DCP_FN int broadcast(int value) const { return value; }
  // The CTA's shared memory, one object of the type that the kernel names.
  template <class S>
  DCP_FN S& shared() const {
    return *static_cast<S*>(shared_);
  }
  // This thread's part of `num_bytes` that all threads copy.
  struct Share {
    int64_t begin, end;
  };
  DCP_FN Share share_of(int64_t num_bytes) const { return {0, num_bytes}; }

 private:
  int index_;
  void* shared_;
};

// Packets that one call stores or loads (cpu.h). More than one only where several threads do it.
inline constexpr int kPacketsPerCall = 1;

// The CTA's threads in groups of up to N that can shuffle. Here a group is one thread.
template <int N>
class Lanes {
 public:
  static constexpr int kMaxGroups = 1;
  DCP_FN explicit Lanes(const Cta&) {}
  DCP_FN int rank() const { return 0; }
  DCP_FN int size() const { return 1; }
  DCP_FN int group() const { return 0; }
  DCP_FN int num_groups() const { return 1; }
  DCP_FN void sync() const {}
  // The value that lane 0 holds; also a sync.
  DCP_FN int broadcast(int value) const { return value; }
  // This lane's part of `num_bytes` that all lanes of the group copy.
  DCP_FN Cta::Share share_of(int64_t num_bytes) const { return {0, num_bytes}; }
};

inline void device_fault(int, char* text, size_t) { text[0] = '\0'; }
inline void launch_fault(char* text, size_t) { text[0] = '\0'; }

// Runs Kernel::run for the channels of `launch`, one after the other in this thread, each with a
// Kernel::Shared of its own. One channel that faults makes the call a faulted one.
template <class Kernel>
DCP_FN Status launch(const typename Kernel::Params& params, const Launch& launch) {
  Status status = Status::kOk;
  for (int channel_idx = launch.first_channel; channel_idx < launch.end_channel; ++channel_idx) {
    typename Kernel::Shared shared;
    const Status channel_status = Kernel::run(Cta(channel_idx, &shared), params);
    if (channel_status != Status::kOk) status = channel_status;
  }
  return status;
}

}  // namespace dcp::DCP_NS::arch
