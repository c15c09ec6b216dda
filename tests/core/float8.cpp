// core/fp8.h against the format's definition, in double: every code, and the fp32
// at and next to every tie. Prints a checksum that must be equal on all variants.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "core/fp8.h"

namespace {

using namespace dcp;
namespace ns = dcp::DCP_NS;

uint64_t checksum = 1469598103934665603u;

void require(bool holds, const char* what, uint32_t bits, int got) {
  if (holds) return;
  std::fprintf(stderr, "%s: fp32 bits %08x, got %02x\n", what, bits, got);
  std::exit(1);
}

// The value of a code that is not NaN, by the definition: 4 bits of exponent with bias 7, 3 of mantissa.
double value_of(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
  return code & 0x80 ? -magnitude : magnitude;
}

// The nearest code, the even one at a tie; beyond the largest, the largest.
int nearest(double x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  int best = 0;
  for (int code = 0; code < 0x7f; ++code) {
    const double here = std::fabs(value_of(code) - std::fabs(x)),
                 there = std::fabs(value_of(best) - std::fabs(x));
    if (here < there || (here == there && code % 2 == 0)) best = code;
  }
  return sign | best;
}

void check(uint32_t bits) {
  const float x = ns::arch::bit_cast<float>(bits);
  const int got = ns::to_e4m3(x).bits;
  if (std::isnan(x)) {
    require((got & 0x7f) == 0x7f, "NaN", bits, got);
  } else {
    require(got == nearest(x), "rounding", bits, got);
  }
  checksum = (checksum ^ uint64_t(got)) * 1099511628211u;
}

}  // namespace

int main() {
  for (int code = 0; code < 256; ++code) {
    const float x = ns::from_e4m3({uint8_t(code)});
    if ((code & 0x7f) == 0x7f) {
      require(std::isnan(x), "code of NaN", 0, code);
    } else {
      require(x == value_of(code) && std::signbit(x) == (code >= 0x80), "value", 0, code);
      require(ns::to_e4m3(x).bits == code, "there and back", 0, code);
    }
  }
  // Every exponent, mantissas around each tie of 3 bits, both signs.
  for (uint32_t high = 0; high < 1u << 13; ++high) {
    for (int low : {-2, -1, 0, 1, 2}) {
      check((high << 19) + uint32_t(low));
      check((high << 19) + (1u << 18) + uint32_t(low));
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(checksum));
  return 0;
}
