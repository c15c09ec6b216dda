// What the compiler calls in code built with -fsanitize=thread, and what that code asks of the C library
// (instrumented.h). Everything goes to the execution; accesses outside the memory of the program are made at
// once.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "execution.h"

using explorer::execution;
using explorer::Kind;
using explorer::shape;

namespace {

// Before a step: clears what earlier calls of the engine have left where its frames will lie, so that states
// which are the same look the same.
__attribute__((noinline)) void clear_below() {
  char below[1536];
  std::memset(below, 0, sizeof(below));
  __asm__ volatile("" : : "r"(below) : "memory");
}

bool is_tracked(const void* p) { return execution.running >= 0 && shape.has(p); }

bool is_step(const void* p) {
  if (!is_tracked(p)) return false;
  clear_below();
  return true;
}

uint64_t park(Kind kind, uint64_t value = 0, const char* what = nullptr) {
  clear_below();
  return execution.park(kind, value, what);
}

void plain(const void* p, size_t num_bytes, bool writes) {
  if (is_tracked(p)) execution.plain(p, num_bytes, writes);
}

[[noreturn]] void not_modelled(const char* what) {
  std::fprintf(stderr, "explorer: %s: not modelled\n", what);
  std::abort();
}

}  // namespace

extern "C" {

int explorer_mutation = 0;

void __tsan_init() {}
void __tsan_func_entry(void*) {
  if (execution.running >= 0) execution.enter_function();
}
void __tsan_func_exit() {
  if (execution.running >= 0) execution.leave_function();
}

#define EXPLORER_PLAIN(bytes)                                              \
  void __tsan_read##bytes(void* p) { plain(p, bytes, false); }             \
  void __tsan_write##bytes(void* p) { plain(p, bytes, true); }             \
  void __tsan_unaligned_read##bytes(void* p) { plain(p, bytes, false); }   \
  void __tsan_unaligned_write##bytes(void* p) { plain(p, bytes, true); }   \
  void __tsan_volatile_read##bytes(void* p) { plain(p, bytes, false); }    \
  void __tsan_volatile_write##bytes(void* p) { plain(p, bytes, true); }    \
  void __tsan_read##bytes##_pc(void* p, void*) { plain(p, bytes, false); } \
  void __tsan_write##bytes##_pc(void* p, void*) { plain(p, bytes, true); }
EXPLORER_PLAIN(1)
EXPLORER_PLAIN(2)
EXPLORER_PLAIN(4)
EXPLORER_PLAIN(8)
EXPLORER_PLAIN(16)
#undef EXPLORER_PLAIN

void __tsan_read_range(void* p, size_t num_bytes) { plain(p, num_bytes, false); }
void __tsan_write_range(void* p, size_t num_bytes) { plain(p, num_bytes, true); }
void __tsan_vptr_update(void** p, void*) { plain(p, sizeof(void*), true); }
void __tsan_vptr_read(void** p) { plain(p, sizeof(void*), false); }

// The order of the program's memory is that of the model: outside of it, relaxed will do.
#define EXPLORER_ATOMIC(bits, type)                                                                          \
  type __tsan_atomic##bits##_load(const volatile type* p, int order) {                                       \
    const type* at = const_cast<const type*>(p);                                                             \
    if (!is_step(at)) return *p;                                                                          \
    return type(execution.atomic(Kind::kLoad, at, bits / 8, order, 0));                                      \
  }                                                                                                          \
  void __tsan_atomic##bits##_store(volatile type* p, type value, int order) {                                \
    type* at = const_cast<type*>(p);                                                                         \
    if (!is_step(at)) {                                                                                   \
      *p = value;                                                                                            \
      return;                                                                                                \
    }                                                                                                        \
    execution.atomic(Kind::kStore, at, bits / 8, order, value);                                              \
  }                                                                                                          \
  type __tsan_atomic##bits##_exchange(volatile type* p, type value, int order) {                             \
    type* at = const_cast<type*>(p);                                                                         \
    if (!is_step(at)) return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);                             \
    return type(execution.atomic(Kind::kExchange, at, bits / 8, order, value));                              \
  }                                                                                                          \
  type __tsan_atomic##bits##_fetch_add(volatile type* p, type value, int order) {                            \
    type* at = const_cast<type*>(p);                                                                         \
    if (!is_step(at)) return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);                              \
    return type(execution.atomic(Kind::kAdd, at, bits / 8, order, value));                                   \
  }                                                                                                          \
  type __tsan_atomic##bits##_fetch_sub(volatile type* p, type value, int order) {                            \
    return __tsan_atomic##bits##_fetch_add(p, type(0) - value, order);                                       \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* p, type* expected, type value, int order, \
                                                    int failure_order) {                                     \
    type* at = const_cast<type*>(p);                                                                         \
    const type was = *expected;                                                                              \
    if (!is_step(at)) {                                                                                   \
      return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);     \
    }                                                                                                        \
    const type found = type(execution.atomic(Kind::kCas, at, bits / 8, order, value, was, failure_order));   \
    if (found == was) return 1;                                                                              \
    *expected = found;                                                                                       \
    return 0;                                                                                                \
  }                                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* p, type* expected, type value, int order,   \
                                                  int failure_order) {                                       \
    return __tsan_atomic##bits##_compare_exchange_strong(p, expected, value, order, failure_order);          \
  }                                                                                                          \
  type __tsan_atomic##bits##_fetch_and(volatile type*, type, int) { not_modelled("fetch_and"); }             \
  type __tsan_atomic##bits##_fetch_or(volatile type*, type, int) { not_modelled("fetch_or"); }               \
  type __tsan_atomic##bits##_fetch_xor(volatile type*, type, int) { not_modelled("fetch_xor"); }
