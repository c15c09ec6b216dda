// Accesses to memory: how they arrive from a thread, and what each does when its turn has come.
#include "execution.h"

#include <cstring>

namespace explorer {

namespace {

constexpr int kRelaxed = 0, kConsume = 1, kAcquire = 2, kRelease = 3, kAcqRel = 4, kSeqCst = 5;
bool acquires(int order) { return order == kConsume || order == kAcquire || order >= kAcqRel; }
bool releases(int order) { return order >= kRelease; }

Pending relaxed(Pending p) {
  p.order = kRelaxed;
  return p;
}

}  // namespace

void Execution::plain(const void* p, size_t num_bytes, bool writes) {
  const int t = running;
  const uint32_t offset = shape.offset_of(p);
  threads_[t].has_read_clock = false;
  const uint32_t unit = 1u << shape.granule_shift();
  for (uint32_t at = offset / unit * unit; at < offset + num_bytes; at += unit) {
    if (shape.granule_at(at) == kNone) shape.add_granule(at);
    const bool is_new = shape.add_plain(shape.granule_at(at), t, writes);
    if ((is_new && !may_grow_) || !model.has_granule(shape.granule_at(at))) {
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
  if (kind == Kind::kAdd && value == 0 && !options_.counters_carry_knowledge) bits = kReads | kNudges;
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

}  // namespace explorer
