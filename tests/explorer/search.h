// Explorations of a program: the exhaustive search, and samples. Each says how far it came, and the first
// execution that was wrong.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "execution.h"

namespace explorer {

// A step as a replay needs it: `op` counts what the thread has done so far, private accesses too.
struct Recorded {
  uint8_t thread;
  uint16_t option;
  uint32_t op;
};
using Path = std::vector<Recorded>;

struct Result {
  Wrong wrong;              // kind "": every execution was right
  int fate = 0;             // of the wrong one,
  Path path;                // and how it went
  bool was_cut = false;     // more than max_states: the result shows nothing
  uint64_t executions = 0;  // ends that were reached
  uint64_t states = 0;      // distinct ones where there was a choice
  uint64_t merged = 0;      // times that one of these was reached again
  uint64_t depth = 0;       // most steps of an execution
  uint64_t passes = 0;      // searches, until the shape was known
  std::set<std::string> outcomes;
};

struct Limits {
  uint64_t max_states = 20'000'000;
  bool reduces = true;  // persistent sets, and private words that are no steps
  bool merges = true;   // equal states are explored once
  bool is_alone = false;  // what is wrong, the search itself must find, and not the samples before it
};

Result explore(const Program& program, const Options& options, const Limits& limits);

struct Sampling {
  uint64_t executions;
  uint64_t seed;
  bool by_priority;
  int depth;  // changes of priority in an execution
};
Result sample(const Program& program, const Options& options, const Sampling& sampling);

// One step, recorded.
void make_step(const Transition& transition, Path& path);
// Random executions that teach the shape; one of them may be wrong.
Result learn(const Program& program, const Options& options);

}  // namespace explorer
