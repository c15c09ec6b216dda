// Weak memory: release / acquire by views, in the manner of Relacy, C11Tester and the promise-free part of
// the promising semantics.
//
// Memory itself holds the newest value of everything. Besides it, every shared word has the list of its
// stores in modification order, and every thread has its knowledge: for each thread the events of it that
// happen before now (a vector clock), for each shared word the oldest store that it may still read (its
// floor).
//   load     of any store that is not older than the floor, which rises to it. When it acquires, and the
//   store
//            released, the thread learns what the storing thread knew.
//   store    comes last in modification order. When it releases, it takes the thread's knowledge along.
//   RMW      reads the newest store. Its store also carries what the one before it carried (release
//   sequences). CAS      that fails is a load, and may read an old value too. seq_cst  their order is that of
//   execution: a seq_cst load reads nothing older than the last seq_cst store of
//            its word. Besides that, they acquire and release.
// A plain access must be ordered (by happens-before) with every access of another thread to the same bytes,
// one of the two a store: else it is a race, and an error, in whatever order the two came. So plain data
// needs no list.
//
// What this cannot show:
//   - load buffering: a load that reads from a store which comes later in execution (C++20 without "po union
//   rf is
//     acyclic"). Compilers and processors may do it to relaxed accesses.
//   - a store that comes late in execution and early in modification order (2+2W). So the engine demands that
//   each
//     store finds its thread knowing the newest store of the word, or equal to it and relaxed; another one is
//     the error "unordered", unless a program allows it. In a program without this error nothing is lost.
//   - executions of seq_cst accesses that only an order other than that of execution explains. Fences: an
//   error.
//   - one word in parts: accesses of different sizes to the same bytes are an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shape.h"

namespace explorer {

struct Store {
  uint64_t value;
  uint16_t index;      // in modification order; 0 is what memory held at the start
  uint16_t knowledge;  // a row; kNone: it releases nothing
  uint8_t thread;      // 0xff: before all threads
  uint8_t is_relaxed;
};

// What went wrong, in the words of the verdict. `kind` is empty when nothing did.
struct Wrong {
  std::string kind, message;
};

class Model {
 public:
  // For the shape as it is. All words get a list when `all_are_shared`; `may_grow`: there is room for more.
  void make(int num_threads, bool all_are_shared, bool may_grow);
  // Memory is as set_up left it.
  void reset();

  // Whether there is room for it: the shape may have grown since.
  bool has_word(uint16_t word) const { return word < slot_of_.size(); }
  bool has_granule(uint16_t granule) const { return granule < num_granules_max_; }
  bool is_shared(uint16_t word) const { return slot_of_[word] != kNone; }
  // A word that was seen for the first time.
  void add_word(uint16_t word);
  // A word that is private in truth, but has a list because all have: plain stores went past that.
  void take_plain_store(uint16_t word);

  // ---- shared words. Options are counted from the newest store: 0 is that one.
  int num_readable(int thread, uint16_t word, bool is_sc) const;
  const Store& readable(uint16_t word, int option) const;
  uint64_t load(int thread, uint16_t word, int option, bool acquires);
  void store(int thread, uint16_t word, uint64_t value, bool releases, bool is_sc, bool is_rmw);
  // That a store of this thread may come last: empty, or what is not ordered.
  bool is_ordered(int thread, uint16_t word, uint64_t value, bool releases) const;

  // ---- await points: whether there is something newer than what the thread has read since the last one
  bool has_news(int thread) const;
  void forget_reads(int thread);
  // The reads of a look begin where the function that looks was entered: those before it are forgotten.
  // False: they are too many to tell.
  uint32_t num_reads(int thread) const { return num_reads_[thread]; }
  bool forget_reads_before(int thread, uint32_t num_reads);
  // Time has passed: what was stored before is visible by now. Values only; nothing more happens before.
  void see_newest(int thread);
  bool has_read(int thread, uint16_t word) const { return watch(thread)[slot_of_[word]] != 0; }

