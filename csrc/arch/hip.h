// HIP target (gfx942, gfx950): threads, launch, order, time, conversions. Compiled by clang, once for each
// device and once for the host, with its builtins only: no ROCm header, no device library. What NVIDIA shares
// is in gpu_numbers.h and gpu_bytes.h; what the host does with the compiled kernels, in hip_runtime.cpp.
//
// Every pointer that comes here is into global memory. Generic addresses would cost `flat` instructions,
// which also occupy the path to shared memory; so accesses go through Global<T>, or through a pointer that
// pointer_to() made. tests/isa finds no flat instruction in any kernel.
//
// Three facts about these GPUs and their compilers shape this file; tests/isa holds it to them:
//   1. LLVM up to 22 leaves out the wait after `buffer_wbl2` in a wave that has no store of its own in flight
//      (llvm-project #178316). So each release waits by itself: drain_stores().
//   2. The compiler does not see stores in inline asm, and does not wait for them. So there are none.
//   3. s_barrier does not wait for the stores of the waves that arrive: after it, a release store of one wave
//      covers that wave's stores only. So publish_done() drains in every thread, before the barrier.
#pragma once

#if !defined(__HIP__)
#error "the HIP target is compiled by clang (-x hip)"
#endif

#include "arch/hip_runtime.h"
#include "core/types.h"

#define DCP_FN __attribute__((device)) inline __attribute__((always_inline))
// Inlined too: a real call would put every local that is passed by reference into scratch memory.
#define DCP_OUTLINE DCP_FN
// On a declaration of either, whose definition comes later.
#define DCP_DECL __attribute__((device))
// Before a loop that seldom runs more than once a thread: the compiler would make four copies of its body.
#define DCP_NO_UNROLL _Pragma("unroll 1")
// Before a loop whose loads are better in flight together: left alone, each waits for the one before.
#define DCP_UNROLL_LOADS _Pragma("unroll 4")

