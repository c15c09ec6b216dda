// CUDA target: threads, launch, order, time, conversions. Compiled by nvcc; the rest, which AMD shares, is in
// gpu_numbers.h and gpu_bytes.h.
//
// Every pointer that comes here is into global memory, so the PTX says `.global`. Loads of the symmetric
// region are never `.nc` (ld.global.nc, __ldg): that path keeps lines which a peer has overwritten.
#pragma once

#if !defined(__CUDACC__)
#error "the CUDA target is compiled by nvcc (-x cu)"
#endif

#include <cuda_runtime.h>

#include <cstdio>

#include "core/types.h"

#define DCP_FN __device__ __forceinline__
// Inlined too: a real call would put every local that is passed by reference into local memory.
#define DCP_OUTLINE __device__ __forceinline__
// On a declaration of either, whose definition comes later.
#define DCP_DECL __device__
// Before a loop that seldom runs more than once a thread: the compiler would make four copies of its body.
#define DCP_NO_UNROLL _Pragma("unroll 1")
#define DCP_UNROLL_LOADS

namespace dcp::DCP_NS::arch {

template <class T>
DCP_FN T* pointer_to(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
template <class T>
DCP_FN T* pointer_to(T* p) {
  return p;
}
template <class T>
DCP_FN T load_constant(const T* p) {
  return *p;
}

// ---- threads

// 16 warps: a block has enough loads in flight to be of use when there are few channels, and one barrier is
// still cheap. It leaves 128 registers to a thread; when tests/isa finds spills, 256 threads are the way out.
inline constexpr int kNumThreads = 512;

class Cta {
 public:
  DCP_FN Cta(int index, void* shared) : index_(index), shared_(shared) {}
  DCP_FN int index() const { return index_; }
  DCP_FN int thread_rank() const { return int(threadIdx.x); }
  DCP_FN int size() const { return kNumThreads; }
  DCP_FN void sync() const { __syncthreads(); }
  // The value that thread 0 holds; also a sync.
  DCP_FN int broadcast(int value) const {
    __shared__ int word;
    if (threadIdx.x == 0) word = value;
    __syncthreads();
    value = word;
    __syncthreads();  // all have read it before the next broadcast
    return value;
  }
  // The CTA's shared memory, one object of the type that the kernel names.
  template <class S>
  DCP_FN S& shared() const {
    return *static_cast<S*>(shared_);
  }

 private:
  int index_;
  void* shared_;
};

// The CTA's threads in groups of N that can shuffle: warps, or each thread by itself.
template <int N>
class Lanes {
 public:
  static_assert(N == 32 || N == 1, "a group is a warp, or a thread by itself");
  static constexpr int kMaxGroups = kNumThreads / N;
  DCP_FN explicit Lanes(const Cta&) {}
  DCP_FN int rank() const { return int(threadIdx.x % N); }
  DCP_FN int size() const { return N; }
  DCP_FN int group() const { return int(threadIdx.x / N); }
  DCP_FN int num_groups() const { return kMaxGroups; }
  DCP_FN void sync() const {
    if constexpr (N > 1) __syncwarp();
  }
  // The value that lane 0 holds; also a sync, which a shuffle alone is not.
  DCP_FN int broadcast(int value) const {
    sync();
    return N > 1 ? __shfl_sync(0xffffffffu, value, 0) : value;
  }
};

// ---- launch

template <class Kernel>
__global__ void __launch_bounds__(kNumThreads, 1)
    kernel_entry(const __grid_constant__ typename Kernel::Params params, int first_channel) {
  __shared__ typename Kernel::Shared shared;
  // What went wrong is in the fault record: the host has gone on long before this returns.
  Kernel::run(Cta(first_channel + int(blockIdx.x), &shared), params);
}

// Makes a device this thread's current one, if it is not. Who calls sees to what was current before: to set
// that back here would make a context on a device that has none.
inline cudaError_t use_device(int device) {
  int current = -1;
  const cudaError_t error = cudaGetDevice(&current);
  return error != cudaSuccess || current == device ? error : cudaSetDevice(device);
}

// Of this thread.
inline thread_local cudaError_t last_launch_error = cudaSuccess;
inline void launch_fault(char* text, size_t size) {
  std::snprintf(text, size, "%s: %s", cudaGetErrorName(last_launch_error),
                cudaGetErrorString(last_launch_error));
}

// Enqueues Kernel::run for the channels of `launch`, a block each, on its stream. Without channels it loads
// the kernel: to load one later, while a kernel of this process waits for a peer, could wait for that one.
template <class Kernel>
inline Status launch(const typename Kernel::Params& params, const Launch& launch) {
  cudaError_t error = use_device(launch.device);
  if (error == cudaSuccess && launch.end_channel <= launch.first_channel) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, kernel_entry<Kernel>);
  } else if (error == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(launch.end_channel - launch.first_channel));
    config.blockDim = dim3(kNumThreads);
    config.stream = static_cast<cudaStream_t>(launch.stream);
    error = cudaLaunchKernelEx(&config, kernel_entry<Kernel>, params, int(launch.first_channel));
  }
  if (error == cudaSuccess) return Status::kOk;
  last_launch_error = error;
  cudaGetLastError();  // forgets it: else the caller's next call would report it as its own
  return Status::kLaunchFailed;
}

