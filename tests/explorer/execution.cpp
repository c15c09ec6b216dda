#include "execution.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace explorer {

Execution execution;

const std::string& name_of_thread(int thread) {
  static std::vector<std::string> names;
  static const std::string start = "the start";
  if (thread >= execution.num_threads()) return start;
  if (names.size() != execution.options().threads.size()) names.clear();
  if (names.empty()) {
    for (const ThreadName& name : execution.options().threads) {
      names.push_back("rank " + std::to_string(name.rank) + " channel " + std::to_string(name.channel));
    }
  }
  return names[size_t(thread)];
}

namespace {

constexpr int kRelaxed = 0, kConsume = 1, kRelease = 3, kAcqRel = 4, kSeqCst = 5;
bool acquires(int order) { return order == kConsume || order == 2 || order >= kAcqRel; }
bool releases(int order) { return order >= kRelease; }

Pending relaxed(Pending p) {
  p.order = kRelaxed;
  return p;
}

// A wait that clocks cannot end is a deadlock.
constexpr int kMostJumps = 6;
// Two looks at the clock with nothing in between: the thread lets time pass.
constexpr int64_t kPatienceNs = 60 * 1000 * 1000;

}  // namespace

// ---- fates

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

// ---- begin

void Execution::open(const Program& program, const Options& options, bool all_are_shared, bool may_grow) {
  program_ = &program;
  options_ = options;
  num_threads_ = int(options.threads.size());
  may_grow_ = may_grow;
  if (initial_memory_.empty()) initial_memory_.assign(shape.arena(), shape.arena() + shape.num_bytes());
  std::memcpy(shape.arena(), initial_memory_.data(), initial_memory_.size());
  make_fates();
  model.make(num_threads_, all_are_shared, may_grow);
  model.doubts.are_kept = options.races_are_doubts;
}

void Execution::reset(int fate) {
  std::memcpy(shape.arena(), initial_memory_.data(), initial_memory_.size());
  model.reset();
  const Fate& chosen = fates_[size_t(fate)];
  victims_ = chosen.victims;
  dying_ = 0;
  wrong_ = {};
  grew_ = false;
  running = -1;
  // Time 0 is "not yet" to code that waits; where no deadline passes it may stay that, so that states that
  // have waited equal those that have not.
  const int64_t start_ns = options_.faults.deadline_ns > 0 ? 1000 * 1000 * 1000 : 0;
  for (int t = 0; t < num_threads_; ++t) {
    threads_[t] = {};
    threads_[t].pending.kind = Kind::kStart;
    threads_[t].time_ns = start_ns;
    threads_[t].early_left = chosen.early[t];
    num_ops_[t] = 0;
    fibers_[t].prepare(run_body);
  }
}

void Execution::run_body() {
  const int t = execution.running;
  execution.program_->run(t);
  execution.threads_[t].pending = {};
  execution.threads_[t].pending.kind = Kind::kEnded;
  execution.leave_for_good();
}

void Execution::leave_for_good() {
  fibers_[running].leave();
  std::abort();
}

void Execution::resume(int t) {
  running = t;
  fibers_[t].enter();
  running = -1;
  fibers_[t].forget_below();
}

// ---- called from threads

uint64_t Execution::park(Kind kind, uint64_t value, const char* what) {
  ThreadState& self = threads_[running];
  self.pending = {};
  self.pending.kind = kind;
  self.pending.value = value;
  self.pending.what = what;
  ++num_ops_[running];
  fibers_[running].leave();
  return threads_[running].reply;
}

void Execution::fail(const char* kind, const std::string& message) {
  if (wrong_.kind.empty()) wrong_ = {kind, message};
}
void Execution::fail_here(const char* kind, const std::string& message) {
  fail(kind, message);
  leave_for_good();
}

void Execution::enter_function() {
  ThreadState& self = threads_[running];
  if (self.depth < kMaxDepth) self.reads_at_entry[self.depth] = model.num_reads(running);
  ++self.depth;
}
void Execution::leave_function() { --threads_[running].depth; }

// Of a loop in the function that was entered last.
void Execution::yield() {
  ThreadState& self = threads_[running];
  self.looks_cleanly = self.depth > 0 && self.depth <= kMaxDepth &&
                       model.forget_reads_before(running, self.reads_at_entry[self.depth - 1]);
  park(Kind::kAwait);
  threads_[running].looks_cleanly = false;
}

