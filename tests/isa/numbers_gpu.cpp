// The arithmetic that both GPU targets share (arch/gpu_numbers.h), run on the host against the CPU target's
// and against double precision. The hardware's part, conversions and 16-byte loads, is played by the CPU
// target.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#define DCP_NS cpu
#define DCP_FN inline
#include "arch/cpu_vec.h"
#undef DCP_NS
#define DCP_NS gpu

namespace dcp::gpu::arch {

struct Words16 {
  uint32_t word[4];
};
bool was_misaligned = false;
inline constexpr bool kUnaligned16 = false;
Words16 load_16(const void* from) {
  was_misaligned |= reinterpret_cast<uint64_t>(from) % 16 != 0;
  Words16 words;
  memcpy(&words, from, 16);
  return words;
}
void store_16(void* to, const Words16& words) {
  was_misaligned |= reinterpret_cast<uint64_t>(to) % 16 != 0;
  memcpy(to, &words, 16);
}
template <class T>
T load_global(const T* from) {
  return *from;
}
template <class T>
void store_global(T* to, T value) {
  *to = value;
}
float half_to_float(uint16_t bits) { return cpu::arch::half_to_float(bits); }
uint32_t pack_half(float low, float high) {
  return uint32_t(cpu::arch::float_to_half(high)) << 16 | cpu::arch::float_to_half(low);
}
uint32_t pack_bfloat16(float low, float high) {
  return uint32_t(cpu::arch::float_to_bfloat16(high)) << 16 | cpu::arch::float_to_bfloat16(low);
}

}  // namespace dcp::gpu::arch

#include "arch/gpu_numbers.h"

using namespace dcp;

int num_failures = 0;
void check(bool ok, const char* what, double x) {
  if (!ok && ++num_failures < 10) std::printf("%s at %a\n", what, x);
}

// Out of every 16-bit row at every place: what goes in as T comes out as T, and the floats between are exact.
template <class T>
void check_rows(const char* name) {
  constexpr int kElements = gpu::arch::RowVec<T>::kElements;
  alignas(16) T row[3 * kElements], copy[3 * kElements];
  for (int first = 0; first < 0x7c00 - kElements; first += 7) {
    for (int i = 0; i < 3 * kElements; ++i) {
      row[i] = gpu::arch::from_float<T>(gpu::arch::to_float(BFloat16{uint16_t((i & 1) << 15 | (first + i))}));
    }
    for (int at = 0; at < kElements; ++at) {
      memset(copy, 0, sizeof(copy));
      const auto vec = gpu::arch::RowVec<T>::load(row + at);
      vec.store(copy + at);
      check(memcmp(copy + at, row + at, sizeof(T) * kElements) == 0, name, first);
      for (int i = 0; i < kElements; ++i)
        check(vec.v[i] == gpu::arch::to_float(row[at + i]), name, first + i);
    }
  }
  check(!gpu::arch::was_misaligned, name, 0);
}

int main() {
  double worst = 0;
  for (uint32_t bits = 0; bits < 0x43400000; bits += 2557) {  // 0 .. 192
    const float x = -gpu::arch::bit_cast<float>(bits);
    const float two = gpu::arch::exp2(x), expected = cpu::arch::exp2(x);
    check(memcmp(&two, &expected, 4) == 0, "exp2", x);
  }
  check(gpu::arch::exp2(-INFINITY) == 0.0f, "exp2", -INFINITY);
  for (uint32_t bits = 0x3f800000; bits < 0x45800000; bits += 61) {  // 1 .. 4096
    const float x = gpu::arch::bit_cast<float>(bits);
    const double exact = std::log2(double(x));
    const double ulp = std::ldexp(1.0, exact == 0 ? -126 : std::ilogb(exact) - 23);
    const double error = std::fabs(gpu::arch::log2(x) - exact) / ulp;
    if (error > worst) worst = error;
    check(error < 1.6, "log2", x);
  }
  check(gpu::arch::log2(1.0f) == 0.0f && gpu::arch::log2(0x1p-126f) == -126.0f, "log2", 1);
  // Around every bfloat16, and every NaN of one significant bit: as the CPU target does, which torch is
  // compared with.
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = gpu::arch::bit_cast<float>(high << 16 | low);
      const uint32_t rounded = gpu::arch::round_bfloat16(x);
      const bool is_nan = (rounded & 0x7f80) == 0x7f80 && (rounded & 0x7f) != 0;
      check(x != x ? is_nan : rounded == cpu::arch::float_to_bfloat16(x), "bfloat16", x);
    }
  }
  check_rows<float>("float");
  check_rows<Half>("Half");
  check_rows<BFloat16>("BFloat16");
  std::printf("log2: at most %.3f ulp\n", worst);
  return num_failures != 0;
}
