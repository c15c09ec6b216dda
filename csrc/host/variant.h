// One compilation of all ops, as the bindings see it. They are the same for every target: which compilations
// a module carries, only bindings/variants.cpp knows.
#pragma once

#include <span>

#include "ops/a2a_lse_reduce.h"
#include "ops/kv_gather.h"
#include "ops/link_check.h"
#include "ops/query_gather.h"

namespace dcp {

struct Variant {
  const char* name;
  bool (*runs_here)();
  A2aLseReduceFns (*a2a_lse_reduce)();
  QueryGatherFns (*query_gather)();
  KvGatherFns (*kv_gather)();
  LinkCheckFns (*link_check)();
  // "", or why that device runs no kernel of this build.
  void (*device_fault)(int device, char* text, size_t size);
  // What the last launch of this thread that failed has met with; "" where that is not known.
  void (*launch_fault)(char* text, size_t size);
};

// Of this module. The first that the processor runs is the default.
std::span<const Variant> all_variants();
// The variant of that name, or the best for "auto". Null: there is none, or the processor cannot run it.
const Variant* find_variant(const char* name);
// _C_cpu, for example.
const char* module_name();
// What ranks compare: of the sources and the flags.
const char* build_id();
// Those that the build runs under, "address,undefined" for example; "" outside tests.
const char* sanitizers();

}  // namespace dcp