// As much of a kernel as it takes to see whether the module has code for a device.
struct NoKernel {
  struct Params {};
  struct Shared {};
  static DCP_FN Status run(const Cta&, const Params&) { return Status::kOk; }
};

// A template, so that only who asks compiles the kernel that it asks about.
template <class Kernel = NoKernel>
inline void device_fault(int device, char* text, size_t size) {
  text[0] = '\0';
  int driver = 0, num_devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    std::snprintf(text, size,
                  "an NVIDIA driver must be installed (there is no libcuda.so.1, or it has no version)");
    return;
  }
  const cudaError_t counted = cudaGetDeviceCount(&num_devices);
  if (counted == cudaErrorInsufficientDriver) {
    std::snprintf(
        text, size,
        "the NVIDIA driver must support CUDA %d.%d, which this module was built with (it supports %d.%d: "
        "update it)",
        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000, driver % 1000 / 10);
  } else if (counted != cudaSuccess) {
    std::snprintf(text, size, "the NVIDIA driver must find a device (%s: %s)", cudaGetErrorName(counted),
                  cudaGetErrorString(counted));
  } else if (device < 0 || device >= num_devices) {
    std::snprintf(text, size, "device must be below the number of devices, %d (got %d)", num_devices, device);
  } else {
    cudaFuncAttributes attributes;
    cudaError_t error = use_device(device);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel_entry<Kernel>);
    if (error == cudaSuccess) return;
    cudaGetLastError();
    cudaDeviceProp found = {};
    cudaGetDeviceProperties(&found, device);
    std::snprintf(
        text, size,
        "device %d must run this module's code (%s, compute capability %d.%d: %s; setup.py says what it was "
        "built for)",
        device, found.name, found.major, found.minor, cudaGetErrorName(error));
  }
}

// ---- order

#define DCP_LOAD(name, instruction)                      \
  template <class T>                                     \
  DCP_FN T name(const T* word) {                         \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);     \
    if constexpr (sizeof(T) == 8) {                      \
      uint64_t bits;                                     \
      asm volatile(instruction ".b64 %0, [%1];"          \
                   : "=l"(bits)                          \
                   : "l"(__cvta_generic_to_global(word)) \
                   : "memory");                          \
      return T(bits);                                    \
    } else {                                             \
      uint32_t bits;                                     \
      asm volatile(instruction ".b32 %0, [%1];"          \
                   : "=r"(bits)                          \
                   : "l"(__cvta_generic_to_global(word)) \
                   : "memory");                          \
      return T(bits);                                    \
    }                                                    \
  }
#define DCP_STORE(name, instruction)                                                                        \
  template <class T>                                                                                        \
  DCP_FN void name(T* word, T value) {                                                                      \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);                                                        \
    if constexpr (sizeof(T) == 8) {                                                                         \
      asm volatile(instruction ".b64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(uint64_t(value)) \
                   : "memory");                                                                             \
    } else {                                                                                                \
      asm volatile(instruction ".b32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(uint32_t(value)) \
                   : "memory");                                                                             \
    }                                                                                                       \
  }