bool Execution::has_doubt() {
  const int rank = rank_of(running);
  bool doubts = false;
  for (int t = 0; t < num_threads_; ++t) {
    if (rank_of(t) == rank) doubts |= (model.doubts.threads >> t & 1) != 0;
  }
  for (int t = 0; t < num_threads_; ++t) {
    if (rank_of(t) == rank && !doubts) model.doubts.accepted[t] = threads_[t].clock_at_join;
  }
  return doubts;
}

int64_t Execution::now_ns() {
  ThreadState& self = threads_[running];
  if (self.has_read_clock) self.time_ns += kPatienceNs;
  self.has_read_clock = true;
  return self.time_ns;
}

void Execution::plain(const void* p, size_t num_bytes, bool writes) {
  const int t = running;
  const uint32_t offset = shape.offset_of(p);
  threads_[t].has_read_clock = false;
  const uint32_t unit = 1u << shape.granule_shift();
  for (uint32_t at = offset / unit * unit; at < offset + num_bytes; at += unit) {
    if (shape.granule_at(at) == kNone) shape.add_granule(at);
    if (!model.has_granule(shape.granule_at(at))) {
      grow();
      leave_for_good();
    }
    if (writes && !may_grow_ && shape.word_at(at) != kNone && model.has_word(shape.word_at(at)) &&
        model.is_shared(shape.word_at(at))) {
      fail_here("model", "a plain store to a word that other threads load atomically: " + shape.name_of(at));
    }
  }
  if (!model.check_plain(t, offset, num_bytes, writes)) fail_here("race", model.race());
}

uint64_t Execution::atomic(Kind kind, const void* p, int num_bytes, int order, uint64_t value,
                           uint64_t expected, int failure_order) {
  const int t = running;
  ThreadState& self = threads_[t];
  self.has_read_clock = false;
  const uint32_t offset = shape.offset_of(p);
  uint16_t word = shape.word_at(offset);
  if (word == kNone || shape.words[word].offset != offset || shape.words[word].num_bytes != num_bytes) {
    bool overlaps = false;
    word = shape.add_word(offset, num_bytes, overlaps);
    if (overlaps) fail_here("model", "atomic accesses of different sizes: " + shape.name_of(offset));
    if (may_grow_) model.add_word(word);
  }
  if (!model.has_word(word)) {
    grow();
    leave_for_good();
  }
  const bool reads = kind != Kind::kStore && kind != Kind::kFutexWake;
  const bool writes =
      kind == Kind::kStore || kind == Kind::kExchange || kind == Kind::kAdd || kind == Kind::kCas;
  int bits = (reads ? kReads : 0) | (writes ? kWrites | kSets : 0);
  if (kind == Kind::kAdd) bits = kAdds | kWrites;
  if (reads && order == kSeqCst && kind != Kind::kAdd) bits |= kReadsSc;
  if (kind == Kind::kFutexWait) bits = kFutexWaits;
  if (kind == Kind::kFutexWake) bits = kFutexWakes;
  if (shape.add_access(word, t, bits, self.phase) && !may_grow_) {
    // A word that becomes a shared one has no list in this execution.
    grow();
    leave_for_good();
  }
  if (model.is_shared(word)) {
    if (may_grow_) model.take_plain_store(word);
    self.pending = {kind, uint8_t(order), uint8_t(failure_order), word, value, expected, nullptr};
    ++num_ops_[t];
    fibers_[t].leave();
    return threads_[t].reply;
  }
  ++num_ops_[t];
  if (kind == Kind::kFutexWait || kind == Kind::kFutexWake) return 0;
  if (!model.check_atomic(t, word, writes, 0)) fail_here("race", model.race());
  uint64_t before = 0;
  std::memcpy(&before, p, size_t(num_bytes));
  if (!writes || (kind == Kind::kCas && before != expected)) return before;
  const uint64_t after = kind == Kind::kAdd ? before + value : value;
  std::memcpy(shape.arena() + offset, &after, size_t(num_bytes));
  return before;
}

// ---- steps

bool Execution::is_join_complete(int t) const {
  const bool of_all = threads_[t].pending.kind == Kind::kJoinAll;
  for (int u = 0; u < num_threads_; ++u) {
    if (!of_all && rank_of(u) != rank_of(t)) continue;
    if (threads_[u].pending.kind != threads_[t].pending.kind) return false;
  }
  return true;
}

