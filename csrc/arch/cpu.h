// CPU target: threads, order, time. A CPU thread is a CTA of size 1; every loop over the CTA is then a plain
// loop. The __atomic builtins are used instead of std::atomic_ref: a member function that is not inlined
// would be emitted under the same name by every ISA variant. ThreadSanitizer understands both.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "core/types.h"

#define DCP_FN inline __attribute__((always_inline))
#define DCP_NOINLINE static __attribute__((noinline))

namespace dcp::DCP_NS::arch {

// ---- threads

class Cta {
 public:
  Cta(int index, void* shared) : index_(index), shared_(shared) {}
  DCP_FN int index() const { return index_; }
  DCP_FN int thread_rank() const { return 0; }
  DCP_FN int size() const { return 1; }
  DCP_FN void sync() const {}
  // The value that thread 0 holds; also a sync.
  DCP_FN int broadcast(int value) const { return value; }
  // The CTA's shared memory, one object of the type that the kernel was launched with.
  template <class S>
  DCP_FN S& shared() const {
    return *static_cast<S*>(shared_);
  }

 private:
  int index_;
  void* shared_;
};

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
};

// Runs `kernel(cta, params)` for the channels [0, num_channels), each with its own Shared, in this thread.
// One channel that faults makes the call a faulted one.
template <class Shared, class Params>
DCP_FN Status launch(Status (*kernel)(const Cta&, const Params&), int num_channels, const Params& params) {
  Status status = Status::kOk;
  for (int channel_idx = 0; channel_idx < num_channels; ++channel_idx) {
    Shared shared;
    const Status channel_status = kernel(Cta(channel_idx, &shared), params);
    if (channel_status != Status::kOk) status = channel_status;
  }
  return status;
}

// ---- order

#if defined(DCP_MUTATE_RELAXED_SIGNAL)  // a planted fault: the race test must report it
inline constexpr int kSignalOrder = __ATOMIC_RELAXED;
#else
inline constexpr int kSignalOrder = __ATOMIC_SEQ_CST;
#endif

