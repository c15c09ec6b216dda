// Where steps run: on streams of a CUDA device, or, in a dry run, in threads of the host.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "steps.h"

#if defined(DCP_TARGET_CUDA)
#include <cuda_runtime.h>
#define CARD_FN __host__ __device__
#else
#define CARD_FN
#endif

namespace one_card {

#if defined(DCP_TARGET_CUDA)

inline constexpr bool kOnDevice = true;

inline cudaStream_t handle(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <class F>
__global__ void for_each_entry(const __grid_constant__ F f, int64_t num_items) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < num_items;
       i += int64_t(gridDim.x) * blockDim.x) {
    f(i);
  }
}

// f(0) .. f(num_items - 1), in any order.
template <class F>
void for_each(Stream stream, int64_t num_items, const F& f) {
  if (num_items == 0) return;
  const int64_t num_blocks = (num_items + 255) / 256;
  for_each_entry<<<unsigned(num_blocks < 256 ? num_blocks : 256), 256, 0, handle(stream)>>>(f, num_items);
  check(cudaGetLastError(), "for_each");
}

inline void copy_bytes(Stream stream, uint64_t to, uint64_t from, int64_t num_bytes) {
  check(cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size_t(num_bytes),
                        cudaMemcpyDeviceToDevice, handle(stream)),
        "copy");
}

inline void* copy_to_device(const void* from, size_t num_bytes) {
  void* to = nullptr;
  check(cudaMalloc(&to, num_bytes), "cudaMalloc");
  check(cudaMemcpy(to, from, num_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return to;
}
inline void release_memory(void* memory) { cudaFree(memory); }

CARD_FN inline uint64_t count_one(uint64_t* counter) {
#if defined(__CUDA_ARCH__)
  return atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull);
#else
  return (*counter)++;
#endif
}

inline void on_all_ranks(int num_ranks, int num_rounds, const std::function<void(int)>& round) {
  for (int i = 0; i < num_rounds; ++i) {
    for (int rank = 0; rank < num_ranks; ++rank) round(rank);
  }
}

#else

inline constexpr bool kOnDevice = false;

template <class F>
void for_each(Stream, int64_t num_items, const F& f) {
  for (int64_t i = 0; i < num_items; ++i) f(i);
}

inline void copy_bytes(Stream, uint64_t to, uint64_t from, int64_t num_bytes) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size_t(num_bytes));
}

inline void* copy_to_device(const void*, size_t) { throw std::runtime_error("a dry run has no device"); }
inline void release_memory(void*) {}

inline uint64_t count_one(uint64_t* counter) { return (*counter)++; }

// A thread for each rank.
inline void on_all_ranks(int num_ranks, int num_rounds, const std::function<void(int)>& round) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&round, rank, num_rounds] {
      for (int i = 0; i < num_rounds; ++i) round(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#endif

}  // namespace one_card
