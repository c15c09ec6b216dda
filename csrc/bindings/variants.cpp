// Which compilations of the ops this module carries; the one file, with module.cpp, that differs between
// targets.
#include <cstring>

#include "host/dispatch.h"

namespace dcp {

std::span<const Variant> all_variants() { return kVariants; }

const Variant* find_variant(const char* name) {
  for (const Variant& variant : kVariants) {
    if (variant.runs_here() && (std::strcmp(name, "auto") == 0 || std::strcmp(name, variant.name) == 0)) {
      return &variant;
    }
  }
  return nullptr;
}

}  // namespace dcp
