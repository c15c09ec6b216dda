// Small programs of which the literature says what release / acquire lets them do: they test the engine
// itself. What each may show is in test_litmus.py.
#include "litmus.h"

#include <linux/futex.h>
#include <sys/syscall.h>

#include <string>

#include "litmus_unseen.h"

namespace {

using explorer::Arguments;
using explorer::Options;

void message_passing(Memory& m, int t, Orders o) {
  if (t == 0) {
    store(m.x, 1, kRelaxed);
    store(m.y, 1, o.store);
  } else {
    m.r[0].value = load(m.y, o.load);
    m.r[1].value = load(m.x, kRelaxed);
  }
}
void store_buffering(Memory& m, int t, Orders o) {
  store(t == 0 ? m.x : m.y, 1, o.store);
  m.r[t].value = load(t == 0 ? m.y : m.x, o.load);
}
void load_buffering(Memory& m, int t, Orders o) {
  m.r[t].value = load(t == 0 ? m.x : m.y, o.load);
  store(t == 0 ? m.y : m.x, 1, o.store);
}
void independent_reads(Memory& m, int t, Orders o) {  // of independent writes
  if (t < 2) return store(t == 0 ? m.x : m.y, 1, o.store);
  m.r[2 * t - 4].value = load(t == 2 ? m.x : m.y, o.load);
  m.r[2 * t - 3].value = load(t == 2 ? m.y : m.x, o.load);
}
void write_to_read(Memory& m, int t, Orders o) {  // causality
  if (t == 0) return store(m.x, 1, o.store);
  if (t == 1) {
    m.r[0].value = load(m.x, o.load);
    return store(m.y, 1, o.store);
  }
  m.r[1].value = load(m.y, o.load);
  m.r[2].value = load(m.x, kRelaxed);
}
void coherence(Memory& m, int t, Orders) {
  if (t == 0) {
    store(m.x, 1, kRelaxed);
    store(m.x, 2, kRelaxed);
  } else {
    m.r[0].value = load(m.x, kRelaxed);
    m.r[1].value = load(m.x, kRelaxed);
  }
}
void two_and_two_writes(Memory& m, int t, Orders o) {
  store(t == 0 ? m.x : m.y, 1, o.store);
  store(t == 0 ? m.y : m.x, 2, o.store);
  explorer::join_all();
  m.r[2 * t].value = load(t == 0 ? m.x : m.y, kRelaxed);
}
void sums(Memory& m, int t, Orders) { m.r[t].value = __atomic_fetch_add(&m.x.value, 1, __ATOMIC_RELAXED); }

// The head of a release sequence, a link, and who acquires from the link.
template <bool kIsRmw>
void release_sequence(Memory& m, int t, Orders o) {
  if (t == 0) {
    m.plain.value = 1;
    store(m.x, 1, o.store);
  } else if (t == 1) {
    while (load(m.x, kRelaxed) != 1) explorer::await();
    if (kIsRmw) {
      __atomic_fetch_add(&m.x.value, 1, __ATOMIC_RELAXED);
    } else {
      store(m.x, 2, kRelaxed);
    }
  } else {
    m.r[0].value = load(m.x, o.load);
    if (m.r[0].value == 2) m.r[1].value = m.plain.value;
  }
}

// Waits, then reads what was to come with the flag.
void flag(Memory& m, int t, Orders o) {
  if (t == 0) {
    m.plain.value = 7;
    store(m.y, 1, o.store);
  } else {
    while (load(m.y, o.load) == 0) explorer::await();
    m.r[0].value = m.plain.value;
  }
}
void never(Memory& m, int t, Orders o) {
  if (t == 1) return store(m.x, 1, o.store);
  while (load(m.y, o.load) == 0) explorer::await();
}
// As kernels wait (arch/cpu.h): in a function of its own, by sched_yield.
__attribute__((noinline)) void wait_for(const Word& word, uint64_t value, int order) {
  for (int num_pauses_ = 0; load(word, order) != value; ++num_pauses_) sched_yield();
}
// Three threads, each of which waits for the one before it; what x was when it went on.
void ring(Memory& m, int t, Orders o) {
  if (t > 0) wait_for(t == 1 ? m.y : m.r[3], 1, o.load);
  m.r[t].value = load(m.x, kRelaxed);
  store(m.x, uint64_t(t) + 1, kRelaxed);
  if (t < 2) store(t == 0 ? m.y : m.r[3], 1, o.store);
}
void lock(Memory& m, int t, Orders o) {
  for (uint64_t free = 0;
       !__atomic_compare_exchange_n(&m.x.value, &free, 1, false, __ATOMIC_ACQUIRE, kRelaxed); free = 0) {
    explorer::await();
  }
  m.r[t].value = m.plain.value++;
  store(m.x, 0, o.store);
}
// Who sees that the other has not come may enter.
void dekker(Memory& m, int t, Orders o) {
  if (o.store == __ATOMIC_SEQ_CST) {
    __atomic_exchange_n(t == 0 ? &m.x.value : &m.y.value, 1, __ATOMIC_SEQ_CST);
  } else {
    __atomic_exchange_n(t == 0 ? &m.x.value : &m.y.value, 1, __ATOMIC_ACQ_REL);
  }
  if (load(t == 0 ? m.y : m.x, o.load) == 0) m.plain.value = 1;
}

template <bool kStoresFirst>
void sleeper(Memory& m, int t, Orders) {
  uint32_t* word = m.futex;
  if (t == 0) {
    while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == 0)
      syscall(SYS_futex, word, FUTEX_WAIT, 0, nullptr, nullptr, 0);
    return;
  }
  if (!kStoresFirst) syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  __atomic_store_n(word, 1, __ATOMIC_SEQ_CST);
  if (kStoresFirst) syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}
