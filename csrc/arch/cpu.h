// CPU target: order, time, bytes, packets. The __atomic builtins are used instead of std::atomic_ref: a
// member function that is not inlined would be emitted under the same name by every ISA variant.
// ThreadSanitizer understands both.
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
#include DCP_CPU_CTA

#define DCP_DECL
#define DCP_NO_UNROLL
#define DCP_UNROLL_LOADS

namespace dcp::DCP_NS::arch {

template <class T>
DCP_FN T* pointer_to(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
template <class T>
DCP_FN T* pointer_to(T* p) {
  return p;
}
template <class T>
DCP_FN T load_constant(const T* p) {
  return *p;
}

// ---- order

// Planted faults: a test build gives an expression that says which one is on, and must find it.
#if !defined(DCP_MUTATION)
#define DCP_MUTATION 0
#endif
inline constexpr int kRelaxedSignal = 1, kRelaxedRelease = 2, kNoPublishDone = 3;

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
  if (DCP_MUTATION == kRelaxedRelease) return __atomic_store_n(word, value, __ATOMIC_RELAXED);
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
  if (DCP_MUTATION != kNoPublishDone) cta.sync();
}

// And all that they stored anywhere is there before what another CTA of the rank stores after `fetch_add`.
DCP_FN void stores_done(const Cta& cta) { cta.sync(); }

// The same for stores that went to the buffers of all ranks (core/broadcast.h), and what comes on the other
// side, after the flag. By multicast a rank stores at another address than the one that readers load from.
DCP_FN void broadcast_done(const Cta& cta, bool) { publish_done(cta); }
DCP_FN void broadcast_arrived(bool) {}
// Raises the flags of all ranks by one store. There is no such address for flags on a CPU: each has a
// doorbell to ring.
DCP_FN void multicast_flag(Flag* flag, uint64_t value) { store_release_sys(&flag->value, value); }

// A release costs nothing here, and a peer that hears of its rows early can begin. A test build goes the way
// of GPUs.
#if !defined(DCP_SIGNALS_TOGETHER)
#define DCP_SIGNALS_TOGETHER false
#endif
inline constexpr bool kSignalsTogether = DCP_SIGNALS_TOGETHER;

// Raises a peer's flag and rings its doorbell; wakes the peer if it sleeps and this was the signal that it
// sleeps for. Ring, then read `awaited`; the sleeper sets `awaited`, then reads `rings`: all sequentially
// consistent, so that one of the two sees the other.
DCP_FN void signal_flag(Flag* flag, uint64_t value, Doorbell* doorbell) {
  if (DCP_MUTATION == kRelaxedSignal) return __atomic_store_n(&flag->value, value, __ATOMIC_RELAXED);
  __atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST);
  const uint32_t rings = __atomic_add_fetch(&doorbell->rings, 1, __ATOMIC_SEQ_CST);
  const uint32_t awaited = __atomic_load_n(&doorbell->awaited, __ATOMIC_SEQ_CST);
  if (__builtin_expect(awaited != 0 && int32_t(rings - awaited) >= 0, 0)) {
    syscall(SYS_futex, &doorbell->rings, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

// In two loads, so that a look which does not say what it is for orders nothing here either, and
// ThreadSanitizer can tell.
template <class T, class Is>
DCP_FN T load_acquire_if_sys(const T* word, const Is& is) {
  const T value = load_relaxed_sys(word);
  return is(value) ? load_acquire_sys(word) : value;
}
template <class T>
DCP_FN void store_behind_sys(T* word, T value) {
  store_release_sys(word, value);
}
DCP_FN void signal_flag_behind(Flag* flag, uint64_t value, Doorbell* doorbell) {
  signal_flag(flag, value, doorbell);
}
// A load that comes after all earlier loads of this thread: an acquire load alone orders what follows it.
// Only for words of this rank's own region, because it writes what it read.
template <class T>
DCP_FN T load_after_reads_sys(T* word) {
  return __atomic_fetch_add(word, T(0), __ATOMIC_ACQ_REL);
}

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

struct Words16 {
  uint32_t word[4];
};
DCP_FN void store_16(void* to, const Words16& words) { memcpy(to, words.word, sizeof(words)); }
// kNum words at once, to and from any address.
template <int kNum>
DCP_FN bool at_once(const void*) {
  return true;
}
template <int kNum>
DCP_FN Words16 load_words(const void* from) {
  Words16 words = {};
  memcpy(words.word, from, kNum * sizeof(uint32_t));
  return words;
}
template <int kNum>
DCP_FN void store_words(void* to, const Words16& words) {
  memcpy(to, words.word, kNum * sizeof(uint32_t));
}
// An array in registers, from memory.
template <int kNum, class T>
DCP_FN void load_elements(const T* from, T (&elements)[kNum]) {
  memcpy(elements, from, sizeof(elements));
}
// to[i] = f(from[i]), by all lanes of the group.
template <class Lanes, class To, class From, class F>
DCP_FN void map_elements(const Lanes& lanes, To* to, const From* from, int64_t num_elements, const F& f) {
  for (int64_t i = lanes.rank(); i < num_elements; i += lanes.size()) to[i] = f(from[i]);
}
DCP_FN void store_1(void* to, uint8_t byte) { *static_cast<uint8_t*>(to) = byte; }

// The one memory that all ranks map.
inline constexpr bool kIsSynchronous = true, kHasPull = true, kHasMulticast = true;
DCP_FN void store_multicast(void* to, const Words16& words) { store_16(to, words); }

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

  // With all threads of a CTA, or of a group of lanes.
  template <class Threads>
  DCP_FN void copy(const Threads& threads, void* to, const void* from, int64_t num_bytes) const {
    const auto [begin, end] = threads.share_of(num_bytes);
    to = static_cast<char*>(to) + begin;
    from = static_cast<const char*>(from) + begin;
    num_bytes = end - begin;
    if (streams_) {
      copy_streaming(static_cast<char*>(to), static_cast<const char*>(from), num_bytes);
    } else {
      memcpy(to, from, size_t(num_bytes));
    }
  }

  // The one memory that all ranks map.
  template <class Threads>
  DCP_FN void copy_multicast(const Threads& threads, void* to, const void* from, int64_t num_bytes) const {
    copy(threads, to, from, num_bytes);
  }
  template <class Threads>
  DCP_FN void copy_to_all(const Threads& threads, const uint64_t* bases, int rank, int num_ranks,
                          uint64_t offset, const void* from, int64_t num_bytes) const {
    for (int i = 0; i < num_ranks; ++i) {
      const int peer = rank + i < num_ranks ? rank + i : rank + i - num_ranks;
      copy(threads, reinterpret_cast<void*>(bases[peer] + offset), from, num_bytes);
    }
  }

  // After the last copy of the call.
  DCP_FN void finish(const Cta& cta) const {
    if (!is_timed() || cta.thread_rank() != 0) return;
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

// ---- packets

// Payload and a flag that arrive together. A GPU stores a packet at once; here the flag's release and acquire
// hold it together, but for the smallest, which is one atomic word. For tests: on a CPU the product path is
// bulk.
template <int kBytes>
class Packet {
 public:
  static_assert(kBytes == 8 || kBytes == 16 || kBytes == 128);
  using Lanes = arch::Lanes<kBytes == 128 ? 32 : 1>;
  static constexpr int kPayload = kBytes == 128 ? 120 : kBytes - 4;
  static constexpr int kPerCall = kBytes == 128 ? kPacketsPerCall : 1;

  template <class Part>
  static DCP_FN void store(const Lanes& lanes, void* packets, int num, uint32_t flag, const Part& part) {
    if constexpr (kBytes == 8) {
      const uint64_t both = uint64_t(flag) << 32 | part(0, 0).word[0];
      __atomic_store_n(static_cast<uint64_t*>(packets), both, __ATOMIC_RELAXED);
    } else {
      for (int k = 0; k < num; ++k) {
        for (int j = lanes.rank(); j < kNumParts; j += lanes.size()) {
          const Words16 words = part(k, j);
          uint32_t* to = words_of(packets, k) + 4 * j;
          if constexpr (kBytes == 16) {
            for (int i = 0; i < 3; ++i) __atomic_store_n(to + i, words.word[i], __ATOMIC_RELAXED);
          } else {
            uint64_t halves[2];
            memcpy(halves, words.word, sizeof(halves));
            __atomic_store_n(reinterpret_cast<uint64_t*>(to), halves[0], __ATOMIC_RELAXED);
            if (j < kNumParts - 1) {
              __atomic_store_n(reinterpret_cast<uint64_t*>(to) + 1, halves[1], __ATOMIC_RELAXED);
            }
          }
        }
      }
      lanes.sync();
      for (int k = lanes.rank(); k < num; k += lanes.size()) {
        uint32_t* last = words_of(packets, k) + kBytes / 4 - 1;
        if constexpr (kBytes == 128) __atomic_store_n(last - 1, flag, __ATOMIC_RELAXED);
        store_release_sys(last, flag);
      }
    }
  }

  template <class Put>
  static DCP_FN bool try_load(const Lanes& lanes, const void* packets, int num, uint32_t flag,
                              const Put& put) {
    if constexpr (kBytes == 8) {
      const uint64_t both = __atomic_load_n(static_cast<const uint64_t*>(packets), __ATOMIC_RELAXED);
      if (uint32_t(both >> 32) != flag) return false;
      put(0, 0, Words16{{uint32_t(both)}});
    } else {
      const bool is_there = lanes.rank() == 0 && bear(packets, num, flag);
      if (!lanes.broadcast(is_there)) return false;
      for (int k = 0; k < num; ++k) {
        for (int j = lanes.rank(); j < kNumParts; j += lanes.size()) {
          const uint32_t* from = words_of(packets, k) + 4 * j;
          Words16 words = {};
          if constexpr (kBytes == 16) {
            for (int i = 0; i < 3; ++i) words.word[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
          } else {
            // Of the last part the second half is the flag, which nobody asks for.
            const uint64_t* pairs = reinterpret_cast<const uint64_t*>(from);
            const uint64_t halves[2] = {__atomic_load_n(pairs, __ATOMIC_RELAXED),
                                        __atomic_load_n(pairs + 1, __ATOMIC_RELAXED)};
            memcpy(words.word, halves, sizeof(halves));
          }
          put(k, j, words);
        }
      }
    }
    return true;
  }

  static DCP_FN bool bear(const void* packets, int num, uint32_t flag) {
    for (int k = 0; k < num; ++k) {
      if (load_acquire_sys(words_of(packets, k) + kBytes / 4 - 1) != flag) return false;
    }
    return true;
  }

 private:
  static constexpr int kNumParts = kBytes == 128 ? 8 : 1;
  static DCP_FN uint32_t* words_of(void* packets, int k) {
    return static_cast<uint32_t*>(packets) + k * (kBytes / 4);
  }
  static DCP_FN const uint32_t* words_of(const void* packets, int k) {
    return static_cast<const uint32_t*>(packets) + k * (kBytes / 4);
  }
};
inline constexpr int kMaxPacketBytes = 128;

}  // namespace dcp::DCP_NS::arch
