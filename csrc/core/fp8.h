// float8 e4m3 (OCP, finite) from and to fp32, in integer steps that every target does alike.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// Rounds to nearest even; beyond +-448 saturates, infinity too; NaN stays NaN.
DCP_FN Float8E4M3 to_e4m3(float x) {
  constexpr uint32_t kLargest = 0x43e00000;         // 448
  constexpr uint32_t kSmallestNormal = 0x3c800000;  // 2^-6
  const uint32_t bits = arch::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  uint32_t magnitude = bits & 0x7fffffff;
  const bool is_nan = magnitude > 0x7f800000;
  magnitude = magnitude < kLargest ? magnitude : kLargest;
  // Keeps 3 bits of mantissa, and takes the exponent's bias from 127 to 7.
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  // Multiples of 2^-9: what a sum with 2^14 leaves in its last bits, rounded by the addition itself.
  const float shifted = arch::bit_cast<float>(magnitude) + 16384.0f;
  const uint32_t subnormal = arch::bit_cast<uint32_t>(shifted) - 0x46800000;
  const uint32_t code = is_nan ? 0x7f : magnitude < kSmallestNormal ? subnormal : normal;
  return {uint8_t(sign | code)};
}

// Exact.
DCP_FN float from_e4m3(Float8E4M3 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, code = x.bits & 0x7f;
  const uint32_t normal = code == 0x7f ? 0x7fc00000 : (code << 20) + (120u << 23);
  // Not by a subnormal fp32, which a caller's mode may flush to zero.
  const uint32_t subnormal = arch::bit_cast<uint32_t>(float(int32_t(code)) * 0x1p-9f);
  return arch::bit_cast<float>(sign | (code < 8 ? subnormal : normal));
}

}  // namespace dcp::DCP_NS
