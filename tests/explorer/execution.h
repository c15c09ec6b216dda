// One execution of a program: threads that are parked before their next step, and what each step does. Who
// steps next, and which of its options it takes, somebody else decides (search.cpp, sample.cpp, trace.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "canonical.h"
#include "explorer.h"
#include "fiber.h"
#include "model.h"

namespace explorer {

// What a parked thread is about to do.
enum class Kind : uint8_t {
  kStart,  // of the body
  kLoad,
  kStore,
  kExchange,
  kAdd,
  kCas,
  kChoose,
  kAwait,  // sched_yield: goes on when what it has looked at may have changed
  kJoin,   // goes on when all threads of the rank are here
  kJoinAll,
  kFutexWait,   // compares the word
  kFutexSleep,  // ... and sleeps: goes on when it is woken
  kFutexWake,
  kDeadRanks,
  kEnded,
  kStopped,  // dead
};

struct Pending {
  Kind kind;
  uint8_t order;  // of C++: relaxed 0, acquire 2, release 3, acq_rel 4, seq_cst 5
  uint8_t failure_order;
  uint16_t word;
  uint64_t value;  // to store, to add; number of choices; number of threads to wake
  uint64_t expected;
  const char* what;  // of a choice
};

// Options from here on are not among those of the step itself.
inline constexpr uint16_t kStop = 0xfff0;  // the thread dies before the step
inline constexpr uint16_t kJump = 0xfff1;  // its clock jumps, and its wait goes on

// A wait that clocks cannot end is a deadlock.
inline constexpr int kMostJumps = 6;

struct Transition {
  uint8_t thread;
  uint16_t option;
  bool operator==(const Transition&) const = default;
};

inline constexpr int kMaxDepth = 48;

struct ThreadState {
  Pending pending;
  uint64_t reply;
  int64_t time_ns;
  uint16_t phase;       // joins that it has passed
  uint8_t early_left;   // deadlines that may pass although somebody can move
  uint8_t jumps;        // since its last store
  bool has_read_clock;  // and done nothing since
  uint8_t depth;        // of instrumented functions
  bool looks_cleanly;   // kAwait: what it has read is what this look has read
  uint16_t clock_at_join;
  uint32_t reads_at_entry[kMaxDepth];  // of each of them
};

// Hears of each step before it is made. Null: nobody listens.
class Listener {
 public:
  virtual ~Listener() = default;
  // `read`: what an access reads, or would overwrite.
  virtual void step(const Transition& transition, const Pending& pending, uint64_t read) = 0;
  virtual void note(int thread, const char* text) = 0;
};

class Execution {
 public:
  // `may_grow`: the shape is still being learnt, and what is new in it is taken in at once, at a price.
  // Otherwise news end the execution, and the caller opens again.
  void open(const Program& program, const Options& options, bool all_are_shared, bool may_grow);
  // Fates: who may die, and whose deadlines may pass early. All of them have to be explored.
  int num_fates() const { return int(fates_.size()); }
  std::string fate_name(int fate) const;
  void reset(int fate);

  // ---- choices
  // Adds what thread `t` can do now.
  void options_of(int t, std::vector<Transition>& to) const;
  bool can_step(int t) const;
  // The thread waits, and could read something newer: to go on from here adds nothing (reduction.h).
  bool waits_in_vain(int t) const {
    return threads_[t].looks_cleanly && threads_[t].pending.kind == Kind::kAwait && model.has_news(t);
  }
  // When nobody who must go on can step: their clocks jump. Adds those jumps; false: there are none.
  bool is_stuck() const;
  void late_jumps(std::vector<Transition>& to) const;
  void step(const Transition& transition);

  // ---- ends
  bool has_ended() const { return !wrong_.kind.empty() || grew_; }
  const Wrong& wrong() const { return wrong_; }
  bool grew() const { return grew_; }
  // Something was learnt of the order of accesses; the execution goes on.
  bool has_new_rivals = false;
  // The shape is taken for what it is in all executions.
  bool trusts_shape = true;
  // No thread can step, and no clock will help: right, or a deadlock.
  void finish();
  void fail(const char* kind, const std::string& message);

  // ---- state
  const ThreadState& thread(int t) const { return threads_[t]; }
  int num_threads() const { return num_threads_; }
  int rank_of(int t) const { return options_.threads[size_t(t)].rank; }
  bool is_victim(int t) const { return (victims_ >> rank_of(t) & 1) != 0; }
  bool is_dying(int t) const { return (dying_ >> rank_of(t) & 1) != 0; }
  bool may_go_on(int t) const {
    return threads_[t].pending.kind != Kind::kEnded && threads_[t].pending.kind != Kind::kStopped;
  }
  uint32_t living() const;
  uint32_t num_ops(int t) const { return num_ops_[t]; }
  void save(std::vector<char>& to) const;
  void restore(const std::vector<char>& from);
  struct Key {
    uint64_t a, b;
    bool operator==(const Key&) const = default;
  };
  Key key();

  // ---- called from threads (runtime.cpp)
  int running = -1;
  uint64_t atomic(Kind kind, const void* p, int num_bytes, int order, uint64_t value, uint64_t expected = 0,
                  int failure_order = 0);
  void plain(const void* p, size_t num_bytes, bool writes);
  int64_t now_ns();
  void enter_function();
  void leave_function();
  void yield();
  bool has_doubt();
  uint64_t park(Kind kind, uint64_t value = 0, const char* what = nullptr);
  [[noreturn]] void fail_here(const char* kind, const std::string& message);
  const Options& options() const { return options_; }

  Listener* listener = nullptr;
  uint64_t num_steps = 0;  // of all executions

 private:
  struct Fate {
    uint64_t victims;
    uint8_t early[kMaxThreads];
  };
  static void run_body();
  void make_fates();
  void resume(int t);
  void grow() { grew_ = true; }
  [[noreturn]] void leave_for_good();
  bool is_join_complete(int t) const;
  bool may_stop_before(int t) const;
  uint64_t apply(int t, uint16_t option);
  void note_rivals(int t, const Pending& p, bool writes);
  void do_store(int t, const Pending& p, uint64_t value, bool is_rmw);
  uint64_t fate_of_ranks();

  const Program* program_ = nullptr;
  Options options_;
  int num_threads_ = 0;
  std::vector<Fate> fates_;
  std::vector<char> initial_memory_;
  Canonical canonical_;
  Fiber fibers_[kMaxThreads];

  // The state of the execution, beside the model and memory.
  ThreadState threads_[kMaxThreads];
  uint64_t victims_ = 0, dying_ = 0;
  uint32_t num_ops_[kMaxThreads] =
      {};  // atomic accesses, private ones too, and other steps; for replays only

  Wrong wrong_;
  bool grew_ = false;
  bool may_grow_ = false;
};

extern Execution execution;

}  // namespace explorer
