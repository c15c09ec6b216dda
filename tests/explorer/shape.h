// What the engine has learnt of a program over all executions so far: its memory, which words of it are
// atomic, and which thread accesses which word in what way. No part of the state of an execution.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "explorer.h"

namespace explorer {

inline constexpr size_t kArenaBytes = 4 << 20;
inline constexpr uint16_t kNone = 0xffff;

// How a thread accesses a word, as a set of bits. A read-modify-write reads and writes.
enum Access : uint8_t {
  kReads = 1,
  kReadsSc = 2,  // besides kReads
  kWrites = 4,
  kFutexWaits = 8,
  kFutexWakes = 16,
  kAdds = 32,  // reads and writes in one, by a sum
  kSets = 64,  // writes in any other way
  // Adds 0. Where nobody stores anything else, the word is a constant, and this is no store (as with
  // counters).
  kNudges = 128,
};

// When in its program a thread accesses a word: in which phase (joins passed), and after how many stores to
// it. Two moments that share a number are taken for one, and the rivals of both for those of each.
inline constexpr int kMoments = 128;
inline uint16_t moment(int phase, int newest_index) {
  return uint16_t((phase * 16 + newest_index) % kMoments);
}

class Shape {
 public:
  struct Word {
    uint32_t offset;
    uint8_t num_bytes;  // 4 or 8
    uint8_t access[kMaxThreads];
    uint16_t last_write[kMaxThreads];  // the last phase (number of joins) in which a thread wrote it
    // The threads that have made an access in conflict with an earlier one of this thread, a load or another,
    // which does not happen before it; by the moment of that earlier one.
    uint16_t rivals[2][kMaxThreads][kMoments];
  };

  void clear();
  void* allocate(size_t num_bytes, Namer name);
  bool has(const void* p) const { return size_t(static_cast<const char*>(p) - arena_) < num_bytes_; }
  uint32_t offset_of(const void* p) const { return uint32_t(static_cast<const char*>(p) - arena_); }
  char* arena() const { return arena_; }
  size_t num_bytes() const { return num_bytes_; }
  std::string name_of(uint32_t offset) const;

  // The word at that offset; kNone: there is none. `overlaps`: one that begins elsewhere or has another size
  // is in the way.
  uint16_t word_at(uint32_t offset) const { return word_of_cell_[offset / 4]; }
  uint16_t add_word(uint32_t offset, int num_bytes, bool& overlaps);
  // Granules are the units in which plain accesses are checked for races; only those that have any are
  // numbered.
  uint16_t granule_at(uint32_t offset) const { return granule_of_[offset >> granule_shift_]; }
  uint16_t add_granule(uint32_t offset);
  // True when that is news.
  bool add_plain(uint16_t granule, int thread, bool writes) {
    uint16_t& threads = writes ? granules[granule].writers : granules[granule].readers;
    const bool is_new = (threads >> thread & 1) == 0;
    threads |= uint16_t(1u << thread);
    return is_new;
  }
  int granule_shift() const { return granule_shift_; }
  void set_granule(int num_bytes);

  // True when that is news.
  bool add_access(uint16_t word, int thread, int bits, uint16_t phase) {
    Word& w = words[word];
    bool is_new = (w.access[thread] & bits) != bits;
    w.access[thread] |= uint8_t(bits);
    if ((bits & (kWrites | kNudges | kFutexWakes)) != 0 && w.last_write[thread] < phase + 1) {
      w.last_write[thread] = uint16_t(phase + 1);
      is_new = true;
    }
    return is_new;
  }
  // True when that is news.
  bool add_rival(uint16_t word, int thread, bool of_load, uint16_t moment, int rival) {
    uint16_t& rivals = words[word].rivals[of_load][thread][moment];
    const bool is_new = (rivals >> rival & 1) == 0;
    rivals |= uint16_t(1u << rival);
    return is_new;
  }
  uint32_t rivals_of(uint16_t word, int thread, bool of_load, uint16_t moment) const {
    return words[word].rivals[of_load][thread][moment];
  }
  // All accesses to the word are sums. Such a word may carry no knowledge from one thread to the next: weaker
  // than C++ says, so that nothing is lost, and fewer states differ.
  bool is_counter(uint16_t word) const;
  // Some thread learns from the word what another has written there. All others are private: no order of
  // accesses to them makes a difference.
  bool is_shared(uint16_t word) const;

  struct Granule {
    uint32_t offset;
    uint16_t readers, writers;  // threads with plain accesses
  };

  std::vector<Word> words;
  std::vector<Granule> granules;
  int num_threads = 0;

 private:
  struct Block {
    size_t begin, end;
    Namer name;
  };
  char* arena_ = nullptr;
  size_t num_bytes_ = 0;
  int granule_shift_ = 2;
  std::vector<Block> blocks_;
  std::vector<uint16_t> word_of_cell_, granule_of_;
};

extern Shape shape;

}  // namespace explorer
