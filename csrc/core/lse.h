// Log-sum-exp arithmetic of the merge, in fp32. Its error is bounded in docs/protocol.md ("Exactness").
#pragma once

#include "arch/target.h"

namespace dcp::DCP_NS {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Producers disagree on the LSE of a query without keys: -inf (FlashInfer), +inf (FlashAttention 2,
// FlashMLA), NaN (uninitialised). All mean empty; -inf is the only one that travels.
DCP_FN bool is_finite(float x) { return arch::abs(x) < __builtin_inff(); }

DCP_FN float load_lse(const void* lse, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return arch::to_float(arch::pointer_to(static_cast<const Half*>(lse))[index]);
    case DType::kBFloat16:
      return arch::to_float(arch::pointer_to(static_cast<const BFloat16*>(lse))[index]);
    default:
      return arch::pointer_to(static_cast<const float*>(lse))[index];
  }
}

// base^delta for delta = lse - max <= 0. The subtraction is done in the producer's base, so that only base e
// pays a rounding for the change to powers of 2; log2_of_base is 1 for the other.
DCP_FN float lse_exp(float delta, float log2_of_base) { return arch::exp2(delta * log2_of_base); }

DCP_FN float merged_lse(float max, float sum, LseBase base) {
  const float log2_sum = arch::log2(sum);
  return base == LseBase::kE ? arch::fma(log2_sum, kLn2, max) : max + log2_sum;
}

}  // namespace dcp::DCP_NS
