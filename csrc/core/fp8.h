// float8 e4m3 from and to fp32, in integer steps that every target does alike.
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

// One of the two formats. OCP's has a bias of 7, NaN at both ends (0x7f, 0xff), -0, and numbers up to 448.
// FNUZ has a bias of 8, one NaN where -0 would be (0x80), and numbers up to 240. That is a few constants'
// difference, so a kernel is told at run time: two of each kernel would cost more than the registers that
// hold them.
class E4M3 {
 public:
  explicit DCP_FN E4M3(DType dtype) : E4M3(dtype == DType::kFloat8E4M3Fnuz) {}

  // Rounds to nearest even; beyond the largest number saturates, infinity too; NaN stays NaN.
  DCP_FN Float8E4M3 round(float x) const {
    // 2^-6, of OCP. FNUZ's is 2^-7, but its numbers up to here are multiples of the same step.
    constexpr uint32_t kSmallestNormal = 0x3c800000;
    const uint32_t bits = arch::bit_cast<uint32_t>(x);
    uint32_t magnitude = bits & 0x7fffffff;
    const bool is_nan = magnitude > 0x7f800000;
    magnitude = magnitude < largest_ ? magnitude : largest_;
    // Keeps 3 bits of mantissa, and changes the exponent's bias.
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - rebias_;
    // Multiples of the step: what a sum with 2^23 of them leaves in its last bits, rounded by the addition.
    const float shifted = arch::bit_cast<float>(magnitude) + steps_;
    const uint32_t subnormal = arch::bit_cast<uint32_t>(shifted) - arch::bit_cast<uint32_t>(steps_);
    const uint32_t code = is_nan ? nan_ : magnitude < kSmallestNormal ? subnormal : normal;
    return {uint8_t(code | (bits >> 24 & (code + keeps_sign_) & 0x80))};
  }

  // Exact.
  DCP_FN float value(Float8E4M3 x) const {
    const uint32_t code = x.bits & 0x7f;
    const uint32_t normal = (code << 20) + (rebias_ << 20);
    // Not by a subnormal fp32, which a caller's mode may flush to zero.
    const uint32_t subnormal = arch::bit_cast<uint32_t>(float(int32_t(code)) * step_);
    const uint32_t magnitude = code < 8 ? subnormal : normal;
    const bool is_nan = (x.bits & nan_bits_) == nan_;
    return arch::bit_cast<float>(uint32_t(x.bits & 0x80) << 24 | (is_nan ? 0x7fc00000 : magnitude));
  }

 private:
  explicit DCP_FN E4M3(bool is_fnuz)
      : largest_(is_fnuz ? 0x43700000 : 0x43e00000),  // 240, 448
        rebias_(uint32_t(is_fnuz ? 127 - 8 : 127 - 7) << 3),
        nan_(is_fnuz ? 0x80 : 0x7f),
        nan_bits_(is_fnuz ? 0xff : 0x7f),
        keeps_sign_(is_fnuz ? 0x7f : 0x80),
        step_(is_fnuz ? 0x1p-10f : 0x1p-9f),
        steps_(is_fnuz ? 0x1p13f : 0x1p14f) {}

  uint32_t largest_;     // fp32
  uint32_t rebias_;      // in codes
  uint32_t nan_;         // its code,
  uint32_t nan_bits_;    // in these bits
  uint32_t keeps_sign_;  // added to a code, sets bit 7 where the sign is kept: at 0 too, or not
  float step_;           // between subnormal numbers
  float steps_;          // 2^23 of them
};

}  // namespace dcp::DCP_NS
