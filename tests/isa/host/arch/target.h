// In place of csrc/arch/target.h: a warp of 32 threads of the host, for the parts of the GPU targets that
// need one. What the hardware does is played here; the rest is the shipped code (arch/gpu_bytes.h,
// arch/cuda_line.h).
#pragma once

#include <atomic>
#include <barrier>
#include <cstring>

#include "core/types.h"

#define DCP_NS gpu
#define DCP_FN inline
#define DCP_NO_UNROLL

namespace dcp::gpu::arch {

inline std::barrier<> warp_barrier(32);
inline thread_local int lane_of_thread = 0;

struct Cta {
  int thread_rank() const { return lane_of_thread; }
  int size() const { return 32; }
};
template <int N>
struct Lanes {
  int group_idx, group_count;  // of how many warps this one plays which
  int rank() const { return N == 1 ? 0 : lane_of_thread; }
  int size() const { return N; }
  int group() const { return group_idx; }
  int num_groups() const { return group_count; }
  void sync() const { warp_barrier.arrive_and_wait(); }
};
inline void sleep_ns(uint32_t) {}

struct Words16 {
  uint32_t word[4];
};
inline std::atomic<bool> was_misaligned{false};
inline std::atomic<int> num_loads_16{0}, num_loads_8{0}, num_line_stores{0}, num_stores_16{0};
template <class T>
void note(const T* at, int size) {
  if (reinterpret_cast<uint64_t>(at) % size != 0) was_misaligned = true;
}
inline constexpr bool kUnaligned16 = false, kLoadsWaitForStores = false;
inline Words16 load_16(const void* from) {
  note(from, 16);
  ++num_loads_16;
  Words16 words;
  memcpy(&words, from, 16);
  return words;
}
inline void store_16(void* to, const Words16& words) {
  note(to, 16);
  ++num_stores_16;
  memcpy(to, &words, 16);
}
inline Words16 load_8(const void* from) {
  note(from, 8);
  ++num_loads_8;
  Words16 words = {};
  memcpy(&words, from, 8);
  return words;
}
inline void store_8(void* to, const Words16& words) {
  note(to, 8);
  memcpy(to, &words, 8);
}
inline void store_multicast(void*, const Words16&) {}
template <class T>
T load_global(const T* from) {
  note(from, alignof(T));
  return *from;
}
template <class T>
T load_constant(const T* from) {
  return *from;
}
template <class T>
void store_global(T* to, T value) {
  note(to, alignof(T));
  *to = value;
}
template <class To, class From>
To bit_cast(const From& from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- for arch/cuda_line.h

inline void store_relaxed_16(void* to, const Words16& words) {
  note(to, 16);
  ++num_line_stores;
  memcpy(to, &words, 16);
}
inline Words16 load_relaxed_16(const void* from) {
  note(from, 16);
  Words16 words;
  memcpy(&words, from, 16);
  return words;
}
inline uint64_t load_relaxed_sys(const uint64_t* word) { return *word; }
inline std::atomic<int> num_against{0};
inline bool all_lanes(bool holds) {
  if (!holds) ++num_against;
  warp_barrier.arrive_and_wait();
  const bool all_hold = num_against == 0;
  warp_barrier.arrive_and_wait();
  if (lane_of_thread == 0) num_against = 0;
  warp_barrier.arrive_and_wait();
  return all_hold;
}

template <int kBytes>
class Packet;

}  // namespace dcp::gpu::arch

#include "arch/cuda_line.h"
#include "arch/gpu_bytes.h"
