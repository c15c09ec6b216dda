// The state of an execution: saved, restored, and made into a key. Two states with one key have the same
// future. Not in the key is what only says how a thread came to where it is: the last value it was given (it
// is on the stack if it matters), and what it has looked at since its last await. That decides when it wakes,
// and a thread that wakes too often only looks again.
#include <cstring>

#include "execution.h"

namespace explorer {
namespace {

// 128 bits, not against an adversary: with 10^8 states, two that differ share a key with probability 10^-22.
class Hash {
 public:
  void add(uint64_t word) {
    a_ = mix(a_ ^ word, 0x9e3779b97f4a7c15u);
    b_ = mix(b_ + word, 0xd6e8feb86659fd93u);
  }
  void add(const void* from, size_t num_bytes) {
    const char* bytes = static_cast<const char*>(from);
    for (; num_bytes >= 16; bytes += 16, num_bytes -= 16) {
      uint64_t words[2];
      std::memcpy(words, bytes, sizeof(words));
      a_ = mix(a_ ^ words[0], words[1] ^ 0x9e3779b97f4a7c15u);
      b_ = mix(b_ + words[1], words[0] ^ 0xd6e8feb86659fd93u);
    }
    uint64_t rest[2] = {0, num_bytes};
    std::memcpy(rest, bytes, num_bytes < 8 ? num_bytes : 8);
    add(rest[0]);
    if (num_bytes > 8) {
      std::memcpy(rest, bytes + 8, num_bytes - 8);
      add(rest[0]);
    }
    add(rest[1]);
  }
  Execution::Key key() const { return {a_, b_}; }

 private:
  static uint64_t mix(uint64_t x, uint64_t y) {
    const unsigned __int128 product = (unsigned __int128)(x)*y;
    return uint64_t(product) ^ uint64_t(product >> 64) ^ (x << 32 | x >> 32);
  }
  uint64_t a_ = 0x243f6a8885a308d3u, b_ = 0x13198a2e03707344u;
};

}  // namespace

void Execution::save(std::vector<char>& to) const {
  to.clear();
  const auto add = [&to](const void* from, size_t num_bytes) {
    const char* bytes = static_cast<const char*>(from);
    to.insert(to.end(), bytes, bytes + num_bytes);
  };
  model.save(to);
  add(&victims_, sizeof(victims_));
  add(&dying_, sizeof(dying_));
  add(threads_, sizeof(ThreadState) * size_t(num_threads_));
  add(num_ops_, sizeof(uint32_t) * size_t(num_threads_));
  add(shape.arena(), shape.num_bytes());
  for (int t = 0; t < num_threads_; ++t) {
    add(&fibers_[t].stack_pointer, sizeof(char*));
    if (may_go_on(t)) add(fibers_[t].stack_pointer, fibers_[t].bytes_in_use());
  }
}

void Execution::restore(const std::vector<char>& saved) {
  const char* from = model.restore(saved.data());
  const auto take = [&from](void* to, size_t num_bytes) {
    std::memcpy(to, from, num_bytes);
    from += num_bytes;
  };
  take(&victims_, sizeof(victims_));
  take(&dying_, sizeof(dying_));
  take(threads_, sizeof(ThreadState) * size_t(num_threads_));
  take(num_ops_, sizeof(uint32_t) * size_t(num_threads_));
  take(shape.arena(), shape.num_bytes());
  for (int t = 0; t < num_threads_; ++t) {
    take(&fibers_[t].stack_pointer, sizeof(char*));
    if (may_go_on(t)) take(fibers_[t].stack_pointer, fibers_[t].bytes_in_use());
  }
  wrong_ = {};
  grew_ = false;
}

Execution::Key Execution::key() {
  const uint32_t alive = living();
  model.forget_old(alive);
  Hash hash;
  hash.add(victims_);
  hash.add(dying_);
  hash.add(shape.arena(), shape.num_bytes());
  static std::vector<uint16_t> numbers;
  uint16_t clocks_at_join[kMaxThreads];
  for (int t = 0; t < num_threads_; ++t) clocks_at_join[t] = threads_[t].clock_at_join;
  canonical_.write(alive, clocks_at_join, numbers);
  hash.add(numbers.data(), numbers.size() * sizeof(uint16_t));
  for (int t = 0; t < num_threads_; ++t) {
    const ThreadState& thread = threads_[t];
    const Pending& p = thread.pending;
    hash.add(uint64_t(p.kind) | uint64_t(p.order) << 8 | uint64_t(p.failure_order) << 16 |
             uint64_t(p.word) << 32);
    if (!may_go_on(t)) continue;
    hash.add(p.value);
    hash.add(p.expected);
    hash.add(uint64_t(thread.time_ns));
    hash.add(uint64_t(thread.phase) | uint64_t(thread.early_left) << 16 | uint64_t(thread.jumps) << 24 |
             uint64_t(options_.faults.deadline_ns > 0 && thread.has_read_clock) << 32 |
             uint64_t(p.kind == Kind::kAwait && model.has_news(t)) << 33 |
             uint64_t(p.kind == Kind::kAwait && thread.looks_cleanly) << 34);
    hash.add(fibers_[t].stack_pointer, fibers_[t].bytes_in_use());
  }
  return hash.key();
}

}  // namespace explorer