EXPLORER_ATOMIC(32, uint32_t)
EXPLORER_ATOMIC(64, uint64_t)
#undef EXPLORER_ATOMIC

uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) {
  if (is_tracked(const_cast<const uint8_t*>(p))) not_modelled("an atomic byte");
  return *p;  // the guard of a static variable
}
void __tsan_atomic_thread_fence(int) {
  if (execution.running >= 0) not_modelled("a fence");
}
void __tsan_atomic_signal_fence(int) {}

void* explorer_memcpy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes > 0) {
    plain(from, num_bytes, false);
    plain(to, num_bytes, true);
  }
  return std::memcpy(to, from, num_bytes);
}
void* explorer_memmove(void* to, const void* from, size_t num_bytes) {
  if (num_bytes > 0) {
    plain(from, num_bytes, false);
    plain(to, num_bytes, true);
  }
  return std::memmove(to, from, num_bytes);
}
void* explorer_memset(void* to, int byte, size_t num_bytes) {
  if (num_bytes > 0) plain(to, num_bytes, true);
  return std::memset(to, byte, num_bytes);
}

int explorer_clock_gettime(clockid_t clock, timespec* now) {
  if (execution.running < 0) return clock_gettime(clock, now);
  const int64_t now_ns = execution.now_ns();
  *now = {now_ns / 1000000000, now_ns % 1000000000};
  return 0;
}

int explorer_sched_yield() {
  if (execution.running >= 0) {
    clear_below();
    execution.yield();
  }
  return 0;
}

long explorer_syscall(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  const uint32_t* word = va_arg(arguments, uint32_t*);
  const int operation = va_arg(arguments, int);
  const uint32_t value = va_arg(arguments, uint32_t);
  va_end(arguments);
  if (number != SYS_futex || !is_step(word)) not_modelled("a system call");
  if (operation == FUTEX_WAIT) {
    execution.atomic(Kind::kFutexWait, word, 4, __ATOMIC_SEQ_CST, value);
  } else if (operation == FUTEX_WAKE) {
    execution.atomic(Kind::kFutexWake, word, 4, __ATOMIC_SEQ_CST, value);
  } else {
    not_modelled("a futex operation");
  }
  return 0;
}

}  // extern "C"

namespace explorer {

void await() { ::park(Kind::kAwait); }
void join() { ::park(Kind::kJoin); }
void join_all() { ::park(Kind::kJoinAll); }
int choose(int num, const char* what) {
  return num < 2 ? 0 : int(::park(Kind::kChoose, uint64_t(num), what));
}
bool has_doubt() { return execution.has_doubt(); }
uint64_t dead_ranks() { return ::park(Kind::kDeadRanks); }
bool has_ended(int thread) { return execution.thread(thread).pending.kind == Kind::kEnded; }
int this_thread() { return execution.running; }

void fail(const char* kind, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (execution.running >= 0) execution.fail_here(kind, text);
  throw Wrong{kind, text};  // from check_end
}

void note(const char* format, ...) {
  if (execution.listener == nullptr) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  execution.listener->note(execution.running, text);
}

}  // namespace explorer
