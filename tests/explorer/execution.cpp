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
constexpr int kSeqCst = 5;
}  // namespace

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
  canonical_.make(model, options.allows_unordered_stores);
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

// Of a loop in the function that was entered last; or in its caller, if it is one that pauses and no more.
void Execution::yield() {
  ThreadState& self = threads_[running];
  int of = self.depth - 1;
  if (of > 0 && of < kMaxDepth && self.reads_at_entry[of] == model.num_reads(running)) --of;
  self.looks_cleanly =
      of >= 0 && of < kMaxDepth && model.forget_reads_before(running, self.reads_at_entry[of]);
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
    if (is_stuck()) {
      model.see_newest(t);
      // Nobody could have put off a look until now: the deadline came because all had looked.
      for (int u = 0; u < num_threads_; ++u) threads_[u].looks_cleanly = false;
    }
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