  // ---- order
  void join(int thread, const uint16_t* knowledge);  // learns
  void release(int thread) { ++knowledge_of(thread)[thread]; }
  uint16_t* knowledge_of(int thread) { return &knowledge_[size_t(thread) * row_]; }
  const uint16_t* knowledge_of(int thread) const { return &knowledge_[size_t(thread) * row_]; }
  int row_size() const { return int(row_); }

  // ---- races. False: there is one, and race() says which. New granules and words: add_granule, add_word
  // first.
  bool check_plain(int thread, uint32_t offset, size_t num_bytes, bool writes);
  bool check_atomic(int thread, uint16_t word, bool writes, uint16_t moment);
  int newest_index(uint16_t word) const { return readable(word, 0).index; }
  // When that thread last stored to the word, or loaded it.
  uint16_t moment_of(int thread, uint16_t word, bool load) const {
    return moments_[(size_t(word) * 2 + load) * size_t(num_threads_) + size_t(thread)];
  }
  // The threads other than this one that have stored to the word, or loaded it, not ordered with now.
  uint32_t unordered_stores(int thread, uint16_t word) const { return unordered(thread, word, 0); }
  uint32_t unordered_loads(int thread, uint16_t word) const { return unordered(thread, word, 1); }
  const std::string& race() const { return race_; }
  // Loads of these threads that raced with a store, where that is no error: those with a later clock than
  // `accepted`.
  struct Doubts {
    bool are_kept;
    uint32_t threads;
    uint16_t accepted[kMaxThreads];
  };
  Doubts doubts = {};

  // Stores that no thread of `living` can read any more are dropped.
  void forget_old(uint32_t living);

  void save(std::vector<char>& to) const;
  const char* restore(const char* from);

 private:
  friend class Canonical;  // what of it the future depends on
  struct Read {
    uint16_t slot, index;
  };
  struct Slot {
    uint16_t first, num, last_sc, word;
  };
  uint16_t* watch(int thread) { return &watch_[size_t(thread) * num_slots_max_]; }
  const uint16_t* watch(int thread) const { return &watch_[size_t(thread) * num_slots_max_]; }
  void note_read(int thread, Read read);
  uint16_t new_row();
  void add_store(int thread, uint16_t slot_idx, Store store);
  void drop_rows_of(const Store& store);
  uint32_t unordered(int thread, uint16_t word, int of_loads) const;
  bool is_error(int reader, uint16_t clock);
  bool says_race(int thread, bool writes, bool atomic, uint32_t offset, int other, bool other_writes,
                 bool other_atomic);

  int num_threads_ = 0;
  size_t num_slots_max_ = 0, row_ = 0, num_granules_max_ = 0, num_words_max_ = 0;
  std::vector<uint16_t> slot_of_;  // [word]

  // The state.
  uint16_t num_slots_ = 0, num_stores_ = 0, num_rows_ = 0, num_free_ = 0;
  std::vector<Slot> slots_;
  std::vector<Store> stores_;        // by slot, oldest first
  std::vector<uint16_t> knowledge_;  // [thread][row_]: clocks of threads, then floors of slots
  uint32_t num_reads_[kMaxThreads] = {};
  static constexpr uint32_t kKeptReads = 64;
  Read reads_[kMaxThreads][kKeptReads];  // the last ones of each thread, in a ring
  std::vector<uint16_t> watch_;     // [thread][slot]: 1 + the oldest store read since the last await, or 0
  std::vector<uint16_t> rows_;      // [num_rows_][row_]
  std::vector<uint16_t> free_;      // rows that no store uses
  std::vector<uint16_t> granules_;  // [granule][2 + threads]: 1 + who wrote it, when; when each read it
  std::vector<uint16_t> atomics_;   // [word][2][threads]: when each wrote it, when each read it

  std::vector<uint16_t> moments_;  // [word][2][threads]: the newest store then

  std::string race_;
};

extern Model model;

// "rank 1 channel 0"; "the start" for none of the threads.
const std::string& name_of_thread(int thread);

}  // namespace explorer
