// The interface between scenarios and the engine that runs them: every schedule, every value that weak memory
// lets a load see, every fault that a scenario allows.
//
// A scenario is a Program: memory that it allocates here, and one body per thread. Bodies, and the kernel
// source that they call, are compiled with -fsanitize=thread, but linked with the engine in place of
// ThreadSanitizer: each access to allocated memory is a call of the engine. Atomic accesses are steps of the
// scheduler. Plain ones are checked for races and are no steps. What lies elsewhere (the body's own stack) is
// its thread's own.
//
// The engine saves a thread by copying its stack, and goes back to it when another way is explored. So a body
//   - keeps all it knows on its stack, or in memory that was allocated here: no heap, no static variables;
//   - holds nothing with a destructor that matters: a thread may be dropped anywhere;
//   - is a function of what it reads there, and of `choose`.
// It should build large parameters (kernel calls) between two joins from constants, so that states compare
// equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace explorer {

inline constexpr int kMaxThreads = 16;

// A thread of the program. Threads of one rank die together, and `join` lets them meet.
struct ThreadName {
  int rank;
  int channel;  // or lane: only a name
};

// Faults that the engine may inject; with none of them (the default) nothing goes wrong and no deadline
// passes.
struct Faults {
  uint64_t mortal_ranks = 0;  // these may stop for ever, each thread of them at any step
  int max_deaths = 0;         // of ranks
  // The clock of a waiting thread jumps by `deadline_ns` when nobody else can move ...
  int64_t deadline_ns = 0;  // 0: never
  // ... and this often in one execution although somebody can.
  int max_early_deadlines = 0;
};

struct Options {
  std::vector<ThreadName> threads;
  Faults faults;
  // A futex wait without a bound: what nobody wakes is a deadlock. Otherwise a wait is an await point.
  bool futex_is_exact = true;
  // Bytes in which plain accesses are told apart when races are looked for: 1, 2 or 4. A coarse one may find
  // a race where there is none, and never the other way round.
  int race_granule = 4;
  // A plain load that races with a plain store does not end the execution: it is held against the loading
  // rank
  // (`has_doubt`), which may have good reasons not to trust what it read.
  bool races_are_doubts = false;
  // Whether a word that all threads only add to orders one thread behind another, as in C++, and the order of
  // the sums is explored. Without it more can happen, and fewer states differ; but then nobody may use what
  // an addition to such a word returns.
  bool counters_carry_knowledge = false;
  // Words of which the engine need not prove that stores of two threads are ordered (see model.h).
  bool allows_unordered_stores = false;
};

class Program {
 public:
  virtual ~Program() = default;
  virtual Options options() const = 0;
  // Once: the memory that all threads see at their start. Uses `allocate`.
  virtual void set_up() = 0;
  virtual void run(int thread) const = 0;
  // In the end of every execution, when no thread can go on (all have ended, or are dead): what memory holds.
  virtual void check_end() const {}
  // For litmus tests: what this execution showed; the engine collects the set of all.
  virtual std::string outcome() const { return ""; }
};

// ---- memory

// For `set_up`. `name(offset)` names the byte at that offset in traces: "rank 1 flag[parity 0][channel
// 1][from 0]". Zeroed; 64-byte aligned.
using Namer = std::function<std::string(size_t offset)>;
void* allocate(size_t num_bytes, Namer name);
void* allocate(size_t num_bytes, const std::string& name);  // "name+8"
template <class T>
T* allocate_array(size_t num, const std::string& name) {
  return static_cast<T*>(allocate(num * sizeof(T), name));
}

// ---- in bodies

// The caller's join: returns when all threads of the own rank have come here; what each did before, all see
// after. Between two calls of one rank: join, one thread looks at the results and prepares the next call,
// join.
void join();
// The same for all threads of the program (a barrier outside the protocol; hides protocol faults, so rarely).
void join_all();

// The body's own loops: goes on when something that the thread has looked at since the last await may have
// changed.
void await();

// 0 .. num - 1, all of them explored. `what` is for the trace: "T of the next call".
int choose(int num, const char* what);

// Ends the execution as a wrong one. printf-like. `kind` is the first word of the verdict: "data", "blame",
// "stale".
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
// A line of the trace; free when none is made.
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));

// With Options::races_are_doubts, after the join that ends a call: whether a plain load of the own rank up to
// that join raced with a store. If not, its loads are accepted: should a store race with one of them later,
// that is an error.
bool has_doubt();

// The ranks that are dead for good, as a host finds them (for WaitPolicy::poll_host).
uint64_t dead_ranks();
// In check_end: whether the body of that thread has returned.
bool has_ended(int thread);
// Which thread this is; -1 outside bodies.
int this_thread();

// ---- the program

// A scenario by name, with numbers from the command line (`KEY=VALUE`); `get` gives one, or its default.
class Arguments {
 public:
  int64_t get(const std::string& key, int64_t otherwise) const;
  std::vector<std::pair<std::string, int64_t>> values;
  mutable std::vector<std::string> used;  // an argument that nobody asks for is an error
};
struct Scenario {
  const char* name;
  std::unique_ptr<Program> (*make)(const Arguments&);
};

// PROGRAM SCENARIO [KEY=VALUE ...] [MODE] [OPTIONS]
//   --exhaustive         (default) every execution, with the reduction; --brute-force: without it
//   --search-alone       what samples find while they learn the shape does not count
//   --random N           N executions, each choice uniformly at random
//   --pct N --depth D    N executions by random priorities of threads, which change D times
//   --seed S             of the first execution; the next ones have S + 1, ...
//   --replay CHOICES     one execution, with its trace
//   --trace              print the trace of a correct execution too (with --random 1)
//   --max-states N       more than that is an error (exit code 3), never silence
// Exit code 0: all executions right; 1: one was wrong (trace and replay line on stderr); 2: usage; 3: too
// many. The last line on stdout is JSON: {"scenario", "mode", "verdict", "kind", "message", "executions",
// "states", "steps", "depth", "words", "threads", "outcomes"}; verdict: ok, wrong, too many. kind: race,
// deadlock, unordered, or that of `fail`.
int run_main(int argc, char** argv, const std::vector<Scenario>& scenarios);

// Set by `mutation=N` on the command line, 0 otherwise: which mutant is on (mutations.py).
extern "C" int explorer_mutation;

}  // namespace explorer
