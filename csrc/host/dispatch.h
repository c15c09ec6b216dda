// The compilations of every op that this module carries, and which of them run here.
#pragma once

#include "host/variant.h"

namespace dcp {

#define DCP_DECLARE_OPS(ns)              \
  namespace ns {                         \
  A2aLseReduceFns a2a_lse_reduce();      \
  QueryGatherFns query_gather();         \
  KvGatherFns kv_gather();               \
  LinkCheckFns link_check();             \
  void device_fault(int, char*, size_t); \
  }
#if defined(DCP_HAVE_CUDA)
DCP_DECLARE_OPS(cuda)
#endif
#if defined(DCP_HAVE_V4_BF16)
DCP_DECLARE_OPS(v4_bf16)
#endif
#if defined(DCP_HAVE_V4)
DCP_DECLARE_OPS(v4)
#endif
#if defined(DCP_HAVE_V3)
DCP_DECLARE_OPS(v3)
#endif
#if defined(DCP_HAVE_BASELINE)
DCP_DECLARE_OPS(baseline)
#endif
#undef DCP_DECLARE_OPS

#if defined(DCP_HAVE_V4_BF16) || defined(DCP_HAVE_V4) || defined(DCP_HAVE_V3)
// The x86-64 psABI levels; __builtin_cpu_supports also asks the OS whether it saves the wide registers.
inline bool runs_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("movbe");
}
inline bool runs_v4() {
  return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
inline bool runs_v4_bf16() { return runs_v4() && __builtin_cpu_supports("avx512bf16"); }
#endif

#define DCP_VARIANT(ns, runs_here) \
  {#ns, runs_here, &ns::a2a_lse_reduce, &ns::query_gather, &ns::kv_gather, &ns::link_check, &ns::device_fault}
inline constexpr Variant kVariants[] = {
#if defined(DCP_HAVE_CUDA)
    DCP_VARIANT(cuda, [] { return true; }),
#endif
#if defined(DCP_HAVE_V4_BF16)
    DCP_VARIANT(v4_bf16, runs_v4_bf16),
#endif
#if defined(DCP_HAVE_V4)
    DCP_VARIANT(v4, runs_v4),
#endif
#if defined(DCP_HAVE_V3)
    DCP_VARIANT(v3, runs_v3),
#endif
#if defined(DCP_HAVE_BASELINE)
    DCP_VARIANT(baseline, [] { return true; }),
#endif
};
#undef DCP_VARIANT

}  // namespace dcp