template <class T>
DCP_FN T load_acquire_sys(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
template <class T>
DCP_FN T load_relaxed_sys(const T* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}
template <class T>
DCP_FN void store_release_sys(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
template <class T>
DCP_FN void store_relaxed_sys(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
template <class T>
DCP_FN T fetch_add(T* word, T value) {
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
// True when this call changed *word from `expected` to `desired`.
template <class T>
DCP_FN bool compare_exchange_sys(T* word, T expected, T desired) {
  return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// All stores of the CTA to peers are complete before a flag that follows. A release store sees to ordinary
// stores; those that went past the caches (PeerStores) are ordered by sfence.
DCP_FN void publish_done(const Cta& cta) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
  cta.sync();
}

// Raises a peer's flag and rings its doorbell; wakes the peer if it sleeps and this was the signal that it
// sleeps for. Ring, then read `awaited`; the sleeper sets `awaited`, then reads `rings`: all sequentially
// consistent, so that one of the two sees the other.
DCP_FN void signal_flag(Flag* flag, uint64_t value, Doorbell* doorbell) {
  __atomic_exchange_n(&flag->value, value, kSignalOrder);
  const uint32_t rings = __atomic_add_fetch(&doorbell->rings, 1, kSignalOrder);
  const uint32_t awaited = __atomic_load_n(&doorbell->awaited, kSignalOrder);
  if (__builtin_expect(awaited != 0 && int32_t(rings - awaited) >= 0, 0)) {
    syscall(SYS_futex, &doorbell->rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

// Calls on one epoch stream come one after the other. On a CPU two threads of the engine may break that rule:
// the second one is turned away before it has touched anything.
DCP_FN bool claim_call(StreamState* state) { return compare_exchange_sys(&state->in_flight, 0u, 1u); }
DCP_FN void release_call(StreamState* state) { store_release_sys(&state->in_flight, 0u); }

// ---- time

DCP_FN int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

DCP_FN void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb");  // `yield` is a no-op on most cores; isb takes about as long as x86's pause
#endif
}

// What to do between two looks at a flag: spin while the peer is likely to run on another core, then give the
// core away, then sleep. A sleep is bounded by 1 ms: poison and deadlines come without a wake-up.
class Backoff {
 public:
  // `doorbell` is that of the channel that waits; its round is complete at `target` rings.
  DCP_FN Backoff(const WaitPolicy& policy, Doorbell* doorbell, uint32_t target)
      : policy_(policy), doorbell_(doorbell), target_(target) {}

  // True once in a while in the spinning phase, always after it: time to look at clock, poison and host.
  DCP_FN bool is_slow() const { return num_pauses_ >= policy_.num_spins || (num_pauses_ & 63) == 63; }

  // `flag` held `seen`, which was not what the caller waits for.
  DCP_FN void pause(const Flag* flag, uint64_t seen) {
    if (num_pauses_ < policy_.num_spins) {
      spin_pause();
    } else if (num_pauses_ < policy_.num_spins + policy_.num_yields) {
      sched_yield();
    } else {
      sleep(flag, seen);
      return;
    }
    ++num_pauses_;
  }

 private:
  void sleep(const Flag* flag, uint64_t seen) {
    const timespec millisecond = {0, 1000000};
    uint32_t rings = __atomic_load_n(&doorbell_->rings, __ATOMIC_SEQ_CST);
    // A peer that is a round ahead may have rung twice: then the next ring of all is the one to wait for.
    uint32_t awaited = int32_t(target_ - rings) > 0 ? target_ : rings + 1;
    if (awaited == 0) awaited = 1;  // 0 means awake; a ring too late costs the bounded sleep
    __atomic_store_n(&doorbell_->awaited, awaited, __ATOMIC_SEQ_CST);
    rings = __atomic_load_n(&doorbell_->rings, __ATOMIC_SEQ_CST);
    if (int32_t(rings - awaited) < 0 && __atomic_load_n(&flag->value, __ATOMIC_SEQ_CST) == seen) {
      syscall(SYS_futex, &doorbell_->rings, FUTEX_WAIT, rings, &millisecond, nullptr, 0);
    }
    __atomic_store_n(&doorbell_->awaited, 0, __ATOMIC_SEQ_CST);
  }

  const WaitPolicy& policy_;
  Doorbell* const doorbell_;
  const uint32_t target_;
  int32_t num_pauses_ = 0;
};

inline constexpr int64_t kHostPollNs = 50 * 1000 * 1000;

DCP_FN HostEvents poll_host(const WaitPolicy& policy) {
  HostEvents events = {0, false};
  if (policy.poll_host != nullptr) policy.poll_host(policy.poll_context, &events);
  return events;
}

// ---- bytes

// How a channel's rows get into the peers' regions in one call. The peers read these lines two rounds ago, so
// an ordinary store first takes them from their caches, only to overwrite them. Within a core complex that is
// the fastest way; between two it is slower than memory (measured: 21 us for 48 KB against 1 us), and where
// two ranks run is not known here and may change. So the first choice is ordinary stores, timed; when they
// are slow, the next calls store past the caches, and the caches are tried again later. What has no chance to
// stay in a cache goes past it at once. No peer can see which one it was, and no bit depends on it.
class PeerStores {
 public:
  DCP_FN PeerStores(uint64_t* hint, int64_t num_bytes) : hint_(hint), num_bytes_(num_bytes) {
    streams_ = num_bytes > kMaxCachedBytes || (num_bytes > kMinTimedBytes && *hint > 0);
    start_ns_ = is_timed() ? now_ns() : 0;
  }

  // With all threads of the CTA.
  DCP_FN void copy(const Cta&, void* to, const void* from, int64_t num_bytes) const {
    if (streams_) {
      copy_streaming(static_cast<char*>(to), static_cast<const char*>(from), num_bytes);
    } else {
      memcpy(to, from, size_t(num_bytes));
    }
  }

  // After the last copy of the call.
  DCP_FN void finish(const Cta&) const {
    if (!is_timed()) return;
    if (streams_) {
      --*hint_;
    } else if ((now_ns() - start_ns_) * kSlowBytesPerNs > num_bytes_) {
      *hint_ = kCallsBetweenTrials;
    }
  }

 private:
  // About an L2; and too short to time.
  static constexpr int64_t kMaxCachedBytes = 1 << 20, kMinTimedBytes = 8192;
  // Within a complex stores run at 5 to 30 bytes per ns, between two at 2 to 3.
  static constexpr int64_t kSlowBytesPerNs = 3;
  static constexpr uint64_t kCallsBetweenTrials = 64;

  DCP_FN bool is_timed() const { return num_bytes_ > kMinTimedBytes && num_bytes_ <= kMaxCachedBytes; }

  // ThreadSanitizer follows memcpy, not these stores.
  static DCP_FN void copy_streaming(char* to, const char* from, int64_t num_bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    constexpr int64_t kLine = 64;
    const int64_t to_line = -int64_t(reinterpret_cast<uint64_t>(to)) & (kLine - 1);
    const int64_t head = to_line < num_bytes ? to_line : num_bytes;
    memcpy(to, from, size_t(head));
    for (to += head, from += head, num_bytes -= head; num_bytes >= kLine; num_bytes -= kLine) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
      for (int i = 0; i < kLine; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), bytes);
      }
#endif
      to += kLine;
      from += kLine;
    }
#endif
    memcpy(to, from, size_t(num_bytes));
  }

  uint64_t* hint_;
  int64_t num_bytes_;
  int64_t start_ns_;
  bool streams_;
};

}  // namespace dcp::DCP_NS::arch
