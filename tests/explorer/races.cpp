// The part of the model that looks for races: who accessed which bytes last, and whether that happens before
// now.
#include "model.h"

namespace explorer {

bool Model::says_race(int thread, bool writes, bool atomic, uint32_t offset, int other, bool other_writes,
                      bool other_atomic) {
  const auto text = [](int who, bool stores, bool is_atomic) {
    return name_of_thread(who) + (is_atomic ? " (atomic " : " (plain ") + (stores ? "store)" : "load)");
  };
  race_ = shape.name_of(offset) + ": " + text(thread, writes, atomic) +
          " is not ordered with an earlier access by " + text(other, other_writes, other_atomic);
  return false;
}

// A load by `reader`, at that clock, has raced with a store.
bool Model::is_error(int reader, uint16_t clock) {
  if (!doubts.are_kept || clock <= doubts.accepted[reader]) return true;
  doubts.threads |= 1u << reader;
  return false;
}

bool Model::check_plain(int thread, uint32_t offset, size_t num_bytes, bool writes) {
  const uint16_t* known = knowledge_of(thread);
  const uint32_t unit = 1u << shape.granule_shift(), end = offset + uint32_t(num_bytes);
  for (uint32_t at = offset / unit * unit; at < end; at += unit) {
    uint16_t* granule = &granules_[size_t(shape.granule_at(at)) * size_t(2 + num_threads_)];
    const int writer = granule[0] - 1;
    if (writer >= 0 && writer != thread && granule[1] > known[writer] &&
        (writes || is_error(thread, known[thread]))) {
      return says_race(thread, writes, false, at, writer, true, false);
    }
    if (writes) {
      for (int t = 0; t < num_threads_; ++t) {
        if (t != thread && granule[2 + t] > known[t] && is_error(t, granule[2 + t])) {
          return says_race(thread, true, false, at, t, false, false);
        }
      }
      granule[0] = uint16_t(thread + 1);
      granule[1] = known[thread];
    } else {
      granule[2 + thread] = known[thread];
    }
    const uint16_t word = shape.word_at(at);
    if (word == kNone) continue;
    const uint16_t* stored = &atomics_[size_t(word) * 2 * size_t(num_threads_)];
    for (int t = 0; t < num_threads_; ++t) {
      if (t == thread) continue;
      if (stored[t] > known[t]) return says_race(thread, writes, false, at, t, true, true);
      if (writes && stored[num_threads_ + t] > known[t]) {
        return says_race(thread, true, false, at, t, false, true);
      }
    }
  }
  return true;
}

uint32_t Model::unordered(int thread, uint16_t word, int of_loads) const {
  const uint16_t* known = knowledge_of(thread);
  const uint16_t* when = &atomics_[(size_t(word) * 2 + size_t(of_loads)) * size_t(num_threads_)];
  uint32_t threads = 0;
  for (int t = 0; t < num_threads_; ++t) {
    if (t != thread && when[t] > known[t]) threads |= 1u << t;
  }
  return threads;
}

bool Model::check_atomic(int thread, uint16_t word, bool writes, uint16_t moment) {
  const uint16_t* known = knowledge_of(thread);
  const Shape::Word& w = shape.words[word];
  uint16_t* stored = &atomics_[size_t(word) * 2 * size_t(num_threads_)];
  stored[writes ? thread : num_threads_ + thread] = known[thread];
  moments_[(size_t(word) * 2 + !writes) * size_t(num_threads_) + size_t(thread)] = moment;
  const uint32_t unit = 1u << shape.granule_shift();
  for (uint32_t at = w.offset / unit * unit; at < w.offset + w.num_bytes; at += unit) {
    const uint16_t number = shape.granule_at(at);
    if (number == kNone) continue;
    const uint16_t* granule = &granules_[size_t(number) * size_t(2 + num_threads_)];
    const int writer = granule[0] - 1;
    if (writer >= 0 && writer != thread && granule[1] > known[writer]) {
      return says_race(thread, writes, true, at, writer, true, false);
    }
    for (int t = 0; writes && t < num_threads_; ++t) {
      if (t != thread && granule[2 + t] > known[t]) {
        return says_race(thread, true, true, at, t, false, false);
      }
    }
  }
  return true;
}

}  // namespace explorer