bool Execution::can_step(int t) const {
  switch (threads_[t].pending.kind) {
    case Kind::kAwait:
      return model.has_news(t);
    case Kind::kJoin:
    case Kind::kJoinAll:  // the last one to come frees all
    case Kind::kFutexSleep:
    case Kind::kEnded:
    case Kind::kStopped:
      return false;
    default:
      return true;
  }
}

// What others can see of a thread is what it stores: to die earlier is to die before the next store.
bool Execution::may_stop_before(int t) const {
  const Kind kind = threads_[t].pending.kind;
  return is_victim(t) &&
         (kind == Kind::kStore || kind == Kind::kExchange || kind == Kind::kAdd || kind == Kind::kCas);
}

void Execution::options_of(int t, std::vector<Transition>& to) const {
  const Pending& p = threads_[t].pending;
  if (p.kind == Kind::kAwait && threads_[t].early_left > 0 && threads_[t].jumps < kMostJumps)
    to.push_back({uint8_t(t), kJump});
  if (!can_step(t)) return;
  if (may_stop_before(t)) to.push_back({uint8_t(t), kStop});
  int num = 1;
  if (p.kind == Kind::kLoad) num = model.num_readable(t, p.word, p.order == kSeqCst);
  if (p.kind == Kind::kChoose) num = int(p.value);
  if (p.kind == Kind::kCas) {
    num = model.num_readable(t, p.word, p.failure_order == kSeqCst);
    for (int i = 0; i < num; ++i) {  // it succeeds on the newest value only, and fails on others only
      if (i == 0 || model.readable(p.word, i).value != p.expected) to.push_back({uint8_t(t), uint16_t(i)});
    }
    return;
  }
  for (int i = 0; i < num; ++i) to.push_back({uint8_t(t), uint16_t(i)});
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

void Execution::do_store(int t, const Pending& p, uint64_t value, bool is_rmw) {
  const Shape::Word& word = shape.words[p.word];
  if (word.num_bytes == 4) value = uint32_t(value);
  if (!is_rmw && !options_.allows_unordered_stores && shape.is_shared(p.word) &&
      !model.is_ordered(t, p.word, value, releases(p.order))) {
    fail("unordered", shape.name_of(word.offset) + ": " + name_of_thread(t) +
                          " stores without knowing the newest store, by " +
                          name_of_thread(model.readable(p.word, 0).thread));
    return;
  }
  model.store(t, p.word, value, releases(p.order), p.order == kSeqCst, is_rmw);
  threads_[t].jumps = 0;
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

// An access of another thread, in conflict with this one, comes earlier here, and nothing but chance has it
// so.
void Execution::note_rivals(int t, const Pending& p, bool writes) {
  const uint32_t stores = writes || p.order == kSeqCst ? model.unordered_stores(t, p.word) : 0;
  const uint32_t loads = writes ? model.unordered_loads(t, p.word) : 0;
  for (int u = 0; u < num_threads_; ++u) {
    for (const bool of_load : {false, true}) {
      if (((of_load ? loads : stores) >> u & 1) == 0) continue;
      has_new_rivals |= shape.add_rival(p.word, u, of_load, model.moment_of(u, p.word, of_load), t);
    }
  }
}

uint64_t Execution::apply(int t, uint16_t option) {
  const Pending p = threads_[t].pending;
  const bool is_access = p.kind >= Kind::kLoad && p.kind <= Kind::kCas;
  uint64_t before = 0;
  if (is_access) {
    before = model.readable(p.word, option).value;
    const bool writes =
        p.kind != Kind::kLoad && (p.kind != Kind::kCas || (option == 0 && before == p.expected));
    note_rivals(t, p, writes || p.kind == Kind::kCas);  // one that fails would store elsewhen
    if (!model.check_atomic(t, p.word, writes, moment(threads_[t].phase, model.newest_index(p.word)))) {
      fail("race", model.race());
      return 0;
    }
    if (!writes)
      return model.load(t, p.word, option, acquires(p.kind == Kind::kCas ? p.failure_order : p.order));
    if (p.kind == Kind::kStore) {
      do_store(t, p, p.value, false);
    } else {
      const bool is_counter = p.kind == Kind::kAdd && trusts_shape && !options_.counters_carry_knowledge &&
                              shape.is_counter(p.word);
      model.load(t, p.word, 0, !is_counter && acquires(p.order));
      do_store(t, is_counter ? relaxed(p) : p, p.kind == Kind::kAdd ? before + p.value : p.value, true);
    }
    return before;
  }
  switch (p.kind) {
    case Kind::kChoose:
      return option;
    case Kind::kAwait:
      model.forget_reads(t);
      return 0;
    case Kind::kFutexWait:
      return model.load(t, p.word, 0, false) == p.value;  // the kernel compares what is there now
    case Kind::kFutexWake:
      for (int u = 0, left = int(p.value); u < num_threads_ && left > 0; ++u) {
        if (threads_[u].pending.kind != Kind::kFutexSleep || threads_[u].pending.word != p.word) continue;
        threads_[u].pending = {};  // goes on
        --left;
      }
      return 0;
    case Kind::kDeadRanks: {
      const uint64_t dead = fate_of_ranks();
      if (dead != 0) model.see_newest(t);  // a process that is gone has no store under way
      return dead;
    }
    default:
      return 0;
  }
}

void Execution::step(const Transition& transition) {
  const int t = transition.thread;
  ThreadState& self = threads_[t];
  ++num_steps;
  if (listener != nullptr) {
    const Pending& p = self.pending;
    const bool is_access = p.kind >= Kind::kLoad && p.kind <= Kind::kCas;
    listener->step(
        transition, p,
        is_access && transition.option < kStop ? model.readable(p.word, transition.option).value : 0);
  }
  if (transition.option == kStop) {
    dying_ |= uint64_t(1) << rank_of(t);
    self.pending.kind = Kind::kStopped;
    return;
  }
  if (transition.option == kJump) {
    self.time_ns += options_.faults.deadline_ns;
    self.has_read_clock = false;
    ++self.jumps;
    // A deadline is longer than a store takes to be seen; an early one comes before that.
    if (is_stuck()) model.see_newest(t);
    if (self.early_left > 0) --self.early_left;
    model.forget_reads(t);
    self.reply = 0;
  } else {
    const bool sleeps = self.pending.kind == Kind::kFutexWait;
    self.reply = apply(t, transition.option);
    if (!wrong_.kind.empty()) return;
    if (sleeps && self.reply != 0) {
      self.pending.kind = options_.futex_is_exact ? Kind::kFutexSleep : Kind::kAwait;
      return;
    }
    if (self.pending.kind == Kind::kStopped) return;
  }
  resume(t);
  const Kind kind = self.pending.kind;
  if ((kind != Kind::kJoin && kind != Kind::kJoinAll) || has_ended()) return;
  model.forget_reads(t);
  if (!is_join_complete(t)) return;
  std::vector<uint16_t> all(size_t(model.row_size()), 0);
  for (int pass = 0; pass < 2; ++pass) {
    for (int u = 0; u < num_threads_; ++u) {
      if (kind == Kind::kJoin && rank_of(u) != rank_of(t)) continue;
      if (pass == 0) {
        for (size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], model.knowledge_of(u)[i]);
      } else {
        threads_[u].clock_at_join = model.knowledge_of(u)[u];
        model.join(u, all.data());
        model.release(u);
        ++threads_[u].phase;
        threads_[u].pending.kind = Kind::kStart;  // goes on
      }
    }
  }
}

// ---- ends

void Execution::finish() {
  std::string waiting;
  for (int t = 0; t < num_threads_; ++t) {
    if (is_dying(t) || !may_go_on(t)) continue;
    waiting += waiting.empty() ? "" : "; ";
    waiting += name_of_thread(t);
    switch (threads_[t].pending.kind) {
      case Kind::kAwait:
        waiting += " waits, having looked at";
        for (uint16_t w = 0; w < shape.words.size(); ++w) {
          if (model.is_shared(w) && model.has_read(t, w))
            waiting += " " + shape.name_of(shape.words[w].offset) + ",";
        }
        waiting.pop_back();
        break;
      case Kind::kFutexSleep:
        waiting += " sleeps at " + shape.name_of(shape.words[threads_[t].pending.word].offset);
        break;
      default:
        waiting += " waits in a join";
    }
  }
  if (!waiting.empty()) return fail("deadlock", waiting);
  try {
    program_->check_end();
  } catch (const Wrong& wrong) {
    wrong_ = wrong;
  }
}

uint32_t Execution::living() const {
  uint32_t living = 0;
  for (int t = 0; t < num_threads_; ++t) {
    if (may_go_on(t)) living |= 1u << t;
  }
  return living;
}

}  // namespace explorer
