// Both GPU targets: waiting and moving bytes. The target's header comes first and brings Cta, sleep_ns,
// load_16 and store_16.
#pragma once

namespace dcp::DCP_NS::arch {

DCP_FN void spin_pause() { sleep_ns(32); }

inline constexpr bool kIsSynchronous = false;

// A load from another GPU waits for its answer, a store does not; and what was stored is there already when a
// rank comes late. So payload is pushed (docs/protocol.md).
inline constexpr bool kHasPull = false;

// A release waits until all that the GPU has stored has arrived at the others: once is enough.
inline constexpr bool kSignalsTogether = true;

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

// This thread's place among those that do something together.
DCP_FN int rank_among(const Cta& cta) { return cta.thread_rank(); }
template <int N>
DCP_FN int rank_among(const Lanes<N>& lanes) {
  return lanes.rank();
}

// 16 bytes at any address, in the largest pieces that it allows.
DCP_FN Words16 load_16_unaligned(const void* from) {
  if constexpr (kUnaligned16) return load_16(from);
  const uint64_t address = reinterpret_cast<uint64_t>(from);
  Words16 words = {};
  if (address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = load_global(static_cast<const uint32_t*>(from) + i);
  } else if (address % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      words.word[i / 2] |= uint32_t(load_global(static_cast<const uint16_t*>(from) + i)) << 16 * (i % 2);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      words.word[i / 4] |= uint32_t(load_global(static_cast<const uint8_t*>(from) + i)) << 8 * (i % 4);
    }
  }
  return words;
}

// kNum words at once, 1, 2 or 4 of them, to and from an address for which at_once() holds.
template <int kNum>
DCP_FN bool at_once(const void* address) {
  return reinterpret_cast<uint64_t>(address) % (4 * kNum) == 0;
}
template <int kNum>
DCP_FN Words16 load_words(const void* from) {
  static_assert(kNum == 1 || kNum == 2 || kNum == 4);
  if constexpr (kNum == 4) return load_16(from);
  if constexpr (kNum == 2) return load_8(from);
  return {{load_global(static_cast<const uint32_t*>(from))}};
}
template <int kNum>
DCP_FN void store_words(void* to, const Words16& words) {
  static_assert(kNum == 1 || kNum == 2 || kNum == 4);
  if constexpr (kNum == 4) return store_16(to, words);
  if constexpr (kNum == 2) return store_8(to, words);
  store_global(static_cast<uint32_t*>(to), words.word[0]);
}

// An array in registers from and to memory: a caller's tensor may start at any element.
template <int kNum, class T>
DCP_FN void load_elements(const T* from, T (&elements)[kNum]) {
  static_assert(sizeof(elements) % 16 == 0);
  constexpr int kNumUnits = int(sizeof(elements) / 16);
  const char* bytes = reinterpret_cast<const char*>(from);
  Words16 units[kNumUnits];
  if (kUnaligned16 || reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i) units[i] = load_16(bytes + 16 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i) units[i] = load_16_unaligned(bytes + 16 * i);
  }
  __builtin_memcpy(elements, units, sizeof(elements));
}
template <int kNum, class T>
DCP_FN void store_elements(T* to, const T (&elements)[kNum]) {
  static_assert(sizeof(elements) % 16 == 0);
  constexpr int kNumUnits = int(sizeof(elements) / 16);
  if (kUnaligned16 || reinterpret_cast<uint64_t>(to) % 16 == 0) {
    Words16 units[kNumUnits];
    __builtin_memcpy(units, elements, sizeof(elements));
#pragma unroll
    for (int i = 0; i < kNumUnits; ++i) store_16(reinterpret_cast<char*>(to) + 16 * i, units[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kNum; ++i) store_global(to + i, elements[i]);
  }
}
// to[i] = f(from[i]), by all lanes of the group; a multiple of 16 elements.
template <class Lanes, class To, class From, class F>
DCP_FN void map_elements(const Lanes& lanes, To* to, const From* from, int64_t num_elements, const F& f) {
  constexpr int kUnit = 16;
#pragma unroll 1
  for (int64_t at = lanes.rank() * kUnit; at < num_elements; at += lanes.size() * kUnit) {
    From in[kUnit];
    To out[kUnit];
    load_elements(from + at, in);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) out[i] = f(in[i]);
    store_elements(to + at, out);
  }
}

DCP_FN void store_1(void* to, uint8_t byte) { store_global(static_cast<uint8_t*>(to), byte); }

// How a channel's rows get into the peers' regions: by stores of 16 bytes where the addresses allow that. A
// GPU caches no peer's lines, so there is nothing to learn from one call for the next, as there is on a CPU.
class PeerStores {
 public:
  DCP_FN PeerStores(uint64_t*, int64_t) {}

  // With all threads of a CTA, or of a group of lanes; elements of any size. The unit is the largest that
  // both addresses allow.
  template <class Threads>
  DCP_FN void copy(const Threads& threads, void* to, const void* from, int64_t num_bytes) const {
    const OnePlace place = {static_cast<char*>(to)};
    const char* from_bytes = static_cast<const char*>(from);
    const uint64_t misaligned = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
    int64_t done = 0;
    if (kUnaligned16 || misaligned % 16 == 0) {
      done = num_bytes - num_bytes % 16;
      copy_long(threads, place.to, from_bytes, done);
    }
    copy_words(threads, place, misaligned, from_bytes, done, num_bytes);
  }

  // To an address of multicast: `to` and `num_bytes` are multiples of 16.
  template <class Threads>
  DCP_FN void copy_multicast(const Threads& threads, void* to, const void* from, int64_t num_bytes) const {
    copy_row(threads, AllByMulticast{static_cast<char*>(to)}, static_cast<const char*>(from), num_bytes);
  }

