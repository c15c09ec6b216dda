// The memory of a litmus program, and its accesses in an order of the command line.
#pragma once

#include <cstdint>

#include "explorer.h"

namespace {

struct alignas(64) Word {
  uint64_t value;
};
struct Memory {
  Word x, y, plain, second;
  Word r[4];  // what threads read
  uint32_t futex[16];
};

// Orders come from the command line, so that one program is the correct one and the broken one.
struct Orders {
  int store, load, seed, num_accesses, num_plain, first, second;
};
inline __attribute__((always_inline)) uint64_t load(const Word& word, int order) {
  switch (order) {
    case __ATOMIC_RELAXED:
      return __atomic_load_n(&word.value, __ATOMIC_RELAXED);
    case __ATOMIC_ACQUIRE:
      return __atomic_load_n(&word.value, __ATOMIC_ACQUIRE);
    default:
      return __atomic_load_n(&word.value, __ATOMIC_SEQ_CST);
  }
}
inline __attribute__((always_inline)) void store(Word& word, uint64_t value, int order) {
  switch (order) {
    case __ATOMIC_RELAXED:
      return __atomic_store_n(&word.value, value, __ATOMIC_RELAXED);
    case __ATOMIC_RELEASE:
      return __atomic_store_n(&word.value, value, __ATOMIC_RELEASE);
    default:
      return __atomic_store_n(&word.value, value, __ATOMIC_SEQ_CST);
  }
}
constexpr int kRelaxed = __ATOMIC_RELAXED;

}  // namespace
