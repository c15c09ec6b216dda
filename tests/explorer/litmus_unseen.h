// What a thread has forgotten, its view has not: ways that meet in one place, and then show different things.
// They test what states are told apart by (canonical.h).
#pragma once

#include "litmus.h"

namespace {

__attribute__((noinline)) void look(const Word& word, int order) { load(word, order); }
__attribute__((noinline)) void wait_in_some_order(const Word& word, int order) {
  if (explorer::choose(2, "order") == 1) order = kRelaxed;
  while (load(word, order) == 0) explorer::await();
}
// Ends no way, but makes a state of the search.
void pause() { explorer::choose(2, "nothing"); }

// Kinds of accesses: plain store, plain load, atomic store, atomic load.
void access(Word& word, int kind) {
  if (kind == 0) word.value = 1;
  if (kind == 1) [[maybe_unused]]
    const volatile uint64_t read = word.value;
  if (kind == 2) store(word, 1, kRelaxed);
  if (kind == 3) load(word, kRelaxed);
}
// Whether the second access is ordered behind the first one, only the view of thread 1 knows. Thread 2 keeps
// the first one from being forgotten.
void unseen_race(Memory& m, int t, Orders o) {
  if (t == 0) {
    access(m.plain, o.first);
    return store(m.x, 1, o.store);
  }
  if (t == 1) wait_in_some_order(m.x, o.load);
  while (load(t == 1 ? m.x : m.y, t == 1 ? kRelaxed : o.load) == 0) explorer::await();
  pause();
  access(m.plain, o.second);
  if (t == 1) store(m.y, 1, o.store);
}
// The same of what a store has released: thread 1 has seen x, or not, when it stores to y and is gone. Thread
// 3, which may read y too, knows of x in any case.
void unseen_release(Memory& m, int t, Orders o) {
  if (t == 0) {
    m.plain.value = 1;
    return store(m.x, 1, o.store);
  }
  if (t == 1) {
    look(m.x, o.load);
    return store(m.y, 1, o.store);
  }
  if (t == 2) pause();
  while (load(t == 2 ? m.y : m.x, o.load) == 0) explorer::await();
  pause();
  if (t == 3) return look(m.y, o.load);
  m.r[2].value = m.plain.value;
}
// Thread 1 knows of the first store of thread 0, or of both; thread 2, what thread 1 knows.
void unseen_second(Memory& m, int t, Orders o) {
  if (t == 0) {
    m.plain.value = 1;
    store(m.x, 1, o.store);
    m.second.value = 1;
    return store(m.x, 2, o.store);
  }
  while (load(t == 1 ? m.x : m.y, o.load) == 0) explorer::await();
  pause();
  if (t == 1) return store(m.y, 1, o.store);
  m.r[2].value = m.plain.value + m.second.value;
}
void unseen_floor(Memory& m, int t, Orders o) {
  if (t == 0) return store(m.x, 1, kRelaxed);
  if (t == 2) {
    while (load(m.y, o.load) == 0) explorer::await();
    return look(m.x, kRelaxed);
  }
  look(m.x, kRelaxed);
  pause();
  m.r[0].value = load(m.x, kRelaxed);
  store(m.y, 1, kRelaxed);
}
// A store that is not the newest, and one that is, but not to seq_cst loads alone.
void unseen_value(Memory& m, int t, Orders) {
  if (t == 0) {
    store(m.x, uint64_t(explorer::choose(2, "value")) + 1, kRelaxed);
    return store(m.x, 3, kRelaxed);
  }
  pause();
  m.r[0].value = load(m.x, kRelaxed);
}
void unseen_order(Memory& m, int t, Orders) {
  if (t == 0) {
    store(m.x, 1, explorer::choose(2, "order") == 0 ? __ATOMIC_SEQ_CST : __ATOMIC_RELEASE);
    return store(m.y, 1, kRelaxed);
  }
  while (load(m.y, kRelaxed) == 0) explorer::await();
  pause();
  m.r[0].value = load(m.x, __ATOMIC_SEQ_CST);
}
// Equal values need no order between them when both are relaxed.
void unseen_relaxed(Memory& m, int t, Orders) {
  if (t == 0) return store(m.x, 1, explorer::choose(2, "order") == 0 ? kRelaxed : __ATOMIC_RELEASE);
  pause();
  store(m.x, 1, kRelaxed);
  m.r[0].value = load(m.x, kRelaxed);
}

}  // namespace