  // To `offset` of the region of every rank, in the order of peer_order. What is stored is loaded once, and
  // in units of 16 bytes where the destination allows them: there are more stores than loads.
  template <class Threads>
  DCP_FN void copy_to_all(const Threads& threads, const uint64_t* bases, int rank, int num_ranks,
                          uint64_t offset, const void* from, int64_t num_bytes) const {
    const AllByTurns all = {bases, rank, num_ranks, offset};
    const char* from_bytes = static_cast<const char*>(from);
    int64_t done = 0;
    if (offset % 16 == 0) {  // regions begin at a page
      done = num_bytes - num_bytes % 16;
      copy_row(threads, all, from_bytes, done);
    }
    copy_words(threads, all, offset | reinterpret_cast<uint64_t>(from), from_bytes, done, num_bytes);
  }

  // After the last copy of the call.
  DCP_FN void finish(const Cta&) const {}

 private:
  // Where copies end: each(f) calls f(address) for all of them.
  struct OnePlace {
    char* to;
    template <class F>
    DCP_FN void each(const F& f) const {
      f(to);
    }
    static DCP_FN void store(void* at, const Words16& words) { store_16(at, words); }
  };
  struct AllByMulticast {
    char* to;
    template <class F>
    DCP_FN void each(const F& f) const {
      f(to);
    }
    static DCP_FN void store(void* at, const Words16& words) { store_multicast(at, words); }
  };
  struct AllByTurns {
    const uint64_t* bases;
    int rank, num_ranks;
    uint64_t offset;
    template <class F>
    DCP_FN void each(const F& f) const {
#pragma unroll 1
      for (int i = 0; i < num_ranks; ++i) {
        const int peer = rank + i < num_ranks ? rank + i : rank + i - num_ranks;
        f(reinterpret_cast<char*>(load_constant(bases + peer) + offset));
      }
    }
    static DCP_FN void store(void* at, const Words16& words) { store_16(at, words); }
  };

  // Both of the following load several units before they store the first: the compiler cannot know that the
  // two do not overlap. All addresses and sizes are multiples of 16, but for `from` of copy_row.

  // Much, by many threads.
  template <class Threads>
  static DCP_FN void copy_long(const Threads& threads, char* to, const char* from, int64_t num_bytes) {
    constexpr int kInFlight = 4;
    const int64_t step = threads.size() * 16;
    int64_t at = rank_among(threads) * 16;
#pragma unroll 1
    for (; at + (kInFlight - 1) * step < num_bytes; at += kInFlight * step) {
      Words16 words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) words[i] = load_16(from + at + i * step);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) store_16(to + at + i * step, words[i]);
    }
    if constexpr (kLoadsWaitForStores) {
      copy_units<kInFlight>(OnePlace{to}, from, at, step, num_bytes,
                            [](const char* p) { return load_16(p); });
    } else {
#pragma unroll 1
      for (; at < num_bytes; at += step) store_16(to + at, load_16(from + at));
    }
  }

  // A row, of which a thread has a few units at most.
  template <class Threads, class To>
  static DCP_FN void copy_row(const Threads& threads, const To& to, const char* from, int64_t num_bytes) {
    if (kUnaligned16 || reinterpret_cast<uint64_t>(from) % 16 == 0) {
      copy_row<4>(threads, to, from, num_bytes, [](const char* at) { return load_16(at); });
    } else {
      copy_row<1>(threads, to, from, num_bytes, [](const char* at) { return load_16_unaligned(at); });
    }
  }
  template <int kInFlight, class Threads, class To, class Load>
  static DCP_FN void copy_row(const Threads& threads, const To& to, const char* from, int64_t num_bytes,
                              const Load& load) {
    copy_units<kInFlight>(to, from, rank_among(threads) * 16, threads.size() * 16, num_bytes, load);
  }
  // This thread's units of a row: those at `at`, at + step, ...
  template <int kInFlight, class To, class Load>
  static DCP_FN void copy_units(const To& to, const char* from, int64_t at, int64_t step, int64_t num_bytes,
                                const Load& load) {
#pragma unroll 1
    for (; at < num_bytes; at += kInFlight * step) {
      Words16 words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (at + i * step < num_bytes) words[i] = load(from + at + i * step);
      }
      to.each([&](char* base) {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (at + i * step < num_bytes) To::store(base + at + i * step, words[i]);
        }
      });
    }
  }

  // Bytes [begin, end), in the largest words that `misaligned`, all addresses in one, allows.
  template <class Threads, class To>
  static DCP_FN void copy_words(const Threads& threads, const To& to, uint64_t misaligned, const char* from,
                                int64_t begin, int64_t end) {
    if (misaligned % 4 == 0) {
      begin = copy_words<uint32_t>(threads, to, from, begin, end);
    } else if (misaligned % 2 == 0) {
      begin = copy_words<uint16_t>(threads, to, from, begin, end);
    }
    copy_words<uint8_t>(threads, to, from, begin, end);
  }
  // Whole words; returns where they end.
  template <class Word, class Threads, class To>
  static DCP_FN int64_t copy_words(const Threads& threads, const To& to, const char* from, int64_t begin,
                                   int64_t end) {
    constexpr int64_t kBytes = sizeof(Word);
    end -= (end - begin) % kBytes;
#pragma unroll 1
    for (int64_t at = begin + rank_among(threads) * kBytes; at < end; at += threads.size() * kBytes) {
      const Word word = load_global(reinterpret_cast<const Word*>(from + at));
      to.each([&](char* base) { store_global(reinterpret_cast<Word*>(base + at), word); });
    }
    return end;
  }
};

}  // namespace dcp::DCP_NS::arch
