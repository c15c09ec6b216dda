// Both GPU targets: waiting and moving bytes. The target's header comes first and brings Cta, sleep_ns,
// load_16 and store_16.
#pragma once

namespace dcp::DCP_NS::arch {

DCP_FN void spin_pause() { sleep_ns(32); }

// What to do between two looks at a flag: look again at once while the peer is likely to be near, then leave
// the memory system alone for a while that grows to about a microsecond, a part of what a flag takes to
// arrive.
class Backoff {
 public:
  DCP_FN Backoff(const WaitPolicy& policy, Doorbell*, uint32_t) : spins_left_(policy.num_spins) {}

  // True once in a while: time to look at clock, poison and host. All of them cost a trip to memory.
  DCP_FN bool is_slow() const { return (num_pauses_ & 63) == 63; }

  DCP_FN void pause(const Flag*, uint64_t) {
    ++num_pauses_;
    if (spins_left_ > 0) {
      --spins_left_;
      return;
    }
    sleep_ns(pause_ns_);
    if (pause_ns_ < 1024) pause_ns_ *= 2;
  }

 private:
  int32_t spins_left_;
  uint32_t num_pauses_ = 0;
  uint32_t pause_ns_ = 32;
};

inline constexpr int64_t kHostPollNs = 50 * 1000 * 1000;

// The host cannot tell a running kernel anything; deadlines and poison do.
DCP_FN HostEvents poll_host(const WaitPolicy&) { return {0, false}; }

// A GPU writes whole lines and reads none for it: nothing to go past.
inline constexpr int kStreamAlignment = 16;
DCP_FN bool streams_output(int64_t) { return false; }
DCP_FN void streams_done() {}

// How a channel's rows get into the peers' regions: by ordinary stores of 16 bytes. A GPU caches no peer's
// lines, so there is nothing to learn from one call for the next, as there is on a CPU.
class PeerStores {
 public:
  DCP_FN PeerStores(uint64_t*, int64_t) {}

  // With all threads of the CTA. The unit is the largest that both addresses allow; elements have at least 2
  // bytes.
  DCP_FN void copy(const Cta& cta, void* to, const void* from, int64_t num_bytes) const {
    char* to_bytes = static_cast<char*>(to);
    const char* from_bytes = static_cast<const char*>(from);
    const uint64_t misaligned = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
    int64_t done = 0;
    if (misaligned % 16 == 0) {
      done = copy_words16(cta, to_bytes, from_bytes, num_bytes);
    } else if (misaligned % 4 == 0) {
      done = copy_words<uint32_t>(cta, to_bytes, from_bytes, num_bytes);
    }
    copy_words<uint16_t>(cta, to_bytes + done, from_bytes + done, num_bytes - done);
  }

  // After the last copy of the call.
  DCP_FN void finish(const Cta&) const {}

 private:
  // Both copy whole units and return how many bytes those are. Of the large ones several loads are in flight
  // before the first store: the compiler cannot know that the two do not overlap.
  static DCP_FN int64_t copy_words16(const Cta& cta, char* to, const char* from, int64_t num_bytes) {
    constexpr int kInFlight = 4;
    const int64_t end = num_bytes - num_bytes % 16, step = cta.size() * 16;
    int64_t at = cta.thread_rank() * 16;
#pragma unroll 1
    for (; at + (kInFlight - 1) * step < end; at += kInFlight * step) {
      Words16 words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) words[i] = load_16(from + at + i * step);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) store_16(to + at + i * step, words[i]);
    }
#pragma unroll 1
    for (; at < end; at += step) store_16(to + at, load_16(from + at));
    return end;
  }

  template <class Word>
  static DCP_FN int64_t copy_words(const Cta& cta, char* to, const char* from, int64_t num_bytes) {
    constexpr int64_t kBytes = sizeof(Word);
    const int64_t end = num_bytes - num_bytes % kBytes;
#pragma unroll 1
    for (int64_t at = cta.thread_rank() * kBytes; at < end; at += cta.size() * kBytes) {
      store_global(reinterpret_cast<Word*>(to + at), load_global(reinterpret_cast<const Word*>(from + at)));
    }
    return end;
  }
};

}  // namespace dcp::DCP_NS::arch
