// The command line: which scenario, explored how; the verdict in words and as JSON.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "search.h"
#include "trace.h"

namespace explorer {

int64_t Arguments::get(const std::string& key, int64_t otherwise) const {
  used.push_back(key);
  for (const auto& [name, value] : values) {
    if (name == key) return value;
  }
  return otherwise;
}

namespace {

struct Command {
  const Scenario* scenario = nullptr;
  Arguments arguments;
  std::string mode = "exhaustive", replay;
  uint64_t executions = 0, seed = 1, max_states = 20'000'000;
  int depth = 3;
  bool reduces = true, merges = true, is_alone = false, traces = false;
};

int usage(const std::string& message, const std::vector<Scenario>& scenarios) {
  std::fprintf(
      stderr,
      "%s\nusage: PROGRAM SCENARIO [KEY=VALUE ...] [--exhaustive | --brute-force | --random N | --pct N]\n"
      "  [--depth D] [--seed S] [--replay CHOICES] [--trace] [--max-states N] [--no-reduction] "
      "[--no-merging] [--search-alone]\n"
      "scenarios:",
      message.c_str());
  for (const Scenario& scenario : scenarios) std::fprintf(stderr, " %s", scenario.name);
  std::fprintf(stderr, "\n");
  return 2;
}

// "": understood.
std::string parse(int argc, char** argv, const std::vector<Scenario>& scenarios, Command& command) {
  if (argc < 2) return "which scenario?";
  for (const Scenario& scenario : scenarios) {
    if (std::strcmp(scenario.name, argv[1]) == 0) command.scenario = &scenario;
  }
  if (command.scenario == nullptr) return std::string("no such scenario: ") + argv[1];
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::strtoull(argv[++i], nullptr, 0) : 0; };
    if (word == "--exhaustive") {
      command.mode = "exhaustive";
    } else if (word == "--brute-force") {
      command.mode = "brute force";
      command.reduces = command.merges = false;
    } else if (word == "--no-reduction") {
      command.reduces = false;
    } else if (word == "--no-merging") {
      command.merges = false;
    } else if (word == "--search-alone") {
      command.is_alone = true;
    } else if (word == "--random" || word == "--pct") {
      command.mode = word.substr(2);
      command.executions = number();
    } else if (word == "--depth") {
      command.depth = int(number());
    } else if (word == "--seed") {
      command.seed = number();
    } else if (word == "--max-states") {
      command.max_states = number();
    } else if (word == "--trace") {
      command.traces = true;
    } else if (word == "--replay" && i + 1 < argc) {
      command.mode = "replay";
      command.replay = argv[++i];
    } else if (const size_t equals = word.find('='); equals != std::string::npos && word[0] != '-') {
      command.arguments.values.emplace_back(word.substr(0, equals),
                                            std::strtoll(word.c_str() + equals + 1, nullptr, 0));
    } else {
      return "what is " + word + "?";
    }
  }
  return "";
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += c == '\n' ? ' ' : c;
  }
  return json + "\"";
}

void print_json(const Command& command, const Result& result, const Options& options, double seconds) {
  const bool is_wrong = !result.wrong.kind.empty();
  size_t shared = 0;
  for (uint16_t word = 0; word < shape.words.size(); ++word) shared += shape.is_shared(word);
  if (std::getenv("EXPLORER_WORDS") != nullptr) {
    for (uint16_t word = 0; word < shape.words.size(); ++word) {
      if (!shape.is_shared(word)) continue;
      std::fprintf(stderr, "%-50s", shape.name_of(shape.words[word].offset).c_str());
      for (size_t t = 0; t < options.threads.size(); ++t) {
        std::fprintf(stderr, " %2x", shape.words[word].access[t]);
      }
      std::fprintf(stderr, "\n");
    }
  }
  std::string outcomes;
  for (const std::string& outcome : result.outcomes)
    outcomes += (outcomes.empty() ? "" : ", ") + quoted(outcome);
  std::printf(
      "{\"scenario\": %s, \"mode\": %s, \"verdict\": \"%s\", \"kind\": %s, \"message\": %s, \"executions\": "
      "%llu, "
      "\"states\": %llu, \"merged\": %llu, \"steps\": %llu, \"depth\": %llu, \"passes\": %llu, \"words\": "
      "%zu, "
      "\"shared_words\": %zu, \"threads\": %zu, \"seconds\": %.3f, \"outcomes\": [%s]}\n",
      quoted(command.scenario->name).c_str(), quoted(command.mode).c_str(),
      is_wrong         ? "wrong"
      : result.was_cut ? "too many"
                       : "ok",
      quoted(result.wrong.kind).c_str(), quoted(result.wrong.message).c_str(),
      (unsigned long long)result.executions, (unsigned long long)result.states,
      (unsigned long long)result.merged, (unsigned long long)execution.num_steps,
      (unsigned long long)result.depth, (unsigned long long)result.passes, shape.words.size(), shared,
      options.threads.size(), seconds, outcomes.c_str());
}

Result run(const Command& command, const Program& program, const Options& options) {
  if (command.mode == "random" || command.mode == "pct") {
    return sample(program, options, {command.executions, command.seed, command.mode == "pct", command.depth});
  }
  if (command.mode != "replay")
    return explore(program, options, {command.max_states, command.reduces, command.merges, command.is_alone});
  Result result;
  if (!read_path(command.replay, result.fate, result.path)) {
    result.wrong = {"replay", "no line of choices: " + command.replay};
  } else {
    learn(program, options);  // as the search did: which words are shared decides what is an error
    result.wrong = replay(program, options, result.fate, result.path, true);
  }
  result.executions = 1;
  return result;
}

}  // namespace

int run_main(int argc, char** argv, const std::vector<Scenario>& scenarios) {
  Command command;
  const std::string misunderstood = parse(argc, argv, scenarios, command);
  if (!misunderstood.empty()) return usage(misunderstood, scenarios);
  explorer_mutation = int(command.arguments.get("mutation", 0));
  shape.clear();
  const std::unique_ptr<Program> program = command.scenario->make(command.arguments);
  const Options options = program->options();
  shape.set_granule(options.race_granule);
  shape.num_threads = int(options.threads.size());
  program->set_up();
  for (const auto& [key, value] : command.arguments.values) {
    bool is_used = false;
    for (const std::string& used : command.arguments.used) is_used |= used == key;
    if (!is_used) return usage("no such argument: " + key, scenarios);
  }
  const auto start = std::chrono::steady_clock::now();
  const Result result = run(command, *program, options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const bool is_wrong = !result.wrong.kind.empty();
  if ((is_wrong || command.traces) && command.mode != "replay" && !result.path.empty()) {
    const Wrong again = replay(*program, options, result.fate, result.path, true);
    if (again.kind != result.wrong.kind) {
      std::fprintf(stderr, "explorer: the replay ends otherwise: %s: %s\n", again.kind.c_str(),
                   again.message.c_str());
    }
    std::fprintf(stderr, "replay: --replay %s\n", write_path(result.fate, result.path).c_str());
  }
  if (is_wrong)
    std::fprintf(stderr, "wrong: %s: %s\n", result.wrong.kind.c_str(), result.wrong.message.c_str());
  print_json(command, result, options, seconds);
  return is_wrong ? 1 : result.was_cut ? 3 : 0;
}

}  // namespace explorer
