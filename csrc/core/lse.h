// Log-sum-exp arithmetic of the merge, in fp32. Its error is bounded in docs/protocol.md ("Exactness").
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Producers disagree on the LSE of a query without keys: -inf (FlashInfer), +inf (FlashAttention 2, FlashMLA), NaN
// (uninitialised). All mean empty; -inf is the only one that travels.
DCP_FN bool is_finite(float x) { return arch::abs(x) < __builtin_inff(); }
DCP_FN float sanitize_lse(float lse) { return is_finite(lse) ? lse : -__builtin_inff(); }

DCP_FN float load_lse(const void* lse, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(lse)[index];
  const uint16_t bits = static_cast<const uint16_t*>(lse)[index];
  return dtype == DType::kFloat16 ? arch::half_to_float(bits) : arch::bfloat16_to_float(bits);
}

// exponent(delta) for delta = lse - max <= 0: the subtraction is done in the producer's base, so that base 2 costs no
// rounding and base e costs one.
DCP_FN float lse_exp(float delta, LseBase base) { return arch::exp2(base == LseBase::kE ? delta * kLog2E : delta); }

DCP_FN float merged_lse(float max, float sum, LseBase base) {
  const float log2_sum = arch::log2(sum);
  return base == LseBase::kE ? arch::fma(log2_sum, kLn2, max) : max + log2_sum;
}

}  // namespace dcp::DCP_NS
