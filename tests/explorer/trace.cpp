#include "trace.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace explorer {

std::string write_path(int fate, const Path& path) {
  std::string text = std::to_string(fate) + ":";
  for (size_t i = 0; i < path.size(); ++i) {
    const Recorded& step = path[i];
    // A thread that goes on as it would by itself needs no word.
    const bool goes_on = i + 1 < path.size() && path[i + 1].thread == step.thread && path[i + 1].op > step.op;
    if (goes_on && step.option == 0) continue;
    if (text.back() != ':') text += ',';
    text += std::to_string(step.thread) + "." + std::to_string(step.op) + "." + std::to_string(step.option);
  }
  return text;
}

bool read_path(const std::string& text, int& fate, Path& path) {
  const char* at = text.c_str();
  char* end = nullptr;
  fate = int(std::strtol(at, &end, 10));
  if (end == at || *end != ':') return false;
  for (at = end + 1; *at != '\0'; at = *end == ',' ? end + 1 : end) {
    unsigned thread = 0, op = 0, option = 0;
    int length = 0;
    if (std::sscanf(at, "%u.%u.%u%n", &thread, &op, &option, &length) != 3) return false;
    path.push_back({uint8_t(thread), uint16_t(option), op});
    end = const_cast<char*>(at) + length;
    if (*end != ',' && *end != '\0') return false;
  }
  return true;
}

namespace {

const char* name_of(int order) {
  const char* names[] = {"relaxed", "acquire", "acquire", "release", "acq_rel", "seq_cst"};
  return names[order];
}

std::string number(uint64_t value) {
  char text[40];
  std::snprintf(text, sizeof(text), value < 10000 ? "%" PRIu64 : "0x%" PRIx64, value);
  return text;
}

class Printer : public Listener {
 public:
  void step(const Transition& transition, const Pending& p, uint64_t read) override {
    const int t = transition.thread;
    if (transition.option == kStop) return print(t, "stops for ever");
    if (transition.option == kJump) return print(t, "its deadline passes");
    switch (p.kind) {
      case Kind::kChoose:
        return print(t, std::string("chooses ") + p.what + " = " + std::to_string(transition.option));
      case Kind::kFutexWait:
        return print(t, "futex wait for a change of " + word(p.word) + " from " + number(p.value));
      case Kind::kFutexWake:
        return print(t, "futex wake at " + word(p.word));
      case Kind::kDeadRanks:
        return print(t, "asks which ranks are dead");
      case Kind::kAwait:
        return print(t, "looks again");
      case Kind::kLoad:
      case Kind::kStore:
      case Kind::kExchange:
      case Kind::kAdd:
      case Kind::kCas:
        if (shape.is_shared(p.word)) print(t, access(transition, p, read));
        return;
      default:
        return;
    }
  }
  void note(int thread, const char* text) override { print(thread, std::string("-- ") + text); }

 private:
  static std::string word(uint16_t word) { return shape.name_of(shape.words[word].offset); }

  static std::string access(const Transition& transition, const Pending& p, uint64_t read) {
    const std::string order = name_of(p.order), name = word(p.word);
    if (p.kind == Kind::kStore) return "store " + order + " " + name + " := " + number(p.value);
    std::string text;
    if (p.kind == Kind::kLoad) text = "load " + order + " " + name + " = " + number(read);
    if (p.kind == Kind::kExchange)
      text = "exchange " + order + " " + name + " := " + number(p.value) + ", was " + number(read);
    if (p.kind == Kind::kAdd)
      text = "add " + order + " " + name + " += " + number(p.value) + ", was " + number(read);
    if (p.kind == Kind::kCas) {
      const bool succeeds = read == p.expected;
      text = "compare-exchange " + order + " " + name + (succeeds ? " := " + number(p.value) : "") +
             ", was " + number(read) + (succeeds ? "" : ": fails");
    }
    const Store& store = model.readable(p.word, transition.option);
    text += store.thread == 0xff ? " (from the start" : " (by " + name_of_thread(store.thread);
    if (transition.option > 0) {
      const Store& newest = model.readable(p.word, 0);
      text += "; STALE: newest is " + number(newest.value) + " by " + name_of_thread(newest.thread);
    }
    return text + ")";
  }

  void print(int thread, const std::string& text) {
    std::fprintf(stderr, "%5d  %-18s %s\n", ++line_, thread < 0 ? "" : name_of_thread(thread).c_str(),
                 text.c_str());
  }
  int line_ = 0;
};

// The thread's next step; false: it cannot make one.
bool step_of(int thread, uint16_t option) {
  std::vector<Transition> steps;
  execution.options_of(thread, steps);
  execution.late_jumps(steps);
  for (const Transition& step : steps) {
    if (step.thread != thread || step.option != option) continue;
    execution.step(step);
    return true;
  }
  return false;
}

void run_path(int fate, const Path& path) {
  execution.reset(fate);
  for (const Recorded& step : path) {
    while (!execution.has_ended() && execution.num_ops(step.thread) < step.op && step_of(step.thread, 0)) {
    }
    if (execution.has_ended()) return;
    if (execution.num_ops(step.thread) != step.op || !step_of(step.thread, step.option)) {
      return execution.fail("replay",
                            "these choices are not of this program: " + name_of_thread(step.thread) +
                                " cannot make step " + std::to_string(step.op));
    }
  }
  // Steps of words that were private to the search come by themselves.
  for (bool moved = true; moved && !execution.has_ended();) {
    moved = false;
    for (int t = 0; t < execution.num_threads() && !execution.has_ended(); ++t) {
      const Kind kind = execution.thread(t).pending.kind;
      const bool is_access = kind >= Kind::kLoad && kind <= Kind::kCas;
      if (!is_access || shape.is_shared(execution.thread(t).pending.word)) continue;
      while (!execution.has_ended() && step_of(t, 0)) moved = true;
    }
  }
  if (!execution.has_ended()) execution.finish();
}

}  // namespace

Wrong replay(const Program& program, const Options& options, int fate, const Path& path, bool prints) {
  execution.open(program, options, true, true);
  if (fate < 0 || fate >= execution.num_fates()) return {"replay", "no such fate"};
  for (size_t i = 0, size = 0; i < 4 && size != shape.words.size(); ++i) {
    size = shape.words.size();
    run_path(fate, path);  // which words are shared, is known after it
  }
  if (prints) {
    if (execution.num_fates() > 1)
      std::fprintf(stderr, "fate %d:%s\n", fate, execution.fate_name(fate).c_str());
    Printer printer;
    execution.listener = &printer;
    run_path(fate, path);
    execution.listener = nullptr;
  } else {
    run_path(fate, path);
  }
  return execution.wrong();
}

}  // namespace explorer