namespace dcp::DCP_NS::arch {

#if defined(__HIP_DEVICE_COMPILE__)
template <class T>
using Global = __attribute__((address_space(1))) T;
#else
template <class T>
using Global = T;  // the host reads kernels without compiling them, and has one address space
#endif
template <class T>
DCP_FN Global<T>* global(T* p) {
  return (Global<T>*)p;  // only a C cast changes the address space
}

// A pointer that the compiler knows to be into global memory: from a number, or from another pointer, which
// goes through a number, as a cast from generic to global and back would be dropped as no cast at all.
template <class T>
DCP_FN T* pointer_to(uint64_t address) {
  return (T*)(Global<T>*)address;
}
template <class T>
DCP_FN T* pointer_to(T* p) {
  return pointer_to<T>(reinterpret_cast<uint64_t>(p));
}
// What nobody writes while a kernel runs. Where all lanes load the same, that is a scalar load, and no
// acquire makes the compiler load it again.
template <class T>
DCP_FN T load_constant(const T* p) {
  return *(const __attribute__((address_space(4))) T*)p;
}

// ---- threads

// 8 waves, two on each SIMD: enough loads in flight to be of use when there are few channels.
inline constexpr int kNumThreads = 512;

class Cta {
 public:
  DCP_FN Cta(int index, void* shared) : index_(index), shared_(shared) {}
  DCP_FN int index() const { return index_; }
  DCP_FN int thread_rank() const { return int(__builtin_amdgcn_workitem_id_x()); }
  DCP_FN int size() const { return kNumThreads; }
  // Orders shared memory, and global memory as seen by this block. Not what peers see: fact 3.
  DCP_FN void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  }
  // The value that thread 0 holds; also a sync.
  DCP_FN int broadcast(int value) const {
    static __attribute__((shared)) int word;
    if (thread_rank() == 0) word = value;
    sync();
    value = word;
    sync();  // all have read it before the next broadcast
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

// The CTA's threads in groups of N that can shuffle: parts of a wave of 64, which runs in step, or each
// thread by itself. The halves of a wave may go different ways: one after the other then, each with its own
// lanes alone. So a half reads lanes of its own only (those of the other would read as 0), shared memory of
// its own only, and never waits for what the other half is yet to do: that would be for ever.
template <int N>
class Lanes {
 public:
  static_assert(N == 32 || N == 64 || N == 1);
  static constexpr int kMaxGroups = kNumThreads / N;
  DCP_FN explicit Lanes(const Cta& cta) : thread_(cta.thread_rank()) {}
  DCP_FN int rank() const { return thread_ % N; }
  DCP_FN int size() const { return N; }
  DCP_FN int group() const { return thread_ / N; }
  DCP_FN int num_groups() const { return kMaxGroups; }
  // No instruction: shared memory serves a wave in order. It keeps the compiler from reordering.
  DCP_FN void sync() const {
    if constexpr (N == 1) return;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }
  // The value that lane 0 holds; also a sync.
  DCP_FN int broadcast(int value) const {
    if constexpr (N == 1) return value;
    sync();
    const int first_lane = thread_ % 64 / N * N;
    return __builtin_amdgcn_ds_bpermute(first_lane * 4, value);
  }

 private:
  int thread_;
};

// ---- launch

template <class Kernel>
__attribute__((global)) __attribute__((amdgpu_flat_work_group_size(kNumThreads, kNumThreads))) void
kernel_entry(const typename Kernel::Params params, int first_channel) {
  static __attribute__((shared)) typename Kernel::Shared shared;
  // What went wrong is in the fault record: the host has gone on long before this returns.
  Kernel::run(Cta(first_channel + int(__builtin_amdgcn_workgroup_id_x()), &shared), params);
}

// "", or why `device` runs no kernel of this build.
inline void device_fault(int device, char* text, size_t size) {
  hip_runtime::device_fault(device, text, size);
}

inline void launch_fault(char* text, size_t size) { hip_runtime::launch_fault(text, size); }

// Enqueues Kernel::run for the channels of `launch`, a block each, on its stream. Without channels it loads
// the kernel: to load one later, while a kernel of this process waits for a peer, could wait for that one.
template <class Kernel>
inline Status launch(const typename Kernel::Params& params, const Launch& launch) {
  return hip_runtime::launch(reinterpret_cast<const void*>(&kernel_entry<Kernel>), launch, kNumThreads,
                             &params);
}

// ---- order

// Waits until all that this wave stored has arrived, and what it loaded. Asm, because the compiler drops a
// wait that it holds for needless (fact 1).
DCP_FN void drain_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
// Writes back what the L2 holds of these and earlier stores, and waits for it.
DCP_FN void release_fence_sys() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  drain_stores();
}

template <class T>
DCP_FN T load_acquire_sys(const T* word) {
  return __hip_atomic_load(global(word), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
DCP_FN T load_relaxed_sys(const T* word) {
  return __hip_atomic_load(global(word), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
DCP_FN void store_relaxed_sys(T* word, T value) {
  __hip_atomic_store(global(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
DCP_FN void store_release_sys(T* word, T value) {
  release_fence_sys();
  store_relaxed_sys(word, value);
}

// An acquire invalidates what the L2 of the whole die holds of other devices' memory, and a release writes it
// back: both cost others too. So looks that find nothing are relaxed, and where all that is to come before a
// store was loaded, or went past the caches (*_sys), a wait is enough.
template <class T, class Is>
DCP_FN T load_acquire_if_sys(const T* word, const Is& is) {
  const T value = load_relaxed_sys(word);
  if (is(value)) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  return value;
}
template <class T>
DCP_FN void store_behind_sys(T* word, T value) {
  drain_stores();
  store_relaxed_sys(word, value);
}

// A load that comes after all earlier loads of this thread: an acquire load alone orders what follows it.
template <class T>
DCP_FN T load_after_reads_sys(T* word) {
  drain_stores();
  return load_relaxed_sys(word);
}

// Of this device only: on words of the own rank.
template <class T>
DCP_FN T fetch_add(T* word, T value) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  drain_stores();
  // The word is in uncached memory and of interest to several dies: the atomic goes past their L2s.
  const T before = __hip_atomic_fetch_add(global(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  return before;
}
// True when this call changed *word from `expected` to `desired`.
DCP_FN bool compare_exchange_sys(uint64_t* word, uint64_t expected, uint64_t desired) {
  release_fence_sys();
  return __hip_atomic_compare_exchange_strong(global(word), &expected, desired, __ATOMIC_ACQUIRE,
                                              __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}

// All stores of the CTA to peers are complete before a flag that follows: every wave waits until its own have
// reached the L2, which the block shares; the release of the flag then writes them back.
static_assert(kMaxRanks <= 64);  // flags are raised by one wave, whose drain and release they need
DCP_FN void publish_done(const Cta& cta) {
  drain_stores();
  cta.sync();
}
// The same of stores to anywhere, before a `fetch_add`: it writes back what has reached the L2.
DCP_FN void stores_done(const Cta& cta) { publish_done(cta); }

// Raises a peer's flag. Nobody sleeps on a GPU, so no doorbell is rung.
DCP_FN void signal_flag(Flag* flag, uint64_t value, Doorbell*) { store_release_sys(&flag->value, value); }
DCP_FN void signal_flag_behind(Flag* flag, uint64_t value, Doorbell*) {
  store_behind_sys(&flag->value, value);
}

// ---- multicast

struct Words16 {
  uint32_t word[4];
};

// These GPUs have no store that reaches several of them. What asks for it is never compiled into a kernel.
inline constexpr bool kHasMulticast = false;
DCP_FN void store_multicast(void*, const Words16&) {}
DCP_FN void multicast_flag(Flag*, uint64_t) {}

// publish_done for stores that went to the buffers of all ranks.
DCP_FN void broadcast_done(const Cta& cta, bool) { publish_done(cta); }
// On the other side, in every thread, after the flag: the acquire load has emptied the caches of the block.
DCP_FN void broadcast_arrived(bool) {}

// ---- packets

// Payload and flag that arrive together. One word of 8 bytes does; nothing larger is sure to arrive at once.
// So a packet of 16 bytes is two such words, the one with the flag behind the other: a trip to the peer and
// back between the two, where one of 8 bytes needs none. A larger one held together in this way would be bulk
// with more flags: there is none. (RCCL's lines of 128 bytes rest on stores of a wave that arrive in order.)
template <int kBytes>
class Packet {
 public:
  static_assert(kBytes == 8 || kBytes == 16);
  using Lanes = arch::Lanes<1>;
  static constexpr int kPayload = kBytes - 4, kPerCall = 1;

  template <class Part>
  static DCP_FN void store(const Lanes&, void* packet, int, uint32_t flag, const Part& part) {
    uint64_t* to = static_cast<uint64_t*>(packet);
    const Words16 words = part(0, 0);
    if constexpr (kBytes == 8) {
      store_relaxed_sys(to, uint64_t(flag) << 32 | words.word[0]);
    } else {
      store_relaxed_sys(to, uint64_t(words.word[1]) << 32 | words.word[0]);
      store_behind_sys(to + 1, uint64_t(flag) << 32 | words.word[2]);
    }
  }

  template <class Put>
  static DCP_FN bool try_load(const Lanes&, const void* packet, int, uint32_t flag, const Put& put) {
    const uint64_t* from = static_cast<const uint64_t*>(packet);
    if constexpr (kBytes == 8) {
      const uint64_t both = load_relaxed_sys(from);
      if (uint32_t(both >> 32) != flag) return false;
      put(0, 0, Words16{{uint32_t(both)}});
    } else {
      const uint64_t high = load_relaxed_sys(from + 1);
      if (uint32_t(high >> 32) != flag) return false;
      // Both go past the caches, so that the one has to be loaded after the other is all that is needed.
      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
      const uint64_t low = load_relaxed_sys(from);
      put(0, 0, Words16{{uint32_t(low), uint32_t(low >> 32), uint32_t(high)}});
    }
    return true;
  }

  static DCP_FN bool bear(const void* packet, int, uint32_t flag) {
    return load_relaxed_sys(static_cast<const uint32_t*>(packet) + kBytes / 4 - 1) == flag;
  }
};
inline constexpr int kMaxPacketBytes = 16;

// ---- time

// The clock that all GPUs of a host share: 100 MHz.
DCP_FN int64_t now_ns() { return int64_t(__builtin_amdgcn_s_memrealtime()) * 10; }

// About `ns`: s_sleep counts 64 clocks, 27 to 43 ns at 1.5 to 2.4 GHz.
DCP_FN void sleep_ns(uint32_t ns) {
  for (uint32_t slept = 0; slept < ns; slept += 32) __builtin_amdgcn_s_sleep(1);
}

// ---- for gpu_numbers.h and gpu_bytes.h

using Words4 = uint32_t __attribute__((ext_vector_type(4), aligned(1)));
// Whether load_16 and store_16 take any address: they do, since the driver runs all kernels in this mode, and
// the compiler counts on that too.
inline constexpr bool kUnaligned16 = true;
// Loads and stores are counted as one: who waits for a load waits for all stores before it, to peers too. So
// as many loads as possible go before the first store, where the end of a row is short too.
inline constexpr bool kLoadsWaitForStores = true;
// 16 bytes of global memory, in one instruction.
DCP_FN Words16 load_16(const void* from) {
  const Words4 v = *global(static_cast<const Words4*>(from));
  return {{v.x, v.y, v.z, v.w}};
}
DCP_FN void store_16(void* to, const Words16& words) {
  *global(static_cast<Words4*>(to)) = {words.word[0], words.word[1], words.word[2], words.word[3]};
}
// The same of 8 bytes.
using Words2 = uint32_t __attribute__((ext_vector_type(2)));
DCP_FN Words16 load_8(const void* from) {
  const Words2 v = *global(static_cast<const Words2*>(from));
  return {{v.x, v.y}};
}
DCP_FN void store_8(void* to, const Words16& words) {
  *global(static_cast<Words2*>(to)) = {words.word[0], words.word[1]};
}
// clang before 20 copies no class from or to an address space: Half and its like go as what they hold.
template <class T>
DCP_FN T load_global(const T* from) {
  if constexpr (__is_class(T)) {
    return __builtin_bit_cast(T, *global(&from->bits));
  } else {
    return *global(from);
  }
}
template <class T>
DCP_FN void store_global(T* to, T value) {
  if constexpr (__is_class(T)) {
    *global(&to->bits) = value.bits;
  } else {
    *global(to) = value;
  }
}

DCP_FN float half_to_float(uint16_t bits) { return float(__builtin_bit_cast(_Float16, bits)); }
// Two numbers, rounded to nearest even, as they lie in memory: `low` first. For bf16 gfx950 has an
// instruction. For gfx942 the rounding is written out (gpu_numbers.h): compilers before LLVM 19 have none.
using Floats2 = float __attribute__((ext_vector_type(2)));
DCP_FN uint32_t pack_half(float low, float high) {
  using Halves2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(Floats2{low, high}, Halves2));
}
DCP_FN uint32_t round_bfloat16(float x);
DCP_FN uint32_t pack_bfloat16(float low, float high) {
#if defined(__gfx950__)
  using BFloats2 = __bf16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(Floats2{low, high}, BFloats2));
#else
  return round_bfloat16(high) << 16 | round_bfloat16(low);
#endif
}

}  // namespace dcp::DCP_NS::arch
