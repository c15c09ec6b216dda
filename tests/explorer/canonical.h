// What the future of an execution depends on, of all that the model remembers, in numbers that do not tell
// how it came about. Two states with the same numbers (and the same threads, snapshot.cpp) have the same
// future, although clocks and views in them differ:
//   - Clocks. Nothing is ever asked of a clock but whether somebody's knowledge of it reaches a recorded
//     access. So only the order of the two counts; accesses that no knowledge tells apart are as one. A
//     thread knows all of its own, and what it does next, nobody knows.
//   - A recorded access is forgotten when each living thread that may race with it, or be its rival, knows of
//     it: of those threads that have made such an access in any execution (shape.h).
//   - Stores that no living thread can load any more are forgotten, and what views know of them.
//   - What a store has released is worth what it adds to what all know who may acquire it there: to release
//     less than that is to release nothing.
//   - Who has stored, and when, is in names and messages only.
// What the shape learns is part of the future too: so the moments of accesses that are not forgotten stay,
// and the number of stores to each word.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace explorer {

// One thread's clock, as far as anybody asks.
class Line {
 public:
  void clear(size_t num_ticks) { ticks_.assign(num_ticks, {}); }
  void add_access(uint16_t clock) { ticks_[clock].has_access = true; }
  void add_view(uint16_t clock) { ticks_[clock].has_view = true; }
  void number();
  // A view reaches an access when its number is not less.
  uint16_t of_access(uint16_t clock) const { return ticks_[clock].access; }
  uint16_t of_view(uint16_t clock) const { return ticks_[clock].view; }

 private:
  struct Tick {
    bool has_access, has_view;
    uint16_t access, view;
  };
  std::vector<Tick> ticks_;
};

class Canonical {
 public:
  // For the shape as it is: who may race with whom where.
  void make(const Model& model, bool allows_unordered_stores);
  // `clocks_at_join` of each thread: from there on, doubts may yet be accepted.
  void write(uint32_t living, const uint16_t* clocks_at_join, std::vector<uint16_t>& to);

 private:
  struct Recorded {
    uint16_t place, clock, moment;
    uint8_t kind, thread;
  };
  struct Known {
    uint16_t of, value;  // of a thread's clock, then of slots
  };
  struct Common {
    uint32_t threads;
    std::vector<uint16_t> known;
  };
  void find_oldest();
  void find_recorded();
  void find_views(const uint16_t* clocks_at_join);
  const uint16_t* known_to_all(uint32_t threads);
  void add_view(const uint16_t* view, const uint16_t* known);
  void record(uint16_t place, uint8_t kind, int thread, uint16_t clock, uint16_t moment, uint32_t rivals);
  const Known* write_view(const Known* known, std::vector<uint16_t>& to) const;

  const Model* model_ = nullptr;
  bool allows_unordered_ = false;
  // Threads, as sets: who loads a word, who acquires from it, who stores to it other than by a sum.
  std::vector<uint16_t> loaders_, acquirers_, setters_;
  // Who may race with, or be a rival of: [a store, a load] of a word, of plain memory.
  std::vector<uint16_t> word_rivals_[2], granule_rivals_[2];

  // Of the state at hand.
  uint32_t living_ = 0;
  size_t num_views_ = 0;
  std::vector<uint16_t> oldest_;    // [slot] that can be loaded
  std::vector<uint16_t> floor_;     // [slot] below which views are not told apart
  std::vector<Common> commons_;
  std::vector<Known> views_;        // of living threads, then of stores that can be loaded; kNone ends one
  uint16_t all_know_[kMaxThreads];  // of each thread's clock
  std::vector<Recorded> recorded_;  // that are not forgotten
  Line lines_[kMaxThreads];
};

}  // namespace explorer
