// core/fp8.h against the definition of both formats, in double: every code, the fp32 at and next to every
// tie, and any fp32. Prints a checksum that must be equal on all variants.
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

struct Format {
  DType dtype;
  int bias;     // of the 4 bits of exponent, before 3 of mantissa
  int largest;  // code
  bool is_fnuz;

  bool is_nan(int code) const { return is_fnuz ? code == 0x80 : (code & 0x7f) == 0x7f; }

  // The value of a code that is not NaN, by the definition.
  double value_of(int code) const {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, 1 - bias - 3) : std::ldexp(8 + mantissa, exponent - bias - 3);
    return code & 0x80 ? -magnitude : magnitude;
  }

  // The nearest code, the even one at a tie; beyond the largest, the largest.
  int nearest(double x) const {
    const double magnitude = std::fmin(std::fabs(x), value_of(largest));
    int best = 0;
    for (int code = 0; code <= largest; ++code) {
      const double here = std::fabs(value_of(code) - magnitude),
                   there = std::fabs(value_of(best) - magnitude);
      if (here < there || (here == there && code % 2 == 0)) best = code;
    }
    if (is_fnuz && best == 0) return 0;
    return (std::signbit(x) ? 0x80 : 0) | best;
  }

  void check(uint32_t bits) const {
    const float x = ns::arch::bit_cast<float>(bits);
    const int got = ns::E4M3(dtype).round(x).bits;
    if (std::isnan(x)) {
      require(is_nan(got), "NaN", bits, got);
    } else {
      require(got == nearest(x), "rounding", bits, got);
    }
    checksum = (checksum ^ uint64_t(got)) * 1099511628211u;
  }

  void check_code(int code) const {
    const ns::E4M3 format(dtype);
    const float x = format.value({uint8_t(code)});
    if (is_nan(code)) {
      require(std::isnan(x), "code of NaN", 0, code);
    } else {
      require(x == value_of(code) && std::signbit(x) == (code >= 0x80), "value", 0, code);
      require(format.round(x).bits == code, "there and back", 0, code);
    }
  }
};

}  // namespace

int main() {
  for (const Format& format :
       {Format{DType::kFloat8E4M3, 7, 0x7e, false}, Format{DType::kFloat8E4M3Fnuz, 8, 0x7f, true}}) {
    for (int code = 0; code < 256; ++code) format.check_code(code);
    // Every exponent, mantissas around each tie of 3 bits, both signs.
    for (uint32_t high = 0; high < 1u << 13; ++high) {
      for (int low : {-2, -1, 0, 1, 2}) {
        format.check((high << 19) + uint32_t(low));
        format.check((high << 19) + (1u << 18) + uint32_t(low));
      }
    }
    uint32_t bits = 1;
    for (int i = 0; i < 1 << 16; ++i) format.check(bits = bits * 1664525 + 1013904223);
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(checksum));
  return 0;
}