DCP_LOAD(load_acquire_sys, "ld.acquire.sys.global")
DCP_LOAD(load_relaxed_sys, "ld.relaxed.sys.global")
DCP_STORE(store_release_sys, "st.release.sys.global")
DCP_STORE(store_relaxed_sys, "st.relaxed.sys.global")
#undef DCP_LOAD
#undef DCP_STORE

// A look that finds nothing orders as much as one that does, and a release costs no more than what it waits
// for.
template <class T, class Is>
DCP_FN T load_acquire_if_sys(const T* word, const Is&) {
  return load_acquire_sys(word);
}
template <class T>
DCP_FN void store_behind_sys(T* word, T value) {
  store_release_sys(word, value);
}

// A load that comes after all earlier loads of this thread: an acquire load alone orders what follows it.
template <class T>
DCP_FN T load_after_reads_sys(T* word) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  return load_acquire_sys(word);
}

// Of this device only: on words of the own rank.
template <class T>
DCP_FN T fetch_add(T* word, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(word)), "l"(uint64_t(value))
                 : "memory");
    return T(before);
  } else {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(word)), "r"(uint32_t(value))
                 : "memory");
    return T(before);
  }
}
// True when this call changed *word from `expected` to `desired`.
DCP_FN bool compare_exchange_sys(uint64_t* word, uint64_t expected, uint64_t desired) {
  uint64_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(word)), "l"(expected), "l"(desired)
               : "memory");
  return before == expected;
}

// All stores of the CTA to peers are complete before a flag that follows. Release is cumulative: the barrier
// orders the other threads' stores before thread 0, and its release store orders them before the flag.
DCP_FN void publish_done(const Cta& cta) { cta.sync(); }
// The same of stores to anywhere, before a `fetch_add`.
DCP_FN void stores_done(const Cta& cta) { cta.sync(); }

// Raises a peer's flag. Nobody sleeps on a GPU, so no doorbell is rung.
DCP_FN void signal_flag(Flag* flag, uint64_t value, Doorbell*) { store_release_sys(&flag->value, value); }
DCP_FN void signal_flag_behind(Flag* flag, uint64_t value, Doorbell* doorbell) {
  signal_flag(flag, value, doorbell);
}

// ---- multicast

struct Words16 {
  uint32_t word[4];
};

// One store that the switch between the GPUs gives to all of them: sm_90 and later. Its address is good for
// multimem instructions alone (PTX ISA 8.2.3), and has to be a multiple of 16.
inline constexpr bool kHasMulticast = true;
DCP_FN void store_multicast(void* to, const Words16& words) {
  asm volatile(
      "multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
      "f"(__uint_as_float(words.word[0])), "f"(__uint_as_float(words.word[1])),
      "f"(__uint_as_float(words.word[2])), "f"(__uint_as_float(words.word[3]))
      : "memory");
}
// Raises the flags of all ranks, this rank's own included.
DCP_FN void multicast_flag(Flag* flag, uint64_t value) {
  asm volatile("multimem.st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(&flag->value)),
               "l"(value)
               : "memory");
}

// Readers load at another address than the one that multicast stores to. To the memory model two addresses of
// one location are like two proxies (PTX ISA 8.6): release and acquire do not order them without this fence
// between the store and the load (8.9.5). It holds for the thread that executes it; so every thread that
// stored does, and every thread that may load. Where the two lie in different kernels of a stream, or a
// reader's kernel ends before the next store, the end of the kernel does the same (8.9.4).
DCP_FN void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// publish_done for stores that went to the buffers of all ranks.
DCP_FN void broadcast_done(const Cta& cta, bool uses_multicast) {
  if (uses_multicast) fence_aliases();
  publish_done(cta);
}
// On the other side, in every thread, after the flag.
DCP_FN void broadcast_arrived(bool uses_multicast) {
  if (uses_multicast) fence_aliases();
}

// ---- packets

