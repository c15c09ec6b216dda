// Faults: who may die and when, and how time passes.
#include "execution.h"

#include <algorithm>

namespace explorer {
namespace {

// Two looks at the clock with nothing in between: the thread lets time pass.
constexpr int64_t kPatienceNs = 60 * 1000 * 1000;

}  // namespace

void Execution::make_fates() {
  fates_.clear();
  std::vector<uint64_t> victims;
  // Victims may die and need not: so sets of the largest size will do.
  int num_mortal = __builtin_popcountll(options_.faults.mortal_ranks);
  const int num_deaths = std::min(num_mortal, options_.faults.max_deaths);
  for (uint64_t set = 0; set <= options_.faults.mortal_ranks; ++set) {
    if ((set & ~options_.faults.mortal_ranks) == 0 && __builtin_popcountll(set) == num_deaths) {
      victims.push_back(set);
    }
  }
  // Likewise with deadlines: each way to deal them out to threads.
  std::vector<Fate> deals = {{}};
  for (int i = 0; i < options_.faults.max_early_deadlines; ++i) {
    std::vector<Fate> more;
    for (const Fate& deal : deals) {
      int last = 0;
      for (int t = 0; t < num_threads_; ++t) last = deal.early[t] > 0 ? t : last;
      for (int t = last; t < num_threads_; ++t) {
        more.push_back(deal);
        ++more.back().early[t];
      }
    }
    deals = more;
  }
  for (uint64_t set : victims) {
    for (Fate deal : deals) {
      deal.victims = set;
      fates_.push_back(deal);
    }
  }
}

std::string Execution::fate_name(int fate) const {
  std::string text;
  for (int rank = 0; rank < 64; ++rank) {
    if ((fates_[size_t(fate)].victims >> rank & 1) != 0)
      text += " rank " + std::to_string(rank) + " may die;";
  }
  for (int t = 0; t < num_threads_; ++t) {
    for (int i = 0; i < fates_[size_t(fate)].early[t]; ++i) {
      text += " a deadline of " + name_of_thread(t) + " may pass early;";
    }
  }
  return text;
}

// What others can see of a thread is what it stores: to die earlier is to die before the next store.
bool Execution::may_stop_before(int t) const {
  const Kind kind = threads_[t].pending.kind;
  return is_victim(t) &&
         (kind == Kind::kStore || kind == Kind::kExchange || kind == Kind::kAdd || kind == Kind::kCas);
}

bool Execution::is_stuck() const {
  for (int t = 0; t < num_threads_; ++t) {
    if (!is_dying(t) && can_step(t)) return false;
  }
  return true;
}

void Execution::late_jumps(std::vector<Transition>& to) const {
  if (options_.faults.deadline_ns == 0 || !is_stuck()) return;
  for (int t = 0; t < num_threads_; ++t) {
    const bool waits = threads_[t].pending.kind == Kind::kAwait && threads_[t].early_left == 0;
    if (waits && !is_dying(t) && threads_[t].jumps < kMostJumps) to.push_back({uint8_t(t), kJump});
  }
}

uint64_t Execution::fate_of_ranks() {
  uint64_t dead = 0;
  for (int t = 0; t < num_threads_; ++t) {
    if (is_dying(t)) dead |= uint64_t(1) << rank_of(t);
  }
  for (int t = 0; t < num_threads_; ++t) {
    if (is_dying(t) && can_step(t)) dead &= ~(uint64_t(1) << rank_of(t));  // still dying
  }
  for (int t = 0; t < num_threads_; ++t) {
    if ((dead >> rank_of(t) & 1) != 0 && may_go_on(t)) threads_[t].pending.kind = Kind::kStopped;
  }
  return dead;
}

int64_t Execution::now_ns() {
  ThreadState& self = threads_[running];
  if (self.has_read_clock) self.time_ns += kPatienceNs;
  self.has_read_clock = true;
  return self.time_ns;
}

}  // namespace explorer
