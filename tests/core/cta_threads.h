// CTAs of DCP_CTA_THREADS real threads with real barriers, in place of csrc/arch/cpu_cta.h: the same kernel
// source as a GPU would run it, for ThreadSanitizer. Groups of lanes are small, so that one CTA has several.
//
// Two planted faults that the tests must find, beside those of csrc/arch/cpu.h: `sync` of a CTA, and of a
// group of lanes, that does nothing (DCP_MUTATION 4 and 5).
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "core/types.h"
#include "threads.h"

#define DCP_FN inline __attribute__((always_inline))
#define DCP_OUTLINE inline __attribute__((noinline, cold))

namespace dcp::DCP_NS::arch {

inline constexpr int kNoCtaSync = 4, kNoLanesSync = 5;

inline constexpr int kCtaThreads = DCP_CTA_THREADS;
inline constexpr int kGroupThreads = kCtaThreads < 8 ? kCtaThreads : 8;
// Several, as on a GPU: the last call of a row then has fewer.
inline constexpr int kPacketsPerCall = 3;

// A mutex and a condition variable: what ThreadSanitizer knows best.
class Barrier {
 public:
  void wait(int num_threads) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int generation = generation_;
    if (++count_ == num_threads) {
      count_ = 0;
      ++generation_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return generation_ != generation; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0, generation_ = 0;
};

// What the threads of one CTA share besides the kernel's own shared memory.
struct CtaState {
  Barrier barrier;
  int value;
  Barrier group_barriers[kCtaThreads / kGroupThreads];
  int group_values[kCtaThreads / kGroupThreads];
};

class Cta {
 public:
  Cta(int index, void* shared) : index_(index), shared_(shared) {}  // a host's: one thread
  Cta(int index, void* shared, CtaState* state, int thread_rank)
      : index_(index), thread_rank_(thread_rank), size_(kCtaThreads), shared_(shared), state_(state) {}
  int index() const { return index_; }
  int thread_rank() const { return thread_rank_; }
  int size() const { return size_; }
  void sync() const {
    if (DCP_MUTATION != kNoCtaSync) barrier();
  }
  int broadcast(int value) const {
    if (state_ == nullptr) return value;
    if (thread_rank_ == 0) state_->value = value;
    barrier();
    value = state_->value;
    barrier();
    return value;
  }
  template <class S>
  S& shared() const {
    return *static_cast<S*>(shared_);
  }
  struct Share {
    int64_t begin, end;
  };
  Share share_of(int64_t num_bytes) const {
    return {num_bytes * thread_rank_ / size_, num_bytes * (thread_rank_ + 1) / size_};
  }
  CtaState* state() const { return state_; }

 private:
  void barrier() const {
    if (state_ != nullptr) state_->barrier.wait(size_);
  }

  int index_, thread_rank_ = 0, size_ = 1;
  void* shared_;
  CtaState* state_ = nullptr;
};

template <int N>
class Lanes {
 public:
  static constexpr int kMaxGroups = kCtaThreads / kGroupThreads;
  explicit Lanes(const Cta& cta) : cta_(cta) {}
  int rank() const { return cta_.thread_rank() % kGroupThreads; }
  int size() const { return kGroupThreads; }
  int group() const { return cta_.thread_rank() / kGroupThreads; }
  int num_groups() const { return kMaxGroups; }
  void sync() const {
    if (DCP_MUTATION != kNoLanesSync) barrier();
  }
  int broadcast(int value) const {
    int& shared = cta_.state()->group_values[group()];
    if (rank() == 0) shared = value;
    barrier();
    value = shared;
    barrier();
    return value;
  }
  Cta::Share share_of(int64_t num_bytes) const {
    return {num_bytes * rank() / size(), num_bytes * (rank() + 1) / size()};
  }

 private:
  void barrier() const { cta_.state()->group_barriers[group()].wait(kGroupThreads); }

  const Cta& cta_;
};

// Each thread by itself.
template <>
class Lanes<1> {
 public:
  static constexpr int kMaxGroups = kCtaThreads;
  explicit Lanes(const Cta& cta) : group_(cta.thread_rank()), num_groups_(cta.size()) {}
  int rank() const { return 0; }
  int size() const { return 1; }
  int group() const { return group_; }
  int num_groups() const { return num_groups_; }
  void sync() const {}
  int broadcast(int value) const { return value; }

 private:
  int group_, num_groups_;
};

// The other threads of a CTA that this thread launches, whatever the kernel.
inline Threads& other_threads() {
  static thread_local Threads threads(kCtaThreads - 1);
  return threads;
}

template <class Kernel>
Status launch(const typename Kernel::Params& params, const Launch& launch) {
  Status status = Status::kOk;
  for (int channel_idx = launch.first_channel; channel_idx < launch.end_channel; ++channel_idx) {
    typename Kernel::Shared shared;
    CtaState state;
    Status of_thread[kCtaThreads];
    const auto run = [&](int rank) {
      of_thread[rank] = Kernel::run(Cta(channel_idx, &shared, &state, rank), params);
    };
    const std::function<void(int)> run_other = [&](int index) { run(index + 1); };
    other_threads().start(run_other);
    run(0);
    other_threads().wait();
    for (Status one : of_thread) {
      if (one != Status::kOk) status = one;
    }
  }
  return status;
}

}  // namespace dcp::DCP_NS::arch