void plain_race(Memory& m, int t, Orders) {
  if (t == 0) {
    m.plain.value = 1;
  } else {
    m.r[0].value = m.plain.value;
  }
}
void atomic_race(Memory& m, int t, Orders o) {
  if (t == 0) return store(m.x, 1, o.store);
  m.r[0].value = m.x.value;
}
// The plain access comes after the atomic one in every execution, and is not ordered behind it.
template <bool kStores>
void late_race(Memory& m, int t, Orders o) {
  if (t == 0) {
    if (kStores) {
      store(m.x, 1, kRelaxed);
    } else {
      m.r[1].value = load(m.x, kRelaxed);
    }
    store(m.y, 1, o.store);
  } else {
    while (load(m.y, o.load) == 0) explorer::await();
    if (kStores) {
      m.r[0].value = m.x.value;
    } else {
      m.x.value = 1;
    }
  }
}
// Two threads of one rank.
void joined(Memory& m, int t, Orders) {
  if (t == 0) m.plain.value = 5;
  explorer::join();
  m.r[t].value = m.plain.value;
}
void choices(Memory& m, int t, Orders) { m.r[t].value = uint64_t(explorer::choose(3, "a number")); }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}
// Rank 0 may die, or be late: 1: the flag came, 2: the deadline.
void patience(Memory& m, int t, Orders o) {
  if (t == 0) {
    store(m.x, 1, kRelaxed);
    return store(m.y, 1, o.store);
  }
  for (const int64_t start = now_ns(); load(m.y, o.load) == 0; explorer::await()) {
    if (now_ns() - start <= 1000) continue;
    m.r[0].value = 2;
    m.r[1].value = explorer::dead_ranks();
    return;
  }
  m.r[0].value = 1;
}

