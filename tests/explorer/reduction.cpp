#include "reduction.h"

namespace explorer {
namespace {

constexpr int kSeqCst = 5;

// The threads other than `t` that may still access the word in one of these ways.
uint32_t others_that(int bits, int t, uint16_t word) {
  const Shape::Word& w = shape.words[word];
  uint32_t threads = 0;
  for (int u = 0; u < execution.num_threads(); ++u) {
    if (u == t || !execution.may_go_on(u)) continue;
    int may = w.access[u] & bits;
    if (w.last_write[u] < execution.thread(u).phase + 1) may &= ~(kWrites | kNudges | kFutexWakes);
    if (may != 0) threads |= 1u << u;
  }
  return threads;
}

// Those on whose steps the next one of `t` depends.
uint32_t needed_by(int t) {
  const Pending& p = execution.thread(t).pending;
  uint32_t threads = 0;
  const auto rivals = [&](bool loads, bool stores) {
    const uint16_t now = moment(execution.thread(t).phase, model.newest_index(p.word));
    return (loads ? shape.rivals_of(p.word, t, true, now) : 0) |
           (stores ? shape.rivals_of(p.word, t, false, now) : 0);
  };
  switch (p.kind) {
    case Kind::kLoad:
      return others_that(kWrites | kNudges, t, p.word) & rivals(true, false);
    case Kind::kStore:
    case Kind::kExchange:
    case Kind::kAdd:
    case Kind::kCas:
      if (p.kind == Kind::kAdd && !execution.options().counters_carry_knowledge && shape.is_counter(p.word))
        return 0;
      threads = others_that(kWrites | kNudges | (p.order == kSeqCst ? kReadsSc : 0), t, p.word);
      return (threads & rivals(p.kind == Kind::kCas, true)) | others_that(kFutexWaits, t, p.word);
    case Kind::kFutexWait:
      return others_that(kWrites | kNudges | kFutexWakes, t, p.word);
    case Kind::kFutexWake:
      return others_that(kFutexWaits | kFutexWakes, t, p.word);
    case Kind::kFutexSleep:
      return others_that(kFutexWakes, t, p.word);
    case Kind::kAwait:
      if (execution.can_step(t)) return 0;
      for (uint16_t word = 0; word < shape.words.size(); ++word) {
        if (!model.is_shared(word) || !model.has_read(t, word)) continue;
        threads |= others_that(kWrites | kNudges, t, word) &
                   shape.rivals_of(word, t, true, model.moment_of(t, word, true));
      }
      return threads;
    case Kind::kJoin:
    case Kind::kJoinAll:
      for (int u = 0; u < execution.num_threads(); ++u) {
        const bool meets = p.kind == Kind::kJoinAll || execution.rank_of(u) == execution.rank_of(t);
        if (u != t && meets && execution.may_go_on(u)) threads |= 1u << u;
      }
      return threads;
    case Kind::kDeadRanks:
      for (int u = 0; u < execution.num_threads(); ++u) {
        if (u != t && execution.is_victim(u) && execution.may_go_on(u)) threads |= 1u << u;
      }
      return threads;
    default:
      return 0;
  }
}

}  // namespace

bool steps_to_explore(bool reduces, std::vector<Transition>& steps) {
  const int num_threads = execution.num_threads();
  static std::vector<Transition> options[kMaxThreads];
  uint32_t able = 0;
  for (int t = 0; t < num_threads; ++t) {
    options[t].clear();
    execution.options_of(t, options[t]);
    if (reduces && execution.waits_in_vain(t)) {
      if (options[t].size() == 1) return false;
      options[t].pop_back();  // a deadline may yet pass
    }
    if (!options[t].empty()) able |= 1u << t;
  }
  steps.clear();
  execution.late_jumps(steps);
  uint32_t best = able;
  if (reduces && steps.empty()) {
    size_t fewest = ~size_t(0);
    for (int t = 0; t < num_threads && fewest > 0; ++t) {
      if ((able >> t & 1) == 0) continue;
      uint32_t closed = 1u << t, done = 0;
      size_t num_steps = 0;
      while (closed != done) {
        const int u = __builtin_ctz(closed & ~done);
        done |= 1u << u;
        num_steps += options[u].size();
        closed |= needed_by(u);
      }
      // A thread that can go on alone does so, until it cannot, before the next one: what two of them find on
      // their ways adds up then, and does not multiply.
      if (closed == 1u << t) num_steps = 0;
      if (num_steps < fewest) {
        fewest = num_steps;
        best = closed;
      }
    }
  }
  for (int t = 0; t < num_threads; ++t) {
    if ((best >> t & 1) != 0) steps.insert(steps.end(), options[t].begin(), options[t].end());
  }
  return true;
}

}  // namespace explorer
