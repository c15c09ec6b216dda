// The exhaustive search: depth first, with saved states, each distinct state once.
#include "search.h"

#include <cstdio>

#include "reduction.h"

namespace explorer {
namespace {

using Key = Execution::Key;

// A hash table of keys, which are hashes themselves.
class KeySet {
 public:
  KeySet() : keys_(1 << 12) {}
  // False: it was there.
  bool add(Key key) {
    if (key == Key{}) key.a = 1;
    if ((num_ + 1) * 2 > keys_.size()) grow();
    Key& place = find(key);
    if (place == key) return false;
    place = key;
    ++num_;
    return true;
  }

 private:
  Key& find(const Key& key) {
    size_t at = key.a & (keys_.size() - 1);
    while (!(keys_[at] == Key{}) && !(keys_[at] == key)) at = (at + 1) & (keys_.size() - 1);
    return keys_[at];
  }
  void grow() {
    std::vector<Key> old(keys_.size() * 2);
    old.swap(keys_);
    for (const Key& key : old) {
      if (!(key == Key{})) find(key) = key;
    }
  }
  std::vector<Key> keys_;
  size_t num_ = 0;
};

struct Frame {
  std::vector<char> saved;
  std::vector<Transition> steps;
  size_t next = 0, path_size = 0;
  Key key;
};

class Search {
 public:
  Search(const Program& program, const Options& options, const Limits& limits)
      : program_(program), options_(options), limits_(limits) {}

  // One pass over everything; false: the shape has grown.
  bool run(Result& result) {
    execution.open(program_, options_, !limits_.reduces, false);
    execution.has_new_rivals = false;
    for (int fate = 0; fate < execution.num_fates(); ++fate) {
      execution.reset(fate);
      result.fate = fate;
      path_.clear();
      depth_ = 0;
      visit(result);
      while (depth_ > 0 && goes_on(result)) {
        Frame& frame = frames_[depth_ - 1];
        if (frame.next == frame.steps.size()) {
          --depth_;
          continue;
        }
        execution.restore(frame.saved);
        path_.resize(frame.path_size);
        make_step(frame.steps[frame.next++], path_);
        visit(result);
      }
      if (!goes_on(result)) break;
    }
    return !grew_;
  }

 private:
  void note_growth(const Result& result) {
    if (grew_) return;
    grew_ = true;
    states_when_grown_ = result.states;
  }

  // A few thousand states more may show what else is missing in the shape.
  bool goes_on(const Result& result) const {
    return result.wrong.kind.empty() && !result.was_cut &&
           !(grew_ && result.states > states_when_grown_ + 3000);
  }

  // From where the execution is, to the next state where there is a choice, or to an end.
  void visit(Result& result) {
    constexpr int kMostSteps = 1'000'000;
    for (int i = 0; !execution.has_ended(); ++i) {
      if (depth_ == frames_.size()) frames_.emplace_back();
      std::vector<Transition>& steps = frames_[depth_].steps;
      if (!steps_to_explore(limits_.reduces, steps)) break;
      if (steps.empty()) {
        execution.finish();
        ++result.executions;
        if (execution.wrong().kind.empty()) result.outcomes.insert(program_.outcome());
        break;
      }
      if (steps.size() == 1) {
        if (i == kMostSteps) execution.fail("endless", "a loop that does not yield");
        make_step(steps[0], path_);
        continue;
      }
      if (execution.has_new_rivals) note_growth(result);
      branch(result);
      return;
    }
    if (path_.size() > result.depth) result.depth = path_.size();
    if (grew_) return;  // this pass does not count; what is wrong here, the next one will find too
    if (!execution.wrong().kind.empty()) {
      result.wrong = execution.wrong();
      result.path = path_;
    } else if (execution.grew() || execution.has_new_rivals) {
      note_growth(result);
    }
  }

  void branch(Result& result) {
    Frame& frame = frames_[depth_];
    frame.key = execution.key();
    if (limits_.merges) {
      if (!visited_.add(frame.key)) {
        ++result.merged;
        return;
      }
    } else {
      // A thread that looks again and learns nothing has made a cycle.
      for (size_t i = 0; i < depth_; ++i) {
        if (frames_[i].key == frame.key) return;
      }
    }
    if (++result.states > limits_.max_states) {
      result.was_cut = true;
      return;
    }
    execution.save(frame.saved);
    frame.next = 0;
    frame.path_size = path_.size();
    ++depth_;
  }

  const Program& program_;
  const Options& options_;
  const Limits& limits_;
  std::vector<Frame> frames_;
  size_t depth_ = 0;
  KeySet visited_;
  Path path_;
  bool grew_ = false;
  uint64_t states_when_grown_ = 0;
};

}  // namespace

void make_step(const Transition& transition, Path& path) {
  path.push_back({transition.thread, transition.option, execution.num_ops(transition.thread)});
  execution.step(transition);
}

Result explore(const Program& program, const Options& options, const Limits& limits) {
  Result result = learn(program, options);
  if (!result.wrong.kind.empty() && !limits.is_alone) return result;
  for (uint64_t pass = 1;; ++pass) {
    result = {};
    result.passes = pass;
    if (!Search(program, options, limits).run(result)) continue;
    if (result.executions == 0 && result.wrong.kind.empty() && !result.was_cut) {
      result.wrong = {"vacuous", "no execution came to an end"};
    }
    return result;
  }
}

}  // namespace explorer
