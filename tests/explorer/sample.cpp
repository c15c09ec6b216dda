// Samples: executions whose choices are random, uniformly or by priorities of threads (PCT: Burckhardt et
// al., "A randomized scheduler with probabilistic guarantees of finding bugs"). Also how the shape is learnt.
#include <algorithm>
#include <cstdio>

#include "search.h"

namespace explorer {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  uint64_t below(uint64_t end) { return next() % end; }

 private:
  uint64_t state_;
};

class Sampler {
 public:
  Sampler(const Sampling& sampling) : sampling_(sampling) {}

  // One execution. What is right or wrong with it, the execution knows.
  void run(uint64_t seed, Result& result) {
    Random random(seed);
    result.fate = int(random.below(uint64_t(execution.num_fates())));
    execution.reset(result.fate);
    result.path.clear();
    if (sampling_.by_priority) deal_priorities(random);
    for (uint64_t i = 0; !execution.has_ended(); ++i) {
      if (i == kMostSteps) {
        execution.fail("endless", "more than " + std::to_string(kMostSteps) + " steps");
        break;
      }
      if (i % 64 == 63) model.forget_old(execution.living());
      const int t = sampling_.by_priority ? first_by_priority(i, random) : any(random);
      if (t < 0 && !late_jump(random, result.path)) {
        execution.finish();
        break;
      }
      if (t >= 0) make_step(option_of(t, random), result.path);
    }
    usual_steps_ = std::max<uint64_t>(usual_steps_, result.path.size());
  }

 private:
  static constexpr uint64_t kMostSteps = 2'000'000;

  int any(Random& random) {
    int able[kMaxThreads], num = 0;
    for (int t = 0; t < execution.num_threads(); ++t) {
      steps_.clear();
      execution.options_of(t, steps_);
      if (!steps_.empty()) able[num++] = t;
    }
    return num == 0 ? -1 : able[random.below(uint64_t(num))];
  }

  bool late_jump(Random& random, Path& path) {
    steps_.clear();
    execution.late_jumps(steps_);
    if (steps_.empty()) return false;
    make_step(steps_[random.below(steps_.size())], path);
    return true;
  }

  // Deaths and early deadlines are rare among the options; new values are more likely than old ones.
  Transition option_of(int t, Random& random) {
    steps_.clear();
    execution.options_of(t, steps_);
    size_t first = 0;
    if (steps_[0].option == kStop || steps_[0].option == kJump) {
      // So that most executions come far before it.
      const uint64_t rarity = steps_[0].option == kStop ? 24 : 8;
      if (random.below(rarity) == 0 || steps_.size() == 1) return steps_[0];
      first = 1;
    }
    const size_t num = steps_.size() - first;
    const bool is_choice = execution.thread(t).pending.kind == Kind::kChoose;
    if (num == 1 || (!is_choice && random.below(2) == 0)) return steps_[first];
    return steps_[first + random.below(num)];
  }

  void deal_priorities(Random& random) {
    const int num = execution.num_threads();
    for (int t = 0; t < num; ++t) priorities_[t] = sampling_.depth + t;
    for (int t = num - 1; t > 0; --t) std::swap(priorities_[t], priorities_[random.below(uint64_t(t) + 1)]);
    changes_.clear();
    for (int i = 0; i < sampling_.depth; ++i) changes_.push_back(random.below(usual_steps_ + 1));
  }
  int first_by_priority(uint64_t step, Random& random) {
    int best = -1;
    for (int t = 0; t < execution.num_threads(); ++t) {
      if (execution.can_step(t) && (best < 0 || priorities_[t] > priorities_[best])) best = t;
    }
    for (size_t i = 0; best >= 0 && i < changes_.size(); ++i) {
      if (changes_[i] != step) continue;
      changes_[i] = ~uint64_t(0);
      priorities_[best] = int(i);
      return first_by_priority(step, random);
    }
    return best;
  }

  const Sampling sampling_;
  std::vector<Transition> steps_;
  int priorities_[kMaxThreads] = {};
  std::vector<uint64_t> changes_;
  uint64_t usual_steps_ = 0;
};

}  // namespace

Result learn(const Program& program, const Options& options) {
  constexpr int kLeast = 24, kMost = 400;
  execution.open(program, options, true, true);
  execution.trusts_shape = false;
  Sampler sampler({0, 0, false, 0});
  Result result;
  size_t last_size = 0;
  for (int i = 0, same = 0; i < kMost && same < kLeast; ++i) {
    sampler.run(uint64_t(i) + (uint64_t(1) << 32), result);
    result.wrong = execution.wrong();
    if (!result.wrong.kind.empty()) break;
    ++result.executions;
    const size_t size = shape.words.size() + shape.granules.size();
    same = size == last_size ? same + 1 : 0;
    last_size = size;
  }
  execution.trusts_shape = true;
  return result;
}

Result sample(const Program& program, const Options& options, const Sampling& sampling) {
  Result result = learn(program, options);
  if (!result.wrong.kind.empty()) return result;
  result = {};
  result.passes = 1;
  execution.open(program, options, false, false);
  Sampler sampler(sampling);
  for (uint64_t i = 0; i < sampling.executions;) {
    sampler.run(sampling.seed + i, result);
    result.wrong = execution.wrong();
    result.depth = std::max<uint64_t>(result.depth, result.path.size());
    if (!result.wrong.kind.empty()) return result;
    if (execution.grew()) {  // the same again, in the new shape
      ++result.passes;
      execution.open(program, options, false, false);
      continue;
    }
    result.outcomes.insert(program.outcome());
    ++i;
    ++result.executions;
  }
  return result;
}

}  // namespace explorer