// A program by its number: each thread makes a few random accesses. With num_plain some of them are plain,
// there is a join between them, and each thread tells the last value that it has read, and whether a plain
// load has raced.
void random_accesses(Memory& m, int t, Orders o) {
  auto draw = [state = uint64_t(o.seed) * 8 + uint64_t(t)](int end) mutable {
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return int((x ^ (x >> 31)) % uint64_t(end));
  };
  uint64_t seen = 0;
  for (int i = 0; i < o.num_accesses; ++i) {
    if (o.num_plain > 0 && i == o.num_accesses / 2) explorer::join();
    Word& word = draw(2) == 0 ? m.x : m.y;
    const int kind = draw(6 + o.num_plain), order = draw(3);
    const uint64_t value = uint64_t(10 * t + i + 1);
    uint64_t read = 0, expected = uint64_t(draw(2));
    if (kind < 2) {
      read = load(word, order == 0 ? kRelaxed : order == 1 ? __ATOMIC_ACQUIRE : __ATOMIC_SEQ_CST);
    } else if (kind < 4) {
      store(word, value, order == 0 ? kRelaxed : order == 1 ? __ATOMIC_RELEASE : __ATOMIC_SEQ_CST);
    } else if (kind >= 6) {
      // Each of the two has one thread that stores to it: what races is a load, and that is a doubt.
      volatile uint64_t& plain = order == 0 ? m.plain.value : m.second.value;
      if (t == (order == 0 ? 0 : 1)) {
        plain = value;
      } else {
        [[maybe_unused]] const uint64_t forgotten = plain;
      }
      continue;
    } else if (kind == 4) {
      read = order == 0 ? __atomic_fetch_add(&word.value, value, __ATOMIC_RELAXED)
                        : __atomic_fetch_add(&word.value, value, __ATOMIC_ACQ_REL);
    } else {
      read = expected;
      __atomic_compare_exchange_n(&word.value, &read, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    // What a thread forgets, the state must not.
    seen = o.num_plain > 0 ? read : seen * 100 + read;
  }
  if (o.num_plain > 0) {
    explorer::join_all();
    seen = seen * 2 + (explorer::has_doubt() ? 1 : 0);
  }
  m.r[t].value = seen;
}

// 1: it came, 2: the deadline passed.
__attribute__((noinline)) uint64_t came_in_time(const Word& word, int order) {
  int num_pauses_ = 0;
  const int64_t start = now_ns();
  for (; load(word, order) == 0; ++num_pauses_) {
    if (now_ns() - start > 1000) return 2;
    sched_yield();
  }
  return 1;
}
// Thread 0 waits for what never comes, and then tells thread 1, which waits too.
void give_up(Memory& m, int t, Orders o) {
  m.r[t].value = came_in_time(t == 0 ? m.y : m.x, o.load);
  if (t == 0) store(m.x, 1, o.store);
}

using Body = void (*)(Memory&, int, Orders);

class Litmus : public explorer::Program {
 public:
  Litmus(const Arguments& given, Body body, int num_threads)
      : body_(body),
        orders_{int(given.get("store", __ATOMIC_RELEASE)), int(given.get("load", __ATOMIC_ACQUIRE)),
                int(given.get("program", 0)), int(given.get("accesses", 3)),
                int(given.get("plain", 0)), int(given.get("first", 0)), int(given.get("second", 0))} {
    for (int t = 0; t < num_threads; ++t)
      options_.threads.push_back({given.get("one_rank", 0) != 0 ? 0 : t, t});
    options_.counters_carry_knowledge = true;
    options_.races_are_doubts = orders_.num_plain > 0;
    options_.allows_unordered_stores = given.get("unordered", 0) != 0;
    options_.faults = {uint64_t(given.get("mortal", 0)), int(given.get("deaths", 0)),
                       given.get("deadline", 0), int(given.get("early", 0))};
  }
  Options options() const override { return options_; }
  void set_up() override { memory_ = explorer::allocate_array<Memory>(1, "memory"); }
  void run(int thread) const override { body_(*memory_, thread, orders_); }
  // What the threads read.
  std::string outcome() const override {
    std::string text;
    for (const Word& word : memory_->r) text += (text.empty() ? "" : " ") + std::to_string(word.value);
    return text;
  }

 private:
  const Body body_;
  const Orders orders_;
  Options options_;
  Memory* memory_ = nullptr;
};

template <Body kBody, int kThreads>
std::unique_ptr<explorer::Program> make(const Arguments& given) {
  return std::make_unique<Litmus>(given, kBody, kThreads);
}

}  // namespace

int main(int argc, char** argv) {
  return explorer::run_main(argc, argv,
                            {{"mp", make<message_passing, 2>},
                             {"sb", make<store_buffering, 2>},
                             {"lb", make<load_buffering, 2>},
                             {"iriw", make<independent_reads, 4>},
                             {"wrc", make<write_to_read, 3>},
                             {"corr", make<coherence, 2>},
                             {"2+2w", make<two_and_two_writes, 2>},
                             {"sums", make<sums, 3>},
                             {"rmw_sequence", make<release_sequence<true>, 3>},
                             {"store_sequence", make<release_sequence<false>, 3>},
                             {"flag", make<flag, 2>},
                             {"never", make<never, 2>},
                             {"lock", make<lock, 2>},
                             {"ring", make<ring, 3>},
                             {"random2", make<random_accesses, 2>},
                             {"random3", make<random_accesses, 3>},
                             {"dekker", make<dekker, 2>},
                             {"sleeper", make<sleeper<true>, 2>},
                             {"lost_wakeup", make<sleeper<false>, 2>},
                             {"plain_race", make<plain_race, 2>},
                             {"atomic_race", make<atomic_race, 2>},
                             {"late_load", make<late_race<true>, 2>},
                             {"late_store", make<late_race<false>, 2>},
                             {"unseen_race", make<unseen_race, 3>},
                             {"unseen_release", make<unseen_release, 4>},
                             {"unseen_second", make<unseen_second, 3>},
                             {"unseen_floor", make<unseen_floor, 3>},
                             {"unseen_value", make<unseen_value, 2>},
                             {"unseen_order", make<unseen_order, 2>},
                             {"unseen_relaxed", make<unseen_relaxed, 2>},
                             {"joined", make<joined, 2>},
                             {"choices", make<choices, 2>},
                             {"patience", make<patience, 2>},
                             {"give_up", make<give_up, 2>}});
}