// 16 bytes in one access, which the memory model does not tear: `.b128` (PTX ISA 8.3, sm_70). A vector of
// four words would be four accesses to it, though it is the same instruction.
DCP_FN void store_relaxed_16(void* to, const Words16& words) {
  const uint64_t low = uint64_t(words.word[1]) << 32 | words.word[0];
  const uint64_t high = uint64_t(words.word[3]) << 32 | words.word[2];
  asm volatile("{ .reg .b128 both; mov.b128 both, {%1, %2}; st.relaxed.sys.global.b128 [%0], both; }" ::"l"(
                   __cvta_generic_to_global(to)),
               "l"(low), "l"(high)
               : "memory");
}
DCP_FN Words16 load_relaxed_16(const void* from) {
  uint64_t low, high;
  asm volatile("{ .reg .b128 both; ld.relaxed.sys.global.b128 both, [%2]; mov.b128 {%0, %1}, both; }"
               : "=l"(low), "=l"(high)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return {{uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)}};
}

// Payload and flag that arrive together. What makes them:
//
//   8     one access of 8 bytes, which the PTX memory model does not tear; on any link
//   16    one access of 16 bytes, likewise
//   128   nothing in the memory model: a line (cuda_line.h)
template <int kBytes>
class Packet {
 public:
  static_assert(kBytes == 8 || kBytes == 16);
  using Lanes = arch::Lanes<1>;
  static constexpr int kPayload = kBytes - 4, kPerCall = 1;

  template <class Part>
  static DCP_FN void store(const Lanes&, void* packet, int, uint32_t flag, const Part& part) {
    Words16 words = part(0, 0);
    if constexpr (kBytes == 8) {
      store_relaxed_sys(static_cast<uint64_t*>(packet), uint64_t(flag) << 32 | words.word[0]);
    } else {
      words.word[3] = flag;
      store_relaxed_16(packet, words);
    }
  }

  template <class Put>
  static DCP_FN bool try_load(const Lanes&, const void* packet, int, uint32_t flag, const Put& put) {
    if constexpr (kBytes == 8) {
      const uint64_t both = load_relaxed_sys(static_cast<const uint64_t*>(packet));
      if (uint32_t(both >> 32) != flag) return false;
      put(0, 0, Words16{{uint32_t(both)}});
    } else {
      const Words16 words = load_relaxed_16(packet);
      if (words.word[3] != flag) return false;
      put(0, 0, words);
    }
    return true;
  }

  static DCP_FN bool bear(const void* packet, int, uint32_t flag) {
    return load_relaxed_sys(static_cast<const uint32_t*>(packet) + kBytes / 4 - 1) == flag;
  }
};
inline constexpr int kMaxPacketBytes = 128;

// For cuda_line.h: whether it holds in every thread of the warp, all of which come here.
DCP_FN bool all_lanes(bool holds) { return __all_sync(0xffffffffu, holds); }

// ---- time

// The clock that all GPUs of a host share. It ticks once in 32 ns to 1 us.
DCP_FN int64_t now_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// About `ns`, at most twice that; at most 1 ms.
DCP_FN void sleep_ns(uint32_t ns) { __nanosleep(ns); }

// ---- for gpu_numbers.h and gpu_bytes.h

// 16 bytes at a 16-byte boundary of global memory, in one instruction.
inline constexpr bool kUnaligned16 = false, kLoadsWaitForStores = false;
DCP_FN Words16 load_16(const void* from) {
  __builtin_assume(__isGlobal(from));
  const uint4 v = *static_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}
DCP_FN void store_16(void* to, const Words16& words) {
  // Asm: nvcc takes an assignment of a uint4 apart, and in the merge's output did not put it together again.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3])
               : "memory");
}
// The same of 8 bytes.
DCP_FN Words16 load_8(const void* from) {
  __builtin_assume(__isGlobal(from));
  const uint2 v = *static_cast<const uint2*>(from);
  return {{v.x, v.y}};
}
DCP_FN void store_8(void* to, const Words16& words) {
  __builtin_assume(__isGlobal(to));
  *static_cast<uint2*>(to) = make_uint2(words.word[0], words.word[1]);
}
template <class T>
DCP_FN T load_global(const T* from) {
  __builtin_assume(__isGlobal(from));
  return *from;
}
template <class T>
DCP_FN void store_global(T* to, T value) {
  __builtin_assume(__isGlobal(to));
  *to = value;
}

DCP_FN float half_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// Two numbers, rounded to nearest even, as they lie in memory: `low` first.
DCP_FN uint32_t pack_half(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
DCP_FN uint32_t pack_bfloat16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace dcp::DCP_NS::arch

#include "arch/cuda_line.h"
