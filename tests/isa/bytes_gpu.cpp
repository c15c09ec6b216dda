// How both GPU targets move bytes (arch/gpu_bytes.h), run on the host, one thread of a group after the other:
// every byte arrives, no other is touched, and what the hardware forbids (16 bytes at an odd address) is not
// asked of it.
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/types.h"

#define DCP_NS gpu
#define DCP_FN inline

namespace dcp::gpu::arch {

struct Cta {
  int rank;
  int thread_rank() const { return rank; }
  int size() const { return 48; }
};
template <int N>
struct Lanes {
  int lane;
  int rank() const { return lane; }
  int size() const { return N; }
};
inline void sleep_ns(uint32_t) {}

struct Words16 {
  uint32_t word[4];
};
bool was_misaligned = false;
int num_stores = 0, num_multicast = 0;
template <class T>
void note(const T* at, int size) {
  was_misaligned |= reinterpret_cast<uint64_t>(at) % size != 0;
}
inline constexpr bool kUnaligned16 = false, kLoadsWaitForStores = false;
Words16 load_16(const void* from) {
  note(from, 16);
  Words16 words;
  memcpy(&words, from, 16);
  return words;
}
void store_16(void* to, const Words16& words) {
  note(to, 16);
  ++num_stores;
  memcpy(to, &words, 16);
}
Words16 load_8(const void* from) {
  note(from, 8);
  Words16 words = {};
  memcpy(&words, from, 8);
  return words;
}
void store_8(void* to, const Words16& words) {
  note(to, 8);
  memcpy(to, &words, 8);
}
void store_multicast(void* to, const Words16& words) {
  store_16(to, words);
  ++num_multicast;
}
template <class T>
T load_constant(const T* from) {
  return *from;
}
template <class T>
T load_global(const T* from) {
  note(from, alignof(T));
  return *from;
}
template <class T>
void store_global(T* to, T value) {
  note(to, alignof(T));
  ++num_stores;
  *to = value;
}

}  // namespace dcp::gpu::arch

#include "arch/gpu_bytes.h"

using namespace dcp;
using namespace dcp::gpu;

int num_failures = 0;
void check(bool ok, const char* what, int to, int from, int size) {
  if (!ok && ++num_failures < 10) std::printf("%s: to %d, from %d, %d bytes\n", what, to, from, size);
}

constexpr int kRegion = 8192, kNumRanks = 3;
struct alignas(64) Region {
  uint8_t bytes[kRegion];
};
Region source, regions[kNumRanks];

void clear() { memset(regions, 0xee, sizeof(regions)); }
bool holds(const Region& region, int to, int from, int size) {
  for (int i = 0; i < kRegion; ++i) {
    const bool inside = i >= to && i < to + size;
    if (region.bytes[i] != (inside ? source.bytes[from + i - to] : 0xee)) return false;
  }
  return true;
}

template <class Threads>
void check_copies(int to, int from, int size) {
  const uint64_t bases[kNumRanks] = {uint64_t(&regions[0]), uint64_t(&regions[1]), uint64_t(&regions[2])};
  const arch::PeerStores stores(nullptr, 0);
  const void* data = source.bytes + from;
  const int num_threads = Threads{0}.size();

  clear();
  for (int t = 0; t < num_threads; ++t) stores.copy(Threads{t}, regions[0].bytes + to, data, size);
  check(holds(regions[0], to, from, size) && holds(regions[1], 0, 0, 0), "copy", to, from, size);

  clear();
  arch::num_stores = 0;
  for (int t = 0; t < num_threads; ++t) stores.copy_to_all(Threads{t}, bases, 1, kNumRanks, to, data, size);
  for (const Region& region : regions) check(holds(region, to, from, size), "copy_to_all", to, from, size);
  const int num_units = kNumRanks * (size / 16 + size % 16);  // at most, however the source is aligned
  check(to % 16 != 0 || arch::num_stores <= num_units, "stores of copy_to_all", to, from, size);

  if (to % 16 != 0 || size % 16 != 0) return;
  clear();
  arch::num_multicast = 0;
  for (int t = 0; t < num_threads; ++t) stores.copy_multicast(Threads{t}, regions[0].bytes + to, data, size);
  check(holds(regions[0], to, from, size), "copy_multicast", to, from, size);
  check(arch::num_multicast == size / 16, "stores of copy_multicast", to, from, size);
}

template <class T>
void check_elements(int to, int from, int num_elements) {
  clear();
  const T* in = reinterpret_cast<const T*>(source.bytes) + from;
  T* out = reinterpret_cast<T*>(regions[0].bytes) + to;
  for (int lane = 0; lane < 32; ++lane) {
    arch::map_elements(arch::Lanes<32>{lane}, out, in, num_elements, [](T x) { return x; });
  }
  const int size = int(sizeof(T));
  check(holds(regions[0], to * size, from * size, num_elements * size), "map_elements", to, from,
        num_elements);
}

int main() {
  for (int i = 0; i < kRegion; ++i) source.bytes[i] = uint8_t(i * 151 + i / 256);
  const int sizes[] = {0, 1, 2, 15, 16, 17, 34, 576, 1152, 1168, 1169, 3072 + 14};
  for (int to = 0; to <= 16; ++to) {
    for (int from = 0; from <= 16; ++from) {
      for (const int size : sizes) {
        check_copies<arch::Lanes<32>>(to, from, size);
        check_copies<arch::Cta>(to, from, size);
      }
      for (const int size : {0, 16, 576}) {
        check_elements<uint8_t>(to, from, size);
        check_elements<uint16_t>(to, from, size);
        check_elements<uint32_t>(to, from, size);
      }
    }
  }
  check(!arch::was_misaligned, "misaligned", 0, 0, 0);
  if (num_failures == 0) std::printf("bytes: all as meant\n");
  return num_failures != 0;
}
