// The compilations of every op that this module carries, and which of them run here. setup.py says which
// there are: -DDCP_VARIANTS(X)=X(v4) X(baseline), for example.
#pragma once

#include "arch/runs_here.h"
#include "host/variant.h"

namespace dcp {

#define DCP_DECLARE_OPS(ns)              \
  namespace ns {                         \
  A2aLseReduceFns a2a_lse_reduce();      \
  QueryGatherFns query_gather();         \
  KvGatherFns kv_gather();               \
  LinkCheckFns link_check();             \
  void device_fault(int, char*, size_t); \
  void launch_fault(char*, size_t);      \
  }
DCP_VARIANTS(DCP_DECLARE_OPS)
#undef DCP_DECLARE_OPS

#define DCP_VARIANT(ns)        \
  Variant{#ns,                 \
          &runs_here::ns,      \
          &ns::a2a_lse_reduce, \
          &ns::query_gather,   \
          &ns::kv_gather,      \
          &ns::link_check,     \
          &ns::device_fault,   \
          &ns::launch_fault},
inline constexpr Variant kVariants[] = {DCP_VARIANTS(DCP_VARIANT)};
#undef DCP_VARIANT

}  // namespace dcp
